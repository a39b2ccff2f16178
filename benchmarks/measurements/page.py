"""Whole pages: what a hit costs beside Django's own ``cache_page`` on django-redis, and how long
after its computation a crowd has a missing page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

from ..bench import Bench, in_turns
from ..figures import median, median_ratio
from ..results import OURS, Result, Target
from ..workers import Crew, Seat

__all__ = ["measure"]

DJANGO, STALE = "Django's cache_page", f"{OURS}, with stale"
LIMIT = 1.05
#: Of a stampede.
PROCESSES, CLIENTS, SECONDS = 4, 200, 1.0
#: The last follower's lag after the computation, as a share of the computation's time.
LAG_LIMIT = 0.3

Ask = Callable[[str], Any]
_numbers = count()


def measure(bench: Bench) -> list[Result]:
    bench.empty()
    hits = Result("A page that is there", ("µs for a hit", "ratio to Django's"))
    with Crew(1) as crew:
        (times,) = crew.run(ask, bench.url, bench.pick(quick=30, full=100), 20)
    for name in times:
        hits.rows[name] = median(times[name]), median_ratio(times[name], times[DJANGO])
    ratio = hits.number(OURS, "ratio to Django's")
    hits.targets = [Target.at_most(f"a hit at most {LIMIT} × Django's", ratio, LIMIT)]
    return [hits, _stampede(bench)]


def _stampede(bench: Bench) -> Result:
    result = Result(
        f"{CLIENTS} threads in {PROCESSES} processes ask for one missing page",
        ("computed", "last ms", "share of the computation"),
        note=f"The computation takes {SECONDS:g} s; milliseconds from its end until the last "
        "thread has the page.",
    )
    with Crew(PROCESSES) as crew:
        for name in (DJANGO, OURS):
            path = f"/stampede/{next(_numbers)}/"
            answers = crew.run(crowd, bench.url, name, path, CLIENTS // PROCESSES)
            ends = [end for ended, _ in answers for end in ended]
            last = max(got for _, got in answers) - min(ends)
            result.rows[name] = len(ends), last * 1000, last / SECONDS
    computed, share = (result.number(OURS, column) for column in ("computed", result.columns[2]))
    result.targets = [
        Target.at_most("computed once", computed, 1),
        Target.at_most(f"last at most {LAG_LIMIT} × the computation later", share, LAG_LIMIT),
    ]
    return result


@cache
def views(url: str) -> dict[str, Callable[[Callable[[], str]], Ask]]:
    """For each contender what makes, of a function that computes a page, what asks for a path."""
    import django
    from django.conf import settings

    backends = {"default": "django_redis_lock", "plain": "django_redis"}
    settings.configure(
        ALLOWED_HOSTS=["testserver"],
        CACHES={
            alias: {"BACKEND": f"{package}.cache.RedisCache", "LOCATION": url}
            for alias, package in backends.items()
        },
    )
    django.setup()
    from django.http import HttpResponse
    from django.test import RequestFactory
    from django.views.decorators.cache import cache_page

    from django_redis_lock import cached_page

    def asker(decorate: Callable[..., Any]) -> Callable[[Callable[[], str]], Ask]:
        def make(compute: Callable[[], str]) -> Ask:
            page = decorate(lambda request: HttpResponse(compute()))
            return lambda path: page(RequestFactory().get(path))

        return make

    return {
        DJANGO: asker(cache_page(600, cache="plain", key_prefix="django")),
        OURS: asker(cached_page(600)),
        STALE: asker(cached_page(600, stale=60, key_prefix="stale")),
    }


def ask(seat: Seat, url: str, rounds: int, number: int) -> dict[str, list[float]]:
    """Microseconds for one hit, by contender, round by round."""

    def timed(hit: Ask) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            for _ in range(number):
                hit("/page/?number=1")
            return (time.perf_counter() - began) / number * 1e6

        return run

    asks = {name: make(lambda: "a line of text\n" * 500) for name, make in views(url).items()}
    for hit in asks.values():
        hit("/page/?number=1")
    return in_turns(rounds, {name: timed(hit) for name, hit in asks.items()})


def crowd(seat: Seat, url: str, name: str, path: str, threads: int) -> tuple[list[float], float]:
    """When the computations of this process ended, and when the last of its threads had the
    page."""
    ended: list[float] = []
    got: list[float] = []

    def compute() -> str:
        time.sleep(SECONDS)
        ended.append(time.monotonic())
        return "page"

    def visit() -> None:
        hit(path)
        got.append(time.monotonic())

    hit = views(url)[name](compute)
    crew = [threading.Thread(target=visit, daemon=True) for _ in range(threads)]
    seat.start()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return ended, max(got)
