"""What one request or one moment says about a page, and what is said of a response that is rendered
after its view has returned."""

from __future__ import annotations

import atexit
import copy
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from django.contrib.messages import get_messages
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.utils.cache import get_conditional_response, has_vary_header, patch_vary_headers
from django.utils.functional import LazyObject, SimpleLazyObject, empty
from django.utils.http import parse_http_date_safe

from ...clock import time
from ...keeper import keeper
from ...singleflight import Postponed, Runner
from ...steps import Steps
from ...threads import Mutex, free_after_fork

if TYPE_CHECKING:
    from django.contrib.sessions.backends.base import SessionBase
    from django.http import HttpRequest

#: What a client makes its request depend on. A page that others get is computed without it.
_CONDITIONS = (
    *("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH", "HTTP_IF_MODIFIED_SINCE", "HTTP_IF_UNMODIFIED_SINCE"),
    *("HTTP_RANGE", "HTTP_IF_RANGE"),
)
#: Django's CSRF protection sets it when a token for this request's client is made.
_TOKEN_USED = "CSRF_COOKIE_NEEDS_UPDATE"
#: Its value if a decorator around the page has used a token, true as well.
_BY_ANOTHER = 1
#: Partial Content, Not Modified, Precondition Failed, Range Not Satisfiable.
_ANSWERS_TO_CONDITIONS = {206, 304, 412, 416}
#: Request Timeout, Too Early, Too Many Requests; and all from 500 on, with ``Retry-After``, or
#: because a lock was taken.
_TEMPORARY = {408, 425, 429}
#: Attributes with the user: of Django's requests, and of those of Django REST framework.
_USERS = ("user", "auser", "_user")
#: Headers by which the pages of users differ.
_BY_USER = ("Cookie", "Authorization")
_POLICIES = ("Content-Security-Policy", "Content-Security-Policy-Report-Only")
#: What Django answers with 4xx when a view raises it.
REFUSALS = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)
#: Not Found, Gone: the only errors of a client that do not depend on which client it is.
_ABOUT_THE_PAGE = {404, 410}


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


def is_refusal(response: object) -> bool:
    """Whether this client gets no page: it may not, is a robot, sent HEAD, wants JSON."""
    status = getattr(response, "status_code", 200)
    return 400 <= status < 500 and status not in _ABOUT_THE_PAGE


def is_answer(response: object) -> bool:
    """Whether it has no error, and is not about the conditions of its request."""
    status = getattr(response, "status_code", 200)
    return status < 400 and status not in _ANSWERS_TO_CONDITIONS


def raise_unless_about_the_page(response: object, mine: bool = True, first: bool = False) -> None:
    """
    Args:
        mine: whether the client of the request gets this response.
        first: whether it is about one client, and no other client got no page just before.

    Raises:
        PageFailed, NotThePage: the status depends on the moment, or on the request.
    """
    status = getattr(response, "status_code", 200)
    later = "Retry-After" in getattr(response, "headers", ())
    later = later or status in _TEMPORARY or hasattr(response, "is_of_this_moment")
    depends = status in _ANSWERS_TO_CONDITIONS or (first and not later)
    if depends and mine:
        raise NotThePage(response)
    if status >= 500 or depends or later:
        raise PageFailed(response)


