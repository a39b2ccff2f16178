"""What a lock does while Redis is away."""

from .degrading import Degrading, check_on_redis_down
from .file_lock import held_locally
from .stand_ins import AsyncDegradingLock, AsyncDegradingRedlock, DegradingLock, DegradingRedlock

__all__ = [
    "AsyncDegradingLock",
    "AsyncDegradingRedlock",
    "Degrading",
    "DegradingLock",
    "DegradingRedlock",
    "check_on_redis_down",
    "held_locally",
]
