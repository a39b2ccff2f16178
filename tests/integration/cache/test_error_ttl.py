"""``error_ttl=``: after a failure nobody tries again for a moment."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from django_redis_lock.cache import RedisCache
from django_redis_lock.exceptions import ComputationFailed
from django_redis_lock.protocol.keys import flight_key
from tests.processes import PATIENCE, Link, in_threads, processes, until
from tests.redis_server import RedisServer
from tests.support.values import KEY, Asking, Broken, Producer, blocked, waiting_in_memory


def test_others_fail_with_the_same_message_and_do_not_try(ask: Any) -> None:
    producer = Producer(Broken("no data"))
    with pytest.raises(Broken):
        ask("report", producer, error_ttl=60)
    for terms in ({}, {"error_ttl": 60}):
        with pytest.raises(ComputationFailed, match="Broken: no data"):
            ask("report", producer, **terms)
    assert producer.calls == 1


def test_it_is_over_after_its_time(cache: RedisCache, client: redis.Redis) -> None:
    with pytest.raises(Broken):
        cache.get_or_set("report", Producer(Broken()), error_ttl=0.05)
    until(lambda: not client.exists(flight_key(KEY)))
    assert cache.get_or_set("report", 5) == 5


@pytest.mark.parametrize("write", ["set", "delete"])
def test_a_write_ends_it(cache: RedisCache, write: str) -> None:
    with pytest.raises(Broken):
        cache.get_or_set("report", Producer(Broken()), error_ttl=60)
    if write == "set":
        cache.set("report", 5)
    else:
        cache.delete("report")
    assert cache.get_or_set("report", 5) == 5


def test_an_interrupted_computation_can_be_repeated_at_once(cache: RedisCache) -> None:
    with pytest.raises(KeyboardInterrupt):
        cache.get_or_set("report", Producer(KeyboardInterrupt()), error_ttl=60)
    assert cache.get_or_set("report", 5) == 5


def test_the_threads_that_wait_fail_too(cache: RedisCache) -> None:
    producer = Producer(Broken("no data"))
    producer.finish.clear()
    leader = Asking(cache.get_or_set, "report", producer, error_ttl=60)
    assert producer.begun.wait(PATIENCE)
    others = [Asking(cache.get_or_set, "report", producer) for _ in range(5)]
    until(lambda: waiting_in_memory() == 5)
    producer.finish.set()
    assert leader.found() is producer.value
    for each in others:
        assert isinstance(error := each.found(), ComputationFailed)
        assert str(error) == "Broken: no data"
    assert producer.calls == 1


def ask_in_threads(link: Link, url: str, threads: int) -> list[str]:
    cache = RedisCache(url, {})

    def compute() -> object:
        link.say("computing")
        link.hear()
        raise ValueError("no data")

    return list(
        map(str, in_threads(threads, lambda: cache.get_or_set("report", compute, error_ttl=60)))
    )


def test_a_hundred_followers_do_not_wait_for_a_hundred_computations(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    with processes(ask_in_threads, redis_server.url, 25, count=4) as crew:
        crew.go()
        until(lambda: any(worker.speaks() for worker in crew))
        (leader,) = (worker for worker in crew if worker.speaks())
        assert leader.hear() == "computing"
        until(lambda: blocked(client) == 3)
        leader.say("go on")
        found = [text for result in crew.results() for text in result]
    assert sorted(found) == ["ValueError: no data"] * 99 + ["no data"]


def test_many_fail_fast_too(cache: RedisCache) -> None:
    def broken(keys: list[str]) -> dict[str, int]:
        raise Broken("no data")

    with pytest.raises(Broken):
        cache.get_or_set_many(["report", "other"], broken, error_ttl=60)
    with pytest.raises(ComputationFailed, match="Broken: no data"):
        cache.get_or_set("report", 1)
    with pytest.raises(ComputationFailed, match="Broken: no data"):
        cache.get_or_set_many(["free", "other"], lambda keys: dict.fromkeys(keys, 1))
    # What it led was computed and kept all the same.
    assert cache.get("free") == 1
