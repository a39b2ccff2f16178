"""How a lock on several servers is taken. The rule is written once, as a generator that says what
is to be done next; ``redlock`` does it for threads, ``aio_redlock`` for tasks.

Every server is asked at once. Who has more than half of them has the lock. Who has not gives back
what came after the first server that refused, and waits there, in the fair queue of that one
server; what came before it is kept. All wait for the servers in the same order, so no two can wait
for each other, and two who came at the same moment sort themselves out within a few round trips
instead of trying again at random. While a server is away, the next in order takes its place.
"""

from __future__ import annotations

import math
import secrets
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..keeper import keeper
from ..locking import FIRST_PAUSE, LONGEST_PAUSE, BaseLock, DeferredRelease, Renewals
from ..protocol import EXTEND, RELEASE, AcquireRequest, Acquisition, Call, Hold, check_seconds
from ..transport import Server, Topology, server_of
from .campaign import Ask, Election, Pause, Steps
from .renewal import VotedRenewal
from .votes import Ballot, QuorumAcquisition, QuorumHold, drift, majority, merged, too_few

__all__ = ["Quorum"]

#: The shortest lifetime, in seconds, of which something is left when clocks have run apart.
SHORTEST = 0.01
#: Seconds to wait for one server, at most, if the caller does not say.
PATIENCE = 0.25


