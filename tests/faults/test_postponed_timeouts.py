"""Signals whose handlers return, again and again (a profiler, children that end), and
a frozen server: they postpone no time-out (P4)."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import redis

from django_redis_lock import AsyncLock, Lock
from django_redis_lock.cache import RedisCache
from django_redis_lock.transport import server_of
from tests.processes import Link, in_threads, processes
from tests.redis_server import RedisServer

pytestmark = pytest.mark.invariant("P4")

#: Seconds: the time-out of a socket; and within which each call must have ended, sent twice, on a
#: busy machine.
TIMEOUT, SOON = 0.5, 8.0


def periodic(interval: float) -> None:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, interval, interval)


def armed_anew() -> None:
    """A timer that fires once, and whose handler arms it anew."""
    signal.signal(signal.SIGALRM, lambda *_: signal.setitimer(signal.ITIMER_REAL, 0.05))
    signal.setitimer(signal.ITIMER_REAL, 0.05)


def from_a_thread() -> None:
    """As from children that end, or from another process."""
    signal.signal(signal.SIGCHLD, lambda *_: None)

    def send() -> None:
        while True:
            time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGCHLD)

    threading.Thread(target=send, daemon=True).start()


def to_each_thread() -> None:
    """Not to the main thread only."""
    signal.signal(signal.SIGUSR1, lambda *_: None)

    def send() -> None:
        while True:
            time.sleep(0.01)
            for thread in threading.enumerate():
                with suppress(ProcessLookupError):
                    if thread is not threading.current_thread():
                        signal.pthread_kill(thread.ident, signal.SIGUSR1)

    threading.Thread(target=send, daemon=True).start()


STORMS: dict[str, Callable[[], None]] = {
    "a slow timer": lambda: periodic(0.3),
    "a fast timer": lambda: periodic(0.002),
    "a timer armed anew": armed_anew,
    "SIGCHLD": from_a_thread,
    "to each thread": to_each_thread,
}


async def task_acquires(client: redis.Redis) -> None:
    settings = client.connection_pool.connection_kwargs
    there = redis.asyncio.Redis(port=settings["port"], socket_timeout=TIMEOUT)
    await AsyncLock(there, "another", timeout=30).acquire(blocking=False)


#: Each makes a call that nothing answers.
CALLS: dict[str, Callable[[redis.Redis, Any], Any]] = {
    "acquire": lambda client, cache: Lock(client, "free", timeout=30).acquire(blocking=False),
    "wait": lambda client, cache: Lock(client, "held", timeout=30).acquire(blocking_timeout=1),
    "in a thread": lambda client, cache: in_threads(
        2, lambda: Lock(client, "free", timeout=30).acquire(blocking=False)
    ),
    "send": lambda client, cache: server_of(client).exchange(b"x" * 50_000_000),
    "get": lambda client, cache: cache.get("key"),
    "task": lambda client, cache: asyncio.run(task_acquires(client)),
}


def calls(link: Link, port: int, storm: str, name: str) -> float:
    client = redis.Redis(port=port, socket_timeout=TIMEOUT)
    cache = RedisCache(f"redis://127.0.0.1:{port}/0", {"OPTIONS": {"SOCKET_TIMEOUT": TIMEOUT}})
    connections = [server_of(client).checkout() for _ in range(2)]
    for connection in connections:
        server_of(client).checkin(connection)
    Lock(client, "held", timeout=300, thread_local=False).acquire()
    cache.get("key")
    STORMS[storm]()
    link.say("connected")
    link.hear()
    began = time.monotonic()
    with suppress(redis.RedisError):
        CALLS[name](client, cache)
    return time.monotonic() - began


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("storm", STORMS)
def test_a_signal_postpones_no_timeout(own_server: RedisServer, storm: str, name: str) -> None:
    with processes(calls, own_server.port, storm, name) as (worker,):
        worker.go()
        assert worker.hear() == "connected"
        own_server.pause()
        worker.say("frozen")
        kind, seconds = worker.hear_anything(3 * SOON)
        assert kind == "returned"
        assert seconds < SOON
        own_server.resume()
