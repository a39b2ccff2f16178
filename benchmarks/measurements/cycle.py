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

RATIO, SHORT, NEW = "ratio to bare", "ratio in short turns", "ratio, new handle"
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
        "code is seldom in the processor's caches.",
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
