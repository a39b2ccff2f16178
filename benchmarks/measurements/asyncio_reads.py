"""Many tasks of one event loop read a value each: ``aget`` beside Django's hop through a thread."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ..bench import Bench
from ..caches import open_cache
from ..figures import median, median_ratio
from ..results import OURS, Result, Target

__all__ = ["measure"]

TASKS = 200
THREAD = "django-redis, in Django's thread"
LIMIT = 1 / 3


def measure(bench: Bench) -> Result:
    result = Result(
        f"asyncio: {TASKS} tasks of one loop, each awaits aget",
        ("µs for each", "ratio to the thread", "connections"),
    )
    bench.empty()
    caches = {OURS: open_cache(OURS, bench.url), THREAD: open_cache("django-redis", bench.url)}
    for cache in caches.values():
        for number in range(TASKS):
            cache.backend.set(f"key-{number}", "value", 60)
    times, opened = asyncio.run(_measure(bench, caches))
    for name in caches:
        ratio = median_ratio(times[name], times[THREAD])
        result.rows[name] = (median(times[name]), ratio, opened[name])
    ratio = result.number(OURS, "ratio to the thread")
    result.targets = [Target.at_most("at most a third of the hop through a thread", ratio, LIMIT)]
    return result


async def _measure(
    bench: Bench, caches: dict[str, Any]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    times: dict[str, list[float]] = {name: [] for name in caches}
    opened = {}
    for name, cache in caches.items():
        before = _connections(bench)
        await _read(cache.backend)
        opened[name] = _connections(bench) - before
    for _ in range(bench.pick(quick=10, full=100)):
        for name, cache in caches.items():
            began = time.perf_counter()
            await _read(cache.backend)
            times[name].append((time.perf_counter() - began) / TASKS * 1e6)
    return times, opened


async def _read(cache: Any) -> None:
    await asyncio.gather(*(cache.aget(f"key-{number}") for number in range(TASKS)))


def _connections(bench: Bench) -> int:
    """How many have been made so far."""
    made: int = bench.client.info("stats")["total_connections_received"]
    return made