class Quorum(BaseLock):
    """Everything about a lock on several servers that does no input or output.

    Args:
        redis: the redis-py clients, one for each server; at least three.
        server_timeout: seconds to wait for one server; those that answer later count as away.
            Left out: a quarter of a second, and no more than a quarter of ``timeout``.

    The others are those of ``BaseLock``.
    """

    redis: Sequence[Any]
    _hold_class = QuorumHold

    def __init__(
        self,
        redis: Iterable[Any],
        name: str | bytes,
        timeout: float | None = None,
        *args: Any,
        server_timeout: float | None = None,
        **options: Any,
    ) -> None:
        clients = _checked(redis)
        super().__init__(clients, name, timeout, *args, **options)
        if self.timeout is not None and self.timeout < SHORTEST:
            raise ValueError(
                f"timeout must be at least {SHORTEST} seconds for a lock on several servers: "
                f"their clocks may run apart by as much, not {timeout!r}"
            )
        if self.replicas:
            raise ValueError("replicas are for a lock on one server; this one has several")
        usual = "a quarter of a second"
        limit = check_seconds("server_timeout", server_timeout, none=usual)
        self.server_timeout = limit or min(PATIENCE, (self.timeout or math.inf) / 4)

    @property
    def servers(self) -> tuple[Server, ...]:
        return tuple(server_of(client) for client in self.redis)

    def _encode(self, value: str | bytes) -> bytes:
        encoded: bytes = self.redis[0].get_encoder().encode(value)
        return encoded

    def _server(self) -> Server:
        """Where its figures are kept: on the first of them."""
        return server_of(self.redis[0])

    # -- taking it -----------------------------------------------------------------------------

    def _elect(self, request: AcquireRequest, wait: float | None) -> Steps:
        """The lock, or None at the end of the wait.

        Raises:
            TooFewServers: at the first question, or at the end of the wait.
        """
        deadline = None if not wait else time.monotonic() + wait
        request = request._replace(deadline=deadline, endures=0.0)
        how = (self.servers, self._order(), self.server_timeout, self._leave)
        campaign = Election(request, *how)
        pause, contended = FIRST_PAUSE, False
        while True:
            ballot = yield from campaign.vote()
            if ballot.won:
                fence, stored = ballot.fence, ballot.stored
                if not stored:
                    ballot = yield from campaign.vote(fence)
                if ballot.won:
                    return _elected(campaign.request, ballot, fence, contended)
            left = 0.0 if wait == 0 else campaign.request.left()
            if ballot.too_few or not left:
                yield from campaign.give_back(ballot)
                if ballot.too_few and (not contended or not left):
                    raise too_few(ballot.errors, len(self.redis), self._shown)
                if not left:
                    return None
                # Others try again as well, and should not do so together.
                yield Pause(min(pause * (1 + secrets.randbelow(100) / 100), left))
                pause, contended = min(pause * 2, LONGEST_PAUSE), True
                continue
            pause, contended = FIRST_PAUSE, True
            if not ballot.refused:  # They answered, but too late.
                yield from campaign.give_back(ballot)
                continue
            gate = ballot.refused[0]
            yield from campaign.give_back(ballot, gate)
            if not (yield from campaign.queue(gate)):
                yield from campaign.give_back(ballot)
                return None

    def _order(self) -> list[int]:
        """The places in the order in which everybody waits for them: not every lock begins with
        the same server."""
        count = len(self.redis)
        first = zlib.crc32(self.keys.lock) % count
        return [(first + n) % count for n in range(count)]

    # -- everything else -----------------------------------------------------------------------

    def _reset(self) -> Steps:
        """End the lock on each server, whoever holds it there, as ``Lock.reset`` does on one.

        Raises:
            TooFewServers: less than a majority has answered.
        """
        question = self._held_call()
        answers = yield Ask(self._calls(question), self.server_timeout)
        held = {p: a for p, a in answers.items() if a and not isinstance(a, Exception)}
        resets = {p: self._reset_call(held[p]) for p in reversed(self._order()) if p in held}
        ended = (yield Ask(resets, self.server_timeout)) if resets else {}
        found = merged(question, answers, len(self.redis), self._shown)
        away = {p: a for p, a in {**answers, **ended}.items() if isinstance(a, Exception)}
        if len(away) > len(self.redis) - majority(len(self.redis)):
            raise too_few(away, len(self.redis), self._shown)
        return found is not None

    def _calls(self, call: Call) -> dict[int, Call]:
        """The first in order is asked last: who waits there is to find the others released."""
        return dict.fromkeys(reversed(self._order()), call)

    def _merge(self, call: Call, answers: Mapping[int, Any], sent_at: float) -> Any:
        """What the servers returned, as one would."""
        if call.script is RELEASE:
            self._leave((p for p, a in answers.items() if isinstance(a, Exception)), call)
        hold: QuorumHold | None = self.local.hold
        if call.script is EXTEND and hold is not None:
            _, amount, replace, *_ = call.args
            for place, answer in answers.items():
                if isinstance(answer, Exception):
                    continue
                begins = sent_at if replace == "1" else hold.votes[place]
                until = begins + _safe(int(amount) / 1000)
                hold.vote(place, until if int(answer) > 0 else -math.inf, sent_at)
        return merged(call, answers, len(self.redis), self._shown)

    def _leave(self, places: Iterable[int], release: Call) -> None:
        """Have ``release`` done by the keeper where it was not answered."""
        servers = self.servers
        for place in places:
            keeper().add(DeferredRelease(servers[place], release, self.timeout))

    # -- what ``LockRenewal`` does for one server ---------------------------------------------

    def _keep(self, granted: Acquisition) -> Hold:
        hold = self._won(granted)
        assert isinstance(hold, QuorumHold)
        assert isinstance(granted, QuorumAcquisition)
        hold.elected(granted.votes)
        jobs = (VotedRenewal(server, hold, place) for place, server in enumerate(self.servers))
        self.local.renewal = Renewals(*jobs)
        return hold

    def _prolonged(self, hold: Hold, deadline: float, asked_at: float) -> None:
        self.local.renewal.reschedule(asked_at)

    def _hand_over(self, release: Call) -> None:
        self._leave(range(len(self.redis)), release)


def _elected(
    request: AcquireRequest, ballot: Ballot, fence: int, contended: bool
) -> QuorumAcquisition:
    facts = (request.token, fence, ballot.sent_at, ballot.deadline, request.attempt)
    elected = QuorumAcquisition(*facts, contended=contended)
    elected.votes = ballot.votes
    return elected


def _safe(lifetime: float) -> float:
    return lifetime - drift(lifetime)


def _checked(redis: Iterable[Any]) -> tuple[Any, ...]:
    """The clients of a lock on several servers.

    Raises:
        TypeError: not redis-py clients.
        ValueError: too few of them, or one server twice.
    """
    if isinstance(redis, (str, bytes)) or not isinstance(redis, Iterable):
        raise TypeError(f"a lock on several servers needs their clients, not {redis!r}")
    clients = tuple(redis)
    if len(clients) < 3:
        raise ValueError(f"a lock on several servers needs at least 3 of them, not {len(clients)}")
    servers = [server_of(client) for client in clients]
    if any(isinstance(server, Topology) for server in servers):
        raise TypeError("a lock on several servers needs single ones: no cluster, no Sentinel")
    if len({server.database for server in servers}) < len(clients):
        raise ValueError("the servers of a lock must be different ones")
    return clients
