"""Which keys in Redis belong to locks. No cached value may be there (invariant S6)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.base import default_key_func
from django.core.exceptions import ImproperlyConfigured
from django_redis.client import DefaultClient
from django_redis.util import CacheKey

from ..conf import Conf, given
from ..extension import part
from ..protocol import RESERVED, as_bytes, is_reserved, refuse_reserved
from ..transport import server_of

if TYPE_CHECKING:
    from .lock_factory import LockCache

#: The most held locks that ``keys()`` leaves out where their keys do not show what they are.
MAX_HIDDEN = 10_000


class KeyGuard:
    """Refuses cache keys that are keys of locks or of their companions. All methods of
    django-redis's client get their keys from ``make_key``, also those given as a ``CacheKey``.

    Args:
        cache: whose values have these keys. They are checked against its locks, and against those
            of the project's other caches in the same database.
    """

    def __init__(self, cache: LockCache) -> None:
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
