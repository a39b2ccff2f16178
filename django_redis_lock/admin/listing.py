"""Which held locks the page shows, and in what order: search, filters, sorting and paging."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from django.http import QueryDict
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..aliases import lock_caches
from ..holdings import Holding, Holdings, holdings
from ..locking.breaker import Outage
from ..locking.inventory import FLIGHT, LOCK
from .rows import UrlOf, clock, row
from .words import duration, place, shown

__all__ = ["Column", "Listing"]

logger = logging.getLogger("django_redis_lock.admin")

#: Rows on one page.
PER_PAGE = 500
KINDS = {LOCK: gettext_lazy("locks"), FLIGHT: gettext_lazy("computations")}


@dataclass(frozen=True)
class Column:
    """A column of the list, and what it is sorted by; ``down``: the largest first, at first."""

    name: str
    title: str | Promise
    value: Callable[[Holding], Any]
    down: bool = True


def _holder(holding: Holding) -> tuple[str, int, str]:
    owner = holding.lock.owner
    return owner.host, owner.pid, owner.thread


COLUMNS = (
    Column("lock", gettext_lazy("Lock"), lambda h: h.name.lower(), down=False),
    Column("holder", gettext_lazy("Holder"), _holder, down=False),
    Column("held", gettext_lazy("Held for"), lambda h: h.lock.held_for or 0.0),
    Column("left", gettext_lazy("Time left"), lambda h: h.lock.ttl, down=False),
    Column("waiting", gettext_lazy("Waiting"), lambda h: h.lock.waiters or 0),
    Column("renewals", gettext_lazy("Renewals"), lambda h: h.lock.renewals or 0),
    Column("fence", gettext_lazy("Fence"), lambda h: h.lock.fence or 0),
    Column("cache", gettext_lazy("Cache"), lambda h: h.alias, down=False),
)
BY_NAME = {column.name: column for column in COLUMNS}
DEFAULT = "-held"


class Listing:
    """What an address like ``?q=report&kind=lock&using=default&o=-held&p=2`` asks for."""

    def __init__(self, query: QueryDict, url_of: UrlOf) -> None:
        self._url_of = url_of
        self.search = query.get("q", "")[:200]
        self.aliases = list(lock_caches())
        self.alias = self._one_of(self.aliases, query.get("using", ""))
        self.kind = self._one_of(KINDS, query.get("kind", ""))
        wanted = query.get("o", DEFAULT)
        self.order = wanted if wanted.removeprefix("-") in BY_NAME else DEFAULT
        page = query.get("p", "1")
        self.period = query.get("period", "")[:10]
        self.page = max(1, int(page)) if page.isascii() and page.isdigit() and len(page) < 7 else 1

    @staticmethod
    def _one_of(choices: Any, wanted: str) -> str:
        return wanted if wanted in choices else ""

    # -- what is found -----------------------------------------------------------------------

    @cached_property
    def held(self) -> Holdings:
        kinds = (self.kind,) if self.kind else tuple(KINDS)
        found = holdings([self.alias] if self.alias else None, kinds=kinds, search=self.search)
        for failure in found.failures:
            told = (failure.alias, failure.error)
            logger.warning("The locks of the cache %s cannot be listed: %s", *told)
        column = BY_NAME[self.order.removeprefix("-")]
        found.found.sort(key=column.value, reverse=self.order.startswith("-"))
        return found

    @cached_property
    def shown(self) -> Sequence[Holding]:
        """Those on this page."""
        start = (min(self.page, self.pages) - 1) * PER_PAGE
        return self.held.found[start : start + PER_PAGE]

    @property
    def pages(self) -> int:
        return max(1, math.ceil(len(self.held.found) / PER_PAGE))

    @property
    def ordered(self) -> bool:
        return self.order != DEFAULT

    @property
    def filtered(self) -> bool:
        return bool(self.search or self.alias or self.kind)

    def answering(self) -> list[str]:
        """The caches asked for that could be asked."""
        away = {failure.alias for failure in self.held.failures}
        wanted = [self.alias] if self.alias else self.aliases
        return [alias for alias in wanted if alias not in away]

    def data(self) -> dict[str, Any]:
        """All that changes while somebody looks at the page."""
        found = self.held
        return {
            "rows": [row(holding, self._url_of) for holding in self.shown],
            "failures": [
                {
                    "id": failure.alias,
                    "text": _failed(failure.alias),
                    "error": failure.error,
                    "known": " ".join(_known(outage) for outage in failure.outages),
                }
                for failure in found.failures
            ],
            "local": [
                {"id": f"{owner.id} {name}", "name": shown(name), "place": place(owner)}
                for name, owner in found.local
            ],
            "cuts": [{"id": f"{c.alias} {c.kind}", "text": _cut(c)} for c in found.cuts],
            "nothing": self._nothing(),
            "count": self._count(),
            "as_of": _("as of %(time)s") % {"time": clock()},
        }

    def _nothing(self) -> str:
        """What to say instead of an empty table."""
        if self.held.found or self.held.failures:
            return ""
        if self.filtered:
            return _("Nothing that is held now matches.")
        return _("No lock is held at the moment.")

    def _count(self) -> str:
        number = len(self.held.found)
        if not number and self.held.failures:
            return ""
        computed = sum(holding.lock.kind == FLIGHT for holding in self.held.found)
        held = number - computed
        said = []
        if held or not computed:
            said.append(ngettext("%(number)d lock", "%(number)d locks", held) % {"number": held})
        if computed:
            counted = ngettext("%(number)d computation", "%(number)d computations", computed)
            said.append(counted % {"number": computed})
        return ", ".join(said)

    # -- what the page needs to lead elsewhere -----------------------------------------------

    def address(self, **changes: Any) -> str:
        """This list, with ``changes``, as what follows the ``?``."""
        query = QueryDict(mutable=True)
        order = "" if self.order == DEFAULT else self.order
        here = {
            "q": self.search,
            "kind": self.kind,
            "using": self.alias,
            "o": order,
            "period": self.period,
        }
        for name, value in {**here, **changes}.items():
            if value and not (name == "p" and value == 1):
                query[name] = str(value)
        return query.urlencode()

    def columns(self) -> list[dict[str, Any]]:
        """The heads of the columns, each with the address that sorts by it."""
        sorted_by, down = self.order.removeprefix("-"), self.order.startswith("-")
        heads = []
        for column in COLUMNS:
            here = column.name == sorted_by
            next_down = not down if here else column.down
            heads.append(
                {
                    "name": column.name,
                    "title": column.title,
                    "sorted": ("descending" if down else "ascending") if here else "",
                    "address": self.address(o=("-" if next_down else "") + column.name),
                }
            )
        return heads

    def page_links(self) -> list[dict[str, Any]]:
        current = min(self.page, self.pages)
        return [
            {"number": number, "address": self.address(p=number), "current": number == current}
            for number in range(1, self.pages + 1)
        ]

    def kinds(self) -> list[tuple[str, Any]]:
        return list(KINDS.items())


def _failed(alias: str) -> str:
    text = _(
        "The locks of the cache “%(alias)s” cannot be listed: Redis did not answer as it should."
    )
    return text % {"alias": shown(alias)}


def _known(outage: Outage) -> str:
    """What this process has seen of a server that is away."""
    texts = [
        _("%(server)s has not answered this process for %(duration)s.")
        % {"server": shown(outage.server), "duration": duration(outage.seconds)}
    ]
    if outage.spared:
        texts.append(
            ngettext(
                "Meanwhile %(number)d call failed at once.",
                "Meanwhile %(number)d calls failed at once.",
                outage.spared,
            )
            % {"number": outage.spared}
        )
    if outage.stood_in:
        texts.append(
            ngettext(
                "%(number)d lock was taken without it.",
                "%(number)d locks were taken without it.",
                outage.stood_in,
            )
            % {"number": outage.stood_in}
        )
    return " ".join(texts)


def _cut(cut: Any) -> str:
    what = (
        _("The cache “%(alias)s” has at least %(total)d held locks. Listed are %(shown)d.")
        if cut.kind == LOCK
        else _("The cache “%(alias)s” has at least %(total)d computations. Listed are %(shown)d.")
    )
    return what % {"alias": shown(cut.alias), "total": cut.total, "shown": cut.shown}
