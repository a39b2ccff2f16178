"""Reads that need a new connection: one at a time, whatever number of threads ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis

from django_redis_lock.cache import RedisCache, values
from django_redis_lock.transport import server_of
from tests.processes import PATIENCE
from tests.redis_server import RedisServer
from tests.support.background import Background


@pytest.fixture
def cache(redis_server: RedisServer, client: redis.Redis) -> RedisCache:
    found = RedisCache(redis_server.url, {})
    found.set("report", "there")
    assert found.get_or_set("report", "new") == "there"  # The connection is open.
    return found


class Turn:
    """The turn to read, which another thread has."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._mutex.acquire()
        self.awaited = threading.Event()

    def acquire(self, timeout: float) -> bool:
        self.awaited.set()
        return self._mutex.acquire(timeout=timeout)

    def release(self) -> None:
        self._mutex.release()


@pytest.fixture
def turn(cache: RedisCache) -> Iterator[Turn]:
    server, taken = server_of(cache._lock_client()), Turn()
    cast(Any, values._cold_reads)[server] = taken
    yield taken
    values._cold_reads.pop(server, None)


def close_connections(cache: RedisCache) -> None:
    """The next read opens one."""
    server_of(cache._lock_client()).close()


@pytest.mark.parametrize("stale", [0, 60])
def test_a_cold_read_waits_for_another(
    cache: RedisCache,
    turn: Turn,
    monkeypatch: pytest.MonkeyPatch,
    stale: float,
) -> None:
    monkeypatch.setattr(values, "COLD_READ_TIMEOUT_SECONDS", 30.0)
    close_connections(cache)
    late = Background(lambda: cache.get_or_set("report", "new", 60, stale=stale))
    assert turn.awaited.wait(PATIENCE)
    assert not late.done
    turn.release()
    assert late.result() == "there"
