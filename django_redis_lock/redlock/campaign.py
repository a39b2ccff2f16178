"""One call of ``acquire`` on several servers: what is asked of them, and what may have come of it.

What is to be done is said step by step (``Ask``, ``Queue``, ``Pause``), and done by ``redlock`` for
threads and by ``aio_redlock`` for tasks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from redis.exceptions import RedisError

from ..locking import note_vanished
from ..protocol import LAST_TRY, AcquireRequest, Call, Clock, milliseconds, new_token
from ..transport import Server, is_outage, may_have_run
from .scripts import VOTE
from .votes import Ballot

__all__ = ["Ask", "Election", "Pause", "Queue", "Step", "Steps"]

#: Microseconds by which a round's fences lie ahead of the fastest clock among the servers, so that
#: all of them store the same number.
AHEAD = 10_000


class Ask(NamedTuple):
    """Run calls at once, each on the server at its place; sends replies, or errors, by place."""

    calls: Mapping[int, Call]
    patience: float


class Queue(NamedTuple):
    """Wait for one server's part of the lock; sends the grant, or None at the deadline."""

    place: int
    request: AcquireRequest


class Pause(NamedTuple):
    """Let so many seconds pass."""

    seconds: float


Step = Ask | Queue | Pause
Steps = Generator[Step, Any, Any]

#: What the servers' clocks show.
_clocks: WeakKeyDictionary[Server, Clock] = WeakKeyDictionary()
#: The last fence of any lock that each of them gave to this process.
_fences: WeakKeyDictionary[Server, int] = WeakKeyDictionary()


class Election:
    """See the module's words.

    Args:
        request: what the call wants.
        servers: the servers, by place.
        places: their places, in the order in which everybody waits for them.
        limit: seconds to wait for one server.
        leave: has a release done later, at these places.

    Attributes:
        request: with the token and the attempt that are used now. They change when a server did
            not answer to what gave them back: it may yet do so at any time, and must not take
            back what it has given meanwhile.
    """

    def __init__(
        self,
        request: AcquireRequest,
        servers: Sequence[Server],
        places: Sequence[int],
        limit: float,
        leave: Callable[[Iterable[int], Call], None],
    ) -> None:
        self._chosen = request.chosen
        self._servers = servers
        self._places = places
        self._limit = limit
        self._leave = leave
        self._unheard: set[int] = set()
        self.request = request
        request.may_hold.clear()
        if not self._chosen:
            self._rename()

    def _rename(self) -> None:
        token = self.request.token if self._chosen else new_token()
        attempt = secrets.token_hex(8).encode()
        self.request = self.request._replace(token=token, attempt=attempt)

    def _note(self) -> None:
        """Note the token before it is sent; see ``AcquireRequest.may_hold``."""
        mine, noted = (self.request.token, self.request.attempt), self.request.may_hold
        if mine not in noted:
            noted.append(mine)

    def vote(self, floor: int = 0) -> Steps:
        """One round of asking all, with a fence of at least ``floor``."""
        self._note()
        request, limit = self.request, self._limit
        if request.deadline is not None:
            limit = min(limit, request.left() + LAST_TRY)
        asked = (request.token, milliseconds(request.lifetime), request.attempt)
        call = Call(VOTE, request.keys, (*asked, floor or self._floor()))
        sent_at = time.monotonic()
        answers = yield Ask(dict.fromkeys(self._places, call), limit)
        for place, answer in answers.items():
            if not isinstance(answer, Exception):
                _clocks[self._servers[place]] = Clock(int(answer[2]), sent_at)
                if len(answer) > 3:
                    note_vanished(self._servers[place], request.keys, answer[3], request.subject)
            elif may_have_run(answer):
                self._unheard.add(place)
        ballot = Ballot(len(self._places), self._places, answers, sent_at, request.lifetime)
        for place, fence in ballot.fences.items():
            _fences[self._servers[place]] = fence
        return ballot

    def _floor(self) -> int:
        now = time.monotonic()
        clocks = [clock for s in self._servers if (clock := _clocks.get(s)) is not None]
        ahead = max((int(c.server_us + (now - c.at) * 1e6) + AHEAD for c in clocks), default=0)
        # Our reckoning of the clocks is not that exact, and they may all have lost what they store.
        last = max((_fences.get(s, 0) for s in self._servers), default=0)
        return last + 1 if ahead <= last < ahead + AHEAD else ahead

    def queue(self, gate: int) -> Steps:
        """Wait at ``gate``; False at the deadline."""
        self._note()
        try:
            return (yield Queue(gate, self.request)) is not None
        except (RedisError, OSError) as error:
            if not is_outage(error):
                raise
            self._unheard.add(gate)
            return True  # Perhaps the others are enough.

    def give_back(self, ballot: Ballot, gate: int | None = None) -> Steps:
        """Give back what was got: all of it, or only from ``gate`` on."""
        begin = 0 if gate is None else self._places.index(gate)
        yield from self._release(p for p in self._places[begin:] if p in ballot.fences)
        if self._unheard:
            # Under another name from now on, so that what comes late does no harm: neither what
            # was asked, nor the release that the keeper repeats until it is answered.
            yield from self._release(p for p in self._places[:begin] if p in ballot.fences)
            self._leave(self._unheard, self._back)
            self._unheard = set()
            self.request.may_hold.clear()
            self._rename()
        elif gate is None:
            self.request.may_hold.clear()

    def _release(self, places: Iterable[int]) -> Steps:
        calls = dict.fromkeys(places, self._back)
        if calls:
            answers = yield Ask(calls, self._limit)
            self._unheard.update(p for p, a in answers.items() if isinstance(a, Exception))

    @property
    def _back(self) -> Call:
        return self.request.give_back(self.request.token)
