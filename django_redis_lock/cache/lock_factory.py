"""The locks of a cache: which kind ``cache.lock()`` makes, and which caches can lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from django.conf import settings
from django.core.cache import InvalidCacheBackendError, caches
from django.core.cache.backends.base import BaseCache, default_key_func
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ..conf import Conf, given
from ..fallback import (
    AsyncFallbackLock,
    AsyncFallbackRedlock,
    FallbackLock,
    FallbackRedlock,
    check_on_redis_down,
)
from ..inventory import Inventory, list_held
from ..locking import AsyncLock, Lock
from ..protocol import RESERVED, check_name_in_cache, longest_hold, refuse_reserved
from ..redlock import AsyncRedlock, Redlock
from ..transport import asyncio_client
from .python_redis_lock import reset_all

#: The BACKEND of a cache that can lock, or a subclass of it.
BACKEND = "django_redis_lock.cache.RedisCache"
#: The same without Redis: its locks exclude the threads and tasks of one process.
LOCAL_BACKEND = "django_redis_lock.cache.LocMemCache"

#: Stands for an argument left out; None would be a value.
_SETTING: Any = object()

AnyLock = TypeVar("AnyLock", Lock, AsyncLock)


class BackendCannotLock(ImproperlyConfigured):
    """A cache has another BACKEND, which cannot lock."""

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"the cache {alias!r} cannot lock: its BACKEND is "
            f"{settings.CACHES[alias].get('BACKEND')!r}. In CACHES[{alias!r}] write "
            f'"BACKEND": "{BACKEND}", or, for development and tests without Redis, '
            f'"BACKEND": "{LOCAL_BACKEND}"'
        )


class LockCache(BaseCache):
    """The part of ``RedisCache`` and ``LocMemCache`` that makes locks.

    Attributes:
        in_memory: whether its locks exclude the threads of one process only.
    """

    in_memory = False

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(location, params)  # type: ignore[call-arg,arg-type]  # of a real backend
        self.conf = Conf(params.get("OPTIONS"))
        # Django's own keys begin with the prefix: only with others need each be looked at.
        if self.key_func is not default_key_func or str(self.key_prefix).startswith(RESERVED):
            self.key_func = _refusing_reserved(self.key_func)

    def _lock_client(self) -> Any:
        """The redis-py client of the server that decides who holds a lock."""
        raise NotImplementedError

    def _client_for(self, client: Any) -> Any:
        """The client of a lock: ``client``, if the caller has given one."""
        return client or self._lock_client()

    def _aclient_for(self, client: Any) -> Any:
        return client or asyncio_client(self._lock_client())

    def lock(
        self,
        key: str,
        version: int | None = None,
        timeout: float | None = _SETTING,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        client: Any = None,
        thread_local: bool = True,
        **options: Any,
    ) -> Lock:
        """A lock named ``key``. Its key in Redis cannot be the key of a cached value.

        Args:
            timeout: seconds. Default: the setting TIMEOUT, and the lock is renewed. None: the lock
                never expires, not even after a crash.
            using: three or more cache aliases, for a ``Redlock`` over their servers.
            on_redis_down: ``"raise"``, ``"local"`` or ``"run"`` (``docs/choosing_guarantees.md``).
                Default: the setting.
            critical: never hold the lock without Redis, regardless of the setting.
            replicas: how many replicas must confirm the lock. Default: the setting.
            options: see ``django_redis_lock.Lock``.
        """
        options.update(sleep=sleep, blocking=blocking, blocking_timeout=blocking_timeout)
        options.update(thread_local=thread_local, **self._lifetime(timeout, options))
        make = _sync_factory(self, client, options)
        name = check_name_in_cache(key)
        return self._configured(make(self._lock_name(name, version), **options), name)

    def alock(
        self,
        key: str,
        version: int | None = None,
        timeout: float | None = _SETTING,
        *,
        client: Any = None,
        **options: Any,
    ) -> AsyncLock:
        """``lock`` for asyncio: ``async with cache.alock("import"):``.

        Args:
            client: a redis.asyncio client. Default: one of the running event loop, to the server of
                this cache.

        Raises:
            RuntimeError: no event loop is running.
        """
        options.update(self._lifetime(timeout, options))
        make = _async_factory(self, client, options)
        name = check_name_in_cache(key)
        return self._configured(make(self._lock_name(name, version), **options), name)

    def _configured(self, lock: AnyLock, key: str) -> AnyLock:
        lock.cache, lock.cache_key = self, key
        if lock.warn_after is None:
            longest = longest_hold(lock.renew, lock.timeout, lock.max_hold)
            lock.warns_after = self.conf.warn_after(longest)
        return lock

    def _lifetime(self, timeout: float | None, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a lock's lifetime, completed by the settings."""
        grant_timeout = options.get("grant_timeout", self.conf.GRANT_TIMEOUT)
        if timeout is not _SETTING:
            return {"timeout": timeout, "grant_timeout": grant_timeout}
        renew = options.get("renew", True)
        return {"timeout": self.conf.TIMEOUT, "renew": renew, "grant_timeout": grant_timeout}

    def _lock_name(self, key: str, version: int | None) -> str:
        name: str = self.make_key(f"{self.conf.LOCK_PREFIX}{key}", version=version)
        return name

    def command_lock(self, key: str, **options: Any) -> Lock:
        """The lock that ``run_locked`` takes, which other processes respect."""
        return self.lock(key, **options)

    def held_locks(self, limit: int = 500) -> Inventory:
        """The locks of ``lock()`` and ``locked()`` that are held in this cache and its default
        version, at most ``limit`` of them."""
        return list_held(self._lock_client(), self._encoded_key(self.conf.LOCK_PREFIX, None), limit)

    def reset_all(self) -> int:
        """Release all locks of this cache and its default version; ``on_lost`` of their holders is
        called. Returns how many. Does not touch values or locks with another key prefix."""
        return reset_all(self._lock_client(), self._encoded_key(self.conf.LOCK_PREFIX, None))

    def _encoded_key(self, key: str, version: int | None) -> bytes:
        made = self.make_key(key, version=version)
        return bytes(self._lock_client().get_encoder().encode(made))


