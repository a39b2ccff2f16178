"""The locks in memory: the clock, the faults, and the override. No Redis runs here."""

from __future__ import annotations

import asyncio
import math
import threading
import time as real
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.cache import caches
from django.template import Context, Template
from django.test import override_settings
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redis_lock import (
    AsyncLock,
    Lock,
    LockLost,
    LockNotAcquired,
    LockNotOwnedError,
    Redlock,
    TooFewServers,
)
from django_redis_lock.contrib import metrics
from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.contrib.testing import MemoryServer, VirtualClock, override
from django_redis_lock.decorators import cached, locked
from django_redis_lock.keeper import Keeper, keeper
from tests.processes import PATIENCE, Link, in_threads, processes, until
from tests.support.python import python

#: Nothing listens there: whoever asks Redis fails, and at once.
NOWHERE = redis.Redis(port=1, retry=Retry(NoBackoff(), 0))


@pytest.fixture
def memory() -> Iterator[MemoryServer]:
    with override() as server:
        yield server


def lock_of(name: str, **options: Any) -> Lock:
    return Lock(NOWHERE, name, **options)


def test_a_wait_moves_the_virtual_clock_to_the_end_of_the_holder(memory: MemoryServer) -> None:
    first, second = (lock_of("report", timeout=10) for _ in range(2))
    assert first.acquire()
    began = memory.clock()
    assert second.acquire()
    assert memory.clock() - began == 10
    assert first.lost
    assert second.owned()


def test_a_wait_that_cannot_end_is_refused(memory: MemoryServer) -> None:
    holder = lock_of("report", thread_local=False)  # Another thread could release it.
    assert holder.acquire()
    with pytest.raises(AssertionError, match="never end"):
        lock_of("report").acquire()


def test_a_task_whose_wait_cannot_end_is_refused(memory: MemoryServer) -> None:
    async def wait() -> None:
        lock = AsyncLock(redis.asyncio.Redis(port=1), "report", thread_local=False)
        assert await lock.acquire()
        await AsyncLock(redis.asyncio.Redis(port=1), "report").acquire()

    with pytest.raises(AssertionError, match="never end"):
        asyncio.run(wait())


def test_a_wait_ends_at_its_deadline(memory: MemoryServer) -> None:
    assert lock_of("report", timeout=10).acquire()
    began = memory.clock()
    assert not lock_of("report").acquire(blocking_timeout=3)
    assert memory.clock() - began == 3


def test_what_is_renewed_runs_out_only_at_its_max_hold(memory: MemoryServer) -> None:
    endless = lock_of("endless", timeout=10, renew=True)
    assert endless.acquire()
    memory.clock.advance(1000)
    assert endless.owned()
    endless.ensure_held()
    lock = lock_of("report", timeout=10, renew=True, max_hold=60)
    assert lock.acquire()
    memory.clock.advance(59)
    assert lock.owned()
    memory.clock.advance(1.01)  # Servers count in whole milliseconds.
    assert lock.lost
    assert not lock.owned()


def test_min_hold_keeps_it_taken(memory: MemoryServer) -> None:
    with lock_of("nightly", timeout=10, min_hold=5):
        memory.clock.advance(2)
    assert memory.held() == ["nightly"]
    memory.clock.advance(3)
    assert memory.held() == []


def test_a_lock_can_be_lost_at_will(memory: MemoryServer) -> None:
    told = []
    lock = lock_of("report", timeout=10, on_lost=lambda: told.append("lost"))
    assert lock.acquire()
    memory.lose("report")
    until(lambda: told == ["lost"])  # In a thread of its own.
    with pytest.raises(LockLost):
        lock.ensure_held()
    with pytest.raises(LockNotOwnedError):
        lock.release()


def test_the_server_can_be_away(memory: MemoryServer) -> None:
    lock = lock_of("report", timeout=10)
    assert lock.acquire()
    memory.away = True
    with pytest.raises(redis.exceptions.ConnectionError):
        lock.release()
    with pytest.raises(redis.exceptions.ConnectionError):
        lock_of("other").acquire()
    memory.away = False
    lock.release()


def test_what_is_not_held_cannot_be_lost(memory: MemoryServer) -> None:
    assert lock_of(":lock:1:report", timeout=10).acquire()
    with pytest.raises(KeyError, match=r"held are: \[':lock:1:report'\]"):
        memory.lose("report")


def test_fences_increase_on_a_clock_that_stands_still(memory: MemoryServer) -> None:
    fences = []
    for _ in range(3):
        with lock_of("report", timeout=10) as lock:
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


