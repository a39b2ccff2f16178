"""``cached_page()`` in random stacks of decorators, asked by random visitors: nobody sees what is
another's. What depends on a header that no ``Vary`` names, Django's ``cache_page`` shares, too."""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.contrib import messages
from django.contrib.auth.decorators import login_not_required, login_required
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.messages.storage.cookie import CookieStorage
from django.contrib.sessions.backends.signed_cookies import SessionStore
from django.contrib.sessions.middleware import SessionMiddleware
from django.core.cache import cache, caches
from django.http import Http404, HttpResponse, HttpResponseRedirect, JsonResponse
from django.middleware.csrf import (
    CsrfViewMiddleware,
    _does_token_match,
    get_token,
)
from django.template import engines
from django.template.response import TemplateResponse
from django.test import RequestFactory
from django.utils import translation
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject
from django.views import View
from django.views.decorators.cache import cache_control, cache_page, never_cache
from django.views.decorators.csrf import csrf_protect, ensure_csrf_cookie
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import conditional_page
from django.views.decorators.vary import vary_on_cookie, vary_on_headers
from rest_framework.renderers import StaticHTMLRenderer
from rest_framework.response import Response
from rest_framework.views import APIView

from django_redis_lock import cached_page
from django_redis_lock.middleware import CachedPageMiddleware
from tests.support.cached_pages import PLAIN, finished

pytestmark = pytest.mark.invariant("U1")

VISITORS = ("ann", "bob", "")
PARTS: dict[str, Callable[[Any], str]] = {
    "nothing": lambda request: "for all",
    "cookie": lambda request: f"cookie={request.COOKIES.get('sessionid', '')};",
    "kind": lambda request: "kind",
    "session": lambda request: f"own={request.session.get('name', '')};",
    "user": lambda request: f"own={request.user.username};",
    "messages": lambda request: "".join(f"own={m};" for m in messages.get_messages(request)),
    "nonce": lambda request: f"once={request.csp_nonce};",
    "own nonce": lambda request: f"once={request.number};",
    "token": get_token,
    "language": lambda request: f"language={translation.get_language()};",
}
DECORATORS: dict[str, Any] = {
    "vary_on_cookie": vary_on_cookie,
    "vary_on_headers": vary_on_headers("X-Kind", "Authorization"),
    "never_cache": never_cache,
    "private": cache_control(private=True),
    "public": cache_control(public=True),
    "max_age": cache_control(max_age=30),
    "csrf_protect": csrf_protect,
    "ensure_csrf_cookie": ensure_csrf_cookie,
    "login_required": login_required(login_url="/login/"),
    "login_not_required": login_not_required,
    "gzip_page": gzip_page,
    "conditional_page": conditional_page,
}


def ask(random_: random.Random, number: int) -> Any:
    name = random_.choice(VISITORS)
    headers = {"Accept-Encoding": "gzip"} if random_.random() < 0.3 else {}
    if random_.random() < 0.3:
        headers["Authorization"] = f"Bearer {name}"
    if random_.random() < 0.1:
        headers["If-None-Match"] = "*"
    request: Any = RequestFactory().get("/page/", headers=headers)
    request.name, request.number = name, f"number{number:06}"
    store = SessionStore()
    if name:
        store["name"] = name
        store.save()
        request.COOKIES = {"sessionid": name, "csrftoken": (name * 11)[:32]}
        request.META["HTTP_COOKIE"] = f"sessionid={name}"
    request.session = SessionStore(store.session_key if name else None)

    def user() -> Any:
        found = request.session.get("name")
        return User(username=found) if found else AnonymousUser()

    async def auser() -> Any:
        return user()

    request.user, request.auser = SimpleLazyObject(user), auser
    request._messages = CookieStorage(request)
    if random_.random() < 0.5:
        messages.info(request, name)

    def nonce() -> str:
        request._csp_nonce = request.number
        return str(request._csp_nonce)

    request.csp_nonce = SimpleLazyObject(nonce)
    CsrfViewMiddleware(HttpResponse).process_request(request)
    return request


def answering(kind: str, shows: list[str]) -> Callable[[Any], Any]:
    def text(request: Any) -> str:
        return "|".join(PARTS[each](request) for each in shows)

    def view(request: Any) -> Any:
        if kind == "template":
            source = engines["django"].from_string("{{ text|safe }}")
            response: Any = TemplateResponse(request, source, {"text": lambda: text(request)})
        elif kind == "json":
            response = JsonResponse({"text": text(request)})
        elif kind == "refuses" and not request.name:
            raise Http404
        elif kind == "redirects" and not request.name:
            return HttpResponseRedirect("/login/")
        else:
            response = HttpResponse(text(request))
        if kind == "cookie":
            response.set_cookie("seen", request.name)
        if "own nonce" in shows:
            response["Content-Security-Policy"] = f"script-src 'nonce-{request.number}'"
        return response

    return view


