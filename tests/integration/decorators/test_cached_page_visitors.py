"""``cached_page()``: what belongs to one visitor reaches no other, also where ``cache_page`` stores
it, because its middleware comes later: what was read of the session, messages, a nonce."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis
from django.contrib import messages
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.messages.storage.cookie import CookieStorage
from django.contrib.sessions.backends.signed_cookies import SessionStore
from django.contrib.sessions.middleware import SessionMiddleware
from django.core.cache import cache
from django.http import HttpResponse, JsonResponse
from django.middleware.csrf import get_token
from django.template import engines
from django.template.response import TemplateResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject
from django.views import View
from django.views.decorators.gzip import gzip_page
from rest_framework.authentication import BaseAuthentication
from rest_framework.renderers import StaticHTMLRenderer
from rest_framework.response import Response
from rest_framework.views import APIView

from django_redis_lock import cached_page
from django_redis_lock.middleware import CachedPageMiddleware
from tests.lanes import IN_MEMORY
from tests.processes import until
from tests.support.cached_pages import MEMORY, PLAIN

pytestmark = pytest.mark.invariant("U1")

computed: list[str] = []


@pytest.fixture(autouse=True, params=["redis", IN_MEMORY, "plain"])
def _caches(request: pytest.FixtureRequest, client: redis.Redis, settings: Any) -> Iterator[None]:
    kinds = {"redis": settings.CACHES["default"], "plain": PLAIN}
    settings.CACHES = {"default": kinds.get(request.param, MEMORY)}
    cache.clear()
    computed.clear()
    yield
    computed.clear()


def ask(name: str) -> Any:
    """A request of the visitor ``name``, as the middleware gives it to the view."""
    request: Any = RequestFactory().get("/page/")
    if name:
        store = SessionStore()
        store["name"] = name
        store.save()
        request.session = SessionStore(store.session_key)
        # That key has the time in it, and differs from one second to the next.
        request.META["HTTP_COOKIE"] = f"sessionid={name}"
    else:
        request.session = SessionStore()
    request.user = SimpleLazyObject(lambda: request.session.get("name", "nobody"))
    request._messages = CookieStorage(request)
    if name:
        messages.info(request, f"for {name}")

    def nonce() -> str:  # As django-csp does it.
        request._csp_nonce = f"nonce {name}"
        return str(request._csp_nonce)

    request.csp_nonce = SimpleLazyObject(nonce)
    return request


#: What a page shows of its visitor.
PARTS: dict[str, Callable[[Any], str]] = {
    "session": lambda request: request.session.get("name", "nobody"),
    "user": lambda request: f"Hello {request.user}",
    "messages": lambda request: ", ".join(map(str, messages.get_messages(request))),
    "nonce": lambda request: f"of {request.csp_nonce}",
}


def plain(part: Callable[[Any], str], request: Any) -> HttpResponse:
    computed.append("")
    return HttpResponse(part(request))


def template(part: Callable[[Any], str], request: Any) -> TemplateResponse:
    """The template reads it."""
    computed.append("")
    text = engines["django"].from_string("{{ part }}")
    return TemplateResponse(request, text, {"part": lambda: part(request)})


def function(answer: Any, **options: Any) -> Any:
    @cached_page(60, **options)
    def view(request: Any) -> Any:
        return answer(request)

    return view


def coroutine_function(answer: Any, **options: Any) -> Any:
    @cached_page(60, **options)
    async def view(request: Any) -> Any:
        return answer(request)

    return lambda request: asyncio.run(view(request))


def class_of_views(answer: Any, **options: Any) -> Any:
    @method_decorator(cached_page(60, **options), name="dispatch")
    class Page(View):
        def get(self, request: Any) -> Any:
            return answer(request)

    return Page.as_view()


def rest_framework(answer: Any, **options: Any) -> Any:
    class Page(APIView):
        authentication_classes = permission_classes = ()
        renderer_classes = (StaticHTMLRenderer,)

        @method_decorator(cached_page(60, **options))
        def get(self, request: Any) -> Any:
            made = answer(request._request)
            return made if isinstance(made, TemplateResponse) else Response(made.content.decode())

    return Page.as_view()


KINDS = (function, coroutine_function, class_of_views, rest_framework)


def text(view: Any, name: str) -> str:
    request = ask(name)
    response = view(request)
    if hasattr(response, "render"):
        response.render()
    # What the middleware around all decorators sees.
    SessionMiddleware(lambda request: response).process_response(request, response)
    if request.session.accessed:
        assert "Cookie" in response["Vary"]
    return str(response.content.decode())


#: Django REST framework reads the user before the handler.
CASES = [
    (kind, part) for part in PARTS for kind in KINDS if (kind, part) != (rest_framework, "user")
]


@pytest.mark.whole
@pytest.mark.parametrize(("kind", "part"), CASES)
@pytest.mark.parametrize("answer", [plain, template])
def test_each_visitor_sees_what_is_theirs(kind: Any, answer: Any, part: str) -> None:
    view = kind(partial(answer, PARTS[part]))
    wanted = {name: PARTS[part](ask(name)) for name in ("ann", "bob", "")}
    for name in ("ann", "bob", "ann", "bob"):
        assert text(view, name) == wanted[name]
    for name in ("", "bob", ""):  # A page without messages is for all; theirs come with the next.
        assert text(view, name) in (wanted[name], wanted[""])
    if part in ("session", "user"):
        assert len(computed) == 3  # Each has a page of their own, and without a cookie one for all.


def loaded(view: Any) -> Any:
    """A decorator around the page, such as login_required, has loaded the user."""

    def call(request: Any) -> Any:
        assert str(request.user)
        return view(request)

    return call


@pytest.mark.parametrize("kind", [function, coroutine_function, class_of_views])
@pytest.mark.parametrize("answer", [plain, template])
def test_a_user_who_was_loaded_before_is_the_visitors(kind: Any, answer: Any) -> None:
    view = loaded(kind(partial(answer, PARTS["user"])))
    for name in ("ann", "bob", "ann", "", "bob"):
        assert text(view, name) == PARTS["user"](ask(name))
    assert len(computed) == 3


class OfProxy(BaseAuthentication):
    """Of Django REST framework."""

    def authenticate(self, request: Any) -> Any:
        name = request.headers.get("X-User")
        return (User(username=name), None) if name else None


class OfUsers(APIView):
    authentication_classes = (OfProxy,)
    permission_classes = ()
    renderer_classes = (StaticHTMLRenderer,)

    def get(self, request: Any) -> Any:
        computed.append("")
        return Response(f"Hello {request.user}")


def by_middleware(view: Any) -> Any:
    def call(request: Any) -> Any:
        name = request.headers.get("X-User")
        request.user = User(username=name) if name else AnonymousUser()
        return view(request)

    return call


class OnHandler(OfUsers):
    get = method_decorator(cached_page(60))(OfUsers.get)


BY_HEADER: dict[str, Any] = {
    "middleware": by_middleware(function(partial(plain, PARTS["user"]))),
    "middleware, template": by_middleware(function(partial(template, PARTS["user"]))),
    "middleware, async": by_middleware(coroutine_function(partial(plain, PARTS["user"]))),
    "middleware, stale": by_middleware(function(partial(plain, PARTS["user"]), stale=60)),
    "inside": function(by_middleware(partial(plain, PARTS["user"]))),
    "handler": OnHandler.as_view(),
    "dispatch": method_decorator(cached_page(60), name="dispatch")(OfUsers).as_view(),
    "view": cached_page(60)(OfUsers.as_view()),
}


@pytest.mark.parametrize("name", BY_HEADER)
def test_the_page_of_a_user_without_a_session_is_stored_if_it_varies(name: str) -> None:
    """Of Authorization, Django says it itself."""

    def shown(view: Any, user: str) -> str:
        request = RequestFactory().get("/page/", headers={"X-User": user})
        response = view(request)
        if hasattr(response, "render"):
            response.render()
        return str(response.content.decode())

    view = BY_HEADER[name]
    for user in ("ann", "bob", "ann"):
        assert shown(view, user) == f"Hello {user}"


@pytest.mark.parametrize("answer", [plain, template])
@pytest.mark.parametrize("name", ["ann", ""])
def test_what_has_nothing_of_a_visitor_is_for_all(answer: Any, name: str) -> None:
    view = function(partial(answer, lambda request: "for all"))

    def logged_in(request: Any) -> Any:
        """A decorator around the page reads the session and the messages."""
        assert request.session.get("name") is None or request.user
        list(messages.get_messages(request))
        return view(request)

    assert {text(logged_in, each) for each in (name, "bob", "ann", "")} == {"for all"}
    assert len(computed) == 1


# -- secrets of one response: nonces, tokens -----------------------------------------------------


def numbered() -> str:
    """A secret that no other response has."""
    computed.append("")
    return f"{'secret' * 4}{len(computed)}"


def html(text: str, **headers: str) -> Any:
    return HttpResponse(text, headers={k.replace("_", "-"): v for k, v in headers.items()})


def own_policy(header: str) -> Any:
    def view(request: Any) -> Any:
        nonce = numbered()
        return html(nonce, **{header: f"script-src 'NONCE-{nonce}'"})

    return view


def later_policy(request: Any) -> Any:
    """A middleware around the page makes a header of it, as django-csp does."""
    response = html(nonce := numbered())
    response._csp_update = {"script-src": [f"'nonce-{nonce}'"]}
    return response


def own_attribute(request: Any) -> Any:
    request.style_nonce = numbered()
    return html(request.style_nonce)


def escaped(request: Any) -> Any:
    text = engines["django"].from_string("{{ request.csp_nonce|escapejs }}")
    return TemplateResponse(request, text)


#: Views whose response has a secret, of which a middleware around them may have made the nonce.
SECRETS: dict[str, Any] = {
    "template": lambda request: template(PARTS["nonce"], request),
    "json": lambda request: JsonResponse({"nonce": str(request.csp_nonce)}),
    "in javascript": escaped,
    "compressed": gzip_page(lambda request: html(f"{request.csp_nonce} " * 99)),
    "a header": lambda request: html("page", X_Nonce=str(request.csp_nonce)),
    "own policy": own_policy("Content-Security-Policy"),
    "report only": own_policy("Content-Security-Policy-Report-Only"),
    "policy by a middleware": later_policy,
    "own attribute": own_attribute,
    "form": lambda request: TemplateResponse(
        request, engines["django"].from_string("{% load redis_lock %}{% idempotency_key %}")
    ),
    "token": lambda request: html(get_token(request)),
    "token of before": lambda request: html(request.token),
}


def protected(view: Any, made_before: bool) -> Any:
    """As the middlewares of django-csp, Django and CSRF do; ``made_before``: a decorator around the
    page has used the nonce."""

    def call(request: Any) -> Any:
        request._csp_nonce = None

        def nonce() -> str:
            request._csp_nonce = request._csp_nonce or f"{'w-+/=' * 2}{numbered()}=="
            return str(request._csp_nonce)

        request.csp_nonce = SimpleLazyObject(nonce)
        request.token = get_token(request)
        assert not made_before or str(request.csp_nonce)
        response = view(request)
        response = response.render() if hasattr(response, "render") else response
        if request._csp_nonce:
            response["Content-Security-Policy"] = f"script-src 'nonce-{request._csp_nonce}'"
        return response

    return call


@pytest.mark.parametrize("where", ["decorator", "used before", "middleware"])
@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_of_one_response_is_never_in_another(secret: str, where: str) -> None:
    if where == "middleware":  # It is around that of the policy.
        view = CachedPageMiddleware(protected(SECRETS[secret], made_before=False))
    else:
        view = protected(cached_page(60, stale=60)(SECRETS[secret]), where == "used before")

    def seen() -> tuple[Any, ...]:
        response = view(RequestFactory().get("/page/", headers={"Accept-Encoding": "gzip"}))
        policy = response.get("Content-Security-Policy", "none")
        return (response.content, response.get("X-Nonce")), policy

    for first, second in zip(seen(), seen(), strict=True):
        assert first != second or first == "none"


def test_a_page_without_its_nonce_is_for_all() -> None:
    view = protected(function(lambda request: html(str(numbered()))), made_before=True)
    assert len({view(RequestFactory().get("/page/")).content for _ in range(3)}) == 1


@pytest.mark.parametrize("_caches", ["redis", IN_MEMORY], indirect=True)
@pytest.mark.parametrize("answer", [plain, template])
@pytest.mark.parametrize("part", ["session", "user"])
def test_a_refresh_in_the_background_stays_the_visitors(answer: Any, part: str) -> None:
    view = function(partial(answer, PARTS[part]), stale=600, background=True)
    for name in ("ann", "bob"):
        text(view, name)
    for number, name in enumerate(("ann", "bob"), 3):
        for key in list(cache.keys("*.cache_page.*GET*")):
            cache.mark_stale(key, stale=600)
        text(view, name)
        until(lambda number=number: len(computed) >= number)
    wanted = {name: PARTS[part](ask(name)) for name in ("ann", "bob", "")}
    assert {name: text(view, name) for name in wanted} == wanted
