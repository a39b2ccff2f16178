"""``locked()``: who gets a response if the lock is taken or Redis is down, and who gets an
exception."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import redis
from django.contrib.admin import AdminSite, ModelAdmin
from django.contrib.admin import action as admin_action
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from rest_framework.decorators import action, api_view
from rest_framework.generics import CreateAPIView
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_redis_lock import LockNotAcquired, locked
from django_redis_lock.contention import skip
from tests.holding import hold
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.usefixtures("client"), pytest.mark.invariant("U2")]
NAME = "work"


@locked(NAME)
def plain(request: HttpRequest, pk: int = 0) -> HttpResponse:
    return HttpResponse("ran")


@locked(NAME)
async def asynchronous(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ran")


@locked(NAME, on_conflict=skip)
def skipping(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ran")


def outer(request: HttpRequest) -> HttpResponse:
    """A view whose helper has a lock, and which takes the result for true or false."""
    return HttpResponse("allowed" if plain(request) else "denied")


def outer_skipping(request: HttpRequest) -> HttpResponse:
    return HttpResponse("allowed" if skipping(request) else "denied")


class Handlers(View):
    @method_decorator(locked(NAME))
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("ran")

    @locked(NAME)
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("ran")


class Hook(View):
    @locked(NAME)
    def check(self, request: HttpRequest) -> bool:
        return True

    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("allowed" if self.check(request) else "denied")


@locked(NAME)
class Decorated(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("ran")


@api_view(["GET"])
@locked(NAME)
def rest_function(request: Any) -> HttpResponse:
    return HttpResponse("ran")


class Actions(ViewSet):
    @action(detail=False)
    @locked(NAME)
    def report(self, request: Any) -> HttpResponse:
        return HttpResponse("ran")


class Checked(APIView):
    authentication_classes = ()

    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("allowed")


class Created(CreateAPIView):
    """Whose ``post`` returns what ``create`` does."""

    permission_classes = ()

    @locked(NAME)
    def create(self, request: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        return HttpResponse("ran")


@locked(NAME)
def publish(model_admin: Any, request: HttpRequest, queryset: Any) -> HttpResponse:
    return HttpResponse("ran")


@locked(NAME)
class RestClass(APIView):
    permission_classes = authentication_classes = ()

    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("ran")


class Mixin:
    def dispatch(self, request: HttpRequest, *args: Any) -> Any:
        return super().dispatch(request, *args)


class Mixed(Mixin, Decorated):
    pass


class Called:
    """As Django's feeds are: an object that is called."""

    @locked(NAME)
    def __call__(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("ran")


@locked(NAME, status_code=423, retry_after=7)
def busy(request: HttpRequest) -> bool:
    return True


def outer_busy(request: HttpRequest) -> HttpResponse:
    return HttpResponse("allowed" if busy(request) else "denied")


def other_view(request: HttpRequest) -> Any:
    return Handlers.as_view()(request)


async def aouter(request: HttpRequest) -> HttpResponse:
    return HttpResponse("allowed" if await asynchronous(request) else "denied")


class Users(ModelAdmin):
    @locked(NAME)
    def look(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("ran")

    @admin_action(description="Retire")
    @locked(NAME)
    def retire(self, request: HttpRequest, queryset: Any) -> HttpResponse:
        return HttpResponse("ran")

    def act(self, request: HttpRequest, name: str) -> HttpResponse:
        """As the page of the list does with the action that its form sends."""
        action: Any = {"retire": Users.retire, "publish": publish}[name]
        return action(self, request, queryset=None)


users = Users(User, AdminSite())

urlpatterns = [
    path("plain/", plain),
    path("async/", asynchronous),
    path("partial/", functools.partial(plain, pk=3)),
    path("exempt/", csrf_exempt(plain)),
    path("skip/", skipping),
    path("handlers/", Handlers.as_view()),
    path("outside/", locked(NAME)(Checked.as_view())),
    path("decorated/", Decorated.as_view()),
    path("rest/", rest_function),
    path("action/", Actions.as_view({"get": "report"})),
    path("look/", functools.wraps(users.look)(functools.partial(users.look))),
    path("create/", Created.as_view()),
    path("actions/<name>/", users.act),
    path("outer/", outer),
    path("aouter/", aouter),
    path("outer_busy/", outer_busy),
    path("other_view/", other_view),
    path("mixin/", Mixed.as_view()),
    path("called/", Called()),
    path("rest_class/", RestClass.as_view()),
    path("outer_skip/", outer_skipping),
    path("hook/", Hook.as_view()),
]
VIEWS = [
    *("plain", "async", "partial", "exempt", "handlers", "outside", "decorated", "action"),
    *("look", "mixin", "called", "rest_class"),
]
#: What other code calls with a request.
CALLED = ["rest", "create", "actions/retire", "actions/publish", "outer", "hook", "other_view"]
REFUSALS = "django_redis_lock.middleware.RefusalMiddleware"


@pytest.fixture(autouse=True)
def _site() -> Any:
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[]):
        yield


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_answers(name: str) -> None:
    assert Client().get(f"/{name}/").status_code == 200
    with hold(NAME):
        assert Client().get(f"/{name}/").status_code == 409
        if name == "handlers":
            assert Client().post(f"/{name}/").status_code == 409


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CALLED)
def test_what_is_called_raises_and_the_middleware_answers(name: str) -> None:
    def ask(**headers: str) -> Any:
        return (Client().post if name == "create" else Client().get)(f"/{name}/", headers=headers)

    assert ask().status_code == 200
    with hold(NAME):
        with pytest.raises(LockNotAcquired, match="work is held by"):
            ask()
        with override_settings(MIDDLEWARE=[REFUSALS]):
            kinds = ({}, {"accept": "application/json"}, {"accept": "text/html"})
            answer, program, browser = (ask(**kind) for kind in kinds)
    assert {each.status_code for each in (answer, program, browser)} == {409}
    assert {each["Cache-Control"] for each in (answer, program, browser)} == {"no-store"}
    assert program.json()["retry_after"] == int(program["Retry-After"]) >= 1
    assert b"<html" in browser.content
    assert answer["Content-Type"].startswith(
        "application/json" if name in ("rest", "create") else "text/html"
    )


