"""Figures of locks and computations: each process counts, Redis adds up.

``summary()`` and ``summaries()`` read the figures of all processes for the last hour or day.
Counting needs no extra round trip; see ``docs/monitoring.md``.
"""

from __future__ import annotations

from typing import Any

from .. import events
from ..cache import lock_cache
from ..conf import Conf
from ..events import Subject, group_of
from ..transport import server_of
from .figures import (
    BOUNDS,
    EXPORTED_BOUNDS,
    OTHER,
    PERIODS,
    Distribution,
    Summary,
    add,
    histogram_svg,
    new,
    sparkline_svg,
)
from .writing import Metrics, read

__all__ = [
    "BOUNDS",
    "EXPORTED_BOUNDS",
    "OTHER",
    "PERIODS",
    "Distribution",
    "Summary",
    "flush",
    "group_of",
    "histogram_svg",
    "site_of",
    "sparkline_svg",
    "start",
    "summaries",
    "summary",
    "usual_hold",
]


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
    empty = [new() for _ in range(PERIODS[period].kept)]
    if group is not None:
        return Summary.of(group, period, buckets.get(group, empty))
    for figures in buckets.values():
        for total, more in zip(empty, figures, strict=True):
            add(total, more)
    return Summary.of(None, period, empty)


def summaries(using: str = "default", period: str = "hour") -> list[Summary]:
    """A summary of each group with any figures, the busiest first. Arguments and errors as for
    ``summary``."""
    found = [Summary.of(group, period, b) for group, b in _buckets(using, period).items()]
    return sorted(found, key=lambda summary: (-summary.events, summary.group or ""))


def site_of(using: str) -> tuple[Any, str]:
    """The database and KEY_PREFIX of a cache: caches in which they are the same share their
    figures.

    Raises:
        ImproperlyConfigured: the cache cannot lock.
        redis.exceptions.RedisError, OSError: a cluster could not be asked.
    """
    cache = lock_cache(using)
    return server_of(cache._lock_client()).database, str(cache.key_prefix)


def _buckets(using: str, period: str) -> dict[str, list[list[int]]]:
    cache = lock_cache(using)
    return read(cache._lock_client(), str(cache.key_prefix), period)


def _wanted(subject: Subject) -> bool:
    conf: Conf = Conf() if subject.cache is None else subject.cache.conf
    return conf.METRICS


_metrics = Metrics(_wanted)


def start() -> None:
    """Start to count; the app calls this when Django starts."""
    events.subscribe(_metrics.collector)
    events.count_read = _metrics.collector.count_read


def usual_hold(subject: Subject) -> float | None:
    """The average seconds for which this process lately held locks of the group of ``subject``;
    None if it held none or does not count. Sends no request."""
    return _metrics.collector.usual_hold(subject)


def flush() -> None:
    """Write the figures to Redis now, instead of within the next five seconds."""
    _metrics.flush()
