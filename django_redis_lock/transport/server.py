"""One Redis server as this process sees it: its address, and the connections of our own to it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from redis.connection import ConnectionPool
from redis.exceptions import AskError, BusyLoadingError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import real_time as time
from ..protocol import Reply, UnreadReply
from ..threads import after_fork
from .address import (
    TRUSTED_SECONDS,
    RawConnection,
    allow,
    closed_once,
    connecting,
    for_threads,
    note_sent,
    own_settings,
    probe_seconds,
    refuse_to_connect,
    shut,
    still_answers,
    timeout_of,
    who,
)
from .circuit_breaker import CHECK_SECONDS, Breaker, without_credentials
from .hints import name_missing_right
from .interrupts import interruptible
from .refusals import LostLogin, is_misdirected, redis_errors

if TYPE_CHECKING:
    from .aio_connection import AsyncRawConnection
    from .registry import Database, Pool, Settings

T = TypeVar("T", bound="RawConnection | AsyncRawConnection")
_all: set[weakref.ref[Server]] = set()


@after_fork
def _forget_connections() -> None:
    """They are the parent's; ``registry`` forgets the servers with their idle connections."""
    for known in list(_all):
        if (server := known()) is not None:
            server._made.clear()
    _all.clear()


def disconnect_idle(pool: object) -> None:
    # An asyncio pool's connections belong to its loop; those of a cluster's client to its nodes.
    if isinstance(pool, ConnectionPool):
        pool.disconnect(inuse_connections=False)


