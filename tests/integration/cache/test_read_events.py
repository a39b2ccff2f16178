"""Each call of ``get_or_set`` is a hit, a stale hit or a miss: listeners are told once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from django_redis_lock.cache import RedisCache
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


def test_a_stale_hit(
    ask: Any, cache: RedisCache, client: redis.Redis, heard: RecordedEvents
) -> None:
    cache.get_or_set("report", "old", **TERMS)
    age(client)
    ask("report", "new", **TERMS)
    assert results(heard) == ["miss", "stale"]


def test_a_computation_that_fails_is_a_miss(ask: Any, heard: RecordedEvents) -> None:
    with pytest.raises(Broken):
        ask("report", Producer(Broken("no data")))
    assert results(heard) == ["miss"]


def test_who_waits_in_this_process_misses(
    cache: RedisCache, slow: Producer, heard: RecordedEvents
) -> None:
    threads = [Asking(cache.get_or_set, "report", slow) for _ in range(4)]
    until(lambda: waiting_in_memory() == 3)
    slow.finish.set()
    assert [thread.found() for thread in threads] == ["computed"] * 4
    assert results(heard) == ["miss"] * 4


def test_who_waits_for_another_process_misses(
    ask: Any, client: redis.Redis, heard: RecordedEvents
) -> None:
    elsewhere(client)
    asking = Asking(ask, "report", Producer())
    until(lambda: blocked(client) == 1)
    lands_elsewhere(client, 5)
    assert asking.found() == 5
    assert results(heard) == ["miss"]


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_several_values(cache: RedisCache, kind: str) -> None:
    cache.set_many({"a": 1, "b": 2})
    with recording_events("a") as heard:
        if kind == "threads":
            found = cache.get_or_set_many("abc", lambda keys: dict.fromkeys(keys, 3))
        else:
            found = asyncio.run(cache.aget_or_set_many("abc", lambda keys: dict.fromkeys(keys, 3)))
    assert found == {"a": 1, "b": 2, "c": 3}
    assert sorted((read.result, read.values) for read in heard.reads) == [("hit", 2), ("miss", 1)]


def test_without_redis_each_call_misses(heard: RecordedEvents) -> None:
    cache = RedisCache(DEAD, {"OPTIONS": {"LOCK_VALUES_ON_REDIS_DOWN": "compute"}})
    for terms in ({}, TERMS):
        assert cache.get_or_set("report", 1, **terms) == 1
    assert results(heard) == ["miss"] * 2
