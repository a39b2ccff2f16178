"""What the package does by itself has ended with the test that began it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from django_redis_lock import signals, threads
from django_redis_lock.cache import LocMemCache
from django_redis_lock.events import ServerDown, emit
from django_redis_lock.keeper import Job, exchange, keeper
from django_redis_lock.locking.lock import in_a_thread
from django_redis_lock.transport import server_of
from tests.processes import PATIENCE
from tests.support.quiet import until_quiet

Work = Callable[..., object]


def refresh(work: Work) -> None:
    cache: Any = LocMemCache("quiet", {})
    cache.compute("report", "old", 60, stale=3600)
    cache.expire("report", 3500)
    assert cache.get_or_set("report", work, 60, stale=3600, background=True) == "old"


def notice(work: Work) -> None:
    threads.run_later(work)


def signal(work: Work) -> None:
    began = threading.Event()

    def receive(**_: Any) -> None:
        began.set()
        work()

    signals.server_down.connect(receive)
    emit(ServerDown("redis:6379", OSError()))
    assert began.wait(PATIENCE)


def on_lost(work: Work) -> None:
    in_a_thread(work, b"name")()


def name_to_resolve(work: Work) -> None:
    exchange._resolving.submit(work)


def job(work: Work) -> None:
    class Slow(Job):
        def call(self, now: float) -> None:
            work()

    cache: Any = LocMemCache("quiet", {})
    keeper().add(Slow(server_of(cache._lock_client()), 0.0))


def notice_of_a_refresh(work: Work) -> None:
    """It begins when what it belongs to ends."""
    refresh(lambda: (time.sleep(0.02), threads.run_later(work)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "begin", [refresh, notice, signal, on_lost, name_to_resolve, job, notice_of_a_refresh]
)
def test_it_ends_before_the_next_test_begins(begin: Callable[[Work], None]) -> None:
    began, ended = threading.Event(), threading.Event()

    def work(**_: Any) -> None:
        began.set()
        time.sleep(0.02)
        ended.set()

    begin(work)
    if begin is job:  # One that the keeper has not begun, it forgets.
        assert began.wait(PATIENCE)
    until_quiet()
    assert ended.is_set()
