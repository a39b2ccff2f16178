"""How locks behave: the figures of ``metrics`` for each group of names, ready to be shown."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from django.http import QueryDict
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..aliases import lock_cache
from ..decorating.declared import declarations
from ..holdings import UNAVAILABLE, Holding
from ..locking.server import server_of
from ..metrics import Distribution, Summary, histogram_svg, sparkline_svg, summaries, summary
from ..metrics.charts import shown_seconds
from ..metrics.figures import new
from .words import shown

__all__ = ["Behaviour", "behaviour_of"]

logger = logging.getLogger("django_redis_lock.admin")

#: Groups shown, at most: the busiest. There are not many more: ``metrics`` bounds them.
MOST = 200
PERIODS = {"hour": gettext_lazy("last hour"), "day": gettext_lazy("last day")}


class Behaviour:
    """The groups of names that an address like ``?period=day&q=invoice`` asks for.

    Args:
        aliases: the caches to ask, which have just answered.
        held: what is held now, to say how many of each group.
        address: the address of the page with another period.
    """

    def __init__(
        self,
        query: QueryDict,
        aliases: Iterable[str],
        held: Sequence[Holding],
        address: Callable[..., str],
    ) -> None:
        self.period = period if (period := query.get("period", "")) in PERIODS else "hour"
        self._search = query.get("q", "").lower()
        self._held = Counter((_site(holding.alias), holding.group) for holding in held)
        self._address = address
        aliases = list(aliases)
        self._unread = not aliases
        found = [pair for alias in _one_of_each_site(aliases) for pair in self._of(alias)]
        found.sort(key=lambda pair: (-pair[1].events, pair[1].group or "", pair[0]))
        self.rows = [self._row(alias, summary) for alias, summary in found[:MOST]]
        self.left_out = max(0, len(found) - MOST)

    def _of(self, alias: str) -> Iterator[tuple[str, Summary]]:
        """The groups of one cache: those that were counted, and those that were declared."""
        try:
            counted = summaries(alias, self.period)
        except UNAVAILABLE as error:
            logger.warning("The figures of the cache %s cannot be read: %s", alias, error)
            self._unread = True
            return
        known = {summary.group for summary in counted}
        declared = {d.group for d in declarations() if _same_site(d.using, alias)} - known
        nothing = [Summary.of(name, self.period, [new()]) for name in declared]
        for one in (*counted, *nothing):
            if self._search in (one.group or "").lower():
                yield alias, one

    def _row(self, alias: str, summary: Summary) -> dict[str, Any]:
        held = self._held[_site(alias), summary.group or ""]
        return {**behaviour_row(summary), "alias": alias, "held": str(held or "-")}

    @property
    def nothing(self) -> str:
        """What to say instead of an empty table."""
        if self.rows:
            return ""
        if self._unread:
            return _("The figures cannot be read: Redis did not answer as it should.")
        return _("Nothing was counted.")

    def periods(self) -> list[dict[str, Any]]:
        """The periods there are, each with the address that shows it."""
        return [
            {
                "title": title,
                "address": self._address(period="" if period == "hour" else period),
                "current": period == self.period,
            }
            for period, title in PERIODS.items()
        ]


def behaviour_of(alias: str, group: str) -> list[dict[str, Any]]:
    """The figures of one group in each period; none if they cannot be read."""
    try:
        found = [summary(alias, group, period) for period in PERIODS]
    except UNAVAILABLE as error:
        logger.warning("The figures of the cache %s cannot be read: %s", alias, error)
        return []
    rows = zip(found, PERIODS.values(), strict=True)
    return [{**behaviour_row(one), "period": title} for one, title in rows]


def behaviour_row(one: Summary) -> dict[str, Any]:
    """What the page shows of a summary."""
    name = shown(one.group or "")
    over_time = ""
    if one.acquisitions:
        over_time = sparkline_svg(
            one.acquisitions_over_time,
            _("Acquisitions of %(name)s over time") % {"name": name},
            _("%(most)d at most") % {"most": max(one.acquisitions_over_time)},
        )
    return {
        "name": name,
        "acquisitions": str(one.acquisitions),
        "over_time": over_time,
        "success": _percent(one.success_rate),
        "average_wait": _seconds(one.average_wait),
        "p95_wait": _seconds(one.p95_wait),
        "average_hold": _seconds(one.holds.average),
        "holds": _chart(one.holds, _("How long %(name)s was held") % {"name": name}),
        "timeouts": str(one.timeouts),
        "refused": str(one.refused),
        "lost": str(one.lost),
        "alarming": one.lost > 0,
        "stood_in": str(one.stood_in or ""),
        "computed": str(one.computed),
        "saved": str(one.saved),
        "computes": bool(one.computed or one.saved or one.failed),
        "failed": str(one.failed),
        "acquired": one.acquisitions > 0,
        "counted": one.events > 0,
        "computing": _chart(
            one.computations, _("How long %(name)s took to compute") % {"name": name}
        ),
    }


def _chart(distribution: Distribution, title: str) -> str:
    half, most = distribution.quantile(0.5), distribution.quantile(0.95)
    if half is None or most is None:
        return ""
    said = _("Half within %(half)s, 95 %% within %(most)s.")
    told = said % {"half": shown_seconds(half), "most": shown_seconds(most)}
    return histogram_svg(distribution, title, told, width=200, height=56)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else shown_seconds(seconds)


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return _("%(number)s %%") % {"number": number_format(share * 100, 0 if share == 1 else 1)}


def _site(alias: str) -> Any:
    """Caches with the same server and key prefix have their figures together."""
    cache = lock_cache(alias)
    return server_of(cache._lock_client()).database, str(cache.key_prefix)


def _same_site(one: str, other: str) -> bool:
    try:
        return bool(one == other or _site(one) == _site(other))
    except UNAVAILABLE:
        return False


def _one_of_each_site(aliases: Iterable[str]) -> list[str]:
    first: dict[Any, str] = {}
    for alias in aliases:
        first.setdefault(_site(alias), alias)
    return list(first.values())
