"""``CachedPageMiddleware``: the pages of a whole site."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from django.utils import translation
from django.utils.translation import gettext

from django_redis_lock import cached_page
from tests.processes import PATIENCE, until
from tests.support.cached_pages import expire_pages

computed: list[str] = []
#: Set: the view goes on.
going = threading.Event()


def _answer(request: HttpRequest, text: str = "page") -> HttpResponse:
    computed.append(request.get_full_path())
    return HttpResponse(f"{text} {len(computed)}")


def page(request: HttpRequest) -> HttpResponse:
    return _answer(request)


async def apage(request: HttpRequest) -> HttpResponse:
    await asyncio.sleep(0)
    return _answer(request)


def template(request: HttpRequest) -> TemplateResponse:
    computed.append("template")
    text = "{{ count }}"
    return TemplateResponse(request, engines["django"].from_string(text), {"count": len(computed)})


def account(request: HttpRequest) -> HttpResponse:
    return _answer(request, str(request.user))


def translated(request: HttpRequest) -> HttpResponse:
    return _answer(request, gettext("Yes"))


def slow(request: HttpRequest) -> HttpResponse:
    response = _answer(request)
    assert going.wait(PATIENCE)
    return response


urlpatterns = [
    path("page/", page),
    path("apage/", apage),
    path("template/", template),
    path("account/", account),
    path("translated/", translated),
    path("slow/", slow),
    path("inner/", cached_page(20)(page)),
    path("other/", cached_page(20, key_prefix="other")(page)),
]

OURS = "django_redis_lock.middleware.CachedPageMiddleware"
MIDDLEWARE = [
    "django.middleware.locale.LocaleMiddleware",
    OURS,
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]


@pytest.fixture(autouse=True)
def _site(client: redis.Redis) -> Iterator[None]:
    computed.clear()
    going.set()
    translation.deactivate()  # Other tests in this thread may leave a language behind.
    with override_settings(
        ROOT_URLCONF=__name__,
        MIDDLEWARE=MIDDLEWARE,
        CACHE_MIDDLEWARE_SECONDS=90,
        CACHE_MIDDLEWARE_KEY_PREFIX="site",
    ):
        yield
    translation.deactivate()


def get(url: str, browser: Any = None, **headers: str) -> str:
    response = (browser or Client()).get(url, headers=headers)
    assert response.status_code == 200
    return str(response.content.decode())


def test_pages_are_stored(client: redis.Redis) -> None:
    assert [get("/page/"), get("/page/"), get("/page/?x=1")] == ["page 1", "page 1", "page 2"]
    assert client.keys("*cache_page.site.GET*")
    assert Client().get("/page/")["Cache-Control"] == "max-age=90"
    assert Client().post("/page/").content == b"page 3"
    cache.clear()
    assert get("/page/") == "page 4"


def test_requests_under_asgi() -> None:
    async def main() -> list[str]:
        found = []
        for url in ("/page/", "/apage/", "/apage/", "/page/", "/template/", "/template/"):
            response = await AsyncClient().get(url)
            found.append(response.content.decode())
        return found

    assert asyncio.run(main()) == ["page 1", "page 2", "page 2", "page 1", "3", "3"]


@pytest.mark.django_db
def test_pages_of_users_stay_theirs() -> None:
    """The session makes them vary on the cookie."""
    browsers = [Client(), Client(), Client()]
    for name, browser in zip(["ana", "bob"], browsers, strict=False):
        browser.force_login(User.objects.create(username=name))
    found = [get("/account/", browser) for browser in browsers * 2]
    assert found == ["ana 1", "bob 2", "AnonymousUser 3"] * 2


def test_views_with_cached_page() -> None:
    assert [get("/inner/"), get("/inner/")] == ["page 1"] * 2
    assert Client().get("/inner/")["Cache-Control"] == "max-age=20"
    assert [get("/other/"), get("/other/")] == ["page 2"] * 2


def test_a_stale_page_is_refreshed_in_the_background(settings: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"STALE": 1000, "BACKGROUND": True}
    assert get("/slow/") == "page 1"
    expire_pages()
    going.clear()
    assert [get("/slow/"), get("/slow/")] == ["page 1"] * 2
    going.set()
    until(lambda: get("/slow/") == "page 2")
