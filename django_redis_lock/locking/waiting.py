"""How a thread or a task waits for a lock: first in memory, behind the others of its process; then,
as its process's only one, in Redis, with a blocking pop on the lock's list of grants. The threads
of a process form one queue, the tasks of each event loop another.

Redis serves blocked clients in the order in which they came and forgets those whose connection is
gone: that is the whole fair queue. So the pop stays open for the entire wait, without a timeout; a
waiter that timed out and asked again would lose its place. To end a wait, LEAVE pushes an element
to a second list that the same pop listens to; what the pop returns then says beyond doubt whether a
grant came first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol, TypeAlias

from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .. import history
from ..clock import time
from ..keeper import Job, SentOnce, keeper, release_later
from ..protocol import (
    LAST_TRY_SECONDS,
    MAX_GRANT_AGE_SECONDS,
    WATCH_INTERVAL_SECONDS,
    AcquireRequest,
    Acquisition,
    Call,
    Clock,
    Grant,
    PendingLifetime,
    Refused,
    Reply,
    Taken,
    Vanished,
    parse_acquire,
    parse_grant,
    printable,
    waiter_id,
)
from ..protocol.holder_scripts import holders_call, parse_holders
from ..steps import Step, Steps
from ..threads import Mutex, after_fork, free_after_fork, get_logger
from ..transport import Client, Server, is_outage, may_have_run, note_sent, pack_words
from ..transport.hints import explained

if TYPE_CHECKING:
    import asyncio

    from ..protocol import Owner

#: Waiters with different limits do not wait for the same places.
QueueKey: TypeAlias = "tuple[Server, bytes, asyncio.AbstractEventLoop | None, int]"

logger = get_logger("django_redis_lock.waiting")

#: Seconds after which the log says that a caller still waits; then at each doubling.
WARN_AFTER_SECONDS = 30.0
#: Pauses between attempts to reach a server that is away, in seconds.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 1.0
#: A blocking pop that ends sooner, without a grant, was cut short; after so many in a row the wait
#: goes on by polling.
MIN_POP_SECONDS, MAX_CUT_SHORT = 1.0, 5
#: No reply: the blocking pop may not have ended.
POPPING = ...

#: The reply to a blocking pop: the list and its element; None if an operator has ended the pop.
PopReply = Sequence[bytes] | None


class WakeEvent(Protocol):
    """An event for one waiter."""

    def set(self) -> None: ...
    def wait(self, seconds: float) -> Step[bool]: ...


#: The queues of this process.
queues: dict[QueueKey, WaitQueue] = {}
#: Reentrant: ``leave`` calls ``dissolve`` while it holds it.
_mutex = free_after_fork(Mutex())


class WaitQueue:
    """The waiters of this process for one lock on one server, in the order of their arrival.

    The queue is registered in Redis under one waiter id, and its first member waits there. A queue
    closes when its last member has the lock; a later caller starts another queue under another id,
    so that removing the old id from the register can never hide the new one.

    Args:
        request: the first member's. If it has a waiter id, ACQUIRE was sent with that id.

    Attributes:
        id: the waiter id.
        node: the server where the first member waits.
        registered: whether ACQUIRE has registered the id, so that a release makes a grant for it.
        connection: where the first member's blocking pop is sent.
        waiters: its members, each with its ``queue`` and its ``turn``; see ``Waiter``.
    """

    connection: object = None

    #: The queue is empty: let its connection go.
    end: Callable[[], None]
    #: End the blocking pop from the keeper's thread, as if its connection had broken.
    cut_pop: Callable[[], None]
    #: Have a connection of this client for blocking pops, with nothing left to read on it.
    connect: Callable[[Client], Step[None]]
    #: Send a blocking pop, the packed command.
    begin_pop: Callable[[bytes], Step[None]]
    #: Whether the pop ends within so many seconds.
    pop_ended: Callable[[float], Step[bool]]
    #: What the pop has returned, after it ended.
    reply: Callable[[], PopReply]
    #: Send TAKE_GRANT, whose reply, which gives the lock a lifetime until then, comes later.
    send_take_grant: Callable[[Call, float], Step[PendingLifetime]]
    #: Close the connection.
    disconnect: Callable[[], Step[None]]

    def __init__(
        self,
        server: Server,
        request: AcquireRequest,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.server = server
        self.request = request
        self.key = (server, request.keys.lock, loop, request.limit)
        self.loop = loop
        self.id = request.waiter or waiter_id()
        self.node: Server | None = None
        self.registered = False
        #: In the end; False if the next call does it. The id may be registered.
        self._must_unregister = bool(request.waiter)
        self.clock: Clock | None = None
        self.waiters: deque[Waiter] = deque()
        self._watch: QueueWatch | None = None

    # -- members -----------------------------------------------------------------------------

    def leave(self, waiter: Waiter) -> None:
        """``waiter`` leaves. Called again, it completes what an interrupt has cut short."""
        with _mutex:
            if waiter in self.waiters:
                self.waiters.remove(waiter)
            if self.waiters:
                if self.waiters[0].turn is not None:
                    self.waiters[0].turn.set()
                return
            self.dissolve()
        self.end()

    def abandon(self, waiter: Waiter) -> None:
        """As ``leave``, for a waiter that was interrupted at any point: the call that was to
        unregister the queue may not have been sent."""
        self._must_unregister = self._must_unregister or self.registered
        self.leave(waiter)

    def is_led_by(self, waiter: Waiter) -> bool:
        with _mutex:
            return bool(self.waiters) and self.waiters[0] is waiter

    @property
    def closed(self) -> bool:
        """Whether no new waiter joins this queue any more."""
        return queues.get(self.key) is not self

    def dissolve(self) -> None:
        with _mutex:
            if not self.closed:
                del queues[self.key]
        if self._watch is not None:
            keeper().discard(self._watch)
        if self._must_unregister:  # If this fails, the id expires within seconds.
            keeper().add(SentOnce(self.server, self.request.unregister_call(self.id)))
            self._must_unregister = False

    def id_to_unregister(self) -> bytes:
        """The first member stops waiting. If no other waits, this closes the queue; returns the id
        that the next call must unregister then."""
        with _mutex:
            if len(self.waiters) > 1 or self.closed:
                return b""
            del queues[self.key]
            self._must_unregister = False
            return self.id

    # -- what the server has answered --------------------------------------------------------

    def acquire_call(self, request: AcquireRequest) -> Call:
        """The call that takes the lock, or else registers the queue."""
        self._must_unregister = True
        return request.acquire_call(self.id)

    def note_refused(self, refused: Refused) -> None:
        """ACQUIRE, sent with this queue's id, has not got the lock: the queue is registered."""
        self.registered = self._must_unregister = True
        if self._watch is None:
            self._watch = QueueWatch(self)
        self._watch.due = self.next_look(refused.pttl, refused.clock)
        keeper().add(self._watch)

    def note_taken(self, request: AcquireRequest, taken: Taken) -> Acquisition:
        if taken.vanished is not None:
            history.note_vanished(self.server, request.keys, taken.vanished, request.subject)
        return request.acquired_by_reply(taken, contended=True)

    def next_look(self, pttl: int, clock: Clock) -> float:
        """When the keeper looks at the lock again, in monotonic seconds: ``pttl`` is how long the
        present holder's lifetime still is."""
        self.clock = clock
        left = pttl / 1000 if pttl >= 0 else math.inf
        return time.monotonic() + min(WATCH_INTERVAL_SECONDS, left)

    def may_be_registered_again(self) -> None:
        """The id may be registered again after it was removed: by the keeper, or because the call
        that was to remove it was not answered."""
        with _mutex:
            self._must_unregister = True
            if not self.waiters:
                self.dissolve()

    def grant_in(self, reply: PopReply) -> Grant | None:
        """The grant that the blocking pop has returned. None if LEAVE or an operator (CLIENT
        UNBLOCK) has ended the pop."""
        if not reply or reply[0] != self.request.keys.grants:
            return None
        return parse_grant(reply[1])

    def believed_until(
        self, request: AcquireRequest, grant: Grant, arrived_at: float
    ) -> float | None:
        """The deadline of a grant that came in at ``arrived_at`` (both monotonic), if it is fresh
        enough to be believed before TAKE_GRANT is answered."""
        age = self.clock.age(grant.fence) if self.clock else math.inf
        max_age = min(MAX_GRANT_AGE_SECONDS, request.grant_timeout / 4)
        if abs(age) >= max_age or request.attempt or request.replicas:
            return None  # Only its full lifetime counts.
        until = arrived_at + request.grant_timeout - max(age, 0.0)
        return min(until, request.until(arrived_at))


