"""Locks behind sentinels while nothing fails: the contract. Failovers are in ``tests/faults``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.core.cache import caches
from django_redis.util import CacheKey
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.sentinel import Sentinel

from django_redis_lock.transport.server import server_of
from tests.integration.cache.test_lock_keys import reached
from tests.lock_contract import LockContract
from tests.redis_server import RedisServer, fresh_port
from tests.redis_topologies import SentinelServers
from tests.support.backends import Backend, OnRedis
from tests.support.tasks import InTasks, Tasks


@pytest.mark.sample(7)
class TestLock(LockContract):
    @pytest.fixture
    def backend(self, sentinel_servers: SentinelServers) -> Iterator[Backend]:
        with sentinel_servers.client() as client:
            yield OnRedis(client)


@pytest.mark.sample(7, 1)
class TestAsyncLock(LockContract):
    @pytest.fixture
    def backend(self, sentinel_servers: SentinelServers) -> Iterator[Backend]:
        tasks = Tasks()
        manager = AsyncSentinel(sentinel_servers.addresses)
        async_client = manager.master_for(sentinel_servers.name)
        with sentinel_servers.client() as client:
            yield InTasks(client, async_client, tasks)
        tasks.close()


@pytest.mark.parametrize(("epochs", "protocol"), [((9, 10), 2), ((10, 9), 3)])
def test_the_sentinel_with_the_latest_epoch_is_right(
    epochs: tuple[int, int], protocol: int
) -> None:
    """The other has not heard of the failover, and names the primary of before."""
    ports = [fresh_port() for _ in epochs]
    with ExitStack() as stack:
        where = []
        for port, epoch in zip(ports, epochs, strict=True):
            config = {
                "sentinel monitor main": f"127.0.0.1 {port} 2",
                "sentinel config-epoch main": epoch,
            }
            sentinel = stack.enter_context(RedisServer(config=config, sentinel=True))
            where.append(("127.0.0.1", sentinel.port))
        manager = Sentinel(where, sentinel_kwargs={"protocol": protocol})
        server = server_of(manager.master_for("main"))
        assert str(server.locate((b"report",))) == f"127.0.0.1:{ports[epochs.index(10)]}/0"


def cache_settings(servers: SentinelServers, **options: Any) -> dict[str, Any]:
    options = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": servers.addresses,
        **options,
    }
    place = {"LOCATION": f"redis://{servers.name}/0", "OPTIONS": options}
    return {"BACKEND": "django_redis_lock.cache.RedisCache", **place}


def test_no_method_reaches_the_key_of_a_lock(
    sentinel_servers: SentinelServers, settings: Any
) -> None:
    settings.CACHES = {"default": cache_settings(sentinel_servers)}
    cache: Any = caches["default"]
    with cache.lock("nightly", timeout=30) as lock:
        assert not reached(cache, CacheKey(lock.name), CacheKey(cache.lock("other").name))
        assert lock.owned()


def test_clear_by_prefix(sentinel_servers: SentinelServers, settings: Any) -> None:
    own = cache_settings(sentinel_servers, LOCK_CLEAR="prefix")
    settings.CACHES = {"default": own, "other": {**own, "KEY_PREFIX": "other"}}
    cache: Any = caches["default"]
    other: Any = caches["other"]
    cache.set("a", 1)
    other.set("a", 2)
    with cache.lock("import") as lock:
        cache.clear()
        assert lock.owned()
    # Of the primary: django-redis may read from a replica, which is behind.
    primary = cache.client.get_client(write=True)
    assert not primary.exists(cache.make_key("a"))
    assert primary.exists(other.make_key("a"))


def test_tasks_use_the_cache(sentinel_servers: SentinelServers, settings: Any) -> None:
    """By django-redis's client, which is for threads only."""
    settings.CACHES = {"default": cache_settings(sentinel_servers)}
    cache: Any = caches["default"]
    computed: list[bool] = []

    async def compute() -> int:
        async with cache.alock("computing") as lock:
            computed.append(await lock.owned())
        return 5

    async def ask() -> list[int]:
        asked = (cache.aget_or_set("report", compute, 60, stale=60) for _ in range(8))
        return list(await asyncio.gather(*asked))

    assert asyncio.run(ask()) == [5] * 8
    assert computed == [True]
