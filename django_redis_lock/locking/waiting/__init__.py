"""How threads and tasks wait for a lock that is taken."""

from .queue import queues, unregister
from .steps import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, Refusal
from .tasks import TaskWaiter, in_background
from .threads import ThreadWaiter

__all__ = [
    "FIRST_PAUSE_SECONDS",
    "MAX_PAUSE_SECONDS",
    "Refusal",
    "TaskWaiter",
    "ThreadWaiter",
    "in_background",
    "queues",
    "unregister",
]
