"""The registry: one ``Server`` of this process for each place where locks are kept."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..forks import after_fork, free_after_fork
from .circuit_breaker import Outage
from .cluster import Cluster
from .sentinel import SentinelService
from .server import Server

_servers: weakref.WeakValueDictionary[tuple[Any, ...], Server] = weakref.WeakValueDictionary()
_by_pool: weakref.WeakKeyDictionary[Any, Server] = weakref.WeakKeyDictionary()
#: Makes what takes the place of a server, while something does.
_make_stand_in: Callable[[tuple[Any, ...]], Server | None] | None = None
_registry = free_after_fork(threading.Lock())


def server_of(client: Any) -> Server:
    """The one ``Server`` of this process for the address that ``client`` talks to.

    Raises:
        TypeError: ``client`` is no redis-py client with a connection pool.
    """
    try:
        pool = client.connection_pool
    except AttributeError:
        if not is_cluster(client):
            raise TypeError(
                f"a lock needs a redis-py client (redis.Redis), not {type(client).__name__}"
            ) from None
        pool = client  # It has a pool for each of its nodes.
    found = _by_pool.get(pool)
    if found is not None:
        return found
    with _registry:
        kind: type[Server] = Server
        if pool is client:
            kind = Cluster
        elif hasattr(pool, "service_name"):
            kind = SentinelService
        database = (kind, *kind.identity(pool))
        # A client with a shorter timeout must not decide how long the others wait.
        settings = pool.nodes_manager if kind is Cluster else pool
        place = (*database, kind.patience(settings.connection_kwargs))
        server = _servers.get(place)
        if server is None:
            stand_in = None if _make_stand_in is None else _make_stand_in(database)
            server = _servers[place] = stand_in or kind(pool)
            server.database = database
        _by_pool[pool] = server
        return server


@contextmanager
def standing_in(make: Callable[[tuple[Any, ...]], Server | None]) -> Iterator[None]:
    """In the block, ``make(server.database)`` takes the place of each server, unless it is None."""
    global _servers, _by_pool, _make_stand_in
    before = _servers, _by_pool, _make_stand_in
    _servers, _by_pool = weakref.WeakValueDictionary(), weakref.WeakKeyDictionary()
    _make_stand_in = make
    try:
        yield
    finally:
        _servers, _by_pool, _make_stand_in = before


def outages() -> list[Outage]:
    """The servers that do not answer, as far as this process knows."""
    with _registry:
        servers = list(_servers.values())
    breakers = (node.breaker for server in servers for node in server.nodes())
    known = (breaker.known_outage() for breaker in breakers)
    return sorted((outage for outage in known if outage), key=lambda outage: outage.server)


def is_cluster(client: Any) -> bool:
    """Whether ``client`` is one for Redis Cluster: redis-py's two, or the cache's."""
    return hasattr(client, "nodes_manager")


@after_fork
def _forget_servers() -> None:
    """Those of the parent: their connections and locks are the parent's."""
    _servers.clear()
    _by_pool.clear()
