"""The page "Held locks" in Django's admin: there is no table behind it, so it uses only the style
of Django's change list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import django
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseRedirect,
    QueryDict,
)
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_http_methods, require_safe
from django.views.generic import RedirectView

from .. import models
from ..cache import lock_caches
from ..events import group_of
from ..held_locks import UNAVAILABLE, Failure, is_among_locks, look_closely, name_of
from ..inventory import FLIGHT
from ..protocol import printable
from .listing import Listing
from .releasing import outlook, parse_choices, release_all, releases
from .rows import (
    Choice,
    Ref,
    as_of,
    duration_patterns,
    event_rows,
    failure_rows,
    holder_rows,
    row,
    shown,
    taken,
    waiter_rows,
)
from .sections import behaviour_of, processes_data

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[models.HeldLock]
else:
    ModelAdmin = admin.ModelAdmin

__all__ = ["HeldLockAdmin"]

#: A lock with a longer key, in bytes, has no page: addresses have limits.
MAX_KEY_BYTES = 2000


@admin.register(models.HeldLock)
class HeldLockAdmin(ModelAdmin):
    """The list of held locks. ``refresh_every``: seconds between two refreshes of a page."""

    refresh_every = 5

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def has_release_permission(self, request: HttpRequest) -> bool:
        user: Any = request.user
        return bool(user.has_perm(f"{self.opts.app_label}.release_heldlock"))

    def _protected(self, view: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
        def protected(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            if not self.has_view_permission(request):
                raise PermissionDenied
            return view(request, *args, **kwargs)

        wrapped: Callable[..., HttpResponseBase] = self.admin_site.admin_view(protected)
        return wrapped

    def get_urls(self) -> list[URLPattern]:
        reads, asks = require_safe, require_http_methods(["GET", "HEAD", "POST"])
        views: dict[str, tuple[str, Callable[..., HttpResponse]]] = {
            "changelist": ("", reads(self.changelist_view)),
            "processes": ("processes/", reads(self.processes_view)),
            "releases": ("history/", reads(self.releases_view)),
            "release": ("release/", asks(self.release_view)),
            "add": ("add/", _refuse),
            "change": ("<path:object_id>/change/", reads(self.lock_view)),
            "history": ("<path:object_id>/history/", reads(self.releases_view)),
            "delete": ("<path:object_id>/delete/", _refuse),
        }
        change = RedirectView.as_view(
            pattern_name=f"{self.admin_site.name}:{self._url_name('change')}"
        )
        return [
            *(
                path(route, self._protected(view), name=self._url_name(name))
                for name, (route, view) in views.items()
            ),
            path("<path:object_id>/", self._protected(change)),  # As ModelAdmin has it.
        ]

    def _url_name(self, name: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{name}"

    def _url(self, name: str, *args: str) -> str:
        site = self.admin_site.name
        return reverse(f"admin:{self._url_name(name)}", args=args, current_app=site)

    def _url_of(self, ref: Ref) -> str:
        return "" if len(ref.key) > MAX_KEY_BYTES else self._url("change", str(ref))

    def _page(self, request: HttpRequest, template: str, **context: Any) -> HttpResponse:
        request.current_app = self.admin_site.name
        refresh = _is_refresh(request)
        return TemplateResponse(
            request,
            f"admin/django_redis_lock/{template}.html",
            {
                **({} if refresh else self.admin_site.each_context(request)),
                # Without the messages, which are for the page that the user opens next.
                "shell": f"admin/{'django_redis_lock/live' if refresh else 'base_site'}.html",
                "opts": self.opts,
                "breadcrumbs": self._breadcrumbs(template),
                "breadcrumbs_are_a_list": django.VERSION >= (6, 1),
                "list_url": self._url("changelist"),
                "release_url": self._url("release"),
                "processes_url": self._url("processes"),
                "releases_url": self._url("releases"),
                "may_release": self.has_release_permission(request),
                "refresh_every": self.refresh_every,
                "durations": duration_patterns(),
                **context,
            },
        )

    def _breadcrumbs(self, template: str) -> list[dict[str, Any]]:
        app, site = self.opts.app_config, self.admin_site.name
        above = [
            (_("Home"), reverse("admin:index", current_app=site)),
            (app.verbose_name, reverse("admin:app_list", args=[app.label], current_app=site)),
            (capfirst(self.opts.verbose_name_plural), self._url("changelist")),
        ]
        if template == "change_list":
            above.pop()
        return [{"title": title, "url": url} for title, url in above]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        listing = Listing(request.GET, self._url_of)
        in_sight = not _is_refresh(request) or "behaviour" in request.GET
        context = {
            "title": capfirst(self.opts.verbose_name_plural),
            "listing": listing,
            "data": listing.data(),
            "behaviour": listing.behaviour() if in_sight else None,
            "address": listing.address(p=listing.page),
        }
        return self._page(request, "change_list", **context | (extra_context or {}))

    def processes_view(self, request: HttpRequest) -> HttpResponse:
        """Which locks each process holds, and what it waits for."""
        data = processes_data(self._url_of)
        return self._page(request, "base", title=_("Locks by process"), data=data)

    def releases_view(self, request: HttpRequest, object_id: str | None = None) -> HttpResponse:
        """The log of all releases, or of those of one lock."""
        found, title = None, _("Log of releases")
        if object_id is not None:
            found = self._ref(object_id)
            title = _("Releases of %(name)s") % {"name": shown(name_of(*found))}
        entries = releases(self._url_of, found)
        return self._page(request, "history", title=title, entries=entries)

    def lock_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        found = self._ref(object_id)
        name = shown(name_of(*found))
        data = self._lock_data(found)
        periods = [] if _is_refresh(request) else behaviour_of(found.alias, data["group"])
        return self._page(
            request,
            "change_form",
            title=name,
            computation=found.kind == FLIGHT,
            alias=found.alias,
            data=data,
            key=printable(found.key, MAX_KEY_BYTES),
            group=data["group"],
            periods=periods,
            counted=any(period["summary"].events for period in periods),
            history_url=self._url("history", str(found)),
        )

    def _ref(self, text: str) -> Ref:
        ref = Ref.parse(text)
        if ref is None or ref.alias not in lock_caches():
            raise Http404
        return ref

    def _lock_data(self, ref: Ref) -> dict[str, Any]:
        data: dict[str, Any] = {"group": group_of(name_of(*ref)), "as_of": as_of()}
        try:
            holding, closely = look_closely(*ref)
        except UNAVAILABLE as error:
            return {**data, "failures": failure_rows([Failure(ref.alias, shown(str(error)))])}
        if holding is not None:
            data.update(row(holding, self._url_of), held_now=True, group=holding.group)
        elif ref.kind == FLIGHT:
            data["free"] = _("It is not being computed.")
        elif closely.other and is_among_locks(ref.alias, ref.key):
            said = _("Not a lock: its key has other data (%(type)s), so no caller can acquire it.")
            data["free"] = said % {"type": closely.other}
        elif not closely.holders:
            data["free"] = _("This lock is free.")
        return {
            **data,
            "asked": True,
            "taken": taken(closely.holders[0]) if closely.holders else "",
            "waiting": waiter_rows(closely.waiters),
            "holders": holder_rows(closely.holders),
            "events": event_rows(closely.events),
        }

    def release_view(self, request: HttpRequest) -> HttpResponse:
        if not self.has_release_permission(request):
            raise PermissionDenied
        known = list(lock_caches())
        selected = parse_choices(request.POST.getlist("selected"))
        chosen = [choice for choice in selected if choice.ref.alias in known]
        back = self._back(request, chosen)
        if not chosen:  # Also after a login: the browser comes back with a GET.
            messages.warning(request, _("Nothing was released. Select the locks."))
            return HttpResponseRedirect(back)
        if request.POST.get("confirmed") != "yes":
            outlooks = [outlook(choice, self._url_of) for choice in chosen]
            still_held = sum("choice" in lock for lock in outlooks)
            return self._page(
                request,
                "release",
                title=_release_locks(len(chosen)),
                button=_release_locks(still_held),
                chosen=outlooks,
                some=still_held > 0,
                address=request.POST.get("address"),
                back=back,
            )
        release_all(self, request, chosen, request.POST.get("reason", "").strip()[:100])
        return HttpResponseRedirect(back)

    def _back(self, request: HttpRequest, chosen: Sequence[Choice]) -> str:
        """The address is parsed and built again, so that it cannot lead to another site."""
        if "address" not in request.POST and len(chosen) == 1:
            return self._url("change", str(chosen[0].ref))
        listing = Listing(QueryDict(request.POST.get("address", "")), self._url_of)
        return self._with(self._url("changelist"), listing.address(p=listing.page))

    @staticmethod
    def _with(url: str, query: str) -> str:
        return f"{url}?{query}" if query else url


def _refuse(request: HttpRequest, object_id: str = "") -> HttpResponse:
    """A lock is not added or deleted here: the answer of other read-only pages."""
    raise PermissionDenied


def _is_refresh(request: HttpRequest) -> bool:
    """Whether the script of an open page asks for its present content."""
    return "live" in request.GET


def _release_locks(number: int) -> str:
    text = ngettext("Release %(number)d lock", "Release %(number)d locks", number)
    return text % {"number": number}
