"""The flights of one value or several in Redis: one round trip for each step of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from redis.exceptions import RedisError

from ..clock import time
from ..events import Shared
from ..exceptions import ComputationFailed, LockError
from ..protocol import as_bytes, flight_stream, printable
from ..threads import get_logger
from ..transport import is_outage
from .in_process import InProcessFlight
from .leader import Leader, Producer, Seen
from .runners import Overtaken, Runner, Steps, being_computed, overtake

logger = get_logger("django_redis_lock.flights")

#: Seconds after which a follower checks whether its flight still exists.
FOLLOWER_CHECK_SECONDS = 2.0


class CoordinationError(Exception):
    """A request to Redis failed, and nothing was computed; has the error as its cause."""


def failure(message: Any) -> ComputationFailed:
    """The error of a caller that comes shortly after a computation failed with ``message``."""
    return ComputationFailed(as_bytes(message).decode(errors="replace"))


def expiry(pttl: int) -> float:
    """The monotonic time at which a key that now has ``pttl`` milliseconds left will be gone."""
    # Redis rounds down, and a key with 0 ms left is still there.
    return time.monotonic() + (max(pttl, 0) + 1) / 1000


class MultiFlight:
    """Computes the missing ones of some values, each by one caller at a time.

    Args:
        runner: executes the steps.
        flight_timeout: seconds after which the followers of a dead leader take over.
        producer: how to compute and store the values.
        names: of several keys, see ``Leader``.
        shared: of a single key, what the other callers of this process wait for.
    """

    def __init__(
        self,
        runner: Runner,
        flight_timeout: float,
        producer: Producer,
        names: Mapping[bytes, str] | None = None,
        shared: InProcessFlight | None = None,
    ) -> None:
        self._runner = runner
        self._server = runner.server
        self._in_thread = runner.in_thread
        self._flight_timeout = flight_timeout
        self._producer = producer
        self._names = names
        self._shared = shared or InProcessFlight(runner, b"")
        #: How many values were there at the first request.
        self.were_there = 0

    def leader(self, keys: list[bytes]) -> Leader:
        timeout, producer = self._flight_timeout, self._producer
        return Leader(self._runner, timeout, keys, producer, self._shared, self._names)

    def get_or_compute(self, keys: list[bytes], deadline: float) -> Steps:
        """The values, and the keys that others were still computing at ``deadline`` (monotonic
        seconds). A caller computes the values it leads before it waits, so two callers never wait
        for each other.

        Raises: as ``Flights.get_or_compute``.
        """
        for key in keys:
            if (self._server, key) in being_computed():
                raise LockError("the function that computes this value requests the value", key)
        found: dict[bytes, Any] = {}
        followed: dict[bytes, bytes] = {}
        began, mine = time.monotonic(), self._shared
        while keys:
            leader = self.leader(keys)
            mine.asked += 1
            with self._coordination():
                replies = yield from self._take(leader, followed)
            led: dict[bytes, Seen] = {}
            overtaken: dict[bytes, bytes] = {}
            failed, streams, next_check = None, {}, time.monotonic() + FOLLOWER_CHECK_SECONDS
            there: dict[bytes, Any] = {}
            for key, (status, *news) in zip(keys, replies, strict=True):
                if status == 1:
                    led[key] = news
                elif status == 2:
                    there[key] = mine.found = news[0]
                elif status == 3:
                    failed = failure(news[0])
                elif self._in_thread and overtake(token := as_bytes(news[0])):
                    overtaken[key] = token
                else:
                    streams[key] = flight_stream(key, as_bytes(news[0]))
                    next_check = min(next_check, expiry(int(news[1])))
            if overtaken:
                with self._coordination():
                    taken = yield from leader.take_over(overtaken)
                for key, seen in zip(overtaken, taken, strict=True):
                    if seen is not None:
                        led[key] = seen
                    else:  # The flight has ended, or another caller overtook it.
                        streams[key] = b""
            if not followed:
                self.were_there += len(there)
            shared = len(keys) - len(led) - len(streams)
            if followed and shared and failed is None:
                waited = time.monotonic() - began
                self._producer.emit(self._server, Shared, False, shared, waited, mine.trace)
            if led:
                leader.begin(led)
                try:
                    found.update((yield from self.lead(leader)))
                except Overtaken:  # Another thread leads these now.
                    self._in_thread = False
                    streams.update(dict.fromkeys(led, b""))
            # Decoding may fail, so first compute the values for which others wait.
            found.update((key, self._producer.decode(value)) for key, value in there.items())
            if failed is not None:
                raise failed
            keys = list(streams)
            if keys and time.monotonic() >= deadline:
                break
            if keys and all(streams.values()):
                followed, mine.computed = streams, True
                awaited, until = tuple(streams.values()), min(next_check, deadline)
                with self._coordination():
                    mine.trace = yield self._runner.wait_for_leader(awaited, until)
        return found, keys

    def _take(self, leader: Leader, followed: Mapping[bytes, bytes]) -> Steps:
        try:
            return (yield from leader.take(followed))
        except (RedisError, OSError) as error:
            if len(leader.keys) > 1 and not is_outage(error):  # Some may have been taken.
                yield from leader.fail()
            raise

    @contextmanager
    def _coordination(self) -> Iterator[None]:
        """A request in the ``with`` block that fails raises CoordinationError."""
        try:
            yield
        except (RedisError, OSError) as error:
            self._shared.outage = error
            raise CoordinationError from error

    def compute_anyway(self, keys: list[bytes]) -> Steps:
        """The values, computed by this caller even if others are computing them. This caller leads
        from now on; the results of earlier leaders are not stored. A write wins over all."""
        leader = self.leader(keys)
        try:
            taken = yield from leader.take_over()
        except (RedisError, OSError) as error:
            return (yield from leader.compute(error))
        leader.begin(dict(zip(keys, taken, strict=True)))
        try:
            return (yield from self.lead(leader))
        except Overtaken:
            return (yield from self.get_or_compute(keys, math.inf))[0]

    def compute_alone(self, keys: list[bytes], why: BaseException) -> Steps:
        """The values, computed without Redis because of ``why``."""
        return (yield from self.leader(keys).compute(why))

    def lead(self, leader: Leader) -> Steps:
        """Compute the values, store them, and hand that of a single key to the callers of this
        process that wait for it.

        Raises:
            Overtaken: another thread leads instead.
        """
        shared = self._shared
        values, encoded = yield from leader.lead()
        shared.asked += 1
        stored = yield from leader.store(encoded)
        for key, is_stored in zip(leader.keys, stored, strict=True):
            if is_stored is False:
                # A write or a delete came in between: only the caller gets the result.
                text = "%s was written while it was computed; not stored"
                logger.info(text, printable(key))
            else:
                shared.found, shared.computed = encoded.get(key), True
                shared.trace = leader.trace
        return values
