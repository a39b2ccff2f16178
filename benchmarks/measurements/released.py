"""How soon holders learn that their locks were released by force, or deleted by another program,
and what listening for that costs while nothing happens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import redis
import redis.asyncio

from django_redis_lock import AsyncLock, Lock
from django_redis_lock.ops.inventory import list_held, release

from ..bench import Bench
from ..figures import percentile
from ..results import OURS, Result, Target
from ..server import Ear
from ..workers import Crew, Seat

__all__ = ["measure"]

PROCESSES, LOCKS = 8, 50
MEDIAN, LATE, IDLE = "p50, ms", "p99, ms", "commands/s of a process"
MOST_MS, MOST_COMMANDS = 100.0, 0.5
#: Seconds the locks live: renewals are no part of this.
LIFETIME = 3600
PREFIX = "bench:released:"
PATIENCE = 60.0

EndOne = Callable[[Bench, str, str], None]


def measure(bench: Bench) -> Result:
    releases = bench.pick(quick=16, full=200)
    result = Result(
        f"{releases} forced releases, or deletions, among {LOCKS} locks of each of {PROCESSES} "
        "processes: until on_lost is called",
        (MEDIAN, LATE, IDLE),
        note="From before the request to release or delete. While nothing happens, a process "
        "sends a heartbeat, and looks after its connection for messages, every 10 s.",
    )
    with Crew(PROCESSES) as crew:
        for kind, function, end_one in (
            ("threads", in_threads, _release),
            ("tasks", in_tasks, _release),
            ("threads, deleted", in_threads, _delete),
            ("tasks, deleted", in_tasks, _delete),
        ):
            bench.empty()
            released: dict[str, float] = {}
            idle: list[float] = []

            def end(
                end_one: EndOne = end_one,
                released: dict[str, float] = released,
                idle: list[float] = idle,
            ) -> None:
                idle.append(_listen(bench))
                _end(bench, end_one, releases, released)

            heard = crew.run(function, bench.url, releases // PROCESSES, meanwhile=end)
            told = {name: at for found in heard for name, at in found.items()}
            late = [(told[name] - at) * 1000 for name, at in released.items()]
            row = (percentile(late, 50), percentile(late, 99), *idle)
            result.rows[f"{OURS}, {kind}"] = row
            result.targets += [
                Target.at_most(f"{kind}: p99 at most {MOST_MS:g} ms", row[1], MOST_MS),
                Target.at_most(
                    f"{kind}: at most {MOST_COMMANDS:g} commands/s", idle[0], MOST_COMMANDS
                ),
            ]
    return result


def _listen(bench: Bench) -> float:
    """Commands per second of one process, after all processes listen."""
    while len(bench.client.pubsub_channels("django_redis_lock:process:*")) < PROCESSES:
        time.sleep(0.05)
    time.sleep(bench.pick(quick=0.5, full=3.0))  # Each has looked at its locks once.
    seconds = bench.pick(quick=1.0, full=40.0)
    with Ear(bench.client) as ear:
        time.sleep(seconds)
    return len(ear.heard) / seconds / PROCESSES


def _release(bench: Bench, name: str, owner: str) -> None:
    release(bench.client, name.encode(), owner)


def _delete(bench: Bench, name: str, owner: str) -> None:
    bench.client.delete(name)


def _end(bench: Bench, end_one: EndOne, count: int, released: dict[str, float]) -> None:
    owners = {
        lock.key.decode(): lock.owner.id for lock in list_held(bench.client, PREFIX.encode()).locks
    }
    for number in range(count):
        name = f"{PREFIX}{number % PROCESSES}:{number // PROCESSES}"
        released[name] = time.monotonic()
        end_one(bench, name, owners[name])
        time.sleep(0.02)


def _names(seat: Seat) -> list[str]:
    return [f"{PREFIX}{seat.number}:{number}" for number in range(LOCKS)]


def in_threads(seat: Seat, url: str, expected: int) -> dict[str, float]:
    """Hold locks until so many are lost; when each was."""
    logging.disable()
    told: dict[str, float] = {}
    with redis.Redis.from_url(url) as client:
        seat.start()
        locks = []
        for name in _names(seat):

            def on_lost(name: str = name) -> None:
                told[name] = time.monotonic()

            locks.append(Lock(client, name, LIFETIME, on_lost=on_lost))
            locks[-1].acquire()
        until = time.monotonic() + PATIENCE
        while len(told) < expected and time.monotonic() < until:
            time.sleep(0.01)
        for lock in locks:
            if not lock.lost:
                lock.release()
    return told


def in_tasks(seat: Seat, url: str, expected: int) -> dict[str, float]:
    """The same in an event loop."""
    logging.disable()
    told: dict[str, float] = {}

    async def hold() -> None:
        async with redis.asyncio.Redis.from_url(url) as client:
            locks = []
            for name in _names(seat):

                def on_lost(name: str = name) -> None:
                    told[name] = time.monotonic()

                locks.append(AsyncLock(client, name, LIFETIME, on_lost=on_lost))
                await locks[-1].acquire()
            until = time.monotonic() + PATIENCE
            while len(told) < expected and time.monotonic() < until:
                await asyncio.sleep(0.01)
            for lock in locks:
                if not lock.lost:
                    await lock.release()

    seat.start()
    asyncio.run(hold())
    return told
