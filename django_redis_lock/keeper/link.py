"""The connection of a keeper's thread to its server."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .. import transport
from ..clock import time
from ..protocol import Reply
from ..transport import RawConnection, Server
from ..transport.address import PROBE_SECONDS
from ..transport.server import readable

if TYPE_CHECKING:
    import asyncio

    from ..transport.aio_connection import AsyncRawConnection

#: Seconds after which an idle connection may have been forgotten: a bit longer than from one look
#: at a lock, for which others wait, to the next.
TRUSTED_SECONDS = 2.2


class Listener(Protocol):
    """A connection to which a server reports changes of keys; see ``contrib.instant_loss``."""

    def track(self, link: RawConnection) -> None:
        """``link`` is the keeper's connection to the server."""


#: Those of the servers that report changes.
listeners: WeakKeyDictionary[Server, Listener] = WeakKeyDictionary()


class Link:
    """A connection to ``server``: one of its own, or an idle one of the process, because the server
    may allow no other. For one thread only.

    Attributes:
        misdirected: whether a reply has come from a replica.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.misdirected = False
        self._connection: RawConnection | None = None
        #: How to give back one that is not its own.
        self._give_back: Callable[[RawConnection], object] | None = None
        #: Since when it is idle (monotonic).
        self._idle_since = -math.inf
        #: What the server reported changes to, when calls were last sent.
        self._listener: Listener | None = None

    @property
    def connection(self) -> RawConnection:
        assert self._connection is not None
        return self._connection

    def send(self, packed: list[bytes], timeout: float) -> float:
        """Send ``packed``, which may run twice. Returns the monotonic time just before that. Where
        the server reports changes, its own connection is used, if it can be opened: the server has
        to know it."""
        if self._connection is not None and self.connection.generation != self._server.generation:
            self.drop()
        if self._connection is None and self._server not in listeners:
            self._borrow()
        if self._connection is not None and time.monotonic() - self._idle_since > TRUSTED_SECONDS:
            try:
                sent_at = self._send(packed)
                # Else it was forgotten, or, which the second shows, closed.
                milliseconds = min(PROBE_SECONDS, timeout / 2) * 1000
                if self.connection.poll(milliseconds) and self.connection.can_read(0):
                    return sent_at
            except (RedisError, OSError):
                pass
            self.drop()
        if self._connection is None:
            try:
                # In RESP2 nothing comes but replies.
                self._connection = self._server.connect(timeout=timeout, protocol=2)
            except (RedisError, OSError):
                if not self._borrow() and not self._borrow_of_a_loop():
                    raise
        return self._send(packed)

    def _send(self, packed: list[bytes]) -> float:
        self._listener = listeners.get(self._server)
        if self._listener is not None and self._give_back is None:
            self._listener.track(self.connection)
        sent_at = time.monotonic()
        self.connection.send_packed_command(packed)
        return sent_at

    def read(self, timeout: float) -> Reply:
        """The next reply, within ``timeout`` seconds; an error that is one is returned."""
        if not readable(self.connection, timeout):
            raise RedisTimeoutError(f"no answer within {timeout:.2f} s")
        try:
            return self.connection.read_response()
        except ResponseError as error:
            return error

    def _borrow(self) -> bool:
        if (idle := self._server.checkout_idle(may_owe=False)) is not None:
            self._connection, _, self._idle_since = idle
            self._give_back = self._server.checkin
        return self._connection is not None

    def _borrow_of_a_loop(self) -> bool:
        if (spare := spare_of_a_loop(self._server)) is not None:
            self._connection, self._give_back = spare, _leave
        return self._connection is not None

    def rest(self) -> bool:
        """All has been answered: give a borrowed connection back. Returns True if the server has
        begun to report changes, but has not noted what was just read: it must be read again."""
        server, connection, self._idle_since = self._server, self.connection, time.monotonic()
        if self.misdirected:
            self.drop()
            server.renew(connection)
        elif self._give_back is not None:
            self._give_back(connection)
            self._connection = self._give_back = None
        server.answered()
        return listeners.get(server) is not self._listener

    def drop(self) -> None:
        """Close the connection."""
        if self._give_back is not None:
            self._server.close()  # The other idle ones may have broken for the same reason.
        if self._connection is not None:
            self._connection.disconnect()
        self._connection = self._give_back = None
        self.misdirected = False

    def end(self) -> None:
        """The thread ends: close idle connections to its server, too."""
        self.drop()
        self._server.close(but=1)


def _leave(connection: RawConnection) -> None:
    """The loop has it all the time."""


class _OverALoop:
    """The connection that the tasks of ``loop`` share, as a ``RawConnection`` for another
    thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: AsyncRawConnection) -> None:
        self._loop = loop
        self._connection = connection
        self.generation = connection.generation
        self._replies: SimpleQueue[tuple[BaseException | None, Reply]] = SimpleQueue()
        self._next: tuple[BaseException | None, Reply] | None = None

    def poll(self, milliseconds: float, /) -> bool:
        return self.can_read(milliseconds / 1000)

    def disconnect(self) -> None:
        """It is the loop's."""

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


def spare_of_a_loop(node: Server) -> Any:
    """A connection to ``node`` that the tasks of an event loop share, for a thread that can
    open none."""
    # Not imported: it is there if this process has such connections.
    aio_client = sys.modules.get(f"{transport.__name__}.aio_client")
    for loop, of_loop in getattr(aio_client, "loops", {}).copy().items():
        connection = of_loop.connections.get(node)
        usable = connection is not None and connection.generation == node.generation
        if usable and not connection.is_closed() and loop.is_running():
            return _OverALoop(loop, connection)
    return None
