"""``cached_page()``: what is stored is what Django's own ``cache_page`` stores, and each page is
computed once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch
from uuid import uuid4

import pytest
import redis
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.core.cache import cache, caches
from django.core.exceptions import ImproperlyConfigured
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseNotFound,
    HttpResponseNotModified,
    StreamingHttpResponse,
)
from django.middleware.csrf import get_token
from django.template import engines
from django.template.response import TemplateResponse
from django.test import override_settings
from django.utils import timezone, translation
from django.utils.cache import patch_vary_headers
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import cache_control, cache_page

from django_redis_lock import cached_page, events
from django_redis_lock.exceptions import ComputationFailed
from tests.lanes import IN_MEMORY
from tests.processes import PATIENCE, in_threads, until
from tests.redis_server import RedisServer
from tests.support.cached_pages import MEMORY, PLAIN, ask, expire_pages, finished, followers
from tests.support.logs import logged


@pytest.fixture(autouse=True, params=["redis", IN_MEMORY])
def _empty_cache(request: pytest.FixtureRequest, client: redis.Redis, settings: Any) -> None:
    ours = MEMORY if request.param == "memory" else settings.CACHES["default"]
    settings.CACHES = {"default": ours, "plain": PLAIN}
    cache.clear()
    caches["plain"].clear()
    translation.deactivate()  # Other tests in this thread may leave a language behind.
    timezone.deactivate()


def counting(respond: Callable[[HttpRequest], Any]) -> Any:
    """A view that answers as ``respond``, and says how often it has been called."""

    def view(request: HttpRequest) -> Any:
        view.calls += 1
        response = respond(request)
        if type(response) is HttpResponse:
            response.content += f" {view.calls}".encode()
        return response

    view.calls = 0
    return view


def body(response: Any) -> str:
    return str(response.content.decode())


# -- Django's rules ------------------------------------------------------------------------------


def vary(*names: str, **headers: str) -> Callable[[HttpRequest], HttpResponse]:
    def respond(request: HttpRequest) -> HttpResponse:
        response = HttpResponse("page", headers=headers)
        patch_vary_headers(response, names)
        return response

    return respond


def unmodified(request: HttpRequest) -> HttpResponse:
    return HttpResponseNotModified()


def streaming(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(["a", "b"])


def controlled(value: str) -> Callable[[HttpRequest], HttpResponse]:
    return lambda request: HttpResponse("page", headers={"Cache-Control": value})


PLAIN_PAGE = [ask(), ask()]
RULES: dict[str, tuple[Callable[[HttpRequest], Any], list[HttpRequest]]] = {
    "a page": (lambda request: HttpResponse("page"), PLAIN_PAGE),
    "queries": (lambda r: HttpResponse("page"), [ask("/?a=1"), ask("/?a=2"), ask("/?a=1")]),
    "POST": (lambda r: HttpResponse("page"), [ask(method="post"), ask(method="post"), ask()]),
    "HEAD after GET": (lambda r: HttpResponse("page"), [ask(), ask(method="head")]),
    "GET after HEAD": (
        lambda r: HttpResponse("page"),
        [ask(method="head"), ask(method="head"), ask(), ask(method="head")],
    ),
    "private": (controlled("private"), PLAIN_PAGE),
    "no-store": (controlled("No-Store"), PLAIN_PAGE),
    "no-cache": (controlled("no-cache"), PLAIN_PAGE),
    "shorter max-age": (controlled("max-age=5"), PLAIN_PAGE),
    "public": (controlled("public"), [ask(authorization="x"), ask(authorization="y")]),
    "authorized": (lambda r: HttpResponse("page"), [ask(authorization="x")] * 2 + [ask()] * 2),
    "not found": (lambda r: HttpResponseNotFound("page"), PLAIN_PAGE),
    "not modified": (unmodified, PLAIN_PAGE),
    "streaming": (streaming, PLAIN_PAGE),
    "varies": (vary("X-Kind"), [ask(x_kind="a"), ask(x_kind="b"), ask(x_kind="a"), ask()]),
    "varies on all": (vary("*"), PLAIN_PAGE),
    "varies on the cookie": (vary("Cookie"), [ask(cookie="a=1"), ask(cookie="a=2"), ask()] * 2),
}


@pytest.mark.parametrize("rule", RULES)
def test_it_stores_what_django_stores(rule: str) -> None:
    respond, requests = RULES[rule]

    def told(decorate: Any) -> list[Any]:
        view, answers = counting(respond), []
        for request in requests:
            response = decorate(view)(request)
            headers = {n: v for n, v in response.headers.items() if n not in ("Age", "Expires")}
            content = None if response.streaming else response.content
            answers.append((view.calls, content, headers, "Expires" in response))
        return answers

    assert told(cached_page(60)) == told(cache_page(60, cache="plain"))


def test_the_language_and_the_time_zone_are_in_the_key() -> None:
    page = cached_page(60)(counting(lambda request: HttpResponse("page")))
    found = {}
    for language, zone in [("en", "UTC"), ("de", "UTC"), ("en", "Asia/Tokyo")] * 2:
        with translation.override(language), timezone.override(zone):
            found.setdefault((language, zone), []).append(body(page(ask())))
    assert list(found.values()) == [["page 1"] * 2, ["page 2"] * 2, ["page 3"] * 2]


def test_a_hit_says_how_old_it_is() -> None:
    page = cached_page(60)(counting(lambda request: HttpResponse("page")))
    now = time.time()
    first = page(ask())
    assert "Age" not in first
    with patch("time.time", return_value=int(now) + 20):
        later = page(ask())
    assert int(later["Age"]) in (19, 20)
    assert (later["Cache-Control"], later["Expires"]) == ("max-age=60", first["Expires"])
    with patch("time.time", return_value=int(now) - 20):  # Of a host whose clock is slow.
        assert page(ask())["Age"] == "0"


@pytest.mark.parametrize("known", [False, True], ids=["first page", "next page"])
def test_how_long_a_page_and_what_it_varies_on_are_kept(known: bool) -> None:
    """Of so long ones, a thousandth is a quarter of an hour."""
    page = cached_page(1_000_000, stale=500_000)(lambda request: HttpResponse("page"))
    page(ask())
    if known:  # The flight is at the key of the page, not of what it varies on.
        assert cache.delete_many(cache.keys("*cache_page.*.GET.*")) == 1
        page(ask())
    for pattern, longest in (("*cache_page.*.GET.*", 1_500_000), ("*cache_header.*", 3_000_000)):
        [key] = cache.keys(pattern)
        assert 1000 * longest - 100_000 < cache.pttl(key) <= 1000 * longest


@pytest.mark.parametrize(
    "seconds",
    [30, lambda response: len(response.content), lambda response: 29.5],
)
def test_the_timeout(seconds: Any) -> None:
    page = cached_page(seconds)(counting(lambda request: HttpResponse("x" * 28)))
    assert page(ask())["Cache-Control"] == "max-age=30"


@override_settings(CACHE_MIDDLEWARE_SECONDS=40)
def test_without_a_timeout_the_response_says_it() -> None:
    assert cached_page(None)(controlled("max-age=20"))(ask("/a"))["Cache-Control"] == "max-age=20"
    assert cached_page(None)(controlled("public"))(ask("/b"))["Cache-Control"].endswith("=40")
    view = counting(lambda request: HttpResponse("page"))
    never = cached_page(lambda response: 0)(view)
    assert [body(never(ask("/c"))), body(never(ask("/c")))] == ["page 1", "page 2"]


def test_django_and_we_share_pages() -> None:
    view = counting(vary("X-Kind"))
    ours, theirs = cached_page(60)(view), cache_page(60)(view)
    assert [body(ours(ask())), body(theirs(ask()))] == ["page 1"] * 2
    assert [body(theirs(ask(x_kind="a"))), body(ours(ask(x_kind="a")))] == ["page 2"] * 2


def test_a_template_is_rendered_once() -> None:
    seen = []

    def view(request: HttpRequest) -> TemplateResponse:
        source = engines["django"].from_string("{{ count }}")
        response = TemplateResponse(request, source, {"count": len(seen)})
        response.add_post_render_callback(lambda rendered: seen.append(rendered.content))
        return response

    page = cached_page(60)(view)
    assert [body(page(ask()).render()) for _ in range(3)] == ["0"] * 3
    assert seen == [b"0"]


def test_a_page_within_another_one_is_stored_for_both() -> None:
    seen = []

    def view(request: HttpRequest) -> TemplateResponse:
        seen.append(request)
        source = engines["django"].from_string("{{ count }}")
        return TemplateResponse(request, source, {"count": len(seen)})

    inner = cached_page(60, key_prefix="inner")(view)
    outer = cached_page(60, key_prefix="outer")(inner)
    assert [body(outer(ask()).render()) for _ in range(2)] == ["1"] * 2
    assert type(inner(ask()).render()) is TemplateResponse
    cache.delete_many(cache.keys("*outer*"))
    assert body(outer(ask()).render()) == "1"
    assert len(seen) == 1
    cache.delete_many(cache.keys("*inner*"))  # A hit there has not begun to live anew here.
    assert body(outer(ask()).render()) == "2"


def test_a_view_may_be_a_mock() -> None:
    """It has each attribute that somebody asks for."""
    view = Mock(return_value=HttpResponse("page"))
    page = cached_page(60)(view)
    assert [body(page(ask())) for _ in range(2)] == ["page"] * 2
    assert view.call_count == 1


# -- classes and coroutine functions -------------------------------------------------------------


class AsyncPage(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(uuid4().hex)


@pytest.mark.parametrize("where", ["outside", "dispatch", "get"])
def test_asynchronous_classes_of_views(where: str) -> None:
    page: Any = cached_page(60)(AsyncPage.as_view())
    if where != "outside":
        decorate = method_decorator(cached_page(60), name=where)
        page = decorate(type("Page", (AsyncPage,), {})).as_view()

    async def main() -> list[str]:
        return [body(await page(ask())) for _ in range(2)]

    first, again = asyncio.run(main())
    assert first == again


def test_tasks_share_a_computation() -> None:
    calls = []

    @cached_page(60)
    async def page(request: HttpRequest) -> TemplateResponse:
        calls.append(request)
        await going.wait()
        return TemplateResponse(request, engines["django"].from_string("page"))

    async def main() -> list[str]:
        tasks = [asyncio.ensure_future(page(ask())) for _ in range(20)]
        while not calls:
            await asyncio.sleep(0)
        going.set()
        leaders, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for leader in leaders:  # As Django does, after the decorators around the view.
            await sync_to_async(leader.result().render)()
        return [body(response) for response in await asyncio.gather(*tasks)]

    going = asyncio.Event()
    assert asyncio.run(main()) == ["page"] * 20
    assert len(calls) == 1


# -- one computation -----------------------------------------------------------------------------


def crowd(page: Any, requests: list[HttpRequest]) -> list[Any]:
    """The responses to ``requests``, all at once."""
    left = list(requests)
    return in_threads(len(requests), lambda: page(left.pop()))


def private(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.headers["X-Id"], headers={"Cache-Control": "private"})


def refused(request: HttpRequest) -> HttpResponse:
    raise Http404(request.headers["X-Id"])


@pytest.mark.parametrize("respond", [private, refused])
@pytest.mark.invariant("C5")
def test_a_page_that_cannot_be_cached_releases_all_followers_at_once(
    respond: Callable[[HttpRequest], HttpResponse],
) -> None:
    computing, all_here = [], threading.Barrier(6)

    @cached_page(60, error_ttl=60)
    def page(request: HttpRequest) -> HttpResponse:
        computing.append(request)
        if len(computing) == 1:
            until(lambda: followers() == 6)
        else:
            all_here.wait(PATIENCE)  # It opens only if they compute at the same time.
        return respond(request)

    def visit(request: HttpRequest) -> str:
        try:
            return body(page(request))
        except Http404 as refusal:
            return str(refusal)

    found = crowd(visit, [ask(x_id=str(number)) for number in range(7)])
    assert sorted(found) == list("0123456")
    # Nobody waits for the next ones either.
    all_here.reset()
    assert crowd(visit, [ask(x_id="later") for _ in range(6)]) == ["later"] * 6


def test_a_page_for_others_goes_on_being_cached() -> None:
    """Users who are logged in get pages of their own; the page for all others is stored."""

    def respond(request: HttpRequest) -> HttpResponse:
        if "user" in request.COOKIES:
            return vary("Cookie", **{"Cache-Control": "private"})(request)
        return vary("Cookie")(request)

    page = cached_page(60)(counting(respond))
    private = [body(page(ask(cookie="user=1"))) for _ in range(2)]
    public = [body(page(ask())) for _ in range(2)]
    assert (private, public) == (["page 1", "page 2"], ["page 3"] * 2)
    assert body(page(ask(cookie="user=1"))) == "page 4"


def test_the_page_begins_to_vary_while_others_wait() -> None:
    computed, names = [], []

    @cached_page(60)
    def page(request: HttpRequest) -> HttpResponse:
        kind = request.headers.get("X-Kind", "")
        if computed:
            until(lambda: followers() >= 3 or len(computed) > 1)
        computed.append(kind)
        return vary(*names, X_For=kind)(request)

    page(ask())
    cache.delete_many(cache.keys("*cache_page.*GET*"))
    names.append("X-Kind")
    found = crowd(page, [ask(x_kind="a"), ask(x_kind="a"), ask(x_kind="b"), ask(x_kind="b")])
    assert sorted(response["X_For"] for response in found) == ["a", "a", "b", "b"]
    assert sorted(computed) == ["", "a", "b"]


@pytest.mark.parametrize("by", ["clear", "delete_pattern"])
@pytest.mark.parametrize("before", ["nothing", "an older page", "a page that is not cacheable"])
def test_a_page_from_before_clear_is_not_stored(before: str, by: str) -> None:
    clearing = threading.Event()

    def respond(request: HttpRequest) -> HttpResponse:
        if clearing.is_set():
            # The view's own would be older than its page.
            in_threads(1, cache.clear if by == "clear" else lambda: cache.delete_pattern("*page*"))
            clearing.clear()
        private = before.endswith("cacheable") and view.calls == 1
        return controlled("private")(request) if private else vary("X-Kind")(request)

    view = counting(respond)
    page = cached_page(60)(view)
    if before != "nothing":
        page(ask(x_kind="a"))
    clearing.set()
    request = ask(x_kind="b")
    old = body(page(request))
    assert not clearing.is_set()
    assert body(page(ask(x_kind="b"))) != old


def test_an_exception_reaches_its_caller_and_is_remembered() -> None:
    calls = []

    def broken(request: HttpRequest) -> HttpResponse:
        calls.append(request)
        raise KeyError("no data")

    page = cached_page(60)(broken)
    for _ in range(2):
        with pytest.raises(KeyError, match="no data"):
            page(ask())
    page = cached_page(60, error_ttl=100)(broken)
    with pytest.raises(KeyError, match="no data"):
        page(ask())
    with pytest.raises(ComputationFailed, match="KeyError: 'no data'"):
        page(ask())
    assert len(calls) == 3
    page = cached_page(60, error_ttl=100, key_prefix="busy")(lambda r: HttpResponse(status=503))
    assert page(ask()).status_code == 503
    with pytest.raises(ComputationFailed, match="status 503"):
        page(ask())


@pytest.mark.parametrize("alias", ["default", "plain"])
@pytest.mark.parametrize("kind", ["view", "template"])
def test_an_exception_that_ends_generators_stays_what_it_is(kind: str, alias: str) -> None:
    def no_data() -> Any:
        raise StopIteration("no data")

    def view(request: HttpRequest) -> HttpResponse:
        source = engines["django"].from_string("{{ text }}")
        context = {"text": no_data if kind == "template" else no_data()}
        return TemplateResponse(request, source, context)

    page: Any = cached_page(60, cache=alias)(view)
    for _ in range(2):
        with pytest.raises(StopIteration, match="no data"):
            page(ask()).render()


def test_cached_page_within_cached_page() -> None:
    """As in a site with the middleware: the outer one stores the page, for the inner timeout."""
    view = counting(lambda request: HttpResponse("page"))
    page = cached_page(None)(cached_page(25)(view))
    assert [body(page(ask())) for _ in range(2)] == ["page 1"] * 2
    assert page(ask())["Cache-Control"] == "max-age=25"


# -- stale pages ---------------------------------------------------------------------------------


def test_a_stale_page_is_refreshed_by_one_caller() -> None:
    page = cached_page(60, stale=1000)(
        counting(lambda request: (view_waits(request), HttpResponse("page"))[1])
    )
    asking: list[str] = []

    def view_waits(request: HttpRequest) -> None:
        if asking:
            found = threading.Thread(target=lambda: asking.append(body(page(ask()))))
            found.start()
            found.join(PATIENCE)

    assert body(page(ask())) == "page 1"
    expire_pages()
    asking.append("refreshing")
    assert body(page(ask())) == "page 2"
    assert asking == ["refreshing", "page 1"]
    asking.clear()
    assert body(page(ask())) == "page 2"


def test_a_stale_page_is_refreshed_in_the_background() -> None:
    going = threading.Event()
    going.set()
    seen: list[HttpRequest] = []

    def respond(request: HttpRequest) -> HttpResponse:
        going.wait(PATIENCE)
        request.META["seen"] = "by the view"
        seen.append(request)
        return HttpResponse(translation.get_language())

    translation.activate("de")
    timezone.activate("Asia/Tokyo")
    page = cached_page(60, stale=1000, background=True)(counting(respond))
    first = ask()
    assert body(page(first)) == "de 1"
    assert seen[-1] is first
    expire_pages()
    going.clear()
    request = ask()
    assert body(page(request)) == "de 1"
    going.set()
    until(lambda: body(page(ask())) == "de 2")
    assert "Vary" not in page(ask())
    assert "seen" not in request.META


def test_a_header_says_where_the_page_came_from(settings: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"PAGE_STATUS_HEADER": "X-Cache"}
    page = cached_page(60, stale=1000, background=True)(lambda request: HttpResponse("page"))
    assert [page(ask())["X-Cache"] for _ in range(2)] == ["miss", "hit"]
    expire_pages()
    now = time.time()
    with patch("time.time", return_value=now + 61):
        stale = page(ask())
    assert (stale["X-Cache"], int(stale["Age"]) >= 60) == ("stale", True)
    settings.DJANGO_REDIS_LOCK = {}
    assert "X-Cache" not in page(ask())


#: Why a page is not stored.
SKIPPED: dict[str, Callable[[HttpRequest], Any]] = {
    "sets a cookie": lambda request: with_cookie(HttpResponse("page")),
    "has a CSRF token": lambda request: HttpResponse(get_token(request)),
    "has a nonce": vary(**{"Content-Security-Policy": "script-src 'nonce-a'"}),
    "is of a user": lambda request: (setattr(request, "user", User()), HttpResponse("page"))[1],
    "is a stream": streaming,
    "Cache-Control: private": controlled("Private, max-age=5"),
    "Cache-Control: no-store": controlled("no-store"),
    "Vary: *": vary("*"),
    "max-age=0": controlled("max-age=0"),
    "status 404": lambda request: HttpResponse(status=404),
    "status 302": lambda request: HttpResponse(status=302),
    "status 403": lambda request: HttpResponse(status=403),
    "status 503": lambda request: HttpResponse(status=503),
    "status 304": unmodified,
    "its request says so": lambda request: (
        setattr(request, "_cache_update_cache", False),
        HttpResponse("page"),
    )[1],
}


def with_cookie(response: HttpResponse) -> HttpResponse:
    response.set_cookie("a", "b")
    return response


@pytest.mark.parametrize("kind", ["plain", "template", "async"])
def test_a_page_that_is_not_stored_says_why(
    kind: str, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DJANGO_REDIS_LOCK = {"PAGE_STATUS_HEADER": "X-Cache"}
    caplog.set_level("DEBUG", "django_redis_lock.pages")

    def view(request: HttpRequest) -> Any:
        made = SKIPPED[why](request)
        if kind == "template" and not made.streaming:
            text = engines["django"].from_string(made.content.decode())
            template = TemplateResponse(request, text, status=made.status_code)
            template.headers, template.cookies = made.headers, made.cookies
            return template
        return made

    async def aview(request: HttpRequest) -> Any:
        return view(request)

    for number, why in enumerate(SKIPPED):
        group = uuid4().hex
        page = cached_page(None, group=group)(aview if kind == "async" else view)
        for _ in range(2):
            response = finished(page(ask(f"/{number}/")))
            assert response["X-Cache"] == f"skip; {why}"
        [line] = logged(caplog, "pages", group)
        assert why in line


# -- what is refused -----------------------------------------------------------------------------


def test_a_cache_that_is_not_there() -> None:
    page = cached_page(60, cache="missing")(lambda request: HttpResponse("page"))
    with pytest.raises(ImproperlyConfigured, match="CACHES has no 'missing'"):
        page(ask())


@pytest.mark.parametrize(
    ("arguments", "options"),
    [(["60"], {}), ([-1], {}), ([True], {}), ([60], {"stale": -1}), ([60], {"retries": 3})],
)
def test_wrong_arguments(arguments: Any, options: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"must be|has no option"):
        cached_page(*arguments, **options)


def test_what_it_does_not_decorate() -> None:
    with pytest.raises(TypeError, match="method_decorator"):
        cached_page(60)(View)
    with pytest.raises(TypeError, match="cached_page"):
        cached_page(lambda request: HttpResponse("page"))(ask())

    class Page(View):
        @cached_page(60)
        def get(self, request: HttpRequest) -> HttpResponse:
            raise NotImplementedError

    with pytest.raises(TypeError, match=r"not <.*Page object.*method_decorator"):
        Page.as_view()(ask())
    with pytest.raises(TypeError, match=r"not none\."):
        cached_page(60)(ask)()


@pytest.mark.parametrize("policy", ["compute", "raise"])
def test_redis_goes_away(own_server: RedisServer, settings: Any, policy: str) -> None:
    backend = "django_redis_lock.cache.RedisCache"
    options = {"LOCK_VALUES_ON_REDIS_DOWN": policy}
    settings.CACHES = {
        "default": {"BACKEND": backend, "LOCATION": own_server.url, "OPTIONS": options}
    }
    page = cached_page(60)(counting(lambda request: HttpResponse("page")))
    assert [body(page(ask())) for _ in range(2)] == ["page 1"] * 2
    own_server.kill()
    if policy == "raise":
        with pytest.raises(redis.ConnectionError):
            page(ask())
    else:
        assert [body(page(ask())), body(page(ask(method="head")))] == ["page 2", "page 3"]
        assert body(cached_page(60)(cache_control(private=True)(vary()))(ask())) == "page"


@pytest.mark.parametrize("options", [{}, {"stale": 1000}], ids=["plain", "stale"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "asyncio"])
def test_each_request_is_counted_once(asynchronous: bool, options: Any) -> None:
    respond = vary("X-Kind")
    heard: list[Any] = []
    events.subscribe(heard.append, reads=True)

    async def arespond(request: HttpRequest) -> HttpResponse:
        return respond(request)

    async def amain() -> None:
        for kind in "aabb":
            await page(ask(x_kind=kind))

    page: Any = cached_page(60, group="pages", **options)(arespond if asynchronous else respond)
    try:
        if asynchronous:
            asyncio.run(amain())
        else:
            for kind in "aabb":
                page(ask(x_kind=kind))
    finally:
        events.unsubscribe(heard.append)
    # Nothing else is counted that no code of the site has asked for.
    reads = [(each.subject.group, each.result) for each in heard if isinstance(each, events.Read)]
    assert reads == [("pages", result) for result in ("miss", "hit", "miss", "hit")]
