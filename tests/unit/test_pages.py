"""What a response says about a page, and what becomes of one that is not rendered."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.template.response import SimpleTemplateResponse
from django.test import RequestFactory
from django.utils.http import http_date

from django_redis_lock import cached_page, events
from django_redis_lock.cache import cache
from django_redis_lock.contrib.pages import responses, visit
from django_redis_lock.contrib.pages.responses import (
    Conditions,
    NotThePage,
    OpenFlight,
    OwnWrites,
    PageFailed,
    Rendering,
    complete_like,
    conditional,
    copied,
    finalized,
    is_answer,
    is_refusal,
    raise_unless_about_the_page,
)
from django_redis_lock.contrib.pages.visit import Visit
from django_redis_lock.contrib.testing import MemoryServer
from django_redis_lock.events import Read, RefreshFailed, as_group
from django_redis_lock.steps import drive
from tests.support.background import Background

REFUSALS = (400, 401, 403, 405, 406, 411, 451, 499)
ANSWERS = (200, 201, 204, 301, 399)


@pytest.mark.parametrize("status", [*ANSWERS, *REFUSALS, 206, 304, 404, 410, 412, 416, 500, 503])
def test_what_a_status_means(status: int) -> None:
    response = HttpResponse(status=status)
    assert is_refusal(response) is (status in (*REFUSALS, 412, 416))
    assert is_answer(response) is (status in ANSWERS)


@pytest.mark.parametrize("value", [{"payment": 5}, None, "text"])
def test_what_is_no_response_is_an_answer(value: Any) -> None:
    assert is_answer(value)
    assert not is_refusal(value)
    raise_unless_about_the_page(value)


def with_retry_after(status: int = 200) -> HttpResponse:
    return HttpResponse(status=status, headers={"Retry-After": "5"})


def of_this_moment() -> HttpResponse:
    response: Any = HttpResponse(status=409)
    response.is_of_this_moment = True
    return response


#: A response, its request (``mine``, ``first``), and what is raised.
OUTCOMES: list[tuple[HttpResponse, dict[str, bool], type[BaseException] | None]] = [
    (HttpResponse(), {}, None),
    (HttpResponse(), {"first": True}, NotThePage),
    (HttpResponse(), {"first": True, "mine": False}, PageFailed),
    (HttpResponse(status=404), {}, None),
    (HttpResponse(status=499), {}, None),
    *((HttpResponse(status=status), {}, NotThePage) for status in (206, 304, 412, 416)),
    *((HttpResponse(status=status), {"mine": False}, PageFailed) for status in (206, 304)),
    *((HttpResponse(status=status), {}, PageFailed) for status in (408, 425, 429, 500, 503)),
    (HttpResponse(status=429), {"first": True}, PageFailed),
    (HttpResponse(status=500), {"first": True}, NotThePage),
    (with_retry_after(), {}, PageFailed),
    (with_retry_after(), {"first": True}, PageFailed),
    (of_this_moment(), {}, PageFailed),
    (of_this_moment(), {"first": True}, PageFailed),
]


@pytest.mark.parametrize(("response", "request_is", "raised"), OUTCOMES)
def test_what_is_not_about_the_page_is_raised(
    response: HttpResponse, request_is: dict[str, bool], raised: type[BaseException] | None
) -> None:
    if raised is None:
        raise_unless_about_the_page(response, **request_is)
        return
    with pytest.raises(raised) as outcome:
        raise_unless_about_the_page(response, **request_is)
    assert outcome.value.response is response
    assert str(outcome.value) == (f"status {response.status_code}" if raised is PageFailed else "")


def test_a_condition_is_known_also_while_it_is_taken_out() -> None:
    plain, ranged = RequestFactory().get("/"), RequestFactory().get("/", HTTP_RANGE="bytes=0-1")
    assert "HTTP_RANGE" not in Conditions(plain)
    conditions = Conditions(ranged)
    assert "HTTP_RANGE" in conditions
    conditions.take_out()
    assert "HTTP_RANGE" not in ranged.META
    assert "HTTP_RANGE" in conditions
    conditions.put_back()
    del ranged.META["HTTP_RANGE"]
    conditions.put_back()  # For the second time: nothing is taken out any more.
    assert "HTTP_RANGE" not in conditions


class Late(SimpleTemplateResponse):
    rendered_content = "a page"


KEPT, MINE = "max-age=5", "max-age=7"


@pytest.mark.parametrize(
    ("old", "new", "by_headers", "rendered", "cache_control"),
    [
        (KEPT, None, True, False, KEPT),
        (KEPT, MINE, True, False, MINE),
        (KEPT, None, False, False, None),
        (KEPT, None, True, True, None),
        (None, None, True, False, None),
    ],
)
def test_the_headers_of_the_old_page_decide_where_none_are_set(
    old: str | None, new: str | None, by_headers: bool, rendered: bool, cache_control: str | None
) -> None:
    page = HttpResponse("old", headers={"Vary": "Cookie, X-Kind"})
    response: Any = HttpResponse("new") if rendered else SimpleTemplateResponse("page.html")
    for each, value in ((page, old), (response, new)):
        if value is not None:
            each["Cache-Control"] = value
    complete_like(page, RequestFactory().get("/"), response, by_headers)
    assert response.get("Cache-Control") == cache_control
    assert response["Vary"] == "Cookie, X-Kind"


@pytest.mark.parametrize("old", [None, "no page"])
@pytest.mark.parametrize("rendered", [True, False])
@pytest.mark.parametrize("accessed", [True, False, None])
def test_without_an_old_page_a_refresh_must_say_all(
    old: Any, rendered: bool, accessed: bool | None
) -> None:
    """Decorators, and the session's middleware, would set headers that decide what is stored."""
    request: Any = SimpleNamespace(session=SimpleNamespace(accessed=accessed))
    if accessed is None:
        request = SimpleNamespace()
    response: Any = HttpResponse("new") if rendered else SimpleTemplateResponse("page.html")
    complete_like(None, request, "no response", True)
    if rendered and not accessed:
        complete_like(old, request, response, True)
        return
    with pytest.raises(PageFailed):
        complete_like(old, request, response, True)


