"""What the answers of several servers mean together. Decisions only: no input or output here.

The holder of a lock on several servers is the caller that holds it on more than half of them, until
the deadline that more than half of them have confirmed. A server's clock may run faster than ours,
so a little is taken off each lifetime (Salvatore Sanfilippo, "Distributed Locks with Redis": a
hundredth, and two milliseconds).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..exceptions import TooFewServers
from ..protocol import EXTEND, HEARTBEATS, HELD, Acquisition, Call, Hold, as_bytes, fingerprint

__all__ = ["Ballot", "QuorumAcquisition", "QuorumHold", "drift", "majority", "merged", "too_few"]


def majority(servers: int) -> int:
    """How many of so many are more than half."""
    return servers // 2 + 1


def drift(lifetime: float) -> float:
    """Seconds by which the clocks may have run apart at the end of ``lifetime`` seconds."""
    return 0.0 if math.isinf(lifetime) else lifetime * 0.01 + 0.002


class QuorumAcquisition(Acquisition):
    """A lock on several servers.

    Attributes:
        votes: until when each of them holds it for us (monotonic; -inf: not at all).
    """

    votes: tuple[float, ...] = ()


class Ballot:
    """The answers to one round of VOTE.

    Args:
        servers: how many there are.
        order: their places in the order in which everybody waits for them.
        answers: by place: what VOTE returned, or the error there was instead.
        sent_at: monotonic time before the first was sent.
        lifetime: seconds that were asked for, None without end.
    """

    def __init__(
        self,
        servers: int,
        order: Sequence[int],
        answers: Mapping[int, Any],
        sent_at: float,
        lifetime: float | None,
    ) -> None:
        replies = {p: answers[p] for p in order if not isinstance(answers[p], Exception)}
        #: The fences of those that gave us their vote, and those that refused, in order.
        self.fences = {p: int(reply[1]) for p, reply in replies.items() if reply[0]}
        self.refused = [p for p, reply in replies.items() if not reply[0]]
        self.errors = {p: e for p, e in answers.items() if isinstance(e, Exception)}
        self._needed = majority(servers)
        self._first = next(iter(replies), None)
        whole = math.inf if lifetime is None else lifetime
        self.sent_at = sent_at
        self.deadline = sent_at + whole - drift(whole)
        self.votes = tuple(self.deadline if p in self.fences else -math.inf for p in range(servers))

    @property
    def too_few(self) -> bool:
        """Whether not even a majority has answered."""
        return len(self.fences) + len(self.refused) < self._needed

    @property
    def won(self) -> bool:
        """Whether the lock is ours: in time, on a majority, and on the first server in order that
        can be reached. The last condition keeps a new caller from overtaking those that wait there.
        """
        in_time = time.monotonic() < self.deadline
        return in_time and len(self.fences) >= self._needed and self._first in self.fences

    @property
    def fence(self) -> int:
        """Greater than all before: a majority stores the last one, and two majorities overlap."""
        return max(self.fences.values())

    @property
    def stored(self) -> bool:
        """Whether a majority stores ``fence``, so that no later one can be smaller."""
        return sum(fence >= self.fence for fence in self.fences.values()) >= self._needed


class QuorumHold(Hold):
    """One acquisition of a lock on several servers."""

    __slots__ = ("_answered_at", "votes")

    def elected(self, votes: Sequence[float]) -> None:
        """Until when each server holds the lock for us, to begin with."""
        self.votes = list(votes)
        self._answered_at = [-math.inf] * len(self.votes)

    def vote(self, place: int, deadline: float, asked_at: float) -> None:
        """The server at ``place`` has confirmed, to what was sent at ``asked_at``, that it holds
        the lock for us until ``deadline`` (both monotonic; -inf: it does not). Of two commands
        that were under way together the shorter lifetime counts, as in ``held_until``."""
        with self._mutex:
            if asked_at < self._answered_at[place]:
                deadline = min(deadline, self.votes[place])
            self.votes[place], self._answered_at[place] = deadline, self.now()
            if not self.ended:
                self.deadline = sorted(self.votes)[-majority(len(self.votes))]


def merged(call: Call, answers: Mapping[int, Any], servers: int, name: str | bytes) -> Any:
    """What ``call`` returned on most of the servers, as one server would.

    Args:
        answers: by place: what it returned, or the error there was instead.

    Raises:
        TooFewServers: less than a majority has answered.
    """
    needed = majority(servers)
    replies = [a for a in answers.values() if not isinstance(a, Exception)]
    if len(replies) < needed:
        raise too_few(answers, servers, name)
    if call.script is HELD:
        return _held(replies, needed)
    if call.script is HEARTBEATS:
        return min(replies, key=lambda reply: int(reply[0]) - _number(reply[1]))
    if call.script is EXTEND:
        return next((n for n in (1, -1) if sum(int(r) == n for r in replies) >= needed), 0)
    # A release: what cannot be asked has not refused either.
    return int(sum(not int(reply) for reply in replies) < needed)


def _number(kept: Any) -> int:
    digits = as_bytes(kept)
    return int(digits) if digits.isdigit() and len(digits) < 20 else 0


def _held(replies: Sequence[Any], needed: int) -> Any:
    """The holder that most of ``replies`` to HELD name, if they do."""
    by_token: dict[bytes, list[Any]] = {}
    for reply in replies:
        if reply is not None:
            by_token.setdefault(as_bytes(reply[0]), []).append(reply)
    for token, of_it in by_token.items():
        if len(of_it) >= needed:
            lives = sorted(math.inf if int(r[1]) < 0 else int(r[1]) for r in of_it)[-needed]
            described = next((r for r in of_it if _describes(r[2], token)), of_it[0])
            fence = max(int(r[4]) for r in of_it)
            return [token, -1 if math.isinf(lives) else lives, described[2], described[3], fence]
    return None


def _describes(fields: Sequence[Any], token: bytes) -> bool:
    """Whether ``fields`` say who the holder with ``token`` is."""
    return fingerprint(token).encode() in [as_bytes(field) for field in fields]


def too_few(answers: Mapping[int, Any], servers: int, name: str | bytes) -> TooFewServers:
    """The error that says so; it has the servers' own."""
    errors = [e for e in answers.values() if isinstance(e, Exception)]
    return TooFewServers(servers - len(errors), servers, errors, name)
