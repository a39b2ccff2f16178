"""Acquire and release for asyncio: alone, eight tasks after one lock, and a crowd of tasks with a
lock each."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import redis.asyncio

from ..bench import Bench
from ..contenders import ASYNC_LOCKS, BARE, load_bare_script, make_async_lock
from ..figures import median, median_ratio
from ..results import OURS, Result, Target
from .cycle import LONG_TURN

__all__ = ["measure"]

TASKS = 8
CROWD = 500
LIMIT = 1.10


def measure(bench: Bench) -> list[Result]:
    return bench.everywhere(lambda: _measure(bench))


def _measure(bench: Bench) -> Result:
    result = Result(
        f"asyncio: acquire and release, alone; {TASKS} tasks of one loop after one lock, no hold; "
        f"{CROWD} tasks that acquire a lock each at once",
        (
            *("µs alone", "ratio to bare", f"cycles/s of {TASKS} tasks", "ratio to best peer"),
            *(f"ms of {CROWD} tasks", "connections"),
        ),
    )
    bench.empty()
    load_bare_script(bench.client)
    alone, together, crowds = asyncio.run(_rounds(bench))
    peers = [median(rates) for name, rates in together.items() if name != OURS]
    for name, cycles in alone.items():
        rate = median(together[name]) if name in together else None
        result.rows[name] = (
            median(cycles),
            median_ratio(cycles, alone[BARE]),
            rate,
            None if rate is None else rate / max(peers),
            *(map(median, zip(*crowds[name], strict=True)) if name in crowds else (None, None)),
        )
    ratio = result.number(OURS, "ratio to bare")
    result.targets = [Target.at_most(f"at most {LIMIT:.2f} × two bare trips", ratio, LIMIT)]
    return result


async def _rounds(bench: Bench) -> tuple[dict[str, list[float]], ...]:
    alone: dict[str, list[float]] = {name: [] for name in (BARE, *ASYNC_LOCKS)}
    together: dict[str, list[float]] = {name: [] for name in ASYNC_LOCKS}
    crowds: dict[str, list[Any]] = {name: [] for name in ASYNC_LOCKS}
    async with redis.asyncio.Redis.from_url(bench.url) as client:
        for _ in range(bench.pick(quick=3, full=40)):
            for name, cycles in alone.items():
                cycles.append(await _alone(client, name, LONG_TURN))
        for _ in range(bench.pick(quick=1, full=5)):
            for name, rates in together.items():
                rates.append(await _together(client, name, bench.pick(quick=0.5, full=1.0)))
    for _ in range(bench.pick(quick=1, full=5)):
        for name, found in crowds.items():
            found.append(await _crowd(bench, name))
    return alone, together, crowds


async def _crowd(bench: Bench, contender: str) -> tuple[float, float]:
    """Milliseconds until all have released, and how many connections that took."""

    async def cycle(name: str) -> None:
        lock = make_async_lock(contender, client, name)
        await lock.acquire()
        await lock.release()

    async with redis.asyncio.Redis.from_url(bench.url, max_connections=2 * CROWD) as client:
        before = bench.client.info("stats")["total_connections_received"]
        began = time.perf_counter()
        await asyncio.gather(*(cycle(f"bench:asyncio:crowd:{n}") for n in range(CROWD)))
        seconds = time.perf_counter() - began
        made = bench.client.info("stats")["total_connections_received"] - before
    return seconds * 1000, made


async def _alone(client: redis.asyncio.Redis, contender: str, count: int) -> float:
    """Microseconds for one cycle."""
    lock = make_async_lock(contender, client, f"bench:asyncio:{contender}")
    await lock.acquire()
    await lock.release()
    began = time.perf_counter()
    for _ in range(count):
        await lock.acquire()
        await lock.release()
    return (time.perf_counter() - began) / count * 1e6


async def _together(client: redis.asyncio.Redis, contender: str, seconds: float) -> float:
    """Cycles per second of all tasks."""
    began = time.monotonic()

    async def cycle() -> int:
        # A handle each: redis-py's tasks would share the token of one.
        lock = make_async_lock(contender, client, f"bench:asyncio:tasks:{contender}")
        count = 0
        while time.monotonic() - began < seconds:
            await lock.acquire()
            await lock.release()
            count += 1
        return count

    counts = await asyncio.gather(*(cycle() for _ in range(TASKS)))
    return sum(counts) / (time.monotonic() - began)
