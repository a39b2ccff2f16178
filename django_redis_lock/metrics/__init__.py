"""How locks and computations behave: counted in each process, added up in Redis.

``summary()`` and ``summaries()`` read what all processes have counted in the last hour or day.
Counting costs no round trip; see ``docs/monitoring.md``.
"""

from __future__ import annotations

from typing import Any

from .. import events
from ..cache import lock_cache
from ..conf import Conf
from ..events import Subject, group_of
from ..transport import server_of
from .charts import histogram_svg, sparkline_svg
from .figures import BOUNDS, EXPORTED_BOUNDS, OTHER, PERIODS, Distribution, Summary, add, new
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
    """How the locks and values of one group behaved; of all groups where none is named.

    Args:
        using: the cache alias whose server is asked. The figures are those of all caches there with
            the same KEY_PREFIX.
        group: the ``group`` that was given, the template of ``locked()`` or ``cached()``, or else
            ``group_of(name)``. One that nothing was counted for has zeros.
        period: "hour" (the last 60 to 65 minutes) or "day" (24 to 25 hours).

    Raises:
        ValueError: there is no such period.
        ImproperlyConfigured: the cache cannot lock.
        redis.exceptions.RedisError: Redis could not be asked.
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
    """A summary of each group for which something was counted, the busiest first. Arguments and
    errors as for ``summary``."""
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
    """Count from now on; the app does this when Django starts."""
    events.subscribe(_metrics.collector)


def usual_hold(subject: Subject) -> float | None:
    """Seconds for which this process has lately held the locks that are counted together with
    ``subject``, on average; None if it has held none, or does not count. Asks nothing of Redis."""
    return _metrics.collector.usual_hold(subject)


def flush() -> None:
    """Write what was counted so far now, and not within the next seconds."""
    _metrics.flush()
