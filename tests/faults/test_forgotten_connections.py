"""A firewall, a load balancer or a network address translation forgets connections without traffic,
and tells neither end. Redis is well: whoever has such a connection goes on with another (P2)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncRedlock, Lock, MultiLock, Redlock, events, keeper, pools
from django_redis_lock.cache import RedisCache
from django_redis_lock.singleflight import flight
from django_redis_lock.transport import (
    aio_client,
    aio_connection,
    asyncio_client,
    circuit_breaker,
    server,
    server_of,
)
from tests.holding import renew, watch_often
from tests.processes import PATIENCE, in_threads, until
from tests.redis_server import FOR_COMMAND, RedisServer
from tests.support.background import Background

from .proxy import Proxy

pytestmark = pytest.mark.invariant("P2")

#: Seconds: that an idle connection has to answer; the time-out of a socket; within which a call
#: must end, on a busy machine, though its first connection is silent; and for which a grant lives
#: that a forgotten pop does not get.
PROBE, TIMEOUT, SOON, GRANT = 0.1, 2 * PATIENCE, 15.0, 0.5


def trust(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in (aio_client, aio_connection, keeper, pools, server):
        monkeypatch.setattr(module, "TRUSTED_SECONDS", seconds)


@pytest.fixture(autouse=True)
def _in_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Firewalls forget after minutes, and these tests at once: no connection is trusted that was
    idle for a moment. A check that comes too late on a busy machine costs a connection, and
    nothing else."""
    trust(monkeypatch, 0.0)
    for module in (circuit_breaker, aio_client, aio_connection, keeper, pools, server):
        monkeypatch.setattr(module, "PROBE_SECONDS", PROBE)
    watch_often(monkeypatch)
    monkeypatch.setattr(flight, "FOLLOWER_CHECK_SECONDS", 0.5)


def pause(proxy: Proxy) -> None:
    """Until all are idle; then those are forgotten that have no call under way, also those on which
    a pop waits."""
    time.sleep(0.02)
    proxy.forget(waits=True)


def through(proxy: Proxy, **options: Any) -> redis.Redis:
    return proxy.client(socket_timeout=TIMEOUT, **options)


def cache_of(proxy: Proxy) -> Any:
    url = f"redis://127.0.0.1:{proxy.port}/0"
    return RedisCache(url, {"OPTIONS": {"SOCKET_TIMEOUT": TIMEOUT}})


def expect_well(client: Any) -> None:
    """No outage was seen."""
    assert not server_of(client).breaker.failing


@contextmanager
def no_outage(proxy: Proxy) -> Iterator[None]:
    """None of the server is seen in this block, not even for a moment."""
    found: list[Any] = []
    events.subscribe(found.append)
    try:
        yield
    finally:
        events.unsubscribe(found.append)
    down = [event.server for event in found if isinstance(event, events.ServerDown)]
    assert not [server for server in down if f":{proxy.port}/" in server]


def taken(lock: Any) -> None:
    assert lock.acquire(blocking=False)
    lock.release()


def briefly_awaited(lock: Any) -> None:
    assert lock.acquire(blocking_timeout=SOON / 2)
    lock.release()


def servers(proxy: Proxy) -> list[redis.Redis]:
    return [through(proxy, db=db) for db in (1, 2, 3)]


def hit(cache: Any) -> None:
    assert cache.get_or_set("hit", lambda: 1, 60) == 1


def lock_through(proxy: Proxy, **options: Any) -> Lock:
    return Lock(through(proxy), "idle", timeout=60, **options)


