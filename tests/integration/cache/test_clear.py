"""S6: emptying the cache releases no lock, and neither does a write of the same name."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import redis

from django_redis_lock import Lock
from django_redis_lock.cache import RedisCache
from django_redis_lock.conf import Conf
from django_redis_lock.protocol.keys import (
    FIGURES,
    INDEX,
    LAST_FENCE,
    flight_key,
    lock_keys,
)
from tests.holding import hurry, renew, settle
from tests.processes import Link, processes, until
from tests.redis_server import RedisServer

pytestmark = pytest.mark.invariant("S6")

CACHE = {"KEY_PREFIX": "site"}
KEYS = lock_keys(b"site:lock:1:report")


def waiting(client: redis.Redis) -> int:
    return int(client.info("clients")["blocked_clients"])


def described_holder(client: redis.Redis) -> dict[bytes, bytes]:
    """Without the time at which it was seen: a holder looks at its lock when the database is
    emptied."""
    return {name: value for name, value in client.hgetall(KEYS.owner).items() if name != b"seen"}


#: Ways to empty a cache.
def clear(cache: RedisCache) -> None:
    cache.clear()


def delete_all(cache: RedisCache) -> None:
    cache.delete_pattern("*")


def clear_prefix(cache: RedisCache) -> None:
    cache.conf = Conf({"LOCK_CLEAR": "prefix"})
    cache.clear()


EMPTYING = pytest.mark.parametrize("empty", [clear, clear_prefix, delete_all])


# -- the holder --------------------------------------------------------------------------------


@EMPTYING
def test_a_held_lock_stays_held(cache: RedisCache, client: redis.Redis, empty: Any) -> None:
    lock = cache.lock("report", timeout=60, label="nightly")
    assert lock.acquire()
    hurry()
    until(lambda: client.exists(KEYS.owner))
    settle()
    before = [client.get(KEYS.lock), described_holder(client)]
    left, score = client.pttl(KEYS.lock), client.zscore(INDEX, KEYS.lock)
    described = client.pttl(KEYS.owner)
    cache.set("value", 1)

    empty(cache)

    assert cache.get("value") is None
    assert [client.get(KEYS.lock), described_holder(client)] == before
    assert client.zscore(INDEX, LAST_FENCE) == lock.fence
    assert left - 5000 < client.pttl(KEYS.lock) <= left
    assert described - 5000 < client.pttl(KEYS.owner) <= described
    # Its holder may have looked at it, and has written the end again, by the rounded lifetime.
    assert abs(client.zscore(INDEX, KEYS.lock) - score) < 100
    assert lock.owned()
    assert not cache.lock("report").acquire(blocking=False)
    (held,) = cache.held_locks().locks
    assert held.owner.label == "nightly"
    assert held.fence == lock.fence
    lock.release()
    assert not client.exists(KEYS.lock)


def test_fences_go_on_rising(cache: RedisCache) -> None:
    fences = []
    for _ in range(5):
        with cache.lock("report") as lock:
            fences.append(lock.fence)
            cache.clear()
        cache.clear()
    assert fences == sorted(set(fences))


def test_a_lock_is_still_renewed(cache: RedisCache, client: redis.Redis) -> None:
    with cache.lock("report", timeout=60, renew=True) as lock:
        cache.clear()
        renew(client, KEYS.lock)
        assert lock.owned()
        lock.ensure_held()


@EMPTYING
def test_other_sites_in_the_database_keep_their_locks(
    redis_server: RedisServer, cache: RedisCache, empty: Any
) -> None:
    neighbour = RedisCache(redis_server.url, {"KEY_PREFIX": "neighbour"})
    own = [neighbour.lock("a b"), neighbour.lock("{tag}x"), neighbour.lock("a}b")]
    bare = Lock(neighbour.client.get_client(), "bare", timeout=None)
    for lock in (*own, bare):
        lock.acquire()
    empty(cache)
    assert all(lock.owned() for lock in (*own, bare))
    assert bare.ttl() == float("inf")


@pytest.mark.sample(5)
@EMPTYING
@pytest.mark.parametrize("before", [0, 100], ids="{} locks before".format)
def test_a_lock_taken_during_clear_stays_held(
    cache: RedisCache, client: redis.Redis, empty: Any, before: int
) -> None:
    """With 100 locks ``clear`` goes step by step."""
    held = [cache.lock(f"before {number}", timeout=600) for number in range(before)]
    for lock in held:
        lock.acquire()
    done = threading.Event()

    def take() -> None:
        for number in range(10_000):
            if done.is_set():
                return
            lock = cache.lock(f"meanwhile {number}", timeout=600)
            lock.acquire()
            held.append(lock)

    cache.set_many({f"value-{number}": number for number in range(3000)})
    thread = threading.Thread(target=take)
    thread.start()
    try:
        until(lambda: len(held) > before)
        empty(cache)
    finally:
        done.set()
        thread.join()
    assert [lock.name for lock in held if not client.exists(lock.keys.lock)] == []


def test_a_pattern_foreverything_spares_what_belongs_to_locks(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """Where cache keys are the keys of Redis, "*" matches all there is in the database."""
    params = {"KEY_FUNCTION": lambda key, *_: key, "OPTIONS": {"LOCK_LOCK_PREFIX": ""}}
    cache = RedisCache(redis_server.url, params)
    locks = [cache.lock(name, label="x") for name in ("plain", "{tag}x", "a}b")]
    for lock in locks:
        lock.acquire()
    hurry()
    until(lambda: all(client.exists(lock.keys.owner) for lock in locks))
    with cache.lock("released"):
        pass
    figures = FIGURES["day"]
    client.hset(figures, "a", 1)
    cache.set("value", 1)
    before = {key for lock in locks for key in lock.keys if client.exists(key)}
    assert cache.delete_pattern("*") == 1
    # On a slow machine the heartbeat of this process is there, too.
    left = {key for key in client.keys() if not key.startswith(b"django_redis_lock:process:")}
    assert left - {FIGURES["hour"]} == {*before, figures}
    assert all(lock.owned() for lock in locks)


@pytest.mark.on_redis
def test_at_no_moment_is_a_lock_missing(cache: RedisCache, client: redis.Redis) -> None:
    done = threading.Event()
    missed: list[int] = []

    def look() -> None:
        with redis.Redis.from_url(cache._server) as own:
            while not done.is_set():
                if not own.exists(KEYS.lock):
                    missed.append(1)

    with cache.lock("report"):
        thread = threading.Thread(target=look)
        thread.start()
        for _ in range(200):
            cache.clear()
        done.set()
        thread.join()
    assert not missed


# -- those who wait ----------------------------------------------------------------------------


def wait_for_the_lock(link: Link, url: str) -> str:
    with RedisCache(url, {"KEY_PREFIX": "site"}).lock("report", timeout=60):
        return "served"


@EMPTYING
def test_who_waits_is_served(
    cache: RedisCache, redis_server: RedisServer, client: redis.Redis, empty: Any
) -> None:
    lock = cache.lock("report", timeout=60)
    lock.acquire()
    with processes(wait_for_the_lock, redis_server.url, count=2) as crew:
        crew.go()
        until(lambda: waiting(client) == 2)
        registered = client.zcard(KEYS.waiters)
        empty(cache)
        assert waiting(client) == 2
        assert client.zcard(KEYS.waiters) == registered == 2
        lock.release()
        assert crew.results() == ["served"] * 2


# -- what goes ---------------------------------------------------------------------------------


def test_everything_else_is_gone(cache: RedisCache, client: redis.Redis) -> None:
    cache.set_many({"a": 1, "b": 2}, None)
    cache.get_or_set("c", 3)
    with cache.lock("released"):
        pass
    client.hset("hash", "field", 1)
    client.set(flight_key(b"site:1:d"), "another")
    client.set("plain lock of redis-py", "token", px=60_000)
    with cache.lock("report"):
        cache.clear()
        assert {*client.keys()} <= {*KEYS}


@pytest.mark.parametrize("how", ["database", "prefix"])
@pytest.mark.parametrize("ignore", [True, False])
def test_without_redis(own_server: RedisServer, ignore: bool, how: str) -> None:
    options = {"IGNORE_EXCEPTIONS": ignore, "LOCK_CLEAR": how}
    cache = RedisCache(own_server.url, {"OPTIONS": options})
    own_server.stop()
    if ignore:
        assert cache.clear() is None
    else:
        with pytest.raises(redis.ConnectionError):
            cache.clear()


# -- names -------------------------------------------------------------------------------------


def test_a_value_and_a_lock_of_the_same_name_are_no_business_of_each_other(
    cache: RedisCache, client: redis.Redis
) -> None:
    with cache.lock("report") as lock:
        token = client.get(KEYS.lock)
        cache.set("report", "value")
        assert cache.add("report", "other") is False
        cache.set_many({"report": "many"})
        assert cache.incr_version("report") == 2
        assert cache.delete("report", version=2)
        cache.delete_many(["report"])
        assert cache.get_or_set("report", "computed") == "computed"
        assert cache.touch("report", 1000)
        assert client.get(KEYS.lock) == token
        assert lock.owned()
    lock.reset()
    assert cache.get("report") == "computed"


def test_no_lock_and_no_value_can_be_what_is_kept_for_another(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    cache = RedisCache(redis_server.url, {"KEY_FUNCTION": lambda key, *_: key, "LOCK_PREFIX": ""})
    cache.set("ordinary", 1)
    for key in ("{a}:fence", "{a}|{a}|flight", "{a}:owner", INDEX.decode()):
        writes: list[Any] = [
            lambda key=key: cache.set(key, 1),
            lambda key=key: cache.hset(key, "field", 1),
            lambda key=key: cache.get_or_set(key, 1),
            lambda key=key: Lock(client, key),
        ]
        for write in writes:
            with pytest.raises(ValueError, match="no name for a lock or a cache value"):
                write()
    assert client.keys() == [b"ordinary"]


@pytest.mark.parametrize("name", ["report", "{tag}x", "a}b", "{", "{}"])
def test_a_pattern_deletes_values_and_spares_locks(cache: RedisCache, name: str) -> None:
    cache.set(name, 1)
    with cache.lock(name) as lock:
        assert cache.delete_pattern("*") == 1
        assert lock.owned()
        assert cache.delete_pattern("lock:*") == 0
        assert lock.owned()
    assert cache.get(name) is None


def test_the_error_names_a_command_that_is_disabled() -> None:
    with RedisServer(config={"rename-command": 'FLUSHDB ""'}) as server:
        cache = RedisCache(server.url, {})
        cache.set("report", 1)
        with pytest.raises(redis.ResponseError, match="unknown command FLUSHDB"):
            cache.clear()
        assert cache.get("report") == 1


@EMPTYING
def test_a_lock_on_its_way_to_a_frozen_waiter_arrives(
    cache: RedisCache, redis_server: RedisServer, client: redis.Redis, empty: Any
) -> None:
    lock = cache.lock("report", timeout=60, grant_timeout=30)
    lock.acquire()
    with processes(wait_for_the_lock, redis_server.url) as (waiter,):
        waiter.go()
        until(lambda: waiting(client) == 1)
        waiter.pause()
        lock.release()
        until(lambda: waiting(client) == 0)
        empty(cache)
        assert client.exists(KEYS.lock)
        waiter.resume()
        assert waiter.result() == "served"


def test_a_fence_that_is_ahead_of_the_clock_outlasts_it(
    cache: RedisCache, client: redis.Redis
) -> None:
    ahead = int((time.time() + 3600) * 1e6)
    client.zadd(INDEX, {LAST_FENCE: ahead})
    cache.clear()
    assert client.zrange(INDEX, 0, -1) == [LAST_FENCE]
    with cache.lock("report") as lock:
        assert lock.fence == ahead + 1
