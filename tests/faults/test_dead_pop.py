"""A blocking pop that ends without an answer, or that Redis does not know of."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import Lock
from django_redis_lock.locking.waiting.threads import ThreadWaiter
from tests.holding import watch_often
from tests.processes import until

from .proxy import Proxy

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(autouse=True)
def _watched_often(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_often(monkeypatch)


def test_a_lone_waiter_has_the_lock_when_its_holder_has_died(
    proxy: Proxy, client: redis.Redis
) -> None:
    """Nobody else waits, so nobody else can have the grants that its dead pop does not get."""
    client.set("report", "of a holder that died", px=300)
    proxy.swallow(b"BLPOP")
    with proxy.client() as through:
        assert Lock(through, "report", timeout=5).acquire(blocking_timeout=20)


def test_a_last_try_that_wins_is_enough(proxy: Proxy, client: redis.Redis) -> None:
    """What the pop would have said cannot be waited for."""
    client.set("report", "of a holder that died", px=300)
    proxy.swallow(b"BLPOP", times=10)
    with proxy.client() as through:
        lock = Lock(through, "report", timeout=60, grant_timeout=60)
        until(lambda: lock.acquire(blocking_timeout=0.25))
        assert lock.owned()


def test_one_that_dies_just_at_the_deadline_is_no_error(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper ends a pop that Redis seems not to know, at any moment."""
    last_try, died = ThreadWaiter._last_try, threading.Event()

    def dying(waiter: ThreadWaiter) -> Any:
        if not died.is_set():
            waiter.queue.wake()
            died.set()
        return last_try(waiter)

    monkeypatch.setattr(ThreadWaiter, "_last_try", dying)
    with Lock(client, "report", timeout=30):
        assert not Lock(client, "report").acquire(blocking_timeout=0.3)
    assert died.is_set()
    until(lambda: not client.exists("{report}:waiters"))
