"""The servers of this process: one ``Server`` for each place where locks are kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.connection import ConnectionPool

from ..extension import TOPOLOGIES, part
from ..threads import FORKS_UNNOTICED, Mutex, after_fork, free_after_fork, notice_fork
from .address import Client, Database, Pool, is_cluster
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
