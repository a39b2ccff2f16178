"""The cache backends: django-redis's, with locks and with a ``get_or_set`` that computes once, and
the same on a server in memory.

``"BACKEND": "django_redis_lock.cache.RedisCache"``
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.base import DEFAULT_TIMEOUT, default_key_func
from django.core.exceptions import ImproperlyConfigured
from django_redis.cache import RedisCache as DjangoRedisCache
from django_redis.cache import omit_exception
from django_redis.client import DefaultClient, ShardClient
from django_redis.exceptions import ConnectionInterrupted
from django_redis.util import CacheKey

from .. import transport
from ..conf import Conf, given
from ..extension import on_first_use, part
from ..protocol import RESERVED, as_bytes, is_reserved, refuse_reserved
from ..transport import server_of
from .lock_factory import BACKEND as BACKEND
from .lock_factory import LOCAL_BACKEND as LOCAL_BACKEND
from .lock_factory import URL_HINT as URL_HINT
from .lock_factory import AlreadyAcquired as AlreadyAcquired
from .lock_factory import BackendCannotLock as BackendCannotLock
from .lock_factory import NamedKey as NamedKey
from .lock_factory import NotAcquired as NotAcquired
from .lock_factory import check_using as check_using
from .lock_factory import lock_cache as lock_cache
from .lock_factory import lock_caches as lock_caches
from .lock_factory import reset_all as reset_all
from .methods import AsyncMethods, flight_ending
from .reading import MISSING as MISSING
from .reading import failing_as_django_redis, originals

if TYPE_CHECKING:
    from ..contrib.locmem import LocMemCache as LocMemCache

_Method = TypeVar("_Method", bound=Callable[..., Any])

#: Decorates methods that raise no outages if IGNORE_EXCEPTIONS is set.
_ignoring_outages: Callable[[_Method], _Method] = omit_exception


def _ending_flights(name: str) -> Any:
    """django-redis's method ``name``, which passes its arguments on to its client, with a client
    that ends flights."""
    original, arguments = getattr(DjangoRedisCache, name), signature(getattr(DefaultClient, name))
    position = list(arguments.parameters).index("client") - 1

    @wraps(original)
    def method(self: RedisCache, *args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            before, client, *after = args[:position], args[position], *args[position + 1 :]
            return original(self, *before, self._by(client).get("client"), *after, **kwargs)
        return original(self, *args, **{**kwargs, **self._by(kwargs.get("client"))})

    vars(method)["__signature__"] = arguments
    return method


#: The most held locks that ``keys()`` leaves out where their keys do not show what they are.
MAX_HIDDEN = 10_000


class KeyGuard:
    """Refuses cache keys that are keys of locks or of their companions. All methods of
    django-redis's client get their keys from ``make_key``, also those given as a ``CacheKey``.

    Args:
        cache: whose values have these keys. They are checked against its locks, and against those
            of the project's other caches in the same database.
    """

    def __init__(self, cache: RedisCache) -> None:
        self._cache = cache
        self._given: Any = None

    def make_key(self, key: Any, version: Any = None, prefix: Any = None) -> str:
        """As django-redis's. Raises ValueError if a lock may have this key."""
        if self._given is not given():
            self._read_settings()
        usual = self._is_usual and prefix is version is None and type(key) is str
        if usual and not key.startswith(self._refused):
            # Most operations of the cache end here, and earlier than in django-redis's own method.
            made: str = CacheKey(f"{self._cache.key_prefix}:{self._cache.version}:{key}")
            return made
        made = self.unchecked(key, version, prefix)
        if self._is_custom or prefix is not None or type(version) not in (int, type(None)):
            self._look_closely(key, made, version, prefix)
        if self._match(made):
            refuse_reserved(made.encode(errors="surrogatepass"))
            if self._is_of_lock(made):
                raise _refusal(key, made)
        return made

    def unchecked(self, key: Any, version: Any = None, prefix: Any = None) -> str:
        client = self._cache.client
        made: str = type(client).make_key(client, key, version=version, prefix=prefix)
        return made

    def _read_settings(self) -> None:
        current, cache = given(), self._cache
        self._is_custom = cache.key_func is not default_key_func
        patterns = list(self._patterns())
        locks = "|".join(patterns) or r"(?!)"
        self._is_of_lock = re.compile(locks).match
        self._match = re.compile("|".join((*map(re.escape, RESERVED), locks))).match
        self._refused = tuple(filter(None, [_protected(cache.conf)]))
        own = type(cache.client).make_key is DefaultClient.make_key and not self._is_custom
        begins = f"{cache.key_prefix}:".startswith(RESERVED)
        self._is_usual = own and not begins and len(patterns) == len(self._refused)
        self._given = current  # Last: other threads may use this guard.

    def _patterns(self) -> Iterator[str]:
        """What the keys of locks begin with, where Django's function makes them."""
        own, prefix = self._cache, _protected(self._cache.conf)
        if prefix and not self._is_custom:
            yield _pattern(own.key_prefix, own.version, prefix)
        for alias, config in settings.CACHES.items():
            if config.get("KEY_FUNCTION"):
                continue
            other = config.get("KEY_PREFIX", ""), _protected(Conf(config.get("OPTIONS")))
            within = self._is_custom or f"{other[0]}:".startswith(f"{own.key_prefix}:")
            if other[1] and within and other != (own.key_prefix, prefix) and self._is_beside(alias):
                yield _pattern(other[0], config.get("VERSION", 1), other[1])

    def _is_beside(self, alias: str) -> bool:
        """Whether the cache ``alias`` has the same database."""
        with suppress(ImproperlyConfigured, AttributeError):
            others: Any = caches[alias]
            clients = others._lock_client(), self._cache._lock_client()
            return len({server_of(client).database for client in clients}) == 1
        return False

    def _look_closely(self, key: Any, made: str, version: Any, prefix: Any) -> None:
        """Of a key function of the project's own: whether it makes the same of a lock's name."""
        cache, lock_prefix, text = self._cache, _protected(self._cache.conf), str(key)
        if not lock_prefix:
            return
        own = cache.key_prefix if prefix is None else prefix
        for each in {cache.version, cache.version if version is None else version}:
            start = str(cache.key_func(lock_prefix, own, each))
            # A function that hashes shows no prefix, but makes the same of the same text; and of
            # others, if it ignores case or spaces.
            same = lock_prefix + text.strip()[len(lock_prefix) :]
            if (start and made.startswith(start)) or made == str(cache.key_func(same, own, each)):
                raise _refusal(key, made)

    # -- lists of keys -------------------------------------------------------------------------

    def hidden(self) -> Callable[[bytes], bool]:
        """What says of a key in Redis, as ``keys()`` reads it, that it is not that of a value."""
        self._read_settings()
        shown = not self._is_custom and bool(_protected(self._cache.conf))
        held = (
            ()
            if shown
            else frozenset(part("inventory").indexed_locks(self._cache._lock_client(), MAX_HIDDEN))
        )

        def is_hidden(made: bytes) -> bool:
            of_lock = self._is_of_lock(made.decode(errors="replace"))
            return of_lock is not None or is_reserved(made) or made in held

        return is_hidden


