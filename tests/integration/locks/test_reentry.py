"""``reentrant=True``: who holds a lock takes it again."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from django.core.cache import caches

from django_redis_lock import (
    AsyncLock,
    Lock,
    LockError,
    LockLost,
    LockNotAcquired,
    LockNotOwnedError,
    Redlock,
    locked,
)
from django_redis_lock.threads import Process
from tests.holding import hurry
from tests.lock_contract import LockContract
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.backends import Backend, OnRedis
from tests.support.background import elsewhere
from tests.support.tasks import ForThreads, InTasks, Tasks, connected, in_this_loop

# -- the contract: for all who are not inside, it is a lock as any other ---------------------------


class OfAnotherCaller:
    """A handle whose methods run in a thread that nothing else runs in, one for each caller."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._mine = threading.local()

    def _do(self, work: Callable[[], Any]) -> Any:
        if not hasattr(self._mine, "thread"):
            self._mine.thread = ThreadPoolExecutor(max_workers=1)
        return self._mine.thread.submit(work).result()

    def __getattr__(self, name: str) -> Any:
        if name == "local":
            return self._do(lambda: type("Seen", (), {"token": self._lock.local.token}))
        value = self._do(lambda: getattr(self._lock, name))
        if not callable(value):
            return value
        return lambda *args, **options: self._do(lambda: value(*args, **options))

    def __enter__(self) -> OfAnotherCaller:
        assert self._do(self._lock.__enter__) is self._lock
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._do(lambda: self._lock.__exit__(*exc_info))


class ByOtherCallers(OnRedis):
    def make_lock(self, name: str | bytes = "contract", **options: Any) -> Any:
        if "id" in options:  # A token names no thread.
            return super().make_lock(name, **options)
        return OfAnotherCaller(super().make_lock(name, reentrant=True, **options))


class ContractForOthers(LockContract):
    # Each handle has a caller of its own; who is inside goes in again; no token can be chosen.
    test_taking_it_twice_does_not_lose_it = None
    test_it_does_not_wait_for_itself_forever = None
    test_nor_does_another_handle_of_its_caller = None
    test_a_wait_for_oneself_is_logged = None
    test_a_token_can_be_chosen = None
    test_the_same_token_is_not_the_same_holder = None


@pytest.mark.sample(7, 1)
class TestForOthers(ContractForOthers):
    @pytest.fixture
    def backend(self, client: redis.Redis) -> Backend:
        return ByOtherCallers(client)


class ByOtherTasks(InTasks):
    def make_lock(self, name: str | bytes = "contract", **options: Any) -> Any:
        if "id" in options:
            return super().make_lock(name, **options)
        of_its_own = copy.copy(self._tasks)
        of_its_own._mine = threading.local()
        return ForThreads(
            of_its_own, AsyncLock(self._async_client, name, reentrant=True, **options)
        )


@pytest.mark.sample(7, 2)
class TestForOtherTasks(ContractForOthers):
    @pytest.fixture
    def backend(self, client: redis.Redis) -> Iterator[Backend]:
        tasks = Tasks()
        async_client = tasks.do(lambda: in_this_loop(client))
        yield ByOtherTasks(client, async_client, tasks)
        tasks.do(async_client.connection_pool.disconnect)
        tasks.close()


# -- who is inside goes in again -------------------------------------------------------------------


@pytest.fixture(params=["Lock", "with a fallback", "Redlock"])
def make(
    request: pytest.FixtureRequest, any_client: redis.Redis, tmp_path: Any
) -> Callable[..., Any]:
    """Makes reentrant handles of one lock."""

    def make(name: str = "inside", **options: Any) -> Any:
        options = {"timeout": 60, "reentrant": True, **options}
        if request.param == "Redlock":
            return Redlock(request.getfixturevalue("three"), name, **options)
        if request.param == "with a fallback":
            options |= {"on_redis_down": "local", "local_folder": tmp_path}
            return Lock(any_client, name, **options)
        return Lock(any_client, name, **options)

    return make


@pytest.fixture(scope="module")
def three_servers() -> Iterator[list[RedisServer]]:
    with RedisServer() as one, RedisServer() as two, RedisServer() as three:
        yield [one, two, three]


@pytest.fixture
def three(three_servers: list[RedisServer]) -> list[redis.Redis]:
    clients = [server.client() for server in three_servers]
    for client in clients:
        client.flushdb()
    return clients


