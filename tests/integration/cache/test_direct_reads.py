"""Calls of the cache go over connections of the package's own, past redis-py, unless somebody
wants to see them there."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import redis
import redis.asyncio
from django_redis.client import DefaultClient
from redis.backoff import NoBackoff
from redis.connection import DefaultParser
from redis.retry import Retry
from redis.utils import HIREDIS_AVAILABLE

from django_redis_lock.cache import RedisCache
from tests.processes import in_threads
from tests.redis_server import RedisServer


@pytest.fixture
def cache(redis_server: RedisServer, client: redis.Redis) -> RedisCache:
    return cache_of(redis_server)


def cache_of(server: RedisServer, **options: str) -> RedisCache:
    found = RedisCache(server.url, {"OPTIONS": options})
    found.set("report", "there")
    return found


def never() -> Any:
    pytest.fail("there is a value")


def test_a_hit_is_read_again_if_its_connection_broke(
    cache: RedisCache, client: redis.Redis
) -> None:
    assert cache.get_or_set("report", never) == "there"
    for other in client.client_list():
        if other["id"] != str(client.client_id()):
            client.client_kill_filter(_id=other["id"])
    assert cache.get_or_set("report", never) == "there"


def test_threads_that_use_a_cache_at_first_need_no_connection_of_the_pool(
    redis_server: RedisServer,
) -> None:
    """Each round is a cache with a pool of its own, of which several threads make clients."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number in range(60):
            options = {"CONNECTION_POOL_KWARGS": {"client_name": f"round-{number}"}}
            cache = RedisCache(redis_server.url, {"OPTIONS": options})
            in_threads(6, cache.get, "report")
            pool: Any = cache.client.get_client(write=False).connection_pool
            pool.get_connection = lambda *_: pytest.fail("it uses the pool")
            assert cache.get("report") is None
    finally:
        sys.setswitchinterval(before)


def test_a_forked_child_reads_on_its_own_connection(cache: RedisCache) -> None:
    assert cache.get_or_set("report", never) == "there"
    child = os.fork()
    if not child:
        process = psutil.Process()
        before = process.num_fds()
        found = cache.get_or_set("report", lambda: "other")
        os._exit(found != "there" or process.num_fds() <= before)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.get_or_set("report", never) == "there"


