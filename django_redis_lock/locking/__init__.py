"""The locks on one server, for threads and for asyncio."""

from .aio import AsyncLock
from .base import BaseLock
from .graceful_exit import unwinding
from .heartbeat import last_heartbeats
from .history import Event, note_call, note_vanished, read_events
from .local_state import for_the_caller
from .lock import Lock
from .operations import LockOperations
from .renewal import DeferredRelease, Renewal, Renewals
from .replication import Confirmed
from .waiting import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, TaskWaiter, ThreadWaiter, in_background

__all__ = [
    "FIRST_PAUSE_SECONDS",
    "MAX_PAUSE_SECONDS",
    "AsyncLock",
    "BaseLock",
    "Confirmed",
    "DeferredRelease",
    "Event",
    "Lock",
    "LockOperations",
    "Renewal",
    "Renewals",
    "TaskWaiter",
    "ThreadWaiter",
    "for_the_caller",
    "in_background",
    "last_heartbeats",
    "note_call",
    "note_vanished",
    "read_events",
    "unwinding",
]
