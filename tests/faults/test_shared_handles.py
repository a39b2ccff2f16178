"""Several threads or tasks use one lock object (``thread_local=False``): what one of them fails at
leaves the lock of another alone."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncMultiLock, Lock, MultiLock
from tests.faults.proxy import Proxy
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.backends import blocked
from tests.support.background import Background

NAMES = ["shared", "shared too"]
#: Seconds for which a grant to a waiter lives that has failed, and may still be registered.
GRANT = 0.5


@pytest.mark.parametrize("way", ["acquire", "with"])
def test_a_thread_that_is_inside_twice_stays_so(
    client: redis.Redis, redis_server: RedisServer, way: str, pace: int
) -> None:
    with Proxy(redis_server) as proxy, proxy.client() as shaky:
        options: dict[str, Any] = {"timeout": 60, "thread_local": False, "grant_timeout": GRANT}
        shared = Lock(shaky, "shared", reentrant=True, **options)
        other = Lock(client, "shared", **options)
        other.acquire()
        inside, go_on = threading.Event(), threading.Event()

        def go_in_twice() -> bool:
            with shared:
                with shared:
                    inside.set()
                    assert go_on.wait(PATIENCE)
                return shared.owned()

        def fail() -> None:
            if way == "acquire":
                shared.acquire(blocking_timeout=0.5 * pace)
            else:
                shared.blocking_timeout = 0.5 * pace
                shared.__enter__()

        first = Background(go_in_twice)
        until(lambda: blocked(client))
        second = Background(fail)
        other.release()
        assert inside.wait(PATIENCE)
        until(lambda: blocked(client))
        with proxy.away(), pytest.raises(redis.ConnectionError):
            second.result()
        go_on.set()
        assert first.result() is True
        until(lambda: not client.exists("shared"))  # The failed waiter may still be registered.


@pytest.mark.parametrize("how", ["cancelled", "fails"])
def test_a_task_keeps_its_several_names(
    client: redis.Redis, redis_server: RedisServer, how: str, pace: int
) -> None:
    async def main(proxy: Proxy) -> None:
        async with redis.asyncio.Redis(port=proxy.port) as shaky:
            options: dict[str, Any] = {"thread_local": False, "grant_timeout": GRANT}
            other = MultiLock(client, NAMES, 60, **options)
            other.acquire()
            shared = AsyncMultiLock(shaky, NAMES, 60, **options)

            first = asyncio.create_task(shared.acquire())
            await asyncio.to_thread(until, lambda: blocked(client))
            second = asyncio.create_task(shared.acquire(blocking_timeout=0.5 * pace))
            await asyncio.to_thread(other.release)
            assert await first
            await asyncio.to_thread(until, lambda: blocked(client))
            if how == "fails":
                with proxy.away(), pytest.raises(redis.ConnectionError):
                    await second
            else:
                second.cancel()
                with suppress(asyncio.CancelledError):
                    await second
            assert await shared.owned()
            assert client.exists(*NAMES) == 2
            await shared.release()
        # The waiter that failed may have been registered.
        until(lambda: not client.exists(*NAMES))

    with Proxy(redis_server) as proxy:
        asyncio.run(main(proxy))
