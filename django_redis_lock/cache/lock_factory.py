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

__all__ = [
    "BACKEND",
    "BackendCannotLock",
    "LockCache",
    "check_policy",
    "check_using",
    "lock_cache",
    "lock_caches",
]

#: What a cache's BACKEND must be, or be derived from.
BACKEND = "django_redis_lock.cache.RedisCache"
#: The same without Redis: its locks exclude the threads and tasks of one process.
LOCAL_BACKEND = "django_redis_lock.cache.LocMemCache"

#: For an argument left out where None means something.
_SETTING: Any = object()

AnyLock = TypeVar("AnyLock", Lock, AsyncLock)


class BackendCannotLock(ImproperlyConfigured):
    """A cache has the BACKEND of somebody else."""

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"the cache {alias!r} cannot lock: its BACKEND is "
            f"{settings.CACHES[alias].get('BACKEND')!r}. In CACHES[{alias!r}] write "
            f'"BACKEND": "{BACKEND}", or, for development and tests without Redis, '
            f'"BACKEND": "{LOCAL_BACKEND}"'
        )


class LockCache(BaseCache):
    """The part of ``RedisCache`` and ``LocMemCache`` that makes locks."""

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(location, params)  # type: ignore[call-arg,arg-type]  # of a real backend
        self.conf = Conf(params.get("OPTIONS"))
        # Django's own keys begin with the prefix: only with others need each be looked at.
        if self.key_func is not default_key_func or str(self.key_prefix).startswith(RESERVED):
            self.key_func = _allowed(self.key_func)

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
        """A lock named ``key``, in a key space of its own: no cache key can touch it.

        Args:
            timeout: seconds; left out, the setting TIMEOUT, and renewed until it is released;
                None: never expires, which a crash makes for ever.
            using: three or more cache aliases: a ``Redlock`` over their servers.
            on_redis_down: ``"raise"``, ``"local"`` or ``"run"`` (``docs/choosing_guarantees.md``);
                left out, the setting.
            critical: never do without Redis, whatever the setting says.
            replicas: how many replicas must have confirmed it before the lock counts; left out,
                the setting.
            options: see ``django_redis_lock.Lock``.
        """
        options.update(sleep=sleep, blocking=blocking, blocking_timeout=blocking_timeout)
        options.update(thread_local=thread_local, **self._lifetime(timeout, options))
        make = for_threads(self, client, options)
        name = check_name_in_cache(key)
        return self._own(make(self._lock_name(name, version), **options), name)

    def alock(
        self,
        key: str,
        version: int | None = None,
        timeout: float | None = _SETTING,
        *,
        client: Any = None,
        **options: Any,
    ) -> AsyncLock:
        """As ``lock``, for asyncio: ``async with cache.alock("import"):``.

        Args:
            client: a redis.asyncio client; left out, one of the running event loop's own, to the
                server of this cache.

        Raises:
            RuntimeError: no event loop is running.
        """
        options.update(self._lifetime(timeout, options))
        make = for_tasks(self, client, options)
        name = check_name_in_cache(key)
        return self._own(make(self._lock_name(name, version), **options), name)

    def _own(self, lock: AnyLock, key: str) -> AnyLock:
        lock.cache, lock.cache_key = self, key
        if lock.warn_after is None:
            longest = longest_hold(lock.renew, lock.timeout, lock.max_hold)
            lock.warns_after = self.conf.warn_after(longest)
        return lock

    def _lifetime(self, timeout: float | None, options: dict[str, Any]) -> dict[str, Any]:
        """What the settings say of a lock's lifetime where the caller does not."""
        grant_timeout = options.get("grant_timeout", self.conf.GRANT_TIMEOUT)
        if timeout is not _SETTING:
            return {"timeout": timeout, "grant_timeout": grant_timeout}
        renew = options.get("renew", True)
        return {"timeout": self.conf.TIMEOUT, "renew": renew, "grant_timeout": grant_timeout}

    def _lock_name(self, key: str, version: int | None) -> str:
        name: str = self.make_key(f"{self.conf.LOCK_PREFIX}{key}", version=version)
        return name

    def held_locks(self, limit: int = 500) -> Inventory:
        """The locks taken by ``lock()`` and ``locked()`` in this cache and its default version that
        are held now, for the admin and for monitoring; at most ``limit`` of them."""
        return list_held(self._lock_client(), self._encoded_key(self.conf.LOCK_PREFIX, None), limit)

    def reset_all(self) -> int:
        """Release the locks of this cache and its default version, whoever holds them; the number
        of those released. Their holders are told that they are lost. Values are not touched, nor
        are locks with another key prefix."""
        return reset_all(self._lock_client(), self._encoded_key(self.conf.LOCK_PREFIX, None))

    def _encoded_key(self, key: str, version: int | None) -> bytes:
        made = self.make_key(key, version=version)
        return bytes(self._lock_client().get_encoder().encode(made))


def _allowed(key_func: Callable[..., Any]) -> Callable[..., Any]:
    """``key_func``, refusing keys at which the data of locks are kept."""

    def make_key(key: str, prefix: str, version: Any) -> Any:
        made = key_func(key, prefix, version)
        refuse_reserved(str(made).encode(errors="surrogatepass"))
        return made

    return make_key


def for_threads(cache: LockCache, client: Any, options: dict[str, Any]) -> Callable[..., Lock]:
    """What makes the lock, given its name and those of ``options`` that are left."""
    several, policy = _chosen(cache.conf, client, options)
    if several:
        clients = [lock_cache(alias)._lock_client() for alias in several]
        kind: Any = partial(FallbackRedlock if policy else Redlock, clients)
    else:
        kind = partial(FallbackLock if policy else Lock, cache._client_for(client))
    return cast(Callable[..., Lock], partial(kind, **policy))


def for_tasks(cache: LockCache, client: Any, options: dict[str, Any]) -> Callable[..., AsyncLock]:
    """As ``for_threads``, for asyncio."""
    several, policy = _chosen(cache.conf, client, options)
    if several:
        clients = [asyncio_client(lock_cache(alias)._lock_client()) for alias in several]
        kind: Any = partial(AsyncFallbackRedlock if policy else AsyncRedlock, clients)
    else:
        client = cache._aclient_for(client)
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


def lock_caches() -> Iterator[str]:
    """The aliases of the caches that can hold locks, that of the setting USING first; other
    backends are not even connected."""
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
