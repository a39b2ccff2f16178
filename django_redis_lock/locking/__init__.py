"""The locks on one server, for threads and for asyncio."""

from contextlib import suppress
from typing import TYPE_CHECKING

from ..extension import PartMissing, on_first_use, part
from .base import BaseLock as BaseLock
from .hold import Hold as Hold
from .hold import Known as Known
from .hold import Lifeline as Lifeline
from .hold import Renewal as Renewal
from .hold import release_late as release_late
from .lock import Lock as Lock
from .lock import ThreadWaiter as ThreadWaiter
from .unwind import unwinding as unwinding
from .waiting import FIRST_PAUSE_SECONDS as FIRST_PAUSE_SECONDS
from .waiting import MAX_PAUSE_SECONDS as MAX_PAUSE_SECONDS

if TYPE_CHECKING:
    from .aio import AsyncLock as AsyncLock
    from .aio import TaskWaiter as TaskWaiter

__getattr__ = on_first_use(__name__, {"locking.aio": "AsyncLock TaskWaiter"})

with suppress(PartMissing):
    part("instant_loss")  # Else a loss is noticed at the next renewal.