#: The generation now; whether the view has written; the flight's token then, an error for an
#: outage; and if the page is of that generation.
GENERATIONS: list[tuple[str, bool, Any, bool]] = [
    ("mine", False, None, True),
    ("mine", True, None, True),
    ("another", False, b"token", False),
    ("another", True, b"token", True),
    ("another", True, b"of another", False),
    ("another", True, None, False),
    ("another", True, redis.ConnectionError("away"), False),
]


@pytest.mark.parametrize(("now", "wrote", "token", "is_it"), GENERATIONS)
def test_a_page_is_stored_unless_the_cache_was_emptied(
    now: str, wrote: bool, token: Any, is_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*calls: Any) -> list[Any]:
        if isinstance(token, Exception):
            raise token
        return [token]

    def read(key: str) -> Any:
        return now
        yield

    visit: Any = object.__new__(Visit)
    visit.middleware, visit.own = SimpleNamespace(key_prefix=""), OwnWrites()
    visit.own.own_writes = {b"generation": "deleted"} if wrote else {}
    visit._read, visit._runner = read, lambda: SimpleNamespace(run=run)
    for flight in ((b"page", b"token"), None):
        visit.flight = flight
        assert drive(visit._is_of("mine")) is (is_it and (flight is not None or now == "mine"))


#: A response, what is stored, what Redis says to the note of a refusal, and if it is the first.
FIRST: list[tuple[Any, Any, Any, bool]] = [
    (HttpResponse(status=403), None, True, True),
    (HttpResponse(status=403), None, False, False),
    (HttpResponse(status=403), None, redis.ConnectionError("away"), False),
    (None, None, True, True),
    (HttpResponse(), HttpResponse("old"), True, True),
    (HttpResponse(), None, True, False),
    (HttpResponse(status=500), HttpResponse("old"), True, False),
]


