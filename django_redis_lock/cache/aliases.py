"""Which of the project's caches can hold locks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from django.conf import settings
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ..conf import given
from .backend import RedisCache

__all__ = ["BACKEND", "lock_cache", "lock_caches"]

#: What a cache's BACKEND must be, or be derived from.
BACKEND = "django_redis_lock.cache.RedisCache"


def lock_caches() -> Iterator[str]:
    """The aliases of the caches that can hold locks, that of the setting USING first; other
    backends are not even connected."""
    preferred = given().get("USING")
    for alias in sorted(settings.CACHES, key=lambda alias: alias != preferred):
        if can_lock(alias):
            yield alias


def can_lock(alias: str) -> bool:
    """Whether the BACKEND of the cache ``alias`` is ours."""
    try:
        backend = import_string(settings.CACHES[alias]["BACKEND"])
    except (ImportError, KeyError):
        return False  # Django reports it where that cache is used.
    return isinstance(backend, type) and issubclass(backend, RedisCache)


def lock_cache(alias: str) -> RedisCache:
    """The cache ``alias``, for locks.

    Raises:
        ImproperlyConfigured: there is none of that name, or it cannot lock.
    """
    if alias not in settings.CACHES:
        known = ", ".join(map(repr, lock_caches())) or "none"
        raise ImproperlyConfigured(f"CACHES has no {alias!r}; caches that can lock: {known}")
    if not can_lock(alias):
        raise ImproperlyConfigured(
            f"the cache {alias!r} cannot lock: its BACKEND must be {BACKEND!r}"
        )
    return cast(RedisCache, caches[alias])
