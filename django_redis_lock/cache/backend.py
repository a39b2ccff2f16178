"""The cache backend: django-redis's, with locks and with ``get_or_set`` that computes once.

``"BACKEND": "django_redis_lock.cache.RedisCache"``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.core.cache.backends.base import DEFAULT_TIMEOUT, default_key_func
from django.core.exceptions import ImproperlyConfigured
from django_redis.cache import RedisCache as DjangoRedisCache
from django_redis.cache import omit_exception
from django_redis.client import DefaultClient, ShardClient
from django_redis.exceptions import ConnectionInterrupted
from django_redis.util import CacheKey
from redis.exceptions import ResponseError

from ..inventory import STEP, Inventory, delete_matching, empty, list_held
from ..locking import AsyncLock, Lock
from ..protocol import RESERVED, check_name_in_cache, longest_hold, refuse_reserved
from ..transport import OUTAGE
from .expiring import Expiring
from .invalidation import flight_ending
from .lock_factory import for_tasks, for_threads
from .python_redis_lock import PythonRedisLock

__all__ = ["RedisCache"]

_MISSING = object()
#: For an argument left out where None means something.
_SETTING: Any = object()

#: A command that was not carried out, by an outage or by Redis's refusal.
_FAILED: tuple[type[Exception], ...] = (*OUTAGE, ResponseError)

_Handle = TypeVar("_Handle", Lock, AsyncLock)
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _guarded(method: _Method) -> _Method:
    """django-redis's guard: IGNORE_EXCEPTIONS decides whether an outage shows."""
    guarded: _Method = omit_exception(method)
    return guarded


def _allowed(key_func: Callable[..., Any]) -> Callable[..., Any]:
    """``key_func``, refusing keys at which the data of locks are kept."""

    def make_key(key: str, prefix: str, version: Any) -> Any:
        made = key_func(key, prefix, version)
        refuse_reserved(str(made).encode(errors="surrogatepass"))
        return made

    return make_key


