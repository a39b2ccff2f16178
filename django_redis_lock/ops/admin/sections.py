"""Sections of the pages: how locks behave, by the figures of ``metrics``, and
the locks by process: which each holds, which it waits for, and deadlocks."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from django.http import QueryDict
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...extension import PartMissing, part
from ...threads import may_log
from ..facts import EVENTS, short_place, shown
from ..held_locks import UNAVAILABLE, HeldLock, held_locks, latest_events, look_closely
from ..inventory import LOCK
from .rows import Ref, UrlOf, as_of, duration, failure_rows, measured, news_rows, ref_of, row

if TYPE_CHECKING:
    from ...contrib.metrics import Distribution, Summary

logger = logging.getLogger("django_redis_lock.admin")

_logged_at: dict[tuple[str, str], float] = {}

#: The most groups that the page shows: the busiest.
MAX_GROUPS = 200
PERIODS = {"hour": gettext_lazy("last hour"), "day": gettext_lazy("last day")}
#: The most locks whose waiters are read: each takes a request.
MAX_CONTENDED_LOCKS = 100


def log_failure(text: str, alias: str, error: object) -> None:
    """At most once a minute: a page that stays open asks every few seconds."""
    if may_log((text, alias), _logged_at):
        logger.warning(text, alias, error)


# -- how locks behave ------------------------------------------------------------------------------


def behaviour_section(
    aliases: Iterable[str],
    held: Sequence[HeldLock],
    search: str,
    address: Callable[..., str],
    groups: Collection[str] | None = None,
) -> dict[str, object]:
    """``search``: only groups whose names contain this; ``address`` returns the query
    string of the list of a group's locks; ``groups``: no others than these."""
    said = {"rows": [], "nothing": _("No figures yet."), "left_out": 0, "periods": PERIODS.values()}
    try:
        site_of = part("metrics").site_of
    except PartMissing as missing:
        return {**said, "nothing": f"{missing}."}
    sites = {site_of(alias): alias for alias in reversed(list(aliases))}
    now = Counter((site_of(holding.alias), holding.group) for holding in held)
    failed = not sites
    found: list[tuple[str, dict[str, Summary]]] = []
    for alias in sites.values():
        try:
            found += (
                (alias, of)
                for of in _groups(alias)
                if search.lower() in _name(of).lower() and (groups is None or _name(of) in groups)
            )
        except UNAVAILABLE as error:
            log_failure("The figures of the cache %s cannot be read: %s", alias, error)
            failed = True
    found.sort(key=lambda pair: (-pair[1]["day"].events, _name(pair[1]), pair[0]))
    rows = []
    for alias, of in found[:MAX_GROUPS]:
        number = now[site_of(alias), _name(of)]
        rows.append(
            {
                "name": shown(_name(of)),
                "address": address(q=_name(of)) if number else "",
                "held": number,
                "alias": alias,
                "periods": [behaviour_row(of[period]) for period in PERIODS],
            }
        )
    if failed:
        said["nothing"] = _("The figures cannot be read: Redis did not answer as it should.")
    return {**said, "rows": rows, "left_out": max(0, len(found) - MAX_GROUPS)}


def _groups(alias: str) -> Iterator[dict[str, Summary]]:
    counted = {p: {s.group: s for s in part("metrics").summaries(alias, p)} for p in PERIODS}
    for group in {group: None for of in counted.values() for group in of}:
        yield {
            p: counted[p].get(group) or part("metrics").Summary.of(group, p, []) for p in PERIODS
        }


def _name(of: dict[str, Summary]) -> str:
    return of["day"].group or ""


def behaviour_of(alias: str, group: str) -> list[dict[str, Any]]:
    """The figures of one group in each period; empty if they cannot be read."""
    try:
        found = [part("metrics").summary(alias, group, period) for period in PERIODS]
    except PartMissing:
        return []
    except UNAVAILABLE as error:
        log_failure("The figures of the cache %s cannot be read: %s", alias, error)
        return []
    return [behaviour_row(one) for one in found]