def _protected(conf: Conf) -> str:
    """The LOCK_PREFIX that no cache key may have; empty if there is none."""
    with suppress(ImproperlyConfigured):  # The checks report it.
        return conf.LOCK_PREFIX if conf.PROTECT_LOCKS else ""
    return ""


def _pattern(key_prefix: Any, version: Any, lock_prefix: str) -> str:
    start, own = re.escape(f"{key_prefix}:"), re.escape(str(version))
    return f"{start}(?:[^:]*|{own}):{re.escape(lock_prefix)}"


def _refusal(key: Any, made: str) -> ValueError:
    return ValueError(
        f"{key!r} is no name for a cache value: its key in Redis, {str(made)!r}, can be that of a "
        "lock. Choose a LOCK_PREFIX with which no key of the cache begins"
    )


class WithoutLocks:
    """What ``keys()`` uses as its redis-py client: it finds no keys of locks."""

    def __init__(self, client: Any, is_hidden: Callable[[bytes], bool]) -> None:
        self._client = client
        self._is_hidden = is_hidden

    def _is_shown(self, key: Any) -> bool:
        return not self._is_hidden(as_bytes(key))

    def keys(self, pattern: Any) -> list[Any]:
        return list(filter(self._is_shown, self._client.keys(pattern)))

    def scan_iter(self, **options: Any) -> Iterator[Any]:
        return filter(self._is_shown, self._client.scan_iter(**options))


class RedisCache(AsyncMethods, DjangoRedisCache):  # type: ignore[misc]  # no types
    """django-redis's cache. Each method documents its differences."""

    _client: Any
    _client_cls: Any
    _server: Any
    _params: dict[str, Any]
    _methods: ClassVar = originals(DjangoRedisCache, "get", "get_many", "has_key")

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(location, params)
        self._guard = KeyGuard(self)

    @property
    def client(self) -> Any:
        """django-redis's client: it makes no key of a lock, and of its connections none returns the
        reply to another call, nor stays with a server that has become a replica."""
        if self._client is None:
            client = self._client_cls(self._server, self._params, self)
            client.make_key = self._guard.make_key
            connect = client.connection_factory.connect
            client.connection_factory.connect = lambda url: transport.follow_address(
                transport.guard(connect(url))
            )
            self._client = client
        return self._client

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
            return part("inventory").delete_matching(redis, keys, itersize)

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

    delete = _ending_flights("delete")
    delete_many = _ending_flights("delete_many")
    incr = _ending_flights("incr")
    decr = _ending_flights("decr")
    touch = _ending_flights("touch")
    expire = _ending_flights("expire")
    pexpire = _ending_flights("pexpire")
    expire_at = _ending_flights("expire_at")
    pexpire_at = _ending_flights("pexpire_at")

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
    def keys(self, search: str, version: int | None = None, client: Any = None) -> Any:
        """As in django-redis, without the keys of locks."""
        return self.client.keys(search, version=version, **self._without_locks(client))

    @_ignoring_outages
    def iter_keys(
        self,
        search: str,
        itersize: int | None = None,
        client: Any = None,
        version: int | None = None,
    ) -> Any:
        """As in django-redis, without the keys of locks."""
        by = self._without_locks(client)
        return self.client.iter_keys(search, itersize=itersize, version=version, **by)

    def _without_locks(self, client: Any) -> dict[str, Any]:
        self._check_client(client)
        if isinstance(self.client, ShardClient):
            return {} if client is None else {"client": client}
        redis = client or self.client.get_client(write=False)
        with failing_as_django_redis(redis):
            return {"client": WithoutLocks(redis, self._guard.hidden())}

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

__getattr__ = on_first_use(__name__, {"contrib.locmem": "LocMemCache"})
