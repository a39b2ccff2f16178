"""Locks and cache-stampede protection for Django on Redis."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .exceptions import (
    LocalLockUnavailable,
    LockError,
    LockLost,
    LockNotAcquired,
    LockNotOwnedError,
    TooFewReplicas,
    TooFewServers,
)
from .locking import AsyncLock, AsyncMultiLock, Lock, MultiLock
from .redlock import AsyncRedlock, Redlock

if TYPE_CHECKING:
    from .decorators import locked
    from .decorators.cached import cached, cached_page
    from .decorators.section import current_lock

__all__ = [
    "AsyncLock",
    "AsyncMultiLock",
    "AsyncRedlock",
    "LocalLockUnavailable",
    "Lock",
    "LockError",
    "LockLost",
    "LockNotAcquired",
    "LockNotOwnedError",
    "MultiLock",
    "Redlock",
    "TooFewReplicas",
    "TooFewServers",
    "cached",
    "cached_page",
    "current_lock",
    "locked",
]

__version__ = "0.1.0"


#: They know Django; the locks must be importable without Django being set up.
_NEED_DJANGO = ("cached", "cached_page", "current_lock", "locked")


def __getattr__(name: str) -> Any:
    if name in _NEED_DJANGO:
        return getattr(import_module(".decorators", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, "__version__"))
