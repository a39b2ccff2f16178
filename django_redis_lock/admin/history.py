"""Who released what by hand: the admin's log of the page "Held locks"."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import get_content_type_for_model

from ..models import HeldLock
from .lock_ref import Ref
from .rows import UrlOf, moment
from .wording import shown

__all__ = ["releases"]

#: Entries shown, at most: the latest.
MOST_ENTRIES = 200


def releases(url_of: UrlOf, ref: Ref | None = None) -> list[dict[str, Any]]:
    """The releases of all locks, or of the one that ``ref`` names, the latest first."""
    entries = LogEntry.objects.filter(content_type=get_content_type_for_model(HeldLock))
    if ref is not None:
        entries = entries.filter(object_id=str(ref))
    latest = entries.select_related("user").order_by("-action_time")[:MOST_ENTRIES]
    return [
        {
            "at": moment(entry.action_time.timestamp()),
            "user": str(entry.user),
            "name": shown(entry.object_repr),
            "url": "" if (of := Ref.parse(entry.object_id or "")) is None else url_of(of),
            "message": entry.get_change_message(),
        }
        for entry in latest
    ]
