"""The project's caches by alias, for values: also those that cannot lock."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from django.core.cache import InvalidCacheBackendError
from django.core.cache import caches as djangos
from django.utils.connection import ConnectionProxy

from .lock_factory import LockCache, lock_cache

if TYPE_CHECKING:
    from . import RedisCache


def value_cache(alias: str) -> RedisCache:
    """The cache ``alias``. If it cannot compute values once, it computes them for each caller.

    Raises:
        ImproperlyConfigured: CACHES has no such alias, or its BACKEND cannot be imported.
    """
    try:
        cache: Any = djangos[alias]
    except InvalidCacheBackendError:
        cache = lock_cache(alias)  # Says what is wrong.
    if not (isinstance(cache, LockCache) and cache.computes_once):
        cache = import_module(".plain", __package__).PlainCache(alias, cache)
    return cast("RedisCache", cache)


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
