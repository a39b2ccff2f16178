"""Locks and cache-stampede protection for Django on Redis."""

from .exceptions import LockError, LockLost, LockNotAcquired, LockNotOwnedError
from .locking.lock import Lock

__all__ = [
    "Lock",
    "LockError",
    "LockLost",
    "LockNotAcquired",
    "LockNotOwnedError",
]

__version__ = "0.1.0"