class RedisCache(PythonRedisLock, Expiring, DjangoRedisCache):  # type: ignore[misc]  # django-redis ships no types
    """django-redis's cache; what differs is documented at each method."""

    key_func: Any

    def __init__(self, server: str, params: dict[str, Any]) -> None:
        super().__init__(server, params)
        # Django's own keys begin with the prefix: only with others need each be looked at.
        if self.key_func is not default_key_func or str(self.key_prefix).startswith(RESERVED):
            self.key_func = _allowed(self.key_func)

    # -- locks -------------------------------------------------------------------------------

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

    def _own(self, lock: _Handle, key: str) -> _Handle:
        lock.cache, lock.called = self, key
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
        name: str = self.client.make_key(f"{self.conf.LOCK_PREFIX}{key}", version=version)
        return name

    def held_locks(self, limit: int = 500) -> Inventory:
        """The locks taken by ``lock()`` and ``locked()`` in this cache and its default version that
        are held now, for the admin and for monitoring; at most ``limit`` of them."""
        return list_held(self._lock_client(), self._encoded_key(self.conf.LOCK_PREFIX, None), limit)

    def _lock_client(self) -> Any:
        """The redis-py client of the primary: whatever decides must be asked there."""
        client = self.client
        if isinstance(client, ShardClient) or not isinstance(client, DefaultClient):
            raise ImproperlyConfigured(
                f"{type(client).__name__} cannot lock: it has no single primary server. "
                "Use django-redis's DefaultClient or SentinelClient, or our ClusterClient"
            )
        return client.get_client(write=True)

    # -- writes end flights ------------------------------------------------------------------

    @_guarded
    def set(
        self,
        key: str,
        value: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: Any = None,
        nx: bool = False,
        xx: bool = False,
    ) -> Any:
        values = (key, value, timeout, version)
        try:
            return self.client.set(*values, nx=nx, xx=xx, **self._by(client))
        except ConnectionInterrupted:
            if client is not None or self.client._replica_read_only:
                raise
            # The servers are peers, and django-redis tries the others. There are no flights then:
            # the first server, where they are noted, is away.
            return self.client.set(*values, nx=nx, xx=xx)

    def add(
        self,
        key: str,
        value: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: Any = None,
    ) -> Any:
        return self.set(key, value, timeout, version, client, nx=True)

    @_guarded
    def delete(
        self,
        key: str,
        version: int | None = None,
        prefix: str | None = None,
        client: Any = None,
    ) -> Any:
        return bool(self.client.delete(key, version, prefix, **self._by(client)))

    def set_many(
        self,
        data: dict[str, Any],
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: Any = None,
        **options: Any,
    ) -> list[Any]:
        """As in Django: the keys that could not be set, which django-redis does not tell."""
        return [] if self._set_many(data, timeout, version, client, options) else list(data)

    @_guarded
    def _set_many(
        self,
        data: dict[str, Any],
        timeout: float | None,
        version: int | None,
        client: Any,
        options: dict[str, Any],
    ) -> bool:
        if data:
            self.client.set_many(data, timeout, version, **self._by(client), **options)
        return True

    @_guarded
    def delete_many(self, keys: Any, version: int | None = None, client: Any = None) -> Any:
        return self.client.delete_many(keys, version, **self._by(client))

    @_guarded
    def delete_pattern(
        self,
        pattern: str,
        version: int | None = None,
        prefix: str | None = None,
        client: Any = None,
        itersize: int | None = None,
    ) -> Any:
        """As in django-redis; held locks whose keys match are left alone.

        Args:
            itersize: how many keys Redis looks at in one step; at most 500, which is the default.
        """
        if isinstance(self.client, ShardClient):
            by = {} if client is None else {"client": client}
            return self.client.delete_pattern(pattern, version, prefix, itersize=itersize, **by)
        redis = client or self.client.get_client(write=True)
        keys = redis.get_encoder().encode(self.client.make_pattern(pattern, version, prefix))
        try:
            return delete_matching(redis, keys, itersize or STEP)
        except _FAILED as error:
            raise ConnectionInterrupted(connection=redis) from error

    @_guarded
    def incr_version(
        self, key: str, delta: int = 1, version: int | None = None, client: Any = None
    ) -> Any:
        by = self._by(client)
        try:
            return self.client.incr_version(key, delta, version, **by)
        except ValueError:
            # To django-redis a value that is None is missing.
            if self.client.get(key, _MISSING, version=version, **by) is _MISSING:
                raise
        version = self.version if version is None else version
        original = key.original_key() if isinstance(key, CacheKey) else key
        left = self.client.pttl(key, version=version, **by)
        lifetime = None if left is None else left / 1000
        self.client.set(original, None, lifetime, version + delta, **by)
        self.client.delete(key, version, **by)
        return version + delta

    @_guarded
    def incr(
        self,
        key: str,
        delta: int = 1,
        version: int | None = None,
        client: Any = None,
        ignore_key_check: bool = False,
    ) -> Any:
        by = {"ignore_key_check": ignore_key_check, **self._by(client)}
        return self.client.incr(key, delta, version, **by)

    @_guarded
    def decr(self, key: str, delta: int = 1, version: int | None = None, client: Any = None) -> Any:
        return self.client.decr(key, delta, version, **self._by(client))

    @_guarded
    def touch(
        self,
        key: str,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: Any = None,
    ) -> Any:
        return self.client.touch(key, timeout, version, **self._by(client))

    @_guarded
    def clear(self) -> Any:
        """Empty the database, as django-redis does, but for the locks that are held in it and
        the figures of how they behave."""
        if isinstance(self.client, ShardClient):
            return self.client.clear()
        redis = self._lock_client()
        try:
            empty(redis)
        except _FAILED as error:
            raise ConnectionInterrupted(connection=redis) from error

    def _by(self, client: Any) -> dict[str, Any]:
        """The argument that makes a method of django-redis's client write by way of ours."""
        if isinstance(self.client, ShardClient):
            return {} if client is None else {"client": client}
        return {"client": flight_ending(client or self.client.get_client(write=True))}

    def _encoded_key(self, key: str, version: int | None) -> bytes:
        nkey = self.client.make_key(key, version=version)
        return bytes(self._lock_client().get_encoder().encode(nkey))
