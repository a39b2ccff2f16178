"""The queue of those in one process that wait for one lock on one server. No input or output here.

Only the first of them waits in Redis; the others wait in memory for their turn. The threads of a
process form one queue, the tasks of each event loop another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from ... import history
from ...clock import time
from ...keeper import Job, SentOnce, keeper
from ...protocol import (
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
    parse_grant,
    printable,
    waiter_id,
)
from ...protocol.holders import parse_watch
from ...steps import Step
from ...threads import Mutex, after_fork, free_after_fork, get_logger
from ...transport import Client, Server
from ...transport.hints import explained
from .. import questions

if TYPE_CHECKING:
    import asyncio

    from ...protocol import Owner

#: Waiters with different limits do not wait for the same places.
QueueKey: TypeAlias = "tuple[Server, bytes, asyncio.AbstractEventLoop | None, int]"

logger = get_logger("django_redis_lock.waiting")

#: Seconds after which the log says that a caller still waits; then at each doubling.
WARN_AFTER_SECONDS = 30.0


class ReceivedGrant(NamedTuple):
    """A grant that the blocking pop has returned.

    Attributes:
        arrived_at: monotonic time at which it came in.
        call: gives it its full lifetime.
        until: the deadline, if the grant is fresh enough to be believed without an answer to that.
    """

    grant: Grant
    arrived_at: float
    call: Call
    until: float | None


#: The reply to a blocking pop: the list and its element; None if an operator has ended the pop.
PopReply = Sequence[bytes] | None


class WakeEvent(Protocol):
    """An event for one waiter."""

    def set(self) -> None: ...
    def wait(self, seconds: float) -> Step[bool]: ...


class Member(Protocol):
    """A waiter; see ``Waiter``."""

    queue: Any
    turn: WakeEvent | None
    asked_at: float
    outage_patience: float


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
        self.waiters: deque[Member] = deque()
        self._watch: QueueWatch | None = None

    def end(self) -> None:
        """The queue is empty: let its connection go."""
        raise NotImplementedError

    def wake(self) -> None:
        """End the blocking pop from the keeper's thread, as if its connection had broken."""
        raise NotImplementedError

    def connect(self, client: Client) -> Step[None]:
        """Have a connection of this client for blocking pops, with nothing left to read on it."""
        raise NotImplementedError

    def begin_pop(self, command: bytes) -> Step[None]:
        """Send a blocking pop, the packed command."""
        raise NotImplementedError

    def pop_ended(self, seconds: float) -> Step[bool]:
        """Whether the pop ends within so many seconds."""
        raise NotImplementedError

    def reply(self) -> PopReply:
        """What the pop has returned, after it ended."""
        raise NotImplementedError

    def send_take_grant(self, call: Call, until: float) -> Step[PendingLifetime]:
        """Send TAKE_GRANT, whose reply comes later."""
        raise NotImplementedError

    def disconnect(self) -> Step[None]:
        """Close the connection."""
        raise NotImplementedError

    # -- members -----------------------------------------------------------------------------

    def leave(self, waiter: Member) -> None:
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

    def abandon(self, waiter: Member) -> None:
        """As ``leave``, for a waiter that was interrupted at any point: the call that was to
        unregister the queue may not have been sent."""
        self._must_unregister = self._must_unregister or self.registered
        self.leave(waiter)

    def is_led_by(self, waiter: Member) -> bool:
        """Whether ``waiter`` is the one that waits in Redis."""
        with _mutex:
            return bool(self.waiters) and self.waiters[0] is waiter

    @property
    def closed(self) -> bool:
        """Whether no new waiter joins this queue any more."""
        return queues.get(self.key) is not self

    def dissolve(self) -> None:
        """The last waiter has left."""
        with _mutex:
            if not self.closed:
                del queues[self.key]
        if self._watch is not None:
            keeper().discard(self._watch)
        if self._must_unregister:  # If this fails, the id expires within seconds.
            keeper().add(SentOnce(self.server, self.request.unregister_call(self.id)))
            self._must_unregister = False

    def _close_if_last(self) -> bool:
        """Close the queue if one member is left in it; return whether it was closed. What is sent
        next must unregister its id."""
        with _mutex:
            if len(self.waiters) > 1 or self.closed:
                return False
            del queues[self.key]
            self._must_unregister = False
            return True

    def id_to_unregister(self) -> bytes:
        """The first member stops waiting: the id to unregister, if no other member waits."""
        return self.id if self._close_if_last() else b""

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
        """ACQUIRE or LEAVE has got the lock."""
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

    def has_moved(self) -> bool:
        """Whether the lock is now on another server than the one where the first member waits."""
        return self.node is not None and self.server.seen_at(self.request.keys) is not self.node

    def grant_in(self, reply: PopReply) -> Grant | None:
        """The grant that the blocking pop has returned. None if LEAVE or an operator (CLIENT
        UNBLOCK) has ended the pop."""
        if reply is None or reply[0] != self.request.keys.grants:
            return None
        return parse_grant(reply[1])

    def received(self, request: AcquireRequest, reply: PopReply) -> ReceivedGrant | None:
        """What the blocking pop has returned: a grant, or None."""
        arrived_at = time.monotonic()
        (self.node or self.server).answered()
        grant = self.grant_in(reply)
        if grant is None:
            return None
        call = request.take_grant_call(grant, self.id_to_unregister())
        age = self.clock.age(grant.fence) if self.clock else math.inf
        max_age = min(MAX_GRANT_AGE_SECONDS, request.grant_timeout / 4)
        fresh = abs(age) < max_age and not request.must_confirm_grants
        until = arrived_at + request.grant_timeout - max(age, 0.0)
        until = min(until, request.until(arrived_at))
        return ReceivedGrant(grant, arrived_at, call, until if fresh else None)

    def note_taken_grant(
        self, request: AcquireRequest, received: ReceivedGrant, until: float
    ) -> Acquisition | None:
        """``until`` is from the reply to TAKE_GRANT. None if the grant expired while this process
        was frozen: the wait goes on."""
        if until > -math.inf:
            return request.acquired_by_grant(received.grant, received.arrived_at, until)
        self.registered = False  # If it still is, ACQUIRE registers it again.
        return None