def behaviour_row(one: Summary) -> dict[str, object]:
    name = shown(one.group or "")
    return {
        "period": PERIODS[one.period],
        "summary": one,
        "over_time": _over_time(one, name),
        "success": _percent(one.success_rate),
        "wait": _times(one.waits),
        "hold": _times(one.holds),
        "holds": _chart(one.holds, _("How long %(name)s was held") % {"name": name}),
        "problems": _problems(one),
        "computed_text": _computed(one),
        "hits": _hits(one),
        "computing": _chart(
            one.computations, _("How long %(name)s took to compute") % {"name": name}
        ),
    }


def _problems(one: Summary) -> list[dict[str, object]]:
    """Faults of a lock or of Redis are alarming."""
    counted: list[tuple[int, str, bool]] = [
        (one.rejected, _("%(number)s rejected"), False),
        (one.timeouts, _("%(number)s timed out"), False),
        (one.lost, _("%(number)s lost"), True),
        (one.crashed, _("%(number)s crashed"), True),
        (one.failed, _("%(number)s failed"), False),
        (one.fallbacks + one.without_redis, _("%(number)s without Redis"), True),
    ]
    return [
        {"text": text % {"number": number_format(number)}, "is_alarming": is_alarming}
        for number, text, is_alarming in counted
        if number
    ]


def _computed(one: Summary) -> str:
    texts = []
    if one.reads:
        texts.append(_("%(share)s hits") % {"share": _percent(one.hit_ratio)})
    if one.computed or one.saved:
        numbers = {"computed": number_format(one.computed), "saved": number_format(one.saved)}
        texts.append(_("%(computed)s computed, %(saved)s saved") % numbers)
    return ", ".join(texts)


def _hits(one: Summary) -> str:
    if not one.reads:
        return "-"
    numbers = {"share": _percent(one.hit_ratio), "reads": number_format(one.reads)}
    return _("%(share)s of %(reads)s reads") % numbers


def _over_time(one: Summary, name: str) -> str:
    if not one.acquisitions:
        return ""
    minutes = part("metrics").PERIODS[one.period].width // 60
    most = max(one.acquisitions_over_time)
    chart: str = part("metrics").sparkline_svg(
        one.acquisitions_over_time,
        _("Acquisitions of %(name)s over time") % {"name": name},
        _("%(most)d at most in %(minutes)d min") % {"most": most, "minutes": minutes},
    )
    return chart


def _chart(distribution: Distribution, title: str) -> str:
    half, p95 = distribution.quantile(0.5), distribution.p95
    if half is None:
        return ""
    told = _("Half within %(half)s.") % {"half": measured(half)}
    if p95 is not None:
        said = _("Half within %(half)s, 95 %% within %(most)s.")
        told = said % {"half": measured(half), "most": measured(p95)}
    size = {"width": 200, "height": 56}
    chart: str = part("metrics").histogram_svg(distribution, title, told, **size, shown=measured)
    return chart


def _times(distribution: Distribution) -> str:
    """The average and, with enough samples, the time of 95 %. Lines break only between the two."""
    if distribution.average is None:
        return "-"
    average = measured(distribution.average).replace(" ", "\xa0")
    if distribution.p95 is None:
        return average
    return f"{average}\xa0/ " + measured(distribution.p95).replace(" ", "\xa0")


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return _("%(number)s %%") % {"number": number_format(share * 100, 0 if share == 1 else 1)}


# -- latest events ---------------------------------------------------------------------------------


def events_data(
    query: QueryDict, url_of: UrlOf, may_view: Callable[[Ref], bool]
) -> dict[str, object]:
    """Those of one host or one kind, as a query like ``?host=web-1&what=crashed`` asks."""
    news, failures = latest_events()
    news = [each for each in news if may_view(Ref(each.alias, each.event.lock, LOCK))]
    hosts = sorted({shown(each.event.owner.host) for each in news} - {""})
    kinds = {what: text for what, text in EVENTS.items() if what != "released"}
    host, what = query.get("host", ""), query.get("what", "")
    rows = news_rows(
        [
            each
            for each in news
            if host in ("", shown(each.event.owner.host)) and what in ("", each.event.what)
        ],
        url_of,
    )
    nothing = _("No event matches.") if news else _("Nothing went wrong in the last day.")
    return {
        "rows": rows,
        "nothing": "" if rows or failures else nothing,
        "choices": [
            {"name": "what", "title": _("Event"), "chosen": what, "options": kinds.items()},
            {
                "name": "host",
                "title": _("Host"),
                "chosen": host,
                "options": zip(hosts, hosts, strict=True),
            },
        ],
        "filtered": bool(host or what),
        "failures": failure_rows(failures),
        "as_of": as_of(),
    }


