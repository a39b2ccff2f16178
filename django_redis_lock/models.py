"""A model without a table: it gives held locks their permissions and their place in the admin."""

from __future__ import annotations

from contextvars import ContextVar

from django.db import models
from django.utils.functional import lazystr
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

#: How many holders are silent, for the menu of the admin, during a request for one of its pages.
silent: ContextVar[int] = ContextVar("django_redis_lock_silent", default=0)


class _Plural:
    """The model's plural, which is its entry in the admin's menu."""

    def __str__(self) -> str:
        name, number = gettext("held locks"), silent.get()
        if not number:
            return name
        text = ngettext("%(name)s ⚠ %(number)d silent", "%(name)s ⚠ %(number)d silent", number)
        return text % {"name": name, "number": number}


class NoRows(models.Manager["HeldLock"]):
    """Never asks the database, which has no such table; ``dumpdata`` reads every model."""

    def get_queryset(self) -> models.QuerySet[HeldLock]:
        nothing: models.QuerySet[HeldLock] = super().get_queryset().none()
        return nothing


class HeldLock(models.Model):
    """A lock; ``name`` is what the admin's log says of it."""

    objects = NoRows()

    def __init__(self, *args: object, name: str = "", **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.name = name

    def __str__(self) -> str:
        return self.name

    class Meta:
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)
        permissions = (("release_heldlock", _("Can release held lock")),)
        verbose_name = _("held lock")
        verbose_name_plural = lazystr(_Plural())
