"""The figures of all processes for the last hour or day, as users read them."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from ...cache import lock_cache
from ...clock import time
from ...protocol import Call, as_bytes, script
from ...protocol.keys import FIGURES
from ...transport import run, server_of
from . import figures as at
from .collecting import name_of
from .figures import BOUNDS, CLASSES, PERIODS, add, new, unpack

if TYPE_CHECKING:
    from ...transport import Client

#: The figures that a summary takes over unchanged.
_COUNTED = {
    **{"contended": at.CONTENDED, "timeouts": at.TIMED_OUT, "rejected": at.REJECTED},
    **{"lost": at.LOST, "crashed": at.CRASHED, "fallbacks": at.FALLBACKS, "failed": at.FAILED},
    **{"computed": at.COMPUTED, "without_redis": at.WITHOUT_REDIS, "stale": at.STALE},
    **{"refreshes_failed": at.REFRESH_FAILED, "hits": at.HITS, "stale_hits": at.STALE_HITS},
    "misses": at.MISSES,
}
#: With fewer samples, quantiles near 1 are meaningless.
LEAST_SAMPLES = 20


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
    def of(cls, figures: list[int], begins: int) -> Distribution:
        classes = figures[begins + 2 : begins + 2 + CLASSES]
        return cls(tuple(classes), figures[begins] / 1e6, figures[begins + 1] / 1e6)

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
                seconds = lower + (upper - lower) * max(0.0, wanted - before) / count
                return min(seconds, self.largest)
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
        over_time = tuple(sum(b[at.WAITS + 2 : at.WAITS + 2 + CLASSES]) for b in buckets)
        return cls(
            group,
            period,
            **{name: total[index] for name, index in _COUNTED.items()},
            waits=Distribution.of(total, at.WAITS),
            holds=Distribution.of(total, at.HOLDS),
            computations=Distribution.of(total, at.COMPUTING),
            saved=total[at.SHARED] + total[at.STALE],
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


# -- to read them ----------------------------------------------------------------------------------

#: Seconds to wait for the figures of all processes.
REPLY_TIMEOUT = 5.0

#: What one hash holds.
#:
#: KEYS  the hash
#: returns {server time in seconds, its fields and values}
#: atomic so that the time tells which of its buckets are too old.
READ_FIGURES = script("""
return {tonumber(redis.call('TIME')[1]), redis.call('HGETALL', KEYS[1])}
""")


def summary(using: str = "default", group: str | None = None, period: str = "hour") -> Summary:
    """The figures of one group, or of all groups together.

    Args:
        using: the alias of a cache. The figures are those of all caches on its server with the same
            KEY_PREFIX.
        group: the argument ``group``, the template of ``locked()`` or ``cached()``, or
            ``group_of(name)``. The figures of an unknown group are zeros.
        period: "hour" (the last 60 to 65 minutes) or "day" (24 to 25 hours).

    Raises:
        ValueError: there is no such period.
        ImproperlyConfigured: the cache cannot lock.
        redis.exceptions.RedisError: the request failed.
    """
    buckets = _buckets(using, period)
    empty = [new() for _ in range(PERIODS[period].buckets)]
    if group is not None:
        return Summary.of(group, period, buckets.get(group, empty))
    for figures in buckets.values():
        for total, more in zip(empty, figures, strict=True):
            add(total, more)
    return Summary.of(None, period, empty)


def summaries(using: str = "default", period: str = "hour") -> list[Summary]:
    """A summary of each group with any figures, the busiest first. Arguments and errors as for
    ``summary``."""
    known = [Summary.of(group, period, b) for group, b in _buckets(using, period).items()]
    return sorted(known, key=lambda summary: (-summary.events, summary.group or ""))


def site_of(using: str) -> tuple[object, str]:
    """The database and KEY_PREFIX of a cache: caches in which they are the same share their
    figures. Raises as ``summary``."""
    cache = lock_cache(using)
    return server_of(cache._lock_client()).database, str(cache.key_prefix)


def _buckets(using: str, period: str) -> dict[str, list[list[int]]]:
    cache = lock_cache(using)
    return read(cache._lock_client(), str(cache.key_prefix), period)


def read(client: Client, site: str, period: str) -> dict[str, list[list[int]]]:
    """The figures of each group of a site in each bucket, oldest first. Raises as ``summary``."""
    if period not in PERIODS:
        allowed = " or ".join(map(repr, PERIODS))
        raise ValueError(f"period must be {allowed}, not {period!r}")
    width, count = PERIODS[period]
    answer = run(
        client, Call(READ_FIGURES, (FIGURES[period],), ()), until=time.monotonic() + REPLY_TIMEOUT
    ).value
    seconds, stored = int(answer[0]), [as_bytes(part) for part in answer[1]]
    oldest = seconds // width - count + 1
    wanted = name_of(site, "")
    groups: defaultdict[str, list[list[int]]] = defaultdict(lambda: [new() for _ in range(count)])
    for field, figures in zip(stored[::2], stored[1::2], strict=True):
        number, _, name = field.partition(b" ")
        if name.startswith(wanted) and 0 <= (bucket := int(number) - oldest) < count:
            group = name[len(wanted) :].decode(errors="replace")
            groups[group][bucket] = unpack(figures)
    return dict(groups)