@after_fork
def _forget_queues() -> None:
    """They are the parent's. Its calls that the child finalizes leave none, and send nothing."""
    for queue in queues.values():
        queue.waiters.clear()
        queue.registered = queue._must_unregister = False
        queue.connection = None
    queues.clear()


def unregister(server: Server, request: AcquireRequest) -> None:
    """Have the keeper unregister the waiter id of ``request``, unless a queue goes on with it."""
    if not any(queue.id == request.waiter for queue in list(queues.values())):
        keeper().add(SentOnce(server, request.unregister_call(request.waiter)))


class QueueWatch(Job):
    """Keeps a queue registered, and makes the grant for a holder that has vanished."""

    def __init__(self, queue: WaitQueue) -> None:
        super().__init__(queue.server, time.monotonic() + WATCH_INTERVAL_SECONDS)
        self._queue = queue
        self._untaken = 0
        self._warns_after = WARN_AFTER_SECONDS

    def call(self, now: float) -> Call | None:
        if self._queue.loop is not None and self._queue.loop.is_closed():
            self._queue.dissolve()  # Its tasks will never run again.
            self._queue.cut_pop()
            return None
        return self._queue.request.watch_call(self._queue.id, len(self._queue.waiters))

    def replied(self, value: Reply, sent_at: float) -> None:
        pttl, server_us, untaken, *vanished = value
        request = self._queue.request
        for each in vanished:
            history.note_vanished(self.server, request.keys, Vanished(*each), request.subject)
        self.due = self._queue.next_look(pttl, Clock(server_us, sent_at))
        self._queue.may_be_registered_again()
        # A grant is untaken although we wait: Redis does not know our blocking pop, because its
        # connection has died without a word. Only the second time in a row: it may be on its way.
        self._untaken = self._untaken + 1 if untaken else 0
        if untaken:
            self.due = min(self.due, time.monotonic() + 0.2)
        node = self._queue.node
        has_moved = node is not None and self.server.seen_at(request.keys) is not node
        if self._untaken > 1 or has_moved:
            self._untaken = 0
            self._queue.cut_pop()
        self._warn()

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + WATCH_INTERVAL_SECONDS / 4
        self._warn()
        if any(waiter.outage_patience < math.inf for waiter in self._queue.waiters.copy()):
            self._queue.cut_pop()  # One of them does not wait for a frozen server.

    def _warn(self) -> None:
        """Let the log say whom the process waits for, if its first waiter has waited for long."""
        mine = [queue for queue in list(queues.values()) if queue.key[:2] == self._queue.key[:2]]
        firsts = [waiter.asked_at for queue in mine for waiter in queue.waiters.copy()]
        ours = [waiter.asked_at for waiter in self._queue.waiters.copy()]
        if not ours or min(ours) > min(firsts, default=math.inf):
            return
        waited = time.monotonic() - min(ours)
        if waited < WARN_AFTER_SECONDS:
            self._warns_after = WARN_AFTER_SECONDS
        elif waited >= self._warns_after:
            while self._warns_after <= waited:
                self._warns_after *= 2
            keeper().add(LongWait(self.server, self._queue.request, waited))
        self.due = min(self.due, min(ours) + self._warns_after)


