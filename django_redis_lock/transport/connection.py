"""Connections for threads.

redis-py connects. What is then said is already packed, and what comes back is not decoded; for that
redis-py's layers cost more than the system does, so a ``DirectConnection`` goes past them.
"""

from __future__ import annotations

import _socket
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from redis.connection import Connection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

try:
    import hiredis
except ImportError:
    hiredis = None  # type: ignore[assignment]  # an extra

HAS_HIREDIS = hiredis is not None
#: What a reader returns for a reply that has not come as a whole.
INCOMPLETE = object()


def reader_for(connection: Any) -> Any:
    """What takes the replies on redis-py's ``connection`` apart: hiredis, without decoding."""
    return hiredis.Reader(
        protocolError=InvalidResponse,
        replyError=connection._parser.parse_error,
        notEnoughData=INCOMPLETE,
    )


def pack_words(*words: bytes) -> bytes:
    """A command as Redis reads it. Only bytes: hiredis 3.5, with which redis-py packs, crashes the
    process if a signal handler raises while it converts an int."""
    return b"*%d\r\n%b" % (len(words), bulks(words))


def bulks(words: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


class RawConnection(Protocol):
    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def send_command(self, *args: Any) -> None: ...
    def send_packed_command(self, command: list[bytes]) -> None: ...
    def can_read(self, timeout: float = 0) -> bool: ...
    def read_response(self) -> Any: ...


_READ_BYTES = 16_384


class DirectConnection:
    """A ``RawConnection`` that does not connect again."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._sock: socket.socket | None = connection._sock
        self._reader = reader_for(connection)
        self.let_the_system_watch_the_time(connection.socket_timeout)

    def let_the_system_watch_the_time(self, timeout: float) -> None:
        """Python asks the system before each call on a socket with a ``timeout``; one that the
        system knows costs nothing."""
        # A socket of gevent's must stay as it is: it never blocks.
        known = sys.platform == "linux" and isinstance(self._open, _socket.socket)
        if known := known and not _has_periodic_signals():
            seconds, rest = divmod(timeout, 1)
            limit = struct.pack("ll", int(seconds), max(1, int(rest * 1e6)))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._open.setsockopt(socket.SOL_SOCKET, option, limit)
        self._open.settimeout(None if known else timeout)

    def connect(self) -> None:
        """It is connected."""

    def disconnect(self) -> None:
        self._sock = None
        self._connection.disconnect()

    def send_command(self, *args: Any) -> None:
        self.send_packed_command(self._connection.pack_command(*args))

    def send_packed_command(self, command: list[bytes]) -> None:
        try:
            for part in command:
                self._open.sendall(part)
        except BaseException as error:  # It may have been sent in part.
            self._give_up(error)
            raise

    def can_read(self, timeout: float = 0) -> bool:
        if self._reader.has_data():
            return True
        poll = select.poll()
        poll.register(self._open, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def read_response(self) -> Any:
        try:
            while (reply := self._reader.gets()) is INCOMPLETE:
                received = self._open.recv(_READ_BYTES)
                if not received:
                    raise RedisConnectionError("Connection closed by server.")
                self._reader.feed(received)
        except BaseException as error:
            self._give_up(error)
            raise
        if isinstance(reply, RedisError):
            if not isinstance(reply, ResponseError):  # As redis-py: it is LOADING, for instance.
                self.disconnect()
            raise reply
        return reply

    @property
    def _open(self) -> socket.socket:
        if self._sock is None:
            raise RedisConnectionError("The connection was closed.")
        return self._sock

    def _give_up(self, error: BaseException) -> None:
        """Disconnect, and raise what redis-py would for an error of the system's."""
        self.disconnect()
        if isinstance(error, (TimeoutError, BlockingIOError)):
            raise RedisTimeoutError("Redis did not answer in time") from error
        if isinstance(error, OSError):
            raise RedisConnectionError(f"The connection to Redis broke: {error}") from error


def _has_periodic_signals() -> bool:
    """A wait that the system limits begins again after each signal, so it would never end."""
    timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    return any(signal.getitimer(timer)[1] for timer in timers)


def direct(connection: Any) -> RawConnection:
    plain = type(connection) in (Connection, UnixDomainSocketConnection)
    if not HAS_HIREDIS or not plain or not hasattr(select, "poll"):
        connection._connect = _refuse_to_connect
        own: RawConnection = connection
        return own
    return DirectConnection(connection)


def _refuse_to_connect() -> None:
    """redis-py's connect again before they send or read, to whatever server is there by then."""
    raise RedisConnectionError("The connection was closed.")


def allow(connection: Any, timeout: float) -> None:
    """From now on a reply on ``connection`` may take so many seconds."""
    if isinstance(connection, DirectConnection):
        connection.let_the_system_watch_the_time(timeout)
    elif hasattr(connection._sock, "settimeout"):  # Not in memory.
        connection.socket_timeout = timeout
        connection._sock.settimeout(timeout)
        connection._parser.on_connect(connection)  # It knows the timeout, too.
