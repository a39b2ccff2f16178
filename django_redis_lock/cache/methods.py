"""Which keys a cache may have; values that are marked stale; Django's methods for tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.base import BaseCache, default_key_func
from django.core.exceptions import ImproperlyConfigured
from django_redis.client import DefaultClient
from django_redis.util import CacheKey

from .. import transport
from ..conf import SETTING, Conf, GetOrSetOptions, given
from ..events import MAX_CACHED
from ..extension import part
from ..protocol import Call, as_bytes
from ..protocol.keys import RESERVED, flight_key, is_reserved, refuse_reserved
from ..singleflight import MARK_STALE, Runner, own_flights
from ..steps import Steps
from ..transport import server_of
from ..transport.refusals import redis_errors
from .get_or_set import GetOrSet, waiting_thread
from .on_commit import OnCommit

if TYPE_CHECKING:
    from . import RedisCache
    from .typed import TypedValues
else:
    TypedValues = GetOrSet

_Patterns = tuple[Callable[[str], object], Callable[[str], object]]
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
        self._settings: object = None
        self._by_prefix: dict[tuple[str, str], _Patterns] = {}

    def make_key(self, key: Any, version: object = None, prefix: object = None) -> str:
        """As django-redis's. Raises ValueError if a lock may have this key."""
        if self._settings is not given():
            self._read_settings()
        usual = self._is_usual and prefix is version is None and type(key) is str
        if usual and not key.startswith(self._refused):
            # Most operations of the cache end here, and earlier than in django-redis's own method.
            made: str = CacheKey(f"{self._cache.key_prefix}:{self._cache.version}:{key}")
            return made
        made = self.unchecked(key, version, prefix)
        if self._is_custom or prefix is not None or type(version) not in (int, type(None)):
            self._look_closely(key, made, version, prefix)
        is_of_lock, may_be_refused = self._patterns()
        if may_be_refused(made):
            refuse_reserved(made.encode(errors="surrogatepass"))
            if is_of_lock(made):
                raise _refusal(key, made)
        return made

    def unchecked(self, key: object, version: object = None, prefix: object = None) -> str:
        client = self._cache.client
        made: str = type(client).make_key(client, key, version=version, prefix=prefix)
        return made

    def _read_settings(self) -> None:
        current, cache = given(), self._cache
        self._by_prefix = {}
        self._is_custom = cache.key_func is not default_key_func
        self._refused = tuple(filter(None, [_protected(cache.conf)]))
        prefix = vars(cache).get("key_prefix")
        own = type(cache.client).make_key is DefaultClient.make_key and not self._is_custom
        is_fixed = type(prefix) is str and not f"{prefix}:".startswith(RESERVED)
        self._is_usual = own and is_fixed and len([*self._locks()]) == len(self._refused)
        self._settings = current  # Last: other threads may use this guard.

    def _patterns(self) -> _Patterns:
        """What matches the keys of locks, and those of companions, too, with the cache's KEY_PREFIX
        and VERSION, which may be a tenant's and change."""
        where = f"{self._cache.key_prefix}", f"{self._cache.version}"
        patterns = self._by_prefix.get(where)
        if patterns is None:
            locks = "|".join(self._locks()) or r"(?!)"
            both = "|".join((*map(re.escape, RESERVED), locks))
            patterns = re.compile(locks).match, re.compile(both).match
            if len(self._by_prefix) > MAX_CACHED:
                self._by_prefix = {}
            self._by_prefix[where] = patterns
        return patterns

    def _locks(self) -> Iterator[str]:
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

    def _look_closely(self, key: object, made: str, version: object, prefix: object) -> None:
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
        is_of_lock, _ = self._patterns()
        shown = not self._is_custom and bool(_protected(self._cache.conf))
        client = self._cache._lock_client()
        held = frozenset(() if shown else part("inventory").indexed_locks(client, MAX_HIDDEN))

        def is_hidden(made: bytes) -> bool:
            of_lock = is_of_lock(made.decode(errors="replace"))
            return of_lock is not None or is_reserved(made) or made in held

        return is_hidden


def _protected(conf: Conf) -> str:
    """The LOCK_PREFIX that no cache key may have; empty if there is none."""
    with suppress(ImproperlyConfigured):  # The checks report it.
        return conf.LOCK_PREFIX if conf.PROTECT_LOCKS else ""
    return ""


def _pattern(key_prefix: object, version: object, lock_prefix: str) -> str:
    start, own = re.escape(f"{key_prefix}:"), re.escape(str(version))
    return f"{start}(?:[^:]*|{own}):{re.escape(lock_prefix)}"


def _refusal(key: object, made: str) -> ValueError:
    return ValueError(
        f"{key!r} is no name for a cache value: its key in Redis, {str(made)!r}, can be that of a "
        "lock. Choose another key, or a LOCK_PREFIX with which no key of the cache begins"
    )


class WithoutLocks:
    """What ``keys()`` uses as its redis-py client: it finds no keys of locks."""

    def __init__(self, client: Any, is_hidden: Callable[[bytes], bool]) -> None:
        self._client = client
        self._is_hidden = is_hidden

    def _is_shown(self, key: object) -> bool:
        return not self._is_hidden(as_bytes(key))

    def keys(self, pattern: object) -> list[object]:
        return list(filter(self._is_shown, self._client.keys(pattern)))

    def scan_iter(self, **options: object) -> Iterator[object]:
        return filter(self._is_shown, self._client.scan_iter(**options))


#: Keys that no prefix contains; the second is longer than some key functions leave a key.
_PROBES = ("9d41f0", "c7e25a" * 100)


