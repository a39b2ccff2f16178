"""What depends on one request (a condition, a range) or on one moment (a temporary error) says
nothing about a page: it ends no protection, and a stale page stays."""

from __future__ import annotations

import asyncio
import io
import threading
from contextlib import closing
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.core.signals import request_finished
from django.http import FileResponse, Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import path
from django.views.decorators.http import condition

from django_redis_lock import cached_page, locked
from django_redis_lock.contention import redirect_to, respond, skip
from tests.holding import hold
from tests.processes import in_threads, until
from tests.support.cached_pages import expire_pages, finished, followers

pytestmark = [pytest.mark.usefixtures("client"), pytest.mark.invariant("C6")]
TEMPORARY = [408, 425, 429, 500, 503]
OLD, NEW = "Mon, 01 Jan 2024 00:00:00 GMT", "Tue, 02 Jan 2024 00:00:00 GMT"
#: Headers of a request, and what a client with them gets of a page with the ETag and the date.
CONDITIONS: dict[str, tuple[dict[str, str], int]] = {
    "same": ({"If-None-Match": '"e"'}, 304),
    "other": ({"If-None-Match": '"x"'}, 200),
    "unmodified": ({"If-Modified-Since": NEW}, 304),
    "modified": ({"If-Modified-Since": OLD}, 200),
    "match": ({"If-Match": '"x"'}, 412),
    "unmodified since": ({"If-Unmodified-Since": OLD}, 412),
    "range": ({"Range": "bytes=0-1", "If-Range": '"e"'}, 200),
}


def ask(**headers: str) -> HttpRequest:
    return RequestFactory().get("/page/", headers=headers)