@pytest.mark.skipif(not HIREDIS_AVAILABLE, reason="redis-py's own parser reads for them")
def test_tasks_read_their_replies_past_redis_py(
    cache: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> list[Any]:
        await cache.aset("report", "value")
        monkeypatch.delattr(redis.asyncio.connection.AbstractConnection, "read_response")
        return await asyncio.gather(*(cache.aget("report") for _ in range(3)))

    assert asyncio.run(main()) == ["value"] * 3


class CountingClient(DefaultClient):
    reads = 0

    def get(self, *args: Any, **options: Any) -> Any:
        CountingClient.reads += 1
        return super().get(*args, **options)


class CountingRedis(redis.Redis):
    reads = 0

    def get(self, name: Any) -> Any:
        CountingRedis.reads += 1
        return super().get(name)


@pytest.mark.parametrize(
    ("option", "counting"),
    [("CLIENT_CLASS", CountingClient), ("REDIS_CLIENT_CLASS", CountingRedis)],
)
def test_the_get_of_a_subclass_is_called(
    redis_server: RedisServer, client: redis.Redis, option: str, counting: Any
) -> None:
    cache = cache_of(redis_server, **{option: f"{__name__}.{counting.__name__}"})
    before = counting.reads
    assert cache.get_or_set("report", never) == "there"
    assert counting.reads == before + 1


#: Calls on a cache with a number.
CALLS: dict[str, Callable[[Any], Any]] = {
    "get": lambda c: c.get("number"),
    "get_many": lambda c: c.get_many(["number", "none"]),
    "has_key": lambda c: c.has_key("number"),
    "ttl": lambda c: c.ttl("number"),
    "pttl": lambda c: c.pttl("number"),
    "set": lambda c: c.set("number", 2),
    "set for 0": lambda c: c.set("number", 2, 0),
    "add": lambda c: c.add("number", 2),
    "set_many": lambda c: c.set_many({"number": 2, "other": 3}),
    "delete": lambda c: c.delete("number"),
    "delete_many": lambda c: c.delete_many(["number", "other"]),
    "incr": lambda c: c.incr("number"),
    "decr": lambda c: c.decr("number"),
    "touch": lambda c: c.touch("number", 60),
    "touch for ever": lambda c: c.touch("number", None),
    "expire": lambda c: c.expire("number", 60),
    "pexpire": lambda c: c.pexpire("number", 60_000),
    "expire_at": lambda c: c.expire_at("number", 10**10),
    "incr_version": lambda c: c.incr_version("number"),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "get_or_set": lambda c: c.get_or_set("number", never),
    "get_or_set, stale": lambda c: c.get_or_set("number", never, 60, stale=60),
    "get_or_set_many": lambda c: c.get_or_set_many(["number"], never),
}


def connections_of_the_pool(cache: RedisCache, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each that a call takes from there."""
    pool, taken = cache.client.get_client(write=True).connection_pool, list[str]()
    take = pool.get_connection

    def get_connection(*args: Any) -> Any:
        taken.append("one")
        return take(*args)

    monkeypatch.setattr(pool, "get_connection", get_connection)
    return taken


def sent_by_the_client(cache: RedisCache, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Notes what its connections send."""
    pool, sent = cache.client.get_client(write=True).connection_pool, list[object]()
    kind = pool.connection_class
    send = kind.send_packed_command

    def send_packed_command(self: Any, command: Any, *args: Any, **options: Any) -> Any:
        sent.append(command)
        return send(self, command, *args, **options)

    monkeypatch.setattr(kind, "send_packed_command", send_packed_command)
    return sent


@pytest.mark.parametrize("name", [*CALLS, "get_or_set", "get_or_set, stale"])
def test_a_call_uses_no_connection_of_the_pool(
    cache: RedisCache, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.set("number", 1, 600)
    taken = connections_of_the_pool(cache, monkeypatch)
    (CALLS | OTHERS)[name](cache)
    assert not taken


class OwnRedis(redis.Redis):
    """A project's, like those below."""

    def ttl(self, name: Any) -> Any:
        return super().ttl(name)


class SendingRedis(redis.Redis):
    def execute_command(self, *args: Any, **options: Any) -> Any:
        return super().execute_command(*args, **options)


class ReadingRedis(redis.Redis):
    def parse_response(self, *args: Any, **options: Any) -> Any:
        return super().parse_response(*args, **options)


class OwnConnection(redis.Connection):
    pass


class OwnPool(redis.ConnectionPool):
    pass


class OwnParser(DefaultParser):
    pass


def introduce(connection: redis.Connection) -> None:
    connection.on_connect()


class Renewed:
    """Credentials of which the connections hear when there are new ones."""

    def get_credentials(self) -> tuple[str, ...]:
        return ("default", "")

    async def get_credentials_async(self) -> tuple[str, ...]:
        return ("default", "")

    def on_next(self, callback: Callable[[Any], Any]) -> None:
        pass

    def on_error(self, callback: Callable[[Exception], Any]) -> None:
        pass

    def is_streaming(self) -> bool:
        return True


def pool_with(**settings: Any) -> dict[str, Any]:
    return {"CONNECTION_POOL_KWARGS": settings}


#: What keeps calls in redis-py.
KEPT: dict[str, dict[str, Any]] = {
    "a client of the project's own": {"REDIS_CLIENT_CLASS": f"{__name__}.OwnRedis"},
    "a client that sends": {"REDIS_CLIENT_CLASS": f"{__name__}.SendingRedis"},
    "a client that reads": {"REDIS_CLIENT_CLASS": f"{__name__}.ReadingRedis"},
    "a client with one connection": {"REDIS_CLIENT_KWARGS": {"single_connection_client": True}},
    "a pool of its own": {"CONNECTION_POOL_CLASS": f"{__name__}.OwnPool"},
    "a connection of its own": pool_with(connection_class=OwnConnection),
    "a parser of its own": {"PARSER_CLASS": f"{__name__}.OwnParser"},
    "a retry of its own": pool_with(retry=Retry(NoBackoff(), 3)),
    "a second try after a time-out": pool_with(retry_on_timeout=True),
    "a second try after some errors": pool_with(retry_on_error=[redis.BusyLoadingError]),
    "a greeting of its own": pool_with(redis_connect_func=introduce),
    "credentials that renew": pool_with(credential_provider=Renewed()),
}

IN_TASKS: dict[str, Callable[[Any], Any]] = {
    "aget": lambda c: c.aget("number"),
    "aset": lambda c: c.aset("number", 2),
    "aincr": lambda c: c.aincr("number"),
    "aget_or_set": lambda c: c.aget_or_set("number", never),
    "aget_or_set_many": lambda c: c.aget_or_set_many(["number"], never),
}


@pytest.mark.sample(24)
@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("name", [*CALLS, *OTHERS, *IN_TASKS])
def test_a_call_goes_through_redis_py_where_it_must(
    redis_server: RedisServer, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = RedisCache(redis_server.url, {"OPTIONS": KEPT[how]})
    found.set("number", 1, 600)
    taken = sent_by_the_client(found, monkeypatch)
    if name in IN_TASKS:
        asyncio.run(in_a_task(IN_TASKS[name], found))
    else:
        (CALLS | OTHERS)[name](found)
    assert taken


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_goes_through_redis_py_if_its_connection_is_closed_afterwards(
    redis_server: RedisServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = RedisCache(redis_server.url, {"OPTIONS": {"CLOSE_CONNECTION": True}})
    found.set("number", 1, 600)
    taken = sent_by_the_client(found, monkeypatch)
    CALLS[name](found)
    assert taken


async def in_a_task(call: Callable[[Any], Any], cache: RedisCache) -> None:
    await call(cache)
