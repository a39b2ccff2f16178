"""How ``get_or_set`` reads, so that an outage is not waited for by everybody: django-redis's own
commands know nothing of the circuit breaker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from django.utils.functional import cached_property
from django_redis.client import DefaultClient, ShardClient
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..protocol import Call
from ..singleflight import READ, FlightKey, InProcessFlight, Run, Steps, boarded
from ..transport import Breaker, CircuitOpen, Topology, is_busy, is_pool_exhausted, server_of
from .looks import PendingReads, looks_at

__all__ = ["MISSING", "Reading"]

#: What is found where there is no value.
MISSING = object()

T = TypeVar("T")


class Reading:
    """The part of ``RedisCache`` that asks django-redis."""

    client: Any
    key_prefix: str
    _encoded_key: Any
    _lock_client: Any

    def _look(self, key: str, version: int | None) -> Any:
        """The value, or MISSING. Many callers at once would take a connection each; so while this
        process is after the value, one at a time looks, and the others may as well wait for it.

        Raises:
            ConnectionInterrupted: Redis could not be asked.
        """
        crowded = self._pool is not None and _must_connect(self._pool)
        if crowded and self._looks.wait_for((self.key_prefix, key, version)):
            return MISSING
        aboard = self._aboard(key, version) if boarded else None
        if aboard and not aboard.looking.acquire(blocking=False):
            return MISSING
        look = self._looks.begin((self.key_prefix, key, version)) if crowded else None
        try:
            value = self._heeded(self.client.get, key, default=MISSING, version=version)
            if look:
                look.missing = value is MISSING
            return value
        except ConnectionInterrupted as error:
            # So many look already that one of them will find it missing, if it is. A server that is
            # busy with a script is asked again by those who ask who computes the value.
            cause = error.__cause__
            if cause is not None and (is_pool_exhausted(cause) or is_busy(cause)):
                return MISSING
            raise
        finally:
            if look:
                self._looks.end((self.key_prefix, key, version), look)
            if aboard:
                aboard.looking.release()

    def _read(self, place: FlightKey, stale: bool) -> Steps:
        """What Redis keeps, with its remaining lifetime; None also where there is no need to look:
        who asks next for what may not be stale reads it while asking who computes it."""
        server, nkey, loop = place
        crowded = loop is None and server.must_connect()
        if crowded and self._looks.wait_for(nkey):
            return None
        aboard = boarded.get(place)
        if aboard is None and not stale:
            return None
        if aboard is not None and not aboard.looking.acquire(blocking=False):
            return None
        look = self._looks.begin(nkey) if crowded else None
        try:
            [kept] = yield Run((Call(READ, (nkey,), ()),))
            if look:
                look.missing = kept is None
            return kept
        finally:
            if look:
                self._looks.end(nkey, look)
            if aboard is not None:
                aboard.looking.release()

    def _aboard(self, key: str, version: int | None) -> InProcessFlight | None:
        """Those threads of this process that are after the value of ``key``."""
        place = (server_of(self._lock_client()), self._encoded_key(key, version), None)
        return boarded.get(place)

    @cached_property
    def _looks(self) -> PendingReads:
        return looks_at(server_of(self._lock_client()))

    @cached_property
    def _breaker(self) -> Breaker | None:
        """The server's; None where django-redis may read from another server than this."""
        client = self.client
        if isinstance(client, ShardClient) or not isinstance(client, DefaultClient):
            return None
        if len(client._server) != 1:
            return None
        server = server_of(self._lock_client())
        return None if isinstance(server, Topology) else server.breaker

    @cached_property
    def _pool(self) -> Any:
        """Where django-redis's reads take their connections, if it says which are at rest."""
        if self._breaker is None:
            return None
        pool = self.client.get_client(write=False).connection_pool
        return pool if hasattr(pool, "_available_connections") else None

    def _heeded(self, read: Callable[..., T], *args: Any, **options: Any) -> T:
        """What ``read`` returns.

        Raises:
            ConnectionInterrupted: as django-redis does, at once while the server is known to be
                away.
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
            in_vain = isinstance(cause, (RedisConnectionError, RedisTimeoutError))
            if cause is not None and in_vain and not is_pool_exhausted(cause):
                breaker.failed(cause, time.monotonic() - began)
            raise
        if breaker.failing:
            breaker.answered()
        return found


def _must_connect(pool: Any) -> bool:
    """Whether the next connection that ``pool`` gives has yet to be made."""
    try:
        return pool._available_connections[-1]._sock is None
    except IndexError:
        return True
