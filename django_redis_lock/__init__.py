"""Locks and cache-stampede protection for Django on Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .decorating.current import current_lock
from .exceptions import (
    LockError,
    LockLost,
    LockNotAcquired,
    LockNotOwnedError,
    TooFewReplicas,
    TooFewServers,
)
from .locking.aio import AsyncLock
from .locking.aio_redlock import AsyncRedlock
from .locking.lock import Lock
from .locking.redlock import Redlock

if TYPE_CHECKING:
    from .caching import cached
    from .decorators import locked

__all__ = [
    "AsyncLock",
    "AsyncRedlock",
    "Lock",
    "LockError",
    "LockLost",
    "LockNotAcquired",
    "LockNotOwnedError",
    "Redlock",
    "TooFewReplicas",
    "TooFewServers",
    "cached",
    "current_lock",
    "locked",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "locked":
        # They know Django; the locks must be importable without Django being set up.
        from .decorators import locked  # noqa: PLC0415

        return locked
    if name == "cached":
        from .caching import cached  # noqa: PLC0415

        return cached
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
