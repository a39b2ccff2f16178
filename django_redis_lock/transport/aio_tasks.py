"""How tasks wait for others, and are kept until they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import TypeVar

T = TypeVar("T")

#: Parts of the time to wait; a standstill of the loop counts as one.
WAIT_PARTS = 10


async def wait_awake(tasks: Collection[asyncio.Future[T]], seconds: float) -> None:
    """Wait for ``tasks``, at most for ``seconds`` in which the loop ran. While it stands still,
    replies may come; the servers must not be taken to be down because of that."""
    pending = set(tasks)
    for _ in range(WAIT_PARTS):
        if pending:
            _, pending = await asyncio.wait(pending, timeout=seconds / WAIT_PARTS)


async def cancellable(work: Awaitable[T]) -> T:
    """``await work``, sure to end when it is cancelled. Before Python 3.12 ``asyncio.wait_for``,
    with which redis-py connects and sends, forgets a cancellation that comes just when it is
    done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # Looked at, so that asyncio does not report it.
        raise
    return task.result()


#: Tasks that nothing else refers to.
_background: set[object] = set()


def in_background(work: Awaitable[T]) -> asyncio.Future[T]:
    """Run ``work`` as a task that is kept until it is done."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task
