"""What one more of something costs when there are few, and when there are many: locks that a
process holds, waiters, names, threads, and the bytes of a value. Nothing may grow faster than its
work."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import redis.asyncio

from ..bench import Bench, in_turns
from ..caches import open_cache
from ..figures import median, percentile
from ..results import OURS, Result, Target
from ..workers import Crew, Seat

__all__ = ["measure"]

#: The sizes of each dimension; a quick run leaves the largest out, or takes a smaller one.
SIZES = {
    "held locks": ((10, 1_000, 10_000), (10, 1_000, 100_000)),
    "names": ((10, 10_000), (10, 100_000)),
    "waiters": ((10, 200, 1_000), (10, 1_000, 5_000)),
    "threads": ((1, 20, 100), (1, 50, 500)),
    "KB of a value": ((1, 100, 1_000), (1, 100, 10_000)),
}
#: How many times as much one unit of the work may take when there are most: the processor's cache,
#: the memory's allocator and the server's own tables get larger, too.
MOST = 2.0
#: A hit in one of several threads, against django-redis's.
OF_A_HIT = 0.85
#: How often a small call is made while large values are read.
SMALL_CALLS = 200
LARGE = 10_000_000
#: Between two of these. A small call that is sent before the first bytes of a large reply come has
#: to wait for it.
PAUSE_SECONDS = 0.02


def measure(bench: Bench) -> list[Result]:
    bench.empty()
    grown = Result(
        "What one unit of work takes as there is more of it",
        ("few", "µs", "more", "times as much", "most", "times as much"),
        note="CPU time of the client for one unit: an acquire and release while so many locks are "
        "held and renewed, or with one after the other of so many names; a change of the holder "
        "with so many waiting tasks; a hit in one of so many threads; a kilobyte of a value that "
        "is read. A lone thread never waits for the interpreter's lock, so what several threads "
        "cost is compared with django-redis's in as many, and what most cost with several.",
    )
    for name, function in DIMENSIONS.items():
        sizes, rounds = bench.pick(*SIZES[name]), bench.pick(quick=3, full=9)
        with Crew(1) as crew:
            found = [crew.run(function, bench.url, size, rounds)[0] for size in sizes]
        grown.rows[name] = _row(sizes, found)
        # A kilobyte of a large value is cheaper: the call itself is paid once.
        few = int(name == "threads")
        aim = f"{name}: from {sizes[few]:,} to {sizes[-1]:,} at most {MOST} times"
        grown.targets.append(Target.at_most(aim, found[-1] / found[few], MOST))
        bench.empty()
    grown.targets.append(_beside_django_redis(bench))
    with Crew(1) as crew:
        beside = _beside_large_values(crew.run(small_calls, bench.url)[0])
    return [grown, beside]


def _beside_django_redis(bench: Bench) -> Target:
    """A hit in one of several threads, against one of django-redis in as many."""
    size = bench.pick(*SIZES["threads"])[1]
    with Crew(1) as crew:
        taken = in_turns(
            bench.pick(quick=3, full=9),
            {
                name: lambda name=name: crew.run(threads, bench.url, size, 1, name)[0]
                for name in (OURS, "django-redis")
            },
        )
    aim = f"{size} threads: a hit at most {OF_A_HIT} x django-redis's"
    return Target.at_most(aim, min(taken[OURS]) / min(taken["django-redis"]), OF_A_HIT)


def _row(sizes: tuple[int, ...], found: list[float]) -> tuple[Any, ...]:
    few, *more = zip(sizes, found, strict=True)
    middle, most = more[0] if len(more) > 1 else (None, None), more[-1]
    return (
        *(f"{few[0]:,}", few[1]),
        *((f"{middle[0]:,}", middle[1] / few[1]) if middle[1] is not None else (None, None)),
        *(f"{most[0]:,}", most[1] / few[1]),
    )


def _cpu_of(function: Callable[[], Any], units: int, rounds: int) -> float:
    """Microseconds of CPU time for one of ``units``, the least of some rounds: what else runs on
    this machine only adds."""
    taken = []
    for _ in range(rounds):
        began = time.thread_time()
        function()
        taken.append((time.thread_time() - began) / units * 1e6)
    return min(taken)


#: Until the process ends: to release them would take as long again.
HELD: list[Any] = []


def held_locks(seat: Seat, url: str, size: int, rounds: int) -> float:
    cache = open_cache(OURS, url).backend

    def cycle() -> None:
        for _ in range(200):
            with cache.lock("one more"):
                pass

    for number in range(len(HELD), size):
        # Not renewed meanwhile: that is the keeper's work, which is for each lock.
        lock = cache.lock(f"held-{number}", timeout=3600, renew=True)
        lock.acquire()
        HELD.append(lock)
    return _cpu_of(cycle, 200, rounds)


def names(seat: Seat, url: str, size: int, rounds: int) -> float:
    cache = open_cache(OURS, url).backend
    used = 0

    def cycle() -> None:
        nonlocal used
        for _ in range(500):
            used += 1
            with cache.lock(f"name-{used % size}"):
                pass

    for _ in range(size // 500):
        cycle()
    return _cpu_of(cycle, 500, rounds)


def waiters(seat: Seat, url: str, size: int, rounds: int) -> float:
    cache = open_cache(OURS, url).backend

    async def wait() -> None:
        async with cache.alock("shared", blocking_timeout=600):
            pass

    async def all_of_them() -> float:
        async with cache.alock("shared"):
            tasks = [asyncio.ensure_future(wait()) for _ in range(size)]
            await asyncio.sleep(0.5)  # All wait.
            began = time.thread_time()
        await asyncio.gather(*tasks)
        return (time.thread_time() - began) / size * 1e6

    return min(asyncio.run(all_of_them()) for _ in range(rounds))


def threads(seat: Seat, url: str, size: int, rounds: int, name: str = OURS) -> float:
    hit = open_cache(name, url).asker(f"there for {name}", str)
    hit()
    each = max(100, 2000 // size)

    def read() -> None:
        for _ in range(each):
            hit()

    taken = []
    for _ in range(rounds):
        ready, stop = threading.Barrier(size + 1), threading.Barrier(size + 1)

        def run(ready: threading.Barrier = ready, stop: threading.Barrier = stop) -> None:
            ready.wait()
            read()
            stop.wait()

        crowd = [threading.Thread(target=run) for _ in range(size)]
        for thread in crowd:
            thread.start()
        ready.wait()
        began = time.process_time()
        stop.wait()
        taken.append((time.process_time() - began) / (each * size) * 1e6)
        for thread in crowd:
            thread.join()
    return min(taken)


def kilobytes(seat: Seat, url: str, size: int, rounds: int) -> float:
    cache = open_cache(OURS, url).backend
    cache.set("large", os.urandom(size * 1000), 600)
    calls = max(1, 2000 // size)

    def read() -> None:
        for _ in range(calls):
            cache.get_or_set("large", str, 600)

    return _cpu_of(read, size * calls, rounds)


DIMENSIONS: dict[str, Callable[[Seat, str, int, int], float]] = {
    "held locks": held_locks,
    "names": names,
    "waiters": waiters,
    "threads": threads,
    "KB of a value": kilobytes,
}


# -- small calls of tasks while others read large values -------------------------------------------


def small_calls(seat: Seat, url: str) -> dict[str, list[float]]:
    """Milliseconds that each took: alone; while a task reads large values, by the cache, and by a
    redis.asyncio client with connections of its own, which takes as much of the loop's time."""
    return asyncio.run(_small_calls(url))


