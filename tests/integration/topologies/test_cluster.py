"""Locks on a cluster while nothing fails: the contract. What fails is in ``tests/faults``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis.asyncio

from tests.integration.locks.test_multi_lock import (
    ContractOfSeveral,
    InTasksOfSeveral,
    OfSeveral,
    names_of,
)
from tests.lock_contract import LockContract
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
