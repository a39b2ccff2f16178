"""A held lock as the page has it: its texts, which the page's script inserts, and how URLs and
forms identify it and the holder that was shown."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import NamedTuple
from urllib.parse import urlencode

from django.utils.formats import date_format, number_format
from django.utils.timezone import get_current_timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...events import Outage
from ...formatting import DurationFormat
from ...history import Event
from ...protocol import Owner, printable
from ..held_locks import Failure, HeldLock, News
from ..inventory import FLIGHT, LOCK, LockInfo, WaiterInfo


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
    """For the page's script, as JSON."""
    return json.dumps([str(pattern) for pattern in _FORMAT.pairs])


#: A name that a user has chosen, on one line and bounded.
shown = partial(printable, limit=200)


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


class Ref(NamedTuple):
    """A lock or computation; not its holder."""

    alias: str
    key: bytes
    kind: str

    def __str__(self) -> str:
        """For URLs: letters, digits, ``-`` and ``~``; the admin's log would quote ``_``."""
        parts = (self.kind.encode(), self.alias.encode(), self.key)
        return base64.b64encode(b"\0".join(parts), b"-~").rstrip(b"=").decode()

    @classmethod
    def parse(cls, text: str) -> Ref | None:
        """The reverse of ``str``; None for any other text."""
        try:
            packed = base64.b64decode(text + "=" * (-len(text) % 4), b"-~")
            kind, alias, key = packed.split(b"\0", 2)
            ref = cls(alias.decode(), key, kind.decode())
        except ValueError:
            return None
        return ref if key and ref.kind in (LOCK, FLIGHT) and str(ref) == text else None


class Choice(NamedTuple):
    """A lock and the holder that was shown, to release exactly that acquisition."""

    ref: Ref
    owner_id: str
    fence: int | None

    def __str__(self) -> str:
        return f"{self.ref}.{self.owner_id}.{'' if self.fence is None else self.fence}"

    @classmethod
    def parse(cls, text: str) -> Choice | None:
        """The reverse of ``str``; None for any other text."""
        encoded, _, rest = text.partition(".")
        owner_id, _, fence = rest.partition(".")
        ref = Ref.parse(encoded)
        if ref is None or not owner_id or not (fence.isascii() and (fence.isdigit() or not fence)):
            return None
        return cls(ref, owner_id, int(fence[:20]) if fence else None)


#: Returns the URL of a lock's page in the current admin site; empty if it has none.
UrlOf = Callable[[Ref], str]

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

#: A lock without renewal is expiring if at most this share of its lifetime, and at most this many
#: seconds, are left.
LAST_SHARE, LAST_SECONDS = 0.2, 60.0

EVENTS = {
    "released": gettext_lazy("released"),
    "lost": gettext_lazy("lost"),
    "reset": gettext_lazy("released by force"),
    "crashed": gettext_lazy("crashed, or cut off"),
}


def row(holding: HeldLock, url_of: UrlOf) -> dict[str, object]:
    lock, ref = holding.lock, ref_of(holding)
    state, owner = status_of(lock), lock.owner
    name = shown(holding.name)
    label, doing = shown(owner.label), shown(owner.doing)
    return {
        "id": f"{ref}.{lock.owner.id}",  # A row stays where its lock's fence becomes known.
        "choice": str(choice_of(holding)),
        "url": url_of(ref),
        "name": name,
        "select": _("Select %(name)s") % {"name": name},
        "label": label,
        "doing": doing,
        "purpose": " · ".join(filter(None, (label, doing))),
        "kind_label": _("computation") if lock.kind == FLIGHT else _place_label(lock),
        "taken": taken(lock),
        "where": _("whole key") if holding.foreign else "",
        "place": "-" if lock.resting else place(lock.owner),
        "spot": "-" if lock.resting else short_place(lock.owner),
        "of_holder": urlencode({"q": f"{owner.host}:{owner.pid}"}) if owner.host else "",
        "kill": kill_command(lock),
        "state": state,
        "said": _said(lock, state),
        "seen": seconds_or_none(lock.seen),
        "seen_text": "" if lock.seen is None else duration(lock.seen),
        "silent_for": seconds_or_none(lock.seen) if lock.silent else None,
        "silent_for_text": duration(lock.seen or 0.0) if lock.silent else "",
        "verdict": _verdict(lock),
        "sign": _sign(lock),
        "held": seconds_or_none(lock.held_for),
        "held_text": "-" if lock.held_for is None else duration(lock.held_for),
        "since": "" if lock.owner.since is None else _since(lock.owner.since),
        "left": seconds_or_none(lock.ttl),
        "left_text": _("never expires") if math.isinf(lock.ttl) else duration(lock.ttl),
        "bar": None if math.isinf(lock.ttl) else seconds_or_none(lock.lifetime),
        "renewal": _renewal(lock),
        "waiters": "-" if lock.waiters is None else str(lock.waiters),
        "fence": "-" if lock.fence is None else str(lock.fence),
        "alias": holding.alias,
        "owner_id": lock.owner.id if lock.owner.host else "",  # Else it is in the place.
    }


def kill_command(lock: LockInfo) -> str:
    """What ends a holder that may still work, on its host; empty for any other."""
    stoppable = lock.owner.host and not (lock.resting or lock.queued) and lock.kind != FLIGHT
    return f"kill -TERM {lock.owner.pid}" if stoppable else ""


def taken(lock: LockInfo) -> str:
    """As ``3 of 5`` places; empty for a plain lock."""
    if (lock.limit or 1) == 1:
        return ""
    return _("%(taken)d of %(limit)d") % {"taken": lock.taken, "limit": lock.limit}