class Calls:
    """Counts what is asked of Redis by these handles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for kind, name in ((Lock, "_run"), (Redlock, "_run"), (Redlock, "_ask_servers")):
            monkeypatch.setattr(kind, name, self._counting(getattr(kind, name)))

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.count += 1
            return method(*args, **options)

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def is_free(make: Callable[..., Any]) -> bool:
    """Whether another thread can have the lock."""

    def take() -> bool:
        other = make()
        if not other.acquire(blocking=False):
            return False
        other.release()
        return True

    return bool(elsewhere(take))


def test_another_handle_goes_in_without_a_round_trip(
    make: Callable[..., Any], calls: Calls
) -> None:
    with make() as outer:
        before = calls.count
        inner = make(timeout=None)
        with inner:
            assert inner.fence == outer.fence
            assert inner.local.token == outer.local.token
            inner.ensure_held()
            assert not inner.lost
        assert calls.count == before
        outer.ensure_held()
        assert not is_free(make)
    assert is_free(make)


def test_both_own_the_one_lock(make: Callable[..., Any]) -> None:
    outer, inner = make(), make(timeout=5)
    with outer, inner:
        assert outer.owned()
        assert inner.owned()
        assert inner.ttl() > 50
        inner.extend(1000)
        assert outer.ttl() > 1000
        inner.reacquire()  # To what the outer asked for.
        assert 50 < inner.ttl() <= 60


@pytest.mark.parametrize("lifetime", [{}, {"renew": True}, {"timeout": None}])
def test_the_same_handle_goes_in_again(make: Callable[..., Any], lifetime: dict[str, Any]) -> None:
    lock = make(**lifetime)
    with lock:
        with lock, lock:
            assert lock.acquire(blocking=False)
            lock.release()
        assert lock.owned()
        assert not is_free(make)
    assert is_free(make)
    with pytest.raises(LockError):
        lock.release()


def test_what_was_left_is_not_held_by_that_handle(make: Callable[..., Any]) -> None:
    outer, inner = make(), make()
    with outer:
        with inner:
            fence = inner.fence
        assert inner.fence == fence
        assert not inner.owned()
        assert not inner.lost
        assert inner.local.token is None
        with pytest.raises(LockLost):
            inner.ensure_held()
        for act in (inner.release, inner.reacquire):
            with pytest.raises(LockError):
                act()
        assert outer.owned()


def test_the_last_to_leave_releases_the_lock_of_the_first(
    make: Callable[..., Any], any_client: redis.Redis
) -> None:
    first, second = make(), make(min_hold=600)
    first.acquire()
    second.acquire()
    first.release()
    with pytest.raises(LockError):
        first.release()
    assert second.owned()
    assert not is_free(make)
    second.release()  # It rests no longer than the first one wanted.
    assert is_free(make)


def test_who_forgot_to_release_does_not_go_in_again(make: Callable[..., Any]) -> None:
    lock = make()
    lock.acquire()
    del lock
    gc.collect()
    assert not make().acquire(blocking=False)


def test_other_threads_are_not_inside(make: Callable[..., Any]) -> None:
    shared = make(thread_local=False)
    with shared, shared:
        assert not elsewhere(shared.acquire, None, False)
        assert not is_free(make)
    assert is_free(make)


def test_only_one_that_is_reentrant_goes_in(make: Callable[..., Any]) -> None:
    with make(), pytest.raises(LockNotAcquired), make(reentrant=False, blocking=False):
        pass
    with make(reentrant=False), pytest.raises(LockNotAcquired), make(blocking=False):
        pass


def test_other_names_are_other_locks(make: Callable[..., Any]) -> None:
    with make("one"), make("two"):
        assert not is_free(lambda: make("two"))
    assert is_free(lambda: make("two"))


def test_tokens_that_are_chosen_are_refused(any_client: redis.Redis) -> None:
    with pytest.raises(ValueError, match="reentrant"):
        Lock(any_client, "chosen", timeout=60, reentrant=True, id="mine")
    with pytest.raises(ValueError, match="reentrant"):
        Lock(any_client, "chosen", timeout=60, reentrant=True).acquire(token="mine")


class TestLoss:
    """What is lost is lost for all that are inside."""

    def test_each_is_told_once(self, make: Callable[..., Any]) -> None:
        told: list[str] = []
        outer = make(on_lost=lambda: told.append("outer"))
        inner = make(on_lost=lambda: told.append("inner"))
        left = make(on_lost=lambda: told.append("left"))

        def lose() -> None:
            assert outer.reset()
            outer.local.hold.lose("a test says so")
            until(lambda: len(told) == 2)
            for lock in (inner, outer):
                assert lock.lost
                with pytest.raises(LockLost):
                    lock.ensure_held()

        def nested() -> None:
            with left:
                pass
            with pytest.raises(LockNotOwnedError), inner, inner:
                lose()

        with pytest.raises(LockNotOwnedError), outer:
            nested()
        assert sorted(told) == ["inner", "outer"]

    def test_who_comes_then_acquires_the_lock_again(self, make: Callable[..., Any]) -> None:
        outer, inner = make(), make()
        outer.acquire()
        fence = outer.fence
        assert outer.reset()
        outer.local.hold.lose("a test says so")
        with inner:
            assert inner.fence > fence
            with pytest.raises(LockNotOwnedError):
                outer.release()
            inner.ensure_held()
        assert is_free(make)


def test_a_forked_child_is_not_inside(make: Callable[..., Any]) -> None:
    outer, inner = make(), make()
    with outer, inner:
        process = outer.local.hold.process
        outer.local.hold.process = inner.local.hold.process = Process(-1)  # As a child sees it.
        assert not make().acquire(blocking=False)
        for lock in (inner, outer):
            with pytest.raises(LockNotOwnedError, match="parent"):
                lock.release()
        outer.local.hold.process = process
    assert is_free(make)


def test_without_redis_too(own_server: RedisServer, tmp_path: Any) -> None:
    def make() -> Lock:
        options: Any = {"on_redis_down": "local", "local_folder": tmp_path, "reentrant": True}
        return Lock(own_server.client(), "away", timeout=60, **options)

    own_server.stop()
    outer, inner = make(), make()
    with outer:
        with inner, inner:
            assert inner.degraded == outer.degraded == "local"
        assert inner.degraded is None
        assert not elsewhere(make().acquire, None, False)
    assert elsewhere(make().acquire, None, False)


# -- asyncio ---------------------------------------------------------------------------------------


def run_with(redis_server: RedisServer, main: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        async with connected(redis_server) as client:
            await main(lambda **o: AsyncLock(client, "task", timeout=60, reentrant=True, **o))

    asyncio.run(run())


class TestTasks:
    def test_a_task_goes_in_again(self, redis_server: RedisServer, client: redis.Redis) -> None:
        async def main(make: Any) -> None:
            async with make() as outer:
                async with make() as inner:
                    assert inner.fence == outer.fence
                    assert await inner.owned()
                assert client.get("task") == outer.local.token
            assert not client.exists("task")

        run_with(redis_server, main)

    def test_its_children_are_not_inside(self, redis_server: RedisServer) -> None:
        """They have a copy of their parent's context."""

        async def child(make: Any) -> bool:
            return await make().acquire(blocking=False)

        async def main(make: Any) -> None:
            async with make(), make():
                children = (child(make) for _ in range(5))
                assert await asyncio.gather(*children) == [False] * 5
                assert not await asyncio.create_task(child(make))
                # But whatever runs a call of this task acts for it.
                assert await asyncio.wait_for(make().acquire(blocking=False), PATIENCE)

        run_with(redis_server, main)

    @pytest.mark.parametrize("outer_too", [True, False])
    def test_a_loss_cancels_the_task_once(
        self, redis_server: RedisServer, client: redis.Redis, outer_too: bool
    ) -> None:
        async def lose(make: Any) -> None:
            outer = make(cancel_on_lost=outer_too, raise_on_release_error=False)
            async with outer:
                async with make(cancel_on_lost=True):
                    pass  # It leaves, and cancels no more.
                async with make(cancel_on_lost=True):
                    outer.local.hold.lose("a test says so")
                    await asyncio.sleep(PATIENCE)

        async def main(make: Any) -> None:
            with pytest.raises(LockLost):
                await lose(make)
            await asyncio.sleep(0)  # Not cancelled any more.

        run_with(redis_server, main)


