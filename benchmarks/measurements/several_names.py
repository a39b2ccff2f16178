"""Several names as one lock: what they cost when they are free, and who waits for how long when
processes want overlapping pairs.

Beside it what one can write with single locks: one after the other, in the order of their names,
which excludes deadlocks as well.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import redis

from django_redis_lock import Lock, MultiLock

from ..bench import Bench, in_turns
from ..figures import jain, median, percentile
from ..results import OURS, Result, Target
from ..workers import Crew, Seat

__all__ = ["measure"]

PROCESSES, NAMES, HOLD = 8, 5, 0.002
ORDERED = "single locks in order"
RATE, MEDIAN, LATE, WORST = "cycles/s", "wait p50, ms", "wait p99, ms", "longest / p50"
FAIRNESS = "fairness"

Made = AbstractContextManager[Any]


def _at_once(client: Any, names: list[str]) -> Made:
    return MultiLock(client, names, 10)


@contextmanager
def _in_order(client: Any, names: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in sorted(names):
            stack.enter_context(Lock(client, name, timeout=10))
        yield


KINDS: dict[str, Callable[[Any, list[str]], Made]] = {OURS: _at_once, ORDERED: _in_order}


def measure(bench: Bench) -> list[Result]:
    return [_free(bench), _contended(bench)]


def _free(bench: Bench) -> Result:
    result = Result(
        "Two names that are free, one process",
        (RATE, "ratio to single locks"),
        note="Two round trips a cycle instead of four. Without a network between them the work "
        "decides: for the server it is the same, for the caller a fifth more.",
    )
    bench.empty()
    seconds = bench.pick(quick=0.3, full=1.0)
    with Crew(1) as crew:
        found = in_turns(
            bench.pick(quick=2, full=9),
            {kind: partial(crew.run, cycles, bench.url, kind, seconds, 0.0) for kind in KINDS},
        )
    rates = {kind: median(len(r[0]) / seconds for r in rounds) for kind, rounds in found.items()}
    for kind, rate in rates.items():
        result.rows[kind] = (rate, rate / rates[ORDERED])
    return result


def _contended(bench: Bench) -> Result:
    result = Result(
        f"{PROCESSES} processes, pairs of {NAMES} names at random, {HOLD * 1000:g} ms hold",
        (RATE, MEDIAN, LATE, WORST, FAIRNESS),
        note="At most two pairs can be held at a time. Fairness is Jain's index over the "
        "processes.",
    )
    bench.empty()
    seconds = bench.pick(quick=0.7, full=4.0)
    with Crew(PROCESSES) as crew:
        found = in_turns(
            bench.pick(quick=2, full=7),
            {kind: partial(crew.run, cycles, bench.url, kind, seconds, HOLD) for kind in KINDS},
        )
    for kind, rounds in found.items():
        waits = [wait * 1000 for crew_waits in rounds for mine in crew_waits for wait in mine]
        half = percentile(waits, 50)
        result.rows[kind] = (
            median(sum(map(len, each)) / seconds for each in rounds),
            half,
            percentile(waits, 99),
            max(waits) / half if half else None,
            median(jain([len(mine) for mine in each]) for each in rounds),
        )
    result.targets = [
        Target.at_least("fairness at least 0.99", result.number(OURS, FAIRNESS), 0.99),
    ]
    return result


def cycles(seat: Seat, url: str, kind: str, seconds: float, hold: float) -> list[float]:
    """How long each cycle of one process has waited, in seconds."""
    chance = random.Random(seat.number)
    names = [f"bench:several:{number}" for number in range(NAMES)]
    with redis.Redis.from_url(url) as client:
        client.ping()
        waits = []
        seat.start()
        until = time.monotonic() + seconds
        while (began := time.monotonic()) < until:
            pair = chance.sample(names, 2) if hold else names[:2]
            with KINDS[kind](client, pair):
                waits.append(time.monotonic() - began)
                if hold:
                    time.sleep(hold)
        return waits
