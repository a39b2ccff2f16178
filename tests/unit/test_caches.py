"""Parts of the cache backend that need no server."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from asgiref.sync import markcoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django_redis.exceptions import ConnectionInterrupted

from django_redis_lock.cache import NO_LOCATION, LocMemCache, RedisCache, methods
from django_redis_lock.cache.commands import _is_over, encoding
from django_redis_lock.cache.get_or_set import awaitable
from django_redis_lock.cache.reading import MISSING, _missing_unless_outage
from django_redis_lock.singleflight import DeferredCall
from django_redis_lock.transport import CircuitOpen


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> Any:
    found: Any = LocMemCache(request.node.name, {"KEY_PREFIX": "site"})
    found.clear()
    return found


# -- keys ------------------------------------------------------------------------------------------

#: The arguments of ``make_key``, and whether they are those of most operations.
MADE: dict[str, tuple[tuple[Any, ...], bool]] = {
    "usual": (("report",), True),
    "of a version": (("report", 2), False),
    "of a prefix": (("report", None, "other"), False),
    "of both": (("report", 2, "other"), False),
    "a number": ((5,), False),
}


@pytest.mark.parametrize("args", MADE)
def test_most_keys_are_made_without_django_redis(
    cache: Any, args: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, usual = MADE[args]
    wanted = type(cache.client).make_key(cache.client, *given)
    longer: list[Any] = []
    unchecked = methods.KeyGuard.unchecked

    def noting(guard: Any, *args: Any) -> str:
        longer.append(args)
        return unchecked(guard, *args)

    monkeypatch.setattr(methods.KeyGuard, "unchecked", noting)
    assert cache.client.make_key(*given) == wanted
    assert bool(longer) is not usual


def test_a_change_of_the_settings_counts_for_what_was_refused_before(
    cache: Any, settings: Any
) -> None:
    with pytest.raises(ValueError, match="no name for a cache value"):
        cache.get("lock:x", version=1)
    assert cache.get("mutex:x", version=1) is None
    settings.DJANGO_REDIS_LOCK = {"LOCK_PREFIX": "mutex:"}
    with pytest.raises(ValueError, match="no name for a cache value"):
        cache.get("mutex:x", version=1)
    assert cache.get("lock:x", version=1) is None


def test_the_guard_remembers_few_prefixes(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "MAX_CACHED", 3)
    for number in range(20):
        cache.key_prefix = f"tenant {number}"
        with pytest.raises(ValueError, match="no name for a cache value"):
            cache.get("lock:x")
        assert 0 < len(cache._guard._by_prefix) <= 4


# -- servers ---------------------------------------------------------------------------------------


def host_of(client: Any) -> Any:
    return client.connection_pool.connection_kwargs["host"]


def test_locks_are_on_the_primary() -> None:
    cache = RedisCache("redis://primary/0,redis://replica/0", {})
    assert {host_of(cache._lock_client()) for _ in range(5)} == {"primary"}
    assert {host_of(cache.lock("a").redis) for _ in range(5)} == {"primary"}


def test_a_cache_without_a_location_says_so() -> None:
    with pytest.raises(ImproperlyConfigured, match=NO_LOCATION[:30]):
        _ = RedisCache("", {}).client
    assert LocMemCache("", {}).client


@pytest.mark.parametrize(
    ("encoder", "word", "encoded"),
    [
        (("utf-8", "strict"), "ü", b"\xc3\xbc"),
        (("UTF8", "strict"), "ü", b"\xc3\xbc"),
        (("latin-1", "strict"), "ü", b"\xfc"),
        (("utf-8", "replace"), "\ud800", b"?"),
        (("utf-8", "strict"), 5, b"5"),
        (("utf-8", "strict"), b"x", b"x"),
    ],
)
def test_words_are_encoded_as_redis_py_does(
    encoder: tuple[str, str], word: Any, encoded: bytes
) -> None:
    name, errors = encoder
    theirs: Any = redis.Redis(encoding=name, encoding_errors=errors).get_encoder()
    assert encoding(theirs)(word) == theirs.encode(word) == encoded
    usual = encoder[0] != "latin-1" and encoder[1] == "strict"
    assert (encoding(theirs) == theirs.encode) is not usual


@pytest.mark.parametrize(
    ("time", "over"),
    [(0, True), (-1, True), (1, False), (0.5, False), (None, False), ("0", False)],
)
def test_which_lifetimes_are_over(time: Any, over: bool) -> None:
    assert _is_over(time) is over
    if isinstance(time, (int, float)):
        assert _is_over(timedelta(seconds=time)) is over


def failing(error: BaseException | None) -> Any:
    """As django-redis fails."""
    raise ConnectionInterrupted(connection=None) from error


#: An error on a connection of the pool, and whether it says that the server is away.
ERRORS: dict[str, tuple[BaseException | None, bool]] = {
    "no connection": (redis.ConnectionError("away"), True),
    "no reply": (redis.TimeoutError("silent"), True),
    "a refusal": (redis.ResponseError("BUSY Redis is busy"), False),
    "a wrong type": (redis.ResponseError("WRONGTYPE of the value"), False),
    "no connection left in the pool": (redis.ConnectionError("Too many connections"), False),
    "an error without a cause": (None, False),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_which_errors_of_the_pool_count_as_an_outage(kind: str) -> None:
    error, counts = ERRORS[kind]
    cache = RedisCache(
        f"redis://127.0.0.1:1/{200 + list(ERRORS).index(kind)}", {}
    )  # A breaker of its own.
    breaker: Any = cache._breaker
    for _ in range(3):  # At once: they cost nothing.
        with pytest.raises(ConnectionInterrupted):
            cache._with_breaker(failing, error)
        assert bool(breaker.failing) is counts
    assert cache._with_breaker(lambda: 5) == 5
    assert not breaker.failing


@pytest.mark.parametrize("kind", ERRORS)
def test_after_which_errors_the_query_for_the_leader_reads_the_value(kind: str) -> None:
    """Which may wait: the server is there."""
    with pytest.raises(ConnectionInterrupted) as failed:
        failing(ERRORS[kind][0])
    if kind in ("a refusal", "no connection left in the pool"):
        assert _missing_unless_outage(failed.value) is MISSING
        return
    with pytest.raises(ConnectionInterrupted):
        _missing_unless_outage(failed.value)


def test_while_an_outage_lasts_nothing_is_read_on_connections_of_the_pool() -> None:
    cache = RedisCache("redis://127.0.0.1:1/220", {})
    breaker: Any = cache._breaker
    for _ in range(2):
        breaker.failed(redis.TimeoutError("silent"), 100.0)
    with pytest.raises(ConnectionInterrupted) as refused:
        cache._with_breaker(lambda: pytest.fail("it is sent"))
    assert isinstance(refused.value.__cause__, CircuitOpen)


# -- get_or_set ------------------------------------------------------------------------------------


async def coroutine_function() -> int:
    return 5


class AsyncCallable:
    async def __call__(self) -> int:
        return 5


def marked() -> Any:
    return coroutine_function()


markcoroutinefunction(marked)

#: What gives the value of a task, and whether it is called in Django's thread.
GIVEN: dict[str, tuple[Any, bool]] = {
    "a function": (lambda: 5, True),
    "a class of the project's": (AsyncCallable, True),
    "a partial function": (functools.partial(int, 5), True),
    "a built-in type": (list, False),
    "a coroutine function": (coroutine_function, False),
    "a marked function": (marked, False),
    "an object that is awaited": (AsyncCallable(), False),
    "a value": (5, False),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_what_a_task_calls_in_djangos_thread(kind: str) -> None:
    function, in_thread = GIVEN[kind]
    made = awaitable(function)
    assert isinstance(made, DeferredCall) if in_thread else made is function


def test_the_options_of_a_usual_call_are_made_once_for_each_change_of_the_settings(
    cache: Any, settings: Any
) -> None:
    usual = cache._options(60, {})
    assert cache._options(30, {}) is usual
    assert cache._options(60, {"wait": 5.0}).wait == 5
    assert cache._options(60, {}) is usual
    settings.DJANGO_REDIS_LOCK = {"WAIT": 7, "STALE": 60}
    assert cache._options(60, {}).wait == 7
    assert cache._options(60, {}).stale == 60
    assert cache._options(None, {}).stale == 0  # It never ends.


def by_thread(cache: Any, **options: Any) -> Any:
    return cache.get_or_set("report", "new", 60, **options)


def by_task(cache: Any, **options: Any) -> Any:
    async def get() -> Any:
        return await cache.aget_or_set("report", "new", 60, **options)

    return asyncio.run(get())


@pytest.mark.parametrize(
    "wrong", [{"timeout": "60"}, {"timeout": timedelta(1)}, {"wait": -1}, {"stales": 5}]
)
def test_what_is_wrong_is_refused_although_there_is_a_value(cache: Any, wrong: Any) -> None:
    cache.set("report", "there")
    with pytest.raises((TypeError, ValueError)):
        cache.get_or_set("report", "new", **wrong)


@pytest.mark.parametrize("misses", [0, 2, 3, 10])
@pytest.mark.parametrize("options", [{}, {"stale": 60}], ids=["plain", "stale"])
@pytest.mark.parametrize("way", [by_thread, by_task])
def test_a_hit_ends_the_misses_in_a_row(
    cache: Any, way: Callable[..., Any], options: Any, misses: int
) -> None:
    """Read first, or by the query for the leader."""
    cache.set("report", "there", 3600)
    cache._misses_in_a_row = misses
    assert way(cache, **options) == "there"
    assert cache._misses_in_a_row == 0
