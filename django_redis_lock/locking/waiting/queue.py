"""The line of those in one process that wait for one lock on one server. No input or output here.

Only the first in a line waits in Redis; the others wait for their turn in memory. The threads of a
process form one line, the tasks of each event loop another.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ...forks import after_fork, free_after_fork
from ...keeper import keeper
from ...protocol import (
    MAX_GRANT_AGE_SECONDS,
    WATCH_INTERVAL_SECONDS,
    AcquireRequest,
    Acquisition,
    Call,
    Clock,
    parse_grant,
    waiter_id,
)
from ...transport import Server
from ..history import note_vanished
from ..renewal import DeferredRelease
from .watch import Unregister, WaiterHeartbeat

__all__ = ["ReceivedGrant", "WaitQueue", "Waiter", "join"]


class WakeEvent(Protocol):
    """``threading.Event``, or what tasks have instead."""

    def set(self) -> None: ...


class ReceivedGrant(NamedTuple):
    """A grant that came.

    Attributes:
        call: gives it its full lifetime.
        believed: the lock, if the grant is fresh enough to be believed without an answer to that.
    """

    token: bytes
    fence: int
    at: float
    call: Call
    believed: Acquisition | None


class WaitQueue(ABC):
    """Those in this process that want one lock on one server and are ready to wait, in their order.

    The first asks for the lock; if it is held, the line is registered in Redis under one waiter
    id, and the first waits there. A line closes when its last member has the lock; who comes later
    starts another line under another id, so that taking the old id off the register can never hide
    the new one.

    Attributes:
        node: where the first one waits.
        registered: whether Redis knows of the line, so that a release makes a grant for it.
        _listed: whether Redis may know of it, so that its id must be taken off the register.
    """

    def __init__(self, server: Server, request: AcquireRequest, loop: Any = None) -> None:
        self.server = server
        self.request = request
        self.key = (server, request.keys.lock, loop)
        self.loop = loop
        self.waiter = waiter_id()
        self.node: Server | None = None
        self.registered = False
        self._listed = False
        self._asking = False
        self.clock: Clock | None = None
        self.places: deque[Waiter[Any]] = deque()
        self._watch: WaiterHeartbeat | None = None

    connection: Any = None

    @abstractmethod
    def end(self) -> None:
        """The line is empty: let its connection go."""

    @abstractmethod
    def wake(self) -> None:
        """End the blocking pop from the keeper's thread, as if its connection had broken."""

    # -- coming and going --------------------------------------------------------------------

    def leave(self, place: Waiter[Any]) -> None:
        """``place`` is given up. Done again, it completes what an interrupt had cut short."""
        with _mutex:
            if place in self.places:
                self.places.remove(place)
            # Who leaves without an answer may have put us on the register.
            self._listed, self._asking = self._listed or self._asking, False
            if self.places:
                if self.places[0].turn is not None:
                    self.places[0].turn.set()
                return
            self.dissolve()
        self.end()

    def abandon(self, place: Waiter[Any]) -> None:
        """As ``leave``, for whoever leaves in the middle of anything: what was to take the line
        off the register may not have been sent."""
        self._listed = self._listed or self.registered
        self.leave(place)

    def led_by(self, place: Waiter[Any]) -> bool:
        """Whether ``place`` is the one that waits in Redis, if the line does."""
        with _mutex:
            return bool(self.places) and self.places[0] is place

    @property
    def closed(self) -> bool:
        """Whether nobody comes to wait here any more."""
        return _lines.get(self.key) is not self

    def listed_again(self) -> None:
        """The line is on the register, perhaps after it had been taken off: the keeper has put it
        there, or what was to take it off was not heard."""
        with _mutex:
            self._listed = True
            if not self.places:
                self.dissolve()

    def dissolve(self) -> None:
        """Nobody waits here any more."""
        with _mutex:
            if not self.closed:
                del _lines[self.key]
        if self._watch is not None:
            keeper().discard(self._watch)
        if self._listed:
            keeper().add(Unregister(self))
            self._listed = False

    def _close_if_last(self) -> bool:
        """Close the line if one member is left in it; says whether it did. What is sent then must
        take its id off the register."""
        with _mutex:
            if len(self.places) > 1 or self.closed:
                return False
            del _lines[self.key]
            self._listed = False
            return True

    def farewell(self) -> bytes:
        """The first member stops waiting: the id to take off the register, if nobody else waits."""
        return self.waiter if self._close_if_last() else b""

    # -- what the server said ----------------------------------------------------------------

    def ask(self, request: AcquireRequest) -> Call:
        """What takes the lock, or else puts the line on the register."""
        self._asking = True
        return request.acquire(self.waiter)

    def asked(self, request: AcquireRequest, reply: Any, sent_at: float) -> Acquisition | None:
        """The answer to ACQUIRE: the lock, or a place on the register and when to look again."""
        if (won := self.won(request, reply, sent_at)) is not None:
            self._asking = False
            return won
        _, pttl, server_us = reply
        self.registered = self._listed = True
        self._asking = False
        if self._watch is None:
            self._watch = WaiterHeartbeat(self)
        self._watch.due = self.heard(int(pttl), Clock(int(server_us), sent_at))
        keeper().add(self._watch)
        return None

    def won(self, request: AcquireRequest, reply: Any, sent_at: float) -> Acquisition | None:
        """The answer to ACQUIRE or LEAVE: the lock, if that is what it was."""
        if not reply[0]:
            return None
        if len(reply) > 3:
            note_vanished(self.server, request.keys, reply[3], request.subject)
        return request.acquired(reply[1], sent_at)

    def heard(self, pttl: int, clock: Clock) -> float:
        """The server has said how long the present holder's lifetime still is. Returns when to
        look again, in monotonic seconds."""
        self.clock = clock
        left = pttl / 1000 if pttl >= 0 else math.inf
        return time.monotonic() + min(WATCH_INTERVAL_SECONDS, left)

    def misplaced(self) -> bool:
        """Whether the lock has gone to another server than the one where we wait for it."""
        return self.node is not None and self.server.seen_at(self.request.keys) is not self.node

    def grant_in(self, reply: Any) -> tuple[bytes, int] | None:
        """Token and fence of the grant the blocking pop brought. None for the farewell, and for a
        pop that an operator has ended (CLIENT UNBLOCK)."""
        if reply is None or reply[0] != self.request.keys.grants:
            return None
        return parse_grant(reply[1])

    def came(self, request: AcquireRequest, reply: Any) -> ReceivedGrant | None:
        """The answer to the blocking pop: a grant, or None for the farewell."""
        at = time.monotonic()
        (self.node or self.server).answered()
        grant = self.grant_in(reply)
        if grant is None:
            return None
        token, fence = grant
        closed = self._close_if_last()
        call = request.take(token, self.waiter if closed else b"", fence)
        age = self.clock.age(fence) if self.clock else math.inf
        max_age = min(MAX_GRANT_AGE_SECONDS, request.grant_timeout / 4)
        fresh = abs(age) < max_age and not request.believes_nothing
        believed = request.granted(token, fence, age, at) if fresh else None
        return ReceivedGrant(token, fence, at, call, believed)

    def confirmed(
        self, request: AcquireRequest, came: ReceivedGrant, until: float
    ) -> Acquisition | None:
        """The answer about a grant that was not believed: the lock, or nothing."""
        if until > -math.inf:
            return request.taken(came.token, came.fence, came.at, until)
        self.registered = False  # Or perhaps not; asking again makes sure.
        return None