class Conditions:
    """The conditions of a request: taken out of it while a page is computed, and put back
    afterwards.

    Attributes:
        of_client: what belongs to one client and was used while they were taken out: a CSRF
            token, a nonce of a Content-Security-Policy, messages; else empty.
        session_used: whether the session was read during that time.
        user_used: whether the user was, who may have been loaded before.
        is_of_user: whether that user is logged in.
        in_background: whether another thread may use the session.
    """

    of_client = ""
    session_used = user_used = is_of_user = in_background = _session_used_before = False

    def __init__(self, request: HttpRequest, names: tuple[str, ...] = _CONDITIONS) -> None:
        self._request = getattr(request, "_request", request)
        self._users = _Users(self, request, self._request)
        self._names = names
        self._taken: dict[str, object] | None = None
        self._flag: object = None
        self._session: SessionBase | None = None
        self._of_client_before: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._request.META or name in (self._taken or ())

    def take_out(self) -> None:
        meta = self._request.META
        self._taken = {name: meta.pop(name) for name in self._names if name in meta}
        vars(self._request).pop("headers", None)  # Django computes it from META once.
        self._flag = meta.get(_TOKEN_USED)
        if self._flag is True and not self.of_client:
            meta[_TOKEN_USED] = _BY_ANOTHER
        self._of_client_before = self._what_is_of_client()
        session = None if self.in_background else getattr(self._request, "session", None)
        self._session = session if hasattr(session, "accessed") else None
        if self._session is not None:
            self._session_used_before = self._session.accessed
            self._session.accessed = False
        self._users.watch()

    def put_back(self) -> None:
        if self._taken is None:
            return
        meta = self._request.META
        if meta.get(_TOKEN_USED) is True:
            self.of_client = "a CSRF token"
        elif self._flag is True and _TOKEN_USED in meta:
            meta[_TOKEN_USED] = meta[_TOKEN_USED] == _BY_ANOTHER
        for used in self._what_is_of_client() - self._of_client_before:
            self.of_client = used
        if self._session is not None:
            self.session_used |= self._session.accessed
            # The middleware sets Vary by that.
            self._session.accessed |= self._session_used_before
        self._users.put_back()
        meta.update(self._taken)
        vars(self._request).pop("headers", None)
        self._taken = None

    def _what_is_of_client(self) -> set[str]:
        used = {"a nonce"} if getattr(self._request, "_csp_nonce", None) else set()
        stored = get_messages(self._request)
        return used | ({"messages"} if getattr(stored, "used", False) and len(stored) else set())

    def complete(self, response: HttpResponseBase) -> None:
        """Set what the session's middleware would set later: Django stores a page without it. A
        nonce that the response's own policy names is right for all who get both."""
        if self.session_used or (self.user_used and self._session_used_before):
            patch_vary_headers(response, ("Cookie",))
        elif self.is_of_user and not any(has_vary_header(response, name) for name in _BY_USER):
            self.of_client = self.of_client or "a user"
        if self.of_client == "a nonce" and any(map(response.has_header, _POLICIES)):
            self.of_client = ""


class _Users:
    """The user of a request, and of Django REST framework's request around it: notes in
    ``conditions`` that a view reads it, also if a decorator or a middleware has loaded it, and that
    it sets another."""

    def __init__(self, conditions: Conditions, *requests: object) -> None:
        self._conditions = conditions
        self._requests: list[dict[str, object]] = [
            vars(request) for request in dict.fromkeys(requests)
        ]
        #: The attributes of a request, a name, what was there, and what notes that it is read.
        self._watched: list[tuple[dict[str, object], str, object, object]] = []

    def watch(self) -> None:
        for attributes, name in product(self._requests, _USERS):
            instead = user = attributes.get(name)
            if user is not None:
                instead = self._awaited(user) if name == "auser" else self._lazy(user)
                attributes[name] = instead
            self._watched.append((attributes, name, user, instead))

    def put_back(self) -> None:
        for attributes, name, user, instead in self._watched:
            now = attributes.get(name)
            if now is not instead:  # The view knows who the client is.
                if not (name == "auser" or (isinstance(now, LazyObject) and now._wrapped is empty)):
                    self._note(now)
            elif user is not None:
                attributes[name] = user
        self._watched.clear()

    def _lazy(self, user: object) -> object:
        return SimpleLazyObject(lambda: self._note(user))

    def _awaited(self, auser: object) -> object:
        load = cast("Callable[[], Awaitable[object]]", auser)

        async def noted() -> object:
            return self._note(await load())

        return noted

    def _note(self, user: object) -> object:
        self._conditions.user_used = True
        self._conditions.is_of_user |= bool(getattr(user, "is_authenticated", True))
        return user


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


def finalized(request: HttpRequest, response: HttpResponseBase) -> object:
    """``response``, with the renderer that Django REST framework gives it after its handler has
    returned."""
    view = (getattr(request, "parser_context", None) or {}).get("view")
    if view is None or hasattr(response, "accepted_renderer"):
        return response
    view = copy.copy(view)  # The request's own view changes its headers at the same time.
    view.headers = view.default_response_headers
    return view.finalize_response(request, response)


