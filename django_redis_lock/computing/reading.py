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

from ..locking.breaker import Breaker, ServerAway
from ..locking.calls import is_pool_exhausted
from ..locking.server import server_of
from ..locking.topology import Topology

__all__ = ["Reading"]

T = TypeVar("T")


class Reading:
    """The part of ``RedisCache`` that asks django-redis."""

    client: Any
    _lock_client: Any

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
            except ServerAway as error:
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
