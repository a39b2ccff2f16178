"""``LocMemCache`` where the suites of both backends do not look: how many values it keeps, what it
refuses, and locks on it. No Redis is asked here."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from redis.exceptions import DataError

from django_redis_lock import LockNotAcquired
from django_redis_lock.cache import LocMemCache
from tests.processes import in_threads
from tests.support.background import elsewhere


@pytest.fixture
def cache(location: str) -> LocMemCache:
    return LocMemCache(location, {})


def test_a_value_is_computed_once_for_fifty_threads(cache: LocMemCache) -> None:
    calls = []

    def build() -> str:
        calls.append(threading.get_ident())
        time.sleep(0.1)
        return "computed"

    assert in_threads(50, lambda: cache.get_or_set("report", build, 60)) == ["computed"] * 50
    assert len(calls) == 1


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


def test_what_cannot_be_pickled_is_refused(cache: LocMemCache) -> None:
    for store in (cache.set, cache.add, cache.get_or_set):
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
            store("report", threading.Lock())
    assert cache.get("report") is None


def test_clear_keeps_locks_and_ends_computations(cache: LocMemCache) -> None:
    with cache.lock("import") as lock:

        def build() -> int:
            elsewhere(cache.clear)
            return 1

        assert cache.get_or_set("report", build) == 1
        assert cache.get("report") is None
        assert lock.owned()
        assert [held.name for held in cache.held_locks().locks] == ["import"]


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


def test_the_names_of_django_redis(cache: LocMemCache) -> None:
    assert cache.ttl("report") == 0
    assert cache.set("report", 1, 100, nx=True)
    assert not cache.set("report", 2, nx=True)
    assert not cache.set("other", 2, xx=True)
    assert cache.ttl("report") == 100
    assert 99_000 < (cache.pttl("report") or 0) <= 100_000
    assert cache.persist("report")
    assert not cache.persist("nothing")
    assert cache.ttl("report") is None
    assert cache.expire("report", timedelta(seconds=50))
    assert cache.ttl("report") == 50
    assert cache.pexpire("report", 30_000)
    assert cache.ttl("report") == 30
    assert cache.expire_at("report", datetime.now(timezone.utc) + timedelta(seconds=20))
    assert cache.ttl("report") in (19, 20)  # Redis ends it in whole seconds.
    assert cache.pexpire_at("report", (time.time() + 10) * 1000)
    assert cache.ttl("report") == 10
    cache.set("repair", 1, version=2)
    assert cache.keys("rep*") == ["report"]
    assert list(cache.iter_keys("rep*", version=2)) == ["repair"]
    assert cache.delete_pattern("rep*") == 1
    assert cache.get("report") is None
    with pytest.raises(DataError, match="exclusive"):
        cache.set("report", 1, nx=True, xx=True)


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
