"""Who is interrupted when another server becomes the primary: what each caller does before it, and
after it. On a cluster and behind sentinels, they do the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_redis_lock import AsyncLock, Lock, LockError, MultiLock
from django_redis_lock.cache import RedisCache
from django_redis_lock.contrib import instant_loss
from django_redis_lock.contrib.topology import SentinelService
from django_redis_lock.locking import Renewal
from django_redis_lock.protocol import lock_keys
from django_redis_lock.singleflight import flight
from tests.holding import hurry_until, watch_often
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.redis_topologies import ask, cut_off
from tests.support.background import Background
from tests.support.tasks import Tasks

__all__ = ["CALLERS", "Caller", "World", "go_on", "key", "lose", "notice_soon"]

#: The braces lead to one server of a cluster.
TAG = "{failing}"


def key(name: str) -> str:
    return f"{TAG}:{name}"


def notice_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after what may have moved without a word more often than in each second or two."""
    watch_often(monkeypatch)
    monkeypatch.setattr(flight, "FOLLOWER_CHECK_SECONDS", 0.3)
    monkeypatch.setattr(instant_loss, "CHECK_AFTER_SECONDS", 0.5)
    monkeypatch.setattr(SentinelService, "STALE", 0.2)


class World:
    """Clients of servers that belong together, and their primary.

    Args:
        for_tasks: makes a client, in the event loop where it is used.
        primary: the server that now has what is at the keys of ``key``.

    Attributes:
        waiting: how many wait on the primary's connections.
        old_goes_on: whether the former primary goes on for seconds; values are read there then.
    """

    waiting = 0
    old_goes_on = False

    def __init__(
        self,
        client: Any,
        cache: RedisCache,
        for_tasks: Callable[[], Any],
        primary: Callable[[], RedisServer],
    ) -> None:
        self.client, self.cache, self.primary = client, cache, primary
        self.tasks = Tasks()
        self.for_tasks = self.tasks.do(for_tasks)

    def close(self) -> None:
        self.tasks.close()

    def one_more_waits(self) -> None:
        self.waiting += 1
        until(self.all_wait)

    def all_wait(self) -> bool:
        """Whether all who wait do so at the primary."""
        clients = ask(self.primary(), "INFO", "clients")
        return bool(clients) and clients["blocked_clients"] >= self.waiting


Caller = Callable[[World], Iterator[None]]
CALLERS: list[Caller] = []


def caller(function: Caller) -> Caller:
    CALLERS.append(function)
    return function


def holders_and_waiter(world: World, name: str, limit: int = 1) -> Iterator[None]:
    told = threading.Event()
    options: dict[str, Any] = {"timeout": 30, "thread_local": False, "limit": limit}
    holders = [
        Lock(world.client, key(name), renew=True, on_lost=told.set, **options) for _ in range(limit)
    ]
    assert all(holder.acquire() for holder in holders)
    waiter = Lock(world.client, key(name), **options)
    waiting = Background(lambda: waiter.acquire(blocking_timeout=2 * PATIENCE))
    world.one_more_waits()
    yield
    until(lambda: ask(world.primary(), "ZCARD", lock_keys(key(name).encode()).waiters))
    assert not waiting.done
    assert all(holder.owned() and not holder.lost for holder in holders)
    last = holders.pop()
    fence = last.fence
    last.release()
    assert waiting.result()
    assert waiter.fence > fence
    assert all(holder.owned() for holder in holders)
    for lock in (*holders, waiter):
        lock.release()
    assert not told.is_set()


@caller
def of_a_lock(world: World) -> Iterator[None]:
    yield from holders_and_waiter(world, "lock")


@caller
def of_places(world: World) -> Iterator[None]:
    """No script names the key of a second place among its keys."""
    yield from holders_and_waiter(world, "places", limit=2)


@caller
def of_several_names(world: World) -> Iterator[None]:
    names = [key("one"), key("two")]
    holder, waiter = (
        MultiLock(world.client, names, 30, renew=True, thread_local=False) for _ in range(2)
    )
    assert holder.acquire()
    waiting = Background(lambda: waiter.acquire(blocking_timeout=2 * PATIENCE))
    world.one_more_waits()
    fences = holder.fences
    yield
    assert not waiting.done
    assert not holder.lost
    assert holder.owned()
    assert holder.fences == fences
    holder.release()
    assert waiting.result()
    waiter.release()


