"""The page "Held locks" in Django's admin."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.decorators import method_decorator
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe
from redis.exceptions import RedisError

from . import models
from .aliases import lock_caches
from .locking.hold import printable
from .locking.inventory import HeldLock

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[models.HeldLock]
else:
    ModelAdmin = admin.ModelAdmin

__all__ = ["HeldLockAdmin"]

logger = logging.getLogger("django_redis_lock.admin")

#: What keeps one cache's locks from being listed without being a mistake of ours.
UNAVAILABLE = (RedisError, OSError, ImproperlyConfigured)


@dataclass(frozen=True, slots=True)
class Row:
    """One held lock, ready to be shown. Whatever others have named is on one line, and bounded."""

    alias: str
    lock: HeldLock

    @property
    def name(self) -> str:
        return _shown(self.lock.name)

    @property
    def time_left(self) -> str:
        return str(_("never expires")) if self.lock.ttl == math.inf else duration(self.lock.ttl)

    @property
    def held_for(self) -> str:
        return "-" if self.lock.held_for is None else duration(self.lock.held_for)

    @property
    def label(self) -> str:
        return _shown(self.lock.owner.label)

    @property
    def place(self) -> str:
        """Where the holder runs."""
        owner = self.lock.owner
        if not owner.host:
            return _("not known (%(id)s)") % {"id": owner.id}
        return _("%(host)s, process %(process)d, thread %(thread)s") % {
            "host": _shown(owner.host),
            "process": owner.pid,
            "thread": _shown(owner.thread),
        }


@dataclass(slots=True)
class Listing:
    """The held locks of all caches, and what there is to say about caches without a full list."""

    rows: list[Row] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    cuts: list[dict[str, Any]] = field(default_factory=list)

    def add(self, alias: str) -> None:
        try:
            inventory = caches[alias].held_locks()  # type: ignore[attr-defined]
        except UNAVAILABLE as error:
            logger.warning("The locks of the cache %s cannot be listed: %s", alias, error)
            self.failures.append({"alias": alias, "error": _shown(str(error))})
            return
        self.rows += [Row(alias, lock) for lock in inventory.locks]
        if not inventory.complete:
            cut = {"alias": alias, "shown": len(inventory.locks), "total": inventory.total}
            self.cuts.append(cut)


def listing() -> Listing:
    """What the page shows: the longest held lock first, because it is the one people look for."""
    found = Listing()
    for alias in lock_caches():
        found.add(alias)
    found.rows.sort(key=lambda row: row.lock.held_for or 0.0, reverse=True)
    return found


def duration(seconds: float) -> str:
    """``seconds`` as people say it, in the two largest units."""
    whole = int(seconds)
    if whole < 1:
        return str(_("under 1 s"))
    minutes, s = divmod(whole, 60)
    hours, min = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return _("%(days)d d %(hours)d h") % {"days": days, "hours": h}
    if hours:
        return _("%(hours)d h %(minutes)d min") % {"hours": hours, "minutes": min}
    if minutes:
        return _("%(minutes)d min %(seconds)d s") % {"minutes": minutes, "seconds": s}
    return _("%(seconds)d s") % {"seconds": s}


def _shown(text: str) -> str:
    return printable(text.encode(), limit=200)


@admin.register(models.HeldLock)
class HeldLockAdmin(ModelAdmin):
    """A list and nothing else: there is no table behind it to add to, change or search."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_changelist"
        return [path("", self.admin_site.admin_view(self.changelist_view), name=name)]

    @method_decorator(require_safe)
    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": capfirst(self.opts.verbose_name_plural),
            "listing": listing(),
            **(extra_context or {}),
        }
        template = "admin/django_redis_lock/heldlock/change_list.html"
        return TemplateResponse(request, template, context)
