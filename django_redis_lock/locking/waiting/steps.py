"""How a thread or a task waits for a lock: first in memory, behind the others of its process; then,
as its process's only one, in Redis, with a blocking pop on the lock's list of grants.

Redis serves blocked clients in the order in which they came and forgets those whose connection is
gone: that is the whole fair queue. So the pop stays open for the entire wait, without a timeout; a
waiter that timed out and asked again would lose its place. To end a wait, LEAVE pushes an element
to a second list that the same pop listens to; what the pop returns then says beyond doubt whether a
grant came first.
"""

from __future__ import annotations

import math
from types import EllipsisType

from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...clock import time
from ...keeper import release_later
from ...protocol import (
    LAST_TRY_SECONDS,
    AcquireRequest,
    Acquisition,
    Call,
    Refused,
    Reply,
    Taken,
    parse_acquire,
    printable,
)
from ...steps import Step, Steps
from ...threads import get_logger
from ...transport import Client, is_outage, may_have_run, note_sent, pack_words
from .queue import PopReply, WaitQueue, WakeEvent, join

logger = get_logger("django_redis_lock.waiting")

#: Pauses between attempts to reach a server that is away, in seconds.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 1.0
#: A blocking pop that ends sooner, without a grant, was cut short; after so many in a row the wait
#: goes on by polling.
MIN_POP_SECONDS, MAX_CUT_SHORT = 1.0, 5
#: No reply: the blocking pop may not have ended.
POPPING = ...


class MayNotBlock(Exception):
    """Redis has refused the blocking pop, or there is no socket on which to wait for its reply."""


