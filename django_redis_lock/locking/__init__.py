"""The locks on one server, for threads and for asyncio."""

from .aio import AsyncLock
from .base import BaseLock
from .heartbeat import last_heartbeats
from .history import Event, note_call, note_vanished, read_events
from .hold import Hold, Renewal, Renewals
from .lock import Lock, unwinding
from .operations import LockOperations
from .waiting import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, TaskWaiter, ThreadWaiter, in_background

__all__ = [
    "FIRST_PAUSE_SECONDS",
    "MAX_PAUSE_SECONDS",
    "AsyncLock",
    "BaseLock",
    "Event",
    "Hold",
    "Lock",
    "LockOperations",
    "Renewal",
    "Renewals",
    "TaskWaiter",
    "ThreadWaiter",
    "in_background",
    "last_heartbeats",
    "note_call",
    "note_vanished",
    "read_events",
    "unwinding",
]
