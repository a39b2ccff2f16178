"""How the admin page says things: durations, places, and whatever others have named."""

from __future__ import annotations

import json
import math

from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..protocol import Owner, printable

__all__ = [
    "brief",
    "duration",
    "duration_patterns",
    "place",
    "precise",
    "seconds_or_none",
    "short_place",
    "shown",
]

#: Two units at most; the page's script fills the same patterns in.
UNDER_A_SECOND = gettext_lazy("under 1 s")
SECONDS = gettext_lazy("%(seconds)d s")
MINUTES = gettext_lazy("%(minutes)d min %(seconds)d s")
HOURS = gettext_lazy("%(hours)d h %(minutes)d min")
DAYS = gettext_lazy("%(days)d d %(hours)d h")


def duration(seconds: float) -> str:
    """``seconds`` as people say it, in the two largest units."""
    whole = int(min(seconds, 1e12))
    minutes, s = divmod(whole, 60)
    hours, min_ = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    patterns = ((days, DAYS), (hours, HOURS), (minutes, MINUTES), (whole, SECONDS))
    pattern = next((pattern for count, pattern in patterns if count), UNDER_A_SECOND)
    return str(pattern) % {"days": days, "hours": h, "minutes": min_, "seconds": s}


def brief(seconds: float) -> str:
    """``seconds`` in the largest unit, for counts and choices: ``3 min``."""
    whole = int(min(seconds, 1e12))
    for size, pattern in ((86400, _("%(n)s d")), (3600, _("%(n)s h")), (60, _("%(n)s min"))):
        if whole >= size:
            return pattern % {"n": number_format(whole // size)}
    return str(SECONDS) % {"seconds": whole} if whole else str(UNDER_A_SECOND)


def precise(seconds: float) -> str:
    """A measured time, with three digits below a minute: ``250 µs``, ``2.5 ms``, ``2 min 1 s``."""
    if seconds >= 59.95:
        return duration(round(seconds))
    units = ((1.0, _("%(n)s s")), (1e-3, _("%(n)s ms")))
    size, pattern = next((u for u in units if seconds >= u[0] * 0.9995), (1e-6, _("%(n)s µs")))
    text = f"{seconds / size:.0f}" if seconds / size >= 99.95 else f"{seconds / size:.3g}"
    return pattern % {"n": number_format(float(text), len(text.partition(".")[2]))}


def duration_patterns() -> str:
    """What the page's script needs to say durations as ``duration`` does, as JSON."""
    return json.dumps([str(p) for p in (UNDER_A_SECOND, SECONDS, MINUTES, HOURS, DAYS)])


def shown(text: str, limit: int = 200) -> str:
    """What others have named, on one line and bounded."""
    return printable(text.encode(errors="backslashreplace"), limit)


def place(owner: Owner) -> str:
    """Where a holder runs."""
    if not owner.host:
        return _("not known (%(id)s)") % {"id": owner.id}
    return _("%(host)s, process %(process)d, thread %(thread)s") % {
        "host": shown(owner.host),
        "process": owner.pid,
        "thread": shown(owner.thread),
    }


def short_place(owner: Owner) -> str:
    """The same in one line of a table: ``web-1:4711``, with its thread only if it is another than
    the main one."""
    if not owner.host:
        return _("not known (%(id)s)") % {"id": owner.id}
    thread = "" if owner.thread in ("", "MainThread") else f" {shown(owner.thread)}"
    return f"{shown(owner.host)}:{owner.pid}{thread}"


def seconds_or_none(seconds: float | None) -> float | None:
    """``seconds`` as JSON can say it."""
    return None if seconds is None or math.isinf(seconds) else round(seconds, 1)
