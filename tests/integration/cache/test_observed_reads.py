"""Tools that observe a cache replace its ``get``, or methods of redis-py's clients: the reads of
``get_or_set`` go through what they have put there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock.cache import RedisCache
from tests.holding import outages
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.values import TERMS, age

#: As each observer sees a read: the key, and whether it found a value.
Reads = list[tuple[str, bool]]

DEAD = "redis://127.0.0.1:1/0"


def observing(get: Callable[..., Any], reads: Reads) -> Callable[..., Any]:
    @wraps(get)
    def observed(*args: Any, **kwargs: Any) -> Any:
        value = get(*args, **kwargs)
        key, default = args[-3:-1] if len(args) > 2 else (args[0], None)
        reads.append((key, value is not default))
        return value

    return observed


def with_client(self, key, default=None, version=None, client=None):
    given = {} if client is None else {"client": client}
    return _tool(self, key, default, version, **given)  # noqa: F821  # a global of the function whose code this replaces


@pytest.fixture(params=["instance", "class", "code"])
def reads(request: pytest.FixtureRequest, cache: Any, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """The reads that a tool sees which has replaced ``get`` on the instance or on the class, or the
    code of the function."""
    reads: Reads = []
    if request.param == "code":
        get = type(cache).get
        original = FunctionType(get.__code__, get.__globals__, "get", get.__defaults__)
        monkeypatch.setitem(get.__globals__, "_tool", observing(original, reads))
        monkeypatch.setattr(get, "__code__", with_client.__code__)
        return reads
    owner = cache if request.param == "instance" else type(cache)
    monkeypatch.setattr(owner, "get", observing(owner.get, reads), raising=False)
    return reads


@pytest.mark.sample(5)
@pytest.mark.parametrize("stale", [False, True])
def test_each_read_is_seen_once(ask: Any, reads: Reads, stale: bool) -> None:
    terms = TERMS if stale else {"timeout": 60}
    for value in ("first", "second"):
        assert ask("report", value, **terms) == "first"
    assert reads == [("report", False), ("report", True)]


def test_a_stale_value_is_seen_and_computed_again(
    ask: Any, cache: RedisCache, client: redis.Redis, reads: Reads
) -> None:
    cache.get_or_set("report", "old", **TERMS)
    age(client)
    assert ask("report", "new", **TERMS) == "new"
    assert reads[1:] == [("report", True)]


def test_several_values(cache: RedisCache, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get_many(keys: list[str], *args: Any, **kwargs: Any) -> Any:
        asked.append(list(keys))
        return original(keys, *args, **kwargs)

    original = cache.get_many
    monkeypatch.setattr(cache, "get_many", get_many)
    for _ in range(2):
        found = cache.get_or_set_many(["a", "b"], lambda keys: dict.fromkeys(keys, 1))
        assert found == {"a": 1, "b": 1}
    assert asked == [["a", "b"]] * 2


def test_a_method_with_djangos_signature_is_called(
    cache: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not take the ``client`` of django-redis's."""
    reads, original = [], cache.get

    def get(key: str, default: Any = None, version: int | None = None) -> Any:
        reads.append(key)
        return original(key, default, version)

    monkeypatch.setattr(cache, "get", get)
    for value in ("first", "second"):
        assert cache.get_or_set("report", value) == "first"
    assert reads == ["report"] * 2


def test_an_error_of_the_tool_is_raised(cache: RedisCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(cache, "get", broken)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_set("report", 1)


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("terms", [{}, TERMS], ids=["plain", "stale"])
def test_an_outage_stays_one(
    observed: bool,
    hidden: bool,
    terms: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    """Also if IGNORE_EXCEPTIONS hides it from the tool. Refused calls take no time, so that each is
    made."""
    options = {"IGNORE_EXCEPTIONS": hidden, "LOCK_VALUES_ON_REDIS_DOWN": "compute"}
    cache = RedisCache(DEAD, {"OPTIONS": options})
    for name in ("get", "get_many") if observed else ():
        monkeypatch.setattr(cache, name, observing(getattr(cache, name), []))
    for _ in range(5):
        assert asyncio.run(cache.aget_or_set("report", 1, **terms)) == 1
        assert cache.get_or_set("report", 1, **terms) == 1
        assert cache.get_or_set_many(["a"], lambda keys: dict.fromkeys(keys, 1)) == {"a": 1}
    assert cache._connections.breaker is not None
    assert cache._connections.breaker.failing
    assert "fail at once" not in caplog.text


@pytest.mark.on_redis
def test_a_hit_ends_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer(persistent=True) as server:
        cache = RedisCache(server.url, {"OPTIONS": {"LOCK_VALUES_ON_REDIS_DOWN": "compute"}})
        monkeypatch.setattr(cache, "get", observing(cache.get, []))
        cache.set("report", "kept")
        server.stop()
        assert cache.get_or_set("report", "computed") == "computed"
        assert any(server.url.startswith(f"redis://{down.server}") for down in outages())
        server.start()
        until(lambda: cache.get_or_set("report", "computed") == "kept")
        assert not any(server.url.startswith(f"redis://{down.server}") for down in outages())


@pytest.mark.on_redis
@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_tool_of_redis_py_sees_stale_and_asynchronous_hits(
    cache: RedisCache, client: redis.Redis, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These have a connection of ours otherwise."""
    asynchronous = kind == "asyncio"
    owner: Any = redis.asyncio.Redis if asynchronous else redis.Redis
    original, commands = owner.execute_command, []

    def execute_command(self: Any, *args: Any, **kwargs: Any) -> Any:
        commands.append(args[0])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, "execute_command", execute_command)

    def ask(**terms: Any) -> Any:
        if asynchronous:
            return asyncio.run(cache.aget_or_set("report", 1, **terms))
        return cache.get_or_set("report", 1, **terms)

    for terms in ({}, TERMS):
        for _ in range(2):  # The first may find that the server does not know the script.
            assert ask(**terms) == 1
        commands.clear()
        assert ask(**terms) == 1
        assert commands == ["EVALSHA" if asynchronous or terms else "GET"]
    if asynchronous:
        commands.clear()
        assert asyncio.run(cache.aget("report")) == 1
        assert commands == ["GET"]
