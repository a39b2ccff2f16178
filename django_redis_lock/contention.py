"""What to answer when a lock is taken: ready-made answers for views, commands and functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.core.management import CommandError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .exceptions import LockNotAcquired
from .locking.lock import Lock
from .locking.owner import Owner

__all__ = ["Conflict", "OnConflict"]


@dataclass(frozen=True)
class Conflict:
    """A lock that could not be had, and why.

    Attributes:
        name: the lock's name, as ``locked()`` was given it.
        holder: who holds it; None if nobody does any more.
        ttl: seconds its lifetime still lasts unless renewed; None if it is free again, ``inf`` if
            it never expires.
        held_for: seconds it has been held, if the holder has said so.
    """

    name: str
    holder: Owner | None = None
    ttl: float | None = None
    held_for: float | None = None

    @classmethod
    def over(cls, lock: Lock, name: str) -> Conflict:
        """Ask Redis who is in the way."""
        held = lock.held()
        if held is None:
            return cls(name)
        return cls(name, held.owner, held.ttl, held.held_for)

    @property
    def retry_after(self) -> int:
        """Whole seconds after which trying again makes sense, from 1 to 3600."""
        return max(1, min(3600, math.ceil(min(self.ttl or 0.0, 3600.0))))

    def __str__(self) -> str:
        # In one line, whatever a lock or its holder is called.
        return " ".join(self._words().split())

    def _words(self) -> str:
        if self.holder is None:
            return _("%(name)s is held by another, or was a moment ago") % {"name": self.name}
        words = _("%(name)s is held by %(holder)s") % {"name": self.name, "holder": self.holder}
        if self.held_for is not None:
            words += " " + _("for %(duration)s") % {"duration": _seconds(self.held_for)}
        if self.ttl is None or math.isinf(self.ttl):
            return words
        ends = _("its lock ends in %(duration)s unless renewed") % {"duration": _seconds(self.ttl)}
        return f"{words}; {ends}"

    # -- the answers -------------------------------------------------------------------------

    def response(self, request: HttpRequest, status: int = 409) -> HttpResponse:
        """HTML or JSON, as the client accepts, with ``Retry-After``, never cached. The template is
        ``django_redis_lock/conflict.html``; it is not told who the holder is."""
        response: HttpResponse
        if request.get_preferred_type(["text/html", "application/json"]) == "application/json":
            body = {"detail": _("This is already being done."), "retry_after": self.retry_after}
            response = JsonResponse(body, status=status)
        else:
            context = {"retry_after": self.retry_after}
            page = render_to_string("django_redis_lock/conflict.html", context, request)
            response = HttpResponse(page, status=status)
        response["Retry-After"] = str(self.retry_after)
        response["Cache-Control"] = "no-store"
        return response

    def command_error(self, exit_code: int) -> CommandError:
        """Django prints it as one line on stderr and exits with ``exit_code``."""
        return CommandError(str(self), returncode=exit_code)

    def error(self) -> LockNotAcquired:
        ttl = None if self.ttl is None or math.isinf(self.ttl) else self.ttl
        return LockNotAcquired(str(self), self.name, self.holder, ttl)


#: What ``locked(on_conflict=…)`` takes: called with the conflict and the call's own arguments, it
#: returns what the decorated callable returns instead.
OnConflict = Callable[..., Any]


def _seconds(seconds: float) -> str:
    if seconds < 120:
        whole = max(0, round(seconds))
        return ngettext("%(n)d second", "%(n)d seconds", whole) % {"n": whole}
    whole = round(seconds / 60)
    return ngettext("%(n)d minute", "%(n)d minutes", whole) % {"n": whole}
