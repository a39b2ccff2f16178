"""``AsyncLock`` on Redis: the contract, then what only tasks can do: share a handle, be cancelled.

For the contract a thread of the suite stands for one task of an event loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, Lock, LockError
from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.protocol.acquisition import WAITER_LIFETIME_SECONDS
from django_redis_lock.protocol.lock_scripts import RELEASE
from django_redis_lock.protocol.script import Call
from tests.lanes import examples
from tests.lock_contract import LockContract
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer
from tests.support.backends import Backend, places
from tests.support.tasks import connected, in_tasks


class TestAsyncLock(LockContract):
    @pytest.fixture
    def backend(self, client: redis.Redis) -> Iterator[Backend]:
        with in_tasks(client) as backend:
            yield backend


@pytest.mark.sample(7, 1)
class TestAsyncLockInMemory(LockContract):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        with in_tasks(client_of(Database("memory"))) as backend:
            yield backend


async def until_waiting(name: str, count: int = 1) -> None:
    deadline = time.monotonic() + PATIENCE
    while places(name) < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def until_nobody_is_registered(client: redis.Redis) -> None:
    """In less time than it takes for the register to forget who does not speak."""
    deadline = time.monotonic() + WAITER_LIFETIME_SECONDS / 2
    while client.zcard("{tasks}:waiters"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class TestTasks:
    """One handle, several tasks."""

    def test_a_child_cannot_act_for_its_parent(self, redis_server: RedisServer) -> None:
        """It has a copy of its context."""

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

    def test_a_lock_that_was_not_released_stays_its_owners(self, redis_server: RedisServer) -> None:
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

    def test_a_lock_whose_object_is_gone_expires(
        self, client: redis.Redis, redis_server: RedisServer
    ) -> None:
        async def main() -> None:
            async with connected(redis_server) as tasks:
                lock = AsyncLock(tasks, "forgotten", timeout=0.2, renew=True)
                assert await asyncio.create_task(lock.acquire())

        asyncio.run(main())
        until(lambda: not client.exists("forgotten"))

    @pytest.mark.parametrize("cancelled", [False, True])
    def test_a_release_that_is_answered_late(
        self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, cancelled: bool
    ) -> None:
        async def main() -> None:
            async with connected(redis_server) as client:
                lock = AsyncLock(client, "tasks", timeout=30, renew=True, thread_local=False)
                run = lock._run

                async def next_before_the_answer(call: Call, *args: Any) -> Any:
                    answer = await run(call, *args)
                    if call.script is RELEASE:
                        monkeypatch.undo()
                        assert await asyncio.create_task(lock.acquire(blocking=False))
                        if cancelled:
                            raise asyncio.CancelledError
                    return answer

                monkeypatch.setattr(lock, "_run", next_before_the_answer)
                try:
                    async with lock:
                        pass
                except asyncio.CancelledError:
                    assert cancelled
                lock.ensure_held()
                assert await lock.owned()
                await lock.release()

        asyncio.run(main())


class TestCancelling:
    """A task that waits is cancelled. Grants live for a minute here, so that one that was lost
    shows."""

    @pytest.mark.parametrize("token", [None, "chosen"])
    def test_at_the_moment_of_the_grant(
        self, client: redis.Redis, redis_server: RedisServer, token: str | None
    ) -> None:
        async def wait(server: Any) -> bool:
            # It never expires: were it left behind, nobody would have it again.
            lock = AsyncLock(server, "tasks", grant_timeout=60)
            acquired = await lock.acquire(token=token)
            await lock.release()
            return acquired

        async def main() -> None:
            async with connected(redis_server) as server:
                holder = AsyncLock(server, "tasks", timeout=60, grant_timeout=60)
                for _ in range(examples(150)):
                    assert await holder.acquire(blocking_timeout=PATIENCE)
                    tasks = [asyncio.create_task(wait(server)) for _ in range(2)]
                    await until_waiting("tasks", 2)
                    await asyncio.sleep(random.random() * 0.002)
                    release = asyncio.ensure_future(holder.release())
                    await asyncio.sleep(random.random() * 0.002)
                    tasks[0].cancel()
                    _, pending = await asyncio.wait([*tasks, release], timeout=PATIENCE)
                    assert not pending, "the grant was lost"
                    assert not tasks[1].cancelled()
                    assert tasks[1].result() is True

        asyncio.run(main())

    def test_twice(self, client: redis.Redis, redis_server: RedisServer) -> None:
        """The second time while it is leaving because of the first."""

        async def main() -> None:
            async with connected(redis_server) as server:
                holder = AsyncLock(server, "tasks", timeout=60, grant_timeout=60)
                await holder.acquire()
                for _ in range(50):
                    lock = AsyncLock(server, "tasks", timeout=60, grant_timeout=60)
                    task = asyncio.create_task(lock.acquire())
                    await until_waiting("tasks")
                    await asyncio.sleep(0.002)
                    task.cancel()
                    await asyncio.sleep(random.random() * 0.001)
                    task.cancel()
                    await asyncio.wait([task])
                    assert task.cancelled()
                await holder.release()
                await until_nobody_is_registered(client)

        asyncio.run(main())

    def test_with_the_whole_loop(self, client: redis.Redis, redis_server: RedisServer) -> None:
        """``asyncio.run`` cancels what still waits when the main task is done."""
        Lock(client, "tasks", timeout=60).acquire()

        async def main() -> None:
            server = redis.asyncio.Redis.from_url(redis_server.url)
            lock = AsyncLock(server, "tasks", timeout=60)
            for _ in range(3):
                asyncio.create_task(lock.acquire())  # noqa: RUF006 - it is to be forgotten
            await until_waiting("tasks", 3)
            while not client.zcard("{tasks}:waiters"):
                await asyncio.sleep(0.001)
            await server.connection_pool.disconnect()

        asyncio.run(main())
        assert not places("tasks")
        asyncio.run(until_nobody_is_registered(client))

    def test_a_loop_that_is_closed_without(
        self, client: redis.Redis, redis_server: RedisServer
    ) -> None:
        """Its task is not even cancelled; nothing goes on waiting in its name."""
        Lock(client, "tasks", timeout=60).acquire()
        with processes(close_the_loop_of_a_waiter, redis_server.url) as crew:
            crew.go()
            assert crew[0].hear() == "its line has dissolved"
            asyncio.run(until_nobody_is_registered(client))
            # Although the task and its connection are still there, for ever unfinished.
            until(lambda: not client.info("clients")["blocked_clients"])


def close_the_loop_of_a_waiter(link: Link, url: str) -> None:
    loop = asyncio.new_event_loop()
    server = redis.asyncio.Redis.from_url(url)
    waiting = loop.create_task(AsyncLock(server, "tasks").acquire())
    with redis.Redis.from_url(url) as client:
        while not client.info("clients")["blocked_clients"]:
            loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    until(lambda: not places("tasks"))
    link.say("its line has dissolved")
    link.hear()
    del waiting


def test_the_owners_id_is_what_releases_the_lock(redis_server: RedisServer) -> None:
    async def main() -> None:
        async with redis.asyncio.Redis.from_url(redis_server.url) as client:
            lock = AsyncLock(client, "owned", timeout=30)
            assert await lock.get_owner_id() is None
            await lock.acquire()
            await AsyncLock(client, "owned", id=await lock.get_owner_id()).release()
            assert not await lock.locked()

    asyncio.run(main())
