"""A blocking pop that Redis does not know of, on a connection that nobody has closed."""

from __future__ import annotations

import asyncio

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, Lock
from tests.redis_server import RedisServer

from .proxy import Proxy


@pytest.fixture
def proxy(redis_server: RedisServer, client: redis.Redis) -> Proxy:
    with Proxy(redis_server) as proxy:
        yield proxy


def test_a_lone_waiter_has_the_lock_when_its_holder_has_died(
    proxy: Proxy, client: redis.Redis
) -> None:
    """Nobody else waits, so nobody else can have the grants that its dead pop does not get."""
    client.set("report", "of a holder that died", px=1000)
    proxy.swallow(b"BLPOP")
    with proxy.client() as through:
        assert Lock(through, "report", timeout=5).acquire(blocking_timeout=20)


def test_a_last_try_that_wins_is_enough(proxy: Proxy, client: redis.Redis) -> None:
    """What the pop would have said cannot be waited for."""
    client.set("report", "of a holder that died", px=300)
    proxy.swallow(b"BLPOP", times=10)
    with proxy.client() as through:
        lock = Lock(through, "report", timeout=60, grant_timeout=60)
        lock_acquired = lock.acquire(blocking_timeout=0.25) or lock.acquire(blocking_timeout=0.35)
        assert lock_acquired
        assert lock.owned()


def test_a_last_try_of_a_task_that_wins_is_enough(proxy: Proxy, client: redis.Redis) -> None:
    async def main() -> None:
        through = redis.asyncio.Redis(port=proxy.port)
        lock = AsyncLock(through, "report", timeout=60, grant_timeout=60)
        assert await lock.acquire(blocking_timeout=0.25) or await lock.acquire(
            blocking_timeout=0.35
        )
        assert await lock.owned()
        await through.connection_pool.disconnect()

    client.set("report", "of a holder that died", px=300)
    proxy.swallow(b"BLPOP", times=10)
    asyncio.run(main())
