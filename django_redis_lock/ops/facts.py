"""The facts of a held lock in words: the admin shows them in the user's language, the commands in
English."""

from __future__ import annotations

import math
from functools import partial

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..formatting import DurationFormat
from ..protocol import Owner, printable
from .inventory import FLIGHT, LockInfo

#: The states of a holder, the most urgent first.
STATUSES = {
    "broken": gettext_lazy("cannot be read"),
    "silent": gettext_lazy("silent"),
    "expiring": gettext_lazy("expiring"),
    "unknown": gettext_lazy("not known"),
    "alive": gettext_lazy("alive"),
    "queued": gettext_lazy("queued"),
    "resting": gettext_lazy("resting"),
}
EVENTS = {
    "released": gettext_lazy("released"),
    "lost": gettext_lazy("lost"),
    "reset": gettext_lazy("released by force"),
    "crashed": gettext_lazy("crashed, or cut off"),
}
#: A lock without renewal is expiring if at most this share of its lifetime, and at most this many
#: seconds, are left.
LAST_SHARE, LAST_SECONDS = 0.2, 60.0

#: A name that a user has chosen, on one line and bounded.
shown = partial(printable, limit=200)


def facts(lock: LockInfo, words: DurationFormat) -> dict[str, str]:
    """Each fact of a held lock, by its name; empty if there is nothing to say.

    Args:
        words: how a duration is written.
    """
    endless, owner = math.isinf(lock.ttl), lock.owner
    silent_for = "" if lock.seen is None else words.duration(lock.seen)
    places = taken(lock)
    number = _("Place %(number)d") % {"number": lock.place}
    renewed = _("renewed") if lock.renews else _("not renewed")
    stoppable = owner.host and not (lock.resting or lock.queued) and lock.kind != FLIGHT
    return {
        "state": status_of(lock),
        "label": shown(owner.label),
        "doing": shown(owner.doing),
        "place": "-" if lock.resting else place(owner),
        "spot": "-" if lock.resting else short_place(owner),
        "number": number if places else "",
        "taken": places,
        "kind": _("computation") if lock.kind == FLIGHT else "",
        "seen": silent_for,
        "silent_for": silent_for if lock.silent else "",
        "broken": ", ".join(lock.broken),
        "unannounced": _("no heartbeat yet") if lock.unannounced else "",
        "held": "-" if lock.held_for is None else words.duration(lock.held_for),
        "left": _("never expires") if endless else words.duration(lock.ttl),
        "renewal": "" if lock.renews is None or endless else renewed,
        "waiters": "-" if lock.waiters is None else str(lock.waiters),
        "fence": "-" if lock.fence is None else str(lock.fence),
        "verdict": _verdict(lock),
        "kill": f"kill -TERM {owner.pid}" if stoppable else "",
    }


def is_in_trouble(lock: LockInfo) -> bool:
    """Whether the holder is silent, or the lock never expires."""
    return bool(lock.silent) or math.isinf(lock.ttl)


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


def taken(lock: LockInfo) -> str:
    """As ``3 of 5`` places; empty for a plain lock."""
    if (lock.limit or 1) == 1:
        return ""
    return _("%(taken)d of %(limit)d") % {"taken": lock.taken, "limit": lock.limit}


def status_of(lock: LockInfo) -> str:
    """One of STATUSES."""
    if lock.resting:
        return "resting"
    if lock.broken:
        return "broken"
    if lock.silent:
        return "silent"
    last = min(LAST_SECONDS, LAST_SHARE * (lock.lifetime or 0.0))
    if lock.renews is False and lock.ttl <= last:
        return "expiring"
    if lock.queued:
        return "queued"
    return "unknown" if lock.silent is None else "alive"


def _verdict(lock: LockInfo) -> str:
    if lock.resting:
        return _("Its holder has released it; it stays taken until its min_hold is over.")
    if lock.broken:
        return _(
            "Other data is stored at keys of this lock, so some values are missing. "
            "Delete those keys to repair it."
        )
    if lock.unannounced:
        return _(
            "Its process has sent no heartbeat yet: it acquired the lock less than half a second "
            "ago, or died so soon."
        )
    if lock.queued:
        return _("A task is queued, which no process runs yet. The process shown has sent it.")
    if lock.silent is None:
        return _("The holder is not known: its token names no process, as those of other programs.")
    if not lock.silent:
        return _("Its process is alive. This does not show whether its work makes progress.")
    if math.isinf(lock.ttl):
        return _(
            "Its process has crashed, is stopped, or is cut off from Redis. The lock never "
            "expires, so it stays taken until it is released."
        )
    return _(
        "Its process has crashed, is stopped, or is cut off from Redis. Unless it comes back, "
        "the lock expires when no time is left."
    )