class Server:
    """One address, and the idle connections of our own there; each serves one call at a time."""

    MAX_IDLE_CONNECTIONS = 16

    #: Whether it takes the place of the one to which its clients lead.
    stands_in = False
    #: Whether others say which server is used, so that a connection to a replica is their affair.
    discovered = False
    retired = False  #: Whether it has left its cluster or service.
    #: Seconds within which a failover replaces a server that has failed.
    FAILOVER_SECONDS = 0.0
    #: Whether its clients lead to several servers, of which now one and now another has a key; and
    #: whether each has some of the slots.
    is_topology = is_cluster = False

    def __init__(self, pool: Pool) -> None:
        # The pool itself is not kept: it must be able to go away before its server does.
        self.address = for_threads(pool)
        settings = self.address.connection_kwargs
        self.timeout, shortest = self.timeouts(settings)
        #: Equal for servers that lead to one database, whatever their time-outs are.
        self.database: Database = (self,)
        self.breaker = Breaker(without_credentials(settings), shortest)
        self._idle: list[tuple[RawConnection, UnreadReply | None, float]] = []
        #: Weak references to all connections that lead here, also those in use.
        self._made: set[weakref.ref[Any]] = set()
        self.generation = 0  #: How often they were renewed.
        #: Weak references to redis-py's pools that lead here.
        self.pools: set[weakref.ref[Pool]] = set()
        _all.add(weakref.ref(self, _all.discard))
        #: The SHAs of the scripts that take a grant, if the server knows them.
        self.known_scripts: set[str] = set()

    def __str__(self) -> str:
        return self.breaker.server

    @classmethod
    def identity(cls, pool: Pool) -> Database:
        """Equal for pools that lead to one database as one user, whatever their time-outs are."""
        settings = pool.connection_kwargs
        where = [settings.get(name) for name in ("host", "port", "path", "database")]
        if not any(where):
            return (object(),)  # Only the pool itself knows where its server is.
        return (for_threads(pool).connection_class, *where, *who(settings))

    @staticmethod
    def timeouts(settings: Settings) -> tuple[float, float]:
        """Seconds after which a call is given up, and an attempt to connect."""
        timeout = timeout_of(settings)
        return timeout, min(settings.get("socket_connect_timeout") or timeout, timeout)

    # -- where a key is; a cluster and Sentinel have more than one address ----------------------

    def locate(self, keys: Sequence[bytes], patience: float | None = None) -> Server:
        """The server of ``keys``, within ``patience`` seconds. Raises redis-py's errors."""
        return self

    def seen_at(self, keys: Sequence[bytes]) -> Server | None:
        """As ``locate``, without asking any server; None if it is not known."""
        return self

    def for_tasks(self, settings: Settings) -> None:
        """Complete the ``settings`` of a pool of an event loop that leads here."""

    def in_one_call(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """As many of ``keys`` as one command can take, the first among them."""
        return keys

    def index_of(self, index: bytes, key: bytes) -> bytes:
        """The sorted set in which ``key`` is to be noted: ``index``, or that of its slot."""
        return index

    def nodes(self) -> Sequence[Server]:
        return (self,)

    def primaries(self) -> dict[Server, list[int]]:
        """All servers that have keys, each with its slots."""
        return {self: []}

    def is_moving_slots(self) -> bool:
        return False

    def must_discover(self) -> bool:
        """Whether ``locate`` would ask other servers, which takes time."""
        return False

    def on_error(self, error: BaseException) -> None:
        """A call to one of these servers ended with ``error``: its keys may have moved."""
        name_missing_right(error)

    def refuses(self, error: BaseException) -> bool:
        """Whether ``error`` says that the keys have moved, or are being moved."""
        return False

    def sent_to(self, error: AskError) -> Server:
        """The server that ``error``, a refusal, names."""
        return self

    def answered(self) -> None:
        if self.breaker.failing:
            self.breaker.answered()

    # -- calls ---------------------------------------------------------------------------------

    def exchange(
        self,
        command: bytes,
        replies: int | None = None,
        patience: float | None = None,
        retry_elsewhere: bool = True,
        may_run_twice: bool = True,
        in_all: bool = False,
    ) -> Reply:
        """The reply to ``command``, or a list of so many ``replies``, on a connection of our own.

        Args:
            patience: seconds to wait for each reply; None leaves the wait to the socket's timeout.
            retry_elsewhere: whether what a replica refuses is sent again, on a new connection.
            may_run_twice: whether the caller sends it again if the reply is lost; else a connection
                that the server has closed must not be used.
            in_all: whether ``patience`` is for connecting, too, and for a second try of the caller.
        """
        began = time.monotonic()
        idle = self._checkout_idle(began, patience, may_run_twice)
        connection, unread = idle or (self._connect(patience), None)
        if in_all and patience is not None:
            first = self.breaker.first_patience(patience, self.timeout)
            patience = first if idle else max(0.0, patience - (time.monotonic() - began))
        try:
            connection.send_packed_command([command])
            if unread is not None:
                _wait(connection, patience)
                unread.receive()
            _wait(connection, patience)
            answer = connection.read_response()
            if replies is not None:
                answer = [answer]
                while len(answer) < replies:
                    _wait(connection, patience)
                    answer.append(connection.read_response())
        except (ResponseError, BusyLoadingError) as error:
            misdirected = is_misdirected(error)
            if replies is None and not misdirected:
                self.checkin(connection)
            else:
                connection.disconnect()  # Other replies may still come, or it leads to a replica.
            self.breaker.answered()
            if misdirected and retry_elsewhere and self.renew(connection):
                return self.exchange(command, replies, patience, False, may_run_twice)
            raise
        except BaseException as error:  # With an unread reply it cannot be used again.
            connection.disconnect()
            if unread is not None and not unread.is_read:
                unread.receive()
            if idle is not None and isinstance(error, LostLogin):  # Perhaps the next idle one, too.
                return self.exchange(command, replies, patience, retry_elsewhere, may_run_twice)
            if isinstance(error, RedisTimeoutError):
                if idle is None:
                    self.breaker.failed(error, self.timeout if patience is None else patience)
                else:
                    self._distrust(patience)
            raise
        self.checkin(connection, None, began)
        self.answered()
        return answer

    # -- connections -----------------------------------------------------------------------------

    def connect(self, timeout: float | None = None, **changes: object) -> RawConnection:
        """A new connection, with the pool's address and credentials, and a ``timeout`` in seconds
        for connecting and for answers. ``changes``: other arguments than the pool's."""
        kind, settings = self.address
        own = own_settings(kind, settings, self.timeout if timeout is None else timeout)
        guarded: Any = interruptible(kind)
        connection: RawConnection = closed_once(guarded)(**own | changes)
        began, generation = time.monotonic(), self.generation
        try:
            with connecting():
                connection.connect()
        except redis_errors() as error:
            if not isinstance(error, ResponseError):
                self.breaker.failed(error, time.monotonic() - began)
            raise
        self.breaker.connecting = time.monotonic() - began
        connection._connect = refuse_to_connect  # type: ignore[attr-defined]  # redis-py's
        return self.track(connection, generation)

    def track(self, connection: T, generation: int) -> T:
        """Note a ``connection`` that leads here, which was made in this ``generation``."""
        connection.generation = generation
        self._made.add(weakref.ref(connection, self._made.discard))
        return connection

    def renew(self, connection: RawConnection | AsyncRawConnection | None = None) -> bool:
        """``connection`` leads to a replica: the address may have moved to another server. End all
        that were made before now, wherever they are used; who waits for a reply on one of them gets
        an error, and connects again.

        Args:
            connection: one of our own; None for one of a pool's.

        Returns: whether the call that has met the replica is worth another try.
        """
        if connection is None or connection.generation == self.generation:
            where = str(self).rpartition("/")[0]
            # Also those to other databases, and with other time-outs.
            for server in {self, *filter(None, (known() for known in list(_all)))}:
                if str(server).rpartition("/")[0] == where:
                    server.end_connections()
        return not self.discovered

    def end_connections(self) -> None:
        """End all that were made before now; see ``renew``."""
        self.generation += 1
        self.close()
        for made in list(self._made):
            if (connection := made()) is not None and connection.generation != self.generation:
                if hasattr(connection, "cut"):  # One of an event loop.
                    connection.cut()
                else:
                    shut(connection)
        for pool in list(self.pools):
            disconnect_idle(pool())

    def checkout(self, patience: float | None = None) -> RawConnection:
        """A connection with no reply to be read, idle or new. ``patience``: seconds that connecting
        may take, if that is less than usual."""
        return _with_nothing_to_read(*self.checkout_unread(patience))

    def checkout_unread(
        self, patience: float | None = None
    ) -> tuple[RawConnection, UnreadReply | None]:
        """As ``checkout``, but a reply may still be on its way, which the caller has claimed: read
        it after the next call is sent, so that no call waits for it. An error says that nothing was
        sent."""
        return self._checkout_idle(time.monotonic(), patience) or (self._connect(patience), None)

    def _connect(self, patience: float | None) -> RawConnection:
        try:
            if patience is None or patience >= self.timeout:
                return self.connect()
            connection = self.connect(patience)
            allow(connection, self.timeout)  # It will be kept, also for callers with patience.
            return connection
        except Exception as error:
            note_sent(error, False)
            raise

    def _distrust(self, patience: float | None) -> None:
        """A connection that was used before is silent, perhaps by its own fault: ``connect`` tells
        the breaker if a new one fails. A caller in a hurry leaves that to the next."""
        self.close()
        if patience is None:
            try:  # Not kept: a proxy may accept it; what a new one does in a call counts.
                self._connect(min(CHECK_SECONDS, self.timeout)).disconnect()
            except redis_errors():
                pass

    def must_connect(self) -> bool:
        """Whether ``checkout`` would make a connection."""
        return not self._idle

    def checkout_idle(self) -> RawConnection | None:
        """An idle connection that needs no check, if there is one."""
        idle = self._checkout_idle(time.monotonic(), 0.0)
        return None if idle is None else _with_nothing_to_read(*idle)

    def checkout_unchecked(self) -> tuple[RawConnection, float] | None:
        """The idle connection that was used last, and the monotonic time from which on it was idle,
        for a caller who checks it; None if there is none, or a reply is still to come."""
        try:
            connection, unread, since = self._idle.pop()
        except IndexError:
            return None
        if unread is None or unread.is_read:
            return connection, since
        self._idle.append((connection, unread, since))
        return None

    def _checkout_idle(
        self, now: float, patience: float | None, may_run_twice: bool = True
    ) -> tuple[RawConnection, UnreadReply | None] | None:
        """The idle connection that was used last. ``patience``: seconds for its check and the call;
        0: only one that needs no check."""
        while self._idle:
            try:
                connection, unread, since = self._idle.pop()
            except IndexError:  # Another thread has taken it.
                return None
            trusted = now - since < TRUSTED_SECONDS
            if unread is not None and unread.is_read:
                unread = None
            if (patience == 0 and not trusted) or (unread is not None and not unread.claim()):
                self._idle.append((connection, unread, since))
                return None  # Another thread waits for the reply.
            if trusted and (may_run_twice or not _is_readable(connection, 0)):
                return connection, unread
            if unread is not None:
                if not _is_readable(connection, 0):  # What has not come by now may never come.
                    connection.disconnect()
                unread.receive()
            limit = probe_seconds(self.timeout if patience is None else patience)
            if still_answers(connection, limit):
                return connection, None
            connection.disconnect()
            self.close()  # The others have been idle for longer.
        return None

    def checkin(
        self, connection: RawConnection, unread: UnreadReply | None = None, since: float = 0.0
    ) -> None:
        """Keep ``connection`` for the next caller, unless enough are kept. ``since``: when its last
        use began, in monotonic time; 0 for now."""
        current = connection.generation == self.generation
        if current and len(self._idle) < self.MAX_IDLE_CONNECTIONS:
            self._idle.append((connection, unread, since or time.monotonic()))
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


def _with_nothing_to_read(connection: RawConnection, unread: UnreadReply | None) -> RawConnection:
    if unread is not None:
        unread.receive()
    return connection


def _is_readable(connection: RawConnection, seconds: float) -> bool:
    """Whether there is something to read within so many seconds: a reply, or the end."""
    try:
        return connection.can_read(seconds)
    except redis_errors():
        return True  # Reading it raises the error.
