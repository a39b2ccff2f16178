"""The cache backends: django-redis's, with locks and with a ``get_or_set`` that computes once, and
the same on a server in memory.

``"BACKEND": "django_redis_lock.cache.RedisCache"``
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from django.conf import settings
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.utils.functional import cached_property
from django_redis.cache import RedisCache as DjangoRedisCache
from django_redis.cache import omit_exception
from django_redis.client import DefaultClient, ShardClient
from django_redis.exceptions import ConnectionInterrupted
from django_redis.util import CacheKey
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..fallback import FallbackLock
from ..inventory import KEYS_PER_SCRIPT, delete_matching, empty
from ..locking import Lock
from ..memory import Database, client_of, databases
from ..protocol import check_name_in_cache
from ..transport import (
    Breaker,
    CircuitOpen,
    Topology,
    is_busy,
    is_observed,
    is_pool_exhausted,
    server_of,
)
from .lock_factory import BACKEND as BACKEND
from .lock_factory import LOCAL_BACKEND as LOCAL_BACKEND
from .lock_factory import URL_HINT as URL_HINT
from .lock_factory import AlreadyAcquired as AlreadyAcquired
from .lock_factory import BackendCannotLock as BackendCannotLock
from .lock_factory import NotAcquired as NotAcquired
from .lock_factory import check_using as check_using
from .lock_factory import lock_cache as lock_cache
from .lock_factory import lock_caches as lock_caches
from .lock_factory import reset_all as reset_all
from .methods import AsyncMethods, flight_ending
from .reading import MISSING as MISSING
from .reading import (
    DirectReader,
    ObservedRead,
    cold_read,
    direct_reader,
    failing_as_django_redis,
    originals,
)

T = TypeVar("T")
_Method = TypeVar("_Method", bound=Callable[..., Any])

#: Decorates methods that raise no outages if IGNORE_EXCEPTIONS is set.
_ignoring_outages: Callable[[_Method], _Method] = omit_exception


class RedisCache(AsyncMethods, DjangoRedisCache):  # type: ignore[misc]  # no types
    """django-redis's cache. Each method documents its differences."""

    # -- reading -----------------------------------------------------------------------------

    _methods: ClassVar = originals(DjangoRedisCache, "get", "get_many", "has_key")

    def _get_observed(
        self, key: str, version: int | None, read: Callable[..., Any]
    ) -> tuple[Any, Any]:
        get: Any = self.get
        return self._observed(lambda client: get(key, MISSING, version, client=client), read)

    def _observed(
        self, method: Callable[[ObservedRead], Any], read: Callable[..., Any]
    ) -> tuple[Any, Any]:
        client, value = ObservedRead(read), MISSING
        try:
            value = method(client)
        except Exception:
            if client.error is None:
                raise
        if client.error is not None:
            raise client.error
        return client.stored, value

    def _get_by_tool(self, key: str, missing: Any, version: int | None, reader: Any) -> Any:
        redis = reader or self.client.get_client(write=False)
        with failing_as_django_redis(redis):
            return self._get_observed(key, version, lambda nkey: (redis.get(nkey), -1))[1]

    def _client_get_many(self, names: list[str], version: int | None) -> dict[str, Any]:
        get_many: Any = self.get_many if self._is_replaced("get_many") else self.client.get_many
        redis = self.client.get_client(write=False)
        mget = getattr(redis, "mget_nonatomic", redis.mget)
        with failing_as_django_redis(redis):
            found: dict[str, Any] = self._observed(
                lambda client: get_many(names, version, client=client),
                lambda *nkeys: (mget(*nkeys), -1),
            )[1]
            return found

    def _read_or_join(self, key: str, version: int | None) -> Any:
        reader = self._reader
        if reader is not None and is_observed(reader.client):
            reader = None
        is_crowd = self._is_in_flight(key, version)
        if not is_crowd and (reader is None or not server_of(reader.client).must_connect()):
            return self._read_value(key, version, reader)
        with cold_read(server_of(self._lock_client())):
            return self._read_value(key, version, reader)

    def _read_value(self, key: str, version: int | None, reader: Any) -> Any:
        get = self._get_by_tool if self._is_replaced("get") else self.client.get
        try:
            if reader is not None:
                return get(key, MISSING, version, reader)
            return self._with_breaker(get, key, MISSING, version, None)
        except ConnectionInterrupted as error:
            # The caller goes on to TAKE_FLIGHT: that has its own connection, and is repeated.
            cause = error.__cause__
            if cause is not None and (is_pool_exhausted(cause) or is_busy(cause)):
                return MISSING
            raise

    @cached_property
    def _reader(self) -> DirectReader | None:
        return None if self._breaker is None else direct_reader(self.client)

    @cached_property
    def _breaker(self) -> Breaker | None:
        """None if django-redis may read from another server."""
        if not self._has_primary or len(self.client._server) != 1:
            return None
        server = server_of(self._lock_client())
        return None if isinstance(server, Topology) else server.breaker

    def _with_breaker(self, read: Callable[..., T], *args: Any) -> T:
        """What ``read`` returns, which reads on the connections of django-redis's client."""
        breaker = self._breaker
        if breaker is None:
            return read(*args)
        if breaker.failing:
            try:
                breaker.admit(None)
            except CircuitOpen as error:
                raise ConnectionInterrupted(connection=None) from error
        began = time.monotonic()
        try:
            found = read(*args)
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
            return self._with_breaker(self._client_get_many, names, version), None
        except ConnectionInterrupted as error:
            cause = error.__cause__ or error
            return {}, None if is_pool_exhausted(cause) else self._without_redis(cause)

    # -- writes end flights ------------------------------------------------------------------

    @_ignoring_outages
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
        return self._set((key, value, timeout, version), client, nx=nx, xx=xx)

    def _set(self, values: tuple[Any, ...], client: Any, **how: bool) -> Any:
        try:
            return self.client.set(*values, **how, **self._by(client))
        except ConnectionInterrupted:
            if client is not None or self.client._replica_read_only:
                raise
            # django-redis tries its other servers. The first, which stores the flights, is down, so
            # there are none to end.
            return self.client.set(*values, **how)

    @_ignoring_outages
    def add(
        self,
        key: str,
        value: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: Any = None,
    ) -> Any:
        return self._set((key, value, timeout, version), client, nx=True)

    @_ignoring_outages
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
        """As in Django, returns the keys that could not be set."""
        done = self._set_many(data, timeout, version, client=client, **options)
        return [] if done else list(data)

    @_ignoring_outages
    def _set_many(self, data: dict[str, Any], *args: Any, client: Any, **options: Any) -> bool:
        if data:
            self.client.set_many(data, *args, **self._by(client), **options)
        return True

    @_ignoring_outages
    def delete_many(self, keys: Any, version: int | None = None, client: Any = None) -> Any:
        return self.client.delete_many(keys, version, **self._by(client))

    @_ignoring_outages
    def delete_pattern(
        self,
        pattern: str,
        version: int | None = None,
        prefix: str | None = None,
        client: Any = None,
        itersize: int | None = None,
    ) -> Any:
        """As in django-redis, but does not delete held locks whose keys match.

        Args:
            itersize: how many keys Redis scans in one step; at most 500, the default.
        """
        self._check_client(client)
        if isinstance(self.client, ShardClient):
            by = {} if client is None else {"client": client}
            return self.client.delete_pattern(pattern, version, prefix, itersize=itersize, **by)
        redis = client or self.client.get_client(write=True)
        keys = redis.get_encoder().encode(self.client.make_pattern(pattern, version, prefix))
        with failing_as_django_redis(redis):
            return delete_matching(redis, keys, itersize or KEYS_PER_SCRIPT)

    @_ignoring_outages
    def incr_version(
        self, key: str, delta: int = 1, version: int | None = None, client: Any = None
    ) -> Any:
        """As in Django, also for None. The value keeps its lifetime."""
        version = self.version if version is None else version
        with failing_as_django_redis(client):
            by = self._by(client)
            value = self.client.get(key, MISSING, version=version, **by)
            if value is MISSING:
                raise ValueError(f"Key {key!r} not found")
            left = self.client.pttl(key, version=version, **by)
            original = key.original_key() if isinstance(key, CacheKey) else key
            lifetime = None if left is None else left / 1000
            self.client.set(original, value, lifetime, version=version + delta, **by)
            self.client.delete(key, version=version, **by)
        return version + delta

    @_ignoring_outages
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

    @_ignoring_outages
    def decr(self, key: str, delta: int = 1, version: int | None = None, client: Any = None) -> Any:
        return self.client.decr(key, delta, version, **self._by(client))

    @_ignoring_outages
    def touch(
        self,
        key: str,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: Any = None,
    ) -> Any:
        return self.client.touch(key, timeout, version, **self._by(client))

    def expire(
        self,
        key: str,
        timeout: float | timedelta,
        version: int | None = None,
        client: Any = None,
    ) -> Any:
        return bool(self.client.expire(key, timeout, version, **self._by(client)))

    def pexpire(
        self,
        key: str,
        timeout: float | timedelta,
        version: int | None = None,
        client: Any = None,
    ) -> Any:
        return self.client.pexpire(key, timeout, version, **self._by(client))

    def expire_at(
        self, key: str, when: int | datetime, version: int | None = None, client: Any = None
    ) -> Any:
        return bool(self.client.expire_at(key, when, version, **self._by(client)))

    def pexpire_at(
        self, key: str, when: int | datetime, version: int | None = None, client: Any = None
    ) -> Any:
        return self.client.pexpire_at(key, when, version, **self._by(client))

    @_ignoring_outages
    def clear(self) -> Any:
        """Empty the database, as django-redis does, except for held locks and their metrics; with
        ``CLEAR = "prefix"`` only delete what has this cache's KEY_PREFIX and VERSION.

        Raises:
            ImproperlyConfigured: CLEAR is ``"prefix"``, and KEY_FUNCTION makes keys without one.
        """
        if self.conf.CLEAR == "prefix":
            self.delete_pattern(CacheKey(self.own_pattern()))
            return None
        if isinstance(self.client, ShardClient):
            return self.client.clear()
        redis = self._lock_client()
        with failing_as_django_redis(redis):
            empty(redis)

    def _by(self, client: Any) -> dict[str, Any]:
        """The argument that makes a method of django-redis's client end flights."""
        if client is not None:
            self._check_client(client)
        if isinstance(self.client, ShardClient):
            return {} if client is None else {"client": client}
        return {"client": flight_ending(client or self.client.get_client(write=True))}


