"""Waiting: in what order, for how long, and what it costs meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from asgiref.sync import sync_to_async
from redis.asyncio import BlockingConnectionPool

from django_redis_lock import AsyncLock, Lock, LockError
from django_redis_lock.cache import RedisCache
from django_redis_lock.keeper import SentOnce, keeper
from django_redis_lock.protocol import hostname
from tests import lanes
from tests.holding import silence
from tests.moved_clock import moved_clock
from tests.processes import PATIENCE, Link, in_threads, processes, until
from tests.redis_server import FOR_COMMAND, RedisServer
from tests.support.backends import blocked, places
from tests.support.background import Background
from tests.support.logs import logged

NAME = "waiting"


def waiting_connections(client: redis.Redis) -> int:
    return len(blocked(client))


def until_waiting(client: redis.Redis, count: int = 1) -> None:
    until(lambda: waiting_connections(client) >= count)


def in_turn(link: Link, url: str) -> int | None:
    with redis.Redis.from_url(url) as client:
        for _ in range(3):
            link.hear()
            with Lock(client, NAME, timeout=30) as lock:
                client.rpush("order", link.hear())
                fence = lock.fence
        return fence


@pytest.mark.invariant("L1")
class TestOrder:
    def test_processes_have_it_in_the_order_they_came(
        self, client: redis.Redis, redis_server: RedisServer
    ) -> None:
        holder = Lock(client, NAME, timeout=60)
        with processes(in_turn, redis_server.url, count=9) as crew:
            crew.go()
            for _ in range(3):
                client.delete("order")
                holder.acquire()
                for number, waiter in enumerate(crew):
                    waiter.say("wait")
                    until_waiting(client, number + 1)
                    waiter.say(number)
                holder.release()
                until(lambda: client.llen("order") == 9)
                assert [int(n) for n in client.lrange("order", 0, -1)] == list(range(9))
            fences = crew.results()
        assert fences == sorted(fences)

    def test_tasks_and_threads_queue_together(
        self, client: redis.Redis, redis_server: RedisServer
    ) -> None:
        """They wait on connections of their own, so it is Redis that keeps their order."""
        order: list[str] = []

        def thread() -> None:
            with Lock(client, NAME, timeout=30):
                order.append("thread")

        async def task() -> None:
            async with (
                redis.asyncio.Redis.from_url(redis_server.url) as server,
                AsyncLock(server, NAME, timeout=30),
            ):
                order.append("task")

        for first, second in ((thread, task), (task, thread)):
            holder = Lock(client, NAME, timeout=60)
            holder.acquire()
            waiters = []
            for count, work in enumerate((first, second), start=1):
                run: Any = (lambda: asyncio.run(task())) if work is task else thread
                waiters.append(Background(run))
                until_waiting(client, count)
            holder.release()
            for waiter in waiters:
                waiter.result()
        assert order == ["thread", "task", "task", "thread"]


class TestManyThreads:
    @property
    def count(self) -> int:
        return 500 if lanes.everything else 200

    def test_all_get_it(self, client: redis.Redis) -> None:
        lock = Lock(client, NAME, timeout=30, blocking_timeout=PATIENCE)
        fences: list[int] = []

        def work() -> bool:
            with lock:
                assert lock.fence is not None
                fences.append(lock.fence)
            return True

        assert in_threads(self.count, work) == [True] * self.count
        assert fences == sorted(set(fences))
        assert len(fences) == self.count
        assert not places(NAME)

    def test_none_gets_it(self, client: redis.Redis) -> None:
        holder, lock = Lock(client, NAME, timeout=60), Lock(client, NAME, timeout=30)
        holder.acquire()
        results = in_threads(self.count, lambda: lock.acquire(blocking_timeout=1))
        assert results == [False] * self.count
        assert not places(NAME)
        until(lambda: not waiting_connections(client))
        # The last to leave has its line taken off the register by the keeper.
        until(lambda: not any(isinstance(job, SentOnce) for job in keeper().jobs()))
        assert not client.zcard(f"{{{NAME}}}:waiters")
        holder.release()
        assert not lock.locked()

    def test_some_get_it(self, client: redis.Redis) -> None:
        """The line moves on while its members leave it."""
        lock = Lock(client, NAME, timeout=30)

        def work() -> bool:
            if not lock.acquire(blocking_timeout=0.5):
                return False
            time.sleep(0.01)
            lock.release()
            return True

        results = in_threads(200, work)
        assert set(results) == {True, False}
        assert not places(NAME)
        assert not lock.locked()
        until(lambda: not waiting_connections(client))


def wait_and_release(lock: Lock) -> bool:
    acquired = lock.acquire(blocking_timeout=PATIENCE)
    lock.release()
    return acquired


@pytest.mark.invariant("L3")
class TestCost:
    @pytest.mark.slow
    def test_a_waiter_speaks_every_two_seconds(self, client: redis.Redis) -> None:
        """So do eight of one process (L3)."""
        holder, lock = Lock(client, NAME, timeout=60), Lock(client, NAME, timeout=30)
        holder.acquire()
        waiters = [Background(wait_and_release, lock) for _ in range(8)]
        until(lambda: places(NAME) == 8)
        until_waiting(client)
        until(lambda: client.exists(f"{{{NAME}}}:owner"))  # The keeper has named the holder.
        assert 2 <= len(commands(client, 4.5, at_least=2)) <= 3
        holder.release()
        assert all(waiter.result() for waiter in waiters)

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("options", "seconds"),
        [({"socket_timeout": 0.3}, 1), ({}, 6)],
        ids=["chosen", "that of redis-py 8"],
    )
    @pytest.mark.parametrize("waits_in", ["a thread", "a task"])
    def test_a_wait_may_be_longer_than_the_socket_timeout(
        self,
        client: redis.Redis,
        redis_server: RedisServer,
        options: dict[str, float],
        seconds: float,
        waits_in: str,
    ) -> None:
        def in_a_thread() -> bool:
            with redis_server.client(**options) as hasty:
                return Lock(hasty, NAME, timeout=30).acquire()

        async def in_a_task() -> bool:
            async with redis.asyncio.Redis.from_url(redis_server.url, **options) as hasty:
                return await AsyncLock(hasty, NAME, timeout=30).acquire()

        holder = Lock(client, NAME, timeout=60)
        holder.acquire()
        work = in_a_thread if waits_in == "a thread" else lambda: asyncio.run(in_a_task())
        waiter = Background(work)
        until_waiting(client)
        (before,) = blocked(client)
        time.sleep(seconds)
        # It is the same connection still: it kept its place.
        (after,) = blocked(client)
        assert before == after
        assert not waiter.done
        holder.release()
        assert waiter.result() is True


def commands(client: redis.Redis, seconds: float, at_least: int = 0) -> list[str]:
    """What the server is sent within ``seconds``, but for the process's heartbeat, its figures, and
    what it needs to be told of changes. Of a machine that stands still, ``at_least`` so many are
    awaited."""
    others = ("django_redis_lock:process:", "django_redis_lock:metrics", "__redis__:", "CLIENT ")
    found = []
    end = time.monotonic() + seconds
    with client.monitor() as monitor:
        while (left := end + PATIENCE * (len(found) < at_least) - time.monotonic()) > 0:
            if monitor.connection.can_read(left):
                said = monitor.next_command()
                if said["client_type"] != "lua" and not any(o in said["command"] for o in others):
                    found.append(said["command"])
    return found


@pytest.mark.invariant("L4")
class TestPools:
    """Waiters need no connection of the pool, and a used-up pool keeps no holder from releasing."""

    @pytest.mark.parametrize("kind", [redis.ConnectionPool, redis.BlockingConnectionPool])
    def test_of_threads(self, client: redis.Redis, redis_server: RedisServer, kind: Any) -> None:
        options = {"timeout": PATIENCE} if kind is redis.BlockingConnectionPool else {}
        pool = kind.from_url(redis_server.url, max_connections=1, **options)
        with redis.Redis(connection_pool=pool) as tight:
            holder, lock = Lock(tight, NAME, timeout=60), Lock(tight, NAME, timeout=30)
            holder.acquire()
            waiters = [Background(wait_and_release, lock) for _ in range(5)]
            until_waiting(client)
            assert tight.ping()
            taken = pool.get_connection(*FOR_COMMAND)
            try:
                assert holder.owned()
                holder.extend(5)
                holder.release()
                assert all(waiter.result() for waiter in waiters)
                until(lambda: not client.exists(NAME))
                assert lock.acquire(blocking_timeout=PATIENCE)
                lock.release()
            finally:
                pool.release(taken)

    @pytest.mark.parametrize("kind", [redis.asyncio.ConnectionPool, BlockingConnectionPool])
    def test_of_tasks(self, client: redis.Redis, redis_server: RedisServer, kind: Any) -> None:
        async def wait(client: Any) -> bool:
            async with AsyncLock(client, NAME, timeout=30, blocking_timeout=PATIENCE):
                return True

        async def main() -> None:
            pool = kind.from_url(redis_server.url, max_connections=1)
            async with redis.asyncio.Redis(connection_pool=pool) as tight:
                holder = AsyncLock(tight, NAME, timeout=60)
                await holder.acquire()
                waiters = [asyncio.create_task(wait(tight)) for _ in range(5)]
                while places(NAME) < 5:
                    await asyncio.sleep(0.001)
                assert await tight.ping()
                taken = await pool.get_connection(*FOR_COMMAND)
                assert await holder.owned()
                assert not await AsyncLock(tight, NAME, timeout=60).acquire(blocking_timeout=0.05)
                await holder.release()
                assert all(await asyncio.gather(*waiters))
                await pool.release(taken)
            await pool.disconnect()

        asyncio.run(asyncio.wait_for(main(), PATIENCE / 2))
        until(lambda: not client.exists(NAME))  # The last may have passed it to who had left.


def test_the_longest_wait(client: redis.Redis) -> None:
    holder, other = (Lock(client, "year", timeout=30) for _ in range(2))
    holder.acquire()
    waiter = Background(lambda: other.acquire(blocking_timeout=365 * 24 * 3600))
    until_waiting(client)
    holder.release()
    assert waiter.result()


# -- waits for oneself -----------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "places": {"limit": 2},
    "names": {"key": ["orders", NAME]},
    "reentrant": {"reentrant": True},
    "local": {"on_redis_down": "local"},
    "endless": {"timeout": None},
}


@pytest.fixture
def cache(redis_server: RedisServer) -> RedisCache:
    return RedisCache(redis_server.url, {})


def in_a_loop(main: Any) -> Any:
    """What the coroutine function returns; a loop that stands still is noticed."""
    return Background(lambda: asyncio.run(main())).result()


@pytest.mark.parametrize("holder", ["task", "thread"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_does_not_wait_for_a_task_of_its_own_loop(
    cache: RedisCache, kind: str, holder: str
) -> None:
    """It would stop the loop, and with it the task, for as long as the keeper renews the lock."""
    options = {"key": NAME, **KINDS[kind]}
    count = options.get("limit", 1)

    async def main() -> None:
        async def hold(held: asyncio.Event, leave: asyncio.Event) -> None:
            if holder == "task":
                async with cache.alock(**options):
                    held.set()
                    await leave.wait()
            else:
                with cache.lock(**options):
                    held.set()
                    await leave.wait()

        leave, held = asyncio.Event(), [asyncio.Event() for _ in range(count)]
        holders = [asyncio.ensure_future(hold(each, leave)) for each in held]
        for each in held:
            await each.wait()
        names = [options["key"], [NAME, "invoices"]] if kind == "plain" else [options["key"]]
        for name in names:
            with pytest.raises(LockError, match=r"alock\(\)"):
                cache.lock(**options | {"key": name}).acquire()
        with pytest.raises(LockError, match="alock"), cache.lock(**options):
            raise AssertionError
        leave.set()
        await asyncio.gather(*holders)
        with cache.lock(**options):
            pass

    in_a_loop(main)


def test_a_thread_of_sync_to_async_waits_for_a_task(cache: RedisCache) -> None:
    async def main() -> None:
        async with cache.alock(NAME):
            waiter = asyncio.ensure_future(sync_to_async(cache.lock(NAME).acquire)())
            await asyncio.to_thread(until, lambda: places(cache.lock(NAME).name))
        assert await waiter

    in_a_loop(main)


@pytest.mark.parametrize("holder", ["expires", "forgotten", "ends", "shared"])
def test_a_thread_waits_for_its_own_lock_if_that_ends(cache: RedisCache, holder: str) -> None:
    if holder == "expires":
        lock = cache.lock(NAME, timeout=0.3)
        assert lock.acquire()
    elif holder == "ends":
        lock = cache.lock(NAME, timeout=0.3, renew=True, max_hold=0.3)
        assert lock.acquire()
    elif holder == "forgotten":
        assert cache.lock(NAME, timeout=0.3, renew=True).acquire()
    else:
        lock = cache.lock(NAME, thread_local=False)
        assert lock.acquire()
        releases = threading.Thread(target=in_turn_of, args=(lock,))
        releases.start()
    other = cache.lock(NAME)
    assert other.acquire()
    other.release()


def in_turn_of(lock: Lock) -> None:
    """Release it when another waits for it."""
    until(lambda: places(lock.keys.lock))
    lock.release()


# -- waits that take long --------------------------------------------------------------------------


@pytest.fixture
def pass_time() -> Iterator[Callable[[float], None]]:
    with moved_clock() as pass_time:
        yield pass_time


def warned(caplog: pytest.LogCaptureFixture, name: str = NAME) -> list[str]:
    return logged(caplog, "waiting", f"waits for {name} since")


@pytest.mark.parametrize("kind", ["thread", "task", "places", "names"])
def test_a_wait_that_takes_long_is_logged_at_each_doubling(
    cache: RedisCache,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    pass_time: Callable[[float], None],
    kind: str,
) -> None:
    """Once for the process, however many wait."""
    options: dict[str, Any] = {"timeout": 3600, "thread_local": False}
    if kind == "places":
        options["limit"] = 2
    holders = [cache.lock(NAME, **options) for _ in range(options.get("limit", 1))]
    for holder in holders:
        assert holder.acquire()

    async def wait() -> bool:
        return await cache.alock(NAME, timeout=3600).acquire()

    def call() -> bool:
        if kind == "task":
            return asyncio.run(wait())
        name: Any = [NAME, "zebras"] if kind == "names" else NAME
        return cache.lock(name, **options).acquire()

    waiters = [Background(call) for _ in range(2 if kind == "places" else 1)]
    until(lambda: places(holders[0].keys.lock) == len(waiters))
    pass_time(29)
    assert not warned(caplog)
    for seconds in (30, 60, 120):
        pass_time(seconds - (29 if seconds == 30 else seconds / 2))
        until(lambda: warned(caplog))
        [said] = warned(caplog)
        assert f"since {seconds} s; held by {hostname()}:{os.getpid()} (" in said
        caplog.clear()
    for holder in holders:
        holder.release()
    for waiter in waiters:
        assert waiter.result()


def test_the_log_says_that_the_holder_is_silent(
    cache: RedisCache,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    pass_time: Callable[[float], None],
) -> None:
    holder = cache.lock(NAME, timeout=3600, thread_local=False, label="the import")
    assert holder.acquire()
    until(lambda: client.exists(holder.keys.owner))
    silence(client, holder.keys.lock, 200)
    waiter = Background(cache.lock(NAME, timeout=3600).acquire)
    until(lambda: places(holder.keys.lock))
    pass_time(31)
    until(lambda: warned(caplog))
    [said] = warned(caplog)
    assert f"held by {hostname()}:{os.getpid()}, silent for 20" in said
    assert "the import" in said
    holder.release()
    assert waiter.result()


def test_the_log_says_so_also_in_an_outage(
    own_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    pass_time: Callable[[float], None],
) -> None:
    cache = RedisCache(own_server.url, {})
    assert cache.lock(NAME, timeout=None, thread_local=False).acquire()
    waiter = Background(cache.lock(NAME, timeout=3600).acquire, None, True, 300)
    until(lambda: places(cache.lock(NAME).keys.lock))
    own_server.kill()
    pass_time(31)
    until(lambda: warned(caplog))
    assert "Redis does not say who holds it: " in warned(caplog)[0]
    pass_time(300)
    with pytest.raises(redis.exceptions.ConnectionError):
        waiter.result()
