"""``mark_stale``: the next caller computes the value again, others get the old one until then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis

from django_redis_lock import cached
from django_redis_lock.cache import RedisCache
from django_redis_lock.protocol.keys import flight_key
from tests.processes import PATIENCE, until, waiting_in
from tests.redis_server import RedisServer
from tests.support.background import elsewhere
from tests.support.values import KEY, Asking, Producer

#: How the report is asked for: fresh for ten minutes, stale for an hour.
TERMS: dict[str, Any] = {"timeout": 600, "stale": 3600}


def marked(cache: Any, *args: Any, **kwargs: Any) -> Any:
    return cache.mark_stale("report", *args, **kwargs)


def marked_with_others(cache: Any, *args: Any, **kwargs: Any) -> Any:
    return cache.mark_stale_many(["other", "report"], *args, **kwargs)


def amarked(cache: Any, *args: Any, **kwargs: Any) -> Any:
    async def mark() -> Any:
        return await cache.amark_stale("report", *args, **kwargs)

    return asyncio.run(mark())


def amarked_with_others(cache: Any, *args: Any, **kwargs: Any) -> Any:
    async def mark() -> Any:
        return await cache.amark_stale_many(iter(["report", "other"]), *args, **kwargs)

    return asyncio.run(mark())


@pytest.fixture(params=[marked, marked_with_others, amarked, amarked_with_others])
def mark(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Each way to mark the report stale; returns how many values there are."""
    return request.param


def test_the_next_caller_computes_the_value_again(
    cache: Any, client: redis.Redis, mark: Callable[..., Any]
) -> None:
    assert not mark(cache, stale=3600)
    assert not client.exists(KEY, flight_key(KEY))
    cache.get_or_set("report", "old", **TERMS)
    assert mark(cache, stale=3600) == 1
    assert cache.get("report") == "old"
    assert cache.get_or_set("report", lambda: "new", **TERMS) == "new"
    assert cache.get_or_set("report", lambda: "not again", **TERMS) == "new"


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("lifetime", "left"), [(None, 3600), (4000, 3600), (3600.5, 3600), (3000, 3000)]
)
def test_no_lifetime_becomes_longer(
    cache: Any, mark: Callable[..., Any], lifetime: float | None, left: float
) -> None:
    cache.set("report", "old", lifetime)
    assert mark(cache, stale=3600) == 1
    assert left * 1000 - 60_000 < cache.pttl("report") <= left * 1000
    assert cache.get_or_set("report", lambda: "new", **TERMS) == "new"


def test_a_version_has_its_own_value(cache: Any, mark: Callable[..., Any]) -> None:
    cache.set("report", "of 1", None)
    cache.set("report", "of 2", None, version=2)
    assert mark(cache, 2, stale=3600) == 1
    assert cache.pttl("report") is None
    assert cache.pttl("report", version=2) <= 3_600_000


@pytest.mark.parametrize(
    ("stale", "words"),
    [
        ({}, "mark_stale needs stale, the seconds for which callers"),
        ({"stale": 0}, "mark_stale needs stale, the seconds for which callers"),
        ({"stale": -1}, "stale must be"),
        ({"stale": "1"}, "stale must be"),
        ({"stale": None}, "stale must be"),
    ],
)
def test_without_a_stale_time_it_is_refused(
    cache: Any, mark: Callable[..., Any], stale: dict[str, Any], words: str
) -> None:
    cache.set("report", "old", None)
    with pytest.raises((TypeError, ValueError), match=words):
        mark(cache, **stale)
    assert cache.pttl("report") is None


# -- computations under way ----------------------------------------------------------------------


def test_a_refresh_under_way_is_not_stored(cache: Any, mark: Callable[..., Any]) -> None:
    """It may have read what has changed since."""
    cache.get_or_set("report", "old", **TERMS)
    cache.mark_stale("report", stale=3600)

    def compute() -> str:
        elsewhere(lambda: mark(cache, stale=3600))
        return "outdated"

    assert cache.get_or_set("report", compute, **TERMS) == "outdated"
    assert cache.get("report") == "old"
    assert cache.get_or_set("report", lambda: "new", **TERMS) == "new"


def test_the_first_computation_is_not_stored_either(cache: Any, mark: Callable[..., Any]) -> None:
    slow = Producer("outdated")
    slow.finish.clear()
    leading = Asking(cache.get_or_set, "report", slow, **TERMS)
    assert slow.begun.wait(PATIENCE)
    following = Asking(cache.get_or_set, "report", lambda: "new", **TERMS)
    until(lambda: waiting_in("django_redis_lock.singleflight.runners") == 1)
    assert not mark(cache, stale=3600)
    slow.finish.set()
    assert (leading.found(), following.found()) == ("outdated", "new")
    assert cache.get("report") == "new"


# -- many, and faults ----------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", ["no", "yes", "logged"])
def test_without_redis(
    own_server: RedisServer,
    mark: Callable[..., Any],
    ignored: str,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings.DJANGO_REDIS_LOG_IGNORED_EXCEPTIONS = ignored == "logged"
    cache = RedisCache(own_server.url, {"OPTIONS": {"IGNORE_EXCEPTIONS": ignored != "no"}})
    own_server.stop()
    if ignored == "no":
        with pytest.raises(redis.ConnectionError):
            mark(cache, stale=60)
    else:
        assert mark(cache, stale=60) == 0
    assert ("Exception ignored" in caplog.text) is (ignored == "logged")


# -- cached functions ----------------------------------------------------------------------------


@pytest.mark.on_redis
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_result_of_a_cached_function(client: redis.Redis, asynchronous: bool) -> None:
    given = iter(["old", "new"])

    @cached(key="report-{}".format, timeout=600, stale=3600)
    def report(year: int) -> str:
        return next(given)

    @cached(key="report-{}".format, timeout=600, stale=3600)
    async def areport(year: int) -> str:
        return next(given)

    async def ask() -> list[Any]:
        found = [await areport(2024), await areport.mark_stale(2024), await areport(2024)]
        return [*found, await areport(2024), await areport.mark_stale(2023)]

    if asynchronous:
        found = asyncio.run(ask())
    else:
        found = [report(2024), report.mark_stale(2024), report(2024)]
        found += [report(2024), report.mark_stale(2023)]
    assert found == ["old", True, "new", "new", False]


def test_a_cached_function_without_a_stale_time(client: redis.Redis) -> None:
    @cached("report-{year}", timeout=600)
    def report(year: int) -> str:
        return "old"

    with pytest.raises(ValueError, match="mark_stale needs stale"):
        report.mark_stale(2024)
