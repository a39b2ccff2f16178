"""``cached_page()`` among other decorators and middleware: two users, in all orders, beside
Django's. One user must never get the other's page where Django would not serve it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import AnonymousUser
from django.core.cache import cache, caches
from django.http import HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path
from django.utils.cache import patch_vary_headers
from django.utils.decorators import method_decorator
from django.views.decorators.cache import cache_control, cache_page, never_cache
from django.views.decorators.csrf import csrf_protect, ensure_csrf_cookie
from django.views.decorators.gzip import gzip_page
from django.views.decorators.vary import vary_on_cookie, vary_on_headers
from django.views.generic import TemplateView
from rest_framework.decorators import api_view, renderer_classes
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response
from rest_framework.views import APIView

from django_redis_lock import cached_page
from tests.lanes import IN_MEMORY, some
from tests.processes import PATIENCE, in_threads, until
from tests.support.background import Background
from tests.support.cached_pages import MEMORY, PLAIN, expire_pages, finished, followers

pytestmark = pytest.mark.invariant("U1")

COUNT = "{{ who }}"


@pytest.fixture(autouse=True, params=["redis", IN_MEMORY])
def _caches(request: pytest.FixtureRequest, client: redis.Redis, settings: Any) -> None:
    ours = MEMORY if request.param == "memory" else settings.CACHES["default"]
    settings.CACHES = {"default": ours, "plain": PLAIN}
    cache.clear()
    caches["plain"].clear()


def who(request: Any) -> str:
    return str(request.COOKIES.get("user", "-")) + str(request.headers.get("X-Kind", ""))


class User:
    is_authenticated = True
    is_active = False  # For Django REST framework.

    def __init__(self, pk: str) -> None:
        self.pk = pk


def ask(user: str = "", kind: str = "", method: str = "get", **headers: str) -> Any:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if kind:
        given["X-Kind"] = kind
    if user:
        given["Cookie"] = f"user={user}; csrftoken={user * 32}"
    request: Any = getattr(RequestFactory(), method)("/page/", headers=given)
    request.user = User(user)
    return request


def seen_by(response: Any) -> tuple[Any, ...]:
    content = b"".join(response) if response.streaming else response.content
    headers = {
        name: value
        for name, value in response.headers.items()
        if name not in ("Age", "Expires", "Date", "Content-Length")
    }
    return response.status_code, content, sorted(headers.items())


# -- the views -----------------------------------------------------------------------------------


def template(request: Any) -> TemplateResponse:
    return TemplateResponse(request, engines["django"].from_string(COUNT), {"who": who(request)})


def plain(request: Any) -> HttpResponse:
    return HttpResponse(who(request))


def stream(request: Any) -> StreamingHttpResponse:
    return StreamingHttpResponse([who(request)])


def sets_a_cookie(request: Any) -> TemplateResponse:
    response = template(request)
    response.set_cookie("visited", who(request))
    return response


def control(value: str) -> Callable[[Any], Any]:
    def view(request: Any) -> TemplateResponse:
        response = template(request)
        response["Cache-Control"] = value
        return response

    return view


def no_update(request: Any) -> TemplateResponse:
    request._cache_update_cache = False
    return template(request)


class Generic(TemplateView):
    def get(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        return template(request)


VIEWS: dict[str, Any] = {
    "template": template,
    "plain": plain,
    "stream": stream,
    "generic": Generic.as_view(),
    "cookie": sets_a_cookie,
    "no update": no_update,
    **{value: control(value) for value in ("private", "max-age=0", "no-store", "s-maxage=0")},
}
#: What Django's own decorators and middleware say of a response.
DECORATORS: dict[str, Any] = {
    "vary_on_cookie": vary_on_cookie,
    "vary_on_headers": vary_on_headers("X-Kind"),
    "never_cache": never_cache,
    "private": cache_control(private=True),
    "max_age": cache_control(max_age=30),
    "csrf_protect": csrf_protect,
    "ensure_csrf_cookie": ensure_csrf_cookie,
    "login_required": login_required,
    "gzip_page": gzip_page,
}


def orders(most: int) -> Iterator[tuple[str, ...]]:
    """All orders of up to so many other decorators."""
    for number in range(most + 1):
        for names in itertools.combinations(DECORATORS, number):
            yield from itertools.permutations((*names, "page"))


#: Two users, with and without cookies and credentials.
REQUESTS: tuple[dict[str, Any], ...] = (
    {"user": "a"},
    {"user": "b"},
    {"user": "a", "kind": "k"},
    {},
    {"user": "b", "authorization": "Bearer b"},
    {"user": "a", "authorization": "Bearer a"},
    {"user": "b", "method": "head"},
)


def decorated(view: Any, order: tuple[str, ...], page: Any) -> Any:
    for name in reversed(order):
        view = page(view) if name == "page" else DECORATORS[name](view)
    return view


@pytest.mark.parametrize("_caches", ["redis"], indirect=True)
@pytest.mark.parametrize("name", VIEWS)
def test_all_orders_of_decorators(name: str) -> None:
    wrong = []
    around = some(orders(2), each=11) if name in ("template", "plain") else some(orders(1), each=2)
    for order in around:
        answers = []
        for page in (cached_page(60, stale=5), cache_page(60, cache="plain")):
            view = decorated(VIEWS[name], order, page)
            answers.append([seen_by(finished(view(ask(**of)))) for of in REQUESTS])
        cache.clear()
        caches["plain"].clear()
        ours, theirs = answers
        reads_user = "login_required" in order[order.index("page") :]
        for of, mine, expected in zip(REQUESTS, ours, theirs, strict=True):
            # Ours does not store a response with a cookie, as it is the first visitor's, nor one
            # that has read a user without varying.
            own = who(ask(**of)).encode()
            own_page = mine[1] == own and (mine[1] != expected[1] or reads_user)
            if mine != expected and not (name == "cookie" or own_page):
                wrong.append((order, of, mine, expected))
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("name", ["dispatch", "get"])
def test_rest_views(name: str) -> None:
    calls: list[str] = []

    class Report(APIView):
        def get(self, request: Any) -> Response:
            calls.append(who(request))
            return Response({"who": who(request)})

    def answers(page: Any) -> list[Any]:
        decorate = method_decorator([vary_on_cookie, page], name=name)
        view = decorate(type("V", (Report,), {"get": Report.get})).as_view()
        return [finished(view(ask(user))).content for user in "abab"]

    assert answers(cached_page(60)) == answers(cache_page(60, cache="plain"))
    assert calls == ["a", "b"] * 2


PAGE = cached_page(60, stale=1000, background=True)


class Text(JSONRenderer):
    media_type, format = "text/plain", "text"


class Rest(APIView):
    renderer_classes = (JSONRenderer, Text)

    def get(self, request: Any) -> Response:
        return plain_rest(request)


def plain_rest(request: Any) -> Response:
    numbers.append(1)
    return Response({"number": len(numbers)})


def class_view(name: str, *decorators: Any) -> Any:
    decorate = method_decorator(decorators, name=name)
    return decorate(type("V", (Rest,), {"get": Rest.get})).as_view()


numbers: list[int] = []
with_renderers = renderer_classes(Rest.renderer_classes)
#: Where a page of Django REST framework is cached: within its view, a response has no renderer yet.
REST = {
    "dispatch": class_view("dispatch", PAGE),
    "dispatch that varies": class_view("dispatch", vary_on_cookie, PAGE),
    "above api_view": PAGE(api_view(["GET"])(with_renderers(plain_rest))),
}


@pytest.mark.parametrize("name", REST)
def test_a_rest_view_is_refreshed_in_the_background(name: str) -> None:
    def get(accept: str) -> tuple[Any, ...]:
        request = ask("a", accept=accept)
        request.user = AnonymousUser()  # The view reads it.
        status, content, headers = seen_by(finished(REST[name](request)))
        return status, content, [(name, {*value.split(", ")}) for name, value in headers]

    numbers.clear()
    first = get("application/json")
    assert get("application/json") == first
    expire_pages()
    assert get("application/json") == first
    until(lambda: get("application/json")[1] == b'{"number":2}')
    # With the same headers, so a client that accepts something else gets another page.
    assert get("application/json")[2] == first[2]
    assert get("text/plain")[2] != first[2]
    assert len(numbers) == 3


async def aview(request: Any) -> TemplateResponse:
    return template(request)


def test_an_async_view_under_wsgi_renders_after_its_loop_has_ended() -> None:
    calls: list[Any] = []

    @cached_page(60)
    async def page(request: Any) -> TemplateResponse:
        calls.append(request)
        return template(request)

    for _ in range(3):
        assert asyncio.run(page(ask("a"))).render().content == b"a"
    assert len(calls) == 1


# -- the middleware ------------------------------------------------------------------------------


def late(get_response: Any) -> Any:
    """Sets headers after the view, as sessions do."""

    def call(request: Any) -> Any:
        response = get_response(request)
        patch_vary_headers(response, request.GET.get("vary", "").split(","))
        return response

    return call


def form(request: Any) -> TemplateResponse:
    text = "{{ who }}{% csrf_token %}" if "token" in request.GET else COUNT
    source = engines["django"].from_string(text)
    return TemplateResponse(request, source, {"who": who(request)})


urlpatterns = [
    path("template/", form),
    path("cookie/", sets_a_cookie),
    path("private/", vary_on_cookie(cached_page(60)(template))),
    path("theirs/", vary_on_cookie(cache_page(60, cache="plain")(template))),
    path("apage/", vary_on_cookie(cached_page(60)(aview))),
]
OURS = ["django_redis_lock.middleware.CachedPageMiddleware"]
BETWEEN = [f"{__name__}.late", "django.middleware.csrf.CsrfViewMiddleware"]
SITES = {
    "ours": [*OURS, *BETWEEN],
    "theirs": [
        "django.middleware.cache.UpdateCacheMiddleware",
        *BETWEEN,
        "django.middleware.cache.FetchFromCacheMiddleware",
    ],
}
URLS = ("/template/", "/template/?vary=Cookie", "/template/?vary=X-Kind", "/template/?vary=*")


@pytest.mark.parametrize("url", [*URLS, "/template/?token=1", "/cookie/?vary=Cookie"])
def test_the_middleware(url: str) -> None:
    def answers(site: str) -> list[bytes]:
        alias = "default" if site == "ours" else "plain"
        changes = {"MIDDLEWARE": SITES[site], "CACHE_MIDDLEWARE_ALIAS": alias}
        with override_settings(ROOT_URLCONF=__name__, **changes):
            found = []
            for user, kind in (("a", ""), ("b", ""), ("a", "k"), ("b", ""), ("", ""), ("", "")):
                browser = Client(headers={"X-Kind": kind} if kind else {})
                browser.cookies.load({"user": user} if user else {})
                found.append(browser.get(url).content.split(b"<")[0])
            return found

    assert answers("ours") == answers("theirs")


def test_in_djangos_handler() -> None:
    async def asynchronous(url: str) -> list[bytes]:
        found = []
        for user in "abab":
            browser = AsyncClient()
            browser.cookies.load({"user": user})
            found.append((await browser.get(url)).content)
        return found

    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[]):
        for url in ("/private/", "/theirs/", "/apage/"):
            found = []
            for user in "abab":
                browser = Client()
                browser.cookies.load({"user": user})
                found.append(browser.get(url).content)
            assert found == asyncio.run(asynchronous(url)) == [b"a", b"b"] * 2


# -- tokens --------------------------------------------------------------------------------------


def test_the_token_of_another_decorator_is_not_in_the_page() -> None:
    page = ensure_csrf_cookie(cached_page(60)(plain))
    assert [finished(page(ask(user))).content for user in "ab"] == [b"a", b"a"]


# -- the flight is open until the rendering ------------------------------------------------------


class Slow:
    """In a template: renders when ``going`` is set, and counts."""

    def __init__(self) -> None:
        self.going = threading.Event()
        self.begun = threading.Event()
        self.rendered: list[str] = []
        self.error: Exception | None = None

    def view(self, request: Any) -> TemplateResponse:
        source = engines["django"].from_string("{{ slow }}")
        return TemplateResponse(request, source, {"slow": lambda: self.render(who(request))})

    def render(self, text: str) -> str:
        self.rendered.append(text)
        self.begun.set()
        assert self.going.wait(PATIENCE)
        if self.error is not None and len(self.rendered) == 1:
            raise self.error
        return text


def crowd(page: Any, slow: Slow, users: str, waiting: int) -> list[bytes]:
    """``waiting``: how many wait in memory; one more waits in Redis for all of them."""

    def release() -> None:
        until(lambda: followers() >= waiting)
        slow.going.set()

    left = list(users)
    threading.Thread(target=release, daemon=True).start()
    return sorted(in_threads(len(users), lambda: finished(page(ask(left.pop()))).content))


def test_a_crowd_waits_for_the_rendering() -> None:
    slow = Slow()
    assert crowd(cached_page(60)(slow.view), slow, "a" * 8, 6) == [b"a"] * 8
    assert slow.rendered == ["a"]


def test_a_follower_never_gets_a_page_that_turned_out_to_vary() -> None:
    slow = Slow()
    page = vary_on_cookie(cached_page(60)(slow.view))
    assert crowd(page, slow, "aaaabbbb", 6) == [b"a"] * 4 + [b"b"] * 4
    assert sorted(slow.rendered) == ["a", "b"]


def test_a_page_that_turned_out_to_be_private_frees_all_followers_at_once() -> None:
    slow = Slow()
    page = cache_control(private=True)(cached_page(60)(slow.view))
    assert crowd(page, slow, "abcdefgh", 6) == [letter.encode() for letter in "abcdefgh"]
    assert len(slow.rendered) == 8


def test_a_rendering_that_fails_lets_one_follower_take_over() -> None:
    slow = Slow()
    slow.error = KeyError("no data")
    page = cached_page(60)(slow.view)

    def visit(request: Any) -> HttpResponse:
        try:
            response: HttpResponse = finished(page(request))
            return response
        except KeyError:
            return HttpResponse("error")

    assert crowd(visit, slow, "a" * 8, 6) == [b"a"] * 7 + [b"error"]
    assert slow.rendered == ["a", "a"]


@pytest.mark.invariant("C5")
def test_a_response_that_is_never_rendered_lets_others_compute(settings: Any) -> None:
    """As when a middleware answers in its place."""
    settings.DJANGO_REDIS_LOCK = {"FLIGHT_TIMEOUT": 600}
    slow = Slow()
    slow.going.set()
    page = cached_page(60, wait=600)(slow.view)
    response = page(ask("a"))
    other = Background(lambda: finished(page(ask("b"))).content)
    del response
    assert other.result() == b"b"
    assert slow.rendered == ["b"]


@pytest.mark.parametrize("background", [False, True])
def test_a_stale_page_is_served_if_the_rendering_fails(background: bool) -> None:
    slow = Slow()
    slow.going.set()
    page = vary_on_cookie(cached_page(60, stale=1000, background=background)(slow.view))
    first = finished(page(ask("a")))
    assert first.content == b"a"
    expire_pages()
    slow.rendered.clear()
    slow.error = KeyError("no data")
    assert finished(page(ask("a"))).content == b"a"
    until(lambda: slow.rendered == ["a"])


@pytest.mark.parametrize(("timeout", "kept"), [(60, 1060), (None, 1020)])
def test_in_the_background_a_page_varies_and_lasts_as_before(
    timeout: float | None, kept: int
) -> None:
    """No decorator around the view speaks there."""
    calls: list[str] = []

    def view(request: Any) -> TemplateResponse:
        calls.append(who(request))
        response = template(request)
        response.context_data["who"] += f" {len(calls)}"
        return response

    page = cache_control(max_age=20)(
        vary_on_cookie(cached_page(timeout, stale=1000, background=True)(view))
    )
    for user in "ab":
        finished(page(ask(user)))
    expire_pages()
    assert finished(page(ask("a"))).content == b"a 1"
    until(lambda: finished(page(ask("a"))).content == b"a 3")
    longest = max(cache.pttl(key) for key in cache.keys("*cache_page.*.GET.*"))
    assert 1000 * (kept - 10) < longest <= 1000 * kept
    assert finished(page(ask("b"))).content in (b"b 2", b"b 4")
    assert finished(page(ask("c"))).content.startswith(b"c")