@override_settings(MIDDLEWARE=[REFUSALS])
def test_the_middleware_answers_with_the_status_of_the_lock_also_an_asynchronous_site() -> None:
    async def ask(url: str) -> Any:
        return await AsyncClient().get(url)

    assert asyncio.run(ask("/aouter/")).status_code == 200
    with hold(NAME):
        assert asyncio.run(ask("/aouter/")).status_code == 409
        for answer in (Client().get("/outer_busy/"), asyncio.run(ask("/outer_busy/"))):
            assert (answer.status_code, answer["Retry-After"]) == (423, "7")


@pytest.mark.parametrize("error", [ValueError, redis.ConnectionError])
def test_the_middleware_leaves_other_errors_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checked, "get", mock.Mock(side_effect=error("of the view")))
    with override_settings(MIDDLEWARE=[REFUSALS]), pytest.raises(error, match="of the view"):
        Client().get("/outside/")


def asking(get_response: Any) -> Any:
    """A middleware that asks before the URL leads anywhere."""

    def middleware(request: HttpRequest) -> HttpResponse:
        return HttpResponse("allowed" if plain(request) else "denied")

    return middleware


def test_a_middleware_gets_no_response() -> None:
    with override_settings(MIDDLEWARE=[f"{__name__}.asking"]):
        assert Client().get("/plain/").content == b"allowed"
        with hold(NAME), pytest.raises(LockNotAcquired):
            Client().get("/plain/")
    with hold(NAME):
        assert plain(ask()).status_code == 409  # As after the end of a request.


def test_skip_answers_only_where_django_sends_it_on() -> None:
    with hold(NAME):
        assert Client().get("/skip/").status_code == 204
        assert Client().get("/outer_skip/").content == b"denied"


def test_nor_while_redis_is_down(own_server: RedisServer, settings: Any) -> None:
    backend = "django_redis_lock.cache.RedisCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": own_server.url}}
    own_server.kill()
    for name in ("plain", "handlers"):
        assert Client().get(f"/{name}/").status_code == 503
    for name in ("outer", "hook", "rest"):
        with pytest.raises(redis.ConnectionError):
            Client().get(f"/{name}/")
        with override_settings(MIDDLEWARE=[REFUSALS]):
            answer = Client().get(f"/{name}/")
        assert (answer.status_code, answer["Retry-After"]) == (503, "10")


def ask(**options: Any) -> HttpRequest:
    return RequestFactory().get("/", **options)


class Backend:
    @locked(NAME)
    def check(self, request: HttpRequest) -> bool:
        return True

    by_method_decorator = method_decorator(locked(NAME))(lambda self, request: True)


@locked(NAME)
def receiver(sender: Any, request: Any = None, **kwargs: Any) -> None: ...


#: Calls with a request that leads to no URL, as in a test.
CALLS: dict[str, tuple[Callable[[], Any], Any]] = {
    "function": (lambda: plain(ask()), 409),
    "by keyword": (lambda: plain(request=ask()), 409),
    "class of views": (lambda: Handlers.as_view()(ask()), 409),
    "method": (lambda: Backend().check(ask()), LockNotAcquired),
    "method_decorator": (lambda: Backend().by_method_decorator(ask()), LockNotAcquired),
    "receiver": (lambda: receiver(sender=User, request=ask(), signal=None), LockNotAcquired),
    "admin": (lambda: users.look(ask()), LockNotAcquired),
}


@pytest.mark.parametrize("name", CALLS)
def test_without_a_url(name: str) -> None:
    call, answer = CALLS[name]
    with hold(NAME):
        if answer == 409:
            assert call().status_code == 409
        else:
            with pytest.raises(answer):
                call()