class Writes(TypedValues):
    """The part of the backends that marks values stale, and knows which keys are its own."""

    # Of django-redis.
    _ignore_exceptions: bool
    _log_ignored_exceptions: bool
    logger: Any
    _guard: KeyGuard

    def mark_stale(self, key: str, version: int | None = None, *, stale: float = SETTING) -> bool:
        """Let the value of ``key`` be stale from now on: the next ``get_or_set`` computes it again,
        other callers get the old value until then. Ends a computation under way: what it computes
        may be older.

        Args:
            stale: as in ``get_or_set`` of this key; of several, the smallest. After so many seconds
                the value is gone, unless it has been computed again. Default: the setting STALE.

        Returns:
            whether there is a value.

        Raises:
            TypeError, ValueError: ``stale`` is invalid or 0.
            redis.exceptions.RedisError: Redis is down, and IGNORE_EXCEPTIONS is not set.
        """
        return bool(self.mark_stale_many([key], version, stale=stale))

    async def amark_stale(
        self, key: str, version: int | None = None, *, stale: float = SETTING
    ) -> bool:
        """``mark_stale`` for asyncio."""
        return bool(await self.amark_stale_many([key], version, stale=stale))

    def mark_stale_many(
        self, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> int:
        """``mark_stale`` for several keys, in one round trip; returns how many values there are."""
        runner = self._thread_runner()
        return int(runner.do(self._marked_stale(runner, keys, version, stale)))

    async def amark_stale_many(
        self, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> int:
        """``mark_stale_many`` for asyncio."""
        runner = self._async_runner()
        return int(await runner.do(self._marked_stale(runner, keys, version, stale)))

    def _marked_stale(
        self, runner: Runner, keys: Iterable[str], version: int | None, stale: float
    ) -> Steps[int]:
        seconds = self._stale_seconds(stale)
        names = yield from self._keys(runner, keys, version)
        args: tuple[bytes | str | int, ...] = (int(seconds * 1000), *own_flights(names).values())
        calls = [Call(MARK_STALE, (name, flight_key(name)), args) for name in names]
        try:
            return sum(map(int, (yield runner.run(*calls)))) if calls else 0
        except redis_errors():
            if not self._ignore_exceptions:
                raise
            if self._log_ignored_exceptions:
                self.logger.exception("Exception ignored")
            return 0

    def _stale_seconds(self, stale: float) -> float:
        """``stale`` as ``mark_stale`` needs it, by default the setting. Raises as that."""
        seconds: float = GetOrSetOptions.check(stale=stale).get("stale", self.conf.STALE)
        if not seconds:
            raise ValueError(
                "mark_stale needs stale, the seconds for which callers may still get the value, as "
                "in get_or_set. To have it computed again at once, use delete"
            )
        return seconds

    def on_commit(self, using: str | None = None, *, robust: bool = False) -> OnCommit:
        """``delete``, ``delete_many``, ``mark_stale`` and ``mark_stale_many`` for data that a
        database transaction changes, done after its commit: ``cache.on_commit().delete("report")``.
        At once if no transaction is open, never if it is rolled back.

        Args:
            using: the alias of the database, as of Django's ``transaction.on_commit``.
            robust: log an error of Redis instead of raising it after the commit.
        """
        return OnCommit(self, using, robust)

    def own_pattern(self) -> str:
        """What matches all keys of this cache's KEY_PREFIX and VERSION in Redis."""
        made = [self._guard.unchecked(probe) for probe in _PROBES]
        start, _, end = made[0].partition(_PROBES[0])
        if not start + end or made != [start + probe + end for probe in _PROBES]:
            raise ImproperlyConfigured(
                'CLEAR is "prefix", and KEY_FUNCTION makes keys that do not show whose they are. '
                'Set CLEAR to "database", or have it put a prefix before each key'
            )
        return "*".join(re.sub(r"([\\*?\[\]])", r"\\\1", part) for part in (start, end))


# -- asyncio ---------------------------------------------------------------------------------------


def _awaiting(name: str) -> Any:
    """Django's asynchronous twin of the method ``name``."""

    @wraps(getattr(BaseCache, f"a{name}"))
    async def method(self: AsyncMethods, *args: object, **kwargs: object) -> Any:
        return await self._await(name, *args, **kwargs)

    return method


class AsyncMethods(Writes):
    """Django's asynchronous methods. With several servers, with a client or connection class of the
    project's own, in ``async_to_sync``, and where the method for threads was replaced, they call
    that in Django's thread for synchronous code, as Django's do."""

    async def _await(self, name: str, *args: object, **kwargs: object) -> object:
        method, client = getattr(self, name), self._client_for(name)
        if client is None:
            return await sync_to_async(method)(*args, **kwargs)
        return await part("asyncio").call(self, client, name, *args, **kwargs)

    def _client_for(self, method: str) -> object:
        """None if ``method`` is to run in Django's thread."""
        one_server = type(self.client) is DefaultClient and self._breaker is not None
        one_server = one_server and self._has_plain_keys and self._is_plain
        # A loop for which a thread waits lasts for one call, and would have to connect for each.
        if not one_server or not self._is_original(method) or waiting_thread() is not None:
            return None
        try:
            return transport.asyncio_client(self._lock_client())
        except TypeError:  # Its connections are of a class without an asyncio twin.
            return None

    aget = _awaiting("get")
    aget_many = _awaiting("get_many")
    ahas_key = _awaiting("has_key")
    aset = _awaiting("set")
    aadd = _awaiting("add")
    aset_many = _awaiting("set_many")
    atouch = _awaiting("touch")
    adelete = _awaiting("delete")
    adelete_many = _awaiting("delete_many")
    aincr = _awaiting("incr")
    adecr = _awaiting("decr")
    aincr_version = _awaiting("incr_version")
