"""Where connections of our own lead, with which of redis-py's arguments; and the types that all
others name."""

from __future__ import annotations

import encodings.idna  # noqa: F401  # The first connection to a name needs it.
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeAlias

from redis.asyncio.connection import AbstractConnection as AsyncAbstractConnection
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.connection import UnixDomainSocketConnection as AsyncUnixDomainSocketConnection
from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    Connection,
    PythonRespSerializer,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from ..extension import PACKAGE
from ..protocol import Reply
from .refusals import NO_REDIS, raise_interrupt

try:
    import hiredis
except ImportError:
    hiredis = None  # type: ignore[assignment]  # an extra

try:
    from redis.driver_info import DriverInfo
except ImportError:
    DriverInfo = None  # type: ignore[assignment,misc]  # before redis-py 7.2
try:
    from redis.utils import DEFAULT_RESP_VERSION
except ImportError:
    DEFAULT_RESP_VERSION = 2  # before redis-py 8

HAS_HIREDIS = hiredis is not None
#: What a reader returns for a reply that has not come as a whole.
INCOMPLETE = object()

#: redis-py's connections for threads, and the same for asyncio. In memory they name each other.
TWINS: tuple[tuple[type, type], ...] = (
    (SSLConnection, AsyncSSLConnection),
    (Connection, AsyncConnection),
    (UnixDomainSocketConnection, AsyncUnixDomainSocketConnection),
)


#: Seconds after which an idle connection may have been forgotten; and for which it may then be
#: silent.
TRUSTED_SECONDS, PROBE_SECONDS = 1.0, 0.5

