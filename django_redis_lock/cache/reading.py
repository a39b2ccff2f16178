"""How ``get_or_set`` reads a value: few connections under a stampede, no waiting in an outage.

A *cold* read has to open a connection first. When many threads read at once, at most ``COLD_READS``
of them open a connection to a server at a time; the others then reuse a free one. django-redis does
not use the circuit breaker; the reads here do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from django.utils.functional import cached_property
from django_redis.client import DefaultClient, ShardClient
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..forks import after_fork
from ..protocol import Call
from ..singleflight import READ, FlightKey, InProcessFlight, Run, Steps, in_flight
from ..transport import (
    Breaker,
    CircuitOpen,
    Server,
    Topology,
    is_busy,
    is_pool_exhausted,
    server_of,
)
from .lock_factory import LockCache

#: Returned if there is no value.
MISSING = object()

#: How many threads of this process open a connection for reading to one server at a time.
COLD_READS = 2
#: Seconds a thread waits for its turn; then it reads in any case.
COLD_READ_TIMEOUT_SECONDS = 0.25

T = TypeVar("T")

_cold_reads: WeakKeyDictionary[Server, threading.BoundedSemaphore] = WeakKeyDictionary()
after_fork(_cold_reads.clear)


@contextmanager
def cold_read(server: Server) -> Iterator[bool]:
    """Wait for the turn to open a connection to ``server``; yields whether this thread waited.

    A thread that has waited too long goes ahead, and later threads use a new semaphore: the threads
    that hold the old one hang, or an exception from a signal handler prevented its release.
    """
    semaphore = _cold_reads.get(server)
    if semaphore is None:
        semaphore = _cold_reads.setdefault(server, threading.BoundedSemaphore(COLD_READS))
    waited = not semaphore.acquire(blocking=False)
    if waited and not semaphore.acquire(timeout=COLD_READ_TIMEOUT_SECONDS):
        if _cold_reads.get(server) is semaphore:
            _cold_reads.pop(server, None)
        yield True
        return
    try:
        yield waited
    finally:
        semaphore.release()


class Reading(LockCache):
    """The part of ``RedisCache`` and ``LocMemCache`` that reads values for ``get_or_set``."""

    def _read_or_join(self, key: str, version: int | None) -> Any:
        """The value, or MISSING, which is also the answer where the caller is to join a computation
        of this process.

        Raises:
            ConnectionInterrupted: Redis could not be asked.
        """
        raise NotImplementedError

    def _read_many(
        self, names: list[str], version: int | None
    ) -> tuple[dict[str, Any], BaseException | None]:
        """The stored values, and the error if Redis is down."""
        raise NotImplementedError

    def _without_redis(self, error: BaseException) -> BaseException:
        raise NotImplementedError

    def _read(self, flight_id: FlightKey, stale: bool) -> Steps:
        """The stored value with its remaining lifetime; None if there is none, or if this read can
        be left out because TAKE_FLIGHT returns the value."""
        server, _, group = flight_id
        if not stale and flight_id not in in_flight:
            return None
        if group is not None or not server.must_connect():
            return (yield from self._get_with_lifetime(flight_id))
        with cold_read(server) as waited:
            if waited and flight_id in in_flight:
                return None
            return (yield from self._get_with_lifetime(flight_id))

    def _get_with_lifetime(self, flight_id: FlightKey) -> Steps:
        flight = in_flight.get(flight_id)
        if flight is not None and not flight.read_lock.acquire(blocking=False):
            return None
        try:
            [stored] = yield Run((Call(READ, (flight_id[1],), ()),))
            return stored
        finally:
            if flight is not None:
                flight.read_lock.release()

    def _in_flight(self, key: str, version: int | None) -> InProcessFlight | None:
        """The flight of this process's threads for the value of ``key``."""
        if not in_flight:
            return None
        flight_id = (server_of(self._lock_client()), self._encoded_key(key, version), None)
        return in_flight.get(flight_id)


class RedisReading(Reading):
    """How values are read from Redis, by way of django-redis."""

    client: Any

    def _read_or_join(self, key: str, version: int | None) -> Any:
        if self._pool is None or not _must_connect(self._pool):
            return self._read_value(key, version, self._in_flight(key, version))
        with cold_read(server_of(self._lock_client())) as waited:
            flight = self._in_flight(key, version)
            return MISSING if waited and flight else self._read_value(key, version, flight)

    def _read_value(self, key: str, version: int | None, flight: InProcessFlight | None) -> Any:
        """The value, or MISSING. While this process computes it, in ``flight``, one thread at a
        time reads it; the others wait for the flight."""
        if flight and not flight.read_lock.acquire(blocking=False):
            return MISSING
        try:
            return self._with_breaker(self.client.get, key, default=MISSING, version=version)
        except ConnectionInterrupted as error:
            # If all connections of the pool are in use, or the server is busy with a script, the
            # caller goes on to TAKE_FLIGHT: that has its own connection, and is repeated.
            cause = error.__cause__
            if cause is not None and (is_pool_exhausted(cause) or is_busy(cause)):
                return MISSING
            raise
        finally:
            if flight:
                flight.read_lock.release()

    @cached_property
    def _breaker(self) -> Breaker | None:
        """The circuit breaker; None if django-redis may read from another server."""
        client = self.client
        if isinstance(client, ShardClient) or not isinstance(client, DefaultClient):
            return None
        if len(client._server) != 1:
            return None
        server = server_of(self._lock_client())
        return None if isinstance(server, Topology) else server.breaker

    @cached_property
    def _pool(self) -> Any:
        """django-redis's connection pool, if it shows its idle connections."""
        if self._breaker is None:
            return None
        pool = self.client.get_client(write=False).connection_pool
        return pool if hasattr(pool, "_available_connections") else None

    def _with_breaker(self, read: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call ``read``, unless the circuit breaker is open.

        Raises:
            ConnectionInterrupted: Redis is down.
        """
        breaker = self._breaker
        if breaker is None:
            return read(*args, **options)
        if breaker.failing:
            try:
                breaker.admit(None)
            except CircuitOpen as error:
                raise ConnectionInterrupted(connection=None) from error
        began = time.monotonic()
        try:
            found = read(*args, **options)
        except ConnectionInterrupted as error:
            cause = error.__cause__
            unreachable = isinstance(cause, (RedisConnectionError, RedisTimeoutError))
            if cause is not None and unreachable and not is_pool_exhausted(cause):
                breaker.failed(cause, time.monotonic() - began)
            raise
        if breaker.failing:
            breaker.answered()
        return found

    def _read_many(
        self, names: list[str], version: int | None
    ) -> tuple[dict[str, Any], BaseException | None]:
        # If all connections of the pool are in use, TAKE_FLIGHT reads the values.
        try:
            return self._with_breaker(self.client.get_many, names, version=version), None
        except ConnectionInterrupted as error:
            cause = error.__cause__ or error
            return {}, None if is_pool_exhausted(cause) else self._without_redis(cause)


def _must_connect(pool: Any) -> bool:
    """Whether the next connection from ``pool`` is not open yet."""
    try:
        return pool._available_connections[-1]._sock is None
    except IndexError:
        return True
