from __future__ import annotations

import asyncio
import time

from django.contrib import messages
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST

from django_redis_lock import locked
from django_redis_lock.contention import redirect_to

from .models import Invoice, Sale
from .report import REPORT_KEY, REPORT_LIFETIME, cached_sales_report

#: Seconds the mail server takes.
SENDING = 5
#: Seconds to collect all sales.
EXPORTING = 3


def home(request: HttpRequest) -> HttpResponse:
    return render(request, "reports/home.html", {"invoices": Invoice.objects.all()})


def report(request: HttpRequest) -> HttpResponse:
    began = time.monotonic()
    found = cached_sales_report()
    context = {
        "report": found,
        "most": max((total for _, total in found.months), default=0),
        "waited": time.monotonic() - began,
        "lifetime": REPORT_LIFETIME,
    }
    return render(request, "reports/report.html", context)


@require_POST
def forget_report(request: HttpRequest) -> HttpResponse:
    cache.delete(REPORT_KEY)
    messages.success(request, "The report is forgotten. The next request computes it.")
    return redirect("home")


@require_POST
@locked("invoice-{pk}", label="Send an invoice")
def send_invoice(request: HttpRequest, pk: int) -> HttpResponse:
    """Never twice at once for one invoice; two invoices can be sent at the same time."""
    invoice = get_object_or_404(Invoice, pk=pk)
    time.sleep(SENDING)
    invoice.sent_at = timezone.now()
    invoice.save(update_fields=["sent_at"])
    messages.success(request, f"Sent {invoice}.")
    return redirect("home")


@locked(
    "export-sales",
    blocking=True,
    blocking_timeout=10,
    on_conflict=redirect_to("home", message="Others are exporting. Please try again."),
    label="Export the sales",
)
async def export_sales(request: HttpRequest) -> HttpResponse:
    """One at a time, so that the database is not read for all at once; the others wait a little."""
    sales = Sale.objects.order_by("day").values_list("day", "amount")
    await asyncio.sleep(EXPORTING)
    lines = [f"{day},{amount}" async for day, amount in sales]
    attachment = {"Content-Disposition": "attachment; filename=sales.csv"}
    return HttpResponse("\n".join(["day,amount", *lines, ""]), "text/csv", headers=attachment)
