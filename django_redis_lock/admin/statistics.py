"""How locks behave: the figures of ``metrics`` for each group of names, formatted for the page."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from django.template.loader import render_to_string
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..held_locks import UNAVAILABLE, HeldLock
from ..metrics import PERIODS as BUCKETS
from ..metrics import (
    Distribution,
    Summary,
    histogram_svg,
    site_of,
    sparkline_svg,
    summaries,
    summary,
)
from .rows import measured, shown

logger = logging.getLogger("django_redis_lock.admin")

#: The most groups that the page shows: the busiest.
MAX_GROUPS = 200
PERIODS = {"hour": gettext_lazy("last hour"), "day": gettext_lazy("last day")}
TEMPLATE = "admin/django_redis_lock/heldlock/behaviour.html"


def behaviour_section(
    aliases: Iterable[str],
    held: Sequence[HeldLock],
    search: str,
    address: Callable[..., str],
    many_caches: bool = False,
) -> str:
    """The section below the list, as HTML.

    Args:
        aliases: the caches to query.
        held: the locks held now, to count those of each group.
        search: only groups whose names contain this.
        address: returns the query string of the list of a group's locks.
        many_caches: whether to show the cache of each group.
    """
    sites = {site_of(alias): alias for alias in reversed(list(aliases))}
    now = Counter((site_of(holding.alias), holding.group) for holding in held)
    failed = not sites
    found: list[tuple[str, dict[str, Summary]]] = []
    for alias in sites.values():
        try:
            found += ((alias, of) for of in _groups(alias) if search.lower() in _name(of).lower())
        except UNAVAILABLE as error:
            logger.warning("The figures of the cache %s cannot be read: %s", alias, error)
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
    nothing = _("No figures yet.")
    if failed:
        nothing = _("The figures cannot be read: Redis did not answer as it should.")
    context = {
        "rows": rows,
        "nothing": nothing,
        "left_out": max(0, len(found) - MAX_GROUPS),
        "many_caches": many_caches,
        "periods": PERIODS.values(),
    }
    return render_to_string(TEMPLATE, context)


def _groups(alias: str) -> Iterator[dict[str, Summary]]:
    """For each group with any figures: its summary of each period."""
    counted = {p: {s.group: s for s in summaries(alias, p)} for p in PERIODS}
    for group in {group: None for of in counted.values() for group in of}:
        yield {p: counted[p].get(group) or Summary.of(group, p, []) for p in PERIODS}


def _name(of: dict[str, Summary]) -> str:
    return of["day"].group or ""


def behaviour_of(alias: str, group: str) -> list[dict[str, Any]]:
    """The figures of one group in each period; empty if they cannot be read."""
    try:
        found = [summary(alias, group, period) for period in PERIODS]
    except UNAVAILABLE as error:
        logger.warning("The figures of the cache %s cannot be read: %s", alias, error)
        return []
    return [behaviour_row(one) for one in found]


def behaviour_row(one: Summary) -> dict[str, Any]:
    """What the page shows of a summary, besides its numbers."""
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


def _problems(one: Summary) -> list[dict[str, Any]]:
    """What went wrong, in words. Faults of a lock or of Redis are alarming."""
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
    """What was read and computed, in words."""
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
    minutes = BUCKETS[one.period].width // 60
    most = max(one.acquisitions_over_time)
    return sparkline_svg(
        one.acquisitions_over_time,
        _("Acquisitions of %(name)s over time") % {"name": name},
        _("%(most)d at most in %(minutes)d min") % {"most": most, "minutes": minutes},
    )


def _chart(distribution: Distribution, title: str) -> str:
    half, p95 = distribution.quantile(0.5), distribution.p95
    if half is None:
        return ""
    told = _("Half within %(half)s.") % {"half": measured(half)}
    if p95 is not None:
        said = _("Half within %(half)s, 95 %% within %(most)s.")
        told = said % {"half": measured(half), "most": measured(p95)}
    return histogram_svg(distribution, title, told, width=200, height=56, shown=measured)


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
