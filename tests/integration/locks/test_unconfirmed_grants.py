"""A lock got by a grant whose full lifetime Redis has not confirmed yet: the answer to TAKE_GRANT
is on its way, and what is sent on other connections may overtake it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, Lock
from django_redis_lock.locking.waiting import tasks
from django_redis_lock.locking.waiting.threads import PendingReply
from django_redis_lock.transport.server import Server
from tests.lock_contract import Background
from tests.processes import until
from tests.redis_server import RedisServer

NAME = "unconfirmed"


def test_a_lifetime_that_is_shortened_is_not_undone(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer lies on a connection that somebody else has, and nobody has looked."""
    kept = []
    monkeypatch.setattr(PendingReply, "_has_come", lambda self: False)
    monkeypatch.setattr(Server, "checkin", lambda self, connection, _=None: kept.append(connection))
    holder, lock = Lock(client, NAME, timeout=30), Lock(client, NAME, timeout=300)
    holder.acquire()

    def wait() -> None:
        lock.acquire()
        lock.extend(0.05, replace_ttl=True)
        until(lambda: lock.lost)

    waiting = Background(wait)
    until(lambda: client.exists(f"{{{NAME}}}:waiters"))
    holder.release()
    waiting.result()
    until(lambda: not client.exists(NAME))  # Its holder hears of it a little before.


def test_a_task_that_shortens_a_lifetime_is_not_undone(
    client: redis.Redis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = tasks._answer

    async def late(*args: Any) -> Any:
        await asyncio.sleep(0.3)
        return await receive(*args)

    monkeypatch.setattr(tasks, "_answer", late)
    holder = Lock(client, NAME, timeout=30)
    holder.acquire()

    async def wait() -> None:
        async with redis.asyncio.Redis.from_url(redis_server.url) as there:
            lock = AsyncLock(there, NAME, timeout=300, thread_local=False)
            waiting = asyncio.ensure_future(lock.acquire())
            while not client.exists(f"{{{NAME}}}:waiters"):
                await asyncio.sleep(0.01)
            holder.release()
            assert await waiting
            await lock.extend(0.05, replace_ttl=True)
            while not lock.lost:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(wait(), 8))
    until(lambda: not client.exists(NAME))  # Its holder hears of it a little before.
