"""What a lock on several servers does while they are down."""

from __future__ import annotations

from ..redlock import AsyncRedlock, Redlock
from . import Fallback


class FallbackRedlock(Fallback, Redlock):
    """``Redlock`` with a fallback for outages."""


class AsyncFallbackRedlock(Fallback, AsyncRedlock):
    """``AsyncRedlock`` with a fallback for outages."""
