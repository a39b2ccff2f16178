"""Connections for tasks: ``connections`` with ``await``."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Collection, Coroutine
from typing import Any, Protocol, TypeVar

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .calls import FOR_COMMAND
from .connections import note_sent, own_settings

__all__ = [
    "AsyncRawConnection",
    "cancellable",
    "connect_to",
    "cut",
    "is_used_up",
    "taken_from",
    "wait_awake",
]

T = TypeVar("T")

#: How many times it is looked at whether answers came, before it is too late for them.
LOOKS = 10


class AsyncRawConnection(Protocol):
    """The part of redis-py's asyncio connections that is used here."""

    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = False) -> None: ...
    async def send_command(self, *args: Any) -> None: ...
    async def send_packed_command(self, command: list[bytes]) -> None: ...
    async def read_response(self) -> Any: ...


async def connect_to(pool: Any, timeout: float) -> AsyncRawConnection:
    """A new connection to where those of ``pool`` lead, on which a read may take for ever.

    Args:
        timeout: seconds that connecting may take.
    """
    settings = own_settings(pool.connection_class, pool.connection_kwargs, timeout)
    settings.update(retry=Retry(NoBackoff(), 0), socket_timeout=None)
    connection: AsyncRawConnection = pool.connection_class(**settings)
    await connection.connect()
    return connection


async def taken_from(pool: Any) -> Any:
    """A connection of ``pool``; an error says that nothing was sent."""
    try:
        return await pool.get_connection(*FOR_COMMAND)
    except Exception as error:
        note_sent(error, False)
        raise


def is_used_up(pool: Any) -> bool:
    """Whether ``pool`` would have us wait until somebody gives a connection back."""
    return isinstance(pool, BlockingConnectionPool) and not pool.can_get_connection()


def cut(connection: AsyncRawConnection) -> None:
    """End ``connection``, whose loop cannot do that any more. Python would close it when it
    collects the loop's remains, but a grant made meanwhile would go to it."""
    writer: Any = getattr(connection, "_writer", None)
    try:
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)
    except (AttributeError, OSError):
        pass  # It had been closed.


async def cancellable(work: Coroutine[Any, Any, T]) -> T:
    """``await work``, sure to end when it is cancelled. Before Python 3.12 ``asyncio.wait_for``,
    with which redis-py sends, forgets a cancellation that comes just when it is done."""
    if sys.version_info < (3, 11):
        return await _in_a_task(work)
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    result = await work
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


async def _in_a_task(work: Coroutine[Any, Any, T]) -> T:
    """As ``cancellable``, where a task does not know whether it was cancelled."""
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


async def wait_awake(tasks: Collection[asyncio.Task[Any]], seconds: float) -> None:
    """Wait for ``tasks``, at most for ``seconds`` in which the loop ran. While it stood still
    answers may have come, and servers must not be taken to be away for that."""
    pending = set(tasks)
    for _ in range(LOOKS):
        if pending:
            _, pending = await asyncio.wait(pending, timeout=seconds / LOOKS)
