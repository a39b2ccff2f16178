"""A connection of an event loop, for a thread that can open none."""

from __future__ import annotations

import sys
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from .. import transport
from ..protocol import Reply
from ..transport import RawConnection, Server
from ..transport.server import pack_words

if TYPE_CHECKING:
    import asyncio

    from ..transport.aio_connection import AsyncRawConnection


class _OverALoop:
    """A ``RawConnection`` for another thread: the one that the tasks of ``loop`` share."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: AsyncRawConnection) -> None:
        self._loop = loop
        self._connection = connection
        self.generation = connection.generation
        self._replies: SimpleQueue[tuple[BaseException | None, Reply]] = SimpleQueue()
        self._next: tuple[BaseException | None, Reply] | None = None

    def connect(self) -> None:
        """It is connected."""

    def poll(self, milliseconds: float, /) -> bool:
        return self.can_read(milliseconds / 1000)

    def disconnect(self) -> None:
        """It is the loop's."""

    def send_command(self, *args: object) -> None:
        self.send_packed_command([pack_words(*map(str.encode, map(str, args)))])

    def send_packed_command(self, command: list[bytes]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._send, command)
        except RuntimeError as error:
            raise RedisConnectionError(f"The event loop of the connection: {error}") from error

    def _send(self, commands: list[bytes]) -> None:
        try:
            for command in commands:
                self._connection.request(command).add_done_callback(self._answered)
        except RedisError as error:
            self._replies.put((error, None))

    def _answered(self, reply: asyncio.Future[Reply]) -> None:
        error = reply.exception()
        self._replies.put((error, None if error else reply.result()))

    def can_read(self, timeout: float = 0) -> bool:
        if self._next is None:
            with suppress(Empty):
                self._next = self._replies.get(timeout > 0, timeout)
        return self._next is not None

    def read_response(self) -> Reply:
        (error, value), self._next = self._next or self._replies.get(), None
        if error is not None:
            raise error
        return value


def spare_of_a_loop(node: Server) -> RawConnection | None:
    """A connection to ``node`` that the tasks of an event loop share, for a thread that can
    open none."""
    # Not imported: it is there if this process has such connections.
    aio_client = sys.modules.get(f"{transport.__name__}.aio_client")
    for loop, of_loop in getattr(aio_client, "loops", {}).copy().items():
        connection = of_loop.connections.get(node)
        if connection is None or connection.generation != node.generation or connection.is_closed():
            continue
        if loop.is_running():
            return _OverALoop(loop, connection)
    return None
