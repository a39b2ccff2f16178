"""A value that is in the cache: what ``get_or_set`` costs against a plain ``get``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..bench import Bench, in_turns
from ..caches import CACHES, open_cache
from ..figures import median, median_ratio
from ..results import OURS, Result, Target
from ..server import Ear
from ..workers import Crew, Seat

__all__ = ["measure"]

PLAIN, STALE = "django-redis, plain get", f"{OURS}, with stale"
LIMIT, STALE_LIMIT = 0.85, 1.00


def measure(bench: Bench) -> list[Result]:
    return bench.everywhere(lambda: _measure(bench))


def _measure(bench: Bench) -> Result:
    result = Result(
        "A value that is there: get_or_set against a plain get",
        ("µs for a hit", "ratio to plain get", "commands for a hit", "commands for a miss"),
    )
    bench.empty()
    rounds, count = bench.pick(quick=30, full=400), 10
    with Crew(1) as crew:
        (names,) = crew.run(prepare, bench.url)
        (times,) = crew.run(ask, bench.url, rounds, count)
        commands = {}
        for name in names:
            with Ear(bench.client) as ear:
                crew.run(ask_once, bench.url, name)
            commands[name] = _split(ear.heard)
    for name in names:
        result.rows[name] = (
            median(times[name]),
            median_ratio(times[name], times[PLAIN]),
            *commands[name],
        )
    ratio, stale = (result.number(name, "ratio to plain get") for name in (OURS, STALE))
    result.targets = [
        Target.at_most(f"a hit at most {LIMIT} × a plain get", ratio, LIMIT),
        Target.at_most(f"with stale at most {STALE_LIMIT} × a plain get", stale, STALE_LIMIT),
    ]
    return result


def _split(heard: list[bytes]) -> tuple[int, int | None]:
    """Commands for the hit and for the miss; between them stand two PINGs."""
    marks = [n for n, line in enumerate(heard) if b'"PING"' in line]
    if len(marks) != 3:
        return 0, None
    first, second, third = marks
    return second - first - 1, third - second - 1


def _askers(url: str) -> dict[str, Callable[[str], Callable[[], Any]]]:
    """Contender to what gives, for a key, what asks for it."""

    def of(name: str) -> Callable[[str], Callable[[], Any]]:
        return lambda key: open_cache(name, url).asker(key, lambda: "value")

    askers = {name: of(name) for name in CACHES}
    plain, ours = open_cache("django-redis", url).backend, open_cache(OURS, url).backend
    askers[PLAIN] = lambda key: lambda: plain.get(key)
    askers[STALE] = lambda key: lambda: ours.get_or_set(key, "value", 60, stale=60)
    return askers


def _key(name: str) -> str:
    return "bench:hit:" + "".join(filter(str.isalnum, name))


def prepare(seat: Seat, url: str) -> list[str]:
    """Put the values there; the names of the contenders."""
    askers = _askers(url)
    for name, asker in askers.items():
        asker(_key(name))()
    open_cache("django-redis", url).backend.set(_key(PLAIN), "value", 60)
    return [PLAIN, *(name for name in askers if name != PLAIN)]


def ask(seat: Seat, url: str, rounds: int, count: int) -> dict[str, list[float]]:
    """Microseconds for one hit, by contender, round by round."""
    askers = {name: asker(_key(name)) for name, asker in _askers(url).items()}

    def timed(hit: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            for _ in range(count):
                hit()
            return (time.perf_counter() - began) / count * 1e6

        return run

    return in_turns(rounds, {name: timed(hit) for name, hit in askers.items()})


def ask_once(seat: Seat, url: str, name: str) -> None:
    """One hit and one miss, between PINGs."""
    ping = open_cache("django-redis", url).pool()
    asker = _askers(url)[name]
    hit, miss = asker(_key(name)), asker(_key(name) + ":missing")
    _ping(ping)
    hit()
    _ping(ping)
    miss()
    _ping(ping)


def _ping(pool: Any) -> None:
    connection = pool.get_connection()
    try:
        connection.send_command("PING")
        connection.read_response()
    finally:
        pool.release(connection)
