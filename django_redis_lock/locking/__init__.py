"""The locks on one server, for threads and for asyncio."""

from typing import TYPE_CHECKING

from ..extension import on_first_use
from .base import BaseLock as BaseLock
from .hold import Hold as Hold
from .hold import Renewal as Renewal
from .local_state import is_by_caller as is_by_caller
from .local_state import is_inside as is_inside
from .lock import Lock as Lock
from .operations import LockOperations as LockOperations
from .renewals import Renewals as Renewals

if TYPE_CHECKING:
    from .aio import AsyncLock as AsyncLock
    from .causes import code_here as code_here
    from .records import Event as Event
    from .records import Heartbeat as Heartbeat
    from .records import event_args as event_args
    from .records import last_heartbeats as last_heartbeats
    from .records import log_failed as log_failed
    from .records import note_call as note_call
    from .records import note_vanished as note_vanished
    from .records import read_events as read_events
    from .unwind import unwinding as unwinding
    from .waiting import FIRST_PAUSE_SECONDS as FIRST_PAUSE_SECONDS
    from .waiting import MAX_PAUSE_SECONDS as MAX_PAUSE_SECONDS
    from .waiting import TaskWaiter as TaskWaiter
    from .waiting import ThreadWaiter as ThreadWaiter

__getattr__ = on_first_use(
    __name__,
    {
        "locking.aio": "AsyncLock",
        "locking.causes": "code_here",
        "locking.records": "Event Heartbeat event_args last_heartbeats log_failed note_call "
        "note_vanished read_events",
        "locking.unwind": "unwinding",
        "locking.waiting": "FIRST_PAUSE_SECONDS MAX_PAUSE_SECONDS TaskWaiter ThreadWaiter",
    },
)