@pytest.mark.parametrize(("response", "old", "added", "first"), FIRST)
def test_who_is_the_first_that_gets_no_page(
    response: Any, old: Any, added: Any, first: bool
) -> None:
    def read(key: str) -> Any:
        return old
        yield

    def do(name: str, key: str, *args: Any) -> Any:
        assert (name, key) == ("add", "page.refused")
        if isinstance(added, Exception):
            raise added
        return added

    visit: Any = object.__new__(Visit)
    visit._read, visit._do = read, do
    assert drive(visit._is_first("page", response)) is first


OLD = HttpResponse("old")
#: Whether there is a flight, what the rendering raises, what is stored; how the flight ends, and if
#: the old page is served.
FAILURES: list[tuple[bool, BaseException, Any, Any, bool]] = [
    (True, ZeroDivisionError(), OLD, ZeroDivisionError, True),
    (True, ZeroDivisionError(), None, ZeroDivisionError, False),
    (True, KeyboardInterrupt(), OLD, KeyboardInterrupt, False),
    (True, PermissionDenied(), OLD, type(None), False),
    (False, ZeroDivisionError(), OLD, ZeroDivisionError, False),
]


@pytest.mark.parametrize(("leads", "error", "old", "ended", "served"), FAILURES)
def test_what_becomes_of_a_page_whose_rendering_fails(
    leads: bool, error: Any, old: Any, ended: Any, served: bool
) -> None:
    outcomes: list[Any] = []
    told: list[Any] = []
    producer = SimpleNamespace(emit=lambda *args: told.append(args[1]))
    postponed: Any = OpenFlight()
    postponed.leader = SimpleNamespace(producer=producer, server=None) if leads else None
    visit: Any = object.__new__(Visit)
    visit.cache = SimpleNamespace(get=lambda key: old)
    visit._hit = lambda page: page
    visit._resume = lambda flight, outcome: outcomes.append(type(outcome))
    assert visit._rendering_failed("key", error, postponed) is (OLD if served else None)
    assert outcomes == [ended]
    assert told == [RefreshFailed] * served


#: Headers of a page that was stored ten seconds ago, its ``_fresh_until``, and what a hit says.
AGES: list[tuple[dict[str, str], float | None, str | None, str]] = [
    ({"Expires": http_date(1050), "Cache-Control": "max-age=60"}, 1050.0, "10", "hit"),
    ({"Expires": http_date(1050), "Cache-Control": "max-age=60"}, 999.0, "10", "stale"),
    ({"Expires": http_date(1080), "Cache-Control": "max-age=60"}, None, "0", "hit"),
    ({"Expires": http_date(1050)}, 1000.0, None, "hit"),
    ({"Cache-Control": "max-age=60"}, None, None, "hit"),
    ({}, None, None, "hit"),
]


@pytest.mark.parametrize(("headers", "fresh_until", "age", "status"), AGES)
def test_what_a_hit_says(
    headers: Any, fresh_until: Any, age: Any, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visit, "time", SimpleNamespace(time=lambda: 1000.0))
    page: Any = HttpResponse("page", headers=headers)
    if fresh_until is not None:
        page._fresh_until = fresh_until
    request: Any = object.__new__(Visit)
    request.request = RequestFactory().get("/")
    request.cache = SimpleNamespace(conf=SimpleNamespace(PAGE_STATUS_HEADER="X-Cache"))
    hit = request._hit(page)
    assert (hit.get("Age"), hit["X-Cache"]) == (age, status)


