"""Django's asynchronous methods beside those for threads: the same results, on the loop's own
connections."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any

import pytest
import redis
import redis.asyncio
from asgiref.sync import sync_to_async
from redis.utils import HIREDIS_AVAILABLE

from django_redis_lock.cache import RedisCache, backend
from django_redis_lock.protocol.keys import flight_key
from django_redis_lock.transport import aio_connection
from tests.faults.proxy import Proxy
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.caches import OPERATIONS, attempt, make, outcome

pytestmark = pytest.mark.on_redis


class Awaited:
    """A cache whose asynchronous methods are called by the names of those for threads."""

    def __init__(self, cache: RedisCache) -> None:
        self.cache = cache
        self.key_prefix = cache.key_prefix
        self.make_key = cache.make_key

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self.cache), f"a{name}")

        def call(*args: Any, **options: Any) -> Any:
            inspect.signature(method).bind(self.cache, *args, **options)  # Else not of this table.
            return asyncio.run(method(self.cache, *args, **options))

        return call


def has_a_twin(name: str) -> bool:
    """Whether the operation is one that the asynchronous methods can be asked for."""
    try:
        OPERATIONS[name](Signatures())
    except (AttributeError, TypeError):
        return False
    return True


class Signatures:
    key_prefix = ""

    def make_key(self, key: str) -> str:
        return key

    def __getattr__(self, name: str) -> Any:
        method = getattr(RedisCache, f"a{name}")
        return lambda *args, **options: inspect.signature(method).bind(self, *args, **options)


TWINS = [name for name in OPERATIONS if has_a_twin(name) and "close" not in name]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done in another thread."""
    monkeypatch.setattr(backend, "sync_to_async", lambda *args: pytest.fail("a thread does it"))


@pytest.mark.parametrize("name", TWINS)
def test_it_does_what_the_method_for_threads_does(
    redis_server: RedisServer, client: redis.Redis, name: str, no_threads: None
) -> None:
    cache = make(RedisCache, redis_server)
    sync = outcome(OPERATIONS[name], cache, client)
    assert outcome(lambda c: OPERATIONS[name](Awaited(c)), cache, client) == sync


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", [name for name in TWINS if "get_or_set" not in name])
@pytest.mark.parametrize("ignore", [True, False], ids=["ignored", "shown"])
def test_without_redis_it_does_what_the_method_for_threads_does(
    stopped: RedisServer, name: str, ignore: bool
) -> None:
    cache = make(RedisCache, stopped, IGNORE_EXCEPTIONS=ignore)
    assert attempt(OPERATIONS[name], Awaited(cache)) == attempt(OPERATIONS[name], cache)


@pytest.mark.parametrize("logs", [False, True])
def test_an_ignored_error_is_logged_if_that_is_set(
    stopped: RedisServer, settings: Any, caplog: pytest.LogCaptureFixture, logs: bool
) -> None:
    settings.DJANGO_REDIS_LOG_IGNORED_EXCEPTIONS = logs
    cache = make(RedisCache, stopped, IGNORE_EXCEPTIONS=True)
    assert asyncio.run(cache.aget("a", "default")) == "default"
    assert ("Exception ignored" in caplog.text) is logs


@pytest.mark.parametrize("name", ["set for a time", "set_many", "delete", "incr", "touch"])
def test_a_server_that_has_forgotten_all_scripts_is_taught_them(
    redis_server: RedisServer, client: redis.Redis, name: str
) -> None:
    cache = make(RedisCache, redis_server)
    sync = outcome(OPERATIONS[name], cache, client)

    def forgetful(cache: Any) -> Any:
        client.script_flush()
        return OPERATIONS[name](Awaited(cache))

    assert outcome(forgetful, cache, client) == sync


@pytest.mark.parametrize(
    ("write", "ends"),
    [
        (lambda c: c.aset("report", 1), True),
        (lambda c: c.aset_many({"report": 1}), True),
        (lambda c: c.aadd("report", 6), False),
        (lambda c: c.adelete("report"), True),
        (lambda c: c.adelete_many(["report"]), True),
        (lambda c: c.atouch("report", 0), True),
        (lambda c: c.aincr("report"), True),
        (lambda c: c.aclear(), True),
    ],
    ids=["set", "set_many", "add", "delete", "delete_many", "touch", "incr", "clear"],
)
def test_a_write_ends_a_computation(
    redis_server: RedisServer, client: redis.Redis, write: Any, ends: bool
) -> None:
    cache = make(RedisCache, redis_server)
    cache.set("report", 5)
    flight = flight_key(cache._encoded_key("report", None))
    client.set(flight, "of another process")
    asyncio.run(write(cache))
    assert bool(client.exists(flight)) is not ends


