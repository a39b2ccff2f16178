"""``get_or_set_many``: few trips, one call of the producer, each key computed once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import redis

from django_redis_lock import LockError, LockNotAcquired
from django_redis_lock.cache import RedisCache
from django_redis_lock.protocol.keys import flight_key
from django_redis_lock.singleflight import runners
from tests.lanes import examples
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer
from tests.support.values import (
    KEY,
    Asking,
    Broken,
    blocked,
    elsewhere,
    lands_elsewhere,
    make,
)


@pytest.fixture(params=["threads", "asyncio"])
def many(request: pytest.FixtureRequest, cache: RedisCache) -> Any:
    """``get_or_set_many``, also by way of asyncio."""
    return way(request.param, cache)


def way(kind: str, cache: RedisCache) -> Any:
    if kind == "threads":
        return cache.get_or_set_many
    return lambda *args, **kwargs: asyncio.run(cache.aget_or_set_many(*args, **kwargs))


class Many:
    """Gives each key in capitals; remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.begun, self.finish = threading.Event(), threading.Event()
        self.finish.set()

    def __call__(self, keys: list[str]) -> dict[str, str]:
        self.asked.append(keys)
        self.begun.set()
        assert self.finish.wait(PATIENCE)
        return {key: key.upper() for key in keys}


def flights(client: redis.Redis) -> list[bytes]:
    return list(client.keys("*flight*"))


def test_only_what_is_missing_is_computed_in_one_call_and_kept(
    cache: RedisCache, many: Any, client: redis.Redis
) -> None:
    cache.set("b", "found")
    producer = Many()
    assert many(["a", "b", "c"], producer, 60) == {"a": "A", "b": "found", "c": "C"}
    assert producer.asked == [["a", "c"]]
    assert cache.get_many(["a", "b", "c"]) == {"a": "A", "b": "found", "c": "C"}
    assert 50_000 < client.pttl(":1:a") <= 60_000
    assert not flights(client)
    assert many(["a", "b", "c"], producer) == {"a": "A", "b": "found", "c": "C"}
    assert len(producer.asked) == 1


def test_a_coroutine_function_is_awaited(cache: RedisCache) -> None:
    async def produce(keys: list[str]) -> dict[str, int]:
        await asyncio.sleep(0)
        return dict.fromkeys(keys, 5)

    assert asyncio.run(cache.aget_or_set_many(["a", "b"], produce)) == {"a": 5, "b": 5}
    later = asyncio.run(cache.aget_or_set_many(["c"], lambda keys: produce(list(keys))))
    assert later == {"c": 5}


def test_in_the_order_of_the_keys_and_each_once(many: Any) -> None:
    producer = Many()
    assert many([], producer) == {}
    found = many(iter(["c", "a", "c", "b", "a"]), producer)
    assert list(found.items()) == [("c", "C"), ("a", "A"), ("b", "B")]
    assert producer.asked == [["c", "a", "b"]]


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", [None, False, 0, "", b"", [], 2**70])
def test_any_value_will_do(cache: RedisCache, many: Any, value: Any) -> None:
    for _ in range(2):
        assert many(["a"], lambda keys: dict.fromkeys(keys, value)) == {"a": value}
    assert cache.get("a", "missing") == value


def test_another_version_is_another_value(cache: RedisCache, many: Any) -> None:
    cache.set("a", "old", version=1)
    assert many(["a"], Many(), version=2) == {"a": "A"}
    assert cache.get("a", version=2) == "A"
    assert cache.get("a") == "old"


def test_a_key_left_out_is_left_out(cache: RedisCache, many: Any, client: redis.Redis) -> None:
    assert many(["a", "b"], lambda keys: {"a": 1, "stranger": 2}) == {"a": 1}
    assert cache.get("stranger") is None
    assert not flights(client)


@pytest.mark.parametrize(
    ("landed", "found", "asked"), [(5, 5, []), (None, "REPORT", [["report"]])], ids=["5", "failed"]
)
def test_what_others_compute_is_waited_for(
    cache: RedisCache,
    many: Any,
    client: redis.Redis,
    landed: int | None,
    found: Any,
    asked: list[list[str]],
) -> None:
    elsewhere(client)
    producer = Many()
    asking = Asking(many, ["a", "report"], producer)
    until(lambda: blocked(client) == 1)
    # What it leads is there before it waits.
    assert cache.get("a") == "A"
    lands_elsewhere(client, landed)
    assert asking.found() == {"a": "A", "report": found}
    assert producer.asked == [["a"], *asked]


def test_who_asks_for_one_of_them_waits_too(cache: RedisCache, client: redis.Redis) -> None:
    producer = Many()
    producer.finish.clear()
    asking = Asking(cache.get_or_set_many, ["a", "report"], producer)
    assert producer.begun.wait(PATIENCE)
    one = Asking(cache.get_or_set, "report", "never")
    until(lambda: blocked(client) == 1)
    producer.finish.set()
    assert asking.found() == {"a": "A", "report": "REPORT"}
    assert one.found() == "REPORT"


# -- trips -------------------------------------------------------------------------------------


