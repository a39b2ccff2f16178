"""A held lock as the page has it: its texts, which the page's script inserts, and how URLs and
forms identify it and the holder that was shown."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple
from urllib.parse import urlencode

from django.utils.formats import date_format, number_format
from django.utils.timezone import get_current_timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...events import Outage
from ...formatting import ENGLISH, DurationFormat
from ...history import Event
from ...protocol import Owner
from ..facts import EVENTS, STATUSES, facts, place, short_place, shown
from ..held_locks import Failure, HeldLock, News
from ..inventory import FLIGHT, LOCK, LockInfo, WaiterInfo


def _localised(number: str) -> str:
    return number_format(float(number), len(number.partition(".")[2]))


FORMAT = DurationFormat(
    tuple(map(gettext_lazy, ENGLISH.pairs)), tuple(map(gettext_lazy, ENGLISH.units)), _localised
)
duration, brief, measured = FORMAT.duration, FORMAT.brief, FORMAT.measured


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


def row(holding: HeldLock, url_of: UrlOf) -> dict[str, object]:
    lock, ref, owner = holding.lock, ref_of(holding), holding.lock.owner
    of_it, name = facts(lock, FORMAT), shown(holding.name)
    numbered = " · ".join(filter(None, (of_it["number"], of_it["taken"])))
    return {
        **of_it,
        "id": f"{ref}.{owner.id}",  # A row stays where its lock's fence becomes known.
        "choice": str(choice_of(holding)),
        "url": url_of(ref),
        "name": name,
        "select": _("Select %(name)s") % {"name": name},
        "purpose": " · ".join(filter(None, (of_it["label"], of_it["doing"]))),
        "kind_label": of_it["kind"] or numbered,
        "where": _("whole key") if holding.foreign else "",
        "of_holder": urlencode({"q": f"{owner.host}:{owner.pid}"}) if owner.host else "",
        "said": _said(of_it),
        "sign": _sign(lock),
        "since": "" if owner.since is None else _since(owner.since),
        "alias": holding.alias,
        "owner_id": owner.id if owner.host else "",  # Else it is in the place.
        # Of what counts on, the seconds and the text.
        "seen": seconds_or_none(lock.seen),
        "seen_text": of_it["seen"],
        "silent_for": seconds_or_none(lock.seen) if lock.silent else None,
        "silent_for_text": of_it["silent_for"],
        "held": seconds_or_none(lock.held_for),
        "held_text": of_it["held"],
        "left": seconds_or_none(lock.ttl),
        "left_text": of_it["left"],
        "bar": None if math.isinf(lock.ttl) else seconds_or_none(lock.lifetime),
    }


def holder_rows(locks: Sequence[LockInfo]) -> list[dict[str, object]]:
    """The holders of all places of a lock with a limit, in the form of events."""
    return [
        {
            "id": f"{lock.place} {lock.owner.id}",
            "at": of_it["number"],
            "what": place(lock.owner),
            "text": "" if lock.held_for is None else of_it["held"],
            "label": of_it["label"],
            "doing": of_it["doing"],
            "note": "",
        }
        for lock in sorted(locks, key=lambda lock: lock.place)
        if (of_it := facts(lock, FORMAT))["taken"]
    ]


def _said(of_it: dict[str, str]) -> str:
    state = str(STATUSES[of_it["state"]])
    said = [f"{state}: {of_it['broken']}"] if of_it["state"] == "broken" else []
    said.append(_("silent for") if of_it["silent_for"] else of_it["unannounced"])
    return " · ".join(filter(None, said)) or state


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
    rows = event_rows([each.event for each in news])
    return [
        {
            **row,
            "id": f"{each.alias} {each.name} {row['id']}",
            "name": shown(each.name),
            "url": url_of(Ref(each.alias, each.event.lock, LOCK)),
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
