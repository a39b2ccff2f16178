"""A lock got by a grant whose full lifetime Redis has not confirmed yet: the answer to TAKE_GRANT
is on its way, and what is sent on other connections may overtake it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, Lock
from django_redis_lock.contrib.limit import PLACE_TAKE_GRANT
from django_redis_lock.locking import aio
from django_redis_lock.locking.lock import PendingReply
from django_redis_lock.protocol.lock_scripts import TAKE_GRANT
from django_redis_lock.transport import server_of
from django_redis_lock.transport.server import Server
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.backends import blocked, places
from tests.support.background import Background

NAME = "unconfirmed"


def test_a_lifetime_that_is_shortened_is_not_undone(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer lies on a connection that somebody else has, and nobody has looked."""
    kept = []
    monkeypatch.setattr(PendingReply, "_has_come", lambda self: False)
    monkeypatch.setattr(Server, "checkin", lambda self, connection, *_: kept.append(connection))
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
    receive = aio._answer

    async def late(*args: Any) -> Any:
        await asyncio.sleep(0.3)
        return await receive(*args)

    monkeypatch.setattr(aio, "_answer", late)
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
            await lock.extend(1)
            assert lock.local.hold.pending is None, "the answer comes before that to this"
            await lock.extend(0.05, replace_ttl=True)
            while not lock.lost:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(wait(), PATIENCE))
    until(lambda: not client.exists(NAME))  # Its holder hears of it a little before.


def passed_on(client: redis.Redis, then: Callable[[Lock], None], **options: Any) -> None:
    """A lock with ``options`` is passed to a thread that waits, which does ``then`` with it."""
    options = {"timeout": 300, "thread_local": False, **options}
    held = [Lock(client, NAME, **options) for _ in range(options.get("limit", 1))]
    assert all(lock.acquire() for lock in held)
    lock = Lock(client, NAME, **options)

    def wait() -> None:
        assert lock.acquire()
        then(lock)
        lock.release()

    waiting = Background(wait)
    until(lambda: client.info("clients")["blocked_clients"])
    for each in held:
        each.release()
    waiting.result()


def forget_scripts(client: redis.Redis) -> None:
    """The server knows no script any more, and this process has not heard of that."""
    client.script_flush()
    server_of(client).known_scripts |= {TAKE_GRANT.sha, PLACE_TAKE_GRANT.sha}


@pytest.mark.parametrize("limit", [1, 2])
def test_a_short_grant_of_a_server_without_the_script_is_no_lost_lock(
    client: redis.Redis, limit: int, pace: int
) -> None:
    def expect_full_lifetime(lock: Lock) -> None:
        key = lock.local.hold.keys.lock
        until(lambda: client.pttl(key) > 100_000 or not client.exists(key))
        assert lock.owned()

    forget_scripts(client)
    passed_on(client, expect_full_lifetime, limit=limit, grant_timeout=0.3 * pace)


def test_the_next_task_does_not_delay_the_answer(
    client: redis.Redis, redis_server: RedisServer
) -> None:
    """They share a connection, and the server has forgotten TAKE_GRANT: it is sent a second time,
    and must not come behind the blocking pop of the next."""
    holder = Lock(client, NAME, timeout=30, grant_timeout=2)
    holder.acquire()

    async def wait() -> None:
        async with redis.asyncio.Redis.from_url(redis_server.url) as there:
            first, second = (AsyncLock(there, NAME, timeout=30) for _ in range(2))
            waiting = [asyncio.ensure_future(lock.acquire()) for lock in (first, second)]
            await asyncio.to_thread(until, lambda: places(NAME) == 2 and blocked(client))
            client.script_flush()
            holder.release()
            assert await waiting[0]
            await asyncio.to_thread(until, lambda: client.pttl(NAME) > 10_000)
            await first.release()
            assert await waiting[1]
            await second.release()

    asyncio.run(asyncio.wait_for(wait(), PATIENCE))