#: Those that Django's asynchronous methods have twins of.
_FOR_THREADS = ("set", "add", "delete", "set_many", "delete_many", "incr_version", "incr", "decr")
RedisCache._methods.update(originals(RedisCache, *_FOR_THREADS, "touch"))


class MemoryClient(DefaultClient):  # type: ignore[misc]  # django-redis ships no types
    """django-redis's client of a server in memory, one for each LOCATION. Values are pickled."""

    def __init__(self, location: str, params: dict[str, Any], backend: Any) -> None:
        # Its other options are about a server elsewhere, and Django's may have another factory.
        options = {"CONNECTION_FACTORY": "django_redis.pool.ConnectionFactory"}
        super().__init__([location], {**params, "OPTIONS": options}, backend)

    def connect(self, index: int = 0) -> Any:
        database = databases.setdefault(self._server[index], Database("this process's memory"))
        database.max_values = self._backend._max_entries
        database.cull_frequency = self._backend._cull_frequency
        return client_of(database)


@lru_cache(maxsize=1)
def _host() -> Any:
    """A client of no server, so that this host's lock is taken instead."""
    project = getattr(settings, "BASE_DIR", None) or settings.SETTINGS_MODULE
    nowhere = Database(f"this host, for {project}")
    nowhere.away = True
    return client_of(nowhere)


class LocMemCache(RedisCache):
    """``RedisCache`` on a server in the memory of this process. Caches with the same LOCATION share
    values and locks, also between threads and event loops."""

    in_memory = True

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(location, params)
        self._client_cls = MemoryClient

    def _check_client(self, client: Any) -> None:
        if client is not None:
            raise ValueError("client needs Redis: leave it out, this cache's locks are in memory")

    def command_lock(self, key: str, **options: Any) -> Lock:
        """A lock of this host: a file, as with ``ON_REDIS_DOWN = "local"``. Other processes cannot
        see this one's memory."""
        timeout = options.pop("timeout", self.conf.TIMEOUT)
        del options["replicas"]
        folder = self.conf.LOCAL_LOCK_FOLDER
        name = self._lock_name(check_name_in_cache(key), None)
        lock = FallbackLock(
            _host(), name, timeout, on_redis_down="local", local_folder=folder, **options
        )
        return self._configured(lock, key)