# -- many tasks ----------------------------------------------------------------------------------


def test_a_thousand_tasks_need_one_connection(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    cache = make(RedisCache, redis_server)
    cache.set_many({f"key-{i}": f"value {i}" for i in range(1000)})
    before = client.info("stats")["total_connections_received"]

    async def all_of_them() -> list[Any]:
        found = await asyncio.gather(*(cache.aget(f"key-{i}") for i in range(1000)))
        await cache.aset("number", 0)
        await asyncio.gather(*(cache.aincr("number") for _ in range(10)))
        return found

    assert asyncio.run(all_of_them()) == [f"value {i}" for i in range(1000)]
    opened = client.info("stats")["total_connections_received"] - before
    assert opened == 1


async def begun(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    for _ in range(50):
        await asyncio.sleep(0)
    return task


sees_large_replies = pytest.mark.skipif(
    not HIREDIS_AVAILABLE, reason="redis-py's own parser does not tell"
)


@sees_large_replies
@pytest.mark.parametrize("breaks", [False, True])
def test_tasks_do_not_wait_behind_a_large_value(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """While one is on its way they use another connection, and afterwards both, also if it was
    through before they had connected. One that ``breaks`` meanwhile is replaced, once."""
    monkeypatch.setattr(aio_connection, "TRUSTED_SECONDS", PATIENCE)

    async def main(cache: RedisCache, proxy: Proxy) -> None:
        await cache.aset("small", 1)
        before = own_server.asking.info("stats")["total_connections_received"]
        for number in range(3):
            own_server.pause()
            tasks = [await begun(cache.aset("large", "x" * 20_000_000))]
            if breaks and not number:
                proxy.cut()
            else:
                tasks.append(await begun(cache.aget("small")))
            proxy.delay_reply(0.3, b"SELECT")
            own_server.resume()
            assert await asyncio.gather(*tasks) == [True, 1][: len(tasks)]
        made = own_server.asking.info("stats")["total_connections_received"] - before
        assert made == 1 + breaks

    with Proxy(own_server) as proxy:
        location = f"redis://localhost:{proxy.port}/1"
        asyncio.run(main(RedisCache(location, {"OPTIONS": {"SOCKET_TIMEOUT": PATIENCE}}), proxy))


def test_a_large_value_whose_connection_ends_is_sent_again_at_once(
    own_server: RedisServer, redis_server: RedisServer
) -> None:
    """A part of it is still to be sent, and nobody reads it."""

    async def main(cache: RedisCache, proxy: Proxy) -> None:
        await cache.aset("small", 1)
        own_server.pause()
        task = await begun(cache.aset("large", "x" * 20_000_000))
        proxy.lead_to(redis_server)
        proxy.end_replies()
        assert await asyncio.wait_for(task, PATIENCE)

    with Proxy(own_server) as proxy:
        options = {"OPTIONS": {"SOCKET_TIMEOUT": 10 * PATIENCE}}
        asyncio.run(main(RedisCache(f"redis://localhost:{proxy.port}", options), proxy))


def sent_by(server: RedisServer) -> int:
    """The bytes of its replies so far."""
    return int(server.asking.info("stats")["total_net_output_bytes"])


def test_many_replies_that_nobody_waits_for_are_not_sent(own_server: RedisServer) -> None:
    """Redis would keep them in its memory, and the tasks of the loop would wait behind them."""

    async def main(cache: RedisCache) -> None:
        await cache.aset_many({"small": 1, "large": "x" * 1_000_000})
        before = sent_by(own_server)
        own_server.pause()
        tasks = [await begun(cache.aget("large")) for _ in range(100)]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        own_server.resume()
        assert await cache.aget("small") == 1
        assert sent_by(own_server) - before < 50 * 1_000_000

    asyncio.run(main(RedisCache(own_server.url, {})))


def test_calls_that_are_given_up_leave_no_second_connection(own_server: RedisServer) -> None:
    """Some task waits behind them, and others use a new one meanwhile."""

    async def main(cache: RedisCache) -> None:
        await cache.aset("small", 1)
        own_server.pause()
        waiting, *given_up = [await begun(cache.aget("small")) for _ in range(20)]
        for task in given_up:
            task.cancel()
        await asyncio.wait(given_up)
        new = await begun(cache.aget("small"))
        own_server.resume()
        assert await asyncio.gather(waiting, new) == [1, 1]
        until(lambda: len(own_server.asking.client_list()) == 2)

    asyncio.run(main(RedisCache(own_server.url, {})))


@sees_large_replies
def test_a_large_reply_that_nobody_waits_for_is_not_sent(own_server: RedisServer) -> None:
    async def main(cache: RedisCache) -> None:
        await cache.aset_many({"small": 1, "large": "x" * 50_000_000})
        before = sent_by(own_server)
        task = asyncio.ensure_future(cache.aget("large"))
        while sent_by(own_server) - before < 1_000_000:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert await cache.aget("small") == 1
        assert task.cancelled()
        until(lambda: len(own_server.asking.client_list()) == 2)

    asyncio.run(main(RedisCache(own_server.url, {})))


def test_an_error_of_one_command_is_that_tasks_alone(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    cache = make(RedisCache, redis_server)
    cache.set("a", "text")
    client.rpush(cache.make_key("list"), 1)

    async def all_of_them() -> list[Any]:
        read, computed = cache.aget("list"), cache.aget_or_set("list", str, 60, stale=60)
        return await asyncio.gather(read, computed, cache.aget("a"), return_exceptions=True)

    refused, computed, found = asyncio.run(all_of_them())
    assert isinstance(refused, redis.ResponseError)
    assert (computed, found) == ("", "text")


def test_when_the_connection_breaks_each_task_gets_the_error(own_server: RedisServer) -> None:
    cache = make(RedisCache, own_server)
    cache.set("a", "text")

    async def broken() -> list[Any]:
        await cache.aget("a")
        own_server.stop()
        return await asyncio.gather(*(cache.aget("a") for _ in range(9)), return_exceptions=True)

    errors = asyncio.run(broken())
    assert {isinstance(error, redis.ConnectionError) for error in errors} == {True}


def test_a_loop_that_ends_leaves_no_task_waiting(redis_server: RedisServer) -> None:
    cache = make(RedisCache, redis_server)

    async def left_alone() -> asyncio.Task[Any]:
        task = asyncio.ensure_future(cache.aget("a"))
        await asyncio.sleep(0)
        return task

    assert asyncio.run(left_alone()).cancelled()


# -- where they leave it to a thread -------------------------------------------------------------


def other_threads(call: Coroutine[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``call`` has done in Django's thread for synchronous code."""
    done = []

    def noting(method: Any) -> Any:
        done.append(method.__name__)
        return sync_to_async(method)

    monkeypatch.setattr(backend, "sync_to_async", noting)
    asyncio.run(call)
    return done


def test_a_subclass_that_replaces_a_method_is_heeded(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loud(RedisCache):
        def get(self, *args: Any, **options: Any) -> Any:
            return str(super().get(*args, **options)).upper()

    cache = make(Loud, redis_server)
    cache.set("a", "text")
    assert asyncio.run(cache.aget("a")) == "TEXT"
    assert other_threads(cache.aget("a"), monkeypatch) == ["get"]
    assert not other_threads(cache.aset("a", 1), monkeypatch)


def test_a_tool_that_replaces_a_method_on_the_instance_sees_each_call_once(
    redis_server: RedisServer,
) -> None:
    cache = make(RedisCache, redis_server)
    seen = []
    original = cache.set
    cache.set = lambda *args, **options: (seen.append(args[0]), original(*args, **options))[1]
    asyncio.run(cache.aset("a", 1))
    assert seen == ["a"]


@pytest.mark.parametrize(
    "url", ["{url},{url}", "{url}"], ids=["with a replica", "with another client"]
)
def test_what_is_not_one_server_for_threads_is_left_to_them(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    options = {} if "," in url else {"CLIENT_CLASS": "django_redis.client.HerdClient"}
    cache = RedisCache(url.format(url=redis_server.url), {"OPTIONS": options})
    assert other_threads(cache.aset("a", 1), monkeypatch) == ["set"]
    assert cache.get("a") == 1
