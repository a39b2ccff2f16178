"""The reply to a call of the cache is lost: it is sent again only if it may run twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_redis_lock import Lock
from django_redis_lock.cache import RedisCache
from django_redis_lock.protocol.keys import flight_key
from django_redis_lock.protocol.lock_scripts import TAKE_GRANT
from tests.faults.proxy import Proxy
from tests.processes import PATIENCE, until
from tests.support.background import Background

Call = Callable[[Any], Any]

#: The command whose reply is lost, the call, what it returns, and what is there afterwards.
SENT_AGAIN: dict[str, tuple[bytes, Call, Any, Any]] = {
    "get": (b"GET", lambda c: c.get("five"), 5, 5),
    "get_many": (b"MGET", lambda c: c.get_many(["five"]), {"five": 5}, 5),
    "has_key": (b"EXISTS", lambda c: c.has_key("five"), True, 5),
    "set": (b"SET", lambda c: c.set("five", 6), True, 6),
    "set_many": (b"SET", lambda c: c.set_many({"five": 6}), [], 6),
    "touch": (b"PEXPIRE", lambda c: c.touch("five", 60), True, 5),
    # Sent again, it finds nothing to delete.
    "delete": (b"DEL", lambda c: c.delete("five"), False, None),
    "delete_many": (b"DEL", lambda c: c.delete_many(["five"]), 0, None),
}
#: These have run, and the caller cannot know it.
NOT_SENT_AGAIN: dict[str, tuple[bytes, Call, Any]] = {
    "incr": (b"EVALSHA", lambda c: c.incr("five"), 6),
    "incr by an unknown script": (b"EVAL", lambda c: c.incr("five"), 6),
    "decr": (b"EVALSHA", lambda c: c.decr("five"), 4),
    "add": (b"SET", lambda c: c.add("new", 1), 5),
    "set nx": (b"SET", lambda c: c.set("new", 1, nx=True), 5),
}


class Awaited:
    """The asynchronous methods of a cache by the names of those for threads, in one loop: its
    connection is there before."""

    def __init__(self, cache: RedisCache, loop: asyncio.AbstractEventLoop) -> None:
        self._cache, self._loop = cache, loop

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cache, f"a{name}")
        return lambda *args, **options: self._loop.run_until_complete(method(*args, **options))


@pytest.fixture(params=["threads", "tasks"])
def cache(request: pytest.FixtureRequest, proxy: Proxy, client: redis.Redis) -> Iterator[Any]:
    cache = RedisCache(f"redis://127.0.0.1:{proxy.port}/0", {})
    loop = asyncio.new_event_loop()
    found: Any = cache if request.param == "threads" else Awaited(cache, loop)
    found.set("five", 5)
    found.incr("five")  # The server knows the scripts.
    found.set("five", 5)
    yield found
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.mark.parametrize("name", SENT_AGAIN)
def test_it_is_sent_again(cache: Any, proxy: Proxy, name: str) -> None:
    command, call, returned, left = SENT_AGAIN[name]
    rule = proxy.lose_reply_to(command)
    assert call(cache) == returned
    assert rule.applied.acquire(timeout=PATIENCE)
    assert cache.get("five") == left


@pytest.mark.parametrize("name", NOT_SENT_AGAIN)
def test_it_is_not_sent_again(cache: Any, proxy: Proxy, client: redis.Redis, name: str) -> None:
    command, call, left = NOT_SENT_AGAIN[name]
    if command == b"EVAL":
        client.script_flush()
    rule = proxy.lose_reply_to(command)
    with pytest.raises(redis.ConnectionError):
        call(cache)
    assert rule.applied.acquire(timeout=PATIENCE)
    assert cache.get("five") == left


def test_a_connection_that_has_ended_costs_no_count(cache: Any, proxy: Proxy) -> None:
    """It was used a moment ago, so that it counts as open; nothing was sent on it."""
    proxy.cut()
    assert cache.incr("five") == 6


def test_a_count_waits_for_no_reply_that_another_call_has_left(
    proxy: Proxy, client: redis.Redis
) -> None:
    """It comes first on the connection, and may never come."""
    url = f"redis://127.0.0.1:{proxy.port}/0"
    cache: Any = RedisCache(url, {"OPTIONS": {"SOCKET_TIMEOUT": 2 * PATIENCE}})
    cache.set("five", 5)
    held = proxy.hold_back(TAKE_GRANT)
    with Lock(client, cache.lock("report").name, timeout=60):
        waiter = Background(cache.lock("report", thread_local=False).acquire)
        until(lambda: client.info("clients")["blocked_clients"])
    assert waiter.result()
    assert held.kept.acquire(timeout=PATIENCE)
    assert Background(cache.incr, "five").result() == 6


@pytest.mark.parametrize("write", ["set", "delete", "set_many", "delete_many"])
def test_a_write_whose_reply_was_lost_ends_the_computation(
    cache: Any, proxy: Proxy, client: redis.Redis, write: str
) -> None:
    command, call, _, left = SENT_AGAIN[write]
    flight = flight_key(b":1:five")
    client.set(flight, "of another process")
    proxy.lose_reply_to(command)
    call(cache)
    assert not client.exists(flight)
    assert cache.get("five") == left