@caller
def tasks(world: World) -> Iterator[None]:
    async def acquire(**options: Any) -> AsyncLock:
        lock = AsyncLock(world.for_tasks, key("task"), 30, thread_local=False, **options)
        assert await lock.acquire()
        return lock

    holder = world.tasks.do(lambda: acquire(renew=True))
    waiting = world.tasks.start(acquire(blocking_timeout=2 * PATIENCE))
    world.one_more_waits()
    yield
    assert not waiting.done()
    assert world.tasks.do(holder.owned)
    world.tasks.do(holder.release)
    world.tasks.do(waiting.result(PATIENCE).release)


def computation(world: World, leads: str, follows: str) -> Iterator[None]:
    """A thread and the task of a loop follow each other by way of Redis."""
    cache, name = world.cache, key(f"of-a-{leads}")
    began, go_on, computed = threading.Event(), threading.Event(), []

    def compute() -> str:
        computed.append(1)
        began.set()
        assert go_on.wait(2 * PATIENCE)
        return "computed"

    def get(by: str) -> Any:
        if by == "thread":
            return cache.get_or_set(name, compute, 60)
        return asyncio.run(cache.aget_or_set(name, compute, 60))

    leader = Background(get, leads)
    assert began.wait(PATIENCE)
    follower = Background(get, follows)
    world.one_more_waits()
    yield
    go_on.set()
    assert leader.result() == "computed"
    assert follower.result() == "computed"
    assert len(computed) == 1
    assert ask(world.primary(), "EXISTS", cache.make_key(name))
    if not world.old_goes_on:
        until(lambda: read(cache, name) == "computed")


def read(cache: RedisCache, name: str) -> Any:
    """The value; None while the sentinels still name the server that failed as one to read from."""
    try:
        return cache.get(name)
    except (redis.ConnectionError, redis.TimeoutError):
        return None


@caller
def a_task_follows_a_thread(world: World) -> Iterator[None]:
    yield from computation(world, "thread", "task")


@caller
def a_thread_follows_a_task(world: World) -> Iterator[None]:
    yield from computation(world, "task", "thread")


def go_on(world: World, callers: list[Caller], fail: Callable[[], None]) -> None:
    """Have all ``callers`` live through what ``fail`` does: then there is another primary."""
    running = [caller(world) for caller in callers]
    for steps in running:
        next(steps)
    before = world.primary()
    fail()
    until(lambda: world.primary() is not before)
    until(lambda: had_again(world))
    until(world.all_wait)
    for steps in running:
        assert next(steps, None) is None


def lose(
    client: Any, name: str, primary: RedisServer, replicas: list[RedisServer], fail_over: Any
) -> None:
    """The ``primary`` dies, and no replica has heard of the acquisition: who has lost the lock is
    told so, and the waiter has it."""
    cut_off(primary, replicas)
    told = threading.Event()
    holder = Lock(client, name, timeout=30, renew=True, on_lost=told.set)
    assert holder.acquire()
    fence = holder.fence
    other = Lock(client, name, timeout=30, thread_local=False)
    waiter = Background(lambda: other.acquire(blocking_timeout=2 * PATIENCE))
    until(lambda: ask(primary, "INFO", "clients")["blocked_clients"])
    primary.kill()
    for replica in replicas:
        replica.resume()
    fail_over()
    assert waiter.result()
    hurry_until(told.is_set, Renewal)
    assert holder.lost
    assert fence is not None
    assert other.fence > fence


def had_again(world: World) -> bool:
    """Whether a lock could be had, and at the primary: another may go on for a while. What an
    attempt without a reply has taken is given back in the background, and so is what the end of its
    block could not release."""
    try:
        with Lock(world.client, key("again"), timeout=30, blocking=False) as lock:
            token = lock.local.token
            return bool(ask(world.primary(), "GET", key("again")) == token.decode())
    except (redis.RedisError, LockError):
        return False
