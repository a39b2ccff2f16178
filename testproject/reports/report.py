"""The report that is slow to compute: what the cache is for."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime

from django.core.cache import cache
from django.db.models import Sum
from django.db.models.functions import TruncMonth
from django.utils import timezone

from .models import Sale

REPORT_KEY = "sales-report"
REPORT_LIFETIME = 60

STEPS = 20
#: In each step: seconds of waiting, which stand for a slow database, and months to simulate, which
#: keep a processor busy. Real reports take both, and nine at once get in each other's way.
PAUSE = 0.04
SIMULATIONS = 5_000


@dataclass(frozen=True)
class Report:
    """Sales by month, and what the next thirty days may bring.

    Attributes:
        months: first day of the month, total.
        low, high: nine in ten simulated months lie between them.
        seconds: the time it took.
        process: the id of the process that computed it.
    """

    months: list[tuple[date, float]]
    low: float
    high: float
    computed_at: datetime
    seconds: float
    process: int


def sales_report(progress: Callable[[float], None] = lambda share: None) -> Report:
    """Compute the report, which takes a second or two.

    Args:
        progress: told after each step which share of the work is done.
    """
    began = time.monotonic()
    by_month = Sale.objects.annotate(month=TruncMonth("day")).values_list("month")
    months = [(m, float(total)) for m, total in by_month.annotate(Sum("amount")).order_by("month")]
    by_day = Sale.objects.values_list("day").annotate(Sum("amount")).order_by("day")
    days = [float(total) for _, total in by_day] or [0.0]
    outcomes: list[float] = []
    for step in range(1, STEPS + 1):
        time.sleep(PAUSE)
        outcomes += (sum(random.choices(days, k=30)) for _ in range(SIMULATIONS))
        progress(step / STEPS)
    outcomes.sort()
    return Report(
        months=months,
        low=outcomes[len(outcomes) // 20],
        high=outcomes[-len(outcomes) // 20],
        computed_at=timezone.now(),
        seconds=time.monotonic() - began,
        process=os.getpid(),
    )


def cached_sales_report() -> Report:
    """The report from the cache; computed once, whoever else asks at the same time."""
    report: Report = cache.get_or_set(REPORT_KEY, sales_report, REPORT_LIFETIME)
    return report
