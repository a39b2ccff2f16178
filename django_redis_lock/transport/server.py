"""One Redis server as this process sees it: its address, and the connections of our own to it."""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from redis.connection import Connection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import real_time as time
from ..protocol import PendingLifetime
from .address import (
    HAS_HIREDIS,
    INCOMPLETE,
    RawConnection,
    for_threads,
    note_sent,
    own_settings,
    reader_for,
    refuse_to_connect,
    set_timeout,
    timeout_of,
    who,
    without_credentials,
)
from .circuit_breaker import Breaker


class Server:
    """One address, and the idle connections of our own that lead there, the last used on top. Each
    serves one call or one wait at a time."""

    MAX_IDLE_CONNECTIONS = 16
    #: Seconds after which an idle connection is checked before it is used, by a system call: one
    #: that the server has closed must not be mistaken for one that broke during a call.
    CHECK_AFTER_IDLE_SECONDS = 1.0

    #: Whether it takes the place of the one to which its clients lead.
    stands_in = False
    retired = False  #: Whether it has left its cluster or service.
    #: Seconds within which a failover replaces a server that has failed.
    FAILOVER_SECONDS = 0.0
    #: Whether its clients lead to several servers, of which now one and now another has a key; and
    #: whether each has some of the slots.
    is_topology = is_cluster = False

    def __init__(self, pool: Any) -> None:
        # The pool itself is not kept: it must be able to go away before its server does.
        self.address = for_threads(pool)
        settings = self.address.connection_kwargs
        self.timeout, shortest = self.patience(settings)
        #: Equal for servers that lead to one database, whatever their time-outs are.
        self.database: tuple[Any, ...] = (self,)
        self.breaker = Breaker(without_credentials(settings), shortest)
        self._idle: list[tuple[RawConnection, PendingLifetime | None, float]] = []
        #: See ``locking.records``.
        self.heartbeat: Any = None
        #: See the keeper's ``Listener``.
        self.listener: Any = None
        #: By their names, the scripts that take a grant and that the server knows.
        self.known_scripts: set[str] = set()

    def __str__(self) -> str:
        return self.breaker.server

    @classmethod
    def identity(cls, pool: Any) -> tuple[Any, ...]:
        """Equal for pools that lead to one database as one user, whatever their time-outs are."""
        settings = pool.connection_kwargs
        where = [settings.get(name) for name in ("host", "port", "path", "database")]
        if not any(where):
            return (object(),)  # Only the pool itself knows where its server is.
        return (for_threads(pool).connection_class, *where, *who(settings))

    @staticmethod
    def patience(settings: Mapping[str, Any]) -> tuple[float, float]:
        """Seconds after which a call is given up, and an attempt to connect."""
        timeout = timeout_of(settings)
        return timeout, min(settings.get("socket_connect_timeout") or timeout, timeout)

    # -- where a key is; a cluster and Sentinel have more than one address ----------------------

    def at(self, keys: Sequence[bytes], patience: float | None = None) -> Server:
        """The server that has ``keys``, which are all in one place; finding it may take
        ``patience`` seconds. Raises redis-py's ConnectionError if none is known."""
        return self

    def seen_at(self, keys: Sequence[bytes]) -> Server | None:
        """As ``at``, without asking any server; None if it is not known."""
        return self

    def for_tasks(self, settings: dict[str, Any]) -> None:
        """Complete the ``settings`` of a pool of an event loop that leads here."""

    def in_one_call(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """As many of ``keys`` as one command can take, the first among them."""
        return keys

    def index_of(self, index: bytes, key: bytes) -> bytes:
        """The sorted set in which ``key`` is to be noted: INDEX, FLIGHTS, or that of its slot."""
        return index

    def nodes(self) -> Sequence[Server]:
        return (self,)

    def primaries(self) -> dict[Server, list[int]]:
        """All servers that have keys, each with its slots."""
        return {self: []}

    def is_moving_slots(self) -> bool:
        return False

    def must_discover(self) -> bool:
        """Whether ``at`` would ask other servers, which takes time."""
        return False

    def on_error(self, error: BaseException) -> None:
        """A call to one of these servers ended with ``error``: its keys may have moved."""

    def refuses(self, error: BaseException) -> bool:
        """Whether ``error`` says that the keys have moved, or are being moved."""
        return False

    def sent_to(self, error: Any) -> Server:
        """The server that ``error``, a refusal, names."""
        return self

    def answered(self) -> None:
        if self.breaker.failing:
            self.breaker.answered()

    # -- calls ---------------------------------------------------------------------------------

    def exchange(
        self, command: bytes, replies: int | None = None, patience: float | None = None
    ) -> Any:
        """The reply to ``command``, or a list of so many ``replies``, on a connection of our own.

        Args:
            patience: seconds to wait for each reply; None leaves the wait to the socket's timeout.
        """
        connection, unread = self.checkout_unread(patience)
        try:
            connection.send_packed_command([command])
            if unread is not None:
                _wait(connection, patience)
                unread.confirm(True)
            if patience is not None:
                _wait(connection, patience)
            answer = connection.read_response()
            if replies is not None:
                answer = [answer]
                while len(answer) < replies:
                    _wait(connection, patience)
                    answer.append(connection.read_response())
        except ResponseError:
            if replies is None:
                self.checkin(connection)
            else:
                connection.disconnect()  # The other replies are still to come.
            self.breaker.answered()
            raise
        except BaseException as error:  # With an unread reply it cannot be used again.
            connection.disconnect()
            if isinstance(error, RedisTimeoutError):
                self.breaker.failed(error, self.timeout if patience is None else patience)
            raise
        self.checkin(connection)
        if self.breaker.failing:
            self.breaker.answered()
        return answer

    # -- connections -----------------------------------------------------------------------------

    def connect(self, timeout: float | None = None, **changes: Any) -> RawConnection:
        """A new connection, with the pool's address and credentials, and a ``timeout`` in seconds
        for connecting and for answers. ``changes``: other arguments than the pool's."""
        timeout = self.timeout if timeout is None else timeout
        connection_class, settings = self.address
        settings = {**own_settings(connection_class, settings, timeout), **changes}
        connection = connection_class(**settings)
        began = time.monotonic()
        try:
            connection.connect()
        except (RedisError, OSError) as error:
            if not isinstance(error, ResponseError):
                self.breaker.failed(error, time.monotonic() - began)
            raise
        return direct(connection)

    def checkout(self, patience: float | None = None) -> RawConnection:
        """A connection with no reply to be read, idle or new. ``patience``: seconds that connecting
        may take, if that is less than usual."""
        return _with_nothing_to_read(*self.checkout_unread(patience))

    def checkout_unread(
        self, patience: float | None = None
    ) -> tuple[RawConnection, PendingLifetime | None]:
        """As ``checkout``, but a reply may still be on its way: read it after the next call is
        sent, so that no call waits for it. An error says that nothing was sent."""
        idle = self._checkout_idle()
        if idle is not None:
            return idle
        try:
            if patience is None or patience >= self.timeout:
                return self.connect(), None
            connection = self.connect(patience)
            allow(connection, self.timeout)  # It will be kept, also for callers with patience.
            return connection, None
        except Exception as error:
            note_sent(error, False)
            raise

    def must_connect(self) -> bool:
        """Whether ``checkout`` would make a connection."""
        return not self._idle

    def checkout_idle(self, wait: bool = True) -> RawConnection | None:
        """An idle connection; None if there is none, or it would have to ``wait`` for a reply."""
        connection, unread = self._checkout_idle() or (None, None)
        has_come = connection is None or unread is None or unread.confirm(wait) is not None
        if connection is not None and not (has_come or wait):
            self.checkin(connection, unread)
            return None
        return connection

    def _checkout_idle(self) -> tuple[RawConnection, PendingLifetime | None] | None:
        while self._idle:
            try:
                connection, unread, since = self._idle.pop()
            except IndexError:  # Another thread has taken it.
                return None
            if time.monotonic() - since < self.CHECK_AFTER_IDLE_SECONDS:
                return connection, unread
            try:
                if unread is not None:
                    unread.confirm(True)
                # Only the end of a connection that the server has closed can be read now.
                if not connection.can_read(0):
                    return connection, None
            except (RedisError, OSError):
                pass
            connection.disconnect()
        return None

    def checkin(self, connection: RawConnection, unread: PendingLifetime | None = None) -> None:
        """Keep ``connection`` for the next caller, unless enough are kept."""
        if len(self._idle) < self.MAX_IDLE_CONNECTIONS:
            self._idle.append((connection, unread, time.monotonic()))
        else:
            connection.disconnect()

    def close(self, but: int = 0) -> None:
        """Close the idle connections except the ``but`` last used."""
        for _ in range(len(self._idle) - but):
            try:
                connection, *_ = self._idle.pop(0)
            except IndexError:  # Other threads have taken them.
                return
            connection.disconnect()


def _wait(connection: RawConnection, patience: float | None) -> None:
    if patience is not None and not connection.can_read(patience):
        raise RedisTimeoutError(f"Redis did not answer within {patience:.3f} s")


def _with_nothing_to_read(
    connection: RawConnection, unread: PendingLifetime | None
) -> RawConnection:
    if unread is not None:
        unread.confirm(True)
    return connection


# -- connections ---------------------------------------------------------------------------------

_READ_BYTES = 16_384


class DirectConnection:
    """A ``RawConnection`` that goes past redis-py's layers, and does not connect again."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._sock: socket.socket = connection._sock
        self._reader = reader_for(connection)
        set_timeout(self._sock, connection.socket_timeout)

    def connect(self) -> None:
        """It is connected."""

    def disconnect(self) -> None:
        self._connection.disconnect()  # That closes the socket, so using it is an OSError.

    def send_command(self, *args: Any) -> None:
        self.send_packed_command(self._connection.pack_command(*args))

    def send_packed_command(self, command: list[bytes]) -> None:
        try:
            self._sock.sendall(command[0] if len(command) == 1 else b"".join(command))
        except BaseException as error:  # It may have been sent in part.
            self._give_up(error)
            raise

    def can_read(self, timeout: float = 0) -> bool:
        if self._reader.has_data():
            return True
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
        except ValueError as error:
            raise RedisConnectionError("The connection to Redis was closed") from error
        return bool(poll.poll(timeout * 1000))

    def read_response(self) -> Any:
        try:
            while (reply := self._reader.gets()) is INCOMPLETE:
                received = self._sock.recv(_READ_BYTES)
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

    def _give_up(self, error: BaseException) -> None:
        """Disconnect, and raise what redis-py would for an error of the system's."""
        how = "was closed" if self._sock.fileno() == -1 else "broke"
        self.disconnect()
        if isinstance(error, (TimeoutError, BlockingIOError)):
            raise RedisTimeoutError("Redis did not answer in time") from error
        if isinstance(error, OSError):
            raise RedisConnectionError(f"The connection to Redis {how}: {error}") from error


def readable(connections: Sequence[RawConnection], seconds: float) -> list[RawConnection]:
    """Those of ``connections`` that have a reply or have ended, after ``seconds`` at most."""
    until = time.monotonic() + seconds
    while connections:
        left = max(0.0, until - time.monotonic())
        first_only = left if len(connections) == 1 else 0
        found = [each for each in connections if _is_readable(each, first_only)]
        if found or not left:
            return found
        _wait_for_any(connections, left)
    return []


def _is_readable(connection: RawConnection, seconds: float) -> bool:
    try:
        return connection.can_read(seconds)
    except (RedisError, OSError):
        return True  # Reading it raises the error.


def _wait_for_any(connections: Sequence[RawConnection], seconds: float) -> None:
    sockets: list[Any] = [getattr(each, "_sock", None) for each in connections]
    if None in sockets or not hasattr(select, "poll"):
        _is_readable(connections[0], min(seconds, 0.01))
        return
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    poll.poll(seconds * 1000)


def direct(connection: Any) -> RawConnection:
    plain = type(connection) in (Connection, UnixDomainSocketConnection)
    if not HAS_HIREDIS or not plain or not hasattr(select, "poll"):
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


def allow(connection: Any, timeout: float) -> None:
    """From now on a reply on ``connection`` may take so many seconds."""
    if isinstance(connection, DirectConnection):
        set_timeout(connection._sock, timeout)
    elif hasattr(connection._sock, "settimeout"):  # Not in memory.
        connection.socket_timeout = timeout
        connection._sock.settimeout(timeout)
        connection._parser.on_connect(connection)  # It knows the timeout, too.
