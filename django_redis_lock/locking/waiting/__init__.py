"""How threads and tasks wait for a lock that is taken; ``tasks`` is of the part ``asyncio``."""

from .queue import QueueKey as QueueKey
from .queue import queues as queues
from .queue import unregister as unregister
from .steps import FIRST_PAUSE_SECONDS as FIRST_PAUSE_SECONDS
from .steps import MAX_PAUSE_SECONDS as MAX_PAUSE_SECONDS
from .threads import ThreadWaiter as ThreadWaiter