# -- locked() --------------------------------------------------------------------------------------


@pytest.fixture
def cache() -> Any:
    return caches["default"]


def outer_function(name: str, **options: Any) -> Callable[[], Any]:
    @locked(name, reentrant=True, **options)
    def inner() -> str:
        return "inside"

    @locked(name, reentrant=True)
    def outer() -> str:
        return inner()

    return outer


@pytest.mark.parametrize("options", [{}, {"blocking": True}])
def test_a_locked_function_calls_another(cache: Any, options: Any) -> None:
    assert outer_function("both", **options)() == "inside"
    assert not cache.lock("both").locked()


def test_both_must_be_reentrant(cache: Any) -> None:
    @locked("one", reentrant=True, blocking=True)
    def inner() -> None:
        raise AssertionError("it runs inside")

    @locked("one")
    def outer() -> None:
        inner()

    with pytest.raises(LockError, match="reentrant=True to both"):
        outer()


def test_a_block_and_a_lock_of_the_cache_go_in(cache: Any) -> None:
    with locked("both", reentrant=True), cache.lock("both", reentrant=True, blocking=False):
        assert outer_function("both")() == "inside"
    assert not cache.lock("both").locked()


def test_coroutine_functions(cache: Any) -> None:
    @locked("both", reentrant=True)
    async def inner() -> str:
        return "inside"

    @locked("both", reentrant=True)
    async def outer() -> str:
        with pytest.raises(LockNotAcquired):
            await asyncio.gather(inner())
        return await inner()

    assert asyncio.run(outer()) == "inside"
    assert not cache.lock("both").locked()


def test_the_option_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="reentrant must be True or False"):
        locked("one", reentrant=1)


def test_an_inner_handle_leaves_the_lock_of_the_host_to_the_outer(
    own_server: RedisServer, tmp_path: Any
) -> None:
    def make() -> Lock:
        options: Any = {"on_redis_down": "local", "local_folder": tmp_path, "reentrant": True}
        return Lock(own_server.client(), "both", timeout=60, **options)

    outer, inner = make(), make()
    assert outer.acquire()
    with inner:
        pass
    own_server.client().delete("both")
    hurry()
    until(lambda: outer.lost)
    own_server.stop()
    assert not inner.acquire(blocking=False)
    with pytest.raises(redis.ConnectionError):
        outer.release()
    assert inner.acquire(blocking=False)
    inner.release()