class LongWait(Job):
    """Lets the log say who holds the lock, and whether that process is silent."""

    def __init__(self, server: Server, request: AcquireRequest, waited: float) -> None:
        super().__init__(server, time.monotonic())
        self._request, self._waited = request, waited
        self._call = holders_call(request.keys, request.limit)
        self._owner: Owner | None = None

    def call(self, now: float) -> Call:
        return self._call

    def replied(self, value: Reply, sent_at: float) -> None:
        if self._owner is not None:
            self._log(history.with_heartbeat(self._owner, value))
            return
        holders = parse_holders(self._request.limit, value)
        self._owner = holders[0].in_the_way if holders else None
        call = None if self._owner is None else history.heartbeat_call(self._owner)
        if call is None:
            self._log(self._owner)
        else:
            self._call, self.due = call, sent_at

    def failed(self, error: Exception, now: float) -> None:
        self._log(self._owner, explained(error))

    def _log(self, owner: Owner | None, error: str = "") -> None:
        keeper().discard(self)
        holder = f"; Redis does not say who holds it: {error}" if error else "; nobody holds it now"
        if owner is not None:
            holder = f"; held by {owner.in_short()}"
        subject = self._request.subject
        name = printable(self._request.keys.lock if subject is None else subject.name)
        logger.warning(
            "A caller waits for %(lock)s since %(waited).0f s%(holder)s",
            {"lock": name, "waited": self._waited, "holder": holder},
        )