async def _small_calls(url: str) -> dict[str, list[float]]:
    cache, plain = open_cache(OURS, url).backend, redis.asyncio.Redis.from_url(url)
    await cache.aset("large", os.urandom(LARGE), 600)
    await cache.aset("small", "value", 600)

    async def read_apart() -> Any:
        return cache.client.decode(await plain.get(":1:large"))

    found = {"alone": await _latencies(cache)}
    for name, read in (
        ("while others read 10 MB", partial(cache.aget, "large")),
        ("while others read 10 MB on other connections", read_apart),
    ):
        async with _again_and_again(read):
            found[name] = await _latencies(cache)
    await plain.aclose()
    return found


async def _latencies(cache: Any) -> list[float]:
    taken = []
    for _ in range(SMALL_CALLS):
        began = time.perf_counter()
        await cache.aget("small")
        taken.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(0.002)
    return taken


@asynccontextmanager
async def _again_and_again(read: Callable[[], Any]) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            await read()
            await asyncio.sleep(PAUSE_SECONDS)

    task = asyncio.ensure_future(repeat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _beside_large_values(found: dict[str, list[float]]) -> Result:
    result = Result(
        "Small calls of tasks while others of the same loop read values of 10 MB",
        ("median, ms", "p90, ms", "worst, ms"),
        note="To decode a large value takes the loop's time in any case, and so do its bytes.",
    )
    for name, taken in found.items():
        result.rows[name] = (median(taken), percentile(taken, 90), max(taken))
    *_, ours, apart = map(median, found.values())
    aim = f"not delayed by the transfer: the median at most {MOST} times that on other connections"
    result.targets = [Target.at_most(aim, ours / apart, MOST)]
    return result
