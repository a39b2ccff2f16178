"""``LocMemCache`` where the suites of both backends do not look: how many values it keeps, what it
refuses, and locks on it; and calls at random, beside a cache on Redis."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from datetime import datetime, timedelta
from typing import Any

import pytest
import redis

from django_redis_lock import LockNotAcquired
from django_redis_lock.cache import LocMemCache, RedisCache
from tests.redis_server import RedisServer


@pytest.fixture
def cache(location: str) -> LocMemCache:
    return LocMemCache(location, {})


def test_computed_values_are_culled_and_locks_are_not(location: str) -> None:
    cache = LocMemCache(location, {"OPTIONS": {"MAX_ENTRIES": 10, "CULL_FREQUENCY": 2}})
    with cache.lock("import") as lock:
        for number in range(30):
            cache.get_or_set(f"key {number}", number)
        assert len(cache.keys("key *")) <= 10
        assert lock.owned()


def test_three_hundred_values_are_kept_as_by_djangos_cache(cache: LocMemCache) -> None:
    cache.set_many({f"key {number}": number for number in range(300)})
    assert len(cache.keys("*")) == 300
    cache.set("one more", 1)
    assert len(cache.keys("*")) == 201


def test_caches_at_one_location_share_their_locks(cache: LocMemCache, location: str) -> None:
    with cache.lock("import"):
        assert not LocMemCache(location, {}).lock("import").acquire(blocking=False)
        assert LocMemCache(f"{location} other", {}).lock("import").acquire(blocking=False)


def test_threads_and_tasks_exclude_each_other(cache: LocMemCache) -> None:
    async def work() -> None:
        async with cache.alock("import") as lock:
            assert lock.fence
            with pytest.raises(LockNotAcquired):
                async with cache.alock("import", blocking_timeout=0.05):
                    pass
            free = await asyncio.to_thread(cache.lock("import", blocking=False).acquire)
            assert not free
        assert await cache.aget_or_set("report", build) == 1

    async def build() -> int:
        return 1

    asyncio.run(work())


@pytest.mark.parametrize(
    "how",
    ["lock", "alock", "set", "delete", "incr", "delete_pattern", "keys", "iter_keys"],
)
def test_a_client_is_refused(cache: LocMemCache, how: str) -> None:
    async def ask() -> Any:
        return cache.alock("import", client=object())

    ways: dict[str, Any] = {
        "lock": lambda: cache.lock("import", client=object()),
        "alock": lambda: asyncio.run(ask()),
        "set": lambda: cache.set("report", 1, client=object()),
        "delete": lambda: cache.delete("report", client=object()),
        "incr": lambda: cache.incr("report", client=object()),
        "delete_pattern": lambda: cache.delete_pattern("*", client=object()),
        "keys": lambda: cache.keys("*", client=object()),
        "iter_keys": lambda: cache.iter_keys("*", client=object()),
    }
    with pytest.raises(ValueError, match="client needs Redis: leave it out"):
        ways[how]()


def test_reset_all_and_locked_get_or_set(cache: LocMemCache) -> None:
    lock = cache.lock("import")
    lock.acquire()
    assert cache.reset_all() == 1
    assert not lock.owned()
    assert cache.locked_get_or_set("report", lambda: 5, lock_key="import") == 5


def test_a_forked_child_begins_without_locks_and_values(cache: LocMemCache) -> None:
    cache.set("report", 1)
    with cache.lock("import", timeout=60) as lock:
        child = os.fork()
        if not child:
            is_free = cache.lock("import").acquire(blocking=False)
            os._exit(0 if is_free and cache.get("report") is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lock.owned()


def test_a_child_that_is_forked_while_a_thread_uses_the_cache_does_not_hang(
    cache: LocMemCache,
) -> None:
    """redis-py 8 takes the mutex of the pool to empty that in the child."""
    pool = cache._lock_client().connection_pool
    taken, forked = threading.Event(), threading.Event()

    def use() -> None:
        with pool._lock:
            taken.set()
            forked.wait()

    thread = threading.Thread(target=use)
    thread.start()
    taken.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        os._exit(0 if cache.get("report") is None else 1)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- beside Redis -------------------------------------------------------------------------------


KEYS = ("a", "b", "x:1", "br[ack]", "st*r", "back\\slash", "ü", "a\nb", "")
VALUES = (None, 0, -7, True, 1.5, "5", " 7", "", b"bytes", [1], 2**63, -(10**30))
TIMEOUTS = (None, 0, -5, 1000, 2000.5, 0.0004)
PATTERNS = (
    "*",
    "?",
    "a*",
    "[ab]",
    "[^a]",
    "[b-a]",
    "br[[]*",
    "st\\*r",
    "[",
    "[\\d]",
    "a[^]b",
    "\\",
)
DELTAS = (1, -3, 0, 0.5, 2**64)


def a_call(rng: random.Random) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A method, and its arguments."""
    key, value = rng.choice(KEYS), rng.choice(VALUES)
    some = rng.sample(KEYS, rng.randrange(4))
    version = rng.choice(({}, {"version": 1}, {"version": 2}))
    timed = {**version, **rng.choice(({}, {"timeout": rng.choice(TIMEOUTS)}))}
    how = rng.choice(({}, {"nx": True}, {"xx": True}, {"nx": True, "xx": True}))
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "set": ((key, value), {**timed, **how}),
        "add": ((key, value), timed),
        "get_or_set": ((key, value), {**timed, "stale": rng.choice((0, 500, 5000))}),
        "set_many": ((dict.fromkeys(some, value),), timed),
        "touch": ((key,), timed),
        "expire": ((key, rng.choice((0, -1, 900, timedelta(seconds=900)))), version),
        "pexpire": ((key, rng.choice((0, -1, 900_000))), version),
        "expire_at": ((key, rng.choice((0, 10**10, datetime(2200, 1, 1)))), version),
        "pexpire_at": ((key, rng.choice((0, 10**13))), version),
        "mark_stale": ((key,), {**version, "stale": 800}),
        "incr": ((key, rng.choice(DELTAS)), version),
        "decr": ((key, 5), version),
        "incr_version": ((key,), version),
        "keys": ((rng.choice(PATTERNS),), version),
        "delete_pattern": ((rng.choice(PATTERNS),), version),
        "get_many": ((some,), version),
        "delete_many": (([*some, *some[:1]],), version),
        **dict.fromkeys(("get", "has_key", "ttl", "persist", "delete"), ((key,), version)),
    }
    name = rng.choice([*calls, *calls, *calls, "clear"])
    return name, *calls.get(name, ((), {}))


