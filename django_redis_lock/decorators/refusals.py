"""Who gets a response when a lock is taken, or cannot be requested, and who an exception.

Who is known to send a response on gets one (``sends_on``); elsewhere it would be a value, and true.
Everybody else gets an exception, and ``RefusalMiddleware`` makes the same response of one that
reaches Django.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from django.urls import get_urlconf
from django.utils.deprecation import MiddlewareMixin

from ..contention import Conflict, service_unavailable
from ..exceptions import LockNotAcquired
from ..transport.refusals import is_unusable
from .targets import LOCKED, bound_method, is_api_view, view_of

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse
    from django.views import View

    from .key_template import Args, Kwargs

#: Attributes of errors.
_STATUS, _OUTAGE = "_redis_lock_status", "_redis_lock_outage"


def with_status(error: LockNotAcquired, status_code: int) -> LockNotAcquired:
    """``error``, for a call that has its own ``status_code``."""
    setattr(error, _STATUS, status_code)
    return error


def note_outage(error: Exception, name: str, retry_after: float | None) -> None:
    """``locked()`` has run nothing, because of ``error``."""
    setattr(error, _OUTAGE, (name, retry_after))


class RefusalMiddleware(MiddlewareMixin):
    """Answers 409 with ``Retry-After`` if a view raises ``LockNotAcquired``, and 503 if it raises
    what ``locked()`` raises while Redis is down: HTML or JSON, as the client prefers.

    A view with ``locked()`` does not need it; what a view calls does, and what other packages call
    with a request: functions of Django REST framework and Django Ninja, actions of the admin.
    """

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        match = request.resolver_match
        json = match is not None and is_api_view(getattr(match.func, "cls", None))
        if isinstance(exception, LockNotAcquired) and exception.retry_after is not None:
            wait = exception.retry_after  # Not that of get_or_set(), which has none.
            conflict = Conflict.of(str(exception.lock_name), None, retry_after=wait)
            status_code: int = getattr(exception, _STATUS, 409)
            return conflict.response(request, status_code, json=json)
        if hasattr(exception, _OUTAGE) and is_unusable(exception):
            name, retry_after = getattr(exception, _OUTAGE)
            return service_unavailable(request, name, exception, retry_after, json)
        return None


def sends_on(locked: object, function: object, args: Args, kwargs: Kwargs, request: Any) -> bool:
    """Whether Django sends on what this call returns: ``locked``, made from ``function``, is what
    the URL of the request leads to, or a method to which that class of views dispatches. Where
    Django's handler knows nothing of the request, as in a test, whatever takes it first is."""
    match = getattr(request, "resolver_match", None)
    if match is None and get_urlconf() is not None:
        return False  # Django's handler has yet to resolve it, for a middleware.
    view = view_of(function, args)
    if view is not None:
        kinds = [getattr(match and match.func, name, None) for name in ("view_class", "cls")]
        return (match is None or type(view) in kinds) and _is_handler(view, function, request)
    if match is None:
        if bound_method(function) is not None:
            return False
        return args[0] is request if args else "sender" not in kwargs  # Of a signal.
    return any(vars(layer).get(LOCKED) is locked for layer in layers(match.func))


def _is_handler(view: View, function: object, request: Any) -> bool:
    """Whether ``function`` is a method of ``view`` that gets requests, and answers."""
    method = bound_method(function)
    name = getattr(function if method is None else method, "__name__", "")
    chosen = getattr(view, (request.method or "").lower(), None)  # Perhaps an action of a view set.
    return name in {"dispatch", getattr(chosen, "__name__", ""), *view.http_method_names}


def layers(view: Any) -> Iterator[Any]:
    """``view``, and what it calls as far as Python's own attributes say so."""
    while view is not None:
        view = getattr(view, "__func__", view)
        if isinstance(view, functools.partial):
            yield view
            view = getattr(view, "__wrapped__", view.func)
        elif inspect.isfunction(view):
            yield view
            view = getattr(view, "__wrapped__", None)
        elif callable(view) and not inspect.isroutine(view):
            view = type(view).__call__
        else:
            return


def takes_request(function: Callable[..., object]) -> bool:
    """Whether this is a function or method with a request among its first two arguments."""
    return "request" in (first_arguments(function) or ())


def first_arguments(function: Callable[..., object]) -> list[str] | None:
    """The names of two at most; None if they are unknown, as those of a function in C may be."""
    try:
        return [*inspect.signature(bound_method(function) or function).parameters][:2]
    except (TypeError, ValueError):
        return None
