"""Two processes after one lock that is held for no time: what passing it on costs.

Cycles alone can mislead: a process that polls lets the other one sleep and
has the lock to itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import redis

from ..bench import Bench, in_turns
from ..contenders import LOCKS, make_lock
from ..figures import best, jain, median
from ..results import OURS, Result, Target
from ..server import cpu_seconds
from ..workers import Crew, Seat

__all__ = ["measure"]

PROCESSES = 2
RATE, PASSED = "cycles/s", "passed on per s"
#: The peers whose release wakes a waiter.
WAKES = ("python-redis-lock",)
LEAST = 1.7


def measure(bench: Bench) -> list[Result]:
    return bench.everywhere(lambda: _measure(bench))


def _measure(bench: Bench) -> Result:
    result = Result(
        f"{PROCESSES} processes after one lock, no hold",
        (
            *(RATE, "ratio to best peer", "ratio to best that wakes", PASSED, "fairness"),
            *("client CPU µs/cycle", "server CPU µs/cycle"),
        ),
        note="Of the peers, python-redis-lock wakes its waiters, the others poll: their processes "
        "take the lock many times in a row while the other one sleeps. Fairness is Jain's index "
        "over the processes: 1 when all get the lock equally often.",
    )
    bench.empty()
    seconds = bench.pick(quick=0.5, full=1.5)
    with Crew(PROCESSES) as crew:
        found = in_turns(
            bench.pick(quick=2, full=7),
            {name: partial(_run, bench, crew, name, seconds) for name in LOCKS},
        )
    rates = {
        name: median(sum(map(len, one.takes)) / seconds for one in rounds)
        for name, rounds in found.items()
    }
    peer = best((rates[name] for name in rates if name != OURS), highest=True)
    waker = best((rates[name] for name in rates if name in WAKES), highest=True)
    for name, rounds in found.items():
        result.rows[name] = (
            rates[name],
            rates[name] / peer if peer else None,
            rates[name] / waker if waker else None,
            median(_passed_on(one.takes) / seconds for one in rounds),
            median(jain([len(mine) for mine in one.takes]) for one in rounds),
            median(one.client for one in rounds),
            median(one.server for one in rounds),
        )
    result.targets = [
        Target.at_least(f"at least {LEAST} × {who}", result.number(OURS, column), LEAST)
        for who, column in (
            ("the best peer", "ratio to best peer"),
            ("the best that wakes its waiters", "ratio to best that wakes"),
        )
    ]
    return result


class Round(NamedTuple):
    """When each process got the lock, and the microseconds of CPU time for each cycle."""

    takes: list[list[float]]
    client: float
    server: float


def _run(bench: Bench, crew: Crew, contender: str, seconds: float) -> Round:
    before = cpu_seconds(bench.client)
    found = crew.run(cycle, bench.url, contender, seconds)
    server = cpu_seconds(bench.client) - before
    takes, used = zip(*found, strict=True)
    each = 1e6 / sum(map(len, takes))
    return Round(list(takes), sum(used) * each, server * each)


def _passed_on(takes: Sequence[Sequence[float]]) -> int:
    """How often the lock went from one process to another."""
    holders = sorted((at, process) for process, mine in enumerate(takes) for at in mine)
    return sum(before[1] != after[1] for before, after in pairwise(holders))


def cycle(seat: Seat, url: str, contender: str, seconds: float) -> tuple[list[float], float]:
    """When one process got the lock, in monotonic seconds, the same clock for all; and the seconds
    of CPU time that it used."""
    with redis.Redis.from_url(url) as client:
        lock = make_lock(contender, client, f"bench:contention:{contender}")
        client.ping()
        takes = [0.0]
        seat.start()
        used = time.process_time()
        until = time.monotonic() + seconds
        while takes[-1] < until:
            lock.acquire()
            takes.append(time.monotonic())
            lock.release()
        return takes[1:], time.process_time() - used
