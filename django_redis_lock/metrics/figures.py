"""Figures of one group of locks or values: as they are counted, as Redis keeps them, and as they
are read."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

#: The group of what finds no room among the others.
OTHER = "other"

#: Upper bounds of the classes of waits, holds and computations, in seconds; the last class has
#: none. What is kept in Redis depends on them: change them, and the last day's figures are wrong.
BOUNDS = (
    *(0.0001, 0.00016, 0.00025, 0.0004, 0.00063, 0.001, 0.0016, 0.0025, 0.004, 0.0063),
    *(0.01, 0.016, 0.025, 0.04, 0.063, 0.1, 0.16, 0.25, 0.4, 0.63, 1.0, 1.6, 2.5, 4.0, 6.3),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
)
#: Upper bounds of the exporters' histogram buckets. They are fewer, because each is a time series
#: for each group, and round, because queries and alerts name them.
EXPORTED_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
_CLASSES = len(BOUNDS) + 1

# Where what stands in the list of one group's figures.
CONTENDED, TIMED_OUT, REJECTED, LOST, COMPUTED, FAILED, SHARED, STALE, REFRESH_FAILED = range(9)
# A distribution is the sum in microseconds, the largest in microseconds, then the classes.
WAITS, HOLDS, COMPUTING = (9 + n * (2 + _CLASSES) for n in range(3))
FALLBACKS = 9 + 3 * (2 + _CLASSES)
WITHOUT_REDIS = FALLBACKS + 1
CRASHED = WITHOUT_REDIS + 1
_LENGTH = CRASHED + 1
_LARGEST = frozenset(place + 1 for place in (WAITS, HOLDS, COMPUTING))

#: Below so many samples the quantiles near 1 say nothing.
LEAST_SAMPLES = 20


class Period(NamedTuple):
    """A time for which there are figures: ``kept`` buckets of ``width`` seconds each. The present
    bucket has only begun, so there is one more than fill the period."""

    width: int
    kept: int


PERIODS = {"hour": Period(300, 13), "day": Period(3600, 25)}


def new() -> list[int]:
    """Figures of nothing."""
    return [0] * _LENGTH


def observe(figures: list[int], distribution: int, seconds: float) -> None:
    """Count one more wait, hold or computation of so many seconds."""
    microseconds = int(seconds * 1e6)
    figures[distribution] += microseconds
    figures[distribution + 1] = max(figures[distribution + 1], microseconds)
    figures[distribution + 2 + bisect_left(BOUNDS, seconds)] += 1


def add(figures: list[int], more: Iterable[int]) -> None:
    """Add ``more`` figures to ``figures``."""
    for place, number in enumerate(more):
        if number and place < _LENGTH:
            if place in _LARGEST:
                figures[place] = max(figures[place], number)
            else:
                figures[place] += number


def pack(figures: list[int]) -> bytes:
    """As Redis keeps them: of those that are marked the largest counts, not the sum."""
    return b" ".join(
        b"m%d" % number if place in _LARGEST else b"%d" % number
        for place, number in enumerate(figures)
    )


def unpack(kept: bytes) -> list[int]:
    """What ``pack`` made."""
    return [int(number.lstrip(b"m")) for number in kept.split()]


@dataclass(frozen=True, slots=True)
class Distribution:
    """How long something took, many times.

    Attributes:
        counts: how often, in each class; the classes end at ``BOUNDS``, the last has no end.
        seconds: all of it together.
        largest: the longest, in seconds; ``inf`` where that is not known.
    """

    counts: tuple[int, ...]
    seconds: float
    largest: float = math.inf

    @classmethod
    def at(cls, figures: list[int], place: int) -> Distribution:
        classes = figures[place + 2 : place + 2 + _CLASSES]
        return cls(tuple(classes), figures[place] / 1e6, figures[place + 1] / 1e6)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def average(self) -> float | None:
        """Seconds; None if it never happened."""
        return self.seconds / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Seconds which ``share`` (0 to 1) of all took at most, None if it never happened. As exact
        as the classes, and never above the largest; what took longer than the last bound counts as
        that bound."""
        if not self.count:
            return None
        wanted, lower, before = share * self.count, 0.0, 0
        for count, upper, reached in zip(
            self.counts, (*BOUNDS, BOUNDS[-1]), accumulate(self.counts), strict=True
        ):
            if count and reached >= wanted:
                found = lower + (upper - lower) * max(0.0, wanted - before) / count
                return min(found, self.largest)
            lower, before = upper, reached
        return min(BOUNDS[-1], self.largest)

    @property
    def p95(self) -> float | None:
        """Seconds which 95 % of all took at most; None if there were fewer than LEAST_SAMPLES."""
        return self.quantile(0.95) if self.count >= LEAST_SAMPLES else None


