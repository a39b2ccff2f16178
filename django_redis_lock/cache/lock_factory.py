"""Which kind of lock a call of ``cache.lock()`` asks for: on one server or several, and what it
does when Redis is down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from ..conf import Conf
from ..fallback import (
    AsyncFallbackLock,
    AsyncFallbackRedlock,
    FallbackLock,
    FallbackRedlock,
    check_on_redis_down,
)
from ..locking import AsyncLock, Lock
from ..redlock import AsyncRedlock, Redlock
from ..transport import asyncio_client

__all__ = ["check_policy", "check_using", "for_tasks", "for_threads"]


def for_threads(cache: Any, client: Any, options: dict[str, Any]) -> Callable[..., Lock]:
    """What makes the lock, given its name and those of ``options`` that are left."""
    several, policy = _chosen(cache.conf, client, options)
    if several:
        clients = [_client(alias) for alias in several]
        kind: Any = partial(FallbackRedlock if policy else Redlock, clients)
    else:
        kind = partial(FallbackLock if policy else Lock, client or cache._lock_client())
    return cast(Callable[..., Lock], partial(kind, **policy))


def for_tasks(cache: Any, client: Any, options: dict[str, Any]) -> Callable[..., AsyncLock]:
    """As ``for_threads``, for asyncio."""
    several, policy = _chosen(cache.conf, client, options)
    if several:
        clients = [asyncio_client(_client(alias)) for alias in several]
        kind: Any = partial(AsyncFallbackRedlock if policy else AsyncRedlock, clients)
    else:
        client = client or asyncio_client(cache._lock_client())
        kind = partial(AsyncFallbackLock if policy else AsyncLock, client)
    return cast(Callable[..., AsyncLock], partial(kind, **policy))


def _chosen(
    conf: Conf, client: Any, options: dict[str, Any]
) -> tuple[Sequence[str], dict[str, Any]]:
    """The caches of a lock on several servers, and what it does when they are down."""
    several = check_using(options.pop("using", None))
    if several and client is not None:
        raise ValueError("give either using or client: both say where the lock is")
    given, critical = options.pop("on_redis_down", None), options.pop("critical", False)
    check_policy(given, critical)
    if options.get("replicas") is None:
        # A lock on several servers has none: its servers are each other's.
        options["replicas"] = 0 if several else conf.REPLICAS
    policy = "raise" if critical else given or conf.ON_REDIS_DOWN
    if policy == "raise":
        return several, {}
    return several, {"on_redis_down": policy, "local_folder": conf.LOCAL_LOCK_FOLDER}


def check_using(value: Any) -> tuple[str, ...]:
    """``value`` as the aliases of several caches; none for None.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"using must be a list of cache aliases, not {value!r}")
    if not all(isinstance(alias, str) for alias in value):
        raise TypeError(f"using must be a list of cache aliases, not {value!r}")
    if len(value) < 3 or len(set(value)) < len(value):
        raise ValueError(f"using must have three different caches or more, not {value!r}")
    return tuple(value)


def check_policy(on_redis_down: Any, critical: Any) -> None:
    """
    Raises:
        TypeError, ValueError: they make no sense, or not together.
    """
    if on_redis_down is not None:
        check_on_redis_down("on_redis_down", on_redis_down)
    if not isinstance(critical, bool):
        raise TypeError(f"critical must be True or False, not {critical!r}")
    if critical and on_redis_down not in (None, "raise"):
        raise ValueError(
            f"a critical lock never does without Redis: leave on_redis_down={on_redis_down!r} out"
        )


def _client(alias: str) -> Any:
    try:
        return cast(Any, caches[alias])._lock_client()
    except AttributeError:
        raise ImproperlyConfigured(
            f'the cache {alias!r} cannot lock: its BACKEND must be "django_redis_lock.cache.'
            'RedisCache"'
        ) from None