class Waiter:
    """One call of ``acquire`` that waits.

    Attributes:
        queue: the queue it is a member of, once it has joined one.
        turn: set when it is this member's turn; None for the first member of a new queue.
    """

    turn: WakeEvent | None = None

    def __init__(self, client: Client, request: AcquireRequest, queue: WaitQueue) -> None:
        self._client = client
        self._request = request
        #: Of the last blocking pop.
        self._reply: PopReply | EllipsisType = None
        #: Whether Redis may have carried out something that was not answered.
        self._unanswered = False
        #: How many pops in a row were cut short, and the seconds until the next request.
        self._cut_short, self._pause = 0, FIRST_PAUSE_SECONDS
        self.queue = queue
        self.asked_at, self.outage_patience = request.asked_at, request.outage_patience

    def _run(self, call: Call, until: float | None) -> Step[Reply]:
        """What a call returns, within so many seconds."""
        raise NotImplementedError

    def _sleep(self, seconds: float) -> Step[None]:
        raise NotImplementedError

    def _new_turn(self) -> WakeEvent:
        raise NotImplementedError

    @property
    def _name(self) -> str:
        return printable(self._request.keys.lock)

    # -- steps -------------------------------------------------------------------------------

    def _wait(self, refused: Refused | None) -> Steps[Acquisition | None]:
        """Join the queue and wait until the lock is ours, or until the request's deadline."""
        mine = self.queue
        join(self, mine, self._new_turn)
        if refused is not None and self.queue is mine:
            mine.note_refused(refused)
        turn = self.turn
        while turn is not None and not (yield turn.wait(self._request.left())):
            if self._request.deadline is not None:
                return None
        return (yield from self._wait_through_outages())

    def _acquire_or_register(self) -> Steps[Acquisition | None]:
        """Take the lock if it is free, else register the queue."""
        sent_at = time.monotonic()
        call, until = self.queue.acquire_call(self._request), self._request.reply_until()
        reply = parse_acquire((yield self._run(call, until)), sent_at)
        self._request = self._request.with_margin(sent_at)
        if isinstance(reply, Taken):
            return self.queue.note_taken(self._request, reply)
        self.queue.note_refused(reply)
        return None

    def _wait_through_outages(self) -> Steps[Acquisition | None]:
        queue, away_since = self.queue, math.inf
        while True:
            try:
                if not queue.registered:
                    acquired = yield from self._acquire_or_register()
                    if acquired is not None or self._request.left() <= 0:
                        return acquired
                away_since = math.inf
                if self._cut_short < MAX_CUT_SHORT:
                    acquired = yield from self._pop()
                    if acquired is not None or (queue.registered and self._request.left() <= 0):
                        return acquired
                    self._pause = min(self._pause, max(self._request.sleep, FIRST_PAUSE_SECONDS))
                else:
                    self._pause = max(self._request.sleep, 0.001)
            except Exception as error:
                outage = yield from self._note_error(error)
                away_since = min(away_since, time.monotonic())
                waits_on = time.monotonic() < away_since + self.outage_patience
                # At the deadline, one more request: the keeper may have ended the pop just then.
                over = self._request.left() <= 0 and not queue.registered
                if not outage or over or not waits_on:
                    note_sent(error, self._unanswered)
                    raise
            # The lock may be free by then, and the server may not know of us any more.
            queue.registered = False
            yield self._sleep(min(self._pause, self._request.left()))
            self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)

    def _note_error(self, error: Exception) -> Steps[bool]:
        """Whether ``error`` may pass by itself."""
        outage = is_outage(error)
        if outage:
            yield self.queue.disconnect()
            logger.info("Waiting for %(lock)s: %(error)s", {"lock": self._name, "error": error})
        self.queue.server.on_error(error)
        self._unanswered = self._unanswered or may_have_run(error)
        return outage

    def _pop(self) -> Steps[Acquisition | None]:
        """One blocking pop: the lock, or None. A proxy that ends it at once may answer all else, so
        that is no outage, but after some such pops the wait goes on by polling."""
        began = time.monotonic()
        try:
            acquired = yield from self._wait_in_redis()
            if acquired is not None:
                return acquired
        except MayNotBlock:
            self._cut_short = MAX_CUT_SHORT
            yield self.queue.disconnect()
        except Exception as error:
            if not is_outage(error) or time.monotonic() - began >= MIN_POP_SECONDS:
                self._cut_short, self._pause = 0, FIRST_PAUSE_SECONDS
                raise
            yield from self._note_error(error)
            self.queue.registered = False
        if time.monotonic() - began >= MIN_POP_SECONDS:
            self._cut_short, self._pause = 0, FIRST_PAUSE_SECONDS
        else:
            self._cut_short += 1
        if self._cut_short >= MAX_CUT_SHORT:
            logger.info("No blocking pop stays open; polling for %(lock)s", {"lock": self._name})
        return None

    def _wait_in_redis(self) -> Steps[Acquisition | None]:
        request, queue = self._request, self.queue
        yield queue.connect(self._client)
        self._reply = POPPING
        yield queue.begin_pop(pack_words(b"BLPOP", request.keys.grants, request.wake, b"0"))
        while not (yield queue.pop_ended(left := request.left())):
            if left <= 0:
                return (yield from self._last_try())
        return (yield from self._take_grant())

    def _take_grant(self) -> Steps[Acquisition | None]:
        """What the pop has returned: the lock, or None (it was ended, or its grant is over)."""
        request, queue = self._request, self.queue
        try:
            self._reply = reply = queue.reply()
        except ResponseError as error:  # Of this command alone: ACQUIRE was answered.
            if not is_outage(error):
                raise MayNotBlock from error
            raise
        received = queue.received(request, reply)
        if received is None:
            return None
        grant = received.grant
        claims = [(grant.token, b"", grant.place)]
        if request.chosen and grant.place > request.limit:  # ACQUIRE does not find it there.
            claims.append((request.token, request.attempt, grant.place))
        request.may_hold.extend(claims)
        try:
            pending = yield queue.send_take_grant(received.call, request.until(time.monotonic()))
            if received.until is not None:
                arrived_at, until = received.arrived_at, received.until
                return request.acquired_by_grant(grant, arrived_at, until, pending)
            until = yield pending.confirmed()
            if until is None:
                raise RedisTimeoutError("the connection broke while a grant was taken")
        except Exception:
            # Redis may carry it out all the same; then the lock would have no holder.
            for claim in claims:
                self._release_later(claim)
            raise
        return queue.note_taken_grant(request, received, until)

    def _last_try(self) -> Steps[Acquisition | None]:
        queue, sent_at = self.queue, time.monotonic()
        leave = self._request.leave_call(queue.id_to_unregister(), try_again=True)
        try:
            reply = yield self._run(leave, time.monotonic() + LAST_TRY_SECONDS)
        except RedisTimeoutError:
            # It may still be carried out and take the lock for no holder; or it was never sent.
            self._release_later((self._request.token, self._request.attempt, 1))
            queue.may_be_registered_again()
            yield queue.disconnect()
            return None
        taken = parse_acquire(reply, sent_at)
        acquired = queue.note_taken(self._request, taken) if isinstance(taken, Taken) else None
        if not (yield queue.pop_ended(LAST_TRY_SECONDS)):
            yield queue.disconnect()  # Dead without a word; a grant lost on it ends by itself.
            return acquired
        if acquired is None:
            return (yield from self._take_grant())
        self._reply = reply = queue.reply()
        self.release_grant_in(reply)
        return acquired

    # -- what must be released ---------------------------------------------------------------
    #
    # A grant is in ``_reply`` once it is read, and in ``may_hold`` before TAKE_GRANT is sent. After
    # an interrupt ``wait`` of a subclass gives back the one, ``_abandon`` the other.

    def release_grant_in(self, reply: PopReply) -> None:
        """Release the grant that a pop has returned in ``reply``, if it has."""
        if (grant := self.queue.grant_in(reply)) is not None:
            self._release_later((grant.token, b"", grant.place))

    def _release_later(self, claim: tuple[bytes, bytes, int]) -> None:
        """Have the keeper release what ``claim``, one of ``may_hold``, has or may yet get."""
        request = self._request
        release_later(self.queue.server, request.release_call(*claim), request.lifetime, late=True)
        noted = self._request.may_hold
        noted[:] = [each for each in noted if each != claim]
