"""Hits are read on connections of the package's own, past redis-py."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest
import redis
from django_redis.client import DefaultClient

from django_redis_lock.cache import RedisCache
from tests.redis_server import RedisServer


@pytest.fixture
def cache(redis_server: RedisServer, client: redis.Redis) -> RedisCache:
    return cache_of(redis_server)


def cache_of(server: RedisServer, **options: str) -> RedisCache:
    found = RedisCache(server.url, {"OPTIONS": options})
    found.set("report", "there")
    return found


def never() -> Any:
    pytest.fail("there is a value")


def test_a_hit_uses_no_connection_of_the_pool(
    cache: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = cache.client.get_client(write=False).connection_pool
    monkeypatch.setattr(pool, "get_connection", lambda *_: pytest.fail("it uses the pool"))
    assert cache.get_or_set("report", never) == "there"


def test_a_hit_is_read_again_if_its_connection_broke(
    cache: RedisCache, client: redis.Redis
) -> None:
    assert cache.get_or_set("report", never) == "there"
    for other in client.client_list():
        if other["id"] != str(client.client_id()):
            client.client_kill_filter(_id=other["id"])
    assert cache.get_or_set("report", never) == "there"


def test_a_forked_child_reads_on_its_own_connection(cache: RedisCache) -> None:
    assert cache.get_or_set("report", never) == "there"
    child = os.fork()
    if not child:
        process = psutil.Process()
        before = process.num_fds()
        found = cache.get_or_set("report", lambda: "other")
        os._exit(found != "there" or process.num_fds() <= before)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.get_or_set("report", never) == "there"


class CountingClient(DefaultClient):
    reads = 0

    def get(self, *args: Any, **options: Any) -> Any:
        CountingClient.reads += 1
        return super().get(*args, **options)


class CountingRedis(redis.Redis):
    reads = 0

    def get(self, name: Any) -> Any:
        CountingRedis.reads += 1
        return super().get(name)


@pytest.mark.parametrize(
    ("option", "counting"),
    [("CLIENT_CLASS", CountingClient), ("REDIS_CLIENT_CLASS", CountingRedis)],
)
def test_the_get_of_a_subclass_is_called(
    redis_server: RedisServer, client: redis.Redis, option: str, counting: Any
) -> None:
    cache = cache_of(redis_server, **{option: f"{__name__}.{counting.__name__}"})
    before = counting.reads
    assert cache.get_or_set("report", never) == "there"
    assert counting.reads == before + 1
