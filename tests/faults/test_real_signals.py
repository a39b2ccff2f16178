"""Real signals at random moments, from an interval timer, whose handler raises: the process lives,
and nothing it was after stays taken."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from django.core.cache import caches

from django_redis_lock import Lock
from django_redis_lock.transport.registry import server_of
from tests.processes import Link, processes

NAME = "interrupted"
#: Seconds of interrupts; and the longest and the shortest time between two, microseconds apart.
DURATION = 6.0


class Interrupt(BaseException):
    """From the signal handler."""


def interrupted(work: Callable[[], Any], seconds: float) -> int:
    """``work``, again and again, interrupted at a random moment each time; how often it was."""

    def interrupt(*args: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    until, count = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < until:
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-3))
                work()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                count += 1
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return count


def connects_and_waits(link: Link, url: str) -> int:
    """Everything of ours that sends a command by redis-py: a new connection, a wait for a lock,
    and one for another's computation."""
    client = redis.Redis.from_url(f"{url.partition('?')[0]}", db=1, protocol=3)
    cache: Any = caches["default"]
    stop = threading.Event()
    holder = Lock(client, NAME, thread_local=False, timeout=60)
    holder.acquire()
    threading.Thread(target=lambda: cache.get_or_set("slow", stop.wait, timeout=60)).start()

    def work() -> None:
        server_of(client).connect().disconnect()
        Lock(client, NAME, timeout=60).acquire(blocking_timeout=0.001)
        # With stale it is not django-redis that reads: its pool, redis-py's, does not survive this.
        terms: Any = {"timeout": 60, "stale": 1, "wait": 0.001, "on_wait_timeout": "default"}
        cache.get_or_set("slow", "value", **terms)

    try:
        return interrupted(work, DURATION)
    finally:
        stop.set()
        holder.release()


def test_no_signal_ends_the_process(client: redis.Redis, redis_server: Any) -> None:
    """hiredis crashes when a signal handler raises while it packs an int."""
    with processes(connects_and_waits, redis_server.url) as (worker,):
        worker.go()
        assert worker.result() > 100
