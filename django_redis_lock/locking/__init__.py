"""The locks on one server, for threads and for asyncio."""

from contextlib import suppress
from typing import TYPE_CHECKING

from .. import history
from ..extension import PartMissing, on_first_use, part
from .base import BaseLock as BaseLock
from .hold import Hold as Hold
from .hold import Lifeline as Lifeline
from .hold import Renewal as Renewal
from .hold import listen
from .hold import release_late as release_late
from .local_state import Known as Known
from .lock import Lock as Lock
from .unwind import unwinding as unwinding
from .waiting import FIRST_PAUSE_SECONDS as FIRST_PAUSE_SECONDS
from .waiting import MAX_PAUSE_SECONDS as MAX_PAUSE_SECONDS
from .waiting import ThreadWaiter as ThreadWaiter

if TYPE_CHECKING:
    from .aio import AsyncLock as AsyncLock
    from .waiting.tasks import TaskWaiter as TaskWaiter

__getattr__ = on_first_use(
    __name__, {"locking.aio": "AsyncLock", "locking.waiting.tasks": "TaskWaiter"}
)

listen(history)
with suppress(PartMissing):
    part("instant_loss")  # Else a loss is noticed at the next renewal.
