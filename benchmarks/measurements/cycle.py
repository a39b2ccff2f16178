"""Acquire and release a lock that nobody else wants."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..bench import Bench, in_turns
from ..contenders import BARE, LOCKS, load_bare_script, make_lock
from ..figures import median, median_ratio
from ..results import OURS, Result, Target

__all__ = ["measure"]

RATIO = "ratio to bare"
LIMIT = 1.10


def measure(bench: Bench) -> Result:
    result = Result(
        "One process, nobody waits: acquire and release",
        ("µs", RATIO, "of it µs of CPU here", "µs with a new handle", "ratio to bare, new handle"),
        note="The trips that any such lock needs are SET NX PX and EVALSHA to delete its own key.",
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
    for name in contenders:
        result.rows[name] = (
            median(walls[name]),
            median_ratio(walls[name], walls[BARE]),
            median(cpu for _, cpu in kept[name]),
            median(new_walls[name]),
            median_ratio(new_walls[name], new_walls[BARE]),
        )
    ratio = result.number(OURS, RATIO)
    result.targets = [Target.at_most(f"at most {LIMIT:.2f} × two bare trips", ratio, LIMIT)]
    return result


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
