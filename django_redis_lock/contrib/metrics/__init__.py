"""Figures of locks and computations: each process counts, Redis adds up.

``summary()`` and ``summaries()`` read the figures of all processes for the last hour or day.
Counting needs no extra round trip: the keeper writes new figures every few seconds, and at its end
the process writes the rest, if Redis answers at once. A write that fails is repeated with the
figures since. (If only its reply was lost, these figures count twice.) See ``docs/monitoring.md``.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from importlib import import_module
from typing import TYPE_CHECKING

from ... import events
from ...cache import lock_cache
from ...events import group_of
from ...protocol import Call, as_bytes, script
from ...protocol.keys import FIGURES
from ...transport import run, server_of
from .collecting import Metrics, name_of
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
    unpack,
)

if TYPE_CHECKING:
    from ...transport import Client

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
]

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
    width, kept = PERIODS[period]
    answer = run(client, Call(READ_FIGURES, (FIGURES[period],), ()), patience=REPLY_TIMEOUT).value
    seconds, found = int(answer[0]), [as_bytes(part) for part in answer[1]]
    oldest = seconds // width - kept + 1
    wanted = name_of(site, "")
    groups: defaultdict[str, list[list[int]]] = defaultdict(lambda: [new() for _ in range(kept)])
    for field, figures in zip(found[::2], found[1::2], strict=True):
        number, _, name = field.partition(b" ")
        if name.startswith(wanted) and 0 <= (at := int(number) - oldest) < kept:
            group = name[len(wanted) :].decode(errors="replace")
            groups[group][at] = unpack(figures)
    return dict(groups)


# -- those of this process ------------------------------------------------------------------------


_metrics = Metrics()
forget = _metrics.forget


def start() -> Metrics:
    """Count from now on."""
    events.subscribe(_metrics)
    events.count_read = _metrics.count_read
    events.usual_hold = _metrics.usual_hold
    if "celery" in sys.modules:  # As in ``note_tasks``.
        import_module("celery.signals").worker_process_shutdown.connect(_end)
    return _metrics


def _end(**kwargs: object) -> None:
    """A process of Celery's pool ends without ``atexit``."""
    _metrics.flush(last=True)


def flush() -> None:
    """Write the figures to Redis now, instead of within the next five seconds."""
    _metrics.flush()
