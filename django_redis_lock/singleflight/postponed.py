"""A computation that takes a while: the renewal of its flight, and one whose last part comes after
its caller has returned, such as a response that is rendered later."""

from __future__ import annotations

import os
import threading
import weakref
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..clock import time
from ..keeper import Job, keeper
from ..protocol import Call, Owner, encodable, fingerprint, hostname, milliseconds
from ..protocol.keys import FLIGHTS, flight_key, flight_leader
from .scripts import RENEW_FLIGHT

if TYPE_CHECKING:
    from .leader import Leader

#: Seconds after which a computation is listed in the admin.
DESCRIBE_AFTER_SECONDS = 0.5


class Postponed(BaseException):
    """Raised by a producer whose value will be complete later, perhaps in another thread: the
    flight goes on for its timeout. See ``contrib.pages``."""

    #: None: Redis was down when the computation began, or the flight has ended.
    leader: Leader | None = None


class FlightRenewal(Job):
    """Renews the flight of the cache key ``key`` during the computation, as long as its leader is
    not garbage-collected."""

    def __init__(self, leader: Leader, key: bytes) -> None:
        self.key, self.token = key, leader.token
        self.deadline_scale = leader.timeout
        self._leader_ref = weakref.ref(leader)
        self._began = time.monotonic()
        self._thread = threading.current_thread().name
        self._named = False
        due = leader.sent_at + min(leader.timeout / 3, DESCRIBE_AFTER_SECONDS)
        super().__init__(leader.server, due)

    def call(self, now: float) -> Call | None:
        leader = self._leader_ref()
        if leader is None:  # A signal handler's exception kept it from that.
            keeper().discard(self)
            return None
        key = self.key
        keys = flight_key(key), flight_leader(key), self.server.index_of(FLIGHTS, key)
        args = self.token, milliseconds(self.deadline_scale), key
        return Call(RENEW_FLIGHT, keys, args if self._named else (*args, *self._owner(leader, now)))

    def _owner(self, leader: Leader, now: float) -> tuple[str, ...]:
        """The milliseconds since the computation began, and the description of the leader."""
        owner = Owner(fingerprint(self.token), hostname(), os.getpid(), encodable(self._thread))
        described = {
            "lifetime": str(milliseconds(self.deadline_scale)),
            "renews": "1",
            "group": leader.producer.group,
            "name": leader.name_of(self.key),
        }
        known = {name: encodable(text) for name, text in described.items() if text}
        return (f"{(now - self._began) * 1000:.0f}", *owner.fields(), *chain(*known.items()))

    def answered(self, value: Any, sent_at: float) -> None:
        self._named = True
        self.due = sent_at + self.deadline_scale / 3
        if not value:  # A write has ended the flight. STORE will tell the leader.
            keeper().discard(self)
            if (leader := self._leader_ref()) is not None:
                leader.lose()

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + min(self.deadline_scale / 12, 1.0)
