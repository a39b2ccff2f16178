"""Acquire and release a lock that no other caller wants."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..bench import Bench, in_turns
from ..contenders import BARE, LOCKS, load_bare_script, make_lock
from ..figures import median, median_ratio
from ..results import OURS, Result, Target
from ..server import cpu_seconds

__all__ = ["measure"]

RATIO = "ratio to bare"
LIMIT = 1.10


def measure(bench: Bench) -> list[Result]:
    return bench.everywhere(lambda: _measure(bench))


def _measure(bench: Bench) -> Result:
    result = Result(
        "One process, no waiters: acquire and release",
        (
            *("µs", RATIO, "client CPU µs", "server CPU µs"),
            *("µs with a new handle", "ratio to bare, new handle"),
        ),
        note="The two trips that any such lock needs are SET NX PX, and EVALSHA to delete the key "
        "if it is the caller's.",
    )
    contenders = (BARE, *LOCKS)
    # Many short rounds: a machine has moods that last longer, so a round is in one and the same.
    rounds, count = bench.pick(quick=30, full=300), 10
    bench.empty()
    load_bare_script(bench.client)
    kept = in_turns(rounds, {name: _cycles(bench, name, count, False) for name in contenders})
    new = in_turns(rounds, {name: _cycles(bench, name, count, True) for name in contenders})
    walls = {name: [wall for wall, _ in pairs] for name, pairs in kept.items()}
    new_walls = {name: [wall for wall, _ in pairs] for name, pairs in new.items()}
    # Redis's clock of its CPU time is too coarse for short rounds.
    long = {name: _server_cpu(bench, name, bench.pick(quick=100, full=500)) for name in contenders}
    server = in_turns(bench.pick(quick=1, full=5), long)
    for name in contenders:
        result.rows[name] = (
            median(walls[name]),
            median_ratio(walls[name], walls[BARE]),
            median(cpu for _, cpu in kept[name]),
            median(server[name]),
            median(new_walls[name]),
            median_ratio(new_walls[name], new_walls[BARE]),
        )
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