@pytest.mark.parametrize("page_timeout", [None, 60])
@pytest.mark.parametrize("unrendered", [True, False])
def test_a_refresh_has_the_lifetime_of_the_old_page_if_headers_decide(
    page_timeout: Any, unrendered: bool
) -> None:
    def read(key: str) -> Any:
        return HttpResponse("old", headers={"Cache-Control": KEPT})
        yield

    refresh: Any = object.__new__(Visit)
    refresh.middleware = SimpleNamespace(page_timeout=page_timeout)
    refresh._read, refresh.asynchronous = read, False
    response: Any = Late("page.html") if unrendered else HttpResponse("new")
    completed = drive(refresh._complete_as_before("key", RequestFactory().get("/"), response))
    by_headers = unrendered and page_timeout is None
    assert completed.get("Cache-Control") == (KEPT if by_headers else None)
    assert completed is response
    assert getattr(completed, "is_rendered", True)


def test_a_response_is_finalized_by_a_copy_of_its_view() -> None:
    """The request's own view changes its headers at the same time."""

    class OfRest:
        def __init__(self) -> None:
            self.default_response_headers = {"Vary": "Accept"}
            self.headers = {"Vary": "of the request"}

        def finalize_response(self, request: Any, response: Any) -> Any:
            return request, response, self.headers, self is view

    view, response = OfRest(), HttpResponse()
    request: Any = SimpleNamespace(parser_context={"view": view})
    assert finalized(request, response) == (request, response, {"Vary": "Accept"}, False)
    assert view.headers == {"Vary": "of the request"}
    for other in (SimpleNamespace(), SimpleNamespace(parser_context={})):
        unknown: Any = other
        assert finalized(unknown, response) is response
    response.accepted_renderer = "json"  # of Django REST framework
    assert finalized(request, response) is response


USED = "CSRF_COOKIE_NEEDS_UPDATE"
#: Whether a token was used around the page; what the page makes of it; and what is said then.
TOKENS: list[tuple[bool | None, bool | None, bool | None, str]] = [
    (None, None, None, ""),
    (None, True, True, "a CSRF token"),
    (True, None, True, ""),
    (True, True, True, "a CSRF token"),
    (True, False, False, ""),
    (False, None, False, ""),
    (False, True, True, "a CSRF token"),
]


@pytest.mark.parametrize(("around", "within", "after", "of_client"), TOKENS)
def test_a_token_that_the_page_uses_is_told_from_one_that_is_used_around_it(
    around: bool | None, within: bool | None, after: bool | None, of_client: str
) -> None:
    request = RequestFactory().get("/")
    if around is not None:
        request.META[USED] = around
    conditions = Conditions(request)
    conditions.take_out()
    assert bool(request.META.get(USED)) is bool(around)
    if within is not None:
        request.META[USED] = within
    conditions.put_back()
    assert request.META.get(USED) is after
    assert conditions.of_client == of_client


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("within", [True, False])
def test_the_session_that_a_page_reads(in_background: bool, before: bool, within: bool) -> None:
    """In the background, another thread may use it."""
    request: Any = RequestFactory().get("/")
    request.session = SimpleNamespace(accessed=before)
    conditions = Conditions(request)
    conditions.in_background = in_background
    conditions.take_out()
    assert request.session.accessed is (before and in_background)
    request.session.accessed |= within
    conditions.put_back()
    assert request.session.accessed is (before or within)
    assert conditions.session_used is (within and not in_background)
    response = HttpResponse()
    conditions.complete(response)
    assert response.get("Vary") == ("Cookie" if conditions.session_used else None)


TODAY, TOMORROW = http_date(86_400), http_date(2 * 86_400)
#: Headers of a page, what its client asks, and the answer.
CONDITIONAL: list[tuple[dict[str, str], dict[str, str], int]] = [
    ({}, {"If-None-Match": '"a"'}, 200),
    ({"ETag": '"a"'}, {}, 200),
    ({"ETag": '"a"'}, {"If-None-Match": '"a"'}, 304),
    ({"ETag": '"a"'}, {"If-None-Match": '"b"'}, 200),
    ({"Last-Modified": TODAY}, {"If-Modified-Since": TODAY}, 304),
    ({"Last-Modified": TODAY}, {"If-Modified-Since": TOMORROW}, 304),
    ({"Last-Modified": TOMORROW}, {"If-Modified-Since": TODAY}, 200),
    ({"ETag": '"a"', "Last-Modified": TODAY}, {"If-None-Match": '"a"'}, 304),
    ({"ETag": '"a"', "Last-Modified": TODAY}, {"If-Unmodified-Since": http_date(3600)}, 412),
]


