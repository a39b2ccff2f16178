"""The cache on a cluster: django-redis's interface, computations, locks, and what lists them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django_redis.cache import RedisCache as PlainCache
from django_redis.util import CacheKey

from django_redis_lock.cache import RedisCache
from tests.integration.cache.test_lock_keys import reached
from tests.processes import PATIENCE, in_threads, until
from tests.redis_server import RedisServer
from tests.redis_topologies import ClusterServers, slot_of
from tests.support.background import Background, elsewhere
from tests.support.caches import OPERATIONS, make, outcome

MANY = [f"key-{number}" for number in range(200)]


def cluster_cache(servers: ClusterServers, **options: Any) -> RedisCache:
    options = {"CLIENT_CLASS": "django_redis_lock.clients.ClusterClient", **options}
    return RedisCache(servers.url, {"KEY_PREFIX": "site", "OPTIONS": options})


@pytest.fixture
def cache(cluster_servers: ClusterServers) -> RedisCache:
    return cluster_cache(cluster_servers)


@pytest.fixture
def cluster_client(cluster_servers: ClusterServers) -> Iterator[redis.RedisCluster]:
    with cluster_servers.client() as client:
        client.keys = lambda: list(client.scan_iter())  # redis-py's asks one node.
        yield client


def test_no_method_reaches_the_key_of_a_lock(cache: RedisCache) -> None:
    with cache.lock("nightly", timeout=30) as lock, cache.lock("two", limit=2) as two:
        assert not reached(cache, *(CacheKey(each.name) for each in (lock, two, cache.lock("a"))))
        cache.delete_pattern("*")
        assert not cache.keys("lock*")
        assert lock.owned()


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", OPERATIONS)
def test_it_does_what_django_redis_does_on_one_server(
    redis_server: RedisServer,
    client: redis.Redis,
    cache: RedisCache,
    cluster_client: redis.RedisCluster,
    name: str,
) -> None:
    theirs = outcome(OPERATIONS[name], make(PlainCache, redis_server), client)
    ours = outcome(OPERATIONS[name], cache, cluster_client)
    assert ours == theirs
    assert type(ours.result) is type(theirs.result)


def test_several_keys_may_be_anywhere(cache: RedisCache, cluster_servers: ClusterServers) -> None:
    nodes = {cluster_servers.primary_of(f"site:1:{key}") for key in MANY}
    assert len(nodes) == 3
    assert cache.set_many({key: n for n, key in enumerate(MANY)}, 60) == []
    assert cache.get_many([*MANY, "missing"]) == {key: n for n, key in enumerate(MANY)}
    assert sorted(cache.keys("key-*")) == sorted(MANY)
    assert sorted(cache.iter_keys("key-*")) == sorted(MANY)
    assert cache.delete_many([*MANY[:50], "missing"]) == 50
    assert cache.delete_pattern("key-*") == 150
    assert cache.get_many(MANY) == {}


# -- computations ------------------------------------------------------------------------------


def test_a_value_is_computed_once(cache: RedisCache) -> None:
    calls, go_on = [], threading.Event()

    def compute() -> str:
        calls.append(1)
        assert go_on.wait(PATIENCE)
        return "computed"

    leader = Background(lambda: cache.get_or_set("report", compute, 60))
    until(lambda: calls)
    others = [Background(lambda: cache.get_or_set("report", compute, 60)) for _ in range(8)]
    go_on.set()
    assert [other.result() for other in (leader, *others)] == ["computed"] * 9
    assert calls == [1]


def test_a_write_during_the_computation_wins(cache: RedisCache) -> None:
    def compute() -> str:
        elsewhere(cache.set_many, {"report": "newer", "other": 1})
        return "older"

    assert cache.get_or_set("report", compute, 60) == "older"
    assert cache.get("report") == "newer"


def test_many_values_are_computed_once(cluster_servers: ClusterServers) -> None:
    asked: list[str] = []

    def compute(keys: list[str]) -> dict[str, str]:
        asked.extend(keys)
        return {key: key.upper() for key in keys}

    def ask() -> dict[str, str]:
        return cluster_cache(cluster_servers).get_or_set_many(MANY, compute, 60)

    found = in_threads(4, ask)
    assert found == [{key: key.upper() for key in MANY}] * 4
    assert sorted(asked) == sorted(MANY)


def test_tasks_compute_once_too(cache: RedisCache) -> None:
    calls: list[str] = []

    async def compute() -> str:
        calls.append("one")
        await asyncio.sleep(0.05)
        return "computed"

    async def compute_many(keys: list[str]) -> dict[str, int]:
        calls.extend(keys)
        return dict.fromkeys(keys, 1)

    async def main() -> None:
        asked = (cache.aget_or_set("report", compute, 60) for _ in range(8))
        assert await asyncio.gather(*asked) == ["computed"] * 8
        assert await cache.aget_or_set_many(MANY, compute_many, 60) == dict.fromkeys(MANY, 1)
        lock = cache.alock("nightly")
        async with lock:
            assert cache.lock("nightly").locked()
            other = asyncio.create_task(cache.alock("nightly", blocking_timeout=PATIENCE).acquire())
            await asyncio.sleep(0)
        assert await other

    asyncio.run(main())
    assert sorted(calls) == sorted(["one", *MANY])


# -- locks -------------------------------------------------------------------------------------


def test_held_locks_are_listed(cache: RedisCache) -> None:
    locks = [cache.lock(name, timeout=30) for name in MANY]
    for lock in locks:
        assert lock.acquire()
    found = cache.held_locks()
    assert sorted(held.name for held in found.locks) == sorted(MANY)
    assert (found.total, found.complete) == (len(MANY), True)
    part = cache.held_locks(limit=10)
    assert (len(part.locks), part.total, part.complete) == (10, len(MANY), False)
    for lock in locks[:100]:
        lock.release()
    assert cache.held_locks().total == 100
    assert cache.reset_all() == 100
    assert cache.held_locks().total == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["clear", "delete_pattern"])
def test_emptying_the_cache_keeps_the_locks(cache: RedisCache, how: str) -> None:
    locks = [cache.lock(name, timeout=30) for name in MANY]
    for lock in locks:
        assert lock.acquire()
    cache.set_many(dict.fromkeys(MANY, 1))
    waiter = Background(lambda: cache.lock(MANY[0], timeout=30).acquire())
    until(
        lambda: [h.waiters for h in cache.held_locks(limit=500).locks if h.name == MANY[0]] == [1]
    )
    if how == "clear":
        cache.clear()
    else:
        cache.delete_pattern("*")
    assert cache.get_many(MANY) == {}
    assert all(lock.owned() for lock in locks)
    assert cache.held_locks().total == len(MANY)
    locks[0].release()
    assert waiter.result()


def test_clear_by_prefix_deletes_from_all_nodes(cluster_servers: ClusterServers) -> None:
    cache = cluster_cache(cluster_servers, LOCK_CLEAR="prefix")
    other = cluster_cache(cluster_servers)
    other.key_prefix = "site2"
    for each in (cache, other):
        each.set_many(dict.fromkeys(MANY, 1))
    lock = cache.lock("import", timeout=60)
    lock.acquire()
    cache.clear()
    assert (cache.get_many(MANY), other.get_many(MANY)) == ({}, dict.fromkeys(MANY, 1))
    assert lock.owned()


@pytest.mark.parametrize("clear", ["database", "prefix"])
def test_clear_ends_computations(cluster_servers: ClusterServers, clear: str) -> None:
    cache = cluster_cache(cluster_servers, LOCK_CLEAR=clear)

    def compute() -> str:
        elsewhere(cache.clear)
        return "older"

    assert cache.get_or_set("report", compute, 60) == "older"
    assert cache.get("report") is None


# -- a slot that moves -------------------------------------------------------------------------


def test_a_slot_may_move(cache: RedisCache, cluster_servers: ClusterServers) -> None:
    slot = slot_of("site:lock:1:moving")
    lock = cache.lock("moving", timeout=30, thread_local=False)
    assert lock.acquire()
    waiter = Background(lambda: cache.lock("moving", timeout=30).acquire())
    until(lambda: cache.held_locks().locks[0].waiters == 1)
    for _ in range(2):
        cluster_servers.move(slot)
        assert lock.owned()
    assert not waiter.done
    lock.extend(5)
    lock.release()
    assert waiter.result()


def test_a_call_waits_for_a_slot_on_its_way(
    cache: RedisCache, cluster_servers: ClusterServers
) -> None:
    slot = slot_of("site:lock:1:moving")
    lock = cache.lock("moving", timeout=30)
    with lock:
        pass
    old, new = cluster_servers.begin_to_move(slot)
    acquiring = Background(lambda: cache.lock("moving", timeout=30).acquire(blocking=False))
    computing = Background(lambda: cache.get_or_set("moving", lambda: 5))
    assert computing.result() == 5
    cluster_servers.move_keys(slot, old, new)
    cluster_servers.end_moving(slot, old, new)
    assert acquiring.result() is True


# -- settings ----------------------------------------------------------------------------------


def test_the_threads_of_a_process_share_the_connections_of_one_configuration(
    cluster_servers: ClusterServers,
) -> None:
    one, two = (cluster_cache(cluster_servers).client.get_client() for _ in range(2))
    assert one is two
    for name in ("REDIS_CLIENT_KWARGS", "CONNECTION_POOL_KWARGS"):
        options = {name: {"client_name": "reports"}}
        other = cluster_cache(cluster_servers, SOCKET_TIMEOUT=3, **options).client.get_client()
        assert other is not one
        assert other.client_getname() == "reports"


def test_its_connections_are_closed_after_a_request_if_that_is_set(
    cluster_servers: ClusterServers,
) -> None:
    named = {"client_name": "closing"}
    cache = cluster_cache(cluster_servers, CLOSE_CONNECTION=True, CONNECTION_POOL_KWARGS=named)

    def connections() -> int:
        listed = [each.asking.client_list() for each in cluster_servers.servers]
        return sum(each["name"] == "closing" for clients in listed for each in clients)

    cache.client.get_client()
    cache.close()
    for _ in range(2):
        cache.set("a", 1)
        assert connections()
        cache.close()
        until(lambda: not connections())


@pytest.mark.parametrize("ignore", [True, False])
def test_a_cluster_that_is_away_is_an_outage_like_any_other(ignore: bool) -> None:
    away = RedisCache(
        "redis://127.0.0.1:1",
        {
            "OPTIONS": {
                "CLIENT_CLASS": "django_redis_lock.clients.ClusterClient",
                "IGNORE_EXCEPTIONS": ignore,
            }
        },
    )
    assert away.get_or_set("a", lambda: 5) == 5
    if not ignore:
        with pytest.raises(redis.ConnectionError):
            away.get("a")
        return
    assert away.get("a") is None
    assert away.set_many({"a": 1}) == ["a"]
    with pytest.raises(redis.ConnectionError):
        away.lock("a").acquire()
