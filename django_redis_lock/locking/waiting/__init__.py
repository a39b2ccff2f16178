"""How threads and tasks wait for a lock that is taken."""

from .queue import queues as queues
from .queue import unregister as unregister
from .steps import FIRST_PAUSE_SECONDS as FIRST_PAUSE_SECONDS
from .steps import MAX_PAUSE_SECONDS as MAX_PAUSE_SECONDS
from .steps import Refusal as Refusal
from .tasks import TaskWaiter as TaskWaiter
from .threads import ThreadWaiter as ThreadWaiter
