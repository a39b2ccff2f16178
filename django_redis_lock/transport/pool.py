"""Pools of redis-py's, whose connections may lead to a server that has become a replica.

redis-py tries a call again after the errors that its ``Retry`` knows, and a connection that a
replica answers stays in the pool for good. Here such a call is sent once more, on a new
connection; a replica has refused it, so nothing has run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError
from redis.retry import Retry

from .address import name_driver
from .refusals import is_misdirected
from .registry import Client, Pool, renew_pool

C = TypeVar("C", bound=Client)
T = TypeVar("T")


class FollowingRetry(Retry):
    """The ``usual`` one of a pool's connections, which also follows an address."""

    def __init__(self, usual: Retry, pool: Pool) -> None:
        super().__init__(NoBackoff(), 0)
        self._usual = usual
        self._pool = weakref.ref(pool)

    def update_supported_errors(self, specified_errors: Iterable[type[Exception]]) -> None:
        others = [error for error in specified_errors if error is not ReadOnlyError]
        self._usual.update_supported_errors(others)

    def get_retries(self) -> int:
        return int(self._usual.get_retries())

    def call_with_retry(
        self, do: Callable[[], T], fail: Callable[..., object], *args: Any, **options: Any
    ) -> T:
        try:
            return self._usual.call_with_retry(do, fail, *args, **options)
        except RedisError as error:
            if not is_misdirected(error):
                raise
            if (pool := self._pool()) is not None:
                renew_pool(pool)
            # Disconnects. redis-py 5 and 6 raise any error but those in ``retry_on_error``.
            counted = (1,) if options.get("with_failure_count") else ()
            fail(ReadOnlyError(str(error)), *counted)
        return self._usual.call_with_retry(do, fail, *args, **options)


def follow_address(client: C) -> C:
    """``client``, of redis-py's, whose pool has not connected yet: its connections follow."""
    pool = getattr(client, "connection_pool", None)
    if pool is None or isinstance(pool.connection_kwargs.get("retry"), FollowingRetry):
        return client
    settings = pool.connection_kwargs
    name_driver(pool.connection_class, settings)
    usual = getattr(pool.connection_class(**settings), "retry", None)
    if usual is not None:
        errors = [*(settings.get("retry_on_error") or ()), ReadOnlyError]
        settings.update(retry=FollowingRetry(usual, pool), retry_on_error=errors)
    return client
