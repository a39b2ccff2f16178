"""Figures of one group: as a process counts them, as Redis stores them, and as users read them,
also as small charts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from ...ops.formatting import ENGLISH

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
        computed: values computed by ``get_or_set`` and the like.
        without_redis: how many of these were computed while Redis was down.
        failed: computations that raised.
        saved: computations saved because the caller got another's result.
        stale: how many of these callers got the stale value at once.
        refreshes_failed: stale values whose next computation failed.
        computations: how long the computations took.
        hits: values that ``get_or_set`` and the like found.
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
        """The values that ``get_or_set`` and the like looked for."""
        return self.hits + self.stale_hits + self.misses

    @property
    def hit_ratio(self) -> float | None:
        """The share, 0 to 1, of reads that found a value, fresh or stale; None without reads."""
        return (self.hits + self.stale_hits) / self.reads if self.reads else None

    @property
    def events(self) -> int:
        of_locks = self.attempts + self.lost + self.crashed + self.fallbacks
        return of_locks + self.computations.count + self.saved + self.reads


#: Classes shown at least, so that one bar does not fill the chart.
LEAST_CLASSES = 7
#: The height of an axis's labels, and the least width of one, in SVG units.
LABELS, LABEL_WIDTH = 16, 44


def histogram_svg(
    distribution: Distribution,
    title: str,
    description: str | None = None,
    *,
    width: int = 360,
    height: int = 96,
    shown: Callable[[float], str] = ENGLISH.measured,
) -> SafeString:
    """A bar for each class of ``distribution``, from the shortest to the longest that occur.

    Args:
        title: of the chart, such as "How long import was held".
        description: its content, for screen readers; by default in English.
        width, height: in SVG units.
        shown: formats seconds; by default in English.
    """
    if description is None:
        description = _describe(distribution)
    first, last = _shown_classes(distribution.counts)
    counts = distribution.counts[first : last + 1]
    step, floor, most = width / len(counts), height - LABELS, max((*counts, 1))
    bars, labels = [], []
    apart = max(1, -(-LABEL_WIDTH // max(int(step), 1)))
    for place, count in enumerate(counts):
        size = count / most * (floor - 4)
        tall = max(size, 1.5) if count else 0.0
        left = place * step
        bars.append(
            f"<g><title>{escape(_class_name(first + place, shown))}: {count}</title>"
            f'<rect class="redis-lock-space" x="{left:.1f}" y="0" width="{step:.1f}" '
            f'height="{floor}" fill="none" pointer-events="all"/>'
            f'<rect class="redis-lock-bar" x="{left + 1:.1f}" y="{floor - tall:.1f}" '
            f'width="{max(step - 2, 1):.1f}" height="{tall:.1f}" fill="currentColor"/></g>'
        )
        # A label stands at the end of its class.
        if first + place < len(BOUNDS) and place % apart == apart - 1 and place + 1 < len(counts):
            text = escape(shown(BOUNDS[first + place]))
            labels.append(
                f'<text class="redis-lock-label" x="{left + step:.1f}" y="{height - 3}" '
                f'font-size="11" text-anchor="middle" fill="currentColor">{text}</text>'
            )
    axis = (
        f'<line class="redis-lock-axis" x1="0" y1="{floor + 0.5}" x2="{width}" '
        f'y2="{floor + 0.5}" stroke="currentColor" stroke-opacity="0.4"/>'
    )
    return _svg("histogram", title, description, width, height, [*bars, axis, *labels])


def sparkline_svg(
    numbers: Sequence[int],
    title: str,
    description: str | None = None,
    *,
    width: int = 80,
    height: int = 28,
) -> SafeString:
    """A line through ``numbers``, oldest first, such as acquisitions over time; its scale goes from
    0 to the largest number.

    Args:
        title, description, width, height: as for ``histogram_svg``.
    """
    most = max((*numbers, 1))
    left, floor = 6 * len(str(most)) + 5, height - 3
    step = (width - left - 2) / max(len(numbers) - 1, 1)
    points = " ".join(
        f"{left + place * step:.1f},{floor - number / most * (floor - 3):.1f}"
        for place, number in enumerate(numbers)
    )
    scale = "".join(
        f'<line class="redis-lock-axis" x1="{left}" y1="{at}" x2="{width}" y2="{at}" '
        'stroke="currentColor" stroke-opacity="0.25"/>'
        f'<text class="redis-lock-label" x="{left - 4}" y="{text_at}" font-size="10" '
        f'text-anchor="end" fill="currentColor">{number}</text>'
        for number, at, text_at in ((most, 3, 9), (0, floor, height - 1))
    )
    line = (
        f'<polyline class="redis-lock-line" points="{points}" fill="none" stroke="currentColor" '
        'stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round"/>'
    )
    description = description or f"{max((*numbers, 0))} at most"
    return _svg("sparkline", title, description, width, height, [scale, line])


def _svg(
    kind: str, title: str, description: str, width: int, height: int, parts: list[str]
) -> SafeString:
    drawn = "".join(parts)
    digest = hashlib.blake2b(f"{kind}{title}{drawn}".encode(errors="replace"), digest_size=6)
    id = f"redis-lock-{digest.hexdigest()}"
    return mark_safe(
        f'<svg class="redis-lock-chart redis-lock-{kind}" xmlns="http://www.w3.org/2000/svg" '
        f'role="img" aria-labelledby="{id}-title {id}-desc" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">'
        f'<title id="{id}-title">{escape(title)}</title>'
        f'<desc id="{id}-desc">{escape(description)}</desc>{drawn}</svg>'
    )


def _describe(distribution: Distribution) -> str:
    half, most = distribution.quantile(0.5), distribution.quantile(0.95)
    if half is None or most is None:
        return "Nothing was counted."
    times = f"{distribution.count} times" if distribution.count > 1 else "Once"
    half_text, most_text = ENGLISH.measured(half), ENGLISH.measured(most)
    return f"{times}; half within {half_text}, 95 % within {most_text}."


def _class_name(place: int, shown: Callable[[float], str]) -> str:
    if place == 0:
        return f"≤ {shown(BOUNDS[0])}"
    if place == len(BOUNDS):
        return f"> {shown(BOUNDS[-1])}"
    return f"{shown(BOUNDS[place - 1])} – {shown(BOUNDS[place])}"


def _shown_classes(counts: Sequence[int]) -> tuple[int, int]:
    """Those that occur, and at least LEAST_CLASSES."""
    used = [place for place, count in enumerate(counts) if count] or [len(counts) // 2]
    first, last = used[0], used[-1]
    while last - first + 1 < LEAST_CLASSES:
        first, last = max(first - 1, 0), min(last + 1, len(counts) - 1)
    return first, last
