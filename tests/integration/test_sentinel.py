"""Locks behind sentinels while nothing fails: the contract. Failovers are in ``tests/faults``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis.asyncio.sentinel import Sentinel as AsyncSentinel

from tests.integration.test_async_lock import InTasks, Tasks
from tests.integration.test_lock import OnRedis
from tests.lock_contract import Backend, LockContract
from tests.redis_topologies import SentinelServers


class TestLock(LockContract):
    @pytest.fixture
    def backend(self, sentinel_servers: SentinelServers) -> Iterator[Backend]:
        with sentinel_servers.client() as client:
            yield OnRedis(client)


class TestAsyncLock(LockContract):
    @pytest.fixture
    def backend(self, sentinel_servers: SentinelServers) -> Iterator[Backend]:
        tasks = Tasks()
        manager = AsyncSentinel(sentinel_servers.addresses)
        async_client = manager.master_for(sentinel_servers.name)
        with sentinel_servers.client() as client:
            yield InTasks(client, async_client, tasks)
        tasks.close()
