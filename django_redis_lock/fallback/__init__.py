"""What a lock does while Redis is down."""

from .file_lock import held_locally
from .locks import (
    AsyncFallbackLock,
    AsyncFallbackRedlock,
    FallbackLock,
    FallbackRedlock,
    check_on_redis_down,
)

__all__ = [
    "AsyncFallbackLock",
    "AsyncFallbackRedlock",
    "FallbackLock",
    "FallbackRedlock",
    "check_on_redis_down",
    "held_locally",
]
