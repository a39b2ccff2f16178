"""An exception from a signal handler at each point of a call of the cache, on connections of our
own or of redis-py's pool: whatever the point, the calls that follow return what belongs to them
(P1)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django_redis.pool import ConnectionFactory
from redis.connection import Connection

from django_redis_lock.cache import LocMemCache, RedisCache
from django_redis_lock.transport import asyncio_client
from tests.processes import Link, processes
from tests.redis_server import FOR_COMMAND, RedisServer
from tests.support.interrupts import Interrupt, Points, TimeLimit, each_point

from .test_real_signals import interrupted

pytestmark = pytest.mark.invariant("P1")

VALUES = {f"key-{number}": f"value {number}" for number in range(5)}


class OwnConnection(Connection):
    """A project's."""


def make_cache(kind: str, url: str) -> RedisCache:
    connections: dict[str, Any] = {
        "own class": {"connection_class": OwnConnection},
        "with a name": {"client_name": "reports"},
        "RESP3": {"protocol": 3},
    }.get(kind, {})
    # An interrupt may also leave a connection out of the pool.
    options = {"CONNECTION_POOL_KWARGS": {"max_connections": 10_000, **connections}}
    if kind == "blocking pool":
        options["CONNECTION_POOL_CLASS"] = "redis.BlockingConnectionPool"
    cache = RedisCache(url.replace("/0", "/1").replace("db=0", "db=1"), {"OPTIONS": options})
    cache.set_many(VALUES, 60)
    cache.set("number", 0, 60)
    with redis.Redis.from_url(url) as elsewhere:  # What is read here is of another database.
        elsewhere.mset(dict.fromkeys([cache.make_key(key) for key in VALUES], b"another"))
    return cache


def url_for(kind: str, server: RedisServer) -> str:
    return server.unix_url if kind == "unix" else server.url


@pytest.fixture(params=["tcp", "unix", "own class", "blocking pool", "with a name", "RESP3"])
def cache(request: pytest.FixtureRequest, own_server: RedisServer) -> Iterator[RedisCache]:
    cache = make_cache(request.param, url_for(request.param, own_server))
    yield cache
    cache.client.disconnect()
    ConnectionFactory._pools.clear()


def expect_own_replies(cache: Any) -> None:
    for key, value in list(VALUES.items())[-2:]:
        assert cache.get(key) == value
        assert 0 < cache.ttl(key) <= 60
    assert cache.get_many(VALUES) == VALUES
    assert cache.has_key("key-0")
    assert not cache.has_key("no such key")
    assert cache.get("no such key") is None


def pipelined(cache: Any) -> None:
    with cache.client.get_client().pipeline() as pipe:
        pipe.set("a", 1).get("a").incr("a").execute()


def watched(cache: Any) -> None:
    def work(pipe: Any) -> None:
        pipe.get("a")
        pipe.multi()
        pipe.set("a", 1).get("a")

    cache.client.get_client().transaction(work, "a")


def popped(cache: Any) -> None:
    client = cache.client.get_client()
    client.rpush("list", 1, 2)
    client.blpop("list", timeout=1)


def listened(cache: Any) -> None:
    with cache.client.get_client().pubsub() as messages:
        messages.subscribe("channel")
        messages.subscribe("another")  # It reads no reply before that.
        messages.get_message(timeout=1)
        messages.get_message(timeout=1)


def written(cache: Any) -> None:
    cache.set_many({"more": 1, "and more": 2}, 60)
    cache.delete_many(["more", "and more"])


CALLS: dict[str, Callable[[Any], Any]] = {
    "get": lambda cache: cache.get("key-0"),
    "set": lambda cache: cache.set("other", "value", 60),
    "get_many": lambda cache: cache.get_many(VALUES),
    "incr": lambda cache: cache.incr("number"),
    "add, delete": lambda cache: (cache.add("added", 1, 60), cache.delete("added")),
    "touch": lambda cache: cache.touch("number", 60),
    "get_or_set": lambda cache: (cache.delete("made"), cache.get_or_set("made", str, 60)),
    "ttl": lambda cache: cache.ttl("key-1"),
    "get_or_set_many": lambda cache: cache.get_or_set_many(
        ["key-0", "none"], lambda keys: dict.fromkeys(keys, "made"), 60
    ),
    "set_many, delete_many": written,
    "has_key": lambda cache: cache.has_key("key-0"),
    "keys": lambda cache: cache.keys("key-*"),
    "iter_keys": lambda cache: list(cache.iter_keys("key-*", itersize=2)),
    "expire": lambda cache: cache.expire("number", 60),
    "a pipeline": pipelined,
    "a transaction": watched,
    "a blocking pop": popped,
    "messages": listened,
}


