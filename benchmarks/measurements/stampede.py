"""Many threads of four processes ask for one missing value: how often it is computed, and how long
after that each of them has it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from ..bench import Bench, in_turns
from ..caches import CACHES, open_cache
from ..figures import best, median_known, percentile
from ..results import OURS, Cell, Result, Target
from ..server import Ear, figure
from ..workers import Crew, Seat

__all__ = ["BLOCKED", "LAST", "OPENED", "callers_of", "measure", "whole"]

PROCESSES = 4
#: Share of the best peer's lag that ours may have, by callers.
LIMITS = {48: 0.3, 200: 0.2}
#: The peer those limits were set against.
SET_AGAINST = "python-redis-lock"

COMPUTED, FAILED, LAST = "computed", "failed", "last ms"
OPENED, BLOCKED = "connections/process", "of them waiting"

_numbers = count()


class Callers(NamedTuple):
    """The callers of one process; times are monotonic seconds.

    Attributes:
        computed: when each computation made here ended.
        returned: when those that did not compute asked for the value and when they had it.
        failed: names of the exceptions that the others got.
    """

    computed: list[float]
    returned: list[tuple[float, float]]
    failed: list[str]


class Watched(NamedTuple):
    """What one more round cost the server."""

    commands: float
    opened: float
    blocked: float


def measure(bench: Bench) -> list[Result]:
    results = []
    with Crew(PROCESSES) as crew:
        for callers, rounds, seconds in bench.pick(
            quick=[(48, 1, 0.4)],
            full=[(8, 5, 0.3), (48, 7, 0.4), (200, 5, 0.8), (800, 2, 2.5)],
        ):
            results.append(_measure(bench, crew, callers, rounds, seconds))
    if len(results) > 1:
        results.append(_growth(results))
    return results


def _measure(bench: Bench, crew: Crew, callers: int, rounds: int, seconds: float) -> Result:
    result = Result(
        f"{callers} threads in {PROCESSES} processes ask for one missing value",
        (
            COMPUTED,
            FAILED,
            *("first ms", "median ms", LAST),
            *("commands/caller", OPENED, BLOCKED),
        ),
        note="Milliseconds from the end of the computation until a caller that did not compute "
        "has the value. The connections were counted in another round.",
    )
    bench.empty()

    def ask(name: str) -> list[Callers]:
        key = f"bench:stampede:{next(_numbers)}"
        return crew.run(stampede, bench.url, name, key, callers // PROCESSES, seconds)

    found = in_turns(rounds, {name: partial(ask, name) for name in CACHES})
    failures: Counter[str] = Counter()
    for name, stampedes in found.items():
        watched = _watch(bench, crew, partial(ask, name))
        columns = zip(*map(_figures, stampedes), strict=True)
        per_process = (watched.opened / PROCESSES, watched.blocked / PROCESSES)
        cells: list[Cell] = [median_known(column) for column in columns]
        result.rows[name] = (*cells, watched.commands / callers, *per_process)
        failures.update(f"{name}: {why}" for crew_ in stampedes for p in crew_ for why in p.failed)
    if failures:
        result.note += " Failed with " + ", ".join(sorted(failures)) + "."
    result.targets = _targets(result, callers)
    return result


def _figures(processes: Sequence[Callers]) -> tuple[float | None, ...]:
    computed = [at for process in processes for at in process.computed]
    failed = sum(len(process.failed) for process in processes)
    stored = min(computed, default=0.0)
    waits = (wait for process in processes for wait in process.returned)
    # Who asks for it when it is there already is no follower.
    lags = [(got - stored) * 1000 for asked, got in waits if asked < stored]
    return (
        len(computed),
        failed,
        percentile(lags, 0),
        percentile(lags, 50),
        percentile(lags, 100),
    )


def _targets(result: Result, callers: int) -> list[Target]:
    computed = result.number(OURS, COMPUTED)
    failed = result.number(OURS, FAILED)
    targets = [
        Target.at_most("computed once", computed, 1),
        Target.at_most("no caller fails", failed, 0),
    ]
    share, last = LIMITS.get(callers), result.number(OURS, LAST)
    if share:
        served = [name for name in result.rows if name != OURS and whole(result, name)]
        for whom, names in (("the best peer's", served), (f"{SET_AGAINST}'s", [SET_AGAINST])):
            peer = best(result.number(name, LAST) for name in names if name in served)
            limit = None if peer is None else share * peer
            targets.append(Target.at_most(f"last at most {share} × {whom}, ms", last, limit))
    # One thread computes, in one of the processes.
    most = 2 + 1 / PROCESSES
    targets += [
        Target.at_most(
            "connections/process at most 2 + computing", result.number(OURS, OPENED), most
        ),
        Target.at_most("of them waiting at most 1", result.number(OURS, BLOCKED), 1),
    ]
    return targets


def _watch(bench: Bench, crew: Crew, ask: partial[list[Callers]]) -> Watched:
    client = bench.client
    opened = figure(client, "stats", "total_connections_received")
    blocked: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            blocked.append(figure(client, "clients", "blocked_clients"))

    looker = threading.Thread(target=look)
    with Ear(client) as ear:
        looker.start()
        ask()
        done.set()
        looker.join()
    commands = sum(b'"INFO"' not in line for line in ear.heard)
    # Less the ear's own; the looker has the bench's.
    opened = figure(client, "stats", "total_connections_received") - opened - 1
    return Watched(commands, opened, max(blocked, default=0))


def _growth(results: Sequence[Result]) -> Result:
    """How much longer the last waits for each caller more, as far as all were served."""
    growth = Result("What each caller more adds", ("µs for the last", "callers, from", "to"))
    for name in results[0].rows:
        lasts = {
            callers_of(result): last
            for result in results
            if (last := result.number(name, LAST)) is not None and whole(result, name)
        }
        few, many = min(lasts, default=0), max(lasts, default=0)
        if few < many:
            each = (lasts[many] - lasts[few]) / (many - few) * 1000
            growth.rows[name] = (each, few, many)
    return growth


def callers_of(result: Result) -> int:
    """How many asked at once."""
    return int(result.title.split()[0])


def whole(result: Result, name: str) -> bool:
    """Whether the value was computed once and everybody got it."""
    return result.number(name, COMPUTED) == 1 and not result.number(name, FAILED)


def stampede(
    seat: Seat, url: str, contender: str, key: str, threads: int, seconds: float
) -> Callers:
    """The callers of one process, all at once; the computation takes ``seconds``."""
    cache = open_cache(contender, url)
    cache.close()
    callers = Callers([], [], [])
    go = threading.Event()
    computing = threading.local()

    def produce() -> str:
        computing.here = True
        time.sleep(seconds)
        callers.computed.append(time.monotonic())
        return "value"

    ask = cache.asker(key, produce)

    def call() -> None:
        go.wait()
        asked = time.monotonic()
        try:
            ask()
        except Exception as error:
            callers.failed.append(type(error).__name__)
            return
        if not hasattr(computing, "here"):
            callers.returned.append((asked, time.monotonic()))

    crowd = [threading.Thread(target=call, daemon=True) for _ in range(threads)]
    for thread in crowd:
        thread.start()
    seat.start()
    go.set()
    for thread in crowd:
        thread.join()
    cache.close()
    return callers