#: For ``socket_keepalive_options``, if the settings have none: without traffic the system asks the
#: other end after so many seconds, so often; and after these milliseconds, data that were not
#: acknowledged end the connection.
_KEEPALIVE = (
    *(("TCP_KEEPIDLE", 20), ("TCP_KEEPALIVE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)),
    ("TCP_USER_TIMEOUT", 35_000),
)
KEEPALIVE_OPTIONS = {getattr(socket, n): v for n, v in _KEEPALIVE if hasattr(socket, n)}

#: The arguments of redis-py's connections.
Settings: TypeAlias = dict[str, Any]
#: Equal for connections to one database as one user.
Database: TypeAlias = tuple[object, ...]


class Pool(Protocol):
    """One of redis-py's pools, for threads or for tasks; or an ``Address``."""

    @property
    def connection_class(self) -> type: ...
    @property
    def connection_kwargs(self) -> Settings: ...


class Client(Protocol):
    """One of redis-py's clients: for threads, for tasks, or for a cluster."""

    @property
    def connection_pool(self) -> Pool: ...  # Not a cluster's: it has one for each of its nodes.
    def get_encoder(self) -> Any: ...


class Address(NamedTuple):
    """Where connections lead, with the arguments of redis-py's pools."""

    connection_class: type
    connection_kwargs: Settings


class RawConnection(Protocol):
    """A connection of our own, for threads."""

    generation: int  #: See ``Server.renew``.

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def send_command(self, *args: object) -> None: ...
    def send_packed_command(self, command: list[bytes]) -> None: ...
    def poll(self, milliseconds: float, /) -> object: ...  # See ``poll_of``.
    def can_read(self, timeout: float = 0) -> bool: ...
    def read_response(self) -> Reply: ...


def own_settings(connection_class: type, settings: Settings, timeout: float) -> Settings:
    """The arguments of a connection of our own, made from a pool's."""
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
    resp3 = str(own.get("protocol") or DEFAULT_RESP_VERSION) == "3"
    if resp3 and own.get("password") and not own.get("username"):
        # As redis-py, for our connections in RESP2, too: a server that asks for no password takes
        # one only with a name.
        own["username"] = "default"
    if issubclass(connection_class, (Connection, AsyncConnection)):
        own["socket_keepalive"] = True
        own["socket_keepalive_options"] = own.get("socket_keepalive_options") or KEEPALIVE_OPTIONS
    if issubclass(connection_class, AbstractConnection):
        # What a connection begins with (HELLO 3, SELECT 1), not by hiredis: see ``pack_words``.
        own["command_packer"] = PythonRespSerializer(6000, partial(_encode, own.get("encoding")))
    name_driver(connection_class, own, "django-redis-lock")
    return own


def name_driver(kind: type, settings: dict[str, Any], upstream: str = "") -> None:
    """Complete the ``settings`` of connections with what CLIENT LIST shows. redis-py would look its
    own version up on disk for each connection, which takes longer than connecting."""
    named = settings.keys() & {"driver_info", "lib_name", "lib_version"}
    of_redis_py = issubclass(kind, (AbstractConnection, AsyncAbstractConnection))
    if DriverInfo is not None and of_redis_py and not named:
        settings["driver_info"] = _driver(upstream)


@cache
def _driver(upstream: str) -> object:
    driver = DriverInfo(lib_version=import_module("redis").__version__)
    if upstream:
        driver.add_upstream_driver(upstream, import_module(PACKAGE).__version__)
    return driver


def _encode(encoding: str | None, word: object) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode(encoding or "utf-8")


def timeout_of(settings: Settings) -> float:
    """Seconds to wait for a reply if the settings do not say: five, the default of redis-py 8.
    Earlier versions wait for a frozen server without end."""
    return settings.get("socket_timeout") or 5.0


#: What an asyncio pool's arguments have in common with a thread's connection.
_COMMON = (
    *("host", "port", "path", "db", "username", "password", "credential_provider", "protocol"),
    *("client_name", "encoding", "encoding_errors", "socket_timeout"),
    *("socket_connect_timeout", "socket_keepalive_options", "socket_type"),
    "database",  # Of a server in memory.
)


def common_settings(pool: Pool) -> Settings:
    return {n: v for n, v in pool.connection_kwargs.items() if n in _COMMON or n[:4] == "ssl_"}


def for_threads(pool: Pool) -> Address:
    """The connections with which a thread can reach ``pool``'s server."""
    in_memory = getattr(pool.connection_class, "thread_class", None)
    if in_memory is not None:
        return Address(in_memory, common_settings(pool))
    for ours, theirs in TWINS:
        if issubclass(pool.connection_class, theirs):
            return Address(ours, common_settings(pool))
    return Address(unguarded(pool.connection_class), _without_the_pool(pool.connection_kwargs))


def unguarded(kind: type[Any]) -> type[Any]:
    """The class ``kind`` of connections as it was before ``guarded_connection`` guarded it."""
    return getattr(kind, "guards", kind)


def who(settings: Settings) -> tuple[object, ...]:
    """Equal for connections to one database as one user."""
    names = ("db", "username", "password")
    return (*map(settings.get, names), id(settings.get("credential_provider")))


def _without_the_pool(settings: Settings) -> Settings:
    """``settings`` but for what leads back to the pool, and would never let it go."""
    return {n: v for n, v in settings.items() if not n.startswith("maint_notifications")}


# -- what is said on them ------------------------------------------------------------------------


def reader_for(connection: Any) -> Any:
    """What takes the replies on redis-py's ``connection`` apart: hiredis, without decoding."""
    return hiredis.Reader(
        protocolError=InvalidResponse,
        replyError=connection._parser.parse_error,
        notEnoughData=INCOMPLETE,
    )


@contextmanager
def connecting() -> Iterator[None]:
    """In the block, connections are made: whatever ends that is an outage of their server, also
    what the project's own code has raised (a credential provider, ``redis_connect_func``)."""
    try:
        yield
    except Exception as error:
        raise_interrupt(error)
        if isinstance(error, (RedisConnectionError, RedisTimeoutError, ResponseError)):
            raise
        if isinstance(error, InvalidResponse):
            raise RedisConnectionError(f"{NO_REDIS}: {error}") from error
        why = f"Could not connect to Redis: {type(error).__name__}: {error}"
        raise RedisConnectionError(why) from error
