"""Django signals. Receivers are called with ``send_robust``: Django logs what they raise."""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal

from .locking import events

__all__ = ["value_refresh_failed"]

#: A stale value could not be computed anew, and the old one is served on.
#: Arguments: cache (the backend), error (what the producer raised).
value_refresh_failed = Signal()


def _send(event: Any) -> None:
    if isinstance(event, events.RefreshFailed):
        cache = event.subject.cache
        value_refresh_failed.send_robust(sender=type(cache), cache=cache, error=event.error)


# Whoever wants to receive a signal imports this module first.
events.listen(_send)
