"""The flights of several values: one round trip for each step of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from ..clock import time
from ..exceptions import ComputationFailed, LockError
from ..keeper import keeper
from ..notices import get_logger
from ..protocol import Call, flight_key, flight_stream, milliseconds
from ..transport import Server, is_outage
from .in_process import being_computed, computing, overtake, token_for
from .leader import NOTHING, Completion, FlightRenewal, Seen, run_or_abort
from .producer import (
    Overtaken,
    Producer,
    ProducerFailed,
    computation_events,
    emit_shared,
    log_without_redis,
)
from .scripts import TAKE_FLIGHT, TAKE_OVER
from .steps import (
    FOLLOWER_CHECK_SECONDS,
    Compute,
    CoordinationError,
    Steps,
    WaitForLeader,
    retry_during_failover,
    text,
)

logger = get_logger("django_redis_lock.flights")

#: Computes the values of the keys that it is called with; it may leave some out.
Produce = Callable[[list[bytes]], Any]


class MultiFlight:
    """Computes the missing ones of several values, each by one caller at a time.

    Args:
        server: where the values are.
        flight_timeout: seconds after which the followers of a dead leader take over.
        producer: how to store the values; its ``compute`` is what ``produce`` calls.
        produce: computes those that this caller leads.
        in_thread: as for ``Flights``.
    """

    def __init__(
        self,
        server: Server,
        flight_timeout: float,
        producer: Producer,
        produce: Produce,
        in_thread: bool,
    ) -> None:
        self._server = server
        self._flight_timeout = flight_timeout
        self._producer = producer
        self._produce = produce
        self._in_thread = in_thread
        self._token = token_for(producer.compute)

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
        followed = False
        while keys:
            try:
                take = partial(run_or_abort, keys, self._token, *map(self._taking, keys))
                replies = yield from (
                    retry_during_failover(self._server, take) if followed else take()
                )
            except (RedisError, OSError) as error:
                if not is_outage(error):  # Some of the flights may have been taken.
                    yield from self._completion(keys).fail()
                raise CoordinationError from error
            led: dict[bytes, Seen] = {}
            overtaken: dict[bytes, bytes] = {}
            failed, streams, next_check = None, {}, time.monotonic() + FOLLOWER_CHECK_SECONDS
            there: dict[bytes, Any] = {}
            for key, (status, *news) in zip(keys, replies, strict=True):
                if int(status) == 1:
                    led[key] = news
                elif int(status) == 2:
                    there[key] = news[0]
                elif int(status) == 3:
                    failed = ComputationFailed(text(news[0]))
                elif self._in_thread and overtake(text(news[0]).encode()):
                    overtaken[key] = text(news[0]).encode()
                else:
                    streams[key] = flight_stream(key, text(news[0]).encode())
                    next_check = min(next_check, time.monotonic() + max(int(news[1]), 1) / 1000)
            if overtaken:
                try:
                    taken = yield from self._take_over(overtaken)
                except (RedisError, OSError) as error:
                    raise CoordinationError from error
                for key, seen in taken.items():
                    if seen is not None:
                        led[key] = seen
                    else:  # Yet another caller leads.
                        self._in_thread, streams[key] = False, b""
            shared = len(keys) - len(led) - len(streams)
            if followed and shared and failed is None:
                emit_shared(self._server, self._producer, values=shared)
            if led:
                try:
                    found.update((yield from self._lead(led)))
                except Overtaken:  # Another thread leads these now.
                    self._in_thread = False
                    self._token = token_for(self._producer.compute)
                    streams.update(dict.fromkeys(led, b""))
            # Decoding may fail, so first compute the values for which others wait.
            found.update((key, self._producer.decode(value)) for key, value in there.items())
            if failed is not None:
                raise failed
            keys = list(streams)
            if keys and time.monotonic() >= deadline:
                break
            if keys and all(streams.values()):
                followed = True
                yield WaitForLeader(tuple(streams.values()), min(next_check, deadline))
        return found, keys

    def compute_anyway(self, keys: list[bytes]) -> Steps:
        """The values, computed by this caller even if others are computing them."""
        replaced: dict[bytes, Seen] = dict.fromkeys(keys, NOTHING)
        try:
            replaced = yield from self._take_over(dict.fromkeys(keys))
        except (RedisError, OSError):
            pass  # Storing will fail as well, and is logged.
        try:
            return (yield from self._lead(replaced))
        except Overtaken:
            return (yield from self.get_or_compute(keys, math.inf))[0]

    def _take_over(self, leaders: Mapping[bytes, bytes | None]) -> Steps:
        """Lead from now on, for each key in place of this leader (None: any); returns what is at
        the keys now, None where yet another caller leads."""
        keys, lifetime = list(leaders), milliseconds(self._flight_timeout)
        taking = (
            Call(
                TAKE_OVER,
                (key, flight_key(key)),
                (self._token, lifetime, *([leader] if leader is not None else ())),
            )
            for key, leader in leaders.items()
        )
        replaced = yield from run_or_abort(keys, self._token, *taking)
        return dict(zip(keys, replaced, strict=True))

    def compute_alone(self, keys: list[bytes], why: BaseException) -> Steps:
        """The values, computed without Redis because of ``why``."""
        log_without_redis(self._server, keys[0], why, len(keys))
        with computation_events(self._server, self._producer, len(keys), without_redis=True):
            return (yield Compute(lambda: self._produce(keys)))

    def _taking(self, key: bytes) -> Call:
        args = (self._token, milliseconds(self._flight_timeout), self._producer.stale)
        return Call(TAKE_FLIGHT, (key, flight_key(key)), args)

    def _lead(self, replaced: dict[bytes, Seen]) -> Steps:
        """Compute and store the values of the keys in ``replaced``."""
        keys = list(replaced)
        alive = (self._token, self._flight_timeout, self)
        flights = [FlightRenewal(self._server, key, *alive, self._producer.group) for key in keys]
        try:
            for flight in flights:
                keeper().add(flight)
            with (
                computing(self._server, keys),
                computation_events(self._server, self._producer, len(keys)),
            ):
                values = yield Compute(lambda: self._produce(keys))
            encoded = self._encoded(values)
        except ProducerFailed as failed:
            if isinstance(failed.error, Overtaken):
                yield from self._completion(keys).fail()
                raise failed.error from None
            pause = self._producer.error_ttl if isinstance(failed.error, Exception) else 0
            yield from self._completion(keys).fail(failed.describe(), pause)
            raise
        finally:
            for flight in flights:
                keeper().discard(flight)
        yield from self._completion(keys).store(encoded, self._producer, replaced)
        return values

    def _completion(self, keys: list[bytes]) -> Completion:
        return Completion(self._server, keys, self._token, self._flight_timeout)

    def _encoded(self, values: dict[bytes, Any]) -> dict[bytes, bytes | int]:
        try:
            return {key: self._producer.encode(value) for key, value in values.items()}
        except BaseException as error:  # It cannot be stored, so it cannot be shared.
            raise ProducerFailed(error) from error
