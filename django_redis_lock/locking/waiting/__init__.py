"""How threads and tasks wait for a lock that is taken; imported at the first wait."""

from typing import TYPE_CHECKING

from ...extension import on_first_use
from .queue import queues as queues
from .queue import unregister as unregister

if TYPE_CHECKING:
    from .steps import FIRST_PAUSE_SECONDS as FIRST_PAUSE_SECONDS
    from .steps import MAX_PAUSE_SECONDS as MAX_PAUSE_SECONDS
    from .steps import Refusal as Refusal
    from .tasks import TaskWaiter as TaskWaiter
    from .threads import ThreadWaiter as ThreadWaiter

__getattr__ = on_first_use(
    __name__,
    {
        "locking.waiting.steps": "FIRST_PAUSE_SECONDS MAX_PAUSE_SECONDS Refusal",
        "locking.waiting.tasks": "TaskWaiter",
        "locking.waiting.threads": "ThreadWaiter",
    },
)