@pytest.mark.parametrize(("headers", "conditions", "status"), CONDITIONAL)
def test_who_has_the_page_is_told_so(headers: Any, conditions: Any, status: int) -> None:
    request = RequestFactory().get("/", headers=conditions)
    answer: Any = conditional(request, HttpResponse("page", headers=headers))
    assert answer.status_code == status
    for other in (HttpResponse("page", status=404, headers=headers), "no response"):
        assert conditional(request, other) is other


class Messages(list[str]):
    used = False


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("messages", [["paid"], []])
def test_messages_that_a_page_shows_are_of_one_client(
    before: bool, used: bool, messages: list[str]
) -> None:
    request: Any = RequestFactory().get("/")
    request._messages = Messages(messages)
    request._messages.used = before
    conditions = Conditions(request)
    conditions.take_out()
    request._messages.used |= used
    conditions.put_back()
    assert conditions.of_client == ("messages" if used and not before and messages else "")


@pytest.mark.parametrize("instead", [None, HttpResponse("old")])
def test_whose_rendering_fails_gets_an_answer_to_the_conditions_of_its_request(
    instead: Any,
) -> None:
    request = RequestFactory().get("/", HTTP_IF_NONE_MATCH="etag")
    seen: list[bool] = []

    def note(*args: Any) -> Any:
        seen.append("HTTP_IF_NONE_MATCH" in request.META)
        return instead

    class Failing(SimpleTemplateResponse):
        @property
        def rendered_content(self) -> str:
            note()
            raise ZeroDivisionError

    response = Failing("page.html")
    Rendering(response, Conditions(request), note, note)
    if instead is None:
        with pytest.raises(ZeroDivisionError):
            response.render()
    else:
        assert response.render() is instead
    assert seen == [False, True]
    assert "HTTP_IF_NONE_MATCH" in request.META


def test_when_the_rendering_begins_the_keeper_renews_the_flight_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added: list[Any] = []
    monkeypatch.setattr(responses, "keeper", lambda: SimpleNamespace(add=added.append))
    monkeypatch.setattr(responses, "time", SimpleNamespace(monotonic=lambda: 100.0))
    flight: Any = OpenFlight()
    flight.renew()  # Without a leader there is nothing to renew.
    renewals = [SimpleNamespace(due=0.0), SimpleNamespace(due=200.0)]
    flight.leader = SimpleNamespace(renewals=renewals)
    flight.renew()
    assert added == renewals
    assert [renewal.due for renewal in renewals] == [100.0, 100.0]


def test_what_somebody_else_has_rendered_leaves_the_conditions_in_the_request() -> None:
    request = RequestFactory().get("/", HTTP_IF_NONE_MATCH="etag")
    response = Late("page.html")
    Rendering(response, Conditions(request), lambda *args: None, lambda *args: None)
    response.content = "by hand"
    assert response.render().content == b"by hand"
    assert "HTTP_IF_NONE_MATCH" in request.META


def test_what_is_rendered_is_decided_on_with_the_conditions_of_its_request() -> None:
    request = RequestFactory().get("/", HTTP_IF_NONE_MATCH="etag")
    response, seen = Late("page.html"), []
    Rendering(
        response,
        Conditions(request),
        lambda *args: seen.append("HTTP_IF_NONE_MATCH" in request.META),
        lambda *args: None,
    )
    response.render()
    assert seen == [True]


def test_a_token_used_around_two_pages_is_of_neither() -> None:
    """One within the other: the inner one's end says no more than its begin did."""
    request = RequestFactory().get("/")
    request.META[USED] = True
    outer, inner = Conditions(request), Conditions(request)
    outer.take_out()
    inner.take_out()
    for conditions in (inner, outer):
        conditions.put_back()
        assert not conditions.of_client
    assert request.META[USED] is True


