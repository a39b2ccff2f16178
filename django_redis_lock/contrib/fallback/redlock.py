"""What a lock on several servers does while they are down."""

from __future__ import annotations

from ..redlock import AsyncRedlock, Redlock
from . import AsyncFallbackLock, FallbackLock


class FallbackRedlock(FallbackLock, Redlock):
    """``Redlock`` with a fallback for outages."""


class AsyncFallbackRedlock(AsyncFallbackLock, AsyncRedlock):
    """``AsyncRedlock`` with a fallback for outages."""
