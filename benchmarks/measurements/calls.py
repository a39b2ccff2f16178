"""Each call of the cache beside the same of django-redis; that of a task beside redis.asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import redis.asyncio

from testproject.embedded_redis import EmbeddedRedis, RedisNotStarted

from ..bench import Bench, in_turns
from ..caches import open_cache
from ..figures import median, median_ratio
from ..placement import pinned, placements
from ..results import OURS, Result, Target
from ..workers import Crew, Seat

__all__ = ["measure"]

THEIRS, PLAIN = "django-redis", "redis.asyncio"
MANY = [f"many-{number}" for number in range(20)]

#: The ratio to django-redis that was aimed at.
LIMITS = {
    "get": 0.65,
    "get_many of 20": 0.85,
    "set": 0.85,
    "add": 0.90,
    "delete": 0.85,
    "incr": 0.85,
    "touch": 0.85,
    "has_key": 0.85,
    "ttl": 0.85,
    "expire": 0.85,
    "set_many of 20": 1.00,
    "delete_many of 20": 1.00,
    "get_or_set, hit": 0.60,
    "get_or_set, miss": 1.00,
}
#: The same of tasks, to redis.asyncio used plainly.
TASK_LIMIT = 0.9


def measure(bench: Bench) -> list[Result]:
    # What counts here is the work; how a trip is waited for is the same for all.
    placement = next(iter(placements()), None)
    with pinned(bench.server, placement) if placement else nullcontext():
        return [_threads(bench), _tasks(bench), _in_memory(bench)]


def _threads(bench: Bench) -> Result:
    result = Result(
        "Calls of the cache, against django-redis's",
        ("µs", "µs, django-redis", "ratio", "ratio of the client's CPU"),
        note="Server and client on one core, in turns within one process. `get_or_set`, miss: a "
        "lone caller, who after three misses in a row needs two trips here, and three there.",
    )
    bench.empty()
    with Crew(1) as crew:
        found = {
            name: crew.run(call, bench.url, name, *bench.pick(quick=(12, 40), full=(40, 100)))[0]
            for name in LIMITS
        }
    for name, taken in found.items():
        (ours, cpu), (theirs, their_cpu) = taken[OURS], taken[THEIRS]
        ratio = median_ratio(ours, theirs)
        used = median_ratio(cpu, their_cpu)
        result.rows[name] = (median(ours), median(theirs), ratio, used)
        aim = f"{name} at most {LIMITS[name]} × django-redis's"
        result.targets.append(Target.at_most(aim, ratio, LIMITS[name]))
    return result


def calls(cache: Any) -> dict[str, Callable[[], Any]]:
    keys = count()
    cache.delete_pattern("new-*")

    def new() -> str:
        return f"new-{next(keys)}"

    cache.set("there", "value", 600)
    cache.set("number", 1, 600)
    values = dict.fromkeys(MANY, "value")
    cache.set_many(values, 600)
    return {
        "get": lambda: cache.get("there"),
        "get_many of 20": lambda: cache.get_many(MANY),
        "set": lambda: cache.set("there", "value", 600),
        "add": lambda: cache.add(new(), "value", 600),
        "delete": lambda: cache.delete("gone"),
        "incr": lambda: cache.incr("number"),
        "touch": lambda: cache.touch("there", 600),
        "has_key": lambda: cache.has_key("there"),
        "ttl": lambda: cache.ttl("there"),
        "expire": lambda: cache.expire("there", 600),
        "set_many of 20": lambda: cache.set_many(values, 600),
        "delete_many of 20": lambda: cache.delete_many([*MANY[:-1], "gone"]),
        "get_or_set, hit": lambda: cache.get_or_set("there", str, 600),
        "get_or_set, miss": lambda: cache.get_or_set(new(), str, 600),
    }


Taken = dict[str, tuple[list[float], list[float]]]


def call(seat: Seat, url: str, name: str, rounds: int, repeated: int) -> Taken:
    """Microseconds and CPU time of the call ``name``, by contender, round by round."""
    # Of another database, so that it has a pool, and keys, of its own.
    theirs = open_cache(THEIRS, f"{url.rpartition('/')[0]}/1").backend
    contenders = {OURS: calls(open_cache(OURS, url).backend), THEIRS: calls(theirs)}
    return _by_contender(
        in_turns(rounds, {each: _timed(of[name], repeated) for each, of in contenders.items()})
    )


def _timed(function: Callable[[], Any], repeated: int) -> Callable[[], tuple[float, float]]:
    for _ in range(5):
        function()

    def run() -> tuple[float, float]:
        cpu, began = time.process_time(), time.perf_counter()
        for _ in range(repeated):
            function()
        taken, used = time.perf_counter() - began, time.process_time() - cpu
        return taken / repeated * 1e6, used / repeated * 1e6

    return run


def _by_contender(rounds: dict[str, list[tuple[float, float]]]) -> Taken:
    return {
        name: ([taken for taken, _ in found], [used for _, used in found])
        for name, found in rounds.items()
    }


# -- with a client-side cache --------------------------------------------------------------------

HOT = ("get", "get_many of 20", "get_or_set, hit")


def _in_memory(bench: Bench) -> Result:
    result = Result(
        "Hot values, with redis-py's client-side cache and without",
        ("µs", "µs, without", "ratio", "ratio of the client's CPU"),
        note="Of this package's cache, on a server of its own on the same host, which must be "
        "Redis 7.4 or later. A network adds its time to what is read without.",
    )
    try:
        with EmbeddedRedis(oldest=(7, 4)) as server, Crew(1) as crew:
            rounds = bench.pick(quick=(12, 40), full=(40, 100))
            found = {name: crew.run(hot, server.url, name, *rounds)[0] for name in HOT}
    except RedisNotStarted as error:
        result.note = str(error)
        return result
    for name, taken in found.items():
        (kept, cpu), (read, cpu_read) = taken["kept"], taken["read"]
        used = median_ratio(cpu, cpu_read)
        result.rows[name] = (median(kept), median(read), median_ratio(kept, read), used)
    return result


def hot(seat: Seat, url: str, name: str, rounds: int, repeated: int) -> Taken:
    from redis.cache import CacheConfig

    read: Any = open_cache(OURS, url).backend
    pool = {"protocol": 3, "cache_config": CacheConfig()}
    kept = type(read)(url, {"OPTIONS": {"CONNECTION_POOL_KWARGS": pool}})
    contenders = {"kept": calls(kept)[name], "read": calls(read)[name]}
    timed = {each: _timed(function, repeated) for each, function in contenders.items()}
    return _by_contender(in_turns(rounds, timed))


# -- tasks -----------------------------------------------------------------------------------------


def _tasks(bench: Bench) -> Result:
    result = Result(
        "Calls of tasks, against redis.asyncio used plainly",
        ("µs", "µs, redis.asyncio", "ratio", "ratio of the client's CPU"),
    )
    bench.empty()
    with Crew(1) as crew:
        found: dict[str, Taken] = {}
        for name in AWAITED:
            found |= crew.run(await_calls, bench.url, name, bench.pick(quick=8, full=30))[0]
    for name, taken in found.items():
        (ours, cpu), (theirs, their_cpu) = taken[OURS], taken[PLAIN]
        ratio = median_ratio(ours, theirs)
        result.rows[name] = (median(ours), median(theirs), ratio, median_ratio(cpu, their_cpu))
        aim = f"{name} at most {TASK_LIMIT} × redis.asyncio's"
        result.targets.append(Target.at_most(aim, ratio, TASK_LIMIT))
    return result


AWAITED = ("aget", "aset", "adelete", "aget_many of 20", "aget_or_set, miss")


def await_calls(seat: Seat, url: str, name: str, rounds: int) -> dict[str, Taken]:
    return asyncio.run(_await_calls(url, name, rounds))


async def _await_calls(url: str, name: str, rounds: int) -> dict[str, Taken]:
    cache, encode = open_cache(OURS, url).backend, open_cache(OURS, url).backend.client.encode
    await cache.aset_many(dict.fromkeys(["there", *MANY], "value"), 600)
    decode, new, plain = cache.client.decode, count(), _plain(url)
    keys = [f":1:{key}" for key in MANY]

    async def get() -> Any:
        return decode(await plain.get(":1:there"))

    async def get_many() -> Any:
        return [decode(value) for value in await plain.mget(keys)]

    async def miss() -> Any:
        key = f":1:plain-{next(new)}"
        if await plain.get(key) is None:
            await plain.set(key, encode(""), px=600_000, nx=True)
            decode(await plain.get(key))

    pairs: dict[str, tuple[Callable[[], Awaitable[Any]], Callable[[], Awaitable[Any]]]] = {
        "aget": (lambda: cache.aget("there"), get),
        "aset": (
            lambda: cache.aset("there", "value", 600),
            lambda: plain.set(":1:there", encode("value"), px=600_000),
        ),
        "adelete": (lambda: cache.adelete("gone"), lambda: plain.delete(":1:gone")),
        "aget_many of 20": (lambda: cache.aget_many(MANY), get_many),
        "aget_or_set, miss": (
            lambda: cache.aget_or_set(f"new-{next(new)}", str, 600),
            miss,
        ),
    }
    found: dict[str, Taken] = {}
    ours, theirs = pairs[name]
    for tasks, repeated in ((1, 100), (200, 1)):
        taken: dict[str, list[tuple[float, float]]] = {OURS: [], PLAIN: []}
        for number in range(rounds + 1):
            turns = [(OURS, ours), (PLAIN, theirs)]
            for each, function in turns[:: 1 if number % 2 else -1]:
                figures = await _awaited(function, tasks, repeated)
                if number:  # The first connects.
                    taken[each].append(figures)
        found[f"{name}, {tasks} at once"] = _by_contender(taken)
    await plain.aclose()
    return found


def _plain(url: str) -> Any:
    # By default not as many as there are tasks.
    return redis.asyncio.Redis.from_url(url, max_connections=1000)


async def _awaited(
    function: Callable[[], Awaitable[Any]], tasks: int, repeated: int
) -> tuple[float, float]:
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(repeated):
        if tasks == 1:
            await function()
        else:
            await asyncio.gather(*_each(function, tasks))
    calls = tasks * repeated
    taken, used = time.perf_counter() - began, time.process_time() - cpu
    return taken / calls * 1e6, used / calls * 1e6


def _each(function: Callable[[], Awaitable[Any]], tasks: int) -> Iterator[Awaitable[Any]]:
    for _ in range(tasks):
        yield function()
