"""``AsyncLock`` on Redis: the contract, then what only tasks can do: share a handle, be cancelled.

For the contract a thread of the suite stands for one task of an event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, LockError
from tests.integration.test_lock import OnRedis, places
from tests.lock_contract import Backend, LockContract
from tests.processes import PATIENCE
from tests.redis_server import RedisServer


class Tasks:
    """An event loop in a thread. Each thread that uses it has one task there, in which everything
    is done that the thread asks for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._mine = threading.local()

    def do(self, work: Callable[[], Any]) -> Any:
        """What ``work()`` returns, awaited if it is to be awaited."""
        if not hasattr(self._mine, "orders"):
            self._mine.orders = asyncio.Queue()
            asyncio.run_coroutine_threadsafe(self._task(self._mine.orders), self._loop)
        done: Future[Any] = Future()
        self._loop.call_soon_threadsafe(self._mine.orders.put_nowait, (work, done))
        return done.result(PATIENCE)

    @staticmethod
    async def _task(orders: asyncio.Queue[Any]) -> None:
        while True:
            work, done = await orders.get()
            try:
                outcome = work()
                done.set_result(await outcome if asyncio.iscoroutine(outcome) else outcome)
            except Exception as error:
                done.set_exception(error)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    @staticmethod
    async def _end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class ForThreads:
    """An ``AsyncLock`` with the face of a ``Lock``."""

    def __init__(self, tasks: Tasks, lock: AsyncLock) -> None:
        self._tasks = tasks
        self._lock = lock

    def __getattr__(self, name: str) -> Any:
        if name == "local":
            return SimpleNamespace(token=self._tasks.do(lambda: self._lock.local.token))
        value = self._tasks.do(lambda: getattr(self._lock, name))
        if not callable(value):
            return value
        return lambda *args, **options: self._tasks.do(lambda: value(*args, **options))

    def __enter__(self) -> ForThreads:
        assert self._tasks.do(self._lock.__aenter__) is self._lock
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._tasks.do(lambda: self._lock.__aexit__(*exc_info))


class InTasks(OnRedis):
    def __init__(self, client: redis.Redis, async_client: Any, tasks: Tasks) -> None:
        super().__init__(client)
        self._async_client = async_client
        self._tasks = tasks

    def make_lock(self, name: str | bytes = "contract", **options: Any) -> Any:
        return ForThreads(self._tasks, AsyncLock(self._async_client, name, **options))


class TestAsyncLock(LockContract):
    @pytest.fixture
    def backend(self, client: redis.Redis, redis_server: RedisServer) -> Iterator[Backend]:
        tasks = Tasks()
        async_client = redis.asyncio.Redis.from_url(redis_server.url)
        yield InTasks(client, async_client, tasks)
        tasks.do(async_client.aclose)
        tasks.close()


@asynccontextmanager
async def connected(server: RedisServer, **options: Any) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(server.url, **options) as client:
        yield client


async def until_waiting(name: str, count: int = 1) -> None:
    async with asyncio.timeout(PATIENCE):
        while places(name) < count:
            await asyncio.sleep(0.001)


class TestTasks:
    """One handle, several tasks."""

    def test_each_has_its_own_token(self, redis_server: RedisServer) -> None:
        tokens: list[bytes] = []

        async def work(lock: AsyncLock) -> None:
            assert lock.local.token is None
            async with lock:
                tokens.append(lock.local.token)
                await asyncio.sleep(0)
                assert lock.local.token == tokens[-1]
                assert await lock.owned()

        async def main() -> None:
            async with connected(redis_server) as client:
                lock = AsyncLock(client, "tasks", timeout=30)
                await asyncio.gather(*(work(lock) for _ in range(20)))

        asyncio.run(main())
        assert len(set(tokens)) == 20

    def test_one_cannot_act_for_another(self, redis_server: RedisServer) -> None:
        async def look(lock: AsyncLock) -> None:
            assert not await lock.owned()
            assert lock.fence is None
            for act in (lock.release, lock.reacquire):
                with pytest.raises(LockError):
                    await act()

        async def main() -> None:
            async with connected(redis_server) as client:
                lock = AsyncLock(client, "tasks", timeout=30)
                await lock.acquire()
                await asyncio.create_task(look(lock))
                assert await lock.owned()
                await lock.release()

        asyncio.run(main())

    def test_it_may_be_taken_under_wait_for(self, redis_server: RedisServer) -> None:
        """Python before 3.12 runs what ``wait_for`` waits for in a task of its own."""
        inside: list[int] = []

        async def work(lock: AsyncLock) -> None:
            for _ in range(5):
                assert await asyncio.wait_for(lock.acquire(), PATIENCE)
                inside.append(1)
                assert len(inside) == 1
                assert await lock.owned()
                await asyncio.sleep(0.001)
                inside.pop()
                await asyncio.wait_for(lock.release(), PATIENCE)

        async def main() -> None:
            async with connected(redis_server) as client:
                for options in ({"timeout": 30}, {"timeout": 30, "renew": True}):
                    lock = AsyncLock(client, "tasks", **options)
                    await asyncio.gather(*(work(lock) for _ in range(4)))

        asyncio.run(main())

    def test_what_nobody_released_is_nobody_elses(self, redis_server: RedisServer) -> None:
        async def forget(lock: AsyncLock) -> None:
            await lock.acquire()

        async def main() -> None:
            async with connected(redis_server) as client:
                lock = AsyncLock(client, "tasks", timeout=30)
                await asyncio.create_task(forget(lock))
                assert not await lock.owned()
                assert lock.local.token is None
                assert not await lock.acquire(blocking=False)

        asyncio.run(main())
