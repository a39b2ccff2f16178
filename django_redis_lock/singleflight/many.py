"""The flights of several values: one round trip for each step of all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from redis.exceptions import RedisError

from ..clock import time
from ..events import Shared
from ..exceptions import LockError
from ..protocol import as_bytes, flight_stream
from ..transport import is_outage
from .flight import FOLLOWER_CHECK_SECONDS, CoordinationError, expiry, failure
from .leader import NOTHING, Leader, Producer, Seen
from .runners import Overtaken, Runner, Steps, being_computed, overtake


class MultiFlight:
    """Computes the missing ones of several values, each by one caller at a time.

    Args:
        runner: executes the steps.
        flight_timeout: seconds after which the followers of a dead leader take over.
        producer: how to compute and store the values.
        names: of the keys, see ``Leader``.
    """

    def __init__(
        self, runner: Runner, flight_timeout: float, producer: Producer, names: Mapping[bytes, str]
    ) -> None:
        self._runner = runner
        self._server = runner.server
        self._in_thread = runner.in_thread
        self._flight_timeout = flight_timeout
        self._producer = producer
        self._names = names
        #: How many values were there at the first request.
        self.were_there = 0

    def _leader(self, keys: list[bytes]) -> Leader:
        return Leader(self._runner, self._flight_timeout, keys, self._producer, self._names)

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
        began, trace = time.monotonic(), ""
        while keys:
            leader = self._leader(keys)
            try:
                replies = yield from leader.take(followed)
            except (RedisError, OSError) as error:
                if not is_outage(error):  # Some of the flights may have been taken.
                    yield from leader.fail()
                raise CoordinationError from error
            led: dict[bytes, Seen] = {}
            overtaken: dict[bytes, bytes] = {}
            failed, streams, next_check = None, {}, time.monotonic() + FOLLOWER_CHECK_SECONDS
            there: dict[bytes, Any] = {}
            for key, (status, *news) in zip(keys, replies, strict=True):
                if status == 1:
                    led[key] = news
                elif status == 2:
                    there[key] = news[0]
                elif status == 3:
                    failed = failure(news[0])
                elif self._in_thread and overtake(token := as_bytes(news[0])):
                    overtaken[key] = token
                else:
                    streams[key] = flight_stream(key, as_bytes(news[0]))
                    next_check = min(next_check, expiry(int(news[1])))
            if overtaken:
                try:
                    taken = yield from leader.take_over(overtaken)
                except (RedisError, OSError) as error:
                    raise CoordinationError from error
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
                self._producer.emit(self._server, Shared, False, shared, waited, trace)
            if led:
                try:
                    found.update((yield from self._lead(leader, led)))
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
                followed = streams
                until = min(next_check, deadline)
                trace = yield self._runner.wait_for_leader(tuple(streams.values()), until)
        return found, keys

    def compute_anyway(self, keys: list[bytes]) -> Steps:
        """The values, computed by this caller even if others are computing them."""
        leader = self._leader(keys)
        replaced: dict[bytes, Seen] = dict.fromkeys(keys, NOTHING)
        try:
            taken = yield from leader.take_over()
            replaced = dict(zip(keys, taken, strict=True))
        except (RedisError, OSError):
            pass  # Storing will fail as well, and is logged.
        try:
            return (yield from self._lead(leader, replaced))
        except Overtaken:
            return (yield from self.get_or_compute(keys, math.inf))[0]

    def compute_alone(self, keys: list[bytes], why: BaseException) -> Steps:
        """The values, computed without Redis because of ``why``."""
        return (yield from self._leader(keys).compute(why))

    def _lead(self, leader: Leader, replaced: dict[bytes, Seen]) -> Steps:
        """Compute and store the values of the keys in ``replaced``."""
        leader.begin(replaced)
        values, encoded = yield from leader.lead()
        yield from leader.store(encoded)
        return values
