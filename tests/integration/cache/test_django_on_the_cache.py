"""What of Django itself lives on the cache keeps working on this one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.contrib.sessions.models import Session
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse
from django.template import Context, Template
from django.test import Client, override_settings
from django.urls import path
from django.views.decorators.cache import cache_control, cache_page

rendered: list[str] = []


def visits(request: HttpRequest) -> HttpResponse:
    request.session["visits"] = request.session.get("visits", 0) + 1
    return HttpResponse(str(request.session["visits"]))


def leave(request: HttpRequest) -> HttpResponse:
    request.session.flush()
    return HttpResponse("bye")


@cache_page(60)
def page(request: HttpRequest) -> HttpResponse:
    rendered.append(request.get_full_path())
    return HttpResponse(f"page {len(rendered)}")


def plain(request: HttpRequest) -> HttpResponse:
    rendered.append(request.get_full_path())
    return HttpResponse(f"plain {len(rendered)}")


@cache_control(private=True)
def private(request: HttpRequest) -> HttpResponse:
    return plain(request)


def fragment(request: HttpRequest) -> HttpResponse:
    source = "{% load cache %}{% cache 60 side user %}{{ render }}{% endcache %}"

    def render() -> int:
        rendered.append("side")
        return len(rendered)

    context = Context({"render": render, "user": request.GET.get("user")})
    return HttpResponse(Template(source).render(context))


urlpatterns = [
    path("visits/", visits),
    path("leave/", leave),
    path("page/", page),
    path("plain/", plain),
    path("private/", private),
    path("fragment/", fragment),
]

SESSIONS = "django.contrib.sessions.middleware.SessionMiddleware"
WHOLE_SITE = [
    "django.middleware.cache.UpdateCacheMiddleware",
    "django.middleware.cache.FetchFromCacheMiddleware",
]


@pytest.fixture(autouse=True)
def _these_urls() -> Iterator[None]:
    rendered.clear()
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[SESSIONS]):
        yield


def get(url: str, browser: Client | None = None) -> str:
    response = (browser or Client()).get(url)
    assert response.status_code == 200
    return str(response.content.decode())


@pytest.mark.django_db
@pytest.mark.parametrize("engine", ["cache", "cached_db"])
def test_sessions(engine: str, client: redis.Redis) -> None:
    with override_settings(SESSION_ENGINE=f"django.contrib.sessions.backends.{engine}"):
        browser, other = Client(), Client()
        assert [get("/visits/", browser) for _ in range(3)] == ["1", "2", "3"]
        assert get("/visits/", other) == "1"
        key = browser.cookies["sessionid"].value
        assert client.keys(f"*{key}*")
        assert Session.objects.filter(pk=key).exists() == (engine == "cached_db")
        get("/leave/", browser)
        assert not client.keys(f"*{key}*")
        assert get("/visits/", browser) == "1"


@pytest.mark.django_db
def test_cached_db_sessions_survive_an_emptied_cache() -> None:
    with override_settings(SESSION_ENGINE="django.contrib.sessions.backends.cached_db"):
        browser = Client()
        get("/visits/", browser)
        cache.clear()
        assert get("/visits/", browser) == "2"


def test_cache_page(client: redis.Redis) -> None:
    assert [get("/page/"), get("/page/"), get("/page/?x=1")] == ["page 1", "page 1", "page 2"]
    cache.clear()
    assert get("/page/") == "page 3"


def test_the_whole_site() -> None:
    with override_settings(MIDDLEWARE=[WHOLE_SITE[0], SESSIONS, WHOLE_SITE[1]]):
        assert [get("/plain/"), get("/plain/"), get("/plain/?x=1")] == ["plain 1"] * 2 + ["plain 2"]
        assert [get("/private/"), get("/private/")] == ["plain 3", "plain 4"]
        assert re.search("max-age", Client().get("/plain/").headers["Cache-Control"])


def test_the_cache_tag() -> None:
    urls: list[Any] = ["/fragment/?user=1", "/fragment/?user=1", "/fragment/?user=2"]
    assert [get(url) for url in urls] == ["1", "1", "2"]
