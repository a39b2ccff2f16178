"""How threads and tasks wait for a lock that is taken."""

from typing import TYPE_CHECKING

from ...extension import on_first_use
from .queue import queues as queues
from .queue import unregister as unregister
from .steps import FIRST_PAUSE_SECONDS as FIRST_PAUSE_SECONDS
from .steps import MAX_PAUSE_SECONDS as MAX_PAUSE_SECONDS
from .steps import Refusal as Refusal
from .threads import ThreadWaiter as ThreadWaiter

if TYPE_CHECKING:
    from .tasks import TaskWaiter as TaskWaiter

__getattr__ = on_first_use(__name__, {"locking.waiting.tasks": "TaskWaiter"})