@pytest.mark.parametrize("away", [False, True])
def test_override_stays_away_from_the_locks_of_this_host(tmp_path: Path, away: bool) -> None:
    """Else tests that run beside each other would take each other's."""

    def lock() -> Lock:
        options: dict[str, Any] = {"on_redis_down": "local", "local_folder": tmp_path}
        return Lock(NOWHERE, "report", timeout=5, blocking=False, **options)

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


def acquire_locally(link: Link, folder: str) -> None:
    with override() as server:
        server.away = True
        lock = lock_of("report", on_redis_down="local", local_folder=folder, blocking=False)
        link.say(lock.acquire())
        link.hear()


def test_override_stays_away_from_the_locks_of_other_processes(tmp_path: Path) -> None:
    """Else the processes of pytest-xdist would take each other's."""
    with processes(acquire_locally, str(tmp_path), count=2) as crew:
        crew.go()
        assert [worker.hear() for worker in crew] == [True, True]


def test_a_lock_from_before_the_override_is_not_lost_by_its_clock() -> None:
    lock = Lock(client_of(Database("real")), "report", timeout=60, renew=True)
    with lock:
        with override():
            assert not lock.lost
        lock.ensure_held()


@pytest.mark.parametrize("server", [None, MemoryServer(), MemoryServer(VirtualClock())])
def test_override_leaves_nothing_to_do(server: MemoryServer | None) -> None:
    metrics.flush()
    before = keeper().jobs()
    with override(server) as memory:
        assert server in (None, memory)
        held = lock_of("report")
        assert held.acquire()
        for _ in range(3):
            with lock_of("prices"):
                pass
            assert caches["default"].get_or_set("report", lambda: 5, 60) == 5
        inside = keeper()
        assert inside.jobs()
    assert type(inside) is not Keeper or not inside.jobs()
    metrics.flush()
    assert set(keeper().jobs()) <= set(before)


# -- several threads and tasks --------------------------------------------------------------------


def test_threads_wait_in_real_time_for_a_holder_that_works(memory: MemoryServer) -> None:
    def work() -> bool:
        with lock_of("report", timeout=10, blocking_timeout=30):
            real.sleep(0.1)
        return True

    began = memory.clock()
    assert in_threads(3, work) == [True] * 3
    assert memory.clock() == began


def test_threads_pass_a_lock_on_while_the_clock_stands_still(memory: MemoryServer) -> None:
    def work() -> bool:
        for _ in range(20):
            with lock_of("report", timeout=1, blocking_timeout=5):
                pass
        return True

    began = memory.clock()
    assert in_threads(4, work) == [True] * 4
    assert memory.clock() == began


def test_tasks_pass_a_lock_on_while_the_clock_stands_still(memory: MemoryServer) -> None:
    async def work() -> None:
        for _ in range(20):
            async with AsyncLock(redis.asyncio.Redis(port=1), "report", 1, blocking_timeout=5):
                await asyncio.sleep(0)

    async def several() -> None:
        await asyncio.gather(*(work() for _ in range(4)))

    began = memory.clock()
    asyncio.run(several())
    assert memory.clock() == began


def test_threads_wait_in_real_time_for_a_redlock(memory: MemoryServer) -> None:
    nowhere = [redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) for port in (1, 2, 3)]

    def work() -> bool:
        with Redlock(nowhere, "report", timeout=10, blocking_timeout=5):
            real.sleep(0.1)
        return True

    assert in_threads(3, work) == [True] * 3


def test_tasks_wait_in_real_time_for_a_holder_that_works(memory: MemoryServer) -> None:
    async def work() -> bool:
        nowhere = redis.asyncio.Redis(port=1)
        async with AsyncLock(nowhere, "report", timeout=10, blocking_timeout=30):
            await asyncio.sleep(0.1)
        return True

    async def several() -> list[bool]:
        return await asyncio.gather(*(work() for _ in range(3)))

    began = memory.clock()
    assert asyncio.run(several()) == [True] * 3
    assert memory.clock() == began


def test_a_value_is_computed_once_for_tasks(memory: MemoryServer) -> None:
    computed: list[int] = []

    async def build() -> int:
        computed.append(1)
        await asyncio.sleep(0.1)
        return 5

    async def several() -> list[int]:
        cache: Any = caches["default"]
        return await asyncio.gather(*(cache.aget_or_set("report", build, 60) for _ in range(3)))

    assert asyncio.run(several()) == [5] * 3
    assert len(computed) == 1


