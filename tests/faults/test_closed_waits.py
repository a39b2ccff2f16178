"""A wait whose coroutine is closed, or whose event loop is gone, leaves no trace all the same."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, Lock
from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.transport import asyncio_client
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.backends import blocked, places

NAME = "closed"


@pytest.mark.parametrize("waiters", [1, 2])
@pytest.mark.parametrize("loop_first", [False, True])
def test_a_closed_wait_leaves_the_queue(
    client: redis.Redis, redis_server: Any, loop_first: bool, waiters: int
) -> None:
    holder = Lock(client, NAME, timeout=60, grant_timeout=60)
    holder.acquire()
    loop = asyncio.new_event_loop()
    through = redis.asyncio.Redis.from_url(redis_server.url)
    locks = [AsyncLock(through, NAME, grant_timeout=60) for _ in range(waiters)]

    async def wait() -> list[asyncio.Task[bool]]:
        tasks = []
        for lock in locks:
            tasks.append(asyncio.ensure_future(lock.acquire()))
            while places(NAME) < len(tasks):
                await asyncio.sleep(0.001)
        while not await asyncio.to_thread(blocked, client):
            await asyncio.sleep(0.001)
        return tasks

    tasks = loop.run_until_complete(wait())
    if loop_first:
        loop.close()
    for task in tasks:
        task.get_coro().close()
    assert places(NAME) == 0
    until(lambda: not client.exists(f"{{{NAME}}}:waiters"))
    until(lambda: not blocked(client))
    holder.release()
    assert not client.exists(NAME)
    if not loop_first:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    gc.collect()  # What it complains about, pytest makes an error of.


def test_a_closed_wait_in_memory_takes_no_grant() -> None:
    client = client_of(Database(NAME))
    holder = Lock(client, NAME, timeout=60)
    assert holder.acquire()
    loop = asyncio.new_event_loop()

    async def wait() -> asyncio.Task[bool]:
        task = asyncio.ensure_future(AsyncLock(asyncio_client(client), NAME).acquire())
        while not places(NAME):
            await asyncio.sleep(0.01)
        return task

    task = loop.run_until_complete(wait())
    loop.close()
    task.get_coro().close()
    client.rpush(f"{{{NAME}}}:grants", "for the next")
    assert client.exists(f"{{{NAME}}}:grants")
    holder.release()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("blocking_timeout", [None, 60])
@pytest.mark.parametrize("loop_first", [False, True])
def test_a_closed_acquire_holds_no_lock(
    own_server: RedisServer,
    loop_first: bool,
    blocking_timeout: float | None,
    held: bool,
) -> None:
    """Its request has been sent, and Redis has yet to reply."""
    with own_server.client() as client:
        if held:
            Lock(client, NAME, timeout=60).acquire()
        before = client.get(NAME)
        loop = asyncio.new_event_loop()
        through = redis.asyncio.Redis.from_url(own_server.url)
        loop.run_until_complete(through.ping())
        own_server.pause()
        lock = AsyncLock(through, NAME, timeout=60, blocking_timeout=blocking_timeout)
        task = loop.create_task(lock.acquire())
        for _ in range(50):
            loop.run_until_complete(asyncio.sleep(0))
        if loop_first:
            loop.close()
        task.get_coro().close()
        own_server.resume()
        assert places(NAME) == 0
        until(lambda: client.get(NAME) == before and not client.exists(f"{{{NAME}}}:waiters"))
        if not loop_first:
            task.cancel()
            assert loop.run_until_complete(through.lock(NAME + "2", lock_class=AsyncLock).acquire())
            loop.run_until_complete(through.aclose())
            loop.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_wait_that_a_forked_child_closes_goes_on_in_its_parent(
    client: redis.Redis, redis_server: Any
) -> None:
    holder = Lock(client, NAME, timeout=60)
    holder.acquire()
    loop = asyncio.new_event_loop()
    through = redis.asyncio.Redis.from_url(redis_server.url)

    async def begin() -> asyncio.Task[bool]:
        task = asyncio.ensure_future(AsyncLock(through, NAME, timeout=60).acquire())
        while not await asyncio.to_thread(blocked, client):
            await asyncio.sleep(0.001)
        return task

    def pops() -> list[str]:
        return [each["id"] for each in client.client_list() if "b" in each["flags"]]

    task = loop.run_until_complete(begin())
    before = pops()
    if not (child := os.fork()):
        try:
            task.get_coro().close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    loop.run_until_complete(asyncio.sleep(0.05))
    assert pops() == before
    holder.release()
    assert loop.run_until_complete(task)
    loop.run_until_complete(through.aclose())
    loop.close()
