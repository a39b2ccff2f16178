"""Requests as people name them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest, HttpResponseBase
from django.utils.decorators import sync_and_async_middleware
from django.utils.encoding import escape_uri_path
from django.utils.functional import LazyObject, empty

from ..conf import Conf
from ..locking import doing

_CONF = Conf()
#: Characters of a path.
MAX_PATH_LENGTH = 120
#: An id comes from the client, if no proxy replaces it.
REQUEST_ID = re.compile(r"[\w.:/+=-]{1,64}", re.ASCII)


class RequestActivity:
    """``GET /invoices/17/ (request 4f1c, user 3)``: method and path without the query string, the
    request's id if it has one, and the user's primary key if ``HOLDER_USER`` asks for it.

    Args:
        request: Django's, or that of Django REST framework. It is not kept alive.
    """

    def __init__(self, request: Any) -> None:
        self._request = weakref.ref(getattr(request, "_request", request))

    def __str__(self) -> str:
        request = self._request()
        if request is None:
            return ""
        path = escape_uri_path(request.path)
        if len(path) > MAX_PATH_LENGTH:
            path = f"{path[:MAX_PATH_LENGTH]}…"
        known = {"request": _id_of(request), "user": _user_of(request) if _CONF.HOLDER_USER else ""}
        more = ", ".join(f"{name} {value}" for name, value in known.items() if value)
        return f"{request.method} {path}" + (f" ({more})" if more else "")


def _id_of(request: Any) -> str:
    """That of the middleware that gives requests their ids, or that of the proxy."""
    for name in ("id", "request_id"):
        given = getattr(request, name, None)
        if given:
            break
    else:
        given = request.headers.get("X-Request-ID", "")
    text = str(given)
    return text if REQUEST_ID.fullmatch(text) else ""


def _user_of(request: Any) -> str:
    """The primary key of the user, if the request has loaded it: the keeper must not query the
    database."""
    user = getattr(request, "user", None)
    if isinstance(user, LazyObject) and user._wrapped is empty:
        user = getattr(request, "_acached_user", None)  # From ``request.auser()``.
    key = getattr(user, "pk", None)
    return "" if key is None else str(key)


@sync_and_async_middleware
def note_request(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """A middleware: the description of a lock's holder says for which request it was acquired.
    Views with ``locked()`` do not need it."""
    if iscoroutinefunction(get_response):

        async def acall(request: HttpRequest) -> HttpResponseBase:
            with doing(RequestActivity(request)):
                response: HttpResponseBase = await get_response(request)
                return response

        return acall

    def call(request: HttpRequest) -> HttpResponseBase:
        with doing(RequestActivity(request)):
            response: HttpResponseBase = get_response(request)
            return response

    return call
