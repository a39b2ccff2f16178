"""A connection for threads that goes past redis-py's layers.

Its socket does not block. The system's own limit for a call (SO_RCVTIMEO) would begin again after
each signal, so that a periodic one could postpone it without end; ``poll`` has a deadline.
"""

from __future__ import annotations

import _socket
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from redis.connection import Connection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .address import HAS_HIREDIS, INCOMPLETE, RawConnection, reader_for, refuse_to_connect

_READ_BYTES = 16_384


class DirectConnection:
    """A ``RawConnection`` that does not connect again."""

    generation = 0  #: See ``Server.renew``.

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._sock: socket.socket = connection._sock
        self._sock.setblocking(False)
        self._reader = reader_for(connection)
        self._buffer = bytearray(_READ_BYTES)
        readable, writable = select.poll(), select.poll()
        readable.register(self._sock, select.POLLIN)
        writable.register(self._sock, select.POLLOUT)
        self._readable: Callable[[float], Any] = readable.poll
        self._writable: Callable[[float], Any] = writable.poll
        self.allow(connection.socket_timeout)

    def allow(self, timeout: float) -> None:
        """From now on a reply may take so many seconds."""
        self._milliseconds = timeout * 1000

    def connect(self) -> None:
        """It is connected."""

    def disconnect(self) -> None:
        # The number of the socket may be another file's from now on: do not wait for that.
        self._readable = self._writable = _at_once
        self._connection.disconnect()  # That closes the socket, so using it is an OSError.

    def send_command(self, *args: Any) -> None:
        self.send_packed_command(self._connection.pack_command(*args))

    def send_packed_command(self, command: list[bytes]) -> None:
        try:
            for part in command:
                self._send(part)
        except BaseException as error:  # It may have been sent in part.
            self._give_up(error)
            raise

    def _send(self, part: bytes) -> None:
        left: bytes | memoryview = part
        while True:
            try:
                sent = self._sock.send(left)
            except BlockingIOError:
                sent = 0
            if sent == len(left):
                return
            left = memoryview(left)[sent:]
            if not self._writable(self._milliseconds):
                raise TimeoutError

    def can_read(self, timeout: float = 0) -> bool:
        if self._reader.has_data():
            return True
        if self._sock.fileno() == -1:
            raise RedisConnectionError("The connection to Redis was closed")
        return bool(self._readable(timeout * 1000))

    def read_response(self) -> Any:
        try:
            while (reply := self._reader.gets()) is INCOMPLETE:
                if not self._readable(self._milliseconds):
                    raise TimeoutError
                received = self._sock.recv_into(self._buffer)
                if not received:
                    raise RedisConnectionError("Connection closed by server.")
                self._reader.feed(self._buffer, 0, received)
        except BaseException as error:
            self._give_up(error)
            raise
        if isinstance(reply, RedisError):
            if not isinstance(reply, ResponseError):  # As redis-py: it is LOADING, for instance.
                self.disconnect()
            raise reply
        return reply

    def _give_up(self, error: BaseException) -> None:
        """Disconnect, and raise what redis-py would for an error of the system's."""
        how = "was closed" if self._sock.fileno() == -1 else "broke"
        self.disconnect()
        if isinstance(error, TimeoutError):
            raise RedisTimeoutError("Redis did not answer in time") from error
        if isinstance(error, OSError):
            raise RedisConnectionError(f"The connection to Redis {how}: {error}") from error


def _at_once(milliseconds: float) -> bool:
    return True


def direct(connection: Any) -> RawConnection:
    """``connection``, redis-py's, as one that does not connect again."""
    plain = type(connection) in (Connection, UnixDomainSocketConnection)
    # A socket of gevent's must stay as it is: it lets other greenlets run while it waits.
    plain = plain and isinstance(connection._sock, _socket.socket) and hasattr(select, "poll")
    if not HAS_HIREDIS or not plain:
        connection._connect = refuse_to_connect
        own: RawConnection = connection
        return own
    return DirectConnection(connection)


def shut(connection: RawConnection | None) -> None:
    """End the calls on ``connection``, in whichever thread they are."""
    sock: socket.socket | None = getattr(connection, "_sock", None)
    if sock is not None:
        with suppress(OSError):  # It had broken.
            sock.shutdown(socket.SHUT_RDWR)


def has_socket(connection: Any) -> bool:
    """Whether one can wait for a reply on ``connection``, or it is in our own memory."""
    sock = getattr(connection, "_sock", None)
    return sock is None or isinstance(sock, socket.socket)


def allow(connection: Any, timeout: float) -> None:
    """From now on a reply on ``connection`` may take so many seconds."""
    if isinstance(connection, DirectConnection):
        connection.allow(timeout)
    elif hasattr(connection._sock, "settimeout"):  # Not in memory.
        connection.socket_timeout = timeout
        connection._sock.settimeout(timeout)
        connection._parser.on_connect(connection)  # It knows the timeout, too.
