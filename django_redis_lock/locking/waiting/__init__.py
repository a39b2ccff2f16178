"""How threads and tasks wait for a lock that is taken."""

from .aio_line import in_background
from .tasks import TaskPlace
from .threads import FIRST_PAUSE, LONGEST_PAUSE, ThreadPlace

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "TaskPlace", "ThreadPlace", "in_background"]
