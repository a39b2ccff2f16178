"""How threads and tasks wait for a lock that is taken; imported at the first wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ...extension import on_first_use

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from ...transport import Server
    from .queue import WaitQueue
    from .queue import unregister as unregister
    from .steps import FIRST_PAUSE_SECONDS as FIRST_PAUSE_SECONDS
    from .steps import MAX_PAUSE_SECONDS as MAX_PAUSE_SECONDS
    from .tasks import TaskWaiter as TaskWaiter
    from .threads import ThreadWaiter as ThreadWaiter

#: Waiters with different limits do not wait for the same places.
QueueKey: TypeAlias = "tuple[Server, bytes, AbstractEventLoop | None, int]"
#: The queues of this process.
queues: dict[QueueKey, WaitQueue] = {}

__getattr__ = on_first_use(
    __name__,
    {
        "locking.waiting.queue": "unregister",
        "locking.waiting.steps": "FIRST_PAUSE_SECONDS MAX_PAUSE_SECONDS",
        "locking.waiting.tasks": "TaskWaiter",
        "locking.waiting.threads": "ThreadWaiter",
    },
)
