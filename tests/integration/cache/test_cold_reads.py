"""Reads that need a new connection: few at a time, whatever number of threads ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from django_redis_lock.cache import RedisCache, backend, reading
from django_redis_lock.transport import server_of
from django_redis_lock.transport.execute import FOR_COMMAND
from tests.lock_contract import Background
from tests.processes import PATIENCE, in_threads, until, waiting_in
from tests.redis_server import RedisServer


@pytest.fixture(params=["own connections", "redis-py's"])
def cache(
    redis_server: RedisServer, client: redis.Redis, request: pytest.FixtureRequest
) -> RedisCache:
    found = RedisCache(redis_server.url, {})
    if request.param == "redis-py's":  # As for a client that a tool observes.
        vars(found)["_reader"] = None
    found.set("report", "there")
    assert found.get_or_set("report", "new") == "there"  # The connection is open.
    return found


@pytest.fixture
def room(cache: RedisCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """The room for cold reads, all of it taken."""
    taken = threading.BoundedSemaphore(reading.COLD_READS)
    for _ in range(reading.COLD_READS):
        taken.acquire()
    server = server_of(cache._lock_client())
    reading._cold_reads[server] = taken
    yield taken
    reading._cold_reads.pop(server, None)


def occupied(cache: RedisCache) -> Any:
    """All connections of the pool, in use; and none of our own."""
    server_of(cache._lock_client()).close()
    pool = cache.client.get_client(write=False).connection_pool
    taken = []
    while pool._available_connections:
        taken.append(pool.get_connection(*FOR_COMMAND))
    return pool, taken


def test_no_thread_waits_while_connections_are_free(
    cache: RedisCache, room: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "cold_read", lambda *_: pytest.fail("a connection is free"))
    assert cache.get_or_set("report", "new") == "there"


@pytest.mark.parametrize(("stale", "broken"), [(0, False), (0, True), (60, False)])
def test_a_cold_read_waits_for_another(
    cache: RedisCache,
    room: threading.Semaphore,
    monkeypatch: pytest.MonkeyPatch,
    stale: float,
    broken: bool,
) -> None:
    monkeypatch.setattr(reading, "COLD_READ_TIMEOUT_SECONDS", 30.0)
    pool, taken = occupied(cache)
    if broken:  # A connection that is free, but closed, has to be made as well.
        pool.disconnect()
        pool.release(taken.pop())
    server_of(cache._lock_client()).close()
    late = Background(lambda: cache.get_or_set("report", "new", 60, stale=stale))
    until(lambda: waiting_in("django_redis_lock.cache.reading") == 1)
    assert not late.done
    room.release()
    assert late.result() == "there"
    for connection in taken:
        pool.release(connection)


def test_a_cold_read_that_waited_joins_a_new_flight(
    cache: RedisCache, room: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would find what the leader found: nothing."""
    monkeypatch.setattr(reading, "COLD_READ_TIMEOUT_SECONDS", 30.0)
    begun, over = threading.Event(), threading.Event()

    def compute() -> str:
        begun.set()
        assert over.wait(PATIENCE)
        return "new"

    leader = Background(lambda: cache.get_or_set("missing", compute))
    assert begun.wait(PATIENCE)
    _, taken = occupied(cache)
    monkeypatch.setattr(cache.client, "get", lambda *_: pytest.fail("it reads"))
    late = Background(lambda: cache.get_or_set("missing", "other"))
    until(lambda: waiting_in("django_redis_lock.cache.reading") == 1)
    room.release()
    until(lambda: waiting_in("django_redis_lock.singleflight.runners") == 1)
    over.set()
    assert [leader.result(), late.result()] == ["new", "new"]
    assert taken


def test_a_cold_read_waits_no_longer_than_its_patience(
    cache: RedisCache, room: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next one does not wait for what did not end in that time."""
    monkeypatch.setattr(reading, "COLD_READ_TIMEOUT_SECONDS", 0.01)
    pool, taken = occupied(cache)
    assert cache.get_or_set("report", "new") == "there"
    for connection in taken:
        pool.release(connection)
    monkeypatch.setattr(reading, "COLD_READ_TIMEOUT_SECONDS", 30.0)
    pool, taken = occupied(cache)
    assert cache.get_or_set("report", "new") == "there"
    for connection in taken:
        pool.release(connection)


@pytest.mark.parametrize("stale", [0, 60])
def test_a_cold_read_gives_its_place_back(cache: RedisCache, stale: float) -> None:
    server = server_of(cache._lock_client())
    for key, value in {"report": "there", "missing": "new"}.items():
        cache.client.get_client(write=False).connection_pool.disconnect()
        server.close()
        assert cache.get_or_set(key, "new", 60, stale=stale) == value
        assert reading._cold_reads[server]._value == reading.COLD_READS


def test_reads_of_different_keys_share_the_few_connections(cache: RedisCache) -> None:
    pool = cache.client.get_client(write=False).connection_pool
    found = in_threads(24, lambda: cache.get_or_set(threading.current_thread().name, "new"))
    assert found == ["new"] * 24
    assert len(pool._available_connections) <= 6