class MayNotBlock(Exception):
    """Redis has refused the blocking pop, or there is no socket on which to wait for its reply."""


class Waiter:
    """One call of ``acquire`` that waits.

    Attributes:
        queue: the queue it is a member of, once it has joined one.
        turn: set when it is this member's turn; None for the first member of a new queue.
    """

    turn: WakeEvent | None = None

    #: What a call returns, until a monotonic time.
    _ask: Callable[[Call, float | None], Step[Reply]]
    _sleep: Callable[[float], Step[None]]
    _new_turn: Callable[[], WakeEvent]

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

    @property
    def _name(self) -> str:
        return printable(self._request.keys.lock)

    # -- steps -------------------------------------------------------------------------------

    def _wait(self, refused: Refused | None) -> Steps[Acquisition | None]:
        """Join the queue and wait until the lock is ours, or until the request's deadline."""
        mine = self.queue
        with _mutex:
            self.queue = queues.setdefault(mine.key, mine)
            if self.queue.waiters:
                self.turn = self._new_turn()
            self.queue.waiters.append(self)
        if self.queue is not mine:
            if mine.request.waiter:
                unregister(mine.server, mine.request)
        elif refused is not None:
            mine.note_refused(refused)
        turn = self.turn
        while turn is not None and not (yield turn.wait(self._request.left())):
            if self._request.deadline is not None:
                return None
        return (yield from self._wait_through_outages())

    def _acquire_or_register(self) -> Steps[Acquisition | None]:
        sent_at = time.monotonic()
        call, until = self.queue.acquire_call(self._request), self._request.reply_until()
        reply = parse_acquire((yield self._ask(call, until)), sent_at)
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
        """Note it; after an outage, leave the connection. Returns whether ``error`` is one, which
        may pass by itself."""
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
        arrived_at = time.monotonic()
        (queue.node or queue.server).answered()
        grant = queue.grant_in(reply)
        if grant is None:
            return None
        claims = [(grant.token, b"", grant.place)]
        if request.chosen and grant.place > request.limit:  # ACQUIRE does not find it there.
            claims.append((request.token, request.attempt, grant.place))
        request.may_hold.extend(claims)
        until = queue.believed_until(request, grant, arrived_at)
        call = request.take_grant_call(grant, queue.id_to_unregister())
        try:
            pending = yield queue.send_take_grant(call, request.until(time.monotonic()))
            if until is not None:
                return request.acquired_by_grant(grant, arrived_at, until, pending)
            until = yield pending.confirmed()
            if until is None:
                raise RedisTimeoutError("the connection broke while a grant was taken")
        except Exception:
            # Redis may carry it out all the same; then the lock would have no holder.
            for claim in claims:
                self._release_later(claim)
            raise
        if until == -math.inf:  # It expired while this process was frozen: the wait goes on.
            queue.registered = False  # If it still is, ACQUIRE registers it again.
            return None
        return request.acquired_by_grant(grant, arrived_at, until)

    def _last_try(self) -> Steps[Acquisition | None]:
        queue, sent_at = self.queue, time.monotonic()
        leave = self._request.leave_call(queue.id_to_unregister(), try_again=True)
        try:
            reply = yield self._ask(leave, time.monotonic() + LAST_TRY_SECONDS)
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
        if (grant := self.queue.grant_in(reply)) is not None:
            self._release_later((grant.token, b"", grant.place))

    def _release_later(self, claim: tuple[bytes, bytes, int]) -> None:
        """Have the keeper release what ``claim``, one of ``may_hold``, has or may yet get."""
        request = self._request
        release_later(self.queue.server, request.release_call(*claim), request.lifetime, late=True)
        noted = self._request.may_hold
        noted[:] = [each for each in noted if each != claim]
