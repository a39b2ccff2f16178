"""Two processes after one lock that is held for no time: what passing it on costs."""

from __future__ import annotations

import time
from functools import partial

import redis

from ..bench import Bench, in_turns
from ..contenders import LOCKS, make_lock
from ..figures import best, jain, median
from ..results import OURS, Result, Target
from ..workers import Crew, Seat

__all__ = ["measure"]

PROCESSES = 2
RATE = "cycles/s"
LEAST = 1.7


def measure(bench: Bench) -> Result:
    result = Result(
        f"{PROCESSES} processes after one lock, no hold",
        (RATE, "ratio to best peer", "fairness"),
        note="Fairness is Jain's index over the processes: 1 when all get the lock equally often.",
    )
    bench.empty()
    seconds = bench.pick(quick=0.5, full=1.5)
    with Crew(PROCESSES) as crew:
        found = in_turns(
            bench.pick(quick=2, full=7),
            {name: partial(crew.run, cycle, bench.url, name, seconds) for name in LOCKS},
        )
    rates = {
        name: median(sum(counts) / seconds for counts in rounds) for name, rounds in found.items()
    }
    peer = best((rate for name, rate in rates.items() if name != OURS), highest=True)
    for name, rounds in found.items():
        fairness = median(jain(counts) for counts in rounds)
        result.rows[name] = (rates[name], rates[name] / peer if peer else None, fairness)
    ratio = result.number(OURS, "ratio to best peer")
    result.targets = [Target.at_least(f"at least {LEAST} × the best peer", ratio, LEAST)]
    return result


def cycle(seat: Seat, url: str, contender: str, seconds: float) -> int:
    """How often one process gets the lock."""
    with redis.Redis.from_url(url) as client:
        lock = make_lock(contender, client, f"bench:contention:{contender}")
        client.ping()
        count = 0
        seat.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            lock.acquire()
            lock.release()
            count += 1
        return count