@dataclass(frozen=True, slots=True)
class Summary:
    """How the locks and values of one group behaved.

    Attributes:
        group: its name; None for all groups together.
        period: "hour" or "day": the last 60 to 65 minutes, or 24 to 25 hours.
        contended: acquisitions of a lock that was not free at once.
        timeouts: waits that ended without the lock.
        rejected: single attempts (``blocking=False``) that found the lock taken.
        lost: locks that ended before their holders released them, and these noticed it.
        crashed: holders that never released their lock: their process crashed, or was cut off
            from Redis until the lock's lifetime had ended.
        fallbacks: locks taken without Redis while it was away (ON_REDIS_DOWN); no acquisitions.
        waits: how long the acquisitions waited.
        holds: how long locks were held.
        computed: values computed by ``get_or_set`` and its kin.
        without_redis: how many of these were computed while Redis was away.
        failed: computations that raised.
        saved: computations that callers were saved, because another's result was theirs too.
        stale: how many of these got the old value at once.
        refreshes_failed: stale values whose next computation failed.
        computations: how long the computations took.
        acquisitions_over_time: from the oldest bucket to the present one.
    """

    group: str | None
    period: str
    contended: int
    timeouts: int
    rejected: int
    lost: int
    crashed: int
    fallbacks: int
    waits: Distribution
    holds: Distribution
    computed: int
    without_redis: int
    failed: int
    saved: int
    stale: int
    refreshes_failed: int
    computations: Distribution
    acquisitions_over_time: tuple[int, ...]

    @classmethod
    def of(cls, group: str | None, period: str, buckets: list[list[int]]) -> Summary:
        """Of the figures in ``buckets``, the oldest first."""
        total = new()
        for figures in buckets:
            add(total, figures)
        over_time = tuple(sum(b[WAITS + 2 : WAITS + 2 + _CLASSES]) for b in buckets)
        return cls(
            group=group,
            period=period,
            contended=total[CONTENDED],
            timeouts=total[TIMED_OUT],
            rejected=total[REJECTED],
            lost=total[LOST],
            crashed=total[CRASHED],
            fallbacks=total[FALLBACKS],
            waits=Distribution.at(total, WAITS),
            holds=Distribution.at(total, HOLDS),
            computed=total[COMPUTED],
            without_redis=total[WITHOUT_REDIS],
            failed=total[FAILED],
            saved=total[SHARED] + total[STALE],
            stale=total[STALE],
            refreshes_failed=total[REFRESH_FAILED],
            computations=Distribution.at(total, COMPUTING),
            acquisitions_over_time=over_time,
        )

    @property
    def acquisitions(self) -> int:
        return self.waits.count

    @property
    def attempts(self) -> int:
        """How often a lock was asked for."""
        return self.acquisitions + self.timeouts + self.rejected

    @property
    def success_rate(self) -> float | None:
        """The share, 0 to 1, of attempts that got the lock; None if there were none."""
        return self.acquisitions / self.attempts if self.attempts else None

    @property
    def average_wait(self) -> float | None:
        """Seconds; None if there were no acquisitions."""
        return self.waits.average

    @property
    def p95_wait(self) -> float | None:
        """Seconds within which 95 % of the acquisitions had the lock; None if there were fewer
        than LEAST_SAMPLES."""
        return self.waits.p95

    @property
    def events(self) -> int:
        """How much happened in all."""
        return (
            self.attempts
            + self.lost
            + self.crashed
            + self.fallbacks
            + self.computations.count
            + self.saved
        )
