"""``LocMemCache`` where the suites of both backends do not look: Django's storage, what it refuses,
and locks on it. No Redis is asked here."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.core.cache.backends.locmem import LocMemCache as DjangoLocMemCache

from django_redis_lock import LockNotAcquired
from django_redis_lock.cache import LocMemCache
from tests.processes import in_threads


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


def test_values_are_those_of_djangos_cache_at_the_same_location(
    cache: LocMemCache, location: str
) -> None:
    theirs = DjangoLocMemCache(location, {})
    cache.get_or_set("report", "ours", 60)
    assert theirs.get("report") == "ours"
    theirs.set("report", "theirs")
    assert cache.get_or_set("report", "ours", 60) == "theirs"


def test_computed_values_are_culled_and_locks_are_not(location: str) -> None:
    cache = LocMemCache(location, {"OPTIONS": {"MAX_ENTRIES": 10, "CULL_FREQUENCY": 2}})
    with cache.lock("import") as lock:
        for number in range(30):
            cache.get_or_set(f"key {number}", number)
        assert len(cache.keys("*")) <= 10
        assert lock.owned()


def test_clear_keeps_locks_and_ends_computations(cache: LocMemCache) -> None:
    with cache.lock("import") as lock:

        def build() -> int:
            cache.clear()
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


@pytest.mark.parametrize("how", ["lock", "alock", "set"])
def test_a_client_is_refused(cache: LocMemCache, how: str) -> None:
    async def ask() -> Any:
        return cache.alock("import", client=object())

    ways: dict[str, Any] = {
        "lock": lambda: cache.lock("import", client=object()),
        "alock": lambda: asyncio.run(ask()),
        "set": lambda: cache.set("report", 1, client=object()),
    }
    with pytest.raises(ValueError, match="client needs Redis: leave it out"):
        ways[how]()


def test_replicas_need_none_here(cache: LocMemCache) -> None:
    """No server outlives the process that holds its locks, so all there are have confirmed it."""
    with cache.lock("import", replicas=2) as lock:
        assert lock.owned()


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
    assert cache.ttl("report") == 20
    assert cache.pexpire_at("report", (time.time() + 10) * 1000)
    assert cache.ttl("report") == 10
    cache.set("repair", 1, version=2)
    assert cache.keys("rep*") == ["report"]
    assert list(cache.iter_keys("rep*", version=2)) == ["repair"]
    assert cache.delete_pattern("rep*") == 1
    assert cache.get("report") is None
    with pytest.raises(ValueError, match="exclusive"):
        cache.set("report", 1, nx=True, xx=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_separate_locks(cache: LocMemCache) -> None:
    with cache.lock("import", timeout=60) as lock:
        child = os.fork()
        if not child:
            os._exit(0 if cache.lock("import").acquire(blocking=False) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lock.owned()
