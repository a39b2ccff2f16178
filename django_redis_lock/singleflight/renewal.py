"""What the keeper does for a leader: keep its flight alive, and say who computes."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

from ..keeper import Job, keeper
from ..protocol import (
    FLIGHTS,
    Call,
    Owner,
    encodable,
    fingerprint,
    flight_key,
    flight_leader,
    hostname,
    milliseconds,
)
from ..transport import Server
from .scripts import RENEW_FLIGHT

__all__ = ["FlightRenewal"]

#: A computation that takes longer than so many seconds is one that people may want to see.
DESCRIBE_AFTER = 0.5


class FlightRenewal(Job):
    """Keeps the flight of the cache key ``key`` alive while its leader, this thread, computes.
    ``group`` is what its figures are counted under; empty: what its name says. When nobody
    refers to ``leader`` any more, it ends of itself."""

    def __init__(
        self,
        server: Server,
        key: bytes,
        token: bytes,
        lifetime: float,
        leader: object,
        group: str = "",
    ) -> None:
        self._leader_of_it = weakref.ref(leader)
        self._group = group
        self._lifetime = self.deadline_scale = lifetime
        self._began = time.monotonic()
        self._keys = (flight_key(key), flight_leader(key), server.index_of(FLIGHTS, key))
        self.key, self.token = key, token
        self._args = (token, milliseconds(lifetime), key)
        self._thread = encodable(threading.current_thread().name)
        self._named = False
        self._renewals = 0
        super().__init__(server, self._began + min(lifetime / 3, DESCRIBE_AFTER))

    def call(self, now: float) -> Call | None:
        if (
            self._leader_of_it() is None
        ):  # An exception from a signal handler came just before that.
            keeper().discard(self)
            return None
        leader = () if self._named else self._leader(now)
        return Call(RENEW_FLIGHT, self._keys, (*self._args, self._renewals + 1, *leader))

    def _leader(self, now: float) -> tuple[str, ...]:
        """For how many milliseconds it has been computing, and who it is."""
        lifetime = self._args[1]
        leader = Owner(fingerprint(self.token), hostname(), os.getpid(), self._thread)
        terms: tuple[str, ...] = ("lifetime", str(lifetime), "renews", "1")
        if self._group:
            terms = (*terms, "group", self._group)
        return (f"{(now - self._began) * 1000:.0f}", *leader.fields()[:-2], *terms)

    def answered(self, value: Any, sent_at: float) -> None:
        self._named = True
        self._renewals += 1
        self.due = sent_at + self._lifetime / 3
        if not value:
            keeper().discard(self)  # A write has ended it, which the leader learns when it stores.

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + min(self._lifetime / 12, 1.0)
