"""A computation that takes a while: the renewal of its flight, and one whose last part comes after
its caller has returned, such as a response that is rendered later."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..clock import time
from ..keeper import Job, keeper
from ..protocol import Call, Owner, encodable, fingerprint, hostname, milliseconds
from ..protocol.keys import FLIGHTS, flight_key, flight_leader
from .runners import Runner, Steps
from .scripts import RENEW_FLIGHT

if TYPE_CHECKING:
    from .leader import Leader

#: Seconds after which a computation is listed in the admin.
DESCRIBE_AFTER_SECONDS = 0.5


class Postponed(BaseException):
    """Raised by a producer whose value will be complete later, perhaps in another thread: the
    flight goes on for its timeout, and longer with ``renew``, until ``resumed`` or ``drop``."""

    leader: Leader | None = None

    def renew(self) -> None:
        """The rest of the computation begins: the keeper renews the flight."""
        for renewal in self.leader.renewals if self.leader else ():
            renewal.due = time.monotonic()
            keeper().add(renewal)

    def resumed(self, runner: Runner, compute: Callable[[], Any]) -> Steps:
        """End the flight with what ``compute`` returns, or as its exception says. (Without a
        leader, Redis was down when the computation began.)"""
        if self.leader is not None:
            leader, self.leader = self.leader, None
            yield from leader.resume(runner, compute)

    def fail(self) -> Steps:
        """End the flight without a value; also without a leader."""
        if self.leader is not None:
            leader, self.leader = self.leader, None
            yield from leader.fail()

    def drop(self) -> None:
        """End the flight without a value: the rest of the computation will never begin. The garbage
        collector may call this, so the keeper does it."""
        if self.leader is not None:
            self.leader.end_later()
            self.leader = None


class FlightRenewal(Job):
    """Renews the flight of the cache key ``key`` during the computation, as long as its leader is
    not garbage-collected."""

    def __init__(self, leader: Leader, key: bytes) -> None:
        server, token, lifetime = leader.server, leader.token, leader.timeout
        self._leader_of_it = weakref.ref(leader)
        description = {"group": leader.producer.group, "name": leader.stored_names.get(key, "")}
        self._lifetime = self.deadline_scale = lifetime
        self._began = time.monotonic()
        self._keys = (flight_key(key), flight_leader(key), server.index_of(FLIGHTS, key))
        self.key, self.token = key, token
        self._args = (token, milliseconds(lifetime), key)
        self._fields = {"lifetime": str(self._args[1]), "renews": "1", **description}
        self._thread = threading.current_thread().name
        self._named = False
        super().__init__(server, leader.asked_at + min(lifetime / 3, DESCRIBE_AFTER_SECONDS))

    def call(self, now: float) -> Call | None:
        if self._leader_of_it() is None:  # A signal handler's exception kept it from that.
            keeper().discard(self)
            return None
        leader = () if self._named else self._leader(now)
        return Call(RENEW_FLIGHT, self._keys, (*self._args, *leader))

    def _leader(self, now: float) -> tuple[str, ...]:
        """The milliseconds since the computation began, and the description of the leader."""
        leader = Owner(fingerprint(self.token), hostname(), os.getpid(), encodable(self._thread))
        known = {name: encodable(text) for name, text in self._fields.items() if text}
        return (f"{(now - self._began) * 1000:.0f}", *leader.fields(), *chain(*known.items()))

    def answered(self, value: Any, sent_at: float) -> None:
        self._named = True
        self.due = sent_at + self._lifetime / 3
        if not value:  # A write has ended the flight. STORE will tell the leader.
            keeper().discard(self)
            if (leader := self._leader_of_it()) is not None:
                leader.lose()

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + min(self._lifetime / 12, 1.0)
