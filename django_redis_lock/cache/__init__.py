"""The cache backends: django-redis's, with locks and with a ``get_or_set`` that computes once, and
the same on a server in memory.

``"BACKEND": "django_redis_lock.cache.RedisCache"``
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from django.apps import apps
from django.core.cache import InvalidCacheBackendError
from django.core.cache import caches as djangos
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.checks import CheckMessage, register
from django.core.exceptions import ImproperlyConfigured
from django.utils.connection import ConnectionProxy
from django_redis.cache import CONNECTION_INTERRUPTED, omit_exception
from django_redis.cache import RedisCache as DjangoRedisCache
from django_redis.client import DefaultClient, ShardClient
from django_redis.exceptions import ConnectionInterrupted
from django_redis.util import CacheKey

from ..extension import PACKAGE, PartMissing, on_first_use, part
from ..singleflight import encode_value
from ..transport import guarded_connection
from ..transport.refusals import genuine
from .context import NamedKey as NamedKey
from .lock_factory import BACKEND as BACKEND
from .lock_factory import LOCAL_BACKEND as LOCAL_BACKEND
from .lock_factory import URL_HINT as URL_HINT
from .lock_factory import AlreadyAcquired as AlreadyAcquired
from .lock_factory import BackendCannotLock as BackendCannotLock
from .lock_factory import LockCache as LockCache
from .lock_factory import NotAcquired as NotAcquired
from .lock_factory import check_using as check_using
from .lock_factory import lock_cache as lock_cache
from .lock_factory import lock_caches as lock_caches
from .methods import AsyncMethods, KeyGuard, WithoutLocks
from .on_commit import FunctionOnCommit as FunctionOnCommit
from .on_commit import OnCommit as OnCommit
from .reading import MISSING as MISSING
from .reading import failing_as_django_redis, originals
from .redis_py import flight_ending

if TYPE_CHECKING:
    from ..contrib.locmem import LocMemCache as LocMemCache
    from ..ops.inventory import reset_all as reset_all
    from .typed import AsyncLockArguments as AsyncLockArguments
    from .typed import CurrentLock as CurrentLock
    from .typed import GetOrSetArguments as GetOrSetArguments
    from .typed import LockArguments as LockArguments

NO_LOCATION = 'the cache has no LOCATION: give it the address of Redis, "LOCATION": "redis://127.0.0.1:6379/1"'
_Method = TypeVar("_Method", bound=Callable[..., object])

#: Decorates methods that raise no outages if IGNORE_EXCEPTIONS is set.
_ignoring_outages: Callable[[_Method], _Method] = omit_exception


def _returning(value: object) -> Callable[[_Method], _Method]:
    """The same, where a method then returns ``value``."""
    ignoring: Callable[[_Method], _Method] = omit_exception(return_value=value)
    return ignoring


def _name_unencodable(
    encode: Callable[[object], object], error: Exception, data: Mapping[str, object]
) -> None:
    """If ``error`` is that of a value in ``data`` which ``encode`` cannot encode, name its key."""
    for key, value in data.items():
        try:
            encode_value(encode, key, value)
        except Exception as again:
            if type(again) is type(error):
                error.args = again.args
            return


def _encoded(encode: Callable[..., object], value: object, **options: object) -> object:
    """What ``encode`` makes of ``value``. A subclass of int may have another ``str()``."""
    encoded = encode(value, **options)
    return int(encoded) if isinstance(encoded, int) else encoded


@register("redis_lock")
def check_installed(**kwargs: object) -> list[CheckMessage]:
    """All other checks are registered by the app, which may be missing."""
    with suppress(PartMissing):
        return [] if apps.is_installed(PACKAGE) else [part("checks").not_installed()]
    return []


class RedisCache(AsyncMethods, DjangoRedisCache):  # type: ignore[misc]  # no types
    """django-redis's cache. Each method documents its differences."""

    _client: Any
    _client_cls: Any
    _server: Any
    _params: dict[str, object]
    _methods: ClassVar[dict[str, tuple[object, object]]] = {}

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(location, params)
        self._guard = KeyGuard(self)

    @property
    def client(self) -> Any:
        """django-redis's client: it makes no key of a lock, and of its connections none returns the
        reply to another call, nor stays with a server that has become a replica."""
        if self._client is None:
            if apps.ready and not apps.is_installed(PACKAGE):
                with suppress(PartMissing):
                    part("checks").log_not_installed()
            needs_one = issubclass(self._client_cls, DefaultClient) and not self.in_memory
            if needs_one and not self._server:
                raise ImproperlyConfigured(NO_LOCATION)
            client = self._client_cls(self._server, self._params, self)
            client.make_key = self._guard.make_key
            client.encode = partial(_encoded, client.encode)
            factory = client.connection_factory
            connect = factory.connect
            factory.connect = lambda url: guarded_connection.connect(factory, connect, url)
            self._client = client
        return self._client

    @property
    def _ignore_exceptions(self) -> bool:
        """Of django-redis: whether to ignore the error that is being handled."""
        return self._ignores_errors and bool(genuine(Exception))

    @_ignore_exceptions.setter
    def _ignore_exceptions(self, ignores: bool) -> None:
        self._ignores_errors = ignores

    @_ignoring_outages
    def set(
        self,
        key: str,
        value: object,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: object = None,
        nx: bool = False,
        xx: bool = False,
    ) -> Any:
        return self._set((key, value, timeout, version), client, nx=nx, xx=xx)

    def _set(self, values: tuple[object, ...], client: object, **how: bool) -> object:
        try:
            return self.client.set(*values, **how, **self._by(client))
        except genuine(ConnectionInterrupted):
            if client is not None or self.client._replica_read_only:
                raise
            # django-redis tries its other servers. The first, which stores the flights, is down, so
            # there are none to end.
            return self.client.set(*values, **how)
        except Exception as error:
            _name_unencodable(self.client.encode, error, {str(values[0]): values[1]})
            raise

    @_ignoring_outages
    def add(
        self,
        key: str,
        value: object,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: object = None,
    ) -> Any:
        return self._set((key, value, timeout, version), client, nx=True)

    def set_many(
        self,
        data: Mapping[str, object],
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: object = None,
        **options: object,
    ) -> list[str]:
        """As in Django, returns the keys that could not be set."""
        done = self._set_many(data, timeout, version, client=client, **options)
        return [] if done else list(data)

    @_ignoring_outages
    def _set_many(
        self, data: Mapping[str, object], *args: object, client: object, **options: object
    ) -> bool:
        try:
            if data:
                self.client.set_many(data, *args, **self._by(client), **options)
        except Exception as error:
            _name_unencodable(self.client.encode, error, data)
            raise
        return True

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
            return self.client.delete_pattern(pattern, version, prefix, client, itersize)
        redis = client or self.client.get_client(write=True)
        keys = redis.get_encoder().encode(self.client.make_pattern(pattern, version, prefix))
        with failing_as_django_redis(redis):
            return part("inventory").delete_matching(redis, keys, itersize)

    @_ignoring_outages
    def incr_version(
        self, key: str, delta: int = 1, version: int | None = None, client: Any = None
    ) -> int:
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

    @_returning(CONNECTION_INTERRUPTED)
    def _get(self, key: str, default: object, version: int | None, client: object) -> object:
        return self.client.get(key, default, version, client or self._direct())

    @_returning({})
    def get_many(
        self, keys: Iterable[str], version: int | None = None, client: object = None
    ) -> Any:
        return self.client.get_many(keys and list(keys), version, client or self._direct())

    @_ignoring_outages
    def has_key(self, key: str, version: int | None = None, client: object = None) -> Any:
        return self.client.has_key(key, version, client or self._direct())

    @_ignoring_outages
    def ttl(self, key: str, version: int | None = None, client: object = None) -> Any:
        return self.client.ttl(key, version, client or self._direct())

    @_ignoring_outages
    def pttl(self, key: str, version: int | None = None, client: object = None) -> Any:
        return self.client.pttl(key, version, client or self._direct())

    @_ignoring_outages
    def delete(
        self, key: str, version: int | None = None, prefix: str | None = None, client: object = None
    ) -> bool:
        return bool(self.client.delete(key, version, prefix, **self._by(client)))

    @_ignoring_outages
    def delete_many(
        self, keys: Iterable[str], version: int | None = None, client: object = None
    ) -> Any:
        return self.client.delete_many(keys, version, **self._by(client))

    @_ignoring_outages
    def incr(
        self,
        key: str,
        delta: int = 1,
        version: int | None = None,
        client: object = None,
        ignore_key_check: bool = False,
    ) -> Any:
        by = self._by(client)
        return self.client.incr(key, delta, version, ignore_key_check=ignore_key_check, **by)

    @_ignoring_outages
    def decr(
        self, key: str, delta: int = 1, version: int | None = None, client: object = None
    ) -> Any:
        return self.client.decr(key, delta, version, **self._by(client))

    @_ignoring_outages
    def touch(
        self,
        key: str,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: object = None,
    ) -> Any:
        return self.client.touch(key, timeout, version, **self._by(client))

    @_ignoring_outages
    def expire(
        self, key: str, timeout: object, version: int | None = None, client: object = None
    ) -> Any:
        return self.client.expire(key, timeout, version, **self._by(client))

    @_ignoring_outages
    def pexpire(
        self, key: str, timeout: object, version: int | None = None, client: object = None
    ) -> Any:
        return self.client.pexpire(key, timeout, version, **self._by(client))

    @_ignoring_outages
    def expire_at(
        self, key: str, when: object, version: int | None = None, client: object = None
    ) -> Any:
        return self.client.expire_at(key, when, version, **self._by(client))

    @_ignoring_outages
    def pexpire_at(
        self, key: str, when: object, version: int | None = None, client: object = None
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
            part("inventory").empty(redis)

    @_ignoring_outages
    def keys(self, search: str, version: int | None = None, client: object = None) -> Any:
        """As in django-redis, without the keys of locks."""
        return self.client.keys(search, version=version, **self._without_locks(client))

    @_ignoring_outages
    def iter_keys(
        self,
        search: str,
        itersize: int | None = None,
        client: object = None,
        version: int | None = None,
    ) -> Any:
        """As in django-redis, without the keys of locks."""
        by = self._without_locks(client)
        return self.client.iter_keys(search, itersize=itersize, version=version, **by)

    def _without_locks(self, client: object) -> dict[str, object]:
        self._check_client(client)
        if isinstance(self.client, ShardClient):
            return {"client": client}
        redis = client or self.client.get_client(write=False)
        with failing_as_django_redis(redis):
            return {"client": WithoutLocks(redis, self._guard.hidden())}

    def _by(self, client: object) -> dict[str, object]:
        """The argument that makes a method of django-redis's client end flights."""
        if client is None:
            if (own := self._direct()) is not None:
                return {"client": own}
        else:
            self._check_client(client)
        if isinstance(self.client, ShardClient):
            return {} if client is None else {"client": client}
        return {"client": flight_ending(client or self.client.get_client(write=True))}


#: Those that Django's asynchronous methods have twins of.
_FOR_THREADS = (
    *("get", "get_many", "has_key", "set", "add", "delete", "set_many", "delete_many"),
    *("incr_version", "incr", "decr", "touch"),
)
RedisCache._methods.update(originals(RedisCache, *_FOR_THREADS))

# -- the caches of the project, for values: also those that cannot lock ----------------------------


def value_cache(alias: str) -> RedisCache:
    """The cache ``alias``. If it cannot compute values once, it computes them for each caller.

    Raises:
        ImproperlyConfigured: CACHES has no such alias, or its BACKEND cannot be imported.
    """
    try:
        cache: object = djangos[alias]
    except InvalidCacheBackendError:
        cache = lock_cache(alias)  # Says what is wrong.
    if not (isinstance(cache, LockCache) and cache.computes_once):
        cache = part("other_backends").PlainCache(alias, cache)
    return cast(RedisCache, cache)


class Caches:
    """The caches of the setting CACHES, as Django's ``caches``, with the types of ``RedisCache``.
    If the BACKEND of one is not of this package, each caller computes its own values, and ``lock``
    raises ImproperlyConfigured."""

    def __getitem__(self, alias: str) -> RedisCache:
        """
        Raises:
            ImproperlyConfigured: there is no such alias.
        """
        return value_cache(alias)

    def __iter__(self) -> Iterator[str]:
        return iter(djangos)


caches = Caches()
#: ``caches["default"]``, looked up at each use, as Django's ``cache``.
cache: RedisCache = cast(Any, ConnectionProxy)(caches, "default")

__getattr__ = on_first_use(
    __name__,
    {
        "contrib.locmem": "LocMemCache",
        "ops.inventory": "reset_all",
        "cache.typed": "AsyncLockArguments CurrentLock GetOrSetArguments LockArguments",
    },
)
