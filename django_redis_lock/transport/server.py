"""One Redis server as this process sees it: its address, and the connections of our own to it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from redis.exceptions import RedisError, ResponseError

from .address import RawConnection, for_threads, own_settings, timeout_of
from .circuit_breaker import Breaker

__all__ = ["Server", "Unread"]


class Unread(Protocol):
    """An answer still to be read on a connection, for which nobody has waited."""

    def settle(self, wait: bool) -> Any: ...


class Server:
    """One address, and the connections of our own that lead there.

    They serve one call or one wait at a time; between two they rest here, the last used on top.
    Taking one costs a fraction of what redis-py's pools do.
    """

    #: How many connections may rest here: as many as were busy at once, within reason.
    ROOM = 16
    #: Seconds at rest after which a connection is looked at before it is used. One that the server
    #: has closed meanwhile must not be mistaken for one that broke with a call under way; looking
    #: costs a system call, which is too much between two calls in a row.
    FRESH = 1.0

    #: Seconds within which another server takes the place of one that has failed.
    HEALS = 0.0

    def __init__(self, pool: Any) -> None:
        # The pool itself is not kept: it must be able to go away before its server does.
        self.address = for_threads(pool)
        settings = self.address.connection_kwargs
        self.timeout, shortest = self.patience(settings)
        #: Equal for servers that lead to one database, whatever their time-outs are.
        self.database: tuple[Any, ...] = (self,)
        self.breaker = Breaker(_shown(settings), shortest)
        self._resting: list[tuple[RawConnection, Unread | None, float]] = []
        #: What tells it that this process is alive; see ``heartbeat``.
        self.heartbeat: Any = None
        #: Whether the server knows TAKE_GRANT; see ``PendingReply``.
        self.knows_grants = False

    @classmethod
    def identity(cls, pool: Any) -> tuple[Any, ...]:
        """Equal for pools that lead to one database as one user, whatever their time-outs are."""
        settings = pool.connection_kwargs
        where = [settings.get(name) for name in ("host", "port", "path")]
        if not any(where):
            return (object(),)  # Only the pool itself knows where its server is.
        who = [settings.get(name) for name in ("db", "username", "password")]
        provider = id(settings.get("credential_provider"))
        return (for_threads(pool).connection_class, *where, *who, provider)

    @staticmethod
    def patience(settings: Mapping[str, Any]) -> tuple[float, float]:
        """Seconds after which connections of these settings are given up, and attempts to
        connect."""
        timeout = timeout_of(settings)
        return timeout, min(settings.get("socket_connect_timeout") or timeout, timeout)

    # -- where a key is, for those whose keys are not all at one address ------------------------

    def at(self, keys: Sequence[bytes], patience: float | None = None) -> Server:
        """The server that has ``keys``, which are all in one place; it may have to be looked for.

        Args:
            patience: seconds that may take.

        Raises:
            redis.exceptions.ConnectionError: nobody knows where they are.
        """
        return self

    def seen_at(self, keys: Sequence[bytes]) -> Server | None:
        """As ``at``, as far as it is known without looking."""
        return self

    def in_one_call(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """As many of ``keys`` as one command can take, the first among them."""
        return keys

    def index_of(self, index: bytes, key: bytes) -> bytes:
        """The sorted set in which ``key`` is to be noted: INDEX, FLIGHTS, or what there is for
        them where ``key`` is kept."""
        return index

    def nodes(self) -> Sequence[Server]:
        """All servers there are here, as far as it is known."""
        return (self,)

    def must_look(self) -> bool:
        """Whether ``at`` would look, and so take time."""
        return False

    def heard(self, error: BaseException) -> None:
        """A call to one of these servers ended with ``error``: its keys may be elsewhere now."""

    def refuses(self, error: BaseException) -> bool:
        """Whether ``error`` says that the call was not carried out because the keys are elsewhere,
        or on their way."""
        return False

    def sent_to(self, error: Any) -> Server:
        """The server that ``error``, a refusal, names."""
        return self

    def answered(self) -> None:
        """It has answered something."""
        if self.breaker.failing:
            self.breaker.answered()

    # -- connections -----------------------------------------------------------------------------

    def connect(self, timeout: float | None = None) -> RawConnection:
        """A new connection, with the pool's address and credentials.

        Args:
            timeout: seconds that connecting, and waiting for an answer, may take; left out, the
                pool's own, or 5.
        """
        timeout = self.timeout if timeout is None else timeout
        connection_class, settings = self.address
        settings = own_settings(connection_class, settings, timeout)
        connection: RawConnection = connection_class(**settings)
        began = time.monotonic()
        try:
            connection.connect()
        except (RedisError, OSError) as error:
            if not isinstance(error, ResponseError):
                self.breaker.failed(error, time.monotonic() - began)
            raise
        return connection

    def borrow(self, patience: float | None = None) -> RawConnection:
        """A connection with nothing to be read on it: one at rest, or a new one.

        Args:
            patience: seconds that connecting may take, if that is less than usual.
        """
        rested = self.rested()
        if rested is not None:
            return rested
        return self.connect(None if patience is None else min(patience, self.timeout))

    def borrow_unread(self, patience: float | None = None) -> tuple[RawConnection, Unread | None]:
        """As ``borrow``, but an answer may still be on its way: settle it after the next sending,
        before the next reading, and nobody has to wait for it."""
        rested = self._rested_unread()
        if rested is not None:
            return rested
        return self.connect(None if patience is None else min(patience, self.timeout)), None

    def must_connect(self) -> bool:
        """Whether ``borrow`` would make a connection."""
        return not self._resting

    def rested(self) -> RawConnection | None:
        """A connection with nothing to be read on it that is at rest here, if there is one."""
        rested = self._rested_unread()
        if rested is None:
            return None
        connection, unread = rested
        if unread is not None:
            unread.settle(True)
        return connection

    def _rested_unread(self) -> tuple[RawConnection, Unread | None] | None:
        while (last := self._last()) is not None:
            connection, unread, since = last
            if time.monotonic() - since < self.FRESH:
                return connection, unread
            try:
                if unread is not None:
                    unread.settle(True)
                # What can be read then is the end of a connection that the server has closed.
                if not connection.can_read(0):
                    return connection, None
            except (RedisError, OSError):
                pass
            connection.disconnect()
        return None

    def _last(self) -> tuple[RawConnection, Unread | None, float] | None:
        try:
            return self._resting.pop()
        except IndexError:
            return None

    def rest(self, connection: RawConnection, unread: Unread | None = None) -> None:
        """Keep ``connection`` for the next caller, unless enough are kept, or it was made for one
        that had less patience."""
        if len(self._resting) < self.ROOM and connection.socket_timeout == self.timeout:
            self._resting.append((connection, unread, time.monotonic()))
        else:
            connection.disconnect()

    def close(self, but: int = 0) -> None:
        """Close the connections at rest, ``but`` for the last used so many."""
        resting, self._resting = self._resting, []
        kept = len(resting) - but
        self._resting += resting[kept:]
        for connection, _, _ in resting[:kept]:
            connection.disconnect()


def _shown(settings: Mapping[str, Any]) -> str:
    """An address for people, without credentials."""
    path = settings.get("path")
    where = path or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
    return f"{where}/{settings.get('db') or 0}"
