"""A lock on five servers while some of them are killed, frozen, restarted or forgetful."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redis_lock import AsyncRedlock, LockLost, Redlock, TooFewServers
from django_redis_lock.contrib import redlock
from django_redis_lock.transport import server as transport
from django_redis_lock.transport.server import server_of
from tests import lanes
from tests.faults.proxy import Proxy
from tests.holding import until_released
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer
from tests.support.backends import places
from tests.support.background import Background

pytestmark = pytest.mark.usefixtures("watched_often")

FIVE = 5
#: Seconds for which a server is waited for.
LIMIT = 0.25


@pytest.fixture(autouse=True)
def _limit(monkeypatch: pytest.MonkeyPatch, pace: int) -> None:
    monkeypatch.setitem(globals(), "LIMIT", LIMIT * pace)
    monkeypatch.setattr(redlock, "SERVER_TIMEOUT_SECONDS", LIMIT)


class Five:
    """Five servers, and clients of all of them."""

    def __init__(self) -> None:
        self.servers = [RedisServer() for _ in range(FIVE)]
        for server in self.servers:
            server.start()
        self.clients = [s.client(retry=Retry(NoBackoff(), 0)) for s in self.servers]

    def recover(self) -> None:
        """What was done to the servers is undone, and forgotten."""
        for server, client in zip(self.servers, self.clients, strict=True):
            if server.frozen:
                server.resume()
            if not server.runs:
                server.start()
            server.flush()
            server_of(client).close()
            server_of(client).answered()

    def lock(self, **options: Any) -> Redlock:
        return Redlock(self.clients, "faulty", **{"timeout": 30, **options})

    def order(self) -> list[int]:
        """The places in the order in which everybody waits for them."""
        return self.lock()._order()

    def holders(self) -> list[bytes | None]:
        """What each server that answers says."""
        return [client.get("faulty") for client in self.clients]

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture(scope="module")
def _five() -> Iterator[Five]:
    found = Five()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def five(_five: Five) -> Iterator[Five]:
    yield _five
    _five.recover()


def seconds(work: Any) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


class TestMinority:
    @pytest.mark.parametrize("how", ["kill", "pause"])
    def test_it_costs_no_more_than_the_limit(self, five: Five, how: str) -> None:
        lock = five.lock()
        with lock:
            pass
        for place in five.order()[:2]:
            getattr(five.servers[place], how)()
        # And what a busy machine may add; a server that is paused never answers.
        assert seconds(lock.acquire) < LIMIT + 10
        lock.ensure_held()
        assert lock.owned()
        lock.release()
        # By now it is known, and costs nothing; each cycle would ask it twice.
        cycles = 40
        assert (
            seconds(lambda: [lock.acquire() and lock.release() for _ in range(cycles)])
            < cycles * LIMIT
        )
        assert lock.acquire(blocking=False)
        assert not five.lock().acquire(blocking=False)
        assert five.lock().reset()

    @pytest.mark.parametrize(("how", "which"), [("kill", 0), ("kill", 1), ("pause", 0)])
    def test_waiters_are_woken_all_the_same(self, five: Five, how: str, which: int) -> None:
        """Also if it is the server they wait at that is gone."""
        holder = five.lock()
        assert holder.acquire()
        # No limit: the last try before it would have the lock, too, and nobody would have woken it.
        waiter = Background(five.lock().acquire)
        first = five.clients[five.order()[0]]
        until(lambda: places("faulty") and first.info("clients")["blocked_clients"])
        getattr(five.servers[five.order()[which]], how)()
        assert not waiter.done
        holder.release()
        assert waiter.result() is True

    def test_a_waiter_has_it_by_the_id_that_it_has_chosen(self, five: Five) -> None:
        """Also if a server does not tell whether it has granted it."""
        holder = five.lock()
        holder.acquire()
        five.servers[five.order()[-1]].pause()
        waiter = Background(five.lock(id="mine").acquire)
        until(lambda: places("faulty"))
        holder.release()
        assert waiter.result() is True
        answering = [five.clients[place] for place in five.order()[:-1]]
        assert [client.get("faulty") for client in answering].count(b"mine") > FIVE // 2

    def test_a_server_that_comes_back_empty_is_asked_again(self, five: Five, pace: int) -> None:
        """So all can be restarted under a lock, one after the other."""
        told = threading.Event()
        lock = five.lock(timeout=0.9 * pace, renew=True, on_lost=told.set)
        lock.acquire()
        several = FIVE if lanes.everything else FIVE // 2 + 1
        for server, client in list(zip(five.servers, five.clients, strict=True))[:several]:
            server.restart()
            until(lambda client=client: client.get("faulty") == lock.local.token)
            until(lambda client=client: client.hexists("{faulty}:owner", "id"))
        assert not told.is_set()
        lock.ensure_held()
        assert not five.lock().acquire(blocking=False)
        lock.release()
        assert five.holders() == [None] * FIVE

    def test_another_caller_does_not_get_the_lock_during_the_vote(self, five: Five) -> None:
        lock = five.lock()
        lock.acquire()
        for place in five.order()[:2]:
            five.servers[place].restart()
        waiter = Background(lambda: five.lock().acquire(blocking_timeout=PATIENCE))
        until(lambda: places("faulty"))
        assert not five.lock().acquire(blocking=False)
        assert not waiter.done
        lock.ensure_held()
        lock.release()
        assert waiter.result() is True

    def test_a_vote_of_a_server_that_was_not_asked_again_is_given_back(
        self, five: Five, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing was sent there in the last round, but what it granted before would stay."""
        first, *others = five.order()
        for place in others[:3]:
            five.clients[place].set("faulty", "another's")
        waits = iter([True, None])

        def wait_at(lock: Redlock, place: int, request: Any) -> Any:
            granted = next(waits)
            if granted:  # Before the second wait, the keeper may have given it back already.
                assert five.clients[first].exists("faulty")
                for _ in range(2):
                    server_of(five.clients[first]).breaker.failed(redis.TimeoutError("silent"), 5.0)
            return granted

        monkeypatch.setattr(Redlock, "_wait_at", wait_at)
        assert not five.lock(timeout=None).acquire(blocking_timeout=PATIENCE)
        until(lambda: not five.clients[first].exists("faulty"))


