"""The leader's part in Redis: it renews its flight, describes itself, and ends the flight with a
value, without one, or after an interruption."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from ..clock import time
from ..keeper import Job, keeper
from ..locking import DeferredRelease
from ..notices import get_logger
from ..protocol import (
    FLIGHTS,
    Call,
    Owner,
    encodable,
    fingerprint,
    flight_key,
    flight_leader,
    flight_stream,
    hostname,
    milliseconds,
    printable,
)
from ..transport import Server, is_outage
from .producer import Producer
from .scripts import END_FLIGHT, RENEW_FLIGHT, STORE
from .steps import Run, Steps

logger = get_logger("django_redis_lock.flights")

#: What was at a value's key when its flight began: digest and expiry, as the scripts return them.
Seen = Sequence[bytes | str]
NOTHING: Seen = ("", "0")

#: Milliseconds for which followers can read the end of a flight.
STREAM_LIFETIME_MILLISECONDS = 10_000
#: Seconds after which a computation is listed in the admin.
DESCRIBE_AFTER_SECONDS = 0.5


class FlightRenewal(Job):
    """Renews the flight of the cache key ``key`` during the computation.

    Args:
        leader: when it is garbage-collected, the renewal ends.
        group: the metrics group; empty: derived from the name.
    """

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
        super().__init__(server, self._began + min(lifetime / 3, DESCRIBE_AFTER_SECONDS))

    def call(self, now: float) -> Call | None:
        if self._leader_of_it() is None:  # A signal handler's exception kept it from that.
            keeper().discard(self)
            return None
        leader = () if self._named else self._leader(now)
        return Call(RENEW_FLIGHT, self._keys, (*self._args, self._renewals + 1, *leader))

    def _leader(self, now: float) -> tuple[str, ...]:
        """The milliseconds since the computation began, and the description of the leader."""
        lifetime = self._args[1]
        leader = Owner(fingerprint(self.token), hostname(), os.getpid(), self._thread)
        facts: tuple[str, ...] = ("lifetime", str(lifetime), "renews", "1")
        if self._group:
            facts = (*facts, "group", self._group)
        return (f"{(now - self._began) * 1000:.0f}", *leader.fields()[:-2], *facts)

    def answered(self, value: Any, sent_at: float) -> None:
        self._named = True
        self._renewals += 1
        self.due = sent_at + self._lifetime / 3
        if not value:
            keeper().discard(self)  # A write has ended the flight. STORE will tell the leader.

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + min(self._lifetime / 12, 1.0)


class Completion(NamedTuple):
    """How the flights of one leader end.

    Attributes:
        keys: of the values.
        timeout: seconds after which the flights end by themselves.
    """

    server: Server
    keys: Sequence[bytes]
    token: bytes
    timeout: float

    def store(
        self,
        encoded: Mapping[bytes, bytes | int],
        producer: Producer,
        replaced: Mapping[bytes, Seen],
    ) -> Steps:
        """End the flights, each with its value if there is one, in one round trip. Does not raise
        if Redis is down: the caller still gets the computed values.

        Args:
            encoded: the values as Redis stores them.
            replaced: what was at the keys when the flights began.

        Returns: for each key whether the value was stored; None: unknown.
        """
        about = (producer.lifetime, STREAM_LIFETIME_MILLISECONDS)
        calls = tuple(
            Call(STORE, _keys(key, self.token), (self.token, encoded[key], *about, *seen))
            if key in encoded and (seen := replaced.get(key) or NOTHING)
            else _ending(key, self.token)
            for key in self.keys
        )
        try:
            mine = yield from run_or_abort(self.keys, self.token, *calls)
            return [bool(one) for one in mine]
        except (RedisError, OSError) as error:
            logger.warning("Could not store %s: %s", self, error)
            if is_outage(error):
                self._end_later(calls)
            else:  # Redis refuses the value, so the followers must not wait for it.
                yield from self.fail()
            return [None for _ in self.keys]

    def fail(self, message: str = "", pause: int = 0) -> Steps:
        """End the flights without a value. For ``pause`` ms other callers do not compute, but get
        an error with ``message``."""
        calls = tuple(_ending(key, self.token, message, pause) for key in self.keys)
        try:
            yield from run_or_abort(self.keys, self.token, *calls)
        except (RedisError, OSError) as error:
            logger.warning("Could not end the computation of %s: %s", self, error)
            if is_outage(error):
                self._end_later(calls)

    def _end_later(self, calls: Sequence[Call]) -> None:
        """Have the keeper repeat ``calls``, which failed: until then the followers wait."""
        for call in calls:
            keeper().add(DeferredRelease(self.server, call, self.timeout))

    def __str__(self) -> str:
        first = printable(self.keys[0])
        return first if len(self.keys) == 1 else f"{first} and {len(self.keys) - 1} more"


def run_or_abort(keys: Sequence[bytes], token: bytes, *calls: Call) -> Steps:
    """The replies to ``calls``. A caller that is interrupted (by cancellation, Ctrl-C or a time
    limit) cannot know whether it leads the flights of ``keys``, so it ends them."""
    try:
        return (yield Run(calls))
    except (RedisError, OSError, GeneratorExit):
        raise
    except BaseException:
        try:
            yield Run(tuple(_ending(key, token) for key in keys), done=True)
        except (RedisError, OSError):
            pass  # Then they expire.
        raise


def _ending(key: bytes, token: bytes, message: str = "", pause: int = 0) -> Call:
    args = (token, STREAM_LIFETIME_MILLISECONDS, message if pause else "", pause)
    return Call(END_FLIGHT, _keys(key, token), args)


def _keys(key: bytes, token: bytes) -> tuple[bytes, ...]:
    return key, flight_key(key), flight_stream(key, token)
