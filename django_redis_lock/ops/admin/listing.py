"""Which held locks the page shows, and in what order: search, filters, sorting and paging."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.core.paginator import Page, Paginator
from django.http import QueryDict
from django.utils.formats import number_format
from django.utils.functional import Promise, cached_property
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...cache import lock_caches
from ..facts import STATUSES, place, shown, status_of
from ..held_locks import HeldLock, HeldLocks, held_locks, number_of_waiters
from ..inventory import FLIGHT, LOCK
from .rows import Ref, UrlOf, as_of, brief, failure_rows, ref_of, row
from .sections import behaviour_section, log_failure

#: Rows on one page.
PER_PAGE = 100
#: The style sheet shows no more in a narrow window, until they are wanted.
ROWS_ON_A_PHONE = 25
#: The most locks that are released at once.
MAX_SELECTED = 500
#: "Held for longer than": seconds.
AGES = (60, 600, 3600, 86400)
KINDS = {LOCK: gettext_lazy("locks"), FLIGHT: gettext_lazy("computations")}


@dataclass(frozen=True)
class Column:
    """``value`` is its sort key; ``down``: the first click puts the largest first."""

    name: str
    title: str | Promise
    value: Callable[[HeldLock], Any]
    down: bool = True


def _holder(holding: HeldLock) -> tuple[str, int, str]:
    owner = holding.lock.owner
    return owner.host, owner.pid, owner.thread


def _severity(holding: HeldLock) -> tuple[int, float]:
    return list(STATUSES).index(status_of(holding.lock)), -(holding.lock.held_for or 0.0)


COLUMNS = (
    Column("status", gettext_lazy("Status"), _severity, down=False),
    Column("lock", gettext_lazy("Lock"), lambda h: h.name.lower(), down=False),
    Column("holder", gettext_lazy("Holder"), _holder, down=False),
    Column("held", gettext_lazy("Held for"), lambda h: h.lock.held_for or 0.0),
    Column("left", gettext_lazy("Time left"), lambda h: h.lock.ttl, down=False),
    Column("waiting", gettext_lazy("Processes waiting"), lambda h: h.lock.waiters or 0),
    Column("cache", gettext_lazy("Cache"), lambda h: h.alias, down=False),
)
BY_NAME = {column.name: column for column in COLUMNS}
DEFAULT = "status"


class Listing:
    """The list for a query like ``?q=report&kind=lock&status=silent&age=60&o=-held&p=2``."""

    def __init__(
        self, query: QueryDict, url_of: UrlOf, may_release: Callable[[Ref], bool] = bool
    ) -> None:
        self._url_of, self._may_release = url_of, may_release
        #: Those whose figures this user sees; None: all.
        self.groups: set[str] | None = None
        self.search = query.get("q", "")[:200]
        self.aliases = list(lock_caches())
        #: The title of each filter, and its choices with their texts.
        self._filters: dict[str, tuple[str, Mapping[str, Any]]] = {
            "status": (_("Status"), STATUSES),
            "age": (_("Older than"), {str(age): brief(age) for age in AGES}),
            "kind": (_("Kind"), KINDS),
            "using": (_("Cache"), {alias: alias for alias in self.aliases}),
        }
        #: What each filter is set to; empty for all.
        self.chosen = {
            name: str(query[name]) if query.get(name) in choices else ""
            for name, (_title, choices) in self._filters.items()
        }
        wanted = query.get("o", DEFAULT)
        self.order = wanted if wanted.removeprefix("-") in BY_NAME else DEFAULT
        page = query.get("p", "1")
        self.page = max(1, int(page)) if page.isascii() and page.isdigit() and len(page) < 7 else 1

    @cached_property
    def held(self) -> HeldLocks:
        kinds = [self.chosen["kind"]] if self.chosen["kind"] else list(KINDS)
        found = held_locks(self._asked, kinds=kinds)
        for failure in found.failures:
            text = "The locks of the cache %s cannot be listed: %s"
            log_failure(text, failure.alias, failure.error)
        if self.search and found.truncations:
            # Redis also searches the names of locks that the truncated list leaves out.
            listed = {(h.alias, h.lock.key, h.lock.kind) for h in found.found}
            named = held_locks(self._asked, kinds=kinds, search=self.search).found
            found.found += [h for h in named if (h.alias, h.lock.key, h.lock.kind) not in listed]
        return found

    @property
    def _asked(self) -> list[str]:
        return [self.chosen["using"]] if self.chosen["using"] else self.aliases

    @cached_property
    def matching(self) -> list[HeldLock]:
        column = BY_NAME[self.order.removeprefix("-")]
        left = [holding for holding in self.held.found if self._matches(holding)]
        return sorted(left, key=column.value, reverse=self.order.startswith("-"))

    def _matches(self, holding: HeldLock) -> bool:
        lock, owner = holding.lock, holding.lock.owner
        if self.chosen["status"] not in ("", status_of(lock)):
            return False
        if (lock.held_for or 0.0) < int(self.chosen["age"] or 0):
            return False
        texts = (holding.name, owner.label, f"{owner.host}:{owner.pid}", owner.doing, holding.group)
        return any(self.search.lower() in text.lower() for text in texts)

    @cached_property
    def shown(self) -> Page[HeldLock]:
        return Paginator(self.matching, PER_PAGE).get_page(self.page)

    @property
    def ordered(self) -> bool:
        return self.order != DEFAULT

    @property
    def filtered(self) -> bool:
        return any((self.search, *self.chosen.values()))

    def data(self) -> dict[str, object]:
        """The part of the page that changes while it is open."""
        found = self.held
        return {
            "rows": list(map(self._row, self.shown)),
            "failures": failure_rows(found.failures),
            "local": [
                {"id": f"{owner.id} {name}", "name": shown(name), "place": place(owner)}
                for name, owner in found.local
                if self.search.lower() in name.lower()
            ],
            "cuts": [
                *({"id": f"{c.alias} {c.kind}", "text": _cut(c)} for c in found.truncations),
                *(
                    {"id": f"{alias} memory", "text": _in_memory(alias)}
                    for alias in found.in_memory
                ),
            ],
            "summary": self._summary(),
            "nothing": self._nothing(),
            "count": self._count(),
            "many": len(self.shown.object_list) > ROWS_ON_A_PHONE,
            "as_of": as_of(),
        }

    def _row(self, holding: HeldLock) -> dict[str, object]:
        """What this user may not release cannot be chosen."""
        may = self._may_release(ref_of(holding))
        return row(holding, self._url_of) | ({} if may else {"choice": ""})

    def _nothing(self) -> str:
        if self.matching or self.held.failures:
            return ""
        if not self.aliases:
            return _("None of the CACHES supports locks: run manage.py check.")
        if self.filtered:
            return _("No held lock matches.")
        return _("No lock is held at the moment.")

    def behaviour(self) -> dict[str, object] | None:
        if not self.aliases:
            return None
        down = {failure.alias for failure in self.held.failures}
        answering = [alias for alias in self._asked if alias not in down]
        held = self.held.found
        return behaviour_section(answering, held, self.search, self.address, self.groups)

    def _summary(self) -> str:
        """One line about everything held, also what the search excludes."""
        found = [holding.lock for holding in self.held.found]
        if not found:
            return ""
        counted = (
            (len(found), _("%(number)s held")),
            (sum(bool(lock.silent) for lock in found), _("%(number)s silent")),
            (number_of_waiters(self.held.found), _("%(number)s waiting")),
        )
        said = [text % {"number": number_format(number)} for number, text in counted if number]
        oldest = max(lock.held_for or 0.0 for lock in found)
        said.append(_("oldest %(duration)s") % {"duration": brief(oldest)})
        return " · ".join(said)

    def _count(self) -> str:
        number = len(self.matching)
        if not number and self.held.failures:
            return ""
        computed = sum(holding.lock.kind == FLIGHT for holding in self.matching)
        held = number - computed
        said = []
        if held or not computed:
            said.append(ngettext("%(number)d lock", "%(number)d locks", held) % {"number": held})
        if computed:
            counted = ngettext("%(number)d computation", "%(number)d computations", computed)
            said.append(counted % {"number": computed})
        return ", ".join(said)

    def address(self, **changes: object) -> str:
        query = QueryDict(mutable=True)
        here = {"q": self.search, **self.chosen, "o": self.order if self.ordered else ""}
        for name, value in {**here, **changes}.items():
            if value and not (name == "p" and value == 1):
                query[name] = str(value)
        return query.urlencode()

    def columns(self) -> list[dict[str, Any]]:
        sorted_by, down = self.order.removeprefix("-"), self.order.startswith("-")
        heads = []
        for column in COLUMNS:
            if column.name == "cache" and not self.many_caches:
                continue
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

    def links(self) -> list[tuple[int, str]]:
        """The number and address of each page; empty if there is one page."""
        numbers = self.shown.paginator.page_range if self.shown.has_other_pages() else ()
        return [(number, self.address(p=number)) for number in numbers]

    @property
    def all_matching(self) -> str:
        """The title of the choice of more than this page; empty if there is no more."""
        number = len(self.matching)
        if not self.shown.has_other_pages():
            return ""
        if number > MAX_SELECTED:
            text = _("the first %(most)s of all %(number)s that match")
        else:
            text = _("all %(number)s that match, on all pages")
        numbers = {"most": number_format(MAX_SELECTED), "number": number_format(number)}
        return text % numbers

    @property
    def many_caches(self) -> bool:
        return len(self.aliases) > 1

    def choices(self) -> list[dict[str, object]]:
        return [
            {"name": name, "title": title, "chosen": self.chosen[name], "options": choices.items()}
            for name, (title, choices) in self._filters.items()
            if name != "using" or self.many_caches
        ]


def _in_memory(alias: str) -> str:
    what = _(
        "The locks of the cache “%(alias)s” are in the memory of each process: they exclude only "
        "its own threads, and this page shows those of the process that answers."
    )
    return what % {"alias": shown(alias)}


def _cut(cut: Any) -> str:
    what = _("The cache “%(alias)s” has at least %(total)d %(kind)s. Listed are %(shown)d.")
    return what % {**cut._asdict(), "alias": shown(cut.alias), "kind": KINDS[cut.kind]}