# -- by process ------------------------------------------------------------------------------------

#: Host, pid and name.
Thread = tuple[str, int, str]


class Wait(NamedTuple):
    thread: Thread
    holding: HeldLock
    waited: float | None


def waits_of(found: Sequence[HeldLock]) -> list[Wait]:
    # Of a lock with places, one of them: its waiters wait for any.
    contended = {(h.alias, h.lock.lock_key): h for h in found if h.lock.waiters}
    waits = []
    for holding in islice(contended.values(), MAX_CONTENDED_LOCKS):
        try:
            _holding, closely = look_closely(holding.alias, holding.lock.key, LOCK)
        except UNAVAILABLE:
            continue  # The list reports the error.
        waits += [
            Wait((one.host, one.pid, one.thread), holding, one.waited)
            for one in closely.waiters
            if one.host
        ]
    return waits


def processes_data(url_of: UrlOf, may_view: Callable[[Ref], bool]) -> dict[str, object]:
    held = held_locks(kinds=(LOCK,))
    in_sight = [holding for holding in held.found if may_view(ref_of(holding))]
    processes = by_process(in_sight, waits_of(in_sight), url_of)
    return {
        "processes": None if held.failures and not processes else processes,
        "blocked": any(process["is_blocked"] for process in processes),
        "failures": failure_rows(held.failures),
        "as_of": as_of(),
    }


def by_process(
    found: Sequence[HeldLock], waits: Sequence[Wait], url_of: UrlOf
) -> list[dict[str, Any]]:
    """First those in a deadlock, then those with most locks."""
    holds: defaultdict[tuple[str, int], list[object]] = defaultdict(list)
    chains: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
    for holding in found:
        owner = holding.lock.owner
        if owner.host and not (holding.lock.resting or holding.lock.queued):
            holds[owner.host, owner.pid].append(_lock_row(holding, url_of))
    waiting = {wait.thread: wait for wait in waits}
    for wait in waits:
        chains[wait.thread[:2]].append(_chain_row(wait, waiting, url_of))
    rows = [
        {
            "name": f"{shown(host)}:{pid}",
            "is_blocked": any(chain["is_cycle"] for chain in chains[host, pid]),
            "holds": holds[host, pid],
            "waits": chains[host, pid],
        }
        for host, pid in sorted({*holds, *chains})
    ]
    return sorted(rows, key=lambda row: (not row["is_blocked"], -len(row["holds"])))


def _lock_row(holding: HeldLock, url_of: UrlOf) -> dict[str, object]:
    return {
        "row": row(holding, url_of) if holding.lock.silent else None,
        "name": shown(holding.name),
        "url": url_of(ref_of(holding)),
        "text": _for(holding.lock.held_for),
        "held_by": _("held by %(holder)s") % {"holder": short_place(holding.lock.owner)},
    }


def _chain_row(first: Wait, waiting: dict[Thread, Wait], url_of: UrlOf) -> dict[str, Any]:
    locks, is_cycle = _chain(first, waiting)
    return {
        "locks": [_lock_row(holding, url_of) for holding in locks],
        "is_cycle": is_cycle,
        "text": _for(first.waited),
    }


def _chain(wait: Wait, waiting: dict[Thread, Wait]) -> tuple[list[HeldLock], bool]:
    """The locks along a chain of holders that wait themselves, and whether the last holder is a
    thread of the chain: a deadlock."""
    locks, seen = [], {wait.thread}
    while True:
        locks.append(wait.holding)
        if (wait.holding.lock.limit or 1) > 1:  # Another of its holders may leave first.
            return locks, False
        owner = wait.holding.lock.owner
        holder = owner.host, owner.pid, owner.thread
        if holder in seen or holder not in waiting:
            return locks, holder in seen
        seen.add(holder)
        wait = waiting[holder]


def _for(seconds: float | None) -> str:
    return "" if seconds is None else _("for %(duration)s") % {"duration": duration(seconds)}