def test_a_holder_has_so_much_real_time(memory: MemoryServer) -> None:
    memory.clock.real_wait = 0.05
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock_of("report"):
            held.set()
            done.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(PATIENCE)
    assert not lock_of("report").acquire(blocking_timeout=300)
    done.set()
    thread.join()


@pytest.mark.parametrize(
    "run", [lambda wait: asyncio.run(wait()), lambda wait: async_to_sync(wait)()]
)
def test_a_wait_jumps_where_the_holder_waits_for_it(memory: MemoryServer, run: Any) -> None:
    memory.clock.real_wait = math.inf

    async def wait() -> bool:
        lock = AsyncLock(redis.asyncio.Redis(port=1), "report", timeout=5)
        return await lock.acquire(blocking_timeout=300)

    with lock_of("report"):
        assert not run(wait)


def test_a_wait_jumps_where_the_holder_has_ended(memory: MemoryServer) -> None:
    memory.clock.real_wait = math.inf
    abandoned = lock_of("report", thread_local=False)
    assert in_threads(1, abandoned.acquire) == [True]
    assert not lock_of("report").acquire(blocking_timeout=300)


def test_waits_end_in_the_order_of_their_ends(memory: MemoryServer) -> None:
    memory.clock.real_wait = math.inf
    held = threading.Event()

    def hold() -> bool:
        with lock_of("report"):
            held.set()
            return lock_of("prices").acquire(blocking_timeout=3)

    with lock_of("prices"), ThreadPoolExecutor() as pool:
        refused = pool.submit(hold)
        held.wait(PATIENCE)
        assert lock_of("report").acquire(blocking_timeout=10)
        assert not refused.result()


# -- caches ------------------------------------------------------------------------------------

BACKENDS = (
    "django.core.cache.backends.dummy.DummyCache",
    "django.core.cache.backends.locmem.LocMemCache",
    "django_redis_lock.cache.RedisCache",
)


@pytest.fixture(params=BACKENDS)
def elsewhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """CACHES as a project may have them where there is no Redis."""
    kept = {"BACKEND": request.param, "LOCATION": "redis://127.0.0.1:1", "KEY_PREFIX": "site"}
    with override_settings(CACHES={"default": kept}):
        yield


@cached("square-{number}", timeout=60)
def square(number: int) -> int:
    calls.append(number)
    return number * number


@cached("cube-{number}", timeout=60)
async def cube(number: int) -> int:
    calls.append(number)
    return number**3


@locked("import", timeout=5)
def import_prices() -> str:
    return "imported"


calls: list[int] = []


@pytest.mark.usefixtures("elsewhere")
def test_override_is_for_caches_of_any_backend() -> None:
    before = caches["default"]
    page = Template("{% load redis_lock %}{% cached 60 page %}{{ number }}{% endcached %}")
    calls.clear()
    with override() as memory:
        assert [square(3), square(3)] == [9, 9]
        assert [asyncio.run(cube(2)), asyncio.run(cube(2))] == [8, 8]
        assert calls == [3, 2]
        assert [page.render(Context({"number": n})) for n in (1, 2)] == ["1", "1"]
        assert caches["default"].get("square-%(int)3") == 9
        memory.clock.advance(61)
        assert square(3) == 9
        assert calls == [3, 2, 3]
        with caches["default"].lock("import"):
            assert memory.held() == ["site:lock:1:import"]
            with pytest.raises(LockNotAcquired):
                import_prices()
        assert import_prices() == "imported"
        memory.away = True
        with pytest.raises(redis.exceptions.ConnectionError):
            caches["default"].get("square-%(int)3")
        assert square(5) == 25
        with pytest.raises(redis.exceptions.ConnectionError):
            import_prices()
    assert type(caches["default"]) is type(before)
    with override():
        assert caches["default"].get("square-%(int)3") is None


def test_override_keeps_how_a_project_makes_keys() -> None:
    made = {
        "KEY_FUNCTION": "tests.unit.test_testing.make_key",
        "REVERSE_KEY_FUNCTION": "tests.unit.test_testing.key_of",
    }
    kept = {"BACKEND": "django_redis_lock.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1"}
    with override_settings(CACHES={"default": {**kept, **made}}), override():
        cache: Any = caches["default"]
        cache.set("report", 1)
        assert cache.keys("rep*") == ["report"]


def make_key(key: str, prefix: str, version: int) -> str:
    return f"shop/{key}"


def key_of(made: str) -> str:
    return made.removeprefix("shop/")


def test_override_computes_once_for_threads() -> None:
    with override():
        computed: list[int] = []

        def build() -> int:
            computed.append(1)
            real.sleep(0.1)
            return 5

        ask = partial(caches["default"].get_or_set, "report", build, 60)
        assert in_threads(20, ask) == [5] * 20
        assert len(computed) == 1


