"""django-redis on Redis Cluster, which django-redis does not support.

``"CLIENT_CLASS": "django_redis_lock.clients.ClusterClient"``
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django_redis.client import DefaultClient
from django_redis.exceptions import ConnectionInterrupted
from django_redis.pool import ConnectionFactory
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import ConnectionPool, SSLConnection, parse_url
from redis.exceptions import ClusterError, RedisClusterException, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from ...pools import guard
from ...threads import Mutex, after_fork, free_after_fork

__all__ = ["ClusterClient"]


class ClusterClient(DefaultClient):  # type: ignore[misc]  # django-redis ships no types
    """django-redis's client with redis-py's ``RedisCluster``. All of the cache's methods work; a
    command with several keys goes to each node that has some of them.

    ``LOCATION`` names one node or several, of which one must be up when a process starts; the
    client finds the others. ``USERNAME``, ``PASSWORD``, ``SOCKET_TIMEOUT`` and
    ``SOCKET_CONNECT_TIMEOUT`` apply to all nodes, and ``REDIS_CLIENT_KWARGS`` go to
    ``RedisCluster``.
    """

    def __init__(self, server: str | list[str], params: dict[str, Any], backend: object) -> None:
        super().__init__(server, params, backend)
        self._server: object = [self._server]  # All nodes are one.
        self.connection_factory = ClusterFactory(self._options)

    def get_many(
        self, keys: Collection[str], version: int | None = None, client: Any = None
    ) -> dict[str, object]:
        client = client or self.get_client(write=False)
        by_nkey = {self.make_key(key, version=version): key for key in keys}
        if not by_nkey:
            return {}
        try:
            values = client.mget_nonatomic(list(by_nkey))
        except RedisError as error:
            raise ConnectionInterrupted(connection=client) from error
        found = zip(by_nkey.values(), values, strict=True)
        return {key: self.decode(value) for key, value in found if value is not None}

    def keys(self, search: str, version: int | None = None, client: object = None) -> list[object]:
        try:
            return list(self.iter_keys(search, client=client, version=version))
        except RedisError as error:
            raise ConnectionInterrupted(connection=client) from error


class ClusterFactory(ConnectionFactory):  # type: ignore[misc]  # no types either
    """Makes one client for each cluster and its options in this process."""

    def connect(self, urls: list[str]) -> LazyCluster:
        nodes, settings = _parsed(urls)
        for name in ("USERNAME", "PASSWORD", "SOCKET_TIMEOUT", "SOCKET_CONNECT_TIMEOUT"):
            if self.options.get(name):
                settings[name.lower()] = self.options[name]
        settings.update(self.pool_cls_kwargs)
        settings.update(self.redis_client_cls_kwargs)
        place = repr((nodes, sorted(settings.items(), key=str)))
        return _clusters.setdefault(place, LazyCluster(nodes, settings))

    def disconnect(self, connection: LazyCluster) -> None:
        if connection._cluster is not None:
            connection._cluster.disconnect_connection_pools()  # type: ignore[no-untyped-call]  # redis-py


def _parsed(urls: list[str]) -> tuple[list[tuple[str, int]], dict[str, object]]:
    """Host and port of each node, and the other settings in the first URL."""
    nodes, settings = [], {}
    for url in reversed(urls):
        settings = dict(parse_url(url.strip()))  # type: ignore[no-untyped-call]  # redis-py
        if "path" in settings:
            raise ImproperlyConfigured("A cluster cannot be reached by a socket")
        if settings.pop("db", 0):
            raise ImproperlyConfigured("A cluster has the database 0 and no other")
        nodes.append((settings.pop("host", "localhost"), int(settings.pop("port", 6379))))
    if settings.pop("connection_class", None) is SSLConnection:
        settings["ssl"] = True
    return nodes[::-1], settings


class LazyCluster:
    """A ``RedisCluster`` that connects at its first use. So a cluster that is down causes an outage
    like any other, which IGNORE_EXCEPTIONS may hide. Locks use the addresses in ``nodes_manager``.
    """

    def __init__(self, nodes: list[tuple[str, int]], settings: dict[str, Any]) -> None:
        self._nodes = nodes
        self._settings = settings
        self._cluster: RedisCluster | None = None
        self._connecting = free_after_fork(Mutex())
        given = {n: settings[n] for n in ("encoding", "encoding_errors") if n in settings}
        encoder = ConnectionPool(**given).get_encoder()
        self.get_encoder = lambda: encoder
        self.nodes_manager = SimpleNamespace(
            startup_nodes={
                f"{host}:{port}": SimpleNamespace(host=host, port=port) for host, port in nodes
            },
            connection_kwargs=settings,
            address_remap=settings.get("address_remap"),
        )

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "connection_pool":
            raise AttributeError(name)  # Known without a connection.
        return getattr(self._connected(), name)

    def _connected(self) -> RedisCluster:
        if self._cluster is None:
            with self._connecting:
                if self._cluster is None:
                    nodes = [ClusterNode(*node) for node in self._nodes]  # type: ignore[no-untyped-call]  # redis-py
                    with _outages_as_of_one_server():
                        cluster = _Cluster(startup_nodes=nodes, **self._settings)
                    manager: Any = cluster.nodes_manager
                    make = manager.create_redis_node
                    config = self._settings.get("cache_config")
                    manager.create_redis_node = lambda *args, **kw: guard(make(*args, **kw), config)
                    for node in manager.nodes_cache.values():
                        guard(node.redis_connection, config)
                    self._cluster = cluster
        return self._cluster


class _Cluster(RedisCluster):
    def execute_command(self, *args: Any, **kwargs: object) -> object:
        with _outages_as_of_one_server():
            return super().execute_command(*args, **kwargs)  # type: ignore[no-untyped-call]  # redis-py


@contextmanager
def _outages_as_of_one_server() -> Iterator[None]:
    """Turn those of ``RedisCluster`` into ``ConnectionError``, for django-redis."""
    try:
        yield
    except (RedisClusterException, ClusterError) as error:
        if isinstance(error, ResponseError):
            raise
        raise RedisConnectionError(str(error)) from error


#: A client connects to all nodes, so the threads of a process share it, like a pool.
_clusters: dict[str, LazyCluster] = {}
after_fork(_clusters.clear)
