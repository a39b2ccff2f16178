"""Django signals. Receivers run where the thing happens; what they raise is not passed on."""

from __future__ import annotations

from django.dispatch import Signal

__all__ = ["value_refresh_failed"]

#: A stale value could not be computed anew, and the old one is served on.
#: Arguments: cache (the backend), error (what the producer raised).
value_refresh_failed = Signal()
