"""What listeners are told of ``get_or_set`` and its kin: of each computation, and of each call,
which is a hit, a stale hit or a miss."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from django_redis_lock.cache import RedisCache
from django_redis_lock.events import (
    Computed,
    Computing,
    RefreshFailed,
    Shared,
    subscribe,
    unsubscribe,
)
from tests.events import RecordedEvents, recording_events
from tests.integration.cache.test_observed_reads import DEAD
from tests.processes import until
from tests.support.values import (
    TERMS,
    Asking,
    Broken,
    Producer,
    age,
    blocked,
    elsewhere,
    lands_elsewhere,
    slow,
    waiting_in_memory,
)

__all__ = ["slow"]


def test_a_computation(ask: Any, cache: RedisCache, heard: RecordedEvents) -> None:
    assert ask("report", Producer()) == "computed"
    computing, computed = heard
    assert type(computing) is Computing
    assert type(computed) is Computed
    assert computed.error is None
    assert computed.values == 1
    assert 0 <= computed.seconds < 60
    assert computing.subject == computed.subject
    assert computed.subject.cache is cache
    assert ask("report", Producer()) == "computed"
    assert len(heard) == 2, "a hit is nothing to speak of"


def test_who_hears_of_a_computation_finds_the_value(ask: Any, cache: RedisCache) -> None:
    found: list[object] = []

    def hear(event: object) -> None:
        if isinstance(event, Computed):
            found.append(cache.get("report"))

    subscribe(hear)
    try:
        ask("report", Producer())
    finally:
        unsubscribe(hear)
    assert found == ["computed"]


def test_a_computation_that_fails(ask: Any, heard: RecordedEvents) -> None:
    error = Broken("no data")
    with pytest.raises(Broken):
        ask("report", Producer(error))
    assert heard.kinds == [Computing, Computed]
    assert heard[1].error is error
    assert results(heard) == ["miss"]


@pytest.mark.parametrize("without_redis", [False, True])
def test_the_threads_that_waited_for_it(
    cache: RedisCache, slow: Producer, heard: RecordedEvents, without_redis: bool
) -> None:
    asked = RedisCache(DEAD, {}) if without_redis else cache
    threads = [Asking(asked.get_or_set, "report", slow) for _ in range(4)]
    until(lambda: waiting_in_memory() == 3)
    slow.finish.set()
    assert [thread.found() for thread in threads] == ["computed"] * 4
    assert len(heard.only(Computed)) == 1
    assert [event.stale for event in heard.only(Shared)] == [False] * 3
    assert results(heard) == ["miss"] * 4


def test_who_waited_for_another_process(
    ask: Any, client: redis.Redis, heard: RecordedEvents
) -> None:
    elsewhere(client)
    asking = Asking(ask, "report", Producer())
    until(lambda: blocked(client) == 1)
    lands_elsewhere(client, 5)
    assert asking.found() == 5
    assert heard.kinds == [Shared]
    assert results(heard) == ["miss"]


@pytest.fixture
def stale(cache: RedisCache, client: redis.Redis, heard: RecordedEvents) -> RedisCache:
    cache.get_or_set("report", "old", **TERMS)
    age(client)
    heard.clear()
    return cache


@pytest.mark.usefixtures("stale")
def test_callers_during_a_refresh_get_the_old_value(
    ask: Any, client: redis.Redis, heard: RecordedEvents
) -> None:
    elsewhere(client)
    assert ask("report", Producer(), **TERMS) == "old"
    assert heard.kinds == [Shared]
    assert heard[0].stale
    assert results(heard)[-1:] == ["stale"]


@pytest.mark.usefixtures("stale")
def test_a_refresh_that_fails(ask: Any, heard: RecordedEvents) -> None:
    error = Broken("no data")
    assert ask("report", Producer(error), **TERMS) == "old"
    assert heard.kinds == [Computing, Computed, RefreshFailed]
    assert heard[2].error is error


def test_several_values(cache: RedisCache, client: redis.Redis) -> None:
    elsewhere(client)
    with recording_events("product-1") as heard:
        keys = ["product-1", "product-2", "report"]
        asking = Asking(cache.get_or_set_many, keys, lambda keys: dict.fromkeys(keys, 1))
        until(lambda: blocked(client) == 1)
        lands_elsewhere(client, 5)
        assert asking.found() == {"product-1": 1, "product-2": 1, "report": 5}
    assert heard.kinds == [Computing, Computed, Shared]
    assert [heard[1].values, heard[2].values] == [2, 1]
    assert heard[1].subject.group == "product-*"


@pytest.mark.parametrize("group", ["", 5, "x" * 201])
def test_groups_that_are_none(ask: Any, cache: RedisCache, group: Any) -> None:
    cache.set("report", 1)
    with pytest.raises((TypeError, ValueError), match="group must"):
        ask("report", Producer(), group=group)


# -- reads --------------------------------------------------------------------------------------


def results(heard: RecordedEvents) -> list[str]:
    return [read.result for read in heard.reads]


@pytest.mark.parametrize("terms", [{}, TERMS], ids=["plain", "stale"])
def test_a_miss_and_a_hit(
    ask: Any, cache: RedisCache, heard: RecordedEvents, terms: dict[str, Any]
) -> None:
    for _ in range(2):
        ask("report", 1, group="reports", **terms)
    assert results(heard) == ["miss", "hit"]
    for read in heard.reads:
        assert (read.subject.group, read.subject.cache, read.values) == ("reports", cache, 1)
        assert 0 <= read.seconds < 60


@pytest.mark.usefixtures("stale")
def test_a_stale_hit(ask: Any, heard: RecordedEvents) -> None:
    ask("report", "new", **TERMS)
    assert results(heard)[-1:] == ["stale"]


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_reads_of_several_values(cache: RedisCache, kind: str) -> None:
    cache.set_many({"a": 1, "b": 2})
    with recording_events("a") as heard:
        if kind == "threads":
            found = cache.get_or_set_many("abc", lambda keys: dict.fromkeys(keys, 3))
        else:
            found = asyncio.run(cache.aget_or_set_many("abc", lambda keys: dict.fromkeys(keys, 3)))
    assert found == {"a": 1, "b": 2, "c": 3}
    assert sorted((read.result, read.values) for read in heard.reads) == [("hit", 2), ("miss", 1)]
    assert all(0 <= read.seconds < 60 for read in heard.reads)


def test_without_redis_each_call_misses(heard: RecordedEvents) -> None:
    cache = RedisCache(DEAD, {"OPTIONS": {"LOCK_VALUES_ON_REDIS_DOWN": "compute"}})
    for terms in ({}, TERMS):
        assert cache.get_or_set("report", 1, **terms) == 1
    assert results(heard) == ["miss"] * 2