#: Makes a lock or a cache, and calls it.
CALLERS: dict[str, tuple[Callable[[Proxy], Any], Callable[[Any], Any]]] = {
    "Lock": (lock_through, taken),
    "a wait": (lock_through, briefly_awaited),
    "questions": (lock_through, lambda lock: lock.locked()),
    "limit": (lambda proxy: lock_through(proxy, limit=2), taken),
    "several names": (lambda proxy: MultiLock(through(proxy), ["a", "b"], timeout=60), taken),
    "Redlock": (lambda proxy: Redlock(servers(proxy), "idle", 60, server_timeout=5), taken),
    "get_or_set": (cache_of, hit),
    "get_or_set_many": (
        cache_of,
        lambda cache: cache.get_or_set_many(["a"], lambda keys: {"a": 1}, 60),
    ),
    "get and set": (cache_of, lambda cache: (cache.set("a", 1), cache.get("a"))),
    "get_many": (cache_of, lambda cache: cache.get_many(["a"])),
    "counts": (cache_of, lambda cache: (cache.add("five", 5), cache.incr("five"))),
    "django-redis": (cache_of, lambda cache: cache.ttl("a")),
    "redis-py": (cache_of, lambda cache: cache.client.get_client().ping()),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("caller", CALLERS)
def test_a_call_after_a_pause(proxy: Proxy, caller: str) -> None:
    make, call = CALLERS[caller]
    made = make(proxy)
    call(made)
    for _ in range(2):
        pause(proxy)
        began = time.monotonic()
        call(made)
        assert time.monotonic() - began < SOON
    expect_well(through(proxy))


def test_threads_each_with_a_forgotten_connection(proxy: Proxy) -> None:
    client = through(proxy)
    together = threading.Barrier(6, lambda: pause(proxy))

    def work() -> None:
        lock = Lock(client, f"idle-{threading.get_ident()}", timeout=60)
        for _ in range(3):
            together.wait(PATIENCE)
            began = time.monotonic()
            taken(lock)
            assert time.monotonic() - began < SOON

    assert in_threads(6, work) == [None] * 6
    expect_well(client)


def test_a_waiter_whose_blocking_pop_is_forgotten(proxy: Proxy, client: redis.Redis) -> None:
    lock = Lock(through(proxy), "idle", timeout=60)
    with Lock(client, "idle", timeout=60, grant_timeout=GRANT):
        waiting = Background(lambda: lock.acquire(blocking_timeout=60))
        until(lambda: client.info("clients")["blocked_clients"])
        pause(proxy)
    began = time.monotonic()
    assert waiting.result()
    assert time.monotonic() - began < SOON
    expect_well(through(proxy))


def test_renewals_are_far_apart(proxy: Proxy, client: redis.Redis) -> None:
    lost: list[int] = []
    lock = Lock(through(proxy), "idle", 60, renew=True, on_lost=lambda: lost.append(1))
    with lock:
        renew(client, "idle")
        time.sleep(0.02)
        client.config_resetstat()
        renew(client, "idle")
        assert "PING" not in commands(client), "it is sent at once"
        for _ in range(3):
            renew(client, "idle")
            pause(proxy)
        lock.ensure_held()
    assert not lost
    expect_well(through(proxy))


def test_a_leader_that_computes_for_long_and_its_follower(
    proxy: Proxy, client: redis.Redis
) -> None:
    leader, follower = cache_of(proxy), cache_of(proxy)
    options: dict[str, Any] = {"wait": 60, "timeout": 60}
    leader.get_or_set("other", lambda: 1, 60)
    end = threading.Event()
    computing = Background(
        lambda: leader.get_or_set("slow", lambda: end.wait(PATIENCE) and "value", **options)
    )
    until(lambda: client.keys("*slow*:flight"))

    async def follow() -> Any:
        return await follower.aget_or_set("slow", lambda: "of the follower", **options)

    following = Background(lambda: asyncio.run(follow()))
    until(lambda: client.info("clients")["blocked_clients"])
    pause(proxy)
    end.set()
    assert following.result() == "value"
    assert computing.result() == "value"
    assert leader.get("slow") == "value"
    expect_well(through(proxy))


def commands(client: redis.Redis) -> dict[str, int]:
    """How often each was sent since the figures began."""
    said = client.info("commandstats")
    return {name.removeprefix("cmdstat_").upper(): each["calls"] for name, each in said.items()}


#: What is called after a pause, and what is then sent.
ONE_TRIP: dict[str, tuple[Callable[[Any], Any], dict[str, int]]] = {
    "get": (lambda cache: cache.get("a"), {"GET": 1}),
    "get_or_set": (lambda cache: cache.get_or_set("a", str, 60), {"GET": 1}),
    "get_many": (lambda cache: cache.get_many(["a", "b"]), {"MGET": 1}),
    "aget": (lambda cache: loop_of(cache).run_until_complete(cache.aget("a")), {"GET": 1}),
    "locked": (lambda cache: cache.lock("a").locked(), {"EVALSHA": 1}),
    "lock": (lambda cache: taken(cache.lock("a", timeout=60)), {"EVALSHA": 2}),
}


def loop_of(cache: Any) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = cache.loop
    return loop


@pytest.mark.parametrize("name", ONE_TRIP)
def test_a_call_after_a_pause_is_sent_at_once(proxy: Proxy, client: redis.Redis, name: str) -> None:
    call, sent = ONE_TRIP[name]
    cache = cache_of(proxy)
    cache.loop = asyncio.new_event_loop()
    cache.set_many({"a": 1, "b": 2})
    call(cache)
    time.sleep(0.02)
    client.config_resetstat()
    call(cache)
    counted = commands(client)
    assert "PING" not in counted
    assert {command: counted[command] for command in sent} == sent
    cache.loop.run_until_complete(cache.loop.shutdown_asyncgens())
    cache.loop.close()


def test_a_lock_that_was_awaited_is_released_at_once(proxy: Proxy, client: redis.Redis) -> None:
    """The reply about its grant may still be unread on the connection."""
    lock = lock_through(proxy, thread_local=False)
    with Lock(client, "idle", timeout=60):
        waiting = Background(lock.acquire)
        until(lambda: client.info("clients")["blocked_clients"])
    assert waiting.result()
    time.sleep(0.02)
    client.config_resetstat()
    lock.release()
    assert "PING" not in commands(client)
    assert not client.exists("idle")


#: What a task calls on a connection that was forgotten, with what it returns the second time.
IN_TASKS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "get": (lambda cache: cache.aget("a"), 1),
    "set": (lambda cache: cache.aset("a", 1), True),
    "incr": (lambda cache: cache.aincr("a"), 3),
    "get_or_set": (lambda cache: cache.aget_or_set("a", lambda: 2, 60), 1),
    "get_or_set a new one": (lambda cache: cache.aget_or_set("new", lambda: 2, 60), 2),
    "lock": (lambda cache: taken_by_a_task(cache.alock("a")), None),
}


