"""What depends on one request (a condition, a range) or on one moment (a temporary error) says
nothing about a page: it ends no protection, and a stale page stays."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

import pytest
from django.core.cache import cache
from django.core.exceptions import PermissionDenied
from django.core.signals import request_finished
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import path
from django.views.decorators.http import condition

from django_redis_lock import cached_page, locked
from django_redis_lock.contention import redirect_to, respond, skip
from django_redis_lock.exceptions import ComputationFailed
from tests.holding import hold
from tests.processes import in_threads, until
from tests.support.cached_pages import followers

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
    """A view that answers to conditions itself, as ``kind`` says, and counts."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls = 0
        self.waiting = 0
        self.seen: list[Any] = []

    def __call__(self, request: HttpRequest) -> Any:
        self.calls += 1
        if self.calls == 1 and self.waiting:
            until(lambda: followers() >= self.waiting)
        self.seen.append([name for name in request.headers if name.startswith(("If-", "Range"))])
        if "Range" in request.headers:
            return HttpResponse("pa", status=206)
        if self.kind == "template":
            response: Any = TemplateResponse(request, engines["django"].from_string("page"))
        else:
            response = HttpResponse("page")
        response["ETag"], response["Last-Modified"] = '"e"', NEW
        return response

    def view(self) -> Any:
        view = self.__call__
        if self.kind == "condition":
            view = condition(etag_func=lambda request: '"e"')(view)
        if self.kind == "async":

            async def aview(request: HttpRequest) -> Any:
                return view(request)

            page = cached_page(60, stale=1000)(aview)
            return lambda request: asyncio.run(page(request))
        page = cached_page(60, stale=1000)(view)

        def rendered(request: HttpRequest) -> Any:
            response = page(request)
            return response.render() if hasattr(response, "render") else response

        return rendered


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
    expire()
    assert view(ask(**CONDITIONS["same"][0])).status_code == 304
    assert [view(ask()).status_code for _ in range(3)] == [200] * 3
    assert page.calls == 2


def expire() -> None:
    for key in cache.keys("*cache_page.*.GET.*"):
        assert cache.expire(key, 999)


def test_a_view_that_answers_to_another_condition_leaves_a_stale_page() -> None:
    calls: list[int] = []

    @cached_page(60, stale=1000)
    def page(request: HttpRequest) -> HttpResponse:
        calls.append(1)
        return HttpResponse("page", status=304 if "X-If" in request.headers else 200)

    page(ask())
    expire()
    assert page(ask(**{"X-If": "1"})).status_code == 304
    assert [page(ask()).status_code for _ in range(2)] == [200] * 2
    assert len(calls) == 3


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


def failing(status: int, errors: int, kind: str) -> Any:
    """A view whose first answers have this status, and the number of its calls."""
    calls: list[int] = []
    together: list[int] = []
    now = threading.Lock()

    def view(request: HttpRequest) -> Any:
        calls.append(1)
        together.append(now.acquire(blocking=False))
        if len(calls) == 1:
            until(lambda: followers() >= 6)
        answer = status if len(calls) <= errors else 200
        if kind == "template":
            response: Any = TemplateResponse(
                request, engines["django"].from_string("page"), status=answer
            )
        else:
            response = HttpResponse("page", status=answer)
        now.release()
        return response

    return view, calls, together


@pytest.mark.parametrize("kind", ["plain", "template"])
@pytest.mark.parametrize("status", TEMPORARY)
def test_one_follower_at_a_time_takes_over(status: int, kind: str) -> None:
    view, calls, together = failing(status, 3, kind)
    page = cached_page(60)(view)

    def visit() -> int:
        response = page(ask())
        response = response.render() if hasattr(response, "render") else response
        return int(response.status_code)

    assert sorted(in_threads(10, visit)) == [200] * 7 + [status] * 3
    assert len(calls) == 4
    assert all(together)


@pytest.mark.parametrize("kind", ["plain", "template", "async"])
@pytest.mark.parametrize("status", TEMPORARY)
def test_a_stale_page_stays(status: int, kind: str) -> None:
    page = Page(kind)
    view = page.view()
    view(ask())
    expire()
    ended = page.__class__.__call__

    def busy(self: Page, request: HttpRequest) -> HttpResponse:
        self.calls += 1
        return HttpResponse("busy", status=status)

    try:
        Page.__call__ = busy  # put back below
        page.kind = kind
        view_again = page.view()
        assert view_again(ask()).content == b"page"
    finally:
        Page.__call__ = ended
    assert view(ask()).content == b"page"
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
    expire()
    with hold("page"):
        assert [view(ask()).content for _ in range(2)] == [b"page"] * 2
    assert page.calls == 1


def test_an_answer_with_retry_after_leaves_a_stale_page() -> None:
    statuses = [200, 403, 423, 200]

    @cached_page(60, stale=1000)
    def page(request: HttpRequest) -> HttpResponse:
        status = statuses.pop(0)
        headers = {"Retry-After": "5"} if status != 200 else {}
        return HttpResponse("page", status=status, headers=headers)

    assert page(ask()).status_code == 200
    for left in (2, 1, 0):
        expire()
        assert page(ask()).status_code == 200
        assert len(statuses) == left


