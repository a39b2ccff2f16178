"""The locks in memory: the clock, the faults, and the override. No Redis runs here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redis_lock import (
    AsyncLock,
    Lock,
    LockLost,
    LockNotOwnedError,
    Redlock,
    TooFewServers,
)
from django_redis_lock.fallback.locks import FallbackLock
from django_redis_lock.testing import MemoryLock, MemoryServer, VirtualClock, override

#: Nothing listens there: whoever asks Redis fails, and at once.
NOWHERE = redis.Redis(port=1, retry=Retry(NoBackoff(), 0))


def server() -> MemoryServer:
    return MemoryServer(VirtualClock())


def test_a_wait_moves_the_virtual_clock_to_the_end_of_the_holder() -> None:
    memory = server()
    first, second = (MemoryLock(memory, "report", timeout=10) for _ in range(2))
    assert first.acquire()
    began = memory.clock()
    assert second.acquire()
    assert memory.clock() - began == 10
    assert first.lost
    assert second.owned()


def test_a_wait_that_cannot_end_is_refused() -> None:
    memory = server()
    assert MemoryLock(memory, "report").acquire()
    with pytest.raises(AssertionError, match="never end"):
        MemoryLock(memory, "report").acquire()


def test_a_wait_ends_at_its_deadline() -> None:
    memory = server()
    assert MemoryLock(memory, "report", timeout=10).acquire()
    began = memory.clock()
    assert not MemoryLock(memory, "report").acquire(blocking_timeout=3)
    assert memory.clock() - began == 3


def test_what_is_renewed_does_not_run_out() -> None:
    memory = server()
    lock = MemoryLock(memory, "report", timeout=10, renew=True)
    assert lock.acquire()
    memory.clock.advance(1000)
    assert lock.owned()
    lock.ensure_held()


def test_max_hold_ends_the_renewal() -> None:
    memory = server()
    lock = MemoryLock(memory, "report", timeout=10, renew=True, max_hold=60)
    assert lock.acquire()
    memory.clock.advance(59)
    assert lock.owned()
    memory.clock.advance(1)
    assert lock.lost
    assert not lock.owned()


def test_min_hold_keeps_it_taken() -> None:
    memory = server()
    with MemoryLock(memory, "nightly", timeout=10, min_hold=5):
        memory.clock.advance(2)
    assert memory.held() == ["nightly"]
    memory.clock.advance(3)
    assert memory.held() == []


def test_a_lock_can_be_lost_at_will() -> None:
    memory = server()
    told = []
    lock = MemoryLock(memory, "report", timeout=10, on_lost=lambda: told.append("lost"))
    assert lock.acquire()
    memory.lose("report")
    assert told == ["lost"]
    with pytest.raises(LockLost):
        lock.ensure_held()
    with pytest.raises(LockNotOwnedError):
        lock.release()


def test_the_server_can_be_away() -> None:
    memory = server()
    lock = MemoryLock(memory, "report", timeout=10)
    assert lock.acquire()
    memory.away = True
    with pytest.raises(redis.exceptions.ConnectionError):
        lock.release()
    with pytest.raises(redis.exceptions.ConnectionError):
        MemoryLock(memory, "other").acquire()
    memory.away = False
    lock.release()


def test_what_is_not_held_cannot_be_lost() -> None:
    memory = server()
    assert MemoryLock(memory, ":1:lock:report", timeout=10).acquire()
    with pytest.raises(KeyError, match=r"held are: \[':1:lock:report'\]"):
        memory.lose("report")


def test_fences_increase_on_a_clock_that_stands_still() -> None:
    memory = server()
    fences = []
    for _ in range(3):
        with MemoryLock(memory, "report", timeout=10) as lock:
            fences.append(lock.fence)
    assert fences == sorted(set(fences))


def test_override_takes_locks_made_anywhere() -> None:
    with override() as memory:
        with NOWHERE.lock("report", timeout=5, lock_class=Lock) as lock:
            assert memory.held() == ["report"]
            assert lock.holder() is not None
            assert not Lock(NOWHERE, "report", timeout=5).acquire(blocking=False)
        assert memory.held() == []
    with pytest.raises(redis.exceptions.ConnectionError):
        Lock(NOWHERE, "report", timeout=5).acquire()


def test_override_takes_locks_of_tasks_too() -> None:
    async def work() -> None:
        nowhere = redis.asyncio.Redis(port=1)
        async with AsyncLock(nowhere, "report", timeout=5) as lock:
            assert memory.held() == ["report"]
            assert await lock.owned()
            other = AsyncLock(nowhere, "report", timeout=5)
            assert not await other.acquire(blocking_timeout=2)
            assert await other.acquire(blocking_timeout=10)
            assert lock.lost

    with override() as memory, pytest.raises(LockNotOwnedError):
        asyncio.run(work())


def test_override_takes_a_given_server() -> None:
    mine = server()
    with override(mine) as memory:
        assert memory is mine


def test_override_takes_locks_on_several_servers() -> None:
    nowhere = [redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) for port in (1, 2, 3)]
    with override() as memory:
        with Redlock(nowhere, "report", timeout=5) as lock:
            assert memory.held() == ["report"]
            assert lock.owned()
            assert not Redlock(nowhere, "report", timeout=5).acquire(blocking=False)
        assert memory.held() == []
    with pytest.raises(TooFewServers):
        Redlock(nowhere, "report", timeout=5).acquire()


def test_override_asks_no_replicas() -> None:
    async def work() -> None:
        async with AsyncLock(redis.asyncio.Redis(port=1), "report", timeout=5, replicas=2) as lock:
            assert await lock.owned()

    with override():
        with Lock(NOWHERE, "report", timeout=5, replicas=2) as lock:
            assert lock.owned()
        asyncio.run(work())


@pytest.mark.parametrize("away", [False, True])
def test_override_stays_away_from_the_locks_of_this_host(tmp_path: Path, away: bool) -> None:
    """Else tests that run beside each other would take each other's."""

    def lock() -> Lock:
        options: dict[str, Any] = {"on_redis_down": "local", "local_folder": tmp_path}
        return FallbackLock(NOWHERE, "report", timeout=5, blocking=False, **options)

    with override() as one:
        one.away = away
        held = lock()
        assert held.acquire()
        with override() as other:
            other.away = away
            with lock():
                pass
        assert not lock().acquire()
        held.release()