async def taken_by_a_task(lock: Any) -> None:
    async with lock:
        pass


@pytest.mark.parametrize("name", IN_TASKS)
def test_a_call_of_a_task_after_a_pause(proxy: Proxy, name: str) -> None:
    cache = cache_of(proxy)
    cache.set("a", 1)

    call, expected = IN_TASKS[name]

    async def main() -> None:
        if "new" not in name:
            await call(cache)
        else:
            await cache.aget("a")
        await asyncio.to_thread(pause, proxy)
        assert await asyncio.wait_for(call(cache), SOON) == expected
        await asyncio.to_thread(pause, proxy)
        await asyncio.wait_for(call(cache), SOON)

    with no_outage(proxy):
        asyncio.run(main())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_server_that_is_slow_after_a_pause_does_the_call_once(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """No new connection comes about either, so the call is left where it is."""
    monkeypatch.setattr(server, "CHECK_SECONDS", 0.1)
    cache: Any = RedisCache(own_server.url, {"OPTIONS": {"SOCKET_TIMEOUT": TIMEOUT}})
    ours = server_of(cache.client.get_client())
    cache.set("a", 1)

    async def tasks() -> Any:
        await cache.aget("b")
        own_server.pause()
        reading = asyncio.ensure_future(cache.aget("a"))
        await asyncio.to_thread(until, lambda: ours.breaker.failing)
        own_server.resume()
        return await reading

    with own_server.client() as client:
        client.config_resetstat()
        if asynchronous:
            assert asyncio.run(tasks()) == 1
        else:
            own_server.pause()
            reading = Background(lambda: cache.get("a"))
            until(lambda: ours.breaker.failing)
            own_server.resume()
            assert reading.result() == 1
        assert commands(client)["GET"] == 1 + asynchronous
    assert not ours.breaker.failing


@pytest.fixture
def _all_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    trust(monkeypatch, PATIENCE)


@pytest.mark.usefixtures("_all_are_trusted")
def test_all_connections_are_forgotten_at_once(proxy: Proxy, pace: int) -> None:
    """The address leads to another machine: what was used just before is silent, too."""
    client = proxy.client(socket_timeout=0.4 * pace)
    url = f"redis://127.0.0.1:{proxy.port}/0?socket_timeout={0.4 * pace}"
    cache: Any = RedisCache(url, {})
    lock = Lock(client, "idle", timeout=60)
    with no_outage(proxy):
        for _ in range(2):
            taken(lock)
            hit(cache)
            proxy.forget()
        taken(lock)
        hit(cache)


@pytest.mark.usefixtures("_all_are_trusted")
def test_a_server_that_is_slow_for_a_moment_costs_no_connection(own_server: RedisServer) -> None:
    with own_server.client() as client:
        lock = Lock(client, "slow", timeout=60, thread_local=False)
        lock.acquire()
        made = client.info("stats")["total_connections_received"]
        own_server.pause()
        asking = Background(lock.owned)
        time.sleep(3 * PROBE)
        own_server.resume()
        assert asking.result()
        assert client.info("stats")["total_connections_received"] == made


BRIEFLY: dict[str, Callable[[Any, str], Any]] = {
    "one": lambda client, name: Lock(client, name, 60),
    "limit": lambda client, name: Lock(client, name, 60, limit=2),
    "several names": lambda client, name: MultiLock(client, [f"{name}-1", f"{name}-2"], 60),
}


@pytest.mark.usefixtures("_all_are_trusted")
@pytest.mark.parametrize("kind", BRIEFLY)
def test_a_short_wait_has_time_for_a_second_try(proxy: Proxy, kind: str, pace: int) -> None:
    """However long the time-out of the socket is."""
    seconds = 1.0 * pace
    lock = BRIEFLY[kind](through(proxy), "idle")
    with no_outage(proxy):
        for _ in range(2):
            assert lock.acquire(blocking_timeout=seconds)
            lock.release()
            proxy.forget()


@pytest.mark.usefixtures("_all_are_trusted")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_connections_of_a_redlock_are_forgotten_at_once(
    proxy: Proxy, asynchronous: bool, pace: int
) -> None:
    """Each call has time for a second try, and what was sent twice counts once."""

    async def main() -> None:
        clients: list[Any] = list(servers(proxy))
        if asynchronous:
            clients = [redis.asyncio.Redis(port=proxy.port, db=db) for db in (1, 2, 3)]
        lock_class: Any = AsyncRedlock if asynchronous else Redlock
        lock = lock_class(clients, "idle", timeout=60, server_timeout=1.0 * pace)
        calls = (partial(lock.acquire, blocking=False), partial(lock.extend, 60), lock.owned)
        for _ in range(2):
            for call in (*calls, lock.release):
                result = call()
                assert (await result if asynchronous else result) in (True, None)
                proxy.forget()
        for client in clients if asynchronous else ():
            await client.connection_pool.disconnect()

    with no_outage(proxy):
        asyncio.run(main())


def test_the_asyncio_pool_of_a_loop(proxy: Proxy, client: redis.Redis) -> None:
    """A project uses the loop's client for commands of its own."""

    async def main() -> None:
        tasks = asyncio_client(through(proxy))
        before = client.info("stats")["total_connections_received"]
        for value in (b"1", b"2", b"3"):
            async with tasks.pipeline() as pipe:
                replies = await asyncio.wait_for(pipe.set("a", value).get("a").execute(), SOON)
            assert replies[-1] == value
            if value == b"2":
                pause(proxy)
        assert client.info("stats")["total_connections_received"] - before == 2
        await tasks.connection_pool.disconnect()

    asyncio.run(main())


def test_what_has_come_on_a_connection_hides_no_silence(proxy: Proxy, client: redis.Redis) -> None:
    """The server says in RESP3 that a key has changed: that is no reply."""
    options = {"SOCKET_TIMEOUT": TIMEOUT, "CONNECTION_POOL_KWARGS": {"protocol": 3}}
    cache: Any = RedisCache(f"redis://127.0.0.1:{proxy.port}/0", {"OPTIONS": options})
    pool = cache.client.get_client().connection_pool
    connection = pool.get_connection(*FOR_COMMAND)
    for command in (("CLIENT", "TRACKING", "ON"), ("GET", "a")):
        connection.send_command(*command)
        connection.read_response()
    client.set("a", 1)
    until(connection.can_read)
    pool.release(connection)
    proxy.forget()
    assert Background(cache.client.get_client().get, "a").result() == b"1"
