"""Eight processes after one lock that is held for two milliseconds: how long they wait, how fairly
they are served, and how long the lock lies idle between two holders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import redis

from ..bench import Bench, in_turns
from ..contenders import LOCKS, make_lock
from ..figures import best, jain, median, percentile
from ..results import OURS, Result, Target
from ..workers import Crew, Seat

__all__ = ["measure"]

PROCESSES = 8
HOLD = 0.002
OF_PEER, OF_QUEUE, FAIR = 0.15, 1.5, 0.999

P99, FAIRNESS = "wait p99 ms", "fairness"


class Turn(NamedTuple):
    """One acquisition, in monotonic seconds."""

    asked: float
    got: float
    released: float


def measure(bench: Bench) -> list[Result]:
    return bench.everywhere(lambda: _measure(bench))


def _measure(bench: Bench) -> Result:
    result = Result(
        f"{PROCESSES} processes after one lock, held for {HOLD * 1000:.0f} ms",
        ("wait p50 ms", P99, "longest ms", FAIRNESS, "idle between holders µs", "turns/s"),
        note=f"If no time were lost, each would wait {_queue_ms():.0f} ms.",
    )
    bench.empty()
    seconds = bench.pick(quick=0.7, full=2.0)
    with Crew(PROCESSES) as crew:
        found = in_turns(
            bench.pick(quick=1, full=5),
            {name: partial(crew.run, take_turns, bench.url, name, seconds) for name in LOCKS},
        )
    for name, rounds in found.items():
        columns = zip(*(_figures(turns, seconds) for turns in rounds), strict=True)
        result.rows[name] = tuple(median(column) for column in columns)
    p99, peer = result.number(OURS, P99), best(result.peers(P99))
    allowed = peer * OF_PEER if peer is not None else None
    queue = OF_QUEUE * _queue_ms()
    result.targets = [
        Target.at_most(f"wait p99 at most {OF_PEER} × the best peer's, ms", p99, allowed),
        Target.at_most(f"wait p99 at most {OF_QUEUE} × (waiters × hold), ms", p99, queue),
        Target.at_least(f"fairness at least {FAIR}", result.number(OURS, FAIRNESS), FAIR),
    ]
    return result


def _queue_ms() -> float:
    return (PROCESSES - 1) * HOLD * 1000


def _figures(turns: Sequence[Sequence[Turn]], seconds: float) -> tuple[float, ...]:
    """The columns of one round."""
    waits = [(turn.got - turn.asked) * 1000 for mine in turns for turn in mine]
    served = sorted((turn for mine in turns for turn in mine), key=lambda turn: turn.got)
    gaps = [(after.got - before.released) * 1e6 for before, after in pairwise(served)]
    return (
        percentile(waits, 50),
        percentile(waits, 99),
        max(waits),
        jain([len(mine) for mine in turns]),
        median(gaps),
        len(served) / seconds,
    )


def take_turns(seat: Seat, url: str, contender: str, seconds: float) -> list[Turn]:
    with redis.Redis.from_url(url) as client:
        lock = make_lock(contender, client, f"bench:handover:{contender}")
        return turns_with(lock, client, seat, seconds)


def turns_with(lock: Any, client: redis.Redis, seat: Seat, seconds: float) -> list[Turn]:
    """What one process got; its clock is the others', too."""
    turns = []
    client.ping()
    seat.start()
    until = time.monotonic() + seconds
    while (asked := time.monotonic()) < until:
        lock.acquire()
        got = time.monotonic()
        time.sleep(HOLD)
        released = time.monotonic()
        lock.release()
        turns.append(Turn(asked, got, released))
    return turns
