"""``timeout`` as a function of the value: how long each is kept, who gets one that is not, and what
happens if the function is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.test import override_settings

from django_redis_lock import cached
from django_redis_lock.cache import RedisCache
from django_redis_lock.protocol.keys import flight_key
from django_redis_lock.singleflight import flight
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer
from tests.support.values import KEY, Asking, Broken, Producer, waiting_in_memory

pytestmark = pytest.mark.invariant("C5")

Ask = Callable[..., Any]


def one_of_many(cache: Any, compute: Callable[[], Any], timeout: Any, **options: Any) -> Any:
    def compute_many(keys: list[str]) -> dict[str, Any]:
        return dict.fromkeys(keys, compute())

    return cache.get_or_set_many(["report"], compute_many, timeout, **options)["report"]


async def aone_of_many(cache: Any, compute: Callable[[], Any], timeout: Any, **options: Any) -> Any:
    async def compute_many(keys: list[str]) -> dict[str, Any]:
        return dict.fromkeys(keys, await asyncio.to_thread(compute))

    return (await cache.aget_or_set_many(["report"], compute_many, timeout, **options))["report"]


async def aone(cache: Any, compute: Callable[[], Any], timeout: Any, **options: Any) -> Any:
    async def acompute() -> Any:
        return await asyncio.to_thread(compute)

    return await cache.aget_or_set("report", acompute, timeout, **options)


#: Each way to compute a value that is not there.
WAYS: dict[str, Ask] = {
    "get_or_set": lambda c, f, t, **o: c.get_or_set("report", f, t, **o),
    "compute": lambda c, f, t, **o: c.compute("report", f, t, **o),
    "get_or_set_many": one_of_many,
    "aget_or_set": lambda *a, **o: asyncio.run(aone(*a, **o)),
    "aget_or_set_many": lambda *a, **o: asyncio.run(aone_of_many(*a, **o)),
}


@pytest.fixture(params=WAYS)
def ask(request: pytest.FixtureRequest) -> Ask:
    return WAYS[request.param]


def seconds(value: Any) -> float | None:
    """The timeout of each value of these tests."""
    timeouts: dict[str, float | None] = {"good": 500, "for ever": None, "bad": 0, "worse": -1}
    return timeouts[value]


@pytest.mark.parametrize("value", ["good", "for ever"])
def test_a_value_lives_as_long_as_the_function_says(cache: Any, ask: Ask, value: str) -> None:
    assert ask(cache, lambda: value, seconds) == value
    assert cache.get("report") == value
    left = cache.pttl("report")
    assert left is None if value == "for ever" else 400_000 < left <= 500_000


@pytest.mark.parametrize("value", ["bad", "worse"])
def test_a_value_for_no_time_is_returned_and_not_stored(
    cache: Any, client: redis.Redis, ask: Ask, value: str
) -> None:
    assert ask(cache, lambda: value, seconds) == value
    assert cache.get("report", "missing") == "missing"
    assert not client.exists(flight_key(KEY))
    assert ask(cache, lambda: "good", seconds) == "good"


def test_a_value_may_be_stale_after_its_own_timeout(cache: Any) -> None:
    cache.get_or_set("report", lambda: "good", seconds, stale=1000)
    assert 1_400_000 < cache.pttl("report") <= 1_500_000
    cache.pexpire("report", 900_000)
    assert cache.get_or_set("report", lambda: "for ever", seconds, stale=1000) == "for ever"
    assert cache.get_or_set("report", lambda: "not again", seconds, stale=1000) == "for ever"


def test_a_stale_value_is_gone_if_the_next_is_not_stored(cache: Any) -> None:
    cache.set("report", "old", 100)
    assert cache.get_or_set("report", lambda: "bad", seconds, stale=1000) == "bad"
    assert cache.get("report") is None


def test_each_of_many_values_has_its_own_timeout(cache: Any) -> None:
    values = {"a": "good", "b": "for ever", "c": "bad"}
    assert cache.get_or_set_many(values, lambda _: values, seconds) == values
    assert cache.get_many(values) == {"a": "good", "b": "for ever"}
    assert 400_000 < cache.pttl("a") <= 500_000
    assert cache.pttl("b") is None


@pytest.mark.on_redis
def test_a_cached_function(cache: Any, redis_server: RedisServer) -> None:
    given = iter(["bad", "good", "for ever"])

    @cached(key="report-{}".format, timeout=seconds)
    def report(year: int) -> str:
        return next(given)

    settings = {"BACKEND": "django_redis_lock.cache.RedisCache", "LOCATION": redis_server.url}
    with override_settings(CACHES={"default": settings}):
        assert [report(2024) for _ in range(3)] == ["bad", "good", "good"]
        assert report.refresh(2024) == "for ever"
        assert cache.pttl("report-2024") is None


# -- who waits for a value that is not stored ----------------------------------------------------


def held() -> Producer:
    """Computes a value that is not to be stored, when it may."""
    producer = Producer("bad")
    producer.finish.clear()
    return producer


@pytest.mark.parametrize("timeout", [seconds, 0])
def test_the_threads_that_wait_get_a_value_that_is_not_stored(cache: Any, timeout: Any) -> None:
    compute = held()
    threads = [Asking(cache.get_or_set, "report", compute, timeout) for _ in range(8)]
    until(lambda: waiting_in_memory() == 7)
    compute.finish.set()
    assert [thread.found() for thread in threads] == ["bad"] * 8
    assert compute.calls == 1
    assert cache.get("report") is None


def ask_elsewhere(link: Link, url: str) -> Any:
    flight.SHARED_LIFETIME_MILLISECONDS = 600_000

    def compute() -> str:
        link.say("computing")
        link.hear()
        return "bad"

    return RedisCache(url, {}).get_or_set("report", compute, seconds)


def test_other_processes_get_a_value_that_is_not_stored(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    with processes(ask_elsewhere, redis_server.url, count=4) as crew:
        crew[0].go()
        assert crew[0].hear() == "computing"
        for follower in crew[1:]:
            follower.go()
        until(lambda: client.info("clients")["blocked_clients"] == 3)
        crew[0].say("finish")
        assert crew.results() == ["bad"] * 4
    assert not client.exists(KEY, flight_key(KEY))


def test_who_comes_later_computes_for_itself(cache: Any) -> None:
    """Also while the stream of the last computation still has its value."""
    assert cache.get_or_set("report", lambda: "bad", seconds) == "bad"
    assert cache.get_or_set("report", lambda: "worse", seconds) == "worse"


def test_a_write_wins_over_a_value_that_is_not_stored(cache: Any) -> None:
    def compute() -> str:
        cache.set("report", "written")
        return "bad"

    assert cache.get_or_set("report", compute, seconds) == "bad"
    assert cache.get("report") == "written"


# -- a function that is wrong --------------------------------------------------------------------


def broken(value: Any) -> float:
    raise Broken("no timeout")


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "raises": (broken, Broken, "no timeout"),
    "returns text": (lambda _: "soon", TypeError, "what timeout returns must be"),
    "returns True": (lambda _: True, TypeError, "what timeout returns must be"),
    "returns NaN": (lambda _: float("nan"), ValueError, "what timeout returns must be"),
    "returns infinity": (lambda _: float("inf"), ValueError, "what timeout returns must be"),
    "takes nothing": (lambda: 60, TypeError, "argument"),
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("wrong", WRONG)
def test_the_caller_that_computed_gets_the_error(
    cache: Any, client: redis.Redis, ask: Ask, wrong: str
) -> None:
    timeout, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        ask(cache, lambda: "good", timeout)
    assert not client.exists(KEY, flight_key(KEY))
    assert ask(cache, lambda: "good", seconds) == "good"


def test_a_follower_takes_over_from_it(cache: Any) -> None:
    compute = held()
    leading = Asking(cache.get_or_set, "report", compute, broken)
    assert compute.begun.wait(PATIENCE)
    following = Asking(cache.get_or_set, "report", compute, seconds)
    until(lambda: waiting_in_memory() == 1)
    compute.finish.set()
    assert isinstance(leading.found(), Broken)
    assert following.found() == "bad"
    assert compute.calls == 2


def test_a_refresh_with_it_serves_the_stale_value(
    cache: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_redis_lock.threads.LOG_PAUSE_SECONDS", 0.0)
    cache.set("report", "old", 100)
    assert cache.get_or_set("report", lambda: "good", broken, stale=1000) == "old"
    assert "The refresh of :1:report failed; the stale value is served" in caplog.text
    assert cache.get("report") == "old"