class TestMajority:
    @pytest.mark.parametrize("how", ["kill", "pause"])
    def test_too_few_is_not_taken(self, five: Five, how: str) -> None:
        lock = five.lock()
        lock.acquire()
        for server in five.servers[1:4]:
            getattr(server, how)()
        for call in (
            five.lock().acquire,
            lambda: five.lock().acquire(blocking=False),
            lambda: five.lock().acquire(blocking_timeout=PATIENCE),
            lock.locked,
            lock.owned,
            lambda: lock.extend(5),
        ):
            with pytest.raises(TooFewServers, match="Only 2 of 5 servers") as caught:
                call()
            assert isinstance(caught.value, redis.ConnectionError)
            assert caught.value.lock_name == "faulty"
            assert (caught.value.reached, caught.value.servers) == (2, 5)
            assert len(caught.value.errors) == 3
        lock.ensure_held()

    def test_a_waiter_waits_until_its_deadline(self, five: Five, pace: int) -> None:
        holder = five.lock()
        holder.acquire()
        # It must hear of all five: it waits at the first that says that the lock is taken.
        wanted = five.lock(server_timeout=10)
        waiter = Background(lambda: wanted.acquire(blocking_timeout=0.8 * pace))
        until(lambda: places("faulty"))
        for server in five.servers[:3]:
            server.kill()
        with pytest.raises(TooFewServers):
            waiter.result()
        assert not places("faulty")

    def test_a_waiter_lives_through_it(self, five: Five) -> None:
        # The servers that go on have it until then: one that is asked early waits in their queue.
        holder = five.lock(timeout=2)
        holder.acquire()
        waiter = Background(lambda: five.lock().acquire(blocking_timeout=PATIENCE))
        until(lambda: places("faulty"))
        for server in five.servers[:3]:
            server.kill()
        until(lambda: not places("faulty"))
        for server in five.servers[:3]:
            server.start()
        assert waiter.result() is True

    @pytest.mark.parametrize("how", ["kill", "pause", "flush"])
    def test_the_holder_calls_on_lost(self, five: Five, how: str) -> None:
        """Before its deadline; or when the servers have lost their data, long before it."""
        told = threading.Event()
        options: dict[str, Any] = {"timeout": 1.5, "renew": True}
        if how == "flush":
            options = {"timeout": 600, "renew": False}
        lock = five.lock(on_lost=told.set, **options)
        lock.acquire()
        for server in five.servers[:3]:
            getattr(server, how)()
        assert told.wait(PATIENCE)
        with pytest.raises(LockLost):
            lock.ensure_held()

    def test_a_failed_release_can_be_done_again(self, five: Five) -> None:
        lock = five.lock()
        lock.acquire()
        for server in five.servers[:3]:
            server.pause()
        with pytest.raises(TooFewServers):
            lock.release()
        assert lock.local.token
        for server in five.servers[:3]:
            server.resume()
        until(lambda: five.lock().acquire(blocking=False))


@pytest.mark.invariant("S4")
class TestFences:
    def test_fences_increase_with_any_majority(self, five: Five) -> None:
        """Also when the server with the fastest clock votes for one and not for the next."""
        fast = five.clients[0]
        fast.set("{faulty}:fence", int(time.time() * 1e6) + 3_600_000_000)
        with five.lock(server_timeout=PATIENCE) as lock:  # Its vote counts, also if it is late.
            first = lock.fence
        five.servers[0].kill()
        with five.lock() as lock:
            second = lock.fence
        assert first is not None
        assert second is not None
        assert second > first > (time.time() + 3000) * 1e6


def test_no_contender_starves(five: Five) -> None:
    """No livelock: processes that come at once, over and over."""
    urls = [server.url for server in five.servers]
    many, times = (8, 6) if lanes.everything else (6, 4)
    with processes(contend, urls, times, count=many) as crew:
        crew.go()
        intervals = [interval for result in crew.results() for interval in result]
    assert len(intervals) == many * times
    intervals.sort()
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(intervals))


