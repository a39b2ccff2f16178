"""A task is cancelled at each of the points at which it waits, in an acquire or a release: at once,
and at the very moment what it waits for has come.

Nobody is kept from the lock for as long as its lifetime, or a grant's, lasts: a minute here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, AsyncMultiLock, Lock
from django_redis_lock.keeper import SentOnce, keeper
from django_redis_lock.protocol import lock_keys
from django_redis_lock.transport import aio_client, server_of
from tests.processes import PATIENCE
from tests.redis_server import RedisServer
from tests.support.backends import places
from tests.support.values import blocked

NAME = "cancelled"
NAMES = [f"{NAME} too", NAME]


class Cancelled:
    """Awaits ``work``, and cancels the task that does so at the wait number ``at``."""

    def __init__(self, work: Awaitable[Any], at: int, late: bool) -> None:
        self._work = work
        self._at = at
        self._late = late
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        task = asyncio.current_task()
        assert task is not None
        try:
            waiting = steps.send(None)
            while True:
                self.waits += 1
                if self.waits == self._at:
                    if self._late and waiting is not None:
                        waiting.add_done_callback(lambda _: task.cancel())
                    else:
                        task.get_loop().call_soon(task.cancel)
                try:
                    came = yield waiting
                except BaseException as error:
                    waiting = steps.throw(error)
                else:
                    waiting = steps.send(came)
        except StopIteration as end:
            return end.value


async def each_wait(
    attempt: Callable[[Callable[[Awaitable[Any]], Cancelled]], Awaitable[None]], late: bool
) -> int:
    """``attempt``, cancelled at each of its waits in turn; returns how many there are."""
    at = 0
    while True:
        at += 1
        made: list[Cancelled] = []

        def cancelled(work: Awaitable[Any], at: int = at, made: Any = made) -> Cancelled:
            made.append(Cancelled(work, at, late))
            return made[-1]

        task = asyncio.create_task(attempt(cancelled))
        await asyncio.wait({task}, timeout=PATIENCE)
        assert task.done(), f"it hangs after wait {at}"
        if not task.cancelled():
            task.result()
        if made[-1].waits < at:
            return at


def forget_connections() -> None:
    """The next call of this loop has to connect."""
    for of_loop in aio_client.loops.values():
        while of_loop.connections:
            of_loop.connections.popitem()[1].retire()


async def expect_free(server: redis.asyncio.Redis, client: redis.Redis) -> None:
    while any(isinstance(job, SentOnce) for job in keeper().jobs()) or places(NAME):
        await asyncio.sleep(0.001)
    lock = AsyncMultiLock(server, NAMES, timeout=60, grant_timeout=60)
    assert await lock.acquire(blocking_timeout=PATIENCE / 3)
    await lock.release()
    while client.exists(*NAMES, f"{{{NAME}}}:waiters"):
        await asyncio.sleep(0.001)


def one(server: Any) -> AsyncLock:
    return AsyncLock(server, NAME, timeout=60, grant_timeout=60, renew=True)


def place(server: Any) -> AsyncLock:
    """Of one with two places, of which the second is held."""
    return AsyncLock(server, NAME, timeout=60, grant_timeout=60, renew=True, limit=2)


def several(server: Any) -> AsyncLock:
    return AsyncMultiLock(server, NAMES, timeout=60, grant_timeout=60, renew=True)


@pytest.fixture(autouse=True)
def second_place(client: redis.Redis) -> Iterator[None]:
    key = lock_keys(NAME.encode()).at_place(2).lock
    client.set(key, "another's")
    yield
    assert client.get(key) == b"another's"


@pytest.mark.parametrize("make", [one, place, several])
@pytest.mark.parametrize("late", [False, True])
class TestAtEachWait:
    def test_of_a_free_lock(
        self, client: redis.Redis, redis_server: RedisServer, late: bool, make: Any
    ) -> None:
        async def main() -> None:
            async with redis.asyncio.Redis.from_url(redis_server.url) as server:
                lock = make(server)

                async def attempt(cancelled: Any) -> None:
                    forget_connections()

                    async def work() -> None:
                        async with lock:
                            pass

                    try:
                        await cancelled(work())
                    finally:
                        await asyncio.shield(expect_free(server, client))

                assert await each_wait(attempt, late) > 2

        asyncio.run(main())

    @pytest.mark.parametrize("wait", [None, 0.02])
    def test_of_a_wait(
        self,
        client: redis.Redis,
        redis_server: RedisServer,
        late: bool,
        make: Any,
        wait: float | None,
    ) -> None:
        """A lock that is passed on, or one that is not while it is waited for."""

        async def main() -> None:
            async with redis.asyncio.Redis.from_url(redis_server.url) as server:
                lock = make(server)
                limit = 2 if make is place else 1
                holder = Lock(client, NAME, timeout=60, grant_timeout=60, limit=limit)

                async def attempt(cancelled: Any) -> None:
                    forget_connections()
                    holder.acquire()

                    async def work() -> None:
                        if await lock.acquire(blocking_timeout=wait):
                            await lock.release()

                    async def release_soon() -> None:
                        while not (blocked(client) or trying.done()):
                            await asyncio.sleep(0.001)
                        if wait is None or trying.done():
                            holder.release()

                    async def tried() -> None:
                        await cancelled(work())

                    trying = asyncio.create_task(tried())
                    releasing = asyncio.create_task(release_soon())
                    await asyncio.wait({trying})
                    await releasing
                    if holder.owned():
                        holder.release()
                    await expect_free(server, client)
                    if not trying.cancelled():
                        trying.result()

                assert await each_wait(attempt, late) > 2

        asyncio.run(main())


def test_a_task_that_is_cancelled_lets_others_connect(
    redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, made = redis.asyncio.Connection.connect, []

    async def connecting(connection: Any) -> None:
        made.append(connection)
        await begun.wait()
        await connect(connection)

    async def main() -> None:
        async with redis.asyncio.Redis.from_url(redis_server.url) as server:
            locks = [AsyncLock(server, f"{NAME} {number}", timeout=60) for number in range(3)]
            first, *others = [asyncio.create_task(lock.acquire()) for lock in locks]
            while not made:
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait({first})
            assert first.cancelled()
            begun.set()
            assert await asyncio.gather(*others) == [True, True]
            assert not client.exists(f"{NAME} 0")
            assert len(made) == 1

    begun = asyncio.Event()
    monkeypatch.setattr(redis.asyncio.Connection, "connect", connecting)
    asyncio.run(main())


def test_a_cancelled_task_leaves_the_connection_to_the_others(redis_server: RedisServer) -> None:
    async def main() -> None:
        async with redis.asyncio.Redis.from_url(redis_server.url) as server:
            lock, other = (AsyncLock(server, name, timeout=60) for name in (NAME, f"{NAME} not"))
            async with lock:
                [connection] = aio_client.loops[asyncio.get_running_loop()].connections.values()
            for _ in range(20):
                acquiring = asyncio.create_task(lock.acquire())
                others = asyncio.create_task(other.acquire())
                await asyncio.sleep(0)
                acquiring.cancel()
                assert await others
                await other.release()
                await asyncio.wait({acquiring})
                assert await lock.acquire(blocking_timeout=PATIENCE)
                await lock.release()
            assert aio_client.connection_to(server_of(server)) is connection

    asyncio.run(main())
