"""The options of the methods, and a lock, as type checkers know them. Nothing imports this module
when it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

from ..locking import BaseLock


class GetOrSetManyArguments(TypedDict, total=False):
    """The options of ``RedisCache.get_or_set_many``, explained at ``get_or_set``."""

    wait: float
    on_wait_timeout: Literal["compute", "raise", "default"]
    jitter: float
    error_ttl: float
    group: str | None


class GetOrSetArguments(GetOrSetManyArguments, total=False):
    """The options of ``RedisCache.get_or_set``, explained there."""

    stale: float
    background: bool
    soft_timeout: float | None


class LockArguments(TypedDict, total=False):
    """The options of ``cache.lock()`` that are not arguments of it, explained there and at
    ``Lock``."""

    using: Sequence[str] | None
    on_redis_down: Literal["raise", "local", "run"] | None
    critical: bool
    replicas: int | None
    limit: int
    renew: bool
    max_hold: float | None
    min_hold: float
    on_lost: Callable[[], object] | None
    label: str | None
    group: str | None
    warn_after: float | None
    id: str | bytes | None
    grant_timeout: float
    reentrant: bool
    raise_on_release_error: bool


class AsyncLockArguments(LockArguments, total=False):
    """The options of ``cache.alock()``."""

    sleep: float
    blocking: bool
    blocking_timeout: float | None
    thread_local: bool
    cancel_on_lost: bool


class CurrentLock(BaseLock):
    """What ``current_lock()`` returns: a ``Lock``, or in coroutines an ``AsyncLock``, of which
    these methods are awaited; see there."""

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Any:
        """See ``Lock.extend``."""

    reacquire: Callable[[], Any]
    ttl: Callable[[], Any]
    owned: Callable[[], Any]
    holder: Callable[[], Any]
    held: Callable[[], Any]
    holders: Callable[[], Any]
