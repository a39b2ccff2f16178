"""Locks on a cluster while nothing fails: the contract, and how the cluster is
found. What fails is in ``tests/faults``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_redis_lock import Lock
from django_redis_lock.contrib import topology as discovery
from django_redis_lock.transport import server_of
from tests.integration.locks.test_multi_lock import (
    ContractOfSeveral,
    InTasksOfSeveral,
    OfSeveral,
    names_of,
)
from tests.lock_contract import LockContract
from tests.processes import until
from tests.redis_topologies import ClusterServers
from tests.support.backends import Backend, OnRedis
from tests.support.tasks import InTasks, Tasks


@pytest.mark.sample(7, 3)
class TestLock(LockContract):
    @pytest.fixture
    def backend(self, cluster_servers: ClusterServers) -> Iterator[Backend]:
        with cluster_servers.client() as client:
            yield OnRedis(client)


@pytest.mark.sample(7, 4)
class TestAsyncLock(LockContract):
    @pytest.fixture
    def backend(self, cluster_servers: ClusterServers) -> Iterator[Backend]:
        tasks = Tasks()
        async_client = redis.asyncio.RedisCluster.from_url(cluster_servers.url)
        with cluster_servers.client() as client:
            yield InTasks(client, async_client, tasks)
        tasks.close()


@pytest.mark.sample(7, 5)
class TestMultiLock(ContractOfSeveral):
    """Its names are in several slots, on several servers."""

    @pytest.fixture
    def backend(self, cluster_servers: ClusterServers) -> Iterator[Backend]:
        with cluster_servers.client() as client:
            yield OfSeveral(client)

    @pytest.mark.sample(1)
    def test_names_are_on_several_servers(self, cluster_servers: ClusterServers) -> None:
        with cluster_servers.client() as client:
            nodes = {client.get_node_from_key(name).port for name in names_of(self.name)}
        assert len(nodes) > 1


@pytest.mark.sample(7, 6)
class TestAsyncMultiLock(ContractOfSeveral):
    @pytest.fixture
    def backend(self, cluster_servers: ClusterServers) -> Iterator[Backend]:
        tasks = Tasks()
        async_client = redis.asyncio.RedisCluster.from_url(cluster_servers.url)
        with cluster_servers.client() as client:
            yield InTasksOfSeveral(client, async_client, tasks)
        tasks.close()


# -- how the cluster is found -------------------------------------------------------------------


@pytest.mark.parametrize("begun", [True, False])
def test_a_search_that_had_no_time_for_all_nodes_goes_on_with_the_others(
    cluster_servers: ClusterServers, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Also if the only one in the settings is that which does not answer."""
    real, asked = discovery.ask, []

    def ask(node: Any, until: float, *command: Any) -> Any:
        asked.append(node)
        if node is asked[0]:
            raise RedisTimeoutError("frozen")
        return real(node, until, *command)

    with redis.RedisCluster.from_url(cluster_servers.url) as client:
        found: Any = server_of(client)
        if begun:
            found.locate(())
        else:
            found._first = [("127.0.0.1", server.port) for server in cluster_servers.servers[:2]]
        monkeypatch.setattr(discovery, "ask", ask)
        with pytest.raises(RedisConnectionError):
            found._look(time.monotonic())
        found._look(time.monotonic() + 30)
    assert asked[1] is not asked[0]


def test_a_search_in_vain_is_soon_repeated(
    cluster_servers: ClusterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(discovery, "LAST_RETRY_SECONDS", 3600.0)

    def ask(*_: Any) -> Any:
        raise RedisTimeoutError("frozen")

    def is_found() -> bool:
        with suppress(RedisConnectionError):
            return Lock(client, "found", timeout=30).acquire()
        return False

    with redis.RedisCluster.from_url(cluster_servers.url, socket_timeout=4.5) as client:
        with monkeypatch.context() as patch:
            patch.setattr(discovery, "ask", ask)
            with pytest.raises(RedisConnectionError, match="Could not find a primary"):
                Lock(client, "found", timeout=30).acquire()
        until(is_found)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The nodes that are asked."""
    real, asked = discovery.ask, []

    def ask(node: Any, *more: Any) -> Any:
        asked.append(node)
        return real(node, *more)

    monkeypatch.setattr(discovery, "ask", ask)
    return asked


def test_it_is_not_looked_for_with_each_call(
    cluster_servers: ClusterServers, asked: list[Any]
) -> None:
    with redis.RedisCluster.from_url(cluster_servers.url) as client:
        for _ in range(3):
            with Lock(client, "found", timeout=30):
                found, asked[:] = len(asked), ()
    assert found == 0


@pytest.mark.parametrize("connected", [False, True])
def test_a_frozen_node_is_asked_last(
    cluster_servers: ClusterServers, asked: list[Any], connected: bool
) -> None:
    """Else each search would cost the callers of all slots a second. Also if its first silence may
    have been an old connection's, which does not count as an outage."""
    with redis.RedisCluster.from_url(cluster_servers.url) as client:
        found: Any = server_of(client)
        found.locate(())
        frozen = found._known[0]
        port = frozen.address.connection_kwargs["port"]
        server = next(each for each in cluster_servers.servers if each.port == port)
        if connected:
            frozen.checkin(frozen.checkout())
        else:
            frozen.close()
        asked.clear()
        server.pause()
        try:
            for _ in range(3):
                found._look(time.monotonic() + 30)
        finally:
            server.resume()
    assert asked.count(frozen) == 1
    assert frozen in found._known