def test_override_serves_stale_values_when_the_time_has_come() -> None:
    with override() as memory:
        cache: Any = caches["default"]
        assert cache.get_or_set("report", lambda: "old", 60, stale=600) == "old"
        memory.clock.advance(59)
        assert cache.get_or_set("report", lambda: "new", 60, stale=600) == "old"
        memory.clock.advance(2)
        assert cache.get_or_set("report", lambda: "new", 60, stale=600) == "new"
        memory.clock.advance(661)
        assert cache.get("report") is None


def test_override_as_a_decorator_of_a_coroutine_function() -> None:
    @override()
    async def work() -> bool:
        return await AsyncLock(redis.asyncio.Redis(port=1), "report", timeout=5).acquire()

    assert asyncio.run(work())


@override()
class TestDecorated(unittest.TestCase):
    def test_first(self) -> None:
        assert Lock(NOWHERE, "report", timeout=5).acquire(blocking=False)

    def test_second(self) -> None:
        """The first test's lock is not here."""
        assert Lock(NOWHERE, "report", timeout=5).acquire(blocking=False)


@pytest.mark.parametrize("decorated", [TestDecorated, import_prices])
def test_override_as_a_decorator_needs_its_parentheses(decorated: Any) -> None:
    """Else the tests of a class would vanish: what took its place would be no class."""
    with pytest.raises(TypeError, match=r"write @override\(\)"):
        override(decorated)


def test_the_plugin_costs_nothing_where_it_is_not_used() -> None:
    code = """
import sys
import pytest
before = set(sys.modules)
import django_redis_lock_pytest
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert new == {"django_redis_lock_pytest"}, new
"""
    python("-c", code)


# -- CACHES changes within the override ------------------------------------------------------------


def _unused(alias: str = "default", backend: str = BACKENDS[2]) -> dict[str, Any]:
    return {alias: {"BACKEND": backend, "LOCATION": "redis://127.0.0.1:1", "KEY_PREFIX": "other"}}


def in_memory(memory: MemoryServer, prefix: str) -> None:
    """Whether values and locks of the default cache are in ``memory``."""
    square.invalidate(4)
    calls.clear()
    assert [square(4), square(4)] == [16, 16]
    assert calls == [4]
    with caches["default"].lock("import"):
        assert memory.held() == [f"{prefix}:lock:1:import"]
        with pytest.raises(LockNotAcquired):
            import_prices()
    memory.away = True
    with pytest.raises(redis.exceptions.ConnectionError):
        caches["default"].get("square-%(int)4")
    memory.away = False


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("backend", BACKENDS)
def test_override_follows_override_settings(backend: str) -> None:
    before, kind = settings.CACHES, type(caches["default"])
    with override() as memory:
        in_memory(memory, "site")
        with override_settings(CACHES={**_unused(backend=backend), **_unused("more")}):
            in_memory(memory, "other")
            with override_settings(CACHES=_unused()), caches["default"].lock("report"):
                assert memory.held() == ["other:lock:1:report"]
            with caches["more"].lock("report"):
                assert memory.held() == ["other:lock:1:report"]
            in_memory_again = type(caches["more"])
        assert in_memory_again is type(caches["default"])
        assert list(settings.CACHES) == ["default"]
        in_memory(memory, "site")
    assert settings.CACHES is before
    assert type(caches["default"]) is kind


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("ends_first", ["the override", "the settings"])
@pytest.mark.parametrize("begins_first", ["the override", "the settings"])
def test_override_follows_the_settings_of_pytest(begins_first: str, ends_first: str) -> None:
    """The fixtures end in another order than CACHES was changed in."""
    before, kind = settings.CACHES, type(caches["default"])
    of_pytest, overriding = override_settings(CACHES=_unused()), override()
    if begins_first == "the override":
        memory = overriding.enable()
        of_pytest.enable()
    else:
        of_pytest.enable()
        memory = overriding.enable()
    in_memory(memory, "other")
    if ends_first == "the override":
        overriding.disable()
        assert _unused() == settings.CACHES
        of_pytest.disable()
    else:
        of_pytest.disable()
        if begins_first == "the override":
            in_memory(memory, "site")
        overriding.disable()
    assert settings.CACHES is before
    assert type(caches["default"]) is kind


@override()
@override_settings(CACHES=_unused(backend=BACKENDS[0]))
def test_override_follows_a_decorator() -> None:
    assert import_prices() == "imported"
