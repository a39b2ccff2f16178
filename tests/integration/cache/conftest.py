"""``cache`` is each of the two backends: a test that asks for it runs on Redis and in memory. One
that also asks for a server, or is marked ``on_redis``, is about what only a server can do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from django_redis_lock.cache import LocMemCache, RedisCache
from tests.events import RecordedEvents, recording_events
from tests.lanes import IN_MEMORY
from tests.redis_server import RedisServer

SERVERS = {"redis_server", "own_server", "narrow"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        asked_for = set(metafunc.fixturenames) - {"_empty_redis"}
        marked = metafunc.definition.get_closest_marker("on_redis")
        one = marked or SERVERS.intersection(asked_for - _of_cache(metafunc))
        metafunc.parametrize("backend", ["redis"] if one else ["redis", IN_MEMORY])


def _of_cache(metafunc: pytest.Metafunc) -> set[str]:
    """What is asked for by the fixture ``cache`` and not by the test."""
    given = set(metafunc.definition._fixtureinfo.argnames)
    return {"redis_server"} - given


@pytest.fixture
def cache(
    request: pytest.FixtureRequest, backend: str, redis_server: RedisServer, location: str
) -> Any:
    """With the settings that the module gives as ``CACHE``."""
    settings = getattr(request.module, "CACHE", {})
    if backend == "redis":
        return RedisCache(redis_server.url, {"OPTIONS": {}, **settings})
    return LocMemCache(location, settings)


@pytest.fixture
def location() -> str:
    """Where nothing is yet, and where no thread of another test puts anything."""
    return f"tests {next(_numbers)}"


@pytest.fixture(scope="module")
def stopped() -> Iterator[RedisServer]:
    """A server that is down."""
    with RedisServer() as server:
        server.stop()
        yield server


_numbers = itertools.count()


@pytest.fixture
def client(request: pytest.FixtureRequest, client: redis.Redis) -> redis.Redis:
    """What reaches the keys of ``cache`` behind its back."""
    if "backend" not in request.fixturenames or request.getfixturevalue("backend") == "redis":
        return client
    found: redis.Redis = LocMemCache(request.getfixturevalue("location"), {})._lock_client()
    return found


@pytest.fixture(params=["threads", "asyncio"])
def ask(request: pytest.FixtureRequest, cache: RedisCache) -> Any:
    """``get_or_set``, also by way of asyncio."""
    if request.param == "threads":
        return cache.get_or_set
    return lambda *args, **kwargs: asyncio.run(cache.aget_or_set(*args, **kwargs))


@pytest.fixture
def heard() -> Iterator[RecordedEvents]:
    """What listeners are told of the key ``report``."""
    with recording_events("report") as heard:
        yield heard
