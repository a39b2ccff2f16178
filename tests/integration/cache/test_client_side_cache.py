"""A client-side cache of redis-py: hot values are read from the memory of the process until the
server says that they have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import redis

from django_redis_lock import Lock
from django_redis_lock.cache import RedisCache
from django_redis_lock.decorators import cached
from tests import redis_server, redis_topologies
from tests.processes import until
from tests.redis_server import RedisServer, newer_redis_server
from tests.support.background import Background
from tests.support.interrupts import Interrupt, Points, TimeLimit, each_point

if int(redis.__version__.split(".")[0]) < 6:
    pytest.skip("needs redis-py 6: before, not with hiredis", allow_module_level=True)

from redis.cache import CacheConfig


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(program=newer_redis_server((7, 4))) as found:
        yield found


@pytest.fixture
def other(server: RedisServer) -> redis.Redis:
    """Another client, which writes what the cache can read."""
    server.flush()
    return server.client(protocol=2)


@pytest.fixture
def cache(server: RedisServer, other: redis.Redis, settings: Any) -> Any:
    pool = {"protocol": 3, "cache_config": CacheConfig(), "socket_timeout": 2}
    config = {
        "BACKEND": "django_redis_lock.cache.RedisCache",
        "LOCATION": server.url,
        "OPTIONS": {"CONNECTION_POOL_KWARGS": pool},
    }
    settings.CACHES = {"default": config}
    found = RedisCache(server.url, config)
    found.set("report", 1)
    found.get("report")
    return found


def never() -> Any:
    pytest.fail("there is a value")


@cached("report", timeout=60)
def report() -> Any:
    never()


@cached("report", timeout=60)
async def areport() -> Any:
    never()


async def _after(step: Any) -> Any:
    return await step


#: What reads the value 1 of "report".
READS: dict[str, Callable[[Any], Any]] = {
    "get": lambda c: c.get("report"),
    "get_many": lambda c: c.get_many(["report", "report"])["report"],
    "get_or_set": lambda c: c.get_or_set("report", never, 60),
    "get_or_set_many": lambda c: c.get_or_set_many(["report"], never, 60)["report"],
    "cached": lambda c: report(),
    "aget": lambda c: asyncio.run(c.aget("report")),
    "aget_many": lambda c: asyncio.run(c.aget_many(["report"]))["report"],
    "aget_or_set": lambda c: asyncio.run(c.aget_or_set("report", never, 60)),
    "aget_or_set_many": lambda c: asyncio.run(c.aget_or_set_many(["report"], never, 60))["report"],
    "cached, asyncio": lambda c: asyncio.run(_after(areport())),
}


def commands(other: redis.Redis) -> int:
    stats: dict[str, Any] = other.info("commandstats")
    ours = {n: s["calls"] for n, s in stats.items() if n != "cmdstat_info"}
    return int(sum(ours.values()))


@pytest.mark.parametrize("name", READS)
def test_a_hot_key_is_read_without_a_trip_until_it_is_written(
    cache: Any, other: redis.Redis, name: str
) -> None:
    for _ in range(3):
        assert READS[name](cache) == 1
    before = commands(other)
    for _ in range(30):
        assert READS[name](cache) == 1
    assert commands(other) <= before + 10
    other.set(cache.make_key("report"), 2)
    until(lambda: READS[name](cache) == 2)


#: What leaves the number 2 at "report", or nothing.
WRITES: dict[str, Callable[[Any], Any]] = {
    "set": lambda c: c.set("report", 2),
    "set_many": lambda c: c.set_many({"report": 2}),
    "incr": lambda c: c.incr("report"),
    "delete": lambda c: c.delete("report"),
    "delete_many": lambda c: c.delete_many(["report"]),
    "delete and get_or_set": lambda c: (c.delete("report"), c.get_or_set("report", lambda: 2)),
    "aset": lambda c: asyncio.run(c.aset("report", 2)),
    "adelete": lambda c: asyncio.run(c.adelete("report")),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_of_its_own_is_seen(cache: Any, name: str) -> None:
    for _ in range(20):
        cache.set("report", 1)
        assert cache.get("report") == 1
        WRITES[name](cache)
        assert cache.get("report") == (None if "delete" in name.rsplit(maxsplit=1)[-1] else 2)


def test_what_is_known_of_a_lock_is_not_from_memory(cache: Any, other: redis.Redis) -> None:
    theirs = Lock(other, cache.lock("report").name, timeout=30)
    ours = cache.lock("report", timeout=30)
    for _ in range(3):
        assert theirs.acquire()
        assert ours.locked()
        assert ours.holder()
        theirs.release()
        assert not ours.locked()
        assert ours.acquire(blocking=False)
        ours.release()


def test_threads_that_read_a_value_that_changes_get_it_or_its_successor(
    cache: Any, other: redis.Redis
) -> None:
    nkeys = [cache.make_key(f"hot {number}") for number in range(10)]

    def write() -> None:
        for version in range(300):
            for nkey in nkeys:
                other.set(nkey, version)

    def read() -> None:
        last = dict.fromkeys(range(10), 0)
        while not writing.done:
            for number in range(10):
                value = cache.get(f"hot {number}", 0)
                assert value >= last[number] - 1
                last[number] = max(value, last[number])

    writing = Background(write)
    for reading in [Background(read) for _ in range(6)]:
        reading.result()
    writing.result()
    until(lambda: all(cache.get(f"hot {number}") == 299 for number in range(10)))


def test_after_its_connection_was_cut_it_believes_no_old_value(
    cache: Any, other: redis.Redis
) -> None:
    assert cache.get("report") == 1
    with other.pipeline() as pipe:
        for connection in other.client_list():
            if connection["id"] != str(other.client_id()):
                pipe.client_kill_filter(_id=connection["id"])
        pipe.set(cache.make_key("report"), 2)
        pipe.execute()
    until(lambda: cache.get("report") == 2)


@pytest.mark.invariant("P1")
def test_an_exception_of_a_signal_handler_at_each_point_of_a_read(
    cache: Any, other: redis.Redis
) -> None:
    numbers = count(2)
    cache.set("other", "another")

    def attempt(points: Points) -> None:
        number = next(numbers)
        other.set(cache.make_key("report"), number)
        try:
            with points.watched():
                for _ in range(2):  # From the server, and from memory.
                    cache.get("report")
        except (Interrupt, TimeLimit):
            pass
        for _ in range(2):
            assert cache.get("other") == "another"
            until(lambda: cache.get("report") == number)
            assert cache.get_many(["report", "other"]) == {"report": number, "other": "another"}

    each_point(attempt, modules=("redis.", "django_redis_lock.pools", "django_redis_lock.cache."))


@pytest.mark.parametrize("topology", ["cluster", "sentinels"])
def test_with_several_servers(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = newer_redis_server((7, 4))
    monkeypatch.setattr(redis_server, "redis_server_binary", lambda: newer)
    pool = {"protocol": 3, "cache_config": CacheConfig()}
    with getattr(redis_topologies, topology)() as servers:
        options: dict[str, Any] = {"CONNECTION_POOL_KWARGS": pool}
        if topology == "cluster":
            location = servers.nodes[0].url
            options["CLIENT_CLASS"] = "django_redis_lock.clients.ClusterClient"
        else:
            location = f"redis://{servers.name}/0"
            options["CLIENT_CLASS"] = "django_redis.client.SentinelClient"
            options["CONNECTION_FACTORY"] = "django_redis.pool.SentinelConnectionFactory"
            options["SENTINELS"] = servers.addresses
        cache = RedisCache(location, {"OPTIONS": options})
        other = RedisCache(location, {"OPTIONS": {**options, "CONNECTION_POOL_KWARGS": {}}})
        cache.set("report", 1)
        for _ in range(3):
            assert cache.get_or_set("report", never, 60) == 1
        before = sum(commands(node.asking) for node in servers.nodes)
        for _ in range(100):
            assert cache.get_or_set("report", never, 60) == 1
        # Servers of these kinds also talk to each other.
        assert sum(commands(node.asking) for node in servers.nodes) < before + 100
        other.set("report", 2)
        until(lambda: cache.get("report") == 2)
        with cache.lock("report", timeout=30) as lock:
            assert other.lock("report").locked()
            assert lock.owned()
