"""A model without a table: it gives held locks their permissions and their place in the admin."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _


class NoRows(models.Manager["HeldLock"]):
    """Never asks the database, which has no such table; ``dumpdata`` reads every model."""

    def get_queryset(self) -> models.QuerySet[HeldLock]:
        nothing: models.QuerySet[HeldLock] = super().get_queryset().none()
        return nothing


class HeldLock(models.Model):
    """A lock; ``name`` is what the admin's log says of it."""

    objects = NoRows()

    def __init__(self, *args: Any, name: str = "", **kwargs: Any) -> None:
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
        verbose_name_plural = _("held locks")
