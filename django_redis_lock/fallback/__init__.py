"""What a lock does while Redis is down."""

from .file_lock import held_locally
from .locks import (
    ON_REDIS_DOWN,
    AsyncFallbackLock,
    AsyncFallbackRedlock,
    FallbackLock,
    FallbackRedlock,
)

__all__ = [
    "ON_REDIS_DOWN",
    "AsyncFallbackLock",
    "AsyncFallbackRedlock",
    "FallbackLock",
    "FallbackRedlock",
    "held_locally",
]
