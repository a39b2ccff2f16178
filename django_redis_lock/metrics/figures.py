"""Figures of one group: as a process counts them, as Redis stores them, and as users read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

#: The group that counts the events of all groups above a limit.
OTHER = "other"

#: Upper bounds of the classes of waits, holds and computations, in seconds; the last class has
#: none. After a change of them, the stored figures of the last day are wrong.
BOUNDS = (
    *(0.0001, 0.00016, 0.00025, 0.0004, 0.00063, 0.001, 0.0016, 0.0025, 0.004, 0.0063),
    *(0.01, 0.016, 0.025, 0.04, 0.063, 0.1, 0.16, 0.25, 0.4, 0.63, 1.0, 1.6, 2.5, 4.0, 6.3),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
)
#: Upper bounds of the exporters' histogram buckets. They are fewer, because each is a time series
#: for each group, and round, because queries and alerts name them.
EXPORTED_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
_CLASSES = len(BOUNDS) + 1

# Places in the list of one group's figures.
CONTENDED, TIMED_OUT, REJECTED, LOST, COMPUTED, FAILED, SHARED, STALE, REFRESH_FAILED = range(9)
# A distribution is the sum in microseconds, the largest in microseconds, then the classes.
WAITS, HOLDS, COMPUTING = (9 + n * (2 + _CLASSES) for n in range(3))
FALLBACKS = 9 + 3 * (2 + _CLASSES)
WITHOUT_REDIS = FALLBACKS + 1
CRASHED = WITHOUT_REDIS + 1
HITS, STALE_HITS, MISSES = range(CRASHED + 1, CRASHED + 4)
_LENGTH = MISSES + 1
#: What a summary has of the figures as they are.
_COUNTED = {
    **{"contended": CONTENDED, "timeouts": TIMED_OUT, "rejected": REJECTED, "lost": LOST},
    **{"crashed": CRASHED, "fallbacks": FALLBACKS, "computed": COMPUTED, "failed": FAILED},
    **{"without_redis": WITHOUT_REDIS, "refreshes_failed": REFRESH_FAILED, "stale": STALE},
    **{"hits": HITS, "stale_hits": STALE_HITS, "misses": MISSES},
}
_LARGEST = frozenset(place + 1 for place in (WAITS, HOLDS, COMPUTING))

#: With fewer samples, quantiles near 1 are meaningless.
LEAST_SAMPLES = 20


class Period(NamedTuple):
    """``kept`` buckets of ``width`` seconds each: one more than fill the period, because the last
    bucket is incomplete."""

    width: int
    kept: int


PERIODS = {"hour": Period(300, 13), "day": Period(3600, 25)}


def new() -> list[int]:
    return [0] * _LENGTH


def add(figures: list[int], more: Iterable[int]) -> None:
    for place, number in enumerate(more):
        if number and place < _LENGTH:
            if place in _LARGEST:
                figures[place] = max(figures[place], number)
            else:
                figures[place] += number


def pack(figures: list[int]) -> bytes:
    """As Redis stores them; ``m`` marks a number of which the largest counts, not the sum."""
    return b" ".join(
        b"m%d" % number if place in _LARGEST else b"%d" % number
        for place, number in enumerate(figures)
    )


def unpack(kept: bytes) -> list[int]:
    return [int(number.lstrip(b"m")) for number in kept.split()]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Durations of waits, holds or computations.

    Attributes:
        counts: the number in each class; the classes end at ``BOUNDS``, the last has no end.
        seconds: the sum.
        largest: the largest, in seconds; ``inf`` if unknown.
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
        """Seconds; None without samples."""
        return self.seconds / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The seconds that ``share`` (0 to 1) of the samples took at most; None without samples. As
        exact as the classes, and never above the largest; samples above the last bound count as
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
        """The seconds that 95 % took at most; None for fewer than LEAST_SAMPLES samples."""
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
        lost: locks that ended before their holders released them, as noticed by the holders.
        crashed: holders that never released their lock: their process crashed, or was cut off
            from Redis until the lock's lifetime had ended.
        fallbacks: locks taken while Redis was down (ON_REDIS_DOWN); no acquisitions.
        waits: how long the acquisitions waited.
        holds: how long locks were held.
        computed: values computed by ``get_or_set`` and its kin.
        without_redis: how many of these were computed while Redis was down.
        failed: computations that raised.
        saved: computations saved because the caller got another's result.
        stale: how many of these callers got the stale value at once.
        refreshes_failed: stale values whose next computation failed.
        computations: how long the computations took.
        hits: values that ``get_or_set`` and its kin found.
        stale_hits: values that they found stale.
        misses: values that they did not find.
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
    hits: int
    stale_hits: int
    misses: int
    acquisitions_over_time: tuple[int, ...]

    @classmethod
    def of(cls, group: str | None, period: str, buckets: list[list[int]]) -> Summary:
        total = new()
        for figures in buckets:
            add(total, figures)
        over_time = tuple(sum(b[WAITS + 2 : WAITS + 2 + _CLASSES]) for b in buckets)
        return cls(
            group,
            period,
            **{name: total[place] for name, place in _COUNTED.items()},
            waits=Distribution.at(total, WAITS),
            holds=Distribution.at(total, HOLDS),
            computations=Distribution.at(total, COMPUTING),
            saved=total[SHARED] + total[STALE],
            acquisitions_over_time=over_time,
        )

    @property
    def acquisitions(self) -> int:
        return self.waits.count

    @property
    def attempts(self) -> int:
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
        """The seconds that 95 % of the acquisitions waited at most; None for fewer than
        LEAST_SAMPLES."""
        return self.waits.p95

    @property
    def reads(self) -> int:
        """The values that ``get_or_set`` and its kin looked for."""
        return self.hits + self.stale_hits + self.misses

    @property
    def hit_ratio(self) -> float | None:
        """The share, 0 to 1, of reads that found a value, fresh or stale; None without reads."""
        return (self.hits + self.stale_hits) / self.reads if self.reads else None

    @property
    def events(self) -> int:
        """The number of all events."""
        of_locks = self.attempts + self.lost + self.crashed + self.fallbacks
        return of_locks + self.computations.count + self.saved + self.reads
