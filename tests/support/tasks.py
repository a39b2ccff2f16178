"""Tasks of an event loop, each driven by a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import redis
import redis.asyncio

from django_redis_lock import AsyncLock
from django_redis_lock.transport.aio_client import asyncio_client
from tests.processes import PATIENCE
from tests.redis_server import RedisServer
from tests.support.backends import OnRedis

T = TypeVar("T")


class Tasks:
    """An event loop in a thread. Each thread that uses it has one task there, in which everything
    is done that the thread asks for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._mine = threading.local()
        # Neither a loop nor the queue it waits for keeps a waiting task from the garbage collector.
        self._kept: list[Future[Any]] = []

    def do(self, work: Callable[[], Any]) -> Any:
        """What ``work()`` returns, awaited if it is to be awaited."""
        if not hasattr(self._mine, "orders"):
            self._mine.orders = asyncio.Queue()
            task = self._task(self._mine.orders)
            self._kept.append(asyncio.run_coroutine_threadsafe(task, self._loop))
        done: Future[Any] = Future()
        self._loop.call_soon_threadsafe(self._mine.orders.put_nowait, (work, done))
        return done.result(PATIENCE)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Await ``work`` in a task of its own."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @staticmethod
    async def _task(orders: asyncio.Queue[Any]) -> None:
        while True:
            work, done = await orders.get()
            try:
                outcome = work()
                done.set_result(await outcome if asyncio.iscoroutine(outcome) else outcome)
            except Exception as error:
                done.set_exception(error)
            work = outcome = done = None  # What it was about may be collected.

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
        # As asyncio.run does at its end.
        await asyncio.get_running_loop().shutdown_asyncgens()


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


async def in_this_loop(client: redis.Redis) -> Any:
    return asyncio_client(client)


@contextmanager
def in_tasks(client: redis.Redis, connection_class: type | None = None) -> Iterator[InTasks]:
    tasks = Tasks()
    async_client = tasks.do(lambda: in_this_loop(client))
    if connection_class is not None:
        async_client.connection_pool.connection_class = connection_class
    yield InTasks(client, async_client, tasks)
    tasks.do(async_client.connection_pool.disconnect)
    tasks.close()


@asynccontextmanager
async def connected(server: RedisServer, **options: Any) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(server.url, **options) as client:
        yield client
