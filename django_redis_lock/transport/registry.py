"""The servers of this process: one ``Server`` for each place where locks are kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.retry import Retry

from ..extension import TOPOLOGIES, part
from ..threads import FORKS_UNNOTICED, Mutex, after_fork, free_after_fork, notice_fork
from .address import Client, Database, Pool, is_cluster, unguarded
from .server import Server, disconnect_idle

_servers: weakref.WeakValueDictionary[Database, Server] = weakref.WeakValueDictionary()
_by_pool: weakref.WeakKeyDictionary[Pool, Server] = weakref.WeakKeyDictionary()
_encoders: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()
#: Makes what takes the place of a server, while something does.
_make_stand_in: Callable[[Database], Server | None] | None = None
_registry = free_after_fork(Mutex())


def server_of(client: Client) -> Server:
    """The one ``Server`` of this process for the address that ``client`` talks to.

    Raises:
        TypeError: ``client`` is no redis-py client with a connection pool.
    """
    if FORKS_UNNOTICED:
        notice_fork()
    pool: Any
    try:
        pool = client.connection_pool
    except AttributeError:
        if not is_cluster(client):
            raise _no_client(client) from None
        pool = client  # It has a pool for each of its nodes.
    known = _by_pool.get(pool)
    if known is not None:
        return known
    with _registry:
        if (known := _by_pool.get(pool)) is not None:
            return known  # Another thread came first.
        kind = _kind_of(pool)
        database = (kind, *kind.identity(pool))
        # Who waits for less, checks no certificate, speaks RESP3, or meets servers in a way of its
        # own decides that for no other. (Each client of a cluster has its own way.)
        settings = getattr(pool, "nodes_manager", pool).connection_kwargs
        tls = sorted((name, repr(settings[name])) for name in settings if name[:4] == "ssl_")
        how = None if pool is client else id(settings.get("redis_connect_func"))
        key = (*database, kind.timeouts(settings), str(settings.get("protocol")), how, *tls)
        server = _servers.get(key)
        if server is None:
            stand_in = None if _make_stand_in is None else _make_stand_in(database)
            server = _servers[key] = stand_in or kind(pool)
            server.database = database
        _by_pool[pool] = server
        server.pools.add(weakref.ref(pool, server.pools.discard))
        return server


def _no_client(client: object) -> TypeError:
    return TypeError(f"a lock needs a redis-py client (redis.Redis), not {type(client).__name__}")


def encoded(client: Client, text: str | bytes) -> bytes:
    """``text`` in the encoding of ``client``, which makes a new encoder each time."""
    pool = getattr(client, "connection_pool", client)
    try:
        encoder = _encoders.get(pool)
        if encoder is None:
            encoder = _encoders[pool] = client.get_encoder()
    except (AttributeError, TypeError):
        raise _no_client(client) from None
    data: bytes = encoder.encode(text)
    return data


def encoding(encoder: Any) -> Callable[[object], bytes]:
    """redis-py's ``encoder``, which costs more than to encode a text."""
    if encoder.encoding.lower() not in ("utf-8", "utf8") or encoder.encoding_errors != "strict":
        return encoder.encode  # type: ignore[no-any-return]  # redis-py
    return lambda word: word.encode() if isinstance(word, str) else encoder.encode(word)


# -- whose calls may go past redis-py --------------------------------------------------------------

#: The arguments of redis-py's connections to which ours do justice, besides those of TLS, also
#: those of tasks.
_KNOWN = frozenset(
    (
        *("host", "port", "path", "db", "username", "password", "client_name", "encoding"),
        *("encoding_errors", "decode_responses", "socket_timeout", "socket_connect_timeout"),
        *("socket_read_size", "socket_keepalive", "socket_keepalive_options", "socket_type"),
        *("health_check_interval", "lib_name", "lib_version", "driver_info", "protocol"),
        *("legacy_responses", "himport_registry", "database"),
        # redis-py's own, of its pool; and of those the next two also look at the value.
        *("connection_pool", "orig_host_address", "orig_socket_timeout"),
        *("orig_socket_connect_timeout", "maint_notifications_pool_handler"),
        *("maint_notifications_config", "credential_provider", "parser_class"),
    )
)
#: The arguments that say what is sent again; see ``FollowingRetry.configured``.
RETRY = ("retry", "retry_on_error", "retry_on_timeout")
#: The methods of redis-py's client for which ours stand.
_STOOD_FOR = (
    *("get", "mget", "set", "delete", "exists", "ttl", "pttl", "expire", "pexpire", "persist"),
    *("expireat", "pexpireat", "eval", "evalsha", "pipeline", "execute_command", "parse_response"),
)
_plain: weakref.WeakKeyDictionary[Client, bool] = weakref.WeakKeyDictionary()