def contend(link: Link, urls: list[str], times: int) -> list[tuple[float, float]]:
    clients = [redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0)) for url in urls]
    # Also on a busy machine, a server that is not there has not just been slow.
    patience: dict[str, Any] = {"server_timeout": 5.0, "blocking_timeout": 2 * PATIENCE}
    intervals: list[tuple[float, float]] = []
    while len(intervals) < times:
        # Of one call, a majority may meet its servers just when they are restarted.
        with suppress(TooFewServers), Redlock(clients, "faulty", timeout=60, **patience):
            began = time.monotonic()
            time.sleep(0.002)
            intervals.append((began, time.monotonic()))
    return intervals


def test_what_was_broken_off_leaves_nothing_behind(five: Five) -> None:
    """A task that is cancelled while it asks, or while it waits."""

    async def main() -> None:
        clients = [redis.asyncio.Redis(port=server.port) for server in five.servers]
        for pause in (0.0, 0.002, 0.2):
            holder = AsyncRedlock(clients, "faulty", timeout=30)
            if pause > 0.1:
                assert await holder.acquire()
            other = AsyncRedlock(clients, "faulty", timeout=30, thread_local=False)
            waiting = asyncio.create_task(other.acquire())
            await asyncio.sleep(pause)
            waiting.cancel()
            try:
                assert await waiting
                await other.release()
            except asyncio.CancelledError:
                pass
            if pause > 0.1:
                await holder.release()
            deadline = time.monotonic() + PATIENCE
            last = AsyncRedlock(clients, "faulty", timeout=30)
            assert await last.acquire(blocking_timeout=PATIENCE)
            await last.release()
            assert time.monotonic() < deadline
        for client in clients:
            await client.aclose()

    asyncio.run(main())
    until_released()
    assert five.holders() == [None] * FIVE


def test_a_reply_that_does_not_come_counts_once(five: Five, pace: int) -> None:
    async def main() -> None:
        limit = 0.3 * pace
        clients = [redis.asyncio.Redis(port=s.port, socket_timeout=limit) for s in five.servers]
        lock = AsyncRedlock(clients, "faulty", timeout=30, server_timeout=7 * limit)
        await lock.locked()
        five.servers[0].pause()
        await lock.locked()
        breaker = server_of(clients[0]).breaker
        assert (breaker.failing, breaker.held_back) == (True, False)
        five.servers[0].resume()
        for client in clients:
            await client.aclose()

    asyncio.run(main())


def lose_reply_on_a_new_connection(proxy: Proxy, server: RedisServer) -> None:
    """As when the keeper has the one that was idle."""
    for known in [*transport._servers.values()]:
        if known.address.connection_kwargs.get("port") == proxy.port:
            known.close()
    proxy.lose_reply_to(b"EVALSHA")


#: What happens to one connection of a server that is well, with a request on its way.
OF_ONE_CONNECTION: dict[str, Any] = {
    "closed": lambda proxy, server: server.asking.client_kill_filter(_type="normal", skipme=True),
    "reset": lambda proxy, server: proxy.reset_after_request(b"EVALSHA"),
    "reply lost": lambda proxy, server: proxy.lose_reply_to(b"EVALSHA"),
    "reply lost on a new one": lose_reply_on_a_new_connection,
}
#: With what they return, whatever happens to a connection.
CALLS: dict[str, tuple[dict[str, Any], Any]] = {
    "acquire": ({"blocking": False}, True),
    "extend": ({"additional_time": 60}, True),
    "owned": ({}, True),
    "locked": ({}, True),
    "release": ({}, None),
}


@pytest.mark.parametrize("lock_class", [Redlock, AsyncRedlock])
@pytest.mark.parametrize("during", CALLS)
@pytest.mark.parametrize("fault", OF_ONE_CONNECTION)
def test_a_connection_that_breaks_is_not_its_server(
    five: Five, fault: str, during: str, lock_class: Any
) -> None:
    """Kind: the end of a connection counts as an outage. Each of these servers is needed."""

    async def main() -> None:
        of = redis.asyncio if lock_class is AsyncRedlock else redis
        clients = [of.Redis(port=p.port, retry=Retry(NoBackoff(), 0)) for p in proxies]
        lock = lock_class(clients, "faulty", timeout=30, server_timeout=10)
        for break_now in (False, True):  # First, so that connections are there.
            for name, (options, expected) in CALLS.items():
                if break_now and name == during:
                    for ends in zip(proxies, five.servers, strict=False):
                        OF_ONE_CONNECTION[fault](*ends)
                result = getattr(lock, name)(**options)
                assert (await result if inspect.isawaitable(result) else result) is expected
        for client in clients if lock_class is AsyncRedlock else ():
            await client.aclose()

    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server)) for server in five.servers[:3]]
        asyncio.run(main())
    until_released()
    assert five.holders() == [None] * FIVE
