"""The page "Held locks" in Django's admin: there is no table behind it, so it uses only the style
of Django's change list."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import URLPattern, path, reverse
from django.views.decorators.http import require_http_methods, require_safe
from django.views.generic import RedirectView

from . import models
from .extension import PartMissing, part

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[models.HeldLock]
else:
    ModelAdmin = admin.ModelAdmin

__all__ = ["HeldLockAdmin"]


@admin.register(models.HeldLock)
class HeldLockAdmin(ModelAdmin):
    """The list of held locks. ``refresh_every``: seconds between two refreshes of a page."""

    refresh_every = 5

    def has_add_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def get_model_perms(self, request: HttpRequest) -> dict[str, bool]:
        """Django asks before it names the model in a menu."""
        perms = super().get_model_perms(request)
        models.silent.set(0)
        if perms["view"]:
            with suppress(PartMissing):
                models.silent.set(part("menu").silent_now())
        return perms

    def has_release_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """As Django's ``has_…_permission``; ``obj`` has the lock's ``name``."""
        user: Any = request.user
        return bool(user.has_perm(f"{self.opts.app_label}.release_heldlock"))

    def _protected(self, view: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
        def protected(request: HttpRequest, *args: object, **kwargs: object) -> HttpResponseBase:
            if not self.has_view_permission(request):
                raise PermissionDenied
            try:
                return view(request, *args, **kwargs)
            except PartMissing as missing:
                return HttpResponse(f"{missing}.", "text/plain", 501)

        wrapped: Callable[..., HttpResponseBase] = self.admin_site.admin_view(protected)
        return wrapped

    def get_urls(self) -> list[URLPattern]:
        def page(name: str, *methods: str) -> Callable[..., HttpResponse]:
            return require_http_methods(["GET", "HEAD", *methods])(partial(self._page, name))

        views: dict[str, tuple[str, Callable[..., HttpResponse]]] = {
            "changelist": ("", require_safe(self.changelist_view)),
            "processes": ("processes/", page("processes")),
            "events": ("events/", page("events")),
            "releases": ("history/", page("releases")),
            "release": ("release/", page("release", "POST")),
            "add": ("add/", _refuse),
            "change": ("<path:object_id>/change/", page("lock", "POST")),
            "history": ("<path:object_id>/history/", page("releases")),
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

    def url_of_page(self, name: str, *args: str) -> str:
        """The address of the page ``name``, such as ``"change"``."""
        site = self.admin_site.name
        return reverse(f"admin:{self._url_name(name)}", args=args, current_app=site)

    def _page(self, name: str, request: HttpRequest, **about: object) -> HttpResponse:
        page: HttpResponse = getattr(part("admin").Pages(self, request), name)(**about)
        return page

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        return self._page("changelist", request, extra_context=extra_context)


def _refuse(request: HttpRequest, object_id: str = "") -> HttpResponse:
    """No user may add or delete a lock here: the answer of other read-only pages."""
    raise PermissionDenied