def outcome(cache: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        found = getattr(cache, name)(*args, **options)
    except Exception as error:
        cause = error.__cause__
        return type(error), str(error), type(cause), str(cause)
    return sorted(found) if isinstance(found, list) else about(found)


class Seconds(int):
    """A lifetime, some of which passes between two calls."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seconds) and abs(int(self) - int(other)) < 50

    __hash__ = None


def about(found: Any) -> Any:
    return Seconds(found) if isinstance(found, int) and found > 100 else found


def kept(cache: Any) -> dict[bytes, Any]:
    """The values, with their lifetimes; not the streams of computations, nor figures."""
    client: redis.Redis = cache._lock_client()
    keys = client.keys("*")
    found = zip(keys, client.mget(keys) if keys else (), strict=True)
    return {key: (value, about(client.ttl(key))) for key, value in found if value is not None}


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(12))
def test_random_calls_do_the_same_in_memory(
    redis_server: RedisServer, location: str, seed: int
) -> None:
    rng = random.Random(seed)
    options = {"KEY_PREFIX": rng.choice(("", "p", "[x]"))}
    caches = RedisCache(redis_server.url, dict(options)), LocMemCache(location, dict(options))
    for _ in range(100):
        call = a_call(rng)
        on_redis, in_memory = (outcome(cache, *call) for cache in caches)
        assert in_memory == on_redis, call
        assert kept(caches[1]) == kept(caches[0]), call


#: Numbers that Redis does not have: the text "5" is repeated a thousand times by django-redis.
ABSURD: dict[str, Any] = {
    "set": lambda cache, number: cache.set("a", "absurd", number),
    "set, xx": lambda cache, number: cache.set("a", "absurd", number, xx=True),
    "add": lambda cache, number: cache.add("a", "absurd", number),
    "set_many": lambda cache, number: cache.set_many({"a": "absurd", "b": "absurd"}, number),
    "touch": lambda cache, number: cache.touch("a", number),
    "expire": lambda cache, number: cache.expire("b", number),
    "pexpire": lambda cache, number: cache.pexpire("b", number),
    "pexpire_at": lambda cache, number: cache.pexpire_at("a", number),
    "pexpire_at, set": lambda cache, number: cache.pexpire_at("b", number),
}


@pytest.mark.parametrize(
    ("name", "number"),
    # Of the methods that expire, redis-py sends the text 5, which is a number for Redis.
    [(name, n) for name in ABSURD for n in (10**30, "5") if n != "5" or "pire" not in name],
)
def test_what_redis_refuses_is_refused_in_memory(
    redis_server: RedisServer, location: str, name: str, number: Any
) -> None:
    """And the next call gets its own reply."""
    raised = []
    for cache in RedisCache(redis_server.url, {}), LocMemCache(location, {}):
        cache.set("b", 1)
        cache.delete("a")
        with pytest.raises(Exception) as caught:  # noqa: PT011  # compared below
            ABSURD[name](cache, number)
        raised.append(caught.type)
        assert cache.get_many(["a", "b", "c"]) == {"b": 1}
        assert cache.incr("b") == 2
        cache.clear()
    assert raised[0] is raised[1]
