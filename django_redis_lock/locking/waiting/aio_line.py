"""The line of an event loop's tasks that wait for one lock: ``waiting`` for tasks."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from redis.exceptions import RedisError

from ...protocol import Call
from ...transport import AsyncRawConnection, aconnect, areceive, cut
from .queue import WaitQueue

__all__ = ["ANSWER", "TaskExtension", "TaskQueue", "TaskWakeEvent", "in_background"]

#: Seconds the answer about a grant may take before its connection is given up.
ANSWER = 5.0


class TaskExtension:
    """The answer to TAKE_GRANT, read in the background."""

    def __init__(self, connection: AsyncRawConnection, call: Call, until: float) -> None:
        self._until = until
        self._reading = asyncio.ensure_future(self._read(connection, call))

    async def _read(self, connection: AsyncRawConnection, call: Call) -> float | None:
        try:
            taken = await asyncio.wait_for(areceive(connection, call), ANSWER)
        except (RedisError, OSError, asyncio.TimeoutError):
            await connection.disconnect(nowait=True)  # Unknown; the keeper's renewal will tell.
            return None
        return self._until if taken else -math.inf

    def confirm(self, wait: bool) -> float | None:
        """See ``PendingLifetime``. It never waits: the loop that asks is the one that reads."""
        done = self._reading.done() and not self._reading.cancelled()
        return self._reading.result() if done else None

    async def settled(self) -> float | None:
        return await asyncio.shield(self._reading)


class TaskQueue(WaitQueue):
    """A line of tasks of one event loop, with the connection its first one waits on."""

    connection: AsyncRawConnection | None = None
    extension: TaskExtension | None = None

    def end(self) -> None:
        connection, self.connection = self.connection, None
        extension, self.extension = self.extension, None
        if connection is None:
            return
        if asyncio._get_running_loop() is self.loop:
            in_background(self._close(connection, extension))
        else:  # A coroutine of this loop was closed, and nothing runs in the loop.
            cut(connection)

    @staticmethod
    async def _close(connection: AsyncRawConnection, extension: TaskExtension | None) -> None:
        if extension is not None:
            await extension.settled()
        await connection.disconnect(nowait=True)

    async def connected(self, client: Any) -> AsyncRawConnection:
        """The connection for blocking pops, with nothing left to read on it."""
        if self.extension is not None:
            await self.extension.settled()
            self.extension = None
        if self.connection is None:
            self.node = self.server.seen_at(self.request.keys)
            self.connection = await aconnect(client, self.request.keys, timeout=5.0)
        return self.connection

    async def disconnect(self) -> None:
        connection, self.connection, self.extension = self.connection, None, None
        if connection is not None:
            await connection.disconnect(nowait=True)

    def wake(self) -> None:
        connection = self.connection
        if connection is None:
            return
        if self.loop.is_closed():
            cut(connection)
        else:
            closing = connection.disconnect(nowait=True)
            asyncio.run_coroutine_threadsafe(closing, self.loop)


class TaskWakeEvent:
    """``threading.Event`` for tasks; waiting for it loses no cancellation."""

    def __init__(self) -> None:
        self._came: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        if not self._came.done() and not self._came.get_loop().is_closed():
            self._came.set_result(None)

    async def wait(self, seconds: float) -> bool:
        if not self._came.done():
            await asyncio.wait({self._came}, timeout=seconds)
        return self._came.done()


_background: set[asyncio.Future[Any]] = set()


def in_background(work: Any) -> asyncio.Future[Any]:
    """Run ``work`` as a task that is kept until it is done."""
    task: asyncio.Future[Any] = asyncio.ensure_future(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task