KINDS = ("plain", "template", "json", "cookie", "refuses", "redirects")


def stack(random_: random.Random) -> tuple[str, Callable[..., Any]]:
    """What it is, and how it is made around a decorator for pages; Django's is for plain views."""
    shows = random_.sample(sorted(PARTS), random_.choice((1, 1, 2)))
    kind, place = random_.choice(KINDS), random_.choice(("function", "async", "class", "rest"))
    inner = random_.sample(sorted(DECORATORS), random_.choice((0, 0, 1, 2)))
    outer = random_.sample(sorted(DECORATORS), random_.choice((0, 0, 1, 2)))
    view = answering(kind, shows)

    def made(page: Any, plain: bool = False) -> Any:
        around = [*(DECORATORS[name] for name in outer), page]
        around += [DECORATORS[name] for name in inner]
        if place == "class":
            members = {"get": lambda self, request: view(request)}
            return method_decorator(around, name="dispatch")(type("V", (View,), members)).as_view()
        if place == "rest":

            class Page(APIView):
                authentication_classes = permission_classes = ()
                renderer_classes = (StaticHTMLRenderer,)

                @method_decorator(page)
                def get(self, request: Any) -> Any:
                    response = view(request._request)
                    if response.status_code != 200 or isinstance(response, TemplateResponse):
                        return response
                    made = Response(response.content.decode(), headers=response.headers)
                    made.cookies = response.cookies
                    return made

            decorated: Any = Page.as_view()
            for name in (*reversed(inner), *reversed(outer)):
                decorated = DECORATORS[name](decorated)
            return decorated
        decorated = view
        if place == "async" and not plain:

            async def aview(request: Any) -> Any:
                return view(request)

            decorated = aview
        for each in reversed(around):
            decorated = each(decorated)
        return decorated

    return f"{kind} {place} {shows} {outer} page {inner}", made


def respond(view: Any, request: Any) -> str:
    try:
        with translation.override("de" if request.name == "bob" else "en"):
            response = finished(view(request))
    except Http404:
        return ""
    response = SessionMiddleware(lambda request: response).process_response(request, response)
    if response.get("Content-Encoding") == "gzip":
        return gzip.decompress(response.content).decode()
    return str(response.content.decode()) + str(response.get("Content-Security-Policy", ""))


def others(request: Any, text: str) -> list[str]:
    """What ``text`` shows ``request`` of another one: of its visitor, or of any."""
    found = [word for word in re.findall("own=([^;]+);", text) if word != request.name]
    found += [word for word in re.findall(r"number\d{6}", text) if word != request.number]
    own = request.META.get("CSRF_COOKIE")
    for token in re.findall(r"\b[a-zA-Z0-9]{64}\b", text):
        found += [] if own and _does_token_match(token, own) else [token]
    return found


def shared_by_header(request: Any, text: str) -> list[str]:
    """What belongs to another by a header that the view must name in Vary."""
    language = "de" if request.name == "bob" else "en"
    cookies = [word for word in re.findall("cookie=([^;]*);", text) if word != request.name]
    return cookies + [w for w in re.findall("language=([^;]*);", text) if w != language]


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(80))
def test_no_visitor_sees_what_is_anothers(seed: int, client: redis.Redis, settings: Any) -> None:
    settings.CACHES = {"default": settings.CACHES["default"], "plain": PLAIN}
    translation.deactivate()
    random_ = random.Random(seed)
    number = 0
    for _ in range(25):
        cache.clear()
        caches["plain"].clear()
        what, made = stack(random_)
        options: Any = random_.choice(({}, {"stale": 600}, {"stale": 600, "background": True}))
        ours = made(cached_page(60, **options))
        if random_.random() < 0.2:  # Around all that sets headers.
            plain_view = made(lambda view: view, plain=True)

            def rendered(request: Any, view: Any = plain_view) -> Any:
                response = finished(view(request))
                return SessionMiddleware(lambda _: response).process_response(request, response)

            ours, what = CachedPageMiddleware(rendered), f"middleware: {what}"
        theirs = made(cache_page(60, cache="plain"), plain=True)
        state = random_.getstate()
        answers: list[tuple[list[str], list[str]]] = []
        for view in (theirs, ours):
            random_.setstate(state)
            secret: list[str] = []
            shared: list[str] = []
            for _ in range(8):
                request, number = ask(random_, number), number + 1
                is_stale = random_.random() < 0.2
                if view is ours and is_stale:
                    for key in list(cache.keys("*.cache_page.*GET*")):
                        cache.mark_stale(key, stale=600)
                text = respond(view, request)
                secret += others(request, text)
                shared += shared_by_header(request, text)
            answers.append((secret, shared))
        (_, their_shared), (our_secret, our_shared) = answers
        assert not our_secret, (seed, what, our_secret)
        assert not our_shared or their_shared, (seed, what, our_shared)
