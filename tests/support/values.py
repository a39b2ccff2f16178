"""Functions that compute values for a cache, and who waits for them."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis

from django_redis_lock.cache import RedisCache
from django_redis_lock.keeper import keeper
from django_redis_lock.protocol.keys import flight_key, flight_stream
from django_redis_lock.singleflight.flight import FlightRenewal
from tests.processes import PATIENCE, waiting_in
from tests.redis_server import RedisServer
from tests.support.background import Background

KEY = b":1:report"


VALUES = [
    None,
    False,
    True,
    0,
    1,
    -7,
    2**70,
    1.5,
    "",
    "text",
    "12",
    b"",
    b"\x00\xff",
    (),
    {"a": [1, None]},
    "x" * 5_000_000,
]


def make(server: RedisServer, **options: Any) -> RedisCache:
    return RedisCache(server.url, {"OPTIONS": options})


class Producer:
    """Gives ``value``, counts, and can be held up."""

    def __init__(self, value: Any = "computed") -> None:
        self.value = value
        self.calls = 0
        self.begun = threading.Event()
        self.finish = threading.Event()
        self.finish.set()

    def __call__(self) -> Any:
        self.calls += 1
        self.begun.set()
        assert self.finish.wait(PATIENCE)
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class TaskProducer:
    """As ``Producer``, a coroutine function; it goes on when it is told to."""

    def __init__(self, value: Any = "computed") -> None:
        self.value = value
        self.calls = 0
        self.begun = asyncio.Event()
        self.finish = asyncio.Event()

    async def __call__(self) -> Any:
        self.calls += 1
        self.begun.set()
        await self.finish.wait()
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


@pytest.fixture
def slow() -> Iterator[Producer]:
    """A producer that goes on when it is told to."""
    producer = Producer()
    producer.finish.clear()
    yield producer
    producer.finish.set()


class Asking(Background):
    """A thread that calls ``function``."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(partial(function, *args, **kwargs))

    def found(self) -> Any:
        """What the call returned, or the exception it raised."""
        try:
            return self.result()
        except Exception as error:
            return error


def waiting_in_memory() -> int:
    """How many threads wait for what another thread of this process finds."""
    return waiting_in("django_redis_lock.singleflight.runners")


def renewals() -> list[Any]:
    """What the keeper of this process does for computations under way."""
    return [job for job in keeper().jobs() if isinstance(job, FlightRenewal)]


def blocked(client: redis.Redis) -> int:
    memory = client.connection_pool.connection_kwargs.get("database")
    if memory is not None:
        return len(memory._blocked)
    return int(client.info("clients")["blocked_clients"])


def elsewhere(client: redis.Redis, lifetime: float = 600) -> None:
    """Another process computes the report."""
    client.set(flight_key(KEY), "another", px=int(lifetime * 1000))


def lands_elsewhere(client: redis.Redis, value: bytes | int | None) -> None:
    """The other process has computed it."""
    if isinstance(value, int) and client.connection_pool.connection_kwargs.get("database"):
        value = pickle.dumps(value)  # django-redis keeps a number as it is.
    if value is not None:
        client.set(KEY, value)
    client.delete(flight_key(KEY))
    client.xadd(flight_stream(KEY, b"another"), {"outcome": "stored"})


class Broken(Exception):
    pass


#: Options with which outages show.
RAISE: dict[str, Any] = {"LOCK_VALUES_ON_REDIS_DOWN": "raise"}


#: How the report is asked for: fresh for a minute, stale for an hour.
TERMS: dict[str, Any] = {"timeout": 60, "stale": 3600}


def age(client: redis.Redis, key: bytes | str = KEY) -> None:
    """Let more than a minute pass for the report."""
    client.pexpire(key, 3_500_000)