def complete_like(old: object, request: object, response: object, by_headers: bool) -> None:
    """Set the headers that decide what is stored as in the ``old`` page: in the background, no
    decorator around the view sets them, and it is not known who has read the session.
    ``by_headers``: whether they decide on the page's lifetime.

    Raises:
        PageFailed: there is no old page, and it matters.
    """
    if not isinstance(response, HttpResponseBase):
        return
    if not isinstance(old, HttpResponseBase):
        if is_unrendered(response) or getattr(getattr(request, "session", None), "accessed", False):
            raise PageFailed(response)
        return
    varies_on = map(str.strip, old.get("Vary", "").split(","))
    patch_vary_headers(response, list(filter(None, varies_on)))
    if by_headers and is_unrendered(response) and "Cache-Control" in old:
        response.headers.setdefault("Cache-Control", old["Cache-Control"])


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
    ``renew``, until ``resumed`` or ``drop``."""

    def renew(self) -> None:
        """The rest of the computation begins: the keeper renews the flight."""
        for renewal in self.leader.renewals if self.leader else ():
            renewal.due = time.monotonic()
            keeper().add(renewal)

    def resumed(self, runner: Runner, compute: Callable[[], object]) -> Steps[None]:
        """End the flight with what ``compute`` returns, or as its exception says. (Without a
        leader, Redis was down when the computation began.)"""
        if self.leader is not None:
            leader, self.leader = self.leader, None
            yield from leader.resume(runner, compute)

    def fail(self) -> Steps[None]:
        """End the flight without a value; also without a leader."""
        if self.leader is not None:
            leader, self.leader = self.leader, None
            yield from leader.fail()

    def drop(self) -> None:
        """End the flight without a value: the rest of the computation will never begin. The garbage
        collector may call this, so the keeper does it."""
        leader, self.leader = self.leader, None
        if leader is not None:
            leader.end_later()


class Rendering:
    """A response that is rendered after its view has returned. By then the decorators around the
    view have set their headers, so Django decides after the rendering what is stored.

    Args:
        conditions: of the request; the rendering does not see them.
        rendered: called with the rendered response; returns the response to send.
        failed: called with the exception that the rendering raised; returns a response to send
            instead, or None.
    """

    def __init__(
        self,
        response: Any,
        conditions: Conditions,
        rendered: Callable[[HttpResponseBase, OpenFlight], object],
        failed: Callable[[BaseException, OpenFlight], object],
    ) -> None:
        self.postponed = OpenFlight()
        self._conditions = conditions
        self._rendered, self._failed = rendered, failed
        #: That of a page within this one.
        self.inner = vars(response).get("_rendering")
        if self.inner is None:
            kind: object = type(response)
            _change_class(response, _with_rendering(kind))
        response._rendering = self
        response.add_post_render_callback(self._decide)
        # This refers to no response, so one that is not rendered is freed at once.
        weakref.finalize(response, self.postponed.drop).atexit = False

    def render(self, response: Any) -> object:
        self._conditions.take_out()
        self.postponed.renew()
        try:
            return response.render()
        except BaseException as error:
            self._conditions.put_back()
            instead = self._failed(error, self.postponed)
            if instead is None:
                raise
            return instead
        finally:
            self._conditions.put_back()

    def _decide(self, response: HttpResponseBase) -> object:
        self._conditions.put_back()
        return self._rendered(response, self.postponed)


#: Without the GIL, a change of class stops all threads. One that is under way in a daemon thread as
#: the process ends would keep it from ending, so there is none then.
_changing = free_after_fork(Mutex())
atexit.register(_changing.acquire)


def _change_class(response: object, kind: type) -> None:
    with _changing:
        response.__class__ = kind


@cache
def _with_rendering(kind: Any) -> Any:
    """A class of responses whose ``render`` begins with that of a ``Rendering``."""

    def render(response: Any) -> object:
        rendering = vars(response).pop("_rendering")
        if rendering.inner is None:
            _change_class(response, kind)
        else:
            response._rendering = rendering.inner
        return rendering.render(response)

    return type(kind.__name__, (kind,), {"render": render, "__module__": kind.__module__})


class OwnWrites:
    """Notes what the code in a block of ``computing(None, keys, …)`` does itself to ``keys``, which
    have no flights."""

    token = b""

    def __init__(self) -> None:
        self.own_writes: dict[bytes, str] = {}


def copied(request: HttpRequest) -> Any:
    """A copy for the background: what a view changes is not seen by the request's middleware."""
    copy: Any = object.__new__(type(request))
    vars(copy).update(vars(request))
    copy.META = dict(request.META)
    if hasattr(request, "_request"):  # Django REST framework wraps Django's.
        copy._request = copied(request._request)
    copy._cache_update_cache = True
    return copy