def test_the_end_of_the_process_ends_no_flight() -> None:
    """The keeper may have ended before."""
    response, request = SimpleTemplateResponse("page.html"), RequestFactory().get("/")
    Rendering(response, Conditions(request), lambda *_: None, lambda *_: None)
    ends = [end for end in weakref.finalize._registry if (end.peek() or [None])[0] is response]
    assert [end.atexit for end in ends] == [False]


def test_the_flight_of_a_response_that_is_dropped_ends() -> None:
    ended: list[int] = []
    response, request = Late("page.html"), RequestFactory().get("/")
    rendering = Rendering(response, Conditions(request), lambda *_: None, lambda *_: None)
    leader: Any = SimpleNamespace(end_later=lambda: ended.append(1))
    rendering.postponed.leader = leader
    del response
    gc.collect()
    assert ended == [1]
    rendering.postponed.drop()  # There is no leader any more.
    assert ended == [1]


class Wrapped:
    """As Django REST framework wraps a request."""

    def __init__(self, request: Any) -> None:
        self._request, self.META = request, request.META


def test_the_copy_of_a_request_shares_no_headers_with_it() -> None:
    inner = RequestFactory().get("/")
    copies: Any = copied(Wrapped(inner))
    for copy in (copies, copies._request):
        assert copy.META == inner.META
        assert copy.META is not inner.META
    assert copies._request.path == inner.path


@pytest.mark.parametrize("kind", [HttpResponse, Late])
def test_a_page_within_another_has_the_headers_of_the_inner_decorator(
    redis_locks: MemoryServer, kind: Any
) -> None:
    @cached_page(300)
    @cached_page(60)
    def view(request: Any) -> Any:
        return kind("page.html")

    response = view(RequestFactory().get("/"))
    if not getattr(response, "is_rendered", True):
        response = response.render()
    assert response["Cache-Control"] == "max-age=60"
    assert view(RequestFactory().get("/"))["Cache-Control"] == "max-age=60"


@pytest.mark.parametrize("kind", [HttpResponse, Late])
def test_a_response_says_whether_it_was_stored(
    redis_locks: MemoryServer, settings: Any, kind: Any
) -> None:
    settings.DJANGO_REDIS_LOCK = {"PAGE_STATUS_HEADER": "X-Cache"}

    @cached_page(60, stale=60)
    def view(request: Any) -> Any:
        return kind("page.html")

    responses = [view(RequestFactory().get("/")) for _ in range(2)]
    if kind is Late:
        responses = [each if each.is_rendered else each.render() for each in responses]
        responses.append(view(RequestFactory().get("/")))
    assert responses[0]["X-Cache"] == "miss"
    assert responses[-1]["X-Cache"] == "hit"


@pytest.mark.parametrize("group", ["", "pages"])
def test_the_reads_of_a_page_are_counted_by_its_view(redis_locks: MemoryServer, group: str) -> None:
    def view(request: Any) -> Any:
        return HttpResponse("page")

    heard: list[Any] = []
    options: Any = {"group": group} if group else {}
    events.subscribe(heard.append, reads=True)
    try:
        for _ in range(2):
            cached_page(60, **options)(view)(RequestFactory().get("/"))
    finally:
        events.unsubscribe(heard.append)
    groups = {event.group for event in heard if isinstance(event, Read)}
    assert groups - {"page generation"} == {group or as_group(f"{__name__}.{view.__qualname__}")}


def answered(view: Any) -> Any:
    """As Django answers with what ``view`` returns."""
    response = view(RequestFactory().get("/"))
    return response if getattr(response, "is_rendered", True) else response.render()


@pytest.mark.parametrize("kind", [HttpResponse, Late])
def test_a_refusal_is_noted(redis_locks: MemoryServer, kind: Any) -> None:
    """Of the second one, it is assumed that it is for all clients."""
    view = cached_page(60)(lambda request: kind("page.html", status=403))
    for refusals in (1, 1):
        assert answered(view).status_code == 403
        keys = cache._lock_client().keys("*.refused")
        assert len(keys) == refusals
        assert not cache._lock_client().keys("*flight*")


