"""The caches of the project, for values: also those that cannot lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from django.apps import apps
from django.core.cache import InvalidCacheBackendError
from django.core.cache import caches as djangos
from django.core.checks import CheckMessage, register
from django.utils.connection import ConnectionProxy

from ..extension import PACKAGE, PartMissing, part
from . import backend

if TYPE_CHECKING:
    from .typed import RedisCache


@register("redis_lock")
def check_installed(**kwargs: object) -> list[CheckMessage]:
    """All other checks are registered by the app, which may be missing."""
    with suppress(PartMissing):
        return [] if apps.is_installed(PACKAGE) else [part("checks").not_installed()]
    return []


def value_cache(alias: str) -> RedisCache:
    """The cache ``alias``. If it cannot compute values once, it computes them for each caller.

    Raises:
        ImproperlyConfigured: CACHES has no such alias, or its BACKEND cannot be imported.
    """
    try:
        cache: object = djangos[alias]
    except InvalidCacheBackendError:
        cache = backend.lock_cache(alias)  # Says what is wrong.
    if not (isinstance(cache, backend.RedisCache) and cache.computes_once):
        cache = part("other_backends").PlainCache(alias, cache)
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
