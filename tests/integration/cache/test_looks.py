"""Who reads a value while another thread of the process reads it too."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

from django_redis_lock.cache import RedisCache
from django_redis_lock.cache.looks import PendingReads
from django_redis_lock.transport.execute import FOR_COMMAND
from tests.lock_contract import Background
from tests.processes import PATIENCE
from tests.redis_server import RedisServer

PLACE = ("", "report", None)


@pytest.fixture
def cache(redis_server: RedisServer, client: redis.Redis) -> RedisCache:
    found = RedisCache(redis_server.url, {})
    found.set("report", "there")
    return found


def occupied(cache: RedisCache) -> Any:
    """All connections of the pool, in use."""
    pool = cache.client.get_client(write=False).connection_pool
    taken = []
    while pool._available_connections:
        taken.append(pool.get_connection(*FOR_COMMAND))
    return pool, taken


def test_nobody_waits_while_there_are_connections(
    cache: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        PendingReads, "wait_for", lambda *_: pytest.fail("there is a connection at rest")
    )
    look = cache._looks.begin(PLACE)
    assert cache.get_or_set("report", "new") == "there"
    cache._looks.end(PLACE, look)


@pytest.mark.parametrize(("stale", "broken"), [(0, False), (0, True), (60, False)])
def test_who_would_connect_waits_for_the_other(
    cache: RedisCache, monkeypatch: pytest.MonkeyPatch, stale: float, broken: bool
) -> None:
    monkeypatch.setattr("django_redis_lock.cache.looks.PATIENCE", 30.0)
    server, nkey = cache._thread_crew().server, cache._encoded_key("report", None)
    place = nkey if stale else PLACE
    pool, taken = occupied(cache)
    if broken:  # Those at rest need to connect as well.
        pool.disconnect()
        pool.release(taken.pop())
    server.close()
    waiting = threading.Event()
    wait_for = PendingReads.wait_for

    def wait(looks: PendingReads, key: Any) -> bool:
        waiting.set()
        return wait_for(looks, key)

    monkeypatch.setattr(PendingReads, "wait_for", wait)
    look = cache._looks.begin(place)
    late = Background(lambda: cache.get_or_set("report", "new", 60, stale=stale))
    assert waiting.wait(PATIENCE)
    assert not late.done
    cache._looks.end(place, look)
    # It reads for itself: what the other was told may be older.
    assert late.result() == "there"
    for connection in taken:
        pool.release(connection)


def test_who_has_no_answer_in_time_asks_for_himself(
    cache: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_redis_lock.cache.looks.PATIENCE", 0.01)
    pool, taken = occupied(cache)
    look = cache._looks.begin(PLACE)
    assert cache.get_or_set("report", "new") == "there"
    cache._looks.end(PLACE, look)
    for connection in taken:
        pool.release(connection)


def test_nothing_stays(cache: RedisCache) -> None:
    assert cache.get_or_set("report", "new") == "there"
    assert cache.get_or_set("report", "new", 60, stale=60) == "there"
    assert cache.get_or_set("missing", "new") == "new"
    with pytest.raises(ZeroDivisionError):
        cache.get_or_set("broken", lambda: 1 / 0)
    assert not cache._looks._under_way
