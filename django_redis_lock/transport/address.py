"""Connections of our own, outside a client's pool.

A waiter blocks on its connection, the keeper must never wait for one, and a holder must be able to
release when the application's pool is exhausted. So none of them uses the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, Protocol

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
from redis.exceptions import InvalidResponse
from redis.retry import Retry

from .idle import KEEPALIVE_OPTIONS
from .refusals import refusal

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
TWINS: tuple[tuple[Any, Any], ...] = (
    (SSLConnection, AsyncSSLConnection),
    (Connection, AsyncConnection),
    (UnixDomainSocketConnection, AsyncUnixDomainSocketConnection),
)


class Address(NamedTuple):
    """Where connections lead, with the arguments of redis-py's pools."""

    connection_class: Any
    connection_kwargs: dict[str, Any]


class RawConnection(Protocol):
    generation: int  #: See ``Server.renew``.

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def send_command(self, *args: Any) -> None: ...
    def send_packed_command(self, command: list[bytes]) -> None: ...
    def can_read(self, timeout: float = 0) -> bool: ...
    def read_response(self) -> Any: ...


def own_settings(
    connection_class: type, settings: Mapping[str, Any], timeout: float
) -> dict[str, Any]:
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
    named = own.keys() & {"driver_info", "lib_name", "lib_version"}
    of_redis_py = issubclass(connection_class, (AbstractConnection, AsyncAbstractConnection))
    if DriverInfo is not None and of_redis_py and not named:
        own["driver_info"] = _driver()
    return own


@cache
def _driver() -> Any:
    """For CLIENT LIST. redis-py would look its own version up on disk for each connection, which
    takes longer than connecting."""
    driver = DriverInfo()
    with suppress(PackageNotFoundError):  # The package was copied, not installed.
        driver.add_upstream_driver("django-redis-lock", version("django-redis-lock"))
    return driver


def _encode(encoding: str | None, word: Any) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode(encoding or "utf-8")


def timeout_of(settings: Mapping[str, Any]) -> float:
    """Seconds to wait for a reply if the settings do not say: five, the default of redis-py 8.
    Earlier versions wait for a frozen server without end."""
    return settings.get("socket_timeout") or 5.0


#: What an asyncio pool's arguments have in common with a thread's connection.
_COMMON = (
    *("host", "port", "path", "db", "username", "password", "credential_provider", "protocol"),
    *("client_name", "encoding", "encoding_errors"),
    *("socket_connect_timeout", "socket_keepalive_options", "socket_type"),
    "database",  # Of a server in memory.
)


def common_settings(pool: Any) -> dict[str, Any]:
    settings = pool.connection_kwargs
    return {n: v for n, v in settings.items() if n in _COMMON or n.startswith("ssl_")}


def for_threads(pool: Any) -> Address:
    """The connections with which a thread can reach ``pool``'s server."""
    in_memory = getattr(pool.connection_class, "thread_class", None)
    if in_memory is not None:
        return Address(in_memory, common_settings(pool))
    for ours, theirs in TWINS:
        if issubclass(pool.connection_class, theirs):
            return Address(ours, common_settings(pool))
    return Address(connection_class_of(pool), _without_the_pool(pool.connection_kwargs))


def connection_class_of(pool: Any) -> Any:
    """The class of ``pool``'s connections as it was before ``guarded_connection`` guarded it."""
    return getattr(pool.connection_class, "guards", pool.connection_class)


def without_address(pool: Any) -> Address:
    """What the connections to each of several servers have in common, wherever these are."""
    tls = issubclass(pool.connection_class, (SSLConnection, AsyncSSLConnection))
    settings = common_settings(pool)
    for name in ("host", "port", "path"):
        settings.pop(name, None)
    if pool.connection_kwargs.get("socket_timeout"):
        settings["socket_timeout"] = pool.connection_kwargs["socket_timeout"]
    return Address(SSLConnection if tls else Connection, settings)


def who(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for connections to one database as one user."""
    names = ("db", "username", "password")
    return (*map(settings.get, names), id(settings.get("credential_provider")))


def _without_the_pool(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` but for what leads back to the pool, and would never let it go."""
    return {n: v for n, v in settings.items() if not n.startswith("maint_notifications")}


def note_sent(error: BaseException, sent: bool) -> None:
    error.__dict__["sent_to_redis"] = sent


def may_have_run(error: BaseException) -> bool:
    """Whether Redis may have carried out the call that ended with ``error``. A refusal is about the
    state of the server: the script's first write meets it, so nothing has run."""
    noted = error.__dict__.get("sent_to_redis")
    return not refusal(error) if noted is None else bool(noted)


def is_cluster(client: Any) -> bool:
    """Whether ``client`` is one for Redis Cluster: redis-py's two, or the cache's."""
    return hasattr(client, "nodes_manager")


# -- what is said on them ------------------------------------------------------------------------


def reader_for(connection: Any) -> Any:
    """What takes the replies on redis-py's ``connection`` apart: hiredis, without decoding."""
    return hiredis.Reader(
        protocolError=InvalidResponse,
        replyError=connection._parser.parse_error,
        notEnoughData=INCOMPLETE,
    )


def refuse_to_connect() -> None:
    """redis-py's connect again before they send or read, to whatever server is there by then."""
    raise RedisConnectionError("The connection was closed.")


def without_credentials(settings: Mapping[str, Any]) -> str:
    """An address without credentials."""
    if database := settings.get("database"):
        return str(database)
    host = settings.get("host", "localhost")
    host = f"[{host}]" if ":" in host else host  # Of IPv6.
    where = settings.get("path") or f"{host}:{settings.get('port', 6379)}"
    return f"{where}/{settings.get('db') or 0}"