def test_error_ttl_counts_for_temporary_errors() -> None:
    calls: list[int] = []

    @cached_page(60, error_ttl=60)
    def page(request: HttpRequest) -> HttpResponse:
        calls.append(1)
        return HttpResponse("busy", status=503)

    assert page(ask()).status_code == 503
    with pytest.raises(ComputationFailed, match="status 503"):
        page(ask())
    assert len(calls) == 1


# -- clients that get no page ----------------------------------------------------------------------

#: 401 and 403 to a robot or who may not; 405 to HEAD; 406 and 415 to who wants JSON; and others.
REFUSALS = [400, 401, 403, 405, 406, 409, 412, 415, 421, 422, 426, 431, 451]


class Choosy:
    """A view that refuses some clients, as ``kind`` says, and counts the pages that it makes."""

    def __init__(self, status: int, kind: str) -> None:
        self.status, self.kind = status, kind
        self.pages = self.refused = 0
        self.waits_for = 0
        self.page: Any = cached_page(60, stale=1000)(self.aview if kind == "async" else self.view)

    def view(self, request: HttpRequest) -> Any:
        if "X-Robot" in request.headers or request.method == "HEAD":
            self.refused += 1
            if self.kind == "raises":
                raise PermissionDenied
            status = self.status
        else:
            self.pages += 1
            until(lambda: followers() >= self.waits_for or self.pages > 1)
            status = 200
        if self.kind == "template":
            source = engines["django"].from_string("page")
            return TemplateResponse(request, source, status=status)
        return HttpResponse("page", status=status)

    async def aview(self, request: HttpRequest) -> Any:
        return self.view(request)

    def status_for(self, request: HttpRequest) -> int:
        try:
            response = self.page(request)
            if self.kind == "async":
                response = asyncio.run(response)
            response = response.render() if hasattr(response, "render") else response
        except PermissionDenied:
            return 403
        return int(response.status_code)


ROBOTS = {"a robot": ask(**{"X-Robot": "1"}), "HEAD": RequestFactory().head("/page/")}


@pytest.mark.sample(11)
@pytest.mark.parametrize("who", ROBOTS)
@pytest.mark.parametrize("kind", ["plain", "template", "async", "raises"])
@pytest.mark.parametrize("status", REFUSALS)
def test_one_client_that_is_refused_opens_no_page(status: int, kind: str, who: str) -> None:
    choosy = Choosy(status, kind)
    expected = 403 if kind == "raises" else status
    assert choosy.status_for(ROBOTS[who]) == expected
    choosy.waits_for = 0 if kind == "async" else 5
    assert in_threads(6, lambda: choosy.status_for(ask())) == [200] * 6
    assert choosy.pages == 1
    # Nor does it end a stale page.
    expire()
    assert choosy.status_for(ask(**{"X-Robot": "1"})) in (200, expected)
    choosy.waits_for = 0
    assert [choosy.status_for(ask()) for _ in range(3)] == [200] * 3
    assert choosy.pages <= 2


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", ["cookie", "private", "no-store", "stream", "redirect"])
def test_one_client_for_whom_it_cannot_be_cached_ends_no_stale_page(
    kind: str, background: bool
) -> None:
    """A new visitor gets a cookie, who is not logged in a redirect."""
    calls: list[str] = []

    @cached_page(60, stale=1000, background=background)
    def page(request: HttpRequest) -> Any:
        who = request.headers.get("X-Client", "")
        calls.append(who)
        if not who:
            return HttpResponse("page")
        if kind == "stream":
            return StreamingHttpResponse(iter([b"own"]))
        response = HttpResponse("own", status=302 if kind == "redirect" else 200)
        if kind == "cookie":
            response.set_cookie("seen", "1")
        elif kind != "redirect":
            response["Cache-Control"] = kind
        return response

    page(ask())
    expire()
    answer = page(ask(**{"X-Client": "new"}))
    assert b"".join(answer) == (b"page" if background else b"own")
    until(lambda: calls == ["", "new"])
    # Once that computation is over, the next request begins one.
    until(lambda: page(ask()).content == b"page" and calls == ["", "new", ""])
    assert [page(ask()).content for _ in range(3)] == [b"page"] * 3
    assert len(calls) == 3


def test_a_page_that_all_are_refused_is_computed_at_the_same_time() -> None:
    """C5: after two, nobody waits for another."""
    calls, together = [], threading.Barrier(5)

    @cached_page(60)
    def page(request: HttpRequest) -> HttpResponse:
        calls.append(1)
        if len(calls) > 2:
            together.wait(20)
        return HttpResponse(status=403)

    assert [page(ask()).status_code for _ in range(2)] == [403] * 2
    assert in_threads(5, lambda: page(ask()).status_code) == [403] * 5
    assert len(calls) == 7


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
