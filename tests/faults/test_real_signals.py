"""Real signals at random moments, from an interval timer, whose handler raises: the process lives,
and nothing it was after stays taken."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import redis
from django.core.cache import caches

from django_redis_lock import Lock, Redlock
from django_redis_lock import keeper as keeper_module
from django_redis_lock.threads import ThreadPool
from django_redis_lock.transport.server import server_of
from tests.lanes import examples
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer
from tests.support.interrupts import Interrupt

NAME = "interrupted"


def interrupted(work: Callable[[], Any], seconds: float) -> int:
    """``work``, again and again, interrupted at a random moment each time; how often it was. On a
    busy machine, it takes longer until that was often enough."""

    def interrupt(*args: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    until, count = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < until + (PATIENCE / 2 if count <= 50 else 0):
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


def connects_and_waits(link: Link, url: str, seconds: float) -> int:
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
        return interrupted(work, seconds)
    finally:
        stop.set()
        holder.release()


def takes_redlocks(link: Link, urls: list[str], seconds: float) -> int:
    """Each of its connections is made in a thread of its own."""
    clients = [redis.Redis.from_url(url) for url in urls]
    server_of(clients[0]).connect().disconnect()
    numbers = itertools.count()

    def work() -> None:
        for client in clients:
            server_of(client).close()
        with Redlock(clients, f"{NAME}-{next(numbers)}", timeout=600):
            pass

    return interrupted(work, seconds)


def starts_the_keeper(link: Link, urls: list[str], seconds: float) -> int:
    """Again and again: it ends at once."""
    keeper_module.IDLE_SECONDS = 0.0
    client = redis.Redis.from_url(urls[0])
    server_of(client).connect().disconnect()  # Python does not survive it while it imports.
    numbers = itertools.count()

    def work() -> None:
        number = next(numbers)
        with Lock(client, f"{NAME}-{number}", timeout=600, renew=True):
            pass
        with Lock(client, f"{NAME}-{number}", timeout=600, limit=2):
            pass
        time.sleep(0.001)

    return interrupted(work, seconds)


def starts_threads(link: Link, urls: list[str], seconds: float) -> int:
    """For work in the background, which holds a lock."""
    client = redis.Redis.from_url(urls[0])
    server_of(client).connect().disconnect()
    pool = ThreadPool("background", 2, 100, idle_seconds=0.0)
    numbers = itertools.count()

    def hold(number: int) -> None:
        with Lock(client, f"{NAME}-{number}", timeout=600):
            pass

    def work() -> None:
        pool.submit(partial(hold, next(numbers)))
        time.sleep(0.001)

    count = interrupted(work, seconds)
    for _ in range(3):  # What was interrupted is done with what comes next.
        pool.submit(lambda: None)
    pool.flush(PATIENCE)
    assert not pool._waiting
    return count


def does_and_stays(
    link: Link, work: Callable[[Link, list[str], float], int], urls: list[str], seconds: float
) -> None:
    """Until it is killed: what was interrupted last, its keeper is still to release, and a process
    of this kind does not wait for that at its end."""
    link.say(work(link, urls, seconds))
    link.hear_anything(2 * PATIENCE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("work", [takes_redlocks, starts_the_keeper, starts_threads])
def test_no_signal_breaks_the_start_of_a_thread(work: Any, own_server: RedisServer) -> None:
    """``Thread.start`` waits, and an interrupt turns that into ``RuntimeError: release unlocked
    lock``, or leaves a lock for the rest of its lifetime, because no keeper releases it."""
    with ExitStack() as stack:
        servers = [own_server, *(stack.enter_context(RedisServer()) for _ in range(2))]
        urls = [server.url for server in servers]
        with processes(does_and_stays, work, urls, examples(8)) as (worker,):
            worker.go()
            assert worker.hear() > 50
            for server in servers:
                client = server.client()
                until(lambda client=client: not list(client.scan_iter(f"{NAME}-*", _type="string")))


def test_no_signal_ends_the_process(client: redis.Redis, redis_server: Any) -> None:
    """hiredis crashes when a signal handler raises while it packs an int."""
    with processes(connects_and_waits, redis_server.url, examples(8)) as (worker,):
        worker.go()
        assert worker.result() > 50