@pytest.mark.on_redis
def test_one_trip_to_read_one_to_take_one_to_store(
    cache: RedisCache, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips: list[int] = []
    run_all = runners.run_all

    def counted(client: Any, scripts: Any) -> Any:
        trips.append(len(scripts))
        return run_all(client, scripts)

    monkeypatch.setattr(runners, "run_all", counted)
    for expected in ([4, 4], []):
        trips.clear()
        client.config_resetstat()
        cache.get_or_set_many(["a", "b", "c", "d"], Many())
        stats = client.info("commandstats")
        assert stats["cmdstat_mget"]["calls"] == 1
        assert "cmdstat_get" not in stats or expected  # Else only the scripts' own.
        assert trips == expected


# -- several processes -------------------------------------------------------------------------


def ask_for(link: Link, url: str, mine: list[str]) -> Any:
    cache = RedisCache(url, {})

    def produce(keys: list[str]) -> dict[str, str]:
        link.say(keys)
        link.hear()
        return dict.fromkeys(keys, str(link.hear()))

    return cache.get_or_set_many(mine, produce)


def test_two_processes_with_keys_in_common(redis_server: RedisServer, client: redis.Redis) -> None:
    with (
        processes(ask_for, redis_server.url, ["a", "b", "c"]) as (first,),
        processes(ask_for, redis_server.url, ["d", "c", "b"]) as (second,),
    ):
        first.go()
        assert first.hear() == ["a", "b", "c"]
        second.go()
        assert second.hear() == ["d"]
        for worker, value in ((second, "second"), (first, "first")):
            worker.say("go on")
            worker.say(value)
        assert first.result() == dict.fromkeys("abc", "first")
        assert second.result() == {"d": "second", "c": "first", "b": "first"}


def ask_in_rounds(link: Link, url: str, backwards: bool, rounds: int) -> list[str]:
    """What this process has computed."""
    cache, computed = RedisCache(url, {}), []

    def produce(keys: list[str]) -> dict[str, str]:
        computed.extend(keys)
        return {key: key for key in keys}

    for number in range(rounds):
        keys = [f"{number}:{n}" for n in range(5)]
        found = cache.get_or_set_many(keys[::-1] if backwards else keys, produce)
        assert sorted(found.items()) == [(key, key) for key in keys]
    return computed


@pytest.mark.slow
def test_keys_in_opposite_order_are_computed_once_without_deadlock(
    redis_server: RedisServer,
) -> None:
    rounds = examples(200)
    with (
        processes(ask_in_rounds, redis_server.url, False, rounds, count=2) as ahead,
        processes(ask_in_rounds, redis_server.url, True, rounds, count=2) as back,
    ):
        for worker in (*ahead, *back):
            worker.go()
        computed = [key for result in (*ahead.results(), *back.results()) for key in result]
    assert sorted(computed) == sorted({f"{r}:{n}" for r in range(rounds) for n in range(5)})


# -- failures ----------------------------------------------------------------------------------


def test_an_exception_reaches_its_caller_and_the_cache_loses_nothing(
    cache: RedisCache, many: Any, client: redis.Redis
) -> None:
    cache.set("b", "found")
    error = Broken("no data")

    def broken(keys: list[str]) -> Any:
        raise error

    with pytest.raises(Broken) as caught:
        many(["a", "b"], broken)
    assert caught.value is error
    assert cache.get_many(["a", "b"]) == {"b": "found"}
    assert not flights(client)


@pytest.mark.parametrize("returned", [None, ["A"], "A", 5])
def test_what_is_no_dict_is_refused(many: Any, client: redis.Redis, returned: Any) -> None:
    with pytest.raises(TypeError, match="default_many must return a dict by key"):
        many(["a"], lambda keys: returned)
    assert not flights(client)


@pytest.mark.parametrize("given", [None, {"a": "A"}, 5])
def test_what_is_no_function_is_refused(many: Any, client: redis.Redis, given: Any) -> None:
    with pytest.raises(TypeError, match="default_many must be a function of the missing keys"):
        many(["a"], given)
    assert not flights(client)


def test_a_value_that_needs_itself_is_refused(cache: RedisCache) -> None:
    def recursive(keys: list[str]) -> Any:
        return cache.get_or_set_many(["other", *keys], recursive)

    with pytest.raises(LockError, match="requests the value"):
        cache.get_or_set_many(["report"], recursive)
    with pytest.raises(LockError, match="requests the value"):
        cache.get_or_set_many(["report"], lambda keys: {"report": cache.get_or_set("report", 1)})


@pytest.mark.parametrize("write", ["set", "delete"])
def test_a_write_during_the_computation_wins(cache: RedisCache, write: str) -> None:
    producer = Many()
    producer.finish.clear()
    asking = Asking(cache.get_or_set_many, ["a", "report"], producer)
    assert producer.begun.wait(PATIENCE)
    if write == "set":
        cache.set("report", "newer")
    else:
        cache.delete("report")
    producer.finish.set()
    assert asking.found() == {"a": "A", "report": "REPORT"}
    assert cache.get_many(["a", "report"]) == (
        {"a": "A", "report": "newer"} if write == "set" else {"a": "A"}
    )


def test_too_late(many: Any, client: redis.Redis) -> None:
    elsewhere(client)
    terms: dict[str, Any] = {"wait": 0.05}
    with pytest.raises(LockNotAcquired) as caught:
        many(["a", "report"], Many(), **terms, on_wait_timeout="raise")
    assert caught.value.lock_name == "report"
    assert many(["a", "report"], Many(), **terms, on_wait_timeout="default") == {"a": "A"}
    assert many(["a", "report"], Many(), **terms) == {"a": "A", "report": "REPORT"}
    assert not client.exists(flight_key(KEY))


def test_redis_dies_while_they_are_computed(own_server: RedisServer) -> None:
    cache = make(own_server)
    producer = Many()
    producer.finish.clear()
    asking = Asking(cache.get_or_set_many, ["a", "b"], producer)
    assert producer.begun.wait(PATIENCE)
    own_server.kill()
    producer.finish.set()
    assert asking.found() == {"a": "A", "b": "B"}
    for kind in ("threads", "asyncio"):
        assert way(kind, cache)(["c", "d"], producer) == {"c": "C", "d": "D"}
    assert producer.asked == [["a", "b"], ["c", "d"], ["c", "d"]]
