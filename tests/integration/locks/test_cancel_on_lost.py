"""``cancel_on_lost``: the task in an ``async with`` block is cancelled when its lock is lost."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import redis
import redis.asyncio
from django.core.cache import caches

from django_redis_lock import AsyncLock, AsyncRedlock, Lock, LockLost, LockNotOwnedError, locked
from django_redis_lock.locking.aio import cancellations
from tests.processes import PATIENCE
from tests.redis_server import RedisServer

NAME = "cancelled"


def run(
    client: redis.Redis, body: Callable[[redis.asyncio.Redis], Coroutine[Any, Any, None]]
) -> None:
    """Run ``body`` with a client for tasks."""
    options = client.connection_pool.connection_kwargs

    async def main() -> None:
        async with redis.asyncio.Redis(host=options["host"], port=options["port"]) as aclient:
            await asyncio.wait_for(body(aclient), PATIENCE)

    asyncio.run(main())


def lock_of(aclient: Any, **options: Any) -> AsyncLock:
    return AsyncLock(
        aclient, NAME, **{"timeout": 60, "renew": True, "cancel_on_lost": True, **options}
    )


async def lose(aclient: Any, lock: Any) -> None:
    """End the lock; its holder may have been told before this returns."""
    await aclient.delete(NAME)
    lock.local.renewal.reschedule(0.0)


class Stopped(Exception):
    """An exception from the body of a block."""


@pytest.mark.parametrize(
    ("body_does", "raised"),
    [
        ("ends with the cancellation", LockLost),
        ("raises its own error", Stopped),
        ("goes on", LockNotOwnedError),
    ],
)
def test_what_the_block_raises(client: redis.Redis, body_does: str, raised: Any) -> None:
    async def hold(aclient: redis.asyncio.Redis) -> None:
        async with lock_of(aclient) as lock:
            await lose(aclient, lock)
            try:
                await asyncio.sleep(PATIENCE)
            except asyncio.CancelledError:
                if body_does == "ends with the cancellation":
                    raise
                if body_does == "raises its own error":
                    raise Stopped from None

    async def body(aclient: redis.asyncio.Redis) -> None:
        with pytest.raises(raised) as caught:
            await hold(aclient)
        if raised is LockLost:
            assert "was lost, so its task was cancelled" in str(caught.value)
            assert isinstance(caught.value.__cause__, asyncio.CancelledError)
            assert caught.value.lock_name == NAME
        await asyncio.sleep(0)  # The task goes on.
        if sys.version_info >= (3, 11):
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

    run(client, body)


def test_only_the_task_that_holds_is_cancelled(client: redis.Redis) -> None:
    async def body(aclient: redis.asyncio.Redis) -> None:
        lock = lock_of(aclient)
        entered = asyncio.Event()

        async def hold() -> None:
            async with lock:
                entered.set()
                await asyncio.sleep(PATIENCE)

        holder = asyncio.ensure_future(hold())
        await entered.wait()
        await AsyncLock(aclient, NAME).reset()
        with pytest.raises(LockLost):
            await holder

    run(client, body)


def test_a_cancellation_from_outside_remains_one(client: redis.Redis) -> None:
    async def body(aclient: redis.asyncio.Redis) -> None:
        entered = asyncio.Event()

        async def hold() -> None:
            async with lock_of(aclient):
                entered.set()
                await asyncio.sleep(PATIENCE)

        holder = asyncio.ensure_future(hold())
        await entered.wait()
        holder.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holder
        assert not await aclient.exists(NAME)

    run(client, body)


def test_a_loss_after_the_block_cancels_nothing(client: redis.Redis) -> None:
    async def body(aclient: redis.asyncio.Redis) -> None:
        lock = lock_of(aclient)
        async with lock:
            cancellation = cancellations[lock.local.hold]
        cancellation.request()
        await asyncio.sleep(0.01)

    run(client, body)


def test_on_lost_may_be_a_coroutine_function(
    client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(aclient: redis.asyncio.Redis) -> None:
        loops = []
        told = asyncio.Event()

        async def on_lost() -> None:
            loops.append(asyncio.get_running_loop())
            await asyncio.sleep(0)
            told.set()
            raise Stopped("of on_lost")

        lock = lock_of(aclient, cancel_on_lost=False, on_lost=on_lost)
        assert await lock.acquire()
        await lose(aclient, lock)
        await told.wait()
        assert loops == [asyncio.get_running_loop()]
        await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR, "django_redis_lock.lost"):
        run(client, body)
    [failed] = [record for record in caplog.records if "on_lost failed" in record.message]
    assert failed.exc_info is not None
    assert isinstance(failed.exc_info[1], Stopped)


def test_a_lock_for_threads_refuses_both(client: redis.Redis) -> None:
    async def on_lost() -> None: ...

    with pytest.raises(TypeError, match="only a task can be cancelled"):
        Lock(client, NAME, cancel_on_lost=True)
    with pytest.raises(TypeError, match="on_lost must be a plain function"):
        Lock(client, NAME, on_lost=on_lost)
    with pytest.raises(TypeError, match="only a task can be cancelled"):
        caches["default"].lock(NAME, cancel_on_lost=True)


# -- the cache's locks, and locked() ---------------------------------------------------------------


async def reset(name: str) -> None:
    assert await caches["default"].alock(name).reset()


@pytest.mark.parametrize("options", [{}, {"on_redis_down": "local"}], ids=["plain", "fallback"])
def test_of_a_cache(client: redis.Redis, options: Any) -> None:
    async def body() -> None:
        async def hold() -> None:
            async with caches["default"].alock(NAME, timeout=60, cancel_on_lost=True, **options):
                await reset(NAME)
                await asyncio.sleep(15)

        with pytest.raises(LockLost):
            await hold()
        async with caches["default"].alock(NAME, blocking=False, **options):
            """The lock of this host is free too."""

    asyncio.run(body())


def test_a_decorated_coroutine_function(client: redis.Redis) -> None:
    stopped = []

    @locked("export", cancel_on_lost=True)
    async def export() -> None:
        resetting = asyncio.ensure_future(reset("export"))
        try:
            await asyncio.sleep(15)
        except asyncio.CancelledError:
            stopped.append(True)
            raise
        finally:
            await resetting

    async def block() -> None:
        async with locked("export", cancel_on_lost=True):
            await reset("export")
            await asyncio.sleep(15)

    async def body() -> None:
        with pytest.raises(LockLost):
            await export()
        with pytest.raises(LockLost):
            await block()

    asyncio.run(body())
    assert stopped == [True]


def test_over_several_servers(own_server: RedisServer) -> None:
    address = own_server.url.rpartition("/")[0]

    async def hold() -> None:
        clients = [redis.asyncio.Redis.from_url(f"{address}/{db}") for db in range(3)]
        try:
            async with AsyncRedlock(clients, NAME, 60, renew=True, cancel_on_lost=True):
                assert await AsyncRedlock(clients, NAME, 60).reset()
                await asyncio.sleep(15)
        finally:
            for client in clients:
                await client.aclose()

    with pytest.raises(LockLost):
        asyncio.run(hold())
