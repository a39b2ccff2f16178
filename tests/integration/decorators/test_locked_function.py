"""``locked()`` on coroutine functions and methods, as a context manager, and ``current_lock()``."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync, sync_to_async
from django.core.cache import caches

from django_redis_lock import (
    AsyncLock,
    Lock,
    LockError,
    LockLost,
    LockNotAcquired,
    current_lock,
    locked,
)
from django_redis_lock.contention import Conflict, redirect_to, respond, skip
from tests.processes import PATIENCE
from tests.support.logs import logged

KEY = ":lock:1:export"


def held(name: str = "export") -> bool:
    return caches["default"].lock(name).locked()


# -- coroutine functions -----------------------------------------------------------------------


@locked("export", label="the export")
async def export(amount: int = 1) -> int:
    assert await caches["default"].alock("export").locked()
    return amount


def test_a_coroutine_function_stays_one() -> None:
    assert inspect.iscoroutinefunction(export)
    assert asyncio.run(export(amount=5)) == 5
    assert not held()


def test_tasks_wait_without_blocking_the_loop() -> None:
    inside: list[int] = []

    @locked("export", blocking=True)
    async def work() -> int:
        inside.append(1)
        assert len(inside) == 1
        await asyncio.sleep(0)
        inside.pop()
        return 1

    async def main() -> list[int]:
        return await asyncio.gather(*(work() for _ in range(20)))

    assert asyncio.run(main()) == [1] * 20


@pytest.mark.parametrize("waits", [True, False])
def test_a_task_that_is_cancelled_gives_up_its_place_or_the_lock(
    client: redis.Redis, waits: bool
) -> None:
    async def main() -> None:
        inside = asyncio.Event()

        @locked("export", blocking=True)
        async def work() -> None:
            inside.set()
            await asyncio.Event().wait()

        lock = caches["default"].alock("export")
        if waits:
            await lock.acquire()
        task = asyncio.create_task(work())
        while not (inside.is_set() or client.info("clients")["blocked_clients"]):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert inside.is_set() is not waits
        assert not client.zcard("{:lock:1:export}:waiters")
        if waits:
            await lock.release()
        assert not await lock.locked()

    asyncio.run(main())


def fail(error: BaseException) -> None:
    raise error


async def afail(error: BaseException) -> None:
    raise error


def fail_in_a_block(error: BaseException) -> None:
    with locked("export"):
        raise error


@pytest.mark.parametrize(
    "call", [locked("export")(fail), async_to_sync(locked("export")(afail)), fail_in_a_block]
)
@pytest.mark.parametrize(
    "error",
    [
        LookupError("no such invoice"),
        OSError("no disk"),
        redis.ConnectionError("another Redis"),
        LockNotAcquired("another lock"),
    ],
    ids=repr,
)
def test_an_exception_passes_and_the_lock_is_released(
    call: Callable[[Exception], None], error: Exception
) -> None:
    with pytest.raises(type(error)) as caught:
        call(error)
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert not held()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_on_conflict_may_be_any_callable(asynchronous: bool) -> None:
    def plain(conflict: Conflict, *args: Any, **kwargs: Any) -> Any:
        assert conflict.ttl
        return conflict.name, conflict.holder, args, kwargs

    async def awaited(conflict: Conflict, *args: Any, **kwargs: Any) -> Any:
        return plain(conflict, *args, **kwargs)

    @locked("export", on_conflict=awaited if asynchronous else plain)
    async def work(a: int, b: int) -> Any: ...

    with caches["default"].lock("export") as lock:
        name, holder, args, kwargs = asyncio.run(work(1, b=2))
        assert (name, args, kwargs) == ("export", (1,), {"b": 2})
        assert holder.id == lock.holder().id


async def agenerator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (export.__wrapped__, "a coroutine, .*: make it a coroutine function"),
        (lambda: (n for n in (1, 2)), "a generator, .*: return a list"),
        (agenerator, "a generator, .*: return a list"),
        (contextmanager(lambda: (n for n in (1,))), ".*, which would run after the lock's release"),
        (asynccontextmanager(agenerator), ".*, which would run after the lock's release"),
        (lambda: threading.Thread(target=print), ".*, which would run after the lock's release"),
        (Future, ".*, which would run after the lock's release"),
    ],
)
def test_what_returns_before_its_work_ends_is_refused(make: Callable[[], Any], words: str) -> None:
    @locked("export")
    def work() -> Any:
        return make()

    @locked("export")
    async def awork() -> Any:
        return make()

    for call, name in ((work, "work"), (async_to_sync(awork), "awork")):
        with pytest.raises(TypeError, match=rf"\.{name} returned {words}"):
            call()
        assert not held()


# -- methods -----------------------------------------------------------------------------------


class Shop:
    number = 3

    @locked("shop-{self.number}")
    def close(self) -> str | None:
        return current_lock().name.rpartition(":")[2]

    @locked("{cls.__name__}")
    @classmethod
    def by_the_class(cls) -> str:
        return cls.__name__

    @classmethod
    @locked("{cls.__name__}")
    def by_the_class_inside(cls) -> str:
        return cls.__name__

    @locked("static-{pk}")
    @staticmethod
    def static(pk: int) -> int:
        return pk

    @staticmethod
    @locked("static-{pk}")
    def static_inside(pk: int) -> int:
        return pk

    @locked("shop-{self.number}")
    async def aclose(self) -> int:
        return self.number


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("shop-3", Shop().close),
        ("Shop", Shop.by_the_class),
        ("Shop", Shop().by_the_class_inside),
        ("static-7", lambda: Shop.static(7)),
        ("static-7", lambda: Shop().static_inside(7)),
        ("shop-3", async_to_sync(Shop().aclose)),
    ],
)
def test_methods(name: str, call: Callable[[], Any]) -> None:
    assert call()
    with caches["default"].lock(name), pytest.raises(LockNotAcquired):
        call()


@pytest.mark.parametrize(
    ("template", "options", "group"),
    [
        ("work-{pk}", {}, "work-{pk}"),
        ("work-{pk}", {"group": "works"}, "works"),
        ("work\n{pk}", {}, "work\\n{pk}"),
        ("work-{pk}-" + "x" * 300, {}, "work-{pk}-" + "x" * 190),
        (
            lambda pk: f"work-{pk}",
            {},
            f"{__name__}.test_under_which_name_it_is_counted.<locals>.work",
        ),
    ],
)
def test_under_which_name_it_is_counted(template: Any, options: dict[str, Any], group: str) -> None:
    @locked(key=template, **options)
    def work(pk: int) -> str:
        return current_lock().group

    assert work(7) == group


# -- default -----------------------------------------------------------------------------------


def test_a_value_instead_of_the_error() -> None:
    @locked("export", default=None)
    def work() -> int:
        return 1

    @locked("export", default=0)
    async def awork() -> str:
        return "ran"

    @locked("export", on_conflict=skip)
    def skipped() -> int:
        return 2

    assert (work(), asyncio.run(awork()), skipped()) == (1, "ran", 2)
    with caches["default"].lock("export"):
        assert (work(), asyncio.run(awork()), skipped()) == (None, 0, None)


@pytest.mark.parametrize("answer", [respond(), redirect_to("home")])
def test_answers_for_views_need_a_request(answer: Any) -> None:
    @locked("export", on_conflict=answer)
    def work() -> int:
        return 1

    with caches["default"].lock("export"), pytest.raises(TypeError, match="for views"):
        work()


# -- as a context manager ----------------------------------------------------------------------


def test_a_with_block() -> None:
    with locked(key=lambda: "export", label="the export") as lock:
        assert isinstance(lock, Lock)
        assert 25 < lock.ttl() <= 30
        assert lock.fence
        assert lock.label == "the export"
        with locked("inner") as inner:
            assert current_lock() is inner
        assert current_lock() is lock
        assert held()
        with pytest.raises(LockNotAcquired) as caught, locked("export"):
            raise AssertionError
        assert caught.value.lock_name == "export"
    assert not held()


def test_an_async_with_block() -> None:
    async def main() -> None:
        async with locked("export") as lock:
            assert isinstance(lock, AsyncLock)
            assert current_lock() is lock
            lock.ensure_held()
            with pytest.raises(LockNotAcquired):
                async with locked("export"):
                    raise AssertionError
        assert not await lock.locked()

    asyncio.run(main())


@pytest.mark.parametrize("blocking", [False, True])
def test_one_inside_another_of_its_name_does_not_wait_for_itself(blocking: bool) -> None:
    export_lock = locked("export", blocking=blocking)
    words = "would wait for itself" if blocking else "is held by"
    with pytest.raises(LockError, match=words), export_lock, export_lock:
        raise AssertionError
    assert not held()

    async def main() -> None:
        with pytest.raises(LockError, match=words):
            async with export_lock, export_lock:
                raise AssertionError

    asyncio.run(main())
    assert not held()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_thread_does_not_wait_for_a_lock_of_the_task_it_works_for_nor_the_reverse(
    reentrant: bool,
) -> None:
    export_lock = locked("export", blocking=True, blocking_timeout=PATIENCE, reentrant=reentrant)

    @export_lock
    def call(inner: Callable[[], Any] = lambda: None) -> Any:
        return inner()

    @export_lock
    async def acall(inner: Callable[[], Any] | None = None) -> Any:
        return inner and await inner()

    async def in_thread() -> Any:
        return await asyncio.to_thread(call)

    words = "would wait for itself: the task or thread that it works for already holds the lock"
    calls = [
        lambda: asyncio.run(acall(sync_to_async(call))),
        lambda: asyncio.run(acall(in_thread)),
        lambda: call(async_to_sync(acall)),
        lambda: call(lambda: asyncio.run(acall())),
    ]
    for each in calls:
        with pytest.raises(LockError, match=words) as caught:
            each()
        assert not isinstance(caught.value, LockNotAcquired)
        assert not held()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (locked(), r"needs a name: with locked\("),
        (locked("invoice-{pk}"), r"no arguments to fill \{pk\} in from: write f'invoice-\{pk\}'"),
        (locked("x", on_conflict=skip), "on_conflict means nothing for a with block"),
        (locked("x", default=None), "default means nothing for a with block"),
        (locked("x", exit_code=3), "exit_code means nothing for a with block"),
        (locked("x", on_lost="terminate"), "for management commands"),
    ],
)
def test_what_means_nothing_there_is_refused(made: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words), made:
        raise AssertionError


def test_a_lock_released_by_hand_is_not_released_twice(caplog: pytest.LogCaptureFixture) -> None:
    with locked("export") as lock:
        lock.release()
        assert not held()
    assert not logged(caplog, "", "export")


# -- current_lock ------------------------------------------------------------------------------


def test_outside_there_is_none() -> None:
    with pytest.raises(LockError, match="no lock is held here"):
        current_lock()
    with locked("export"):
        pass
    with pytest.raises(LockError, match="no lock is held here"):
        current_lock()


def test_threads_and_tasks_of_the_call_have_it_too() -> None:
    @locked("export")
    async def work() -> list[Any]:
        def fence() -> int | None:
            current_lock().ensure_held()
            return current_lock().fence

        async def task() -> int | None:
            return fence()

        return [
            fence(),
            await asyncio.create_task(task()),
            await sync_to_async(fence)(),
            await asyncio.to_thread(fence),
        ]

    found = asyncio.run(work())
    assert found == found[:1] * 4
    assert found[0] is not None


def test_a_lock_that_is_lost(client: redis.Redis) -> None:
    told = threading.Event()
    names: list[Any] = []

    def on_lost() -> None:
        names.append(current_lock().name)
        told.set()

    @locked("export", timeout=60, on_lost=on_lost)
    def work() -> None:
        current_lock().ensure_held()
        client.set(KEY, "another's")
        assert told.wait(PATIENCE)
        assert current_lock().lost
        current_lock().ensure_held()

    with pytest.raises(LockLost):
        work()
    assert names == [KEY]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_task_whose_lock_is_lost(client: redis.Redis, asynchronous: bool) -> None:
    async def main() -> list[Any]:
        told = asyncio.Event()
        names: list[Any] = []

        def note() -> None:
            names.append(current_lock().name)
            told.set()

        async def anote() -> None:
            note()

        @locked("export", timeout=60, on_lost=anote if asynchronous else note)
        async def work() -> None:
            client.set(KEY, "another's")
            await asyncio.wait_for(told.wait(), PATIENCE)
            assert current_lock().lost

        await work()
        return names

    assert asyncio.run(main()) == [KEY]


def test_terminate_is_for_commands() -> None:
    with pytest.raises(TypeError, match="only a management command can be ended"):

        @locked("export", on_lost="terminate")
        def work() -> None: ...

    @locked("export", on_lost="terminate")
    def handle() -> None: ...

    with pytest.raises(TypeError, match="is not a management command"):
        handle()


def test_a_coroutine_function_as_on_lost_of_a_block_is_refused() -> None:
    async def on_lost() -> None: ...

    with (
        pytest.raises(TypeError, match="on_lost must be a plain function"),
        locked("export", on_lost=on_lost),
    ):
        raise AssertionError
    assert not held()