AnyQueue = TypeVar("AnyQueue", bound=WaitQueue)


class Waiter(Generic[AnyQueue]):
    """One member's place in a line."""

    line: AnyQueue
    #: Set when it is this member's turn; None for who came first and need not wait for it.
    turn: Any = None

    _request: AcquireRequest

    def new_turn(self) -> WakeEvent:
        raise NotImplementedError

    def _keep_one(self, won: Acquisition, reply: Any) -> Acquisition:
        """The last try has won; a grant that the pop brought as well is not needed."""
        self._abandon_in(reply)
        return won

    def _abandon_in(self, reply: Any) -> None:
        """The grant that the pop brought, if it did, is nobody's."""
        if (grant := self.line.grant_in(reply)) is not None:
            self._abandon(grant[0])

    def _abandon(self, token: bytes) -> None:
        """Whatever Redis may yet carry out for ``token`` is nobody's."""
        release = self._request.give_back(token)
        keeper().add(DeferredRelease(self.line.server, release, self._request.lifetime))
        noted = self._request.may_hold
        noted[:] = [each for each in noted if each[0] != token]


_lines: dict[tuple[Server, bytes, Any], WaitQueue] = {}
_mutex = free_after_fork(threading.RLock())


@after_fork
def _forget_lines() -> None:
    """Its parent waits in them; a child that drops the frames of its parent leaves none of them."""
    for line in _lines.values():
        line.places.clear()
        line.registered = line._listed = line._asking = False
        line.connection = None
    _lines.clear()


def join(place: Waiter[AnyQueue], line: AnyQueue) -> None:
    """Take ``place`` at the end of the line for the lock; ``line`` is used if there is none."""
    with _mutex:
        found = _lines.setdefault(line.key, line)
        place.line = found  # type: ignore[assignment]  # the key holds the loop, and so the type
        if found.places:
            place.turn = place.new_turn()
        found.places.append(place)