@after_fork
def _forget_queues() -> None:
    """They are the parent's. Its calls that the child finalizes leave none, and send nothing."""
    for queue in queues.values():
        queue.waiters.clear()
        queue.registered = queue._must_unregister = False
        queue.connection = None
    queues.clear()


def join(waiter: Member, queue: WaitQueue, new_turn: Callable[[], WakeEvent]) -> None:
    """Add ``waiter`` at the end of the queue for the lock, which is ``queue`` if there is none."""
    with _mutex:
        waiter.queue = joined = queues.setdefault(queue.key, queue)
        if joined.waiters:
            waiter.turn = new_turn()
        joined.waiters.append(waiter)
    if joined is not queue and queue.request.waiter:
        unregister(queue.server, queue.request)


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
            self._queue.wake()
            return None
        return self._queue.request.watch_call(self._queue.id, len(self._queue.waiters))

    def replied(self, value: Reply, sent_at: float) -> None:
        pttl, clock, untaken, all_vanished = parse_watch(value, sent_at)
        request = self._queue.request
        for vanished in all_vanished:
            history.note_vanished(self.server, request.keys, vanished, request.subject)
        self.due = self._queue.next_look(pttl, clock)
        self._queue.may_be_registered_again()
        # A grant is untaken although we wait: Redis does not know our blocking pop, because its
        # connection has died without a word. Only the second time in a row: it may be on its way.
        self._untaken = self._untaken + 1 if untaken else 0
        if untaken:
            self.due = min(self.due, time.monotonic() + 0.2)
        if self._untaken > 1 or self._queue.has_moved():
            self._untaken = 0
            self._queue.wake()
        self._warn()

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + WATCH_INTERVAL_SECONDS / 4
        self._warn()
        if any(waiter.outage_patience < math.inf for waiter in self._queue.waiters.copy()):
            self._queue.wake()  # One of them does not wait for a frozen server.

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
        self._call = questions.holders_call(request)
        self._owner: Owner | None = None

    def call(self, now: float) -> Call:
        return self._call

    def replied(self, value: Reply, sent_at: float) -> None:
        if self._owner is not None:
            self._log(history.with_heartbeat(self._owner, value))
            return
        holders = questions.parse_holders(self._request.limit, value)
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
