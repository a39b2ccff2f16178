"""The replies of the scripts of a lock, as types. Each is parsed once, here.

A script that only says whether it did something replies 1 or 0, and needs no type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from ..clock import time


class Clock(NamedTuple):
    """A reading of the server's clock: its microseconds, and the monotonic time of the request."""

    server_us: int
    read_at: float

    def age(self, server_us: int) -> float:
        """The seconds since the server's clock showed ``server_us``, or a little more."""
        return (self.server_us - server_us) / 1e6 + time.monotonic() - self.read_at


class Vanished(NamedTuple):
    """A holder whose lock ended without a release.

    Attributes:
        ended_us: when its lifetime was over, in microseconds of the server's clock.
        fields: names and values of its description.
    """

    ended_us: int
    fields: Sequence[bytes]


class Taken(NamedTuple):
    """The reply to ACQUIRE, LEAVE or VOTE: the caller has the lock.

    Attributes:
        sent_at: monotonic time at which the call was sent.
        vanished: the holder before, if it did not release.
    """

    place: int
    fence: int
    server_us: int
    sent_at: float
    vanished: Vanished | None = None

    @property
    def clock(self) -> Clock:
        return Clock(self.server_us, self.sent_at)


class Refused(NamedTuple):
    """The reply to ACQUIRE, LEAVE or VOTE: another holds the lock. ``pttl``: for how long still, as
    PTTL gives it."""

    pttl: int
    server_us: int
    sent_at: float

    @property
    def clock(self) -> Clock:
        return Clock(self.server_us, self.sent_at)


def parse_acquire(reply: Any, sent_at: float) -> Taken | Refused:
    if isinstance(reply, int):  # Nearly always.
        return Taken(1, reply, reply, sent_at)
    if isinstance(reply, list):
        place, number, server_us, *vanished = reply
        if not place:
            return Refused(number, server_us, sent_at)
        before = Vanished(*vanished[0]) if vanished else None
        return Taken(place, number, server_us, sent_at, before)
    pttl, server_us = map(int, reply.split())
    return Refused(pttl, server_us, sent_at)


class Watched(NamedTuple):
    """The reply to WATCH.

    Attributes:
        untaken: whether a grant lies on the list although this process waits.
        vanished: the holders for which it has made grants.
    """

    pttl: int
    clock: Clock
    untaken: bool
    vanished: tuple[Vanished, ...]


def parse_watch(reply: Sequence[Any], sent_at: float) -> Watched:
    pttl, server_us, untaken, *vanished = reply
    holders = tuple(Vanished(*each) for each in vanished)
    return Watched(pttl, Clock(server_us, sent_at), bool(untaken), holders)


class Extended(IntEnum):
    """The reply to EXTEND."""

    DONE = 1
    NOT_OWNED = 0
    NO_LIFETIME = -1


class Renewed(NamedTuple):
    """The reply to RENEW, of a lock that is held. ``until``: monotonic time at which it ends."""

    until: float


def parse_renew(reply: int, sent_at: float) -> Renewed | None:
    """None: the token does not hold the lock."""
    if reply == -2:
        return None
    return Renewed(math.inf if reply < 0 else sent_at + reply / 1000)


class HeldReply(NamedTuple):
    """The reply to HELD about one holder, and one of those to HOLDERS; see ``HolderInfo``."""

    token: bytes
    pttl: int
    fields: Sequence[bytes]
    server_us: int
    place: int = 1
