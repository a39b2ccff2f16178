"""One Redis server as this process sees it: connections of our own, outside the client's pool.

A waiter blocks on its connection, the keeper must never wait for one, and a holder must be able to
release when the application has used its pool up: so none of them shares it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.connection import (
    UnixDomainSocketConnection as AsyncUnixDomainSocketConnection,
)
from redis.asyncio.sentinel import SentinelManagedConnection as AsyncSentinelConnection
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import SentinelManagedConnection

from .breaker import Breaker, Outage

__all__ = [
    "RawConnection",
    "Server",
    "common_settings",
    "outages",
    "own_settings",
    "reset_after_fork",
    "server_of",
]


class RawConnection(Protocol):
    """The part of redis-py's connections that is used here."""

    socket_timeout: Any

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def send_command(self, *args: Any) -> None: ...
    def send_packed_command(self, command: list[bytes]) -> None: ...
    def can_read(self, timeout: float = 0) -> bool: ...
    def read_response(self) -> Any: ...


def own_settings(
    connection_class: type, settings: Mapping[str, Any], timeout: float
) -> dict[str, Any]:
    """The arguments of a connection of our own, made from those of a pool's connections."""
    own = _without_the_pool(settings)
    own.update(
        socket_timeout=timeout,
        socket_connect_timeout=min(own.get("socket_connect_timeout") or timeout, timeout),
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        retry_on_error=[],
        health_check_interval=0,
        decode_responses=False,
    )
    if issubclass(connection_class, (Connection, AsyncConnection)):
        own["socket_keepalive"] = True
    return own


#: What an asyncio pool's arguments have in common with a thread's connection.
_COMMON = (
    *("host", "port", "path", "db", "username", "password", "credential_provider", "protocol"),
    *("client_name", "encoding", "encoding_errors"),
    *("socket_connect_timeout", "socket_keepalive_options", "socket_type"),
)


def common_settings(pool: Any) -> dict[str, Any]:
    """What a connection for threads and one for asyncio need alike to reach ``pool``'s server.

    Raises:
        TypeError: only the pool itself knows where its server is (Sentinel).
    """
    if issubclass(pool.connection_class, (SentinelManagedConnection, AsyncSentinelConnection)):
        raise TypeError("a lock for asyncio cannot go by way of Sentinel yet; use Lock in a thread")
    settings = pool.connection_kwargs
    return {n: v for n, v in settings.items() if n in _COMMON or n.startswith("ssl_")}


def _for_threads(pool: Any) -> tuple[Any, dict[str, Any]]:
    """Class and arguments of the connections a thread can use to reach ``pool``'s server."""
    for theirs, ours in (
        (AsyncSSLConnection, SSLConnection),
        (AsyncConnection, Connection),
        (AsyncUnixDomainSocketConnection, UnixDomainSocketConnection),
    ):
        if issubclass(pool.connection_class, theirs):
            return ours, common_settings(pool)
    return pool.connection_class, _without_the_pool(pool.connection_kwargs)


def _without_the_pool(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` but for what leads back to the pool, and would never let it go."""
    return {n: v for n, v in settings.items() if not n.startswith("maint_notifications")}


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

    def __init__(self, pool: Any) -> None:
        # The pool itself is not kept: it must be able to go away before its server does.
        self._connection_class, self._settings = _for_threads(pool)
        self.timeout: float = self._settings.get("socket_timeout") or 5.0
        shortest = min(self._settings.get("socket_connect_timeout") or self.timeout, self.timeout)
        self.breaker = Breaker(_shown(self._settings), shortest)
        self._resting: list[tuple[RawConnection, Unread | None, float]] = []

    def connect(self, timeout: float | None = None) -> RawConnection:
        """A new connection, with the pool's address and credentials.

        Args:
            timeout: seconds that connecting, and waiting for an answer, may take; left out, the
                pool's own, or 5.
        """
        timeout = self.timeout if timeout is None else timeout
        settings = own_settings(self._connection_class, self._settings, timeout)
        connection: RawConnection = self._connection_class(**settings)
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
        while (rested := self._last()) is not None:
            connection, unread, since = rested
            try:
                if unread is not None:
                    unread.settle(True)
                # What can be read then is the end of a connection that the server has closed.
                if time.monotonic() - since < self.FRESH or not connection.can_read(0):
                    return connection
            except (RedisError, OSError):
                pass
            connection.disconnect()
        return self.connect(None if patience is None else min(patience, self.timeout))

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


_servers: weakref.WeakValueDictionary[tuple[Any, ...], Server] = weakref.WeakValueDictionary()
_by_pool: weakref.WeakKeyDictionary[Any, Server] = weakref.WeakKeyDictionary()
_registry = threading.Lock()


def server_of(client: Any) -> Server:
    """The one ``Server`` of this process for the address that ``client`` talks to.

    Raises:
        TypeError: ``client`` is no redis-py client with a connection pool.
    """
    try:
        pool = client.connection_pool
    except AttributeError:
        raise TypeError(
            f"a lock needs a redis-py client (redis.Redis), not {type(client).__name__}"
        ) from None
    found = _by_pool.get(pool)
    if found is not None:
        return found
    with _registry:
        address = _address(pool)
        server = _servers.get(address)
        if server is None:
            server = _servers[address] = Server(pool)
        _by_pool[pool] = server
        return server


def outages() -> list[Outage]:
    """The servers that do not answer, as far as this process has noticed."""
    with _registry:
        servers = list(_servers.values())
    known = (server.breaker.known_outage() for server in servers)
    return sorted((outage for outage in known if outage), key=lambda outage: outage.server)


def _shown(settings: Mapping[str, Any]) -> str:
    """An address for people, without credentials."""
    path = settings.get("path")
    where = path or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
    return f"{where}/{settings.get('db') or 0}"


def _address(pool: Any) -> tuple[Any, ...]:
    """Equal for pools whose connections are interchangeable."""
    settings = pool.connection_kwargs
    where = [settings.get(name) for name in ("host", "port", "path")]
    if not any(where):
        return (object(),)  # Sentinel and the like: the pool itself knows where the server is.
    who = [settings.get(name) for name in ("db", "username", "password")]
    return (_for_threads(pool)[0], *where, *who, id(settings.get("credential_provider")))


def reset_after_fork() -> None:
    """Forget the parent's servers: their connections and locks are the parent's."""
    global _registry
    _registry = threading.Lock()
    _servers.clear()
    _by_pool.clear()
