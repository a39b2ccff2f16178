"""What ``locked()`` returns or raises when a lock is taken, or could not be requested.

``locked(on_conflict=…)`` takes one of the functions at the end of this module, or any callable. It
is called with a ``Conflict`` and the arguments of the call, and the caller gets its result.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from django.contrib import messages
from django.core.management import CommandError
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    HttpResponseRedirect,
    JsonResponse,
)
from django.shortcuts import resolve_url
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.templatetags.static import static
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext as _

from .activity import request_of
from .conf import Conf
from .exceptions import LockNotAcquired, TooFewReplicas
from .protocol import Owner, printable
from .protocol.holders import DEFAULT_RETRY_SECONDS, HolderInfo, seconds_to_retry
from .threads import get_logger
from .transport.hints import explained

__all__ = [
    "Conflict",
    "OnConflict",
    "raise_error",
    "redirect_to",
    "request_of",
    "respond",
    "retry_task",
    "skip",
    "unavailable",
]

logger = get_logger("django_redis_lock.locked")

RETRY_ONLY_CELERY = "retry_task works only in a Celery task"
#: Seconds after which a client should try again while Redis is down.
OUTAGE_RETRY_SECONDS = 10.0
TEMPLATE = "django_redis_lock/conflict.html"
#: Attributes of errors, for ``RefusalMiddleware``: the status of the answer to a conflict; name and
#: ``retry_after`` of a lock that could not be requested, so that nothing was run.
REFUSED_STATUS, OUTAGE = "_redis_lock_status", "_redis_lock_outage"


@dataclass(frozen=True)
class Conflict:
    """A lock that could not be acquired, and why.

    Attributes:
        name: the lock's name, as ``locked()`` was given it.
        holder: the holder; None if the lock is free again.
        ttl: seconds until the lock expires unless renewed; None if it is free again, ``inf`` if it
            never expires.
        held_for: seconds since the acquisition, if known.
        using: the cache alias.
        retry_after: whole seconds after which trying again makes sense, from 1 to 3600.
        limit: how many may hold the lock at a time. If more than 1, all places are taken, and
            ``holder`` is the one whose lifetime ends first.
        first_name: of several names, if it is unknown which is held: then ``name`` has all.
        resting: whether the holder has released the lock, and its ``min_hold`` is not over.
    """

    name: str
    holder: Owner | None = None
    ttl: float | None = None
    held_for: float | None = None
    using: str = "default"
    retry_after: int = DEFAULT_RETRY_SECONDS
    limit: int = 1
    first_name: str = ""
    resting: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        held: HolderInfo | None,
        using: str = "default",
        retry_after: float | None = None,
        usual_hold: float | None = None,
    ) -> Conflict:
        """``held``: the result of ``lock.held()``; None if unknown. ``usual_hold``: seconds for
        which such locks are held on average, if known."""
        seconds = seconds_to_retry(held, usual_hold, retry_after)
        if held is None:
            return cls(name, using=using, retry_after=seconds)
        of_holder = (held.in_the_way, held.ttl, held.held_for)
        return cls(name, *of_holder, using, seconds, held.limit, resting=held.resting)

    def __str__(self) -> str:
        # One line, even if a name contains line breaks.
        return " ".join(self._sentence().split())

    def _sentence(self) -> str:
        if self.holder is None:
            return f"{self.name} is held by another caller, or was a moment ago"
        if self.resting and self.ttl is not None and self.limit == 1:
            return f"{self.name} was released, and its min_hold ends in {_seconds(self.ttl)}"
        words = f"{self.name} is held by {self.holder}"
        if self.limit > 1:
            taken = f"all {self.limit} places of {self.name} are taken"
            words = f"{taken}, and the first to end is held by {self.holder}"
        if self.held_for is not None:
            words += f" for {_seconds(self.held_for)}"
        if self.ttl is None or math.isinf(self.ttl):
            return words
        return f"{words}; its lock ends in {_seconds(self.ttl)} unless renewed"

    def response(
        self,
        request: object,
        status: int = 409,
        template: str = TEMPLATE,
        json: bool = False,
        detail: str = "",
    ) -> HttpResponse:
        """HTML or JSON, as the client accepts, with ``Retry-After``, never cached. The context of
        the template has ``detail``, ``retry_after`` (seconds), ``reload`` (whether the request can
        be repeated) and ``stylesheet`` (a URL), but not the holder.

        Args:
            request: Django's, or that of Django REST framework, which then chooses the format.
            json: prefer JSON if the client accepts both.
            detail: another sentence than that the operation is in progress.
        """
        detail = detail or _("This operation is already in progress.")
        data = {"detail": detail, "retry_after": self.retry_after}
        response: HttpResponse
        if not isinstance(request, HttpRequest):
            # A request of Django REST framework, so that is installed.
            from rest_framework.response import Response  # noqa: PLC0415  # an optional package

            response = Response(data, status=status)
        elif self._wants_json(request, json):
            response = JsonResponse(data, status=status)
        else:
            again = request.method in ("GET", "HEAD")  # A POST must not be repeated.
            context = {**data, "reload": again, "stylesheet": _stylesheet()}
            try:
                response = HttpResponse(render_to_string(template, context, request), status=status)
            except TemplateDoesNotExist:
                if template != TEMPLATE:
                    raise
                # The project has no engine that finds the templates of apps.
                plain = {"status": status, "content_type": "text/plain; charset=utf-8"}
                response = HttpResponse(detail, **plain)
        response["Retry-After"] = str(self.retry_after)
        response["Cache-Control"] = "no-store"
        patch_vary_headers(response, ["Accept"])
        return response

    def _wants_json(self, request: HttpRequest, json: bool) -> bool:
        sent = (request.content_type or "").lower()
        json = json or sent == "application/json" or sent.endswith("+json")
        kinds = ["text/html", "application/json"]
        wanted = request.get_preferred_type(kinds[::-1] if json else kinds)
        return wanted == "application/json" or (json and wanted is None)

    def line(self) -> str:
        """One line for a terminal: the holder, and the command that shows more."""
        more = ["manage.py", "locks", "show", self.first_name or self.name]
        if self.using != Conf().USING:
            more += ["--using", self.using]
        return f"{self}. More: {' '.join(shlex.join(more).split())}"

    def command_error(self, exit_code: int) -> CommandError:
        """Django prints it as one line on stderr and exits with ``exit_code``."""
        return CommandError(self.line(), returncode=exit_code)

    def error(self) -> LockNotAcquired:
        of_holder = (self.holder, float(self.retry_after), self.held_for)
        error = LockNotAcquired(str(self), None, *of_holder)
        error.lock_name = self.name  # The text has it already.
        return error


def _stylesheet() -> str:
    """Empty if the static files were not collected: a page without style is better than an
    error."""
    try:
        return static("django_redis_lock/conflict.css")
    except ValueError:
        return ""


def _seconds(seconds: float) -> str:
    number, unit = round(seconds), "second"
    if number < 1:
        return "less than a second"
    if seconds >= 120:
        number, unit = round(seconds / 60), "minute"
    return f"{number} {unit}" + "s" * (number != 1)


def unavailable(name: str, error: Exception, exit_code: int) -> CommandError:
    """The error of a command that did not run because its lock could not be requested."""
    why = f"the lock {name} could not be requested: {explained(error)}"
    if isinstance(error, TooFewReplicas):
        why = str(error)
    elif "WRONGTYPE" in str(error):
        why = f"the key of the lock {name} has other data, so no caller can acquire it"
    return CommandError(" ".join(f"nothing was run: {why}".split()), returncode=exit_code)


def service_unavailable(
    request: object, name: str, error: Exception, retry_after: float | None, json: bool
) -> HttpResponse:
    """The same of a view. Django logs the response, but not the error."""
    words = "A view was not run, because the lock %(lock)s could not be requested: %(error)s"
    logger.error(words, {"lock": printable(name), "error": error}, exc_info=error)
    conflict = Conflict.of(name, None, retry_after=retry_after or OUTAGE_RETRY_SECONDS)
    detail = _("This operation is not available at the moment.")
    return conflict.response(request, 503, json=json, detail=detail)


def of_this_moment(answer: object) -> Any:
    """``answer``, noted as one that says nothing about the page, for a cache of pages around it."""
    if isinstance(answer, HttpResponseBase):
        answer.is_of_this_moment = True  # type: ignore[attr-defined]  # our note
    return answer


#: Called with the conflict and the call's own arguments.
OnConflict = Callable[..., Any]


if TYPE_CHECKING:

    class Skipped:
        """For type checkers: what ``skip`` returns depends on what is decorated."""

    class Raised:
        """For type checkers: nothing is returned. (``NoReturn`` fits each overload.)"""


def skip(conflict: Conflict, *args: object, **kwargs: object) -> Skipped:
    """Do nothing: a function and a task return None, a command exits with 0 and prints nothing, a
    view returns 204."""
    response: object = None
    if request_of(args, kwargs) is not None:
        response = HttpResponse(status=204, headers={"Cache-Control": "no-store"})
    return cast("Skipped", response)


def raise_error(conflict: Conflict, *args: object, **kwargs: object) -> Raised:
    """Raise ``LockNotAcquired`` also from a view or a command, for a middleware or a caller that
    handles it."""
    raise conflict.error()


def respond(template: str = TEMPLATE, *, status: int = 409) -> Callable[..., HttpResponse]:
    """Respond with another page.

    Args:
        template: gets the same context as the default template; clients that prefer JSON get JSON.
        status: of the response.
    """

    def answer(conflict: Conflict, *args: object, **kwargs: object) -> HttpResponse:
        return conflict.response(_request(args, kwargs), status, template)

    return answer


def redirect_to(
    to: Any, *arguments: object, message: str = "", **keywords: object
) -> Callable[..., HttpResponse]:
    """Redirect the browser, for instance back to the list with the button.

    Args:
        to: a URL, the name of a view or an object with ``get_absolute_url``, as for Django's
            ``redirect``; ``arguments`` and ``keywords`` are the view's.
        message: shown as a warning by ``django.contrib.messages``; without its middleware, the log
            says that it was not shown.
    """

    def answer(conflict: Conflict, *args: object, **kwargs: object) -> HttpResponse:
        request = _request(args, kwargs)
        if message:
            try:
                messages.warning(getattr(request, "_request", request), message)
            except messages.MessageFailure as error:
                words = "A redirect because the lock %(lock)s is taken has no message: %(error)s"
                logger.warning(words, {"lock": printable(conflict.name), "error": error})
        response = HttpResponseRedirect(resolve_url(to, *arguments, **keywords))
        response.status_code = 303  # "See other": the browser does not repeat a POST.
        response["Cache-Control"] = "no-store"
        return response

    return answer


def retry_task(conflict: Conflict, *args: object, **kwargs: object) -> Raised:
    """Let Celery retry the task when the lock may be free. Each retry counts towards
    ``max_retries``. In eager mode, where Celery would retry at once, LockNotAcquired is raised."""
    task: Any = args[0] if args else None
    if not hasattr(task, "retry"):  # Without bind=True, or in a function that the task calls.
        task = getattr(sys.modules.get("celery"), "current_task", None)
    if not hasattr(task, "retry"):
        raise TypeError(RETRY_ONLY_CELERY)
    if getattr(task.request, "is_eager", False):
        raise conflict.error()
    raise task.retry(countdown=conflict.retry_after, exc=conflict.error())


def _request(args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    request = request_of(args, kwargs)
    if request is None:
        raise TypeError("this function works only for views: the call has no request argument")
    return request
