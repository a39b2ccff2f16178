"""A cache of results for names and keys. Visitors may choose these, and one may be 100,000
characters long: what is long is computed each time, so the cache has a bound in bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

#: Longer names and keys, in bytes or characters, are not kept.
MAX_CACHED_LENGTH = 256
#: Results that are kept for one function.
MAX_CACHED = 1024


def remembered(function: F) -> F:
    """``function`` with a cache for calls whose first argument, a text or bytes, is short."""
    cached = lru_cache(maxsize=MAX_CACHED)(function)

    @wraps(function)
    def call(text: Any, *args: Any) -> Any:
        return cached(text, *args) if len(text) <= MAX_CACHED_LENGTH else function(text, *args)

    call.cache_info = cached.cache_info  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
