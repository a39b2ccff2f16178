"""Acquire and release a lock that no other caller wants."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

from ..bench import Bench, in_turns
from ..contenders import BARE, LOCKS, load_bare_script, make_lock
from ..figures import median, median_ratio
from ..results import OURS, Result, Target
from ..server import cpu_seconds

__all__ = ["measure"]

RATIO, SHORT, NEW = "ratio to bare", "ratio in short turns", "ratio, new handle"
#: As projects write it: a new handle each time, and what it does is counted.
WITH = f"{OURS}, with cache.lock()"
LIMIT = 1.10
#: Cycles of one turn: so many that the processor's caches are warm; and so few that they are full
#: of what another contender left, as in an application that locks now and then.
LONG_TURN, SHORT_TURN = 100, 10


def measure(bench: Bench) -> list[Result]:
    return bench.everywhere(lambda: _measure(bench))


def _measure(bench: Bench) -> Result:
    result = Result(
        "One process, no waiters: acquire and release",
        ("µs", RATIO, "client CPU µs", "server CPU µs", SHORT, "µs, new handle", NEW),
        note="The two trips that any such lock needs are SET NX PX, and EVALSHA to delete the key "
        f"if it is the caller's. A turn has {LONG_TURN} cycles, a short one {SHORT_TURN}, so its "
        "code is seldom in the processor's caches. A handle is used again and again; the last row, "
        "with long turns only, is a new lock each time, in a process with the app.",
    )
    contenders = (BARE, *LOCKS)
    bench.empty()
    load_bare_script(bench.client)

    def measured(turn: int, new: bool) -> dict[str, list[tuple[float, float]]]:
        # The same number of cycles, whatever their turns.
        rounds = bench.pick(quick=300, full=5000) // turn
        return in_turns(rounds, {name: _cycles(bench, name, turn, new) for name in contenders})

    kept, short = measured(LONG_TURN, False), measured(SHORT_TURN, False)
    new = measured(LONG_TURN, True)
    # Redis's clock of its CPU time is too coarse for short rounds.
    long = {name: _server_cpu(bench, name, bench.pick(quick=100, full=500)) for name in contenders}
    server = in_turns(bench.pick(quick=1, full=5), long)

    def ratio_of(name: str, turns: dict[str, list[tuple[float, float]]]) -> float:
        return median_ratio(*([wall for wall, _ in turns[each]] for each in (name, BARE)))

    for name in contenders:
        result.rows[name] = (
            median(wall for wall, _ in kept[name]),
            ratio_of(name, kept),
            median(cpu for _, cpu in kept[name]),
            median(server[name]),
            ratio_of(name, short),
            median(wall for wall, _ in new[name]),
            ratio_of(name, new),
        )
    # In a process of its own: the app counts what all locks of its process do.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        turns = bench.pick(quick=3, full=50)
        bare, blocks = pool.apply(_with_app, (bench.url, turns))
    wall, cpu = zip(*blocks, strict=True)
    short_of = median_ratio(wall, [wall for wall, _ in bare])
    result.rows[WITH] = (median(wall), short_of, median(cpu), None, None, None, short_of)
    ratio = result.number(OURS, RATIO)
    result.targets = [Target.at_most(f"at most {LIMIT:.2f} × two bare trips", ratio, LIMIT)]
    return result


def _server_cpu(bench: Bench, contender: str, count: int) -> Callable[[], float]:
    """Gives the microseconds that the server computes in one cycle."""
    run = _cycles(bench, contender, count, False)

    def measured() -> float:
        before = cpu_seconds(bench.client)
        run()
        return (cpu_seconds(bench.client) - before) / count * 1e6

    return measured


def _cycles(
    bench: Bench, contender: str, count: int, new: bool
) -> Callable[[], tuple[float, float]]:
    """Gives the microseconds one cycle takes, and those this process computes in it."""
    client, name = bench.client, f"bench:cycle:{contender}"
    handle = make_lock(contender, client, name)
    handle.acquire()  # Load scripts, open connections.
    handle.release()

    def run() -> tuple[float, float]:
        lock = handle
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            if new:
                lock = make_lock(contender, client, name)
            lock.acquire()
            lock.release()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return wall / count * 1e6, cpu / count * 1e6

    return run


def _with_app(url: str, turns: int) -> list[list[tuple[float, float]]]:
    """Microseconds of two bare trips, and of a block, in turns: by the clock, and computed."""
    import django
    import redis
    from django.conf import settings

    backend = {"BACKEND": "django_redis_lock.cache.RedisCache", "LOCATION": url}
    settings.configure(INSTALLED_APPS=["django_redis_lock"], CACHES={"default": backend})
    django.setup()
    from django_redis_lock.cache import cache

    client = redis.Redis.from_url(url)
    load_bare_script(client)
    bare = make_lock(BARE, client, "bench:cycle:with")

    def trips() -> None:
        bare.acquire()
        bare.release()

    def block() -> None:
        with cache.lock("bench"):
            pass

    measured: list[list[tuple[float, float]]] = [[], []]
    for turn in range(turns + 1):
        for run, found in zip((trips, block), measured, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(LONG_TURN):
                run()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            if turn:  # The first opens connections and loads scripts.
                found.append((spent[0] / LONG_TURN * 1e6, spent[1] / LONG_TURN * 1e6))
    return measured