#: What goes through the pool only where the project's own class connects.
OF_A_POOL = ["a pipeline", "a transaction", "a blocking pop", "messages", "keys", "iter_keys"]
IN_MEMORY = ["get", "set", "get_many", "ttl", "keys"]
EACH = [("tcp", name) for name in CALLS]
EACH += [("own class", name) for name in CALLS if name not in OF_A_POOL]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("cache", "name"), EACH, indirect=["cache"])
def test_at_each_point_of_a_call(cache: Any, name: str) -> None:
    def attempt(points: Points) -> None:
        try:
            with points.watched():
                CALLS[name](cache)
        except (Interrupt, TimeLimit):
            pass
        expect_own_replies(cache)

    modules = ("redis.", "django_redis_lock.transport.", "django_redis_lock.cache.")
    each_point(attempt, modules=modules)


@pytest.mark.parametrize("name", [*IN_MEMORY, "written many"])
def test_at_each_point_of_a_call_in_memory(name: str) -> None:
    """In the caller's thread there is the server, too: it may have answered half of a request."""
    cache: Any = LocMemCache("interrupts", {})
    # An interrupt may leave a connection out of the pool.
    cache.client.get_client().connection_pool.max_connections = 10_000
    cache.set_many(VALUES, 60)
    calls = {**CALLS, "written many": written}

    def attempt(points: Points) -> None:
        try:
            with points.watched():
                calls[name](cache)
        except (Interrupt, TimeLimit):
            pass
        expect_own_replies(cache)
        with cache.client.get_client().pipeline() as pipe:
            key = cache.make_key("counted")
            assert pipe.delete(key).incr(key).incr(key).execute()[1:] == [1, 2]

    each_point(attempt, modules=("redis.", "django_redis_lock."))


def test_at_each_point_of_connecting(cache: Any) -> None:
    """A connection that was interrupted before it selected its database is not used."""

    def attempt(points: Points) -> None:
        cache.client.get_client().connection_pool.disconnect()
        try:
            with points.watched():
                cache.client.get("key-0")
        except Interrupt:
            pass
        expect_own_replies(cache)

    each_point(attempt, modules=("redis.connection", "django_redis_lock.transport."))


def calls_at_random_moments(link: Link, kind: str, url: str) -> int:
    cache: Any = make_cache(kind, url)

    def work() -> None:
        for call in CALLS.values():
            call(cache)
            expect_own_replies(cache)

    count = interrupted(work, 3.0)
    expect_own_replies(cache)
    return count


@pytest.mark.sample(0)
@pytest.mark.parametrize("kind", ["tcp", "unix", "own class", "RESP3"])
def test_at_random_moments(kind: str, own_server: RedisServer) -> None:
    """In a process of its own: a signal may come within the standard library, which keeps a mutex
    locked then. Not on a blocking pool, whose queue has one."""
    with processes(calls_at_random_moments, kind, url_for(kind, own_server)) as (worker,):
        worker.go()
        assert worker.result() > 50


def test_a_reply_that_has_not_come_is_not_the_next_ones(own_server: RedisServer) -> None:
    """What redis-py looks for on a connection from its pool is a reply that has come."""
    cache: Any = RedisCache(own_server.url, {})
    cache.set_many(VALUES, 60)

    def interrupt(*args: Any) -> None:
        own_server.resume()
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    own_server.pause()
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Interrupt):
            cache.get("key-0")
    finally:
        signal.signal(signal.SIGALRM, before)
    expect_own_replies(cache)


def test_a_task_gets_no_reply_to_another_and_connects_once_more(
    client: redis.Redis, own_server: RedisServer
) -> None:
    """On the client of an event loop, for commands of the project's own."""

    async def main() -> None:
        of_loop = asyncio_client(own_server.client())
        pool = of_loop.connection_pool
        async with of_loop.pipeline() as pipe:
            await pipe.mset({"a": 1, "b": 2}).execute()
        before = own_server.asking.info("stats")["total_connections_received"]
        connection = await pool.get_connection(*FOR_COMMAND)
        await connection.send_command("GET", "a")  # Whoever sent this was cancelled.
        await pool.release(connection)
        for _ in range(3):
            async with of_loop.pipeline() as pipe:
                assert await pipe.get("b").execute() == [b"2"]
        after = own_server.asking.info("stats")["total_connections_received"]
        assert after - before == 1
        await pool.disconnect()

    asyncio.run(main())


def test_a_client_within_a_transaction_gets_no_reply_to_another_call(
    own_server: RedisServer,
) -> None:
    """Its connection does not go back to the pool in between."""
    cache: Any = RedisCache(own_server.url, {})
    with cache.client.get_client().pipeline() as pipe:
        pipe.watch("a")
        pipe.connection.send_command("GET", "of an interrupted call")
        with pytest.raises((redis.ConnectionError, redis.WatchError)):
            pipe.get("a")
    assert cache.get("a") is None
