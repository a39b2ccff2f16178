"""Texts of the admin page: durations, holders, and names that users have chosen."""

from __future__ import annotations

import json
import math

from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..formatting import DurationFormat
from ..protocol import Owner, printable


def _localised(number: str) -> str:
    return number_format(float(number), len(number.partition(".")[2]))


_FORMAT = DurationFormat(
    (
        gettext_lazy("under 1 s"),
        gettext_lazy("%(seconds)d s"),
        gettext_lazy("%(minutes)d min %(seconds)d s"),
        gettext_lazy("%(hours)d h %(minutes)d min"),
        gettext_lazy("%(days)d d %(hours)d h"),
    ),
    (
        gettext_lazy("%(n)s µs"),
        gettext_lazy("%(n)s ms"),
        gettext_lazy("%(n)s s"),
        gettext_lazy("%(n)s min"),
        gettext_lazy("%(n)s h"),
        gettext_lazy("%(n)s d"),
    ),
    _localised,
)
duration, brief, measured = _FORMAT.duration, _FORMAT.brief, _FORMAT.measured


def duration_patterns() -> str:
    """The patterns of ``duration`` for the page's script, as JSON."""
    return json.dumps([str(pattern) for pattern in _FORMAT.pairs])


def shown(text: str, limit: int = 200) -> str:
    """A name that a user has chosen, on one line and bounded."""
    return printable(text.encode(errors="backslashreplace"), limit)


def place(owner: Owner) -> str:
    if not owner.host:
        return _("unknown (%(id)s)") % {"id": owner.id}
    return _("%(host)s, process %(process)d, thread %(thread)s") % {
        "host": shown(owner.host),
        "process": owner.pid,
        "thread": shown(owner.thread),
    }


def short_place(owner: Owner) -> str:
    """For a table: ``web-1:4711``, and the thread unless it is the main one."""
    if not owner.host:
        return _("unknown (%(id)s)") % {"id": owner.id}
    thread = "" if owner.thread in ("", "MainThread") else f" {shown(owner.thread)}"
    return f"{shown(owner.host)}:{owner.pid}{thread}"


def seconds_or_none(seconds: float | None) -> float | None:
    """For JSON, which has no infinity."""
    return None if seconds is None or math.isinf(seconds) else round(seconds, 1)
