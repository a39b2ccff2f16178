"""Something for the report to count and the invoices to be about."""

from __future__ import annotations

import datetime
import random

from django.db import transaction
from django.utils import timezone

from .models import Invoice, Sale

DAYS = 365
CUSTOMERS = ("Corner Bakery", "Harbour Hotel", "City Library", "Hilltop School", "Old Mill Press")


@transaction.atomic
def create_sample_data() -> None:
    """Fill the tables that are empty."""
    chance = random.Random("the same shop each time")
    if not Sale.objects.exists():
        today = timezone.localdate()
        Sale.objects.bulk_create(
            Sale(
                day=today - datetime.timedelta(days=ago), amount=chance.randint(2_000, 40_000) / 100
            )
            for ago in range(DAYS)
            for _ in range(chance.randint(1, 6))
        )
    if not Invoice.objects.exists():
        Invoice.objects.bulk_create(
            Invoice(customer=customer, amount=chance.randint(5_000, 90_000) / 100)
            for customer in CUSTOMERS
        )
