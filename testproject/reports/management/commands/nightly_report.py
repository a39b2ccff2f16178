from __future__ import annotations

from typing import Any

from django.core.cache import cache
from django.core.management.base import BaseCommand

from django_redis_lock import locked
from testproject.reports.report import REPORT_KEY, REPORT_LIFETIME, sales_report


@locked("nightly-report", label="Nightly sales report", on_lost="terminate")
class Command(BaseCommand):
    help = "Computes the sales report afresh. Runs once at a time, on however many hosts."

    def handle(self, *args: Any, **options: Any) -> None:
        report = sales_report()
        cache.set(REPORT_KEY, report, REPORT_LIFETIME)
        self.stdout.write(f"The report took {report.seconds:.1f} s; it is in the cache.")
