"""Locks that somebody else holds while a test looks at what the others are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.cache import caches

from django_redis_lock import Lock

__all__ = ["hold"]


@contextmanager
def hold(name: str, **options: Any) -> Iterator[Lock]:
    """Somebody else has the lock."""
    lock = caches["default"].lock(name, **options)
    assert lock.acquire(blocking=False)
    yield lock
    lock.release()
