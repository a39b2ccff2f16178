"""A report has expired, and nine processes ask for it at the same moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.core.cache import caches
from django_redis import get_redis_connection

from testproject.demo.member import Member
from testproject.demo.screen import Bars, Screen
from testproject.demo.team import Team
from testproject.reports.report import Report, sales_report

__all__ = ["Stampede", "ask", "stampede"]

KEY = "demo-report"
#: Counts in Redis how often the report was computed.
COUNTER = "django_redis_lock_demo:computations"


@dataclass
class Stampede:
    """What it cost.

    Attributes:
        computations: how often the report was computed.
        processor: seconds of processor time it took, in all processes together.
        answers: seconds each process waited for its answer.
    """

    computations: int = 0
    processor: float = 0.0
    answers: list[float] = field(default_factory=list)

    @property
    def slowest(self) -> float:
        return max(self.answers)

    @property
    def mean(self) -> float:
        return sum(self.answers) / len(self.answers)


def ask(member: Member, alias: str) -> None:
    """One process's part: ask the cache ``alias`` for the report when it is told to."""
    cache, redis = caches[alias], get_redis_connection(alias)

    computed = False

    def compute() -> Report:
        nonlocal computed
        computed = True
        redis.incr(COUNTER)
        return sales_report(lambda share: member.say("computing", share=share))

    cache.get(KEY)  # Connect now: all are to ask at the same moment.
    member.say("ready")
    member.hear()
    began, processor = time.monotonic(), time.process_time()
    cache.get_or_set(KEY, compute, 60)
    seconds, processor = time.monotonic() - began, time.process_time() - processor
    member.say("answered", seconds=seconds, processor=processor, computed=computed)


def stampede(team: Team, screen: Screen, alias: str) -> Stampede:
    """Let the team ask the cache ``alias`` for a report that has just expired."""
    result = Stampede()
    with _expired(alias) as redis, screen.bars(team.numbers) as bars:
        team.start_all(ask, alias=alias)
        team.wait_for_all("ready")
        for number in team.numbers:
            team.emit(number, "go")
            bars.pulse(number, "waiting")
        for event in team.until_all("answered"):
            _show(bars, event.member, event.what, event.facts)
            if event.what == "answered":
                result.answers.append(event.facts["seconds"])
                result.processor += event.facts["processor"]
        result.computations = int(redis.get(COUNTER))
    return result


@contextmanager
def _expired(alias: str) -> Iterator[Any]:
    """The cache as it is a moment after the report's time is up; nothing stays behind."""
    cache, redis = caches[alias], get_redis_connection(alias)
    redis.set(COUNTER, 0, ex=600)
    cache.set(KEY, "an old report", timeout=0.05)
    while cache.get(KEY) is not None:
        time.sleep(0.01)
    try:
        yield redis
    finally:
        cache.delete(KEY)
        redis.delete(COUNTER)


def _show(bars: Bars, number: int, what: str, facts: dict[str, Any]) -> None:
    if what == "computing":
        bars.fill(number, "computing", facts["share"])
    elif what == "answered":
        how = "computed it in" if facts["computed"] else "was given it after"
        bars.finish(number, f"{how} {facts['seconds']:.2f} s")
