"""How threads and tasks wait for a lock that is taken."""

from .aio_line import in_background
from .tasks import TaskWaiter
from .threads import FIRST_PAUSE, LONGEST_PAUSE, ThreadWaiter

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "TaskWaiter", "ThreadWaiter", "in_background"]
