"""A blocking pop that ends without an answer, or that Redis does not know of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, Lock, Redlock
from django_redis_lock.cache import RedisCache
from django_redis_lock.contrib.several_names import MultiLock
from django_redis_lock.locking.lock import ThreadWaiter
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.background import Background
from tests.support.values import Producer

from .proxy import Proxy

pytestmark = pytest.mark.usefixtures("patient", "watched_often")


def test_a_lone_waiter_has_the_lock_when_its_holder_has_died(
    proxy: Proxy, client: redis.Redis
) -> None:
    """Nobody else waits, so nobody else can have the grants that its dead pop does not get."""
    client.set("report", "of a holder that died", px=300)
    proxy.swallow(b"BLPOP")
    with proxy.client() as through:
        assert Lock(through, "report", timeout=5).acquire(blocking_timeout=20)


def test_a_last_try_that_wins_is_enough(proxy: Proxy, client: redis.Redis) -> None:
    """What the pop would have said cannot be waited for."""
    client.set("report", "of a holder that died", px=300)
    proxy.swallow(b"BLPOP", times=10)
    with proxy.client() as through:
        lock = Lock(through, "report", timeout=60, grant_timeout=60)
        until(lambda: lock.acquire(blocking_timeout=0.25))
        assert lock.owned()


def test_one_that_dies_just_at_the_deadline_is_no_error(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper ends a pop that Redis seems not to know, at any moment."""
    last_try, died = ThreadWaiter._last_try, threading.Event()

    def dying(waiter: ThreadWaiter) -> Any:
        if not died.is_set():
            waiter.queue.cut_pop()
            died.set()
        return last_try(waiter)

    monkeypatch.setattr(ThreadWaiter, "_last_try", dying)
    with Lock(client, "report", timeout=30):
        assert not Lock(client, "report").acquire(blocking_timeout=0.3)
    assert died.is_set()
    until(lambda: not client.exists("{report}:waiters"))


# -- pops that end at once -------------------------------------------------------------------------

KINDS = ("thread", "task", "places", "several names", "redlock")
#: What a proxy does at a BLPOP.
ANSWERS = (b"close", b"*-1\r\n", b"ERR no blocking commands here", b"ERR upstream failure")


class WithoutPops(NamedTuple):
    """A lock that others hold, and its waiters by way of proxies that end each pop."""

    acquire: Callable[[float], bool]
    leave: Callable[[], object]
    pops: Callable[[], int]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=ANSWERS, ids=str)
def without_pops(
    request: pytest.FixtureRequest, kind: str, redis_server: RedisServer, client: redis.Redis
) -> Iterator[WithoutPops]:
    options: dict[str, Any] = {"timeout": 60, "limit": 2} if kind == "places" else {"timeout": 60}
    with ExitStack() as stack:
        servers = [redis_server]
        if kind == "redlock":
            servers = [stack.enter_context(closing(RedisServer())) for _ in range(3)]
            for server in servers:
                server.start()
        proxies = [stack.enter_context(Proxy(server)) for server in servers]
        for proxy in proxies:
            if request.param == b"close":
                stack.enter_context(proxy.closing_at(b"BLPOP"))
            else:
                stack.enter_context(proxy.refusing(request.param, b"BLPOP"))
        there = [server.client() for server in servers]
        through: list[Any] = [proxy.client() for proxy in proxies]

        async def wait(seconds: float) -> bool:
            async with redis.asyncio.Redis(port=proxies[0].port) as its:
                lock = AsyncLock(its, "report", **options)
                return await lock.acquire(blocking_timeout=seconds)

        def acquire(seconds: float) -> bool:
            if kind == "task":
                return asyncio.run(wait(seconds))
            if kind == "redlock":
                return Redlock(through, "report", **options).acquire(blocking_timeout=seconds)
            if kind == "several names":
                names = MultiLock(through[0], ["report", "other"], **options)
                return names.acquire(blocking_timeout=seconds)
            return Lock(through[0], "report", **options).acquire(blocking_timeout=seconds)

        holders: list[Any] = [Lock(there[0], "report", thread_local=False, **options)]
        if kind == "redlock":
            holders = [Redlock(there, "report", thread_local=False, **options)]
        elif kind == "places":
            holders.append(Lock(there[0], "report", thread_local=False, **options))
        for holder in holders:
            assert holder.acquire()
        yield WithoutPops(acquire, holders[0].release, lambda: sum(p.refused for p in proxies))


def test_a_wait_whose_pops_end_at_once(without_pops: WithoutPops) -> None:
    """It ends at its deadline, or gets the lock, and does not ask all the time."""
    assert not Background(without_pops.acquire, 0.5).result()
    first = without_pops.pops()
    assert 0 < first < 10
    waiter = Background(without_pops.acquire, PATIENCE)
    until(lambda: without_pops.pops() > first)
    without_pops.leave()
    assert waiter.result()
    assert without_pops.pops() < first + 10


def test_a_wait_that_polls_lives_through_an_outage(
    client: redis.Redis, own_server: RedisServer
) -> None:
    with Proxy(own_server) as proxy, proxy.refusing(b"ERR unknown command", b"BLPOP"):
        holder = Lock(own_server.client(), "report", timeout=60)
        assert holder.acquire()
        waiter = Background(Lock(proxy.client(), "report", timeout=60).acquire)
        until(lambda: proxy.refused)
        with proxy.away():
            own_server.restart()
        assert waiter.result()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_followers_poll_where_no_wait_stays_open(
    redis_server: RedisServer, client: redis.Redis, answer: bytes, asynchronous: bool
) -> None:
    """A proxy without XREAD costs nobody a second computation."""
    slow = Producer()
    slow.finish.clear()
    leader = Background(RedisCache(redis_server.url, {}).get_or_set, "report", slow, 60)
    assert slow.begun.wait(PATIENCE)
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(redis_server))
        if answer == b"close":
            stack.enter_context(proxy.closing_at(b"XREAD"))
        else:
            stack.enter_context(proxy.refusing(answer, b"XREAD"))
        cache = RedisCache(f"redis://127.0.0.1:{proxy.port}", {})

        def follow() -> Any:
            if asynchronous:
                return asyncio.run(cache.aget_or_set("report", Producer("mine"), 60))
            return cache.get_or_set("report", Producer("mine"), 60)

        follower = Background(follow)
        until(lambda: proxy.refused > 2)
        slow.finish.set()
        assert (leader.result(), follower.result()) == ("computed", "computed")
        assert proxy.refused < 100