class Page:
    """A view that answers to conditions itself, as ``kind`` says, and counts; and that has trouble
    first: statuses, or exceptions."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls = 0
        self.waiting = 0
        self.seen: list[Any] = []
        self.troubles: list[Any] = []
        self.alone = threading.Lock()

    def __call__(self, request: HttpRequest) -> Any:
        assert self.alone.acquire(blocking=False), "two compute at once"
        try:
            return self.answer(request)
        finally:
            self.alone.release()

    def answer(self, request: HttpRequest) -> Any:
        self.calls += 1
        trouble = self.troubles.pop(0) if self.troubles else None
        if self.calls == 1 and self.waiting:
            until(lambda: followers() >= self.waiting)
        self.seen.append([name for name in request.headers if name.startswith(("If-", "Range"))])
        if "Range" in request.headers:
            return HttpResponse("pa", status=206)
        if isinstance(trouble, type):
            raise trouble
        text, status = ("busy", trouble) if trouble else ("page", 200)
        if self.kind == "template":
            source = engines["django"].from_string(text)
            response: Any = TemplateResponse(request, source, status=status)
        else:
            response = HttpResponse(text, status=status)
        response["ETag"], response["Last-Modified"] = '"e"', NEW
        return response

    def view(self) -> Any:
        view: Any = self.__call__
        if self.kind == "condition":
            view = condition(etag_func=lambda request: '"e"')(view)
        if self.kind == "async":

            async def aview(request: HttpRequest) -> Any:
                return self(request)

            view = aview
        page: Any = cached_page(60, stale=1000)(view)
        return lambda request: finished(page(request))


@pytest.mark.parametrize("kind", ["plain", "condition", "template", "async"])
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_is_not_seen_by_the_view_and_answered_afterwards(kind: str, name: str) -> None:
    headers, status = CONDITIONS[name]
    page = Page(kind)
    view = page.view()
    request = ask(**headers)
    assert [view(request).status_code, view(ask(**headers)).status_code] == [status] * 2
    assert dict(request.headers) == dict(ask(**headers).headers)
    assert (view(ask()).content, page.calls, page.seen) == (b"page", 1, [[]])


@pytest.mark.parametrize("name", ["same", "range", "match"])
def test_a_herd_behind_a_condition_computes_once(name: str) -> None:
    page = Page("plain")
    page.waiting = 6
    view, left = page.view(), [ask(**CONDITIONS[name][0]) for _ in range(8)]
    found = in_threads(8, lambda: view(left.pop()).status_code)
    assert (found, page.calls) == ([CONDITIONS[name][1]] * 8, 1)


def test_a_condition_leaves_a_stale_page() -> None:
    page = Page("plain")
    view = page.view()
    view(ask())
    expire_pages()
    assert view(ask(**CONDITIONS["same"][0])).status_code == 304
    assert [view(ask()).status_code for _ in range(3)] == [200] * 3
    assert page.calls == 2


def test_a_visitor_who_seeks_in_a_stream_gets_the_part() -> None:
    """For the first answer, which is not sent, the request does not end: that would close its
    database connections, and forget its urlconf."""
    opened: list[io.BytesIO] = []
    ended: list[Any] = []

    @cached_page(60)
    def video(request: HttpRequest) -> StreamingHttpResponse:
        part = "Range" in request.headers
        opened.append(io.BytesIO(b"pa" if part else b"page"))
        return FileResponse(opened[-1], status=206 if part else 200)

    request_finished.connect(end := lambda **_: ended.append(1))
    try:
        for _ in range(2):
            response = video(ask(Range="bytes=0-1"))
            assert (response.status_code, b"".join(response)) == (206, b"pa")
        assert not ended
        assert [file.closed for file in opened] == [True, False, False][: len(opened)]
    finally:
        request_finished.disconnect(end)


# -- temporary errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "template"])
@pytest.mark.parametrize("status", TEMPORARY)
def test_one_follower_at_a_time_takes_over(status: int, kind: str) -> None:
    page = Page(kind)
    page.troubles, page.waiting = [status] * 3, 6
    view = page.view()
    found = in_threads(10, lambda: view(ask()).status_code)
    assert sorted(found) == [200] * 7 + [status] * 3
    assert page.calls == 4


@pytest.mark.parametrize("kind", ["plain", "template", "async"])
@pytest.mark.parametrize("trouble", [*TEMPORARY, KeyError])
def test_a_stale_page_stays(trouble: Any, kind: str) -> None:
    page = Page(kind)
    view = page.view()
    view(ask())
    expire_pages()
    page.troubles = [trouble] * 2
    assert [view(ask()).content for _ in range(2)] == [b"page"] * 2
    assert page.calls == 3


#: Of a view with a lock, when it is taken; of one that limits its visitors itself.
BUSY: dict[str, Any] = {
    "locked": {},
    "redirect_to": {"on_conflict": redirect_to("/elsewhere/")},
    "skip": {"on_conflict": skip},
    "respond": {"on_conflict": respond(status=200)},
    "own": {"on_conflict": lambda *_, **__: HttpResponse("busy")},
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", BUSY)
def test_a_lock_that_is_taken_says_nothing_about_the_page(name: str, asynchronous: bool) -> None:
    page = Page("async" if asynchronous else "plain")
    options = BUSY[name]

    def call(request: HttpRequest) -> Any:
        return page(request)

    async def acall(request: HttpRequest) -> Any:
        return page(request)

    locked_view = locked("page", **options)(acall if asynchronous else call)
    cached = cached_page(60, stale=1000)(locked_view)
    view: Any = (lambda request: asyncio.run(cached(request))) if asynchronous else cached
    with hold("page"):
        answer = view(ask())
        assert answer.content != b"page"
        assert view(ask()).status_code == answer.status_code
    assert view(ask()).content == b"page"
    expire_pages()
    with hold("page"):
        assert [view(ask()).content for _ in range(2)] == [b"page"] * 2
    assert page.calls == 1


def test_an_answer_to_this_request_or_for_now_leaves_a_stale_page() -> None:
    """Of a view that answers to a condition itself, or with Retry-After."""
    statuses = [200, 304, 403, 423, 200]

    @cached_page(60, stale=1000)
    def page(request: HttpRequest) -> HttpResponse:
        status = statuses.pop(0)
        headers = {"Retry-After": "5"} if status > 400 else {}
        return HttpResponse("page", status=status, headers=headers)

    for left, answer in ((4, 200), (3, 304), (2, 200), (1, 200), (0, 200)):
        assert page(ask()).status_code == answer
        assert len(statuses) == left
        expire_pages()


# -- what is no page -----------------------------------------------------------------------------

#: How a page is taken from its visitors: with which status, or in another way.
ENDED: dict[str, Any] = {
    **{str(status): status for status in (301, 302, 400, 401, 403, 404, 405, 406, 410, 451)},
    **{error.__name__: error for error in (Http404, PermissionDenied, SuspiciousOperation)},
    "cookie": lambda response: response.set_cookie("seen", "1"),
    **{
        f"{name}: {value}": (lambda response, n=name, v=value: response.__setitem__(n, v))
        for name, value in (
            *(("Cache-Control", "private"), ("Cache-Control", "no-store"), ("Vary", "*")),
            ("Content-Security-Policy", "script-src 'nonce-a'"),
        )
    },
}
HOW: dict[str, Any] = {
    "inline": {},
    "in the background": {"background": True},
    "after its soft timeout": {"soft_timeout": 0},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["plain", "template", "async"])
@pytest.mark.parametrize("end", ENDED)
def test_what_is_no_page_ends_the_stale_one(end: str, kind: str, how: str) -> None:
    """It was moved, made private, or put behind a login."""
    calls: list[int] = []

    def view(request: HttpRequest) -> Any:
        calls.append(1)
        what = ENDED[end] if len(calls) > 1 else None
        if isinstance(what, type):
            raise what
        status, text = what if isinstance(what, int) else 200, "page" if what is None else "own"
        response: Any = HttpResponse(text, status=status)
        if kind == "template":
            source = engines["django"].from_string(text)
            response = TemplateResponse(request, source, status=status)
        if callable(what):
            what(response)
        return response

    async def aview(request: HttpRequest) -> Any:
        return view(request)

    page: Any = cached_page(60, stale=1000, **HOW[how])(aview if kind == "async" else view)

    async def avisit() -> Any:
        response = await page(ask())
        await asyncio.sleep(0.01)  # A refresh goes on in this loop.
        return response

    def visit() -> bytes:
        try:
            response = loop.run_until_complete(avisit()) if kind == "async" else page(ask())
        except (Http404, PermissionDenied, SuspiciousOperation):
            return b"own"
        return bytes(response.render().content if kind == "template" else response.content)

    with closing(asyncio.new_event_loop()) as loop:
        assert visit() == b"page"
        expire_pages()
        assert visit() == (b"own" if how == "inline" else b"page")
        until(lambda: visit() == b"own" and len(calls) > 1)  # A visit runs the loop of its refresh.
        assert [visit() for _ in range(2)] == [b"own"] * 2


# -- the middleware ------------------------------------------------------------------------------

site = Page("plain")
urlpatterns = [path("page/", site)]


@pytest.mark.parametrize("outside", [True, False])
def test_the_middleware(outside: bool) -> None:
    ours = "django_redis_lock.middleware.CachedPageMiddleware"
    conditional = "django.middleware.http.ConditionalGetMiddleware"
    middleware = [conditional, ours] if outside else [ours, conditional]
    site.calls = 0
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=middleware):
        for name in ("same", "unmodified", "range", "other"):
            headers, status = CONDITIONS[name]
            assert Client().get("/page/", headers=headers).status_code == status
        assert Client().get("/page/").content == b"page"
        assert site.calls == 1
