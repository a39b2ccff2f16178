"""Locks and cache-stampede protection for Django on Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .exceptions import (
    ComputationFailed,
    LocalLockUnavailable,
    LockError,
    LockLost,
    LockNotAcquired,
    LockNotOwnedError,
    TooFewReplicas,
    TooFewServers,
)
from .extension import on_first_use
from .locking import Lock

if TYPE_CHECKING:
    from .cache import BackendCannotLock
    from .contrib.idempotency import idempotent
    from .contrib.redlock import AsyncRedlock, Redlock
    from .contrib.several_names import AsyncMultiLock, MultiLock
    from .contrib.unique_tasks import AlreadyQueued, Duplicate, TaskNotQueued, unique_task
    from .decorators import current_lock, locked
    from .decorators.cached import cached, cached_page
    from .locking import AsyncLock

__all__ = [
    "AlreadyQueued",
    "AsyncLock",
    "AsyncMultiLock",
    "AsyncRedlock",
    "BackendCannotLock",
    "ComputationFailed",
    "Duplicate",
    "LocalLockUnavailable",
    "Lock",
    "LockError",
    "LockLost",
    "LockNotAcquired",
    "LockNotOwnedError",
    "MultiLock",
    "Redlock",
    "TaskNotQueued",
    "TooFewReplicas",
    "TooFewServers",
    "cached",
    "cached_page",
    "current_lock",
    "idempotent",
    "locked",
    "unique_task",
]

__version__ = "0.1.0"

#: Those that know Django, and those that not every site uses.
__getattr__ = on_first_use(
    __name__,
    {
        "cache": "BackendCannotLock",
        "decorators": "cached cached_page current_lock locked",
        "locking": "AsyncLock",
        "contrib.idempotency": "idempotent",
        "contrib.redlock": "AsyncRedlock Redlock",
        "contrib.several_names": "AsyncMultiLock MultiLock",
        "contrib.unique_tasks": "AlreadyQueued Duplicate TaskNotQueued unique_task",
    },
)


def __dir__() -> list[str]:
    return sorted((*__all__, "__version__"))
