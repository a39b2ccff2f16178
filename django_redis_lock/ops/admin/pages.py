"""The pages of held locks, as the admin shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import django
from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...cache import lock_caches
from ...events import group_of
from ...models import HeldLock as Model
from ...protocol import printable
from ...transport.hints import explained
from ..facts import shown, taken
from ..held_locks import UNAVAILABLE, Failure, former_name, is_among_locks, look_closely, name_of
from ..inventory import FLIGHT
from .listing import MAX_SELECTED, Listing
from .releasing import entry_of, outlook, parse_choices, release_all, releases
from .rows import (
    FORMAT,
    Choice,
    Ref,
    as_of,
    choice_of,
    event_rows,
    failure_rows,
    holder_rows,
    ref_of,
    row,
    waiter_rows,
)
from .sections import behaviour_of, events_data, processes_data

if TYPE_CHECKING:
    from ...admin import HeldLockAdmin

#: A lock with a longer key, in bytes, has no page: addresses have limits.
MAX_KEY_BYTES = 2000
#: Of a page that is opened, and not refreshed.
BASE = "admin/base_site.html"


class Pages:
    """What the views of ``model_admin`` answer to one request."""

    def __init__(self, model_admin: HeldLockAdmin, request: HttpRequest) -> None:
        self._admin = model_admin
        self._site = model_admin.admin_site
        self._opts = model_admin.opts
        self._request = request
        self._refreshes = "live" in request.GET  # The script of an open page asks for its content.
        self._url = model_admin.url_of_page
        #: Whether a project decides on each lock.
        self._restricted = (
            type(model_admin).has_view_permission is not ModelAdmin.has_view_permission
        )

    def changelist(self, extra_context: dict[str, object] | None = None) -> HttpResponse:
        listing = self._listing(self._request.GET)
        in_sight = not self._refreshes or "behaviour" in self._request.GET
        context = {
            "title": capfirst(_("held locks")),
            "listing": listing,
            "data": listing.data(),
            "behaviour": listing.behaviour() if in_sight else None,
            "address": listing.address(p=listing.page),
        }
        return self._page("change_list", **context | (extra_context or {}))

    def _listing(self, query: QueryDict) -> Listing:
        listing = Listing(query, self._url_of, self._may_release)
        if self._restricted:
            held = listing.held
            held.found = [each for each in held.found if self._may_view(ref_of(each))]
            held.local = [each for each in held.local if self._sees(Model(name=shown(each[0])))]
            listing.groups = {each.group for each in held.found}
        return listing

    def _may_view(self, ref: Ref) -> bool:
        return not self._restricted or self._sees(entry_of(ref))

    def _sees(self, entry: Model) -> bool:
        return self._permits(self._admin.has_view_permission, entry)

    def _may_release(self, ref: Ref) -> bool:
        permitted = self._permits(self._admin.has_release_permission, entry_of(ref))
        return permitted and self._may_view(ref)

    def _permits(self, check: Callable[..., bool], entry: Model) -> bool:
        """What ``check`` says of this lock; of all, if a project's takes the request only."""
        of_each = len(signature(check).parameters) > 1
        return check(self._request, *([entry] if of_each else ()))

    def processes(self) -> HttpResponse:
        data = processes_data(self._url_of, self._may_view)
        return self._page("base", title=_("Locks by process"), data=data)

    def events(self) -> HttpResponse:
        title = _("Latest events of all locks")
        data = events_data(self._request.GET, self._url_of, self._may_view)
        return self._page("events", title=title, data=data)

    def releases(self, object_id: str | None = None) -> HttpResponse:
        found, title = None, _("Log of releases")
        if object_id is not None:
            found = self._ref(object_id)
            title = _("Releases of %(name)s") % {"name": shown(name_of(*found))}
        entries = releases(self._url_of, found, self._may_view if self._restricted else None)
        if found is not None and entries:  # The key may not show the name.
            title = _("Releases of %(name)s") % {"name": entries[0]["name"]}
        return self._page("history", title=title, entries=entries)

    def lock(self, object_id: str) -> HttpResponse:
        if self._request.method == "POST":  # As by who may only view.
            raise PermissionDenied
        found = self._ref(object_id)
        name = shown(name_of(*found))
        data = self._lock_data(found)
        periods = [] if self._refreshes else behaviour_of(found.alias, data["group"])
        return self._page(
            "change_form",
            title=data.get("name", name),
            computation=found.kind == FLIGHT,
            alias=found.alias,
            data=data,
            key=printable(found.key, MAX_KEY_BYTES),
            group=data["group"],
            periods=periods,
            counted=any(period["summary"].events for period in periods),
            history_url=self._url("history", str(found)),
            may_release=self._may_release(found),
        )

    def release(self) -> HttpResponse:
        if not self._admin.has_release_permission(self._request):
            raise PermissionDenied
        known = list(lock_caches())
        selected = parse_choices(self._request.POST.getlist("selected"))
        if "all" in self._request.POST:
            query = QueryDict(self._request.POST.get("address", ""))
            selected = [choice_of(h) for h in self._listing(query).matching[:MAX_SELECTED]]
        chosen = [choice for choice in selected if choice.ref.alias in known]
        chosen = [choice for choice in chosen if self._may_release(choice.ref)]
        back = self._back(chosen)
        if not chosen:  # Also after a login: the browser comes back with a GET.
            messages.warning(self._request, _("Nothing was released. Select the locks."))
            return HttpResponseRedirect(back)
        if self._request.POST.get("confirmed") != "yes":
            outlooks = [outlook(choice, self._url_of) for choice in chosen]
            still_held = sum("choice" in lock for lock in outlooks)
            return self._page(
                "release",
                title=_release_locks(len(chosen)),
                button=_release_locks(still_held),
                chosen=outlooks,
                some=still_held > 0,
                address=self._request.POST.get("address"),
                back=back,
            )
        release_all(
            self._admin, self._request, chosen, self._request.POST.get("reason", "").strip()[:100]
        )
        return HttpResponseRedirect(back)

    def _page(self, template: str, **context: object) -> HttpResponse:
        self._request.current_app = self._site.name
        return TemplateResponse(
            self._request,
            f"admin/django_redis_lock/{template}.html",
            {
                **({} if self._refreshes else self._site.each_context(self._request)),
                # Without the messages, which are for the page that the user opens next.
                "shell": "admin/django_redis_lock/live.html" if self._refreshes else BASE,
                "opts": self._opts,
                "breadcrumbs": self._breadcrumbs(template),
                "breadcrumbs_are_a_list": django.VERSION >= (6, 1),
                "list_url": self._url("changelist"),
                **{
                    f"{n}_url": self._url(n) for n in ("release", "processes", "releases", "events")
                },
                "may_release": self._admin.has_release_permission(self._request),
                "refresh_every": self._admin.refresh_every,
                "durations": json.dumps([str(pattern) for pattern in FORMAT.pairs]),
                **context,
            },
        )

    def _breadcrumbs(self, template: str) -> list[dict[str, object]]:
        app, site = self._opts.app_config, self._site.name
        above = [
            (_("Home"), reverse("admin:index", current_app=site)),
            (app.verbose_name, reverse("admin:app_list", args=[app.label], current_app=site)),
            (capfirst(_("held locks")), self._url("changelist")),
        ]
        if template == "change_list":
            above.pop()
        return [{"title": title, "url": url} for title, url in above]

    def _ref(self, text: str) -> Ref:
        ref = Ref.parse(text)
        if ref is None or ref.alias not in lock_caches():
            raise Http404
        if not self._may_view(ref):
            raise PermissionDenied
        return ref

    def _lock_data(self, ref: Ref) -> dict[str, Any]:
        data: dict[str, object] = {"group": group_of(name_of(*ref)), "as_of": as_of()}
        try:
            holding, closely = look_closely(*ref)
        except UNAVAILABLE as error:
            return {**data, "failures": failure_rows([Failure(ref.alias, shown(explained(error)))])}
        if holding is not None:
            data.update(row(holding, self._url_of), held_now=True, group=holding.group)
        elif ref.kind == FLIGHT:
            data["free"] = _("It is not being computed.")
        elif closely.other and is_among_locks(ref.alias, ref.key):
            said = _("Not a lock: its key has other data (%(type)s), so no caller can acquire it.")
            data["free"] = said % {"type": closely.other}
        elif not closely.holders:
            data["free"] = _("This lock is free.")
        if holding is None and (name := former_name(ref.alias, ref.key, closely.events)):
            data.update(name=shown(name), group=group_of(name))
        return {
            **data,
            "asked": True,
            "taken": taken(closely.holders[0]) if closely.holders else "",
            "waiting": waiter_rows(closely.waiters),
            "holders": holder_rows(closely.holders),
            "events": event_rows(closely.events),
        }

    def _url_of(self, ref: Ref) -> str:
        return "" if len(ref.key) > MAX_KEY_BYTES else self._url("change", str(ref))

    def _back(self, chosen: Sequence[Choice]) -> str:
        """The address is parsed and built again, so that it cannot lead to another site."""
        if "address" not in self._request.POST and len(chosen) == 1:
            return self._url("change", str(chosen[0].ref))
        listing = Listing(QueryDict(self._request.POST.get("address", "")), self._url_of)
        query = listing.address(p=listing.page)
        return self._url("changelist") + (f"?{query}" if query else "")


def _release_locks(number: int) -> str:
    text = ngettext("Release %(number)d lock", "Release %(number)d locks", number)
    return text % {"number": number}