@pytest.mark.parametrize("kind", [HttpResponse, Late])
@pytest.mark.parametrize("fails", [True, False])
def test_a_refresh_replaces_the_page_or_says_that_it_failed(
    redis_locks: MemoryServer, kind: Any, fails: bool
) -> None:
    heard: list[Any] = []
    runs: list[int] = []

    class Failing(Late):
        @property
        def rendered_content(self) -> str:
            raise ZeroDivisionError

    @cached_page(60, stale=600)
    def view(request: Any) -> Any:
        runs.append(1)
        if fails and len(runs) == 2:
            if kind is Late:
                return Failing("page.html")
            raise ZeroDivisionError
        made = kind("page.html")
        made["X-Run"] = len(runs)
        return made

    events.subscribe(heard.append)
    try:
        assert answered(view)["X-Run"] == "1"
        redis_locks.clock.advance(61)
        shown = answered(view)["X-Run"]
    finally:
        events.unsubscribe(heard.append)
    assert shown == ("1" if fails else "2")
    failed = [event for event in heard if isinstance(event, RefreshFailed)]
    assert [type(event.error) for event in failed] == [ZeroDivisionError] * fails
    if not fails:
        assert answered(view)["X-Run"] == "2"
        assert len(runs) == 2


@pytest.mark.parametrize(("method", "updates"), [("get", True), ("head", True), ("post", False)])
def test_another_cache_middleware_does_not_store_what_this_one_does_not(
    redis_locks: MemoryServer, method: str, updates: bool
) -> None:
    seen: list[bool] = []

    @cached_page(60)
    def view(request: Any) -> Any:
        seen.append(request._cache_update_cache)
        return HttpResponse()

    view(getattr(RequestFactory(), method)("/"))
    assert seen == [updates]


@pytest.mark.parametrize(
    "backend", ["django_redis_lock.cache", "django.core.cache.backends.locmem"]
)
def test_a_page_that_another_computes_is_told_as_read(settings: Any, backend: str) -> None:
    settings.CACHES = {"default": {"BACKEND": f"{backend}.LocMemCache", "LOCATION": "pages"}}
    seen: list[bool] = []

    @cached_page(60)
    def view(request: Any) -> Any:
        seen.append("HTTP_IF_NONE_MATCH" in request.META)
        return HttpResponse("page", headers={"ETag": '"a"'})

    for _ in range(2):
        request = RequestFactory().get("/of-conditions/", headers={"If-None-Match": '"a"'})
        assert view(request).status_code == 304
        assert "HTTP_IF_NONE_MATCH" in request.META
    assert seen == [False]


@pytest.mark.parametrize("sought", ["bytes=0-1", None])
def test_what_is_no_response_is_returned_as_it_is(redis_locks: MemoryServer, sought: Any) -> None:
    runs: list[int] = []

    @cached_page(60)
    def view(request: Any) -> Any:
        runs.append(1)
        return "no response"

    headers = {"Range": sought} if sought else {}
    assert view(RequestFactory().get("/", headers=headers)) == "no response"
    assert len(runs) == 1


def test_of_a_page_that_cannot_be_cached_any_more_each_caller_computes_its_own(
    redis_locks: MemoryServer,
) -> None:
    """Although the headers that it varied on are still known."""
    runs: list[int] = []

    @cached_page(60)
    def view(request: Any) -> Any:
        runs.append(1)
        private = {"Cache-Control": "private"} if len(runs) > 1 else {}
        return HttpResponse("page", headers=private)

    for number in (1, 1, 2, 3, 4):
        if number == 2:
            redis_locks.clock.advance(61)
        answer = Background(view, RequestFactory().get("/")).result()
        assert answer.content == b"page"
        assert len(runs) == number
