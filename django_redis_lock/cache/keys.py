"""Which keys the values of a cache have, and which they cannot have: those of locks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.base import BaseCache, default_key_func
from django.core.exceptions import ImproperlyConfigured
from django_redis.client import DefaultClient
from django_redis.util import CacheKey

from ..conf import Conf, given
from ..events import MAX_CACHED
from ..extension import part
from ..protocol import as_bytes
from ..protocol.keys import RESERVED, is_reserved, refuse_reserved
from ..transport import server_of

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

    def __init__(self, cache: Any) -> None:
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


def own_pattern(make: Callable[[str], str]) -> str:
    """What matches all keys in Redis that ``make`` makes.

    Raises:
        ImproperlyConfigured: they do not show whose they are.
    """
    made = [make(probe) for probe in _PROBES]
    start, _, end = made[0].partition(_PROBES[0])
    if not start + end or made != [start + probe + end for probe in _PROBES]:
        raise ImproperlyConfigured(
            'CLEAR is "prefix", and KEY_FUNCTION makes keys that do not show whose they are. '
            'Set CLEAR to "database", or have it put a prefix before each key'
        )
    return "*".join(re.sub(r"([\\*?\[\]])", r"\\\1", part) for part in (start, end))


def has_plain_keys(cache: Any) -> bool:
    """Whether every thread makes the same keys: only Django's and django-redis's code makes them,
    of a fixed KEY_PREFIX and VERSION."""
    own = vars(cache)
    return (
        cache.key_func is default_key_func
        and type(cache).make_key is BaseCache.make_key
        and type(cache.client).make_key is DefaultClient.make_key
        and type(own.get("key_prefix")) is str
        and type(own.get("version")) in (int, str)
    )


class NamedKey(str):
    """A key that a function of the user has made, which can make it again."""

    #: The function, and a call of it.
    maker: Callable[..., str]
    make: Callable[[], str]

    @classmethod
    def of(cls, maker: Callable[..., str], *args: object) -> NamedKey:
        make = partial(maker, *args)
        key = cls(make())
        key.maker, key.make = maker, make
        return key
