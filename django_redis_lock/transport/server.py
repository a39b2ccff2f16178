"""One Redis server as this process sees it: its address, and the connections of our own to it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

from redis.connection import ConnectionPool
from redis.exceptions import AskError, BusyLoadingError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import real_time, time
from ..protocol import Reply, UnreadReply
from ..threads import after_fork
from .address import (
    PROBE_SECONDS,
    TRUSTED_SECONDS,
    Database,
    Made,
    Pool,
    RawConnection,
    Settings,
    allow,
    connecting,
    expect,
    for_threads,
    own_settings,
    poll_of,
    read,
    readable,
    refuse_to_connect,
    resetting,
    shut,
    still_answers,
    timeout_of,
    who,
)
from .circuit_breaker import CHECK_SECONDS, Breaker, without_credentials
from .hints import name_missing_right
from .refusals import (
    LostLogin,
    is_fault_of_connection,
    is_misdirected,
    note_fault_of_connection,
    note_sent,
    raise_interrupt,
)

T = TypeVar("T", bound=Made)
#: A connection, what it still owes, and when its last use began (monotonic; infinite before that).
Idle: TypeAlias = "tuple[RawConnection, UnreadReply | None, float]"
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
        self._idle: list[Idle] = []
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

    def locate(self, keys: Sequence[bytes], until: float | None = None) -> Server:
        """The server of ``keys``, found until this monotonic time, within a usual time at most.
        Raises redis-py's errors."""
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
        until: float | None = None,
        may_run_twice: bool = True,
        anew: bool = False,
    ) -> Reply:
        """The reply to ``command``, or a list of so many ``replies``, on a connection of our own.

        Args:
            until: monotonic time when the caller gives up; None leaves that to the socket's
                timeout.
            may_run_twice: whether ``command`` is sent again if its reply is lost. If not, a
                connection that was idle is checked first.
            anew: use no connection that was used before.
        """
        began = time.monotonic()
        idle = self.checkout_idle(only_new=anew)
        if idle is not None and not may_run_twice:
            idle = self._checked(*idle, began)
        connection, unread, since = idle or (self._connect(until, anew), None, math.inf)
        try:
            connection.send_packed_command([command])
            old = began - since >= TRUSTED_SECONDS
            if old or until is not None:
                self._wait(connection, since < math.inf, old, until)
            if unread is not None:
                unread.receive()
                expect(connection, until)
            answer = read(connection) if unread else connection.read_response()
            if replies is not None:
                answer = [answer]
                while len(answer) < replies:
                    expect(connection, until)
                    answer.append(connection.read_response())
        except BaseException as error:
            self._failed(error, connection, unread, since < math.inf, replies is None)
            raise
        self.checkin(connection, None, began)
        self.answered()
        return answer

    def _wait(self, connection: RawConnection, used: bool, old: bool, until: float | None) -> None:
        """Wait until the first reply begins. While a connection that was used before is silent, a
        new one is made, because the network may have forgotten it: if that succeeds, the call
        belongs there; if not, the server is slow, and may still answer here."""
        began = time.monotonic()
        left = None if until is None else until - began
        first = self.breaker.first_wait(old, left, self.timeout) if used else left
        if first is None or connection.poll(max(0.0, first) * 1000):
            return
        error = RedisTimeoutError(f"Redis did not answer within {first:.3f} s")
        note_fault_of_connection(error, used)
        if not used:
            self.breaker.failed(error, first)
            raise error
        self.close()  # The others were idle for longer.
        if first == left or self._is_replaced(until):
            raise error
        ends = began + min(self.timeout, math.inf if left is None else left)
        if not connection.poll(max(0.0, ends - time.monotonic()) * 1000):
            note_fault_of_connection(error, False)
            raise error

    def _is_replaced(self, until: float | None) -> bool:
        """Make a new connection for the next call."""
        try:
            self.checkin(self._connect(until, anew=True), since=math.inf)
        except RedisError:
            return False
        return True

    def _failed(
        self,
        error: BaseException,
        connection: RawConnection,
        unread: UnreadReply | None,
        used: bool,
        is_last: bool,
    ) -> None:
        """A call ended with ``error`` on ``connection``, which had been ``used`` before. Note
        whether that may be the fault of the connection, and not the server's."""
        if isinstance(error, (ResponseError, BusyLoadingError)):
            self.breaker.answered()
            if is_misdirected(error):
                connection.disconnect()
                note_fault_of_connection(error, self.renew(connection))
            elif is_last:
                self.checkin(connection)
            else:
                connection.disconnect()  # Other replies may still come.
            return
        connection.disconnect()
        if unread is not None and not unread.is_read:
            unread.receive()
        raise_interrupt(error)
        if isinstance(error, LostLogin):
            note_sent(error, False)
        elif is_fault_of_connection(error) is None and isinstance(error, RedisError):
            self.close()  # The other idle ones may have broken for the same reason.
        if is_fault_of_connection(error) is None:
            note_fault_of_connection(error, used)
            if isinstance(error, RedisTimeoutError) and not used:
                self.breaker.failed(error, self.timeout)

    # -- connections -----------------------------------------------------------------------------

    def connect(self, timeout: float | None = None, **changes: object) -> RawConnection:
        """A new connection, with the pool's address and credentials, and a ``timeout`` in seconds
        for connecting and for answers. ``changes``: other arguments than the pool's."""
        kind, settings = self.address
        own = own_settings(kind, settings, self.timeout if timeout is None else timeout)
        connection: RawConnection = resetting(kind)(**own | changes)
        began, generation = real_time.monotonic(), self.generation
        try:
            with connecting():
                connection.connect()
        except RedisError as error:
            if not isinstance(error, ResponseError):
                self.breaker.failed(error, real_time.monotonic() - began)
            raise
        self.breaker.connecting = real_time.monotonic() - began
        connection.poll = poll_of(connection)  # type: ignore[method-assign]  # each has its own
        connection._connect = refuse_to_connect  # type: ignore[attr-defined]  # redis-py's
        return self.track(connection, generation)

    def track(self, connection: T, generation: int) -> T:
        """Note a ``connection`` that leads here, which was made in this ``generation``."""
        connection.generation = generation
        self._made.add(weakref.ref(connection, self._made.discard))
        return connection

    def renew(self, connection: Made | None = None) -> bool:
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

    def checkout(self) -> RawConnection:
        """A connection with no reply to be read, idle and checked, or new: for a call that may long
        be without an answer, so that silence does not show whether it was forgotten."""
        now = time.monotonic()
        while (idle := self.checkout_idle()) is not None:
            if (checked := self._checked(*idle, now)) is not None:
                return checked[0]
        return self._connect(None)

    def _checked(
        self, connection: RawConnection, unread: UnreadReply | None, since: float, now: float
    ) -> Idle | None:
        """``connection``, if the server answers on it."""
        if unread is not None:
            if not readable(connection):  # What has not come by now may never come.
                connection.disconnect()
            unread.receive()
        elif now - since < TRUSTED_SECONDS and not readable(connection):
            return connection, None, since
        if still_answers(connection, min(PROBE_SECONDS, self.timeout / 2)):
            return connection, None, now
        connection.disconnect()
        self.close()  # The others have been idle for longer.
        return None

    def time_to_connect(self, until: float | None, anew: bool) -> float | None:
        """Seconds to connect for a caller who gives up at ``until``; None for as long as usual.
        ``anew``: because another connection is silent, so that it is known how long it may take."""
        if until is None and not anew:
            return None
        limit = max(CHECK_SECONDS, 2 * self.breaker.connecting) if anew else math.inf
        left = math.inf if until is None else max(0.001, until - time.monotonic())
        limit = min(limit, left)
        return limit if limit < self.timeout else None

    def _connect(self, until: float | None, anew: bool = False) -> RawConnection:
        try:
            limit = self.time_to_connect(until, anew)
            connection = self.connect(limit)
        except Exception as error:
            note_sent(error, False)
            raise
        if limit is not None:
            allow(connection, self.timeout)  # It will be kept, also for callers with more time.
        return connection

    def must_connect(self) -> bool:
        """Whether ``checkout`` would make a connection."""
        return not self._idle

    def checkout_idle(self, only_new: bool = False, may_owe: bool = True) -> Idle | None:
        """The idle connection that was used last, unchecked. Not one for whose reply another thread
        waits; nor one that was used before, if ``only_new``, or owes a reply, unless it
        ``may_owe``."""
        try:
            connection, unread, since = self._idle.pop()
        except IndexError:
            return None
        if unread is not None and unread.is_read:
            unread = None
        unfit = only_new and since < math.inf
        if unfit or (unread is not None and not (may_owe and unread.claim())):
            self._idle.append((connection, unread, since))
            return None
        return connection, unread, since

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
