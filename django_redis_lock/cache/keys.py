"""The keys of a cache's values, and of its locks: no value has the key of a lock (invariant S6).

A lock's key has a version that no value has: LOCK_PREFIX, and then the lock's own. With Django's
key function that of the lock ``import`` is ``site:lock:1:import``. Prefix and tenant stay in front,
and no key, pattern or version of values leads there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.base import BaseCache, default_key_func, get_key_func
from django.core.exceptions import ImproperlyConfigured
from django_redis.client import DefaultClient
from django_redis.util import CacheKey

from ..conf import Conf, given
from ..protocol import as_bytes
from ..protocol.keys import RESERVED, is_reserved, refuse_reserved
from ..transport import server_of
from ..transport.refusals import raise_interrupt

#: Names that functions which hash, cut or otherwise change a key do not leave as they are; the
#: second is longer than some leave it.
_PROBES = ("9d41f0", "c7e25a" * 100, "É e/%:F")
_UNKNOWN = object()


class UnfitKeyFunction(ImproperlyConfigured):
    """KEY_FUNCTION does not keep the keys of locks apart from those of values."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"KEY_FUNCTION {why}. Have it put any version, as a text, before the name; or set "
            "LOCK_PREFIX to '', with which locks have the keys of values"
        )


class Keys:
    """Makes the keys of one cache."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        #: KEY_PREFIX and VERSION with which keys need no look, and what such keys begin with.
        self._usual: tuple[object, object, str] = (_UNKNOWN, _UNKNOWN, "")
        self._locks: tuple[object, list[tuple[str, str, object]]] = (None, [])
        #: Versions of locks that KEY_FUNCTION keeps apart from those of values.
        self._apart: set[str] = set()

    # -- of values -----------------------------------------------------------------------------

    def make_key(self, key: Any, version: object = None, prefix: object = None) -> str:
        """As django-redis's, from which all methods of its client get their keys.

        Raises:
            ValueError: a lock, or a companion of a lock or value, may have this key.
        """
        cache = self._cache
        own, number, start = self._usual
        is_plain = prefix is version is None and type(key) is str
        if is_plain and cache.key_prefix is own and cache.version is number:
            usual: str = CacheKey(start + key)  # Earlier than in django-redis's own method.
            return usual
        locks = self._locks_of_project()
        if not isinstance(key, CacheKey):
            self._check(version, prefix)
        elif cache.key_func is default_key_func and (name := self._lock_prefix):
            locks = [("", f"{cache.key_prefix}:{name}", default_key_func), *locks]
        made = self._made(key, version, prefix)
        for alias, start, function in locks:
            within = made.startswith(start)
            if function is not default_key_func:
                # It is not asked: it may need another tenant than there is now, and ignore case.
                within = f"{cache.key_prefix}:".casefold().startswith(start.casefold())
            if within and (not alias or self._is_beside(alias)):
                raise ValueError(
                    f"{str(made)!r} is no name for a cache value: keys of locks begin with "
                    f"{start!r}. Choose another, or a KEY_PREFIX that does not begin with another's"
                )
        if made.startswith(RESERVED):
            refuse_reserved(made.encode(errors="surrogatepass"))
        if is_plain and cache._has_plain_keys:
            start = made.removesuffix(key)
            if not (
                start.startswith(RESERVED) or any(each.startswith(start) for _, each, _ in locks)
            ):
                self._usual = cache.key_prefix, cache.version, start
        return made

    def make_pattern(self, pattern: Any, version: object = None, prefix: object = None) -> str:
        """As django-redis's. Raises ValueError for a version or prefix of locks."""
        if not isinstance(pattern, CacheKey):
            self._check(version, prefix)
        client = self._cache.client
        made: str = type(client).make_pattern(client, pattern, version=version, prefix=prefix)
        return made

    def own_pattern(self) -> str:
        """What matches all keys of values with this cache's KEY_PREFIX and VERSION in Redis."""
        made = [self._made(probe) for probe in _PROBES[:2]]
        start, _, end = made[0].partition(_PROBES[0])
        if not start + end or made != [start + probe + end for probe in _PROBES[:2]]:
            raise ImproperlyConfigured(
                'CLEAR is "prefix", and KEY_FUNCTION makes keys that do not show whose they are. '
                'Set CLEAR to "database", or have it put a prefix before each key'
            )
        return "*".join(re.sub(r"([\\*?\[\]])", r"\\\1", part) for part in (start, end))

    def _made(self, key: object, version: object = None, prefix: object = None) -> str:
        client = self._cache.client
        made: str = type(client).make_key(client, key, version=version, prefix=prefix)
        return made

    def _check(self, version: object, prefix: object) -> None:
        """Raises ValueError if this version, or prefix, may be that of locks: an int never is."""
        number = self._cache.version if version is None else version
        if (type(number) is int and prefix is None) or not (name := self._lock_prefix):
            return
        # A function of the project's own may ignore case.
        text, locks = f"{number}:".casefold(), name.casefold()
        leads = type(number) is not int and (text.startswith(locks) or locks.startswith(text))
        if leads or (prefix is not None and f":{locks}" in f"{prefix}:".casefold()):
            raise ValueError(
                f"version {number!r}, prefix {prefix!r}: no name for a version or a prefix of "
                f"values, as keys of locks have it (LOCK_PREFIX is {name!r}). Choose another"
            )

    @property
    def _lock_prefix(self) -> str:
        with suppress(ImproperlyConfigured):  # The checks report it, and locks raise it.
            prefix: str = self._cache.conf.LOCK_PREFIX
            return prefix
        return ""

    def _locks_of_project(self) -> list[tuple[str, str, object]]:
        known, found = self._locks
        if known is not given():
            functions = default_key_func, self._cache.key_func
            found = [each for each in starts_of_locks() if each[2] in functions]
            self._locks = given(), found
        return found

    def _is_beside(self, alias: str) -> bool:
        """Whether the cache ``alias`` has the same database."""
        with suppress(ImproperlyConfigured, AttributeError):
            others: Any = caches[alias]
            clients = others._lock_client(), self._cache._lock_client()
            return len({server_of(client).database for client in clients}) == 1
        return False

    # -- of locks ------------------------------------------------------------------------------

    def lock_name(self, name: str, version: int | None = None) -> str:
        """The key of the lock ``name``; without a LOCK_PREFIX, that of the value ``name``.

        Raises:
            UnfitKeyFunction: KEY_FUNCTION does not keep versions apart.
            ImproperlyConfigured: the setting LOCK_PREFIX is invalid.
        """
        make, prefix = self._cache.make_key, self._cache.conf.LOCK_PREFIX
        if not prefix:
            return str(make(name, version=version))
        slot: Any = f"{prefix}{self._cache.version if version is None else version}"
        if not (self._cache._has_plain_keys or slot in self._apart):
            self._check_apart(name, version, slot, prefix)
            self._apart.add(slot)
        return str(make(name, version=slot))

    def _check_apart(self, name: str, version: object, slot: Any, prefix: str) -> None:
        make = self._cache.make_key
        self._made(name, version)  # Its error would not be about locks.
        try:
            make(name, version=slot)
        except Exception as error:
            raise_interrupt(error)
            raise UnfitKeyFunction(f"fails for the version of locks, {slot!r}") from error
        # Where the version comes last, the value "import:lock" may have the key of "import".
        ends = ("", *(prefix[at:] + prefix[:at] for at in range(len(prefix))))
        for lock, end in product((name, "x"), ends):
            try:
                same = self._made(lock + end, version) == make(lock, version=slot)
            except Exception as error:
                raise_interrupt(error)  # The function itself may refuse some names.
                continue
            if same:
                raise UnfitKeyFunction(f"gives the value {lock + end!r} the key of a lock")

    def hides_locks(self) -> bool:
        """Whether some keys of locks do not show whose they are."""
        if self._cache._has_plain_keys:
            return False
        with suppress(UnfitKeyFunction):
            start = self.lock_name("")
            return any(self.lock_name(probe) != start + probe for probe in _PROBES)
        return True


def starts_of_locks() -> Iterator[tuple[str, str, object]]:
    """Of the project's caches that have a fixed KEY_PREFIX: the alias, what the keys of its locks
    begin with in Django's key function, and its own function."""
    for alias, config in settings.CACHES.items():
        prefix = config.get("KEY_PREFIX", "")
        with suppress(ImproperlyConfigured, ImportError):  # The checks report it, or Django does.
            locks = Conf(config.get("OPTIONS")).LOCK_PREFIX
            if locks and isinstance(prefix, str):
                yield alias, f"{prefix}:{locks}", get_key_func(config.get("KEY_FUNCTION"))


class Listing:
    """What ``keys()`` uses as its redis-py client: it lists no keys that this package keeps beside
    values and locks, as raw patterns and some key functions would."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def keys(self, pattern: object) -> list[object]:
        return [key for key in self._client.keys(pattern) if not is_reserved(as_bytes(key))]

    def scan_iter(self, **options: object) -> Iterator[object]:
        return (key for key in self._client.scan_iter(**options) if not is_reserved(as_bytes(key)))


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