def _place_label(lock: LockInfo) -> str:
    return f"{_numbered(lock)} · {taken(lock)}" if taken(lock) else ""


def _numbered(lock: LockInfo) -> str:
    return _("Place %(number)d") % {"number": lock.place}


def holder_rows(locks: Sequence[LockInfo]) -> list[dict[str, object]]:
    """The holders of all places of a lock with a limit, in the form of events."""
    return [
        {
            "id": f"{lock.place} {lock.owner.id}",
            "at": _numbered(lock),
            "what": place(lock.owner),
            "text": "" if lock.held_for is None else duration(lock.held_for),
            "label": shown(lock.owner.label),
            "doing": shown(lock.owner.doing),
            "note": "",
        }
        for lock in sorted(locks, key=lambda lock: lock.place)
        if taken(lock)
    ]


def _said(lock: LockInfo, state: str) -> str:
    said = [f"{STATUSES[state]}: {', '.join(lock.broken)}"] if state == "broken" else []
    if lock.silent:
        said.append(_("silent for"))
    elif lock.unannounced:
        said.append(_("no heartbeat yet"))
    return " · ".join(said) or str(STATUSES[state])


def _renewal(lock: LockInfo) -> str:
    if lock.renews is None or math.isinf(lock.ttl):
        return ""
    return _("renewed") if lock.renews else _("not renewed")


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


def _sign(lock: LockInfo) -> str:
    if lock.heartbeat_interval is None:
        return ""
    return _("(one is due every %(time)s)") % {"time": duration(max(1.0, lock.heartbeat_interval))}


def choice_of(holding: HeldLock) -> Choice:
    return Choice(ref_of(holding), holding.lock.owner.id, holding.lock.fence)


def ref_of(holding: HeldLock) -> Ref:
    return Ref(holding.alias, holding.lock.key, holding.lock.kind)


def waiter_rows(waiters: Sequence[WaiterInfo]) -> list[dict[str, object]]:
    return [
        {
            "id": f"{waiter.host} {waiter.pid} {waiter.since}",
            "place": place(Owner("?", waiter.host, waiter.pid, waiter.thread)),
            "waited": seconds_or_none(waiter.waited),
            "waited_text": "-" if waiter.waited is None else duration(waiter.waited),
        }
        for waiter in waiters
    ]


def event_rows(events: Sequence[Event]) -> list[dict[str, object]]:
    return [
        {
            "id": f"{event.at} {event.what} {event.owner.id}",
            "at": moment(event.at),
            "what": _what(event),
            "text": _held_by(event),
            "label": shown(event.owner.label),
            "doing": shown(event.owner.doing),
            "note": "" if event.what == "reset" else shown(event.note),
        }
        for event in events
    ]


def news_rows(news: Sequence[News], url_of: UrlOf) -> list[dict[str, object]]:
    """Of the page of all locks: with the lock, and its holder's host to filter by."""
    rows = event_rows([each.event for each in news])
    return [
        {
            **row,
            "id": f"{each.alias} {each.name} {row['id']}",
            "name": shown(each.name),
            "url": url_of(Ref(each.alias, each.event.lock, LOCK)),
            "alias": each.alias,
            "host": shown(each.event.owner.host),
            "spot": short_place(each.event.owner),
            "is_alarming": each.event.what != "reset",
        }
        for row, each in zip(rows, news, strict=True)
    ]


def _what(event: Event) -> str:
    if event.what == "reset" and event.note:
        return _("released by force by %(user)s") % {"user": shown(event.note)}
    return str(EVENTS.get(event.what, shown(event.what)))


def _held_by(event: Event) -> str:
    holder = short_place(replace(event.owner, id=shown(event.owner.id)))
    if event.held is None:
        return _("held by %(holder)s") % {"holder": holder}
    held = duration(event.held)
    return _("held for %(held)s by %(holder)s") % {"held": held, "holder": holder}


def as_of() -> str:
    now = date_format(datetime.now(get_current_timezone()), "H:i:s T")
    return _("as of %(time)s") % {"time": now}


def moment(at: float) -> str:
    return date_format(datetime.fromtimestamp(at, get_current_timezone()), "Y-m-d H:i:s T")


def _since(at: float) -> str:
    """As ``moment``, without the date if that is today."""
    then = datetime.fromtimestamp(at, get_current_timezone())
    today = datetime.now(get_current_timezone()).date()
    return date_format(then, "H:i:s T") if then.date() == today else moment(at)


def status_of(lock: LockInfo) -> str:
    """One of STATUSES."""
    if lock.resting:
        return "resting"
    if lock.broken:
        return "broken"
    if lock.silent:
        return "silent"
    if _is_expiring(lock):
        return "expiring"
    if lock.queued:
        return "queued"
    return "unknown" if lock.silent is None else "alive"


def _is_expiring(lock: LockInfo) -> bool:
    if lock.renews is not False or lock.lifetime is None or math.isinf(lock.ttl):
        return False
    return lock.ttl <= min(LAST_SECONDS, LAST_SHARE * lock.lifetime)


def failure_rows(failures: Sequence[Failure]) -> list[dict[str, str]]:
    text = _("The cache “%(alias)s” cannot be read: Redis did not answer as it should.")
    return [
        {
            "id": failure.alias,
            "text": text % {"alias": shown(failure.alias)},
            "error": failure.error,
            "known": " ".join(map(_known, failure.outages)),
        }
        for failure in failures
    ]


def _known(outage: Outage) -> str:
    said = _(
        "%(server)s has not answered this process for %(duration)s. "
        "Calls that failed at once since then: %(spared)d; locks taken without it: %(fallbacks)d."
    )
    known = {"server": shown(outage.server), "duration": duration(outage.seconds)}
    return said % {**outage._asdict(), **known}
