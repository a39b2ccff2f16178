"""What one request or one moment says about a page, and what is said of a response that is rendered
after its view has returned."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, cast

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.utils.cache import (
    get_conditional_response,
    get_max_age,
    has_vary_header,
)
from django.utils.http import parse_http_date_safe

from ...clock import time
from ...conditions import Conditions
from ...keeper import keeper
from ...singleflight import Postponed

#: Partial Content, Not Modified, Precondition Failed, Range Not Satisfiable.
_ANSWERS_TO_CONDITIONS = {206, 304, 412, 416}
#: Request Timeout, Too Early, Too Many Requests; and all from 500 on, with ``Retry-After``, or
#: because a lock was taken.
_TEMPORARY = {408, 425, 429}
#: What Django answers with 4xx when a view raises it.
REFUSALS = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)


class PageFailed(Exception):
    """The view answered with a temporary error, which says nothing about the page."""

    def __init__(self, response: Any) -> None:
        super().__init__(f"status {response.status_code}")
        self.response = response


class NotThePage(BaseException):
    """The view answered to a condition of the request, which says nothing about the page."""

    def __init__(self, response: object) -> None:
        super().__init__()
        self.response = response


def raise_unless_about_the_page(response: object, mine: bool) -> None:
    """
    Args:
        mine: whether the client of the request gets this response.

    Raises:
        PageFailed, NotThePage: the status depends on the moment, or on a condition of the request.
    """
    status, headers = getattr(response, "status_code", 200), getattr(response, "headers", ())
    if status in _ANSWERS_TO_CONDITIONS and mine:
        raise NotThePage(response)
    if status >= 500 or status in _TEMPORARY or status in _ANSWERS_TO_CONDITIONS:
        raise PageFailed(response)
    if "Retry-After" in headers or hasattr(response, "is_of_this_moment"):
        raise PageFailed(response)


def why_not_stored(request: object, response: HttpResponseBase, of_client: str) -> str:
    """Why ``response`` is no page: ``sets a cookie``. The rules are Django's."""
    cache_control = response.get("Cache-Control", "").lower()
    says = [name for name in ("private", "no-cache", "no-store") if name in cache_control]
    if of_client:
        why = "is of a user" if of_client == "a user" else f"has {of_client}"
    elif response.streaming:
        why = "is a stream"
    elif response.status_code != 200:
        why = f"status {response.status_code}"
    elif response.cookies:
        why = "sets a cookie"
    elif says:
        why = f"Cache-Control: {says[0]}"
    elif has_vary_header(response, "*"):
        why = "Vary: *"
    elif not getattr(request, "_cache_update_cache", True):
        why = "its request says so"
    else:
        why = "max-age=0" if get_max_age(response) == 0 else "timeout 0"
    return why


def conditional(request: HttpRequest, response: object) -> object:
    """``response``, or what Django answers instead to the conditions of ``request``: that its
    client has this page."""
    if not isinstance(response, HttpResponseBase) or response.status_code != 200:
        return response
    etag, modified = response.get("ETag"), response.get("Last-Modified")
    date = parse_http_date_safe(modified) if modified else None
    if not etag and date is None:
        return response
    return get_conditional_response(request, etag, date, cast(HttpResponse, response))


def close_without_signal(response: Any) -> None:
    """Close the files of a response that is not sent. Its own ``close()`` would tell Django that
    the request has ended."""
    for closer in response._resource_closers:
        with suppress(Exception):
            closer()


def is_unrendered(response: object) -> bool:
    return not getattr(response, "is_rendered", True)


class OpenFlight(Postponed):
    """The flight of a page that is not rendered: it goes on for its timeout, and longer with
    ``renew``, until it is ``closed``. (Without a leader, Redis was down when it began.)"""

    def renew(self) -> None:
        """The rest of the computation begins: the keeper renews the flight."""
        for renewal in self.leader.renewals if self.leader else ():
            renewal.due = time.monotonic()
            keeper().add(renewal)

    def closed(self) -> Any:
        """Its leader, who ends it: with ``resume`` or without a value. Only the first call has
        it."""
        leader, self.leader = self.leader, None
        return leader

    def drop(self) -> None:
        """End the flight without a value: the rest of the computation will never begin. The garbage
        collector may call this, so the keeper does it."""
        leader = self.closed()
        if leader is not None:
            leader.end_later()


class Rendering:
    """A response that is rendered after its view has returned. By then the decorators around the
    view have set their headers, so Django decides after the rendering what is stored.

    Args:
        conditions: of the request; the rendering does not see them.
        ended: called with the flight, and with the rendered response and None, or None and the
            exception that the rendering raised; returns the response to send, or None to let that
            exception be raised.
    """

    inner: Rendering | None

    def __init__(
        self,
        conditions: Conditions,
        ended: Callable[[OpenFlight, Any, BaseException | None], object],
    ) -> None:
        self.flight = OpenFlight()
        self._conditions, self._ended = conditions, ended

    def of(self, response: Any) -> Any:
        """``response``, whose ``render`` is this."""
        #: That of a page within this one.
        self.inner = vars(response).get("_rendering")
        if self.inner is None:
            kind: object = type(response)
            response = _as(_with_rendering(kind), response)
        response._rendering = self
        response.add_post_render_callback(self._decide)
        # Of the flight, not of this: a request may refer to its response, which is to be freed.
        weakref.finalize(response, self.flight.drop).atexit = False
        return response

    def render(self, response: Any) -> object:
        self._conditions.take_out()
        self.flight.renew()
        try:
            return response.render()
        except BaseException as error:
            self._conditions.put_back()
            instead = self._ended(self.flight, None, error)
            if instead is None:
                raise
            return instead
        finally:
            self._conditions.put_back()

    def _decide(self, response: HttpResponseBase) -> object:
        self._conditions.put_back()
        return self._ended(self.flight, response, None)


@cache
def _with_rendering(kind: Any) -> Any:
    """A class of responses whose ``render`` begins with that of a ``Rendering``; what that renders
    is of ``kind`` again."""

    def render(response: Any) -> object:
        rendering = vars(response).pop("_rendering")
        if rendering.inner is not None:
            response._rendering = rendering.inner
            return rendering.render(response)
        return rendering.render(_as(kind, response))  # The flight ends if ``response`` is freed.

    return type(kind.__name__, (kind,), {"render": render, "__module__": kind.__module__})


def _as(kind: Any, response: object) -> Any:
    """``response``, with all its attributes, as one of ``kind``."""
    same = object.__new__(kind)
    same.__dict__ = vars(response)
    return same


def copied(request: HttpRequest) -> Any:
    """A copy for the background: what a view changes is not seen by the request's middleware."""
    copy: Any = object.__new__(type(request))
    vars(copy).update(vars(request))
    copy.META = dict(request.META)
    if hasattr(request, "_request"):  # Django REST framework wraps Django's.
        copy._request = copied(request._request)
    copy._cache_update_cache = True
    return copy
