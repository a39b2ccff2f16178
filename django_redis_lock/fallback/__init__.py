"""What a lock does while Redis is down."""

from .base import Fallback, check_on_redis_down
from .file_lock import held_locally
from .locks import AsyncFallbackLock, AsyncFallbackRedlock, FallbackLock, FallbackRedlock

__all__ = [
    "AsyncFallbackLock",
    "AsyncFallbackRedlock",
    "Fallback",
    "FallbackLock",
    "FallbackRedlock",
    "check_on_redis_down",
    "held_locally",
]
