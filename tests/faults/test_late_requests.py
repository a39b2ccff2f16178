"""A request reaches Redis after its caller has given it up, as a load balancer, a proxy or TCP by
its own repetition may deliver it: what it takes is nobody's, and is free again soon (S3, L2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, Lock, LockNotOwnedError, MultiLock, Redlock
from django_redis_lock.contrib.limit import PLACE_ACQUIRE
from django_redis_lock.contrib.redlock.votes import VOTE
from django_redis_lock.contrib.several_names import ACQUIRE_ALL
from django_redis_lock.protocol.lock_scripts import ACQUIRE, LEAVE
from tests.faults.proxy import HeldBack, Proxy
from tests.holding import until_released
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.background import Background

pytestmark = pytest.mark.invariant("S3")

#: Of all replies here.
SECONDS = 0.4


@pytest.fixture
def late(proxy: Proxy) -> Any:
    """A client by way of the proxy with an idle connection: what is sent there is sent again,
    because the silence may be its own fault."""
    with proxy.client(socket_timeout=SECONDS) as client:
        assert Lock(client, "before", timeout=30).locked() is False
        yield client


@pytest.fixture
def others() -> Iterator[list[redis.Redis]]:
    """Of two more servers."""
    with ExitStack() as stack:
        servers = [stack.enter_context(closing(RedisServer())) for _ in range(2)]
        for server in servers:
            server.start()
        yield [server.client() for server in servers]


def is_free(client: redis.Redis, *keys: str) -> bool:
    return not client.exists(*keys)


def deliver(held: HeldBack, client: redis.Redis, *keys: str) -> None:
    """The late requests take what is free; then it is free again, and soon."""
    until(lambda: is_free(client, *keys))
    held.deliver()
    until(lambda: is_free(client, *keys))


@pytest.mark.parametrize("timeout", [60, None])
@pytest.mark.parametrize("token", [None, "chosen"])
def test_a_lock_is_free_after_a_late_acquire(
    client: redis.Redis, proxy: Proxy, late: redis.Redis, timeout: float | None, token: str | None
) -> None:
    lock = Lock(late, "late", timeout=timeout)
    held = proxy.hold_back(ACQUIRE)
    assert lock.acquire(token=token)
    lock.release()
    deliver(held, client, "late")


@pytest.mark.parametrize("timeout", [60, None])
def test_so_it_is_for_tasks(
    client: redis.Redis, proxy: Proxy, redis_server: RedisServer, timeout: float | None
) -> None:
    async def hold() -> HeldBack:
        async with redis.asyncio.Redis(port=proxy.port, socket_timeout=SECONDS) as late:
            assert await AsyncLock(late, "before", timeout=30).locked() is False
            held = proxy.hold_back(ACQUIRE)
            async with AsyncLock(late, "late", timeout=timeout):
                return held

    deliver(asyncio.run(hold()), client, "late")


def test_who_holds_the_lock_by_then_keeps_it(
    client: redis.Redis, proxy: Proxy, late: redis.Redis
) -> None:
    held = proxy.hold_back(ACQUIRE)
    with Lock(late, "late", timeout=None) as lock:
        held.deliver()  # While its caller holds it by the second try.
        assert lock.owned()
    with Lock(client, "late", timeout=30) as another:
        until_released()
        assert another.owned()
    until(lambda: is_free(client, "late"))


def test_a_lost_lock_stays_free(client: redis.Redis, proxy: Proxy, late: redis.Redis) -> None:
    held = proxy.hold_back(ACQUIRE)
    with suppress(LockNotOwnedError), Lock(late, "late", timeout=None):
        client.delete("late")
    deliver(held, client, "late")


def test_a_place_is_free(client: redis.Redis, proxy: Proxy, late: redis.Redis) -> None:
    first = Lock(client, "late", timeout=30, limit=2)
    assert first.acquire()
    held = proxy.hold_back(PLACE_ACQUIRE)
    with Lock(late, "late", timeout=None, limit=2):
        pass
    held.deliver()
    until(lambda: len(first.holders()) == 1)
    first.release()


def test_several_names_are_free(client: redis.Redis, proxy: Proxy, late: redis.Redis) -> None:
    held = proxy.hold_back(ACQUIRE_ALL)
    with MultiLock(late, ["{late}1", "{late}2"], timeout=None):
        pass
    deliver(held, client, "{late}1", "{late}2")


@pytest.mark.parametrize("tries", [1, 2])
def test_a_vote_is_free(
    client: redis.Redis, proxy: Proxy, late: redis.Redis, others: list[redis.Redis], tries: int
) -> None:
    held = proxy.hold_back(VOTE, times=tries)
    with Redlock([late, *others], "late", timeout=None, server_timeout=2 * SECONDS):
        pass
    deliver(held, client, "late")


def test_a_lock_is_free_after_a_failed_acquire(
    client: redis.Redis, proxy: Proxy, late: redis.Redis
) -> None:
    held = proxy.hold_back(ACQUIRE, times=2)
    with pytest.raises(redis.TimeoutError):
        Lock(late, "late", timeout=None).acquire(blocking=False)
    until_released()
    deliver(held, client, "late")


def waits(late: redis.Redis, **options: Any) -> Callable[[], bool]:
    return lambda: Lock(late, "late", timeout=None, **options).acquire()


def test_a_lock_is_free_after_a_wait_that_ended(
    client: redis.Redis, proxy: Proxy, late: redis.Redis
) -> None:
    with Lock(client, "late", timeout=30):
        held = proxy.hold_back(ACQUIRE)
        waiter = Background(waits(late, blocking_timeout=5 * SECONDS))
        assert held.kept.acquire(timeout=PATIENCE)
        assert waiter.result() is False
    deliver(held, client, "late")


def test_a_lock_is_free_after_a_late_last_try(
    client: redis.Redis, proxy: Proxy, late: redis.Redis
) -> None:
    with Lock(client, "late", timeout=30):
        held = proxy.hold_back(LEAVE, times=2)
        assert waits(late, blocking_timeout=SECONDS)() is False
        until_released()
    deliver(held, client, "late")


def test_a_lock_that_was_waited_for_is_free(
    client: redis.Redis, proxy: Proxy, late: redis.Redis
) -> None:
    """The grant has another token than the late request."""
    holder, lock = Lock(client, "late", timeout=30), Lock(late, "late", timeout=None)
    assert holder.acquire()
    held = proxy.hold_back(ACQUIRE)

    def hold() -> None:
        with lock:
            pass

    waiter = Background(hold)
    until(lambda: client.zcard("{late}:waiters"))
    holder.release()
    waiter.result()
    deliver(held, client, "late")


def test_a_connection_is_given_up_by_a_reset(proxy: Proxy, late: redis.Redis) -> None:
    """So the system drops what it has not delivered yet."""
    held = proxy.hold_back(ACQUIRE)
    with Lock(late, "late", timeout=30):
        until(lambda: held.resets)
    assert held.resets == [True]


def test_a_task_gives_a_connection_up_by_a_reset(proxy: Proxy) -> None:
    async def hold() -> list[bool]:
        async with redis.asyncio.Redis(port=proxy.port, socket_timeout=SECONDS) as late:
            assert await AsyncLock(late, "before", timeout=30).locked() is False
            held = proxy.hold_back(ACQUIRE)
            async with AsyncLock(late, "late", timeout=30):
                while not held.resets:
                    await asyncio.sleep(0.01)
            return held.resets

    assert asyncio.run(asyncio.wait_for(hold(), PATIENCE)) == [True]