def _refusing_reserved(key_func: Callable[..., Any]) -> Callable[..., Any]:
    """``key_func``, refusing keys at which the data of locks are kept."""

    def make_key(key: str, prefix: str, version: Any) -> Any:
        made = key_func(key, prefix, version)
        refuse_reserved(str(made).encode(errors="surrogatepass"))
        return made

    return make_key


def _sync_factory(cache: LockCache, client: Any, options: dict[str, Any]) -> Callable[..., Lock]:
    """The function that makes the lock from its name and the remaining ``options``."""
    aliases, fallback = _chosen(cache.conf, client, options)
    if aliases:
        clients = [lock_cache(alias)._lock_client() for alias in aliases]
        kind: Any = partial(FallbackRedlock if fallback else Redlock, clients)
    else:
        kind = partial(FallbackLock if fallback else Lock, cache._client_for(client))
    return cast(Callable[..., Lock], partial(kind, **fallback))


def _async_factory(
    cache: LockCache, client: Any, options: dict[str, Any]
) -> Callable[..., AsyncLock]:
    """``_sync_factory`` for asyncio."""
    aliases, fallback = _chosen(cache.conf, client, options)
    if aliases:
        clients = [asyncio_client(lock_cache(alias)._lock_client()) for alias in aliases]
        kind: Any = partial(AsyncFallbackRedlock if fallback else AsyncRedlock, clients)
    else:
        client = cache._aclient_for(client)
        kind = partial(AsyncFallbackLock if fallback else AsyncLock, client)
    return cast(Callable[..., AsyncLock], partial(kind, **fallback))


def _chosen(
    conf: Conf, client: Any, options: dict[str, Any]
) -> tuple[Sequence[str], dict[str, Any]]:
    """The cache aliases of a lock on several servers, and the options of a fallback."""
    aliases = check_using(options.pop("using", None))
    if aliases and client is not None:
        raise ValueError("give either using or client: both say where the lock is")
    given, critical = options.pop("on_redis_down", None), options.pop("critical", False)
    check_policy(given, critical)
    if options.get("replicas") is None:
        # A lock on several servers needs none.
        options["replicas"] = 0 if aliases else conf.REPLICAS
    policy = "raise" if critical else given or conf.ON_REDIS_DOWN
    if policy == "raise":
        return aliases, {}
    return aliases, {"on_redis_down": policy, "local_folder": conf.LOCAL_LOCK_FOLDER}


def check_using(value: Any) -> tuple[str, ...]:
    """``value`` as the aliases of several caches; empty for None.

    Raises:
        TypeError, ValueError: the value is invalid.
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
        TypeError, ValueError: a value is invalid, or they contradict each other.
    """
    if on_redis_down is not None:
        check_on_redis_down("on_redis_down", on_redis_down)
    if not isinstance(critical, bool):
        raise TypeError(f"critical must be True or False, not {critical!r}")
    if critical and on_redis_down not in (None, "raise"):
        raise ValueError(
            f"a critical lock always needs Redis: leave on_redis_down={on_redis_down!r} out"
        )


def lock_caches() -> Iterator[str]:
    """The aliases of the caches that can hold locks, that of the setting USING first. Does not
    connect to other backends."""
    preferred = given().get("USING")
    for alias in sorted(settings.CACHES, key=lambda alias: alias != preferred):
        if can_lock(alias):
            yield alias


def can_lock(alias: str) -> bool:
    """Whether the BACKEND of the cache ``alias`` is ours."""
    try:
        backend = import_string(settings.CACHES[alias]["BACKEND"])
    except (ImportError, KeyError):
        return False  # Django reports it where that cache is used.
    return isinstance(backend, type) and issubclass(backend, LockCache)


def lock_cache(alias: str) -> LockCache:
    """The cache ``alias``, for locks.

    Raises:
        ImproperlyConfigured: there is none of that name; ``BackendCannotLock``: it cannot lock.
    """
    try:
        cache = caches[alias]
    except InvalidCacheBackendError:
        cache = None
    if isinstance(cache, LockCache):
        return cache
    if alias in settings.CACHES:
        raise BackendCannotLock(alias)
    known = ", ".join(map(repr, lock_caches())) or "none"
    raise ImproperlyConfigured(f"CACHES has no {alias!r}; caches that can lock: {known}")
