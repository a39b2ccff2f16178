"""Figures of locks and computations: each process counts, Redis adds up.

``summary()`` and ``summaries()`` read the figures of all processes for the last hour or day.
Counting needs no extra round trip: the keeper writes new figures every few seconds, and at its end
the process writes the rest, if Redis answers at once. A write that fails is repeated with the
figures since. (If only its reply was lost, these figures count twice.) See ``docs/monitoring.md``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from ... import events
from ...events import group_of
from ...extension import on_first_use
from .collecting import Metrics
from .figures import BOUNDS, EXPORTED_BOUNDS, OTHER, PERIODS

if TYPE_CHECKING:
    from .charts import histogram_svg, sparkline_svg
    from .report import Distribution, Summary, site_of, summaries, summary

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

#: A process that counts does not read the figures of all processes.
__getattr__ = on_first_use(
    __name__,
    {
        "contrib.metrics.charts": "histogram_svg sparkline_svg",
        "contrib.metrics.report": "Distribution Summary site_of summaries summary",
    },
)

_metrics = Metrics()
forget = _metrics.forget


def start() -> None:
    """Count from now on."""
    events.subscribe(_metrics.count)
    events.count_read = _metrics.count_read
    events.usual_hold = _metrics.usual_hold
    if "celery" in sys.modules:  # As in ``note_tasks``.
        import_module("celery.signals").worker_process_shutdown.connect(_end)


def _end(**kwargs: object) -> None:
    """A process of Celery's pool ends without ``atexit``."""
    _metrics.flush(last=True)


def flush() -> None:
    """Write the figures to Redis now, instead of within the next five seconds."""
    _metrics.flush()