def is_plain(client: Client) -> bool:
    """Whether calls for values may go over connections of our own, past this ``client`` for
    threads: it, its pool and its connections are redis-py's, and have been given nothing but what
    ours know, too; no client-side cache, retry, renewed credentials or class of the project's."""
    plain = _plain.get(client)
    if plain is None:
        plain = _plain[client] = in_memory(client) or is_cluster(client) or _looks_plain(client)
    return plain


def _looks_plain(client: Any) -> bool:
    pool, kind = client.connection_pool, type(client)
    if any(getattr(kind, name) is not getattr(Redis, name) for name in _STOOD_FOR):
        return False
    settings = pool.connection_kwargs
    configured = getattr(settings.get("retry"), "configured", settings)
    retry = configured.get("retry") or Retry(NoBackoff(), 0)
    notifications = settings.get("maint_notifications_config")
    return (
        getattr(client, "connection", None) is None  # Else it is the only one for all calls.
        and _is_of_redis_py(type(pool))
        and _is_of_redis_py(unguarded(pool.connection_class))
        and _is_of_redis_py(settings.get("parser_class"))
        and not any(map(configured.get, RETRY[1:]))
        and _is_of_redis_py(type(retry))
        and not getattr(retry, "_retries", 0)
        and not hasattr(settings.get("credential_provider"), "on_next")
        and getattr(pool, "cache", None) is None
        and getattr(notifications, "enabled", None) is not True
        and all(
            value is None or name in _KNOWN or name in RETRY or name[:4] == "ssl_"
            for name, value in settings.items()
        )
    )


def configured_retry(pool: Pool | None) -> Any:
    """The ``retry`` that the project has given a ``pool``; None if it has left that to redis-py."""
    retry = None if pool is None else pool.connection_kwargs.get("retry")
    given = getattr(retry, "configured", {"retry": retry})["retry"]
    usual = [signature(kind).parameters["retry"].default for kind in (Redis, AsyncRedis)]
    return None if given in usual else given


def in_memory(client: object) -> bool:
    """Whether ``client`` leads to a server in memory."""
    # Each class of such connections names its twin, for tasks or for threads.
    connects = getattr(getattr(client, "connection_pool", None), "connection_class", None)
    return hasattr(connects, "asyncio_class") or hasattr(connects, "thread_class")


def _is_of_redis_py(kind: type | None) -> bool:
    return kind is None or kind.__module__[:6] == "redis."


def renew_pool(pool: Pool) -> None:
    """A connection of redis-py's ``pool`` leads to a replica; see ``Server.renew``."""
    server = _by_pool.get(pool)
    if server is None:
        disconnect_idle(pool)
    else:
        server.renew()


def check_for_tasks(client: Client) -> None:
    """Raises TypeError if ``client`` is one for threads, whose calls cannot be awaited."""
    pool = getattr(client, "connection_pool", None)
    if isinstance(pool, ConnectionPool) and not server_of(client).is_topology:
        raise TypeError(
            f"AsyncLock needs a client of redis.asyncio, not {type(client).__name__} for threads: "
            "use cache.alock(), or give it a redis.asyncio.Redis"
        )


def _kind_of(pool: Pool) -> type[Server]:
    for attribute, name in TOPOLOGIES:
        if hasattr(pool, attribute):
            kind: type[Server] = getattr(part("topology"), name)
            return kind
    return Server


@contextmanager
def standing_in(make: Callable[[Database], Server | None]) -> Iterator[None]:
    """In the block, ``make(server.database)`` takes the place of each server, unless it is None."""
    global _servers, _by_pool, _make_stand_in
    before = _servers, _by_pool, _make_stand_in
    _servers, _by_pool = weakref.WeakValueDictionary(), weakref.WeakKeyDictionary()
    _make_stand_in = make
    try:
        yield
    finally:
        _servers, _by_pool, _make_stand_in = before


@after_fork
def _forget_servers() -> None:
    """Their connections and locks are the parent's."""
    _servers.clear()
    _by_pool.clear()
