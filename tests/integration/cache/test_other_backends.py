"""Values need no lock: over a cache that cannot coordinate callers, each computes. Locks refuse."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.template import Context, Template, engines
from django.template.response import SimpleTemplateResponse
from django.test import RequestFactory

from django_redis_lock import LockNotAcquired, cached, cached_page, locked
from django_redis_lock.cache import cache, caches
from django_redis_lock.contrib import other_backends
from django_redis_lock.middleware import CachedPageMiddleware
from tests.redis_server import RedisServer
from tests.support.logs import logged

calls: list[Any] = []


class Backend(NamedTuple):
    config: dict[str, Any]
    stores: bool = True
    locks: str = "the cache 'default' cannot lock: its BACKEND is"


DJANGOS = "django.core.cache.backends."
OURS = "django_redis_lock.cache.RedisCache"
BACKENDS = {
    "dummy": Backend({"BACKEND": f"{DJANGOS}dummy.DummyCache"}, stores=False),
    "memory": Backend({"BACKEND": f"{DJANGOS}locmem.LocMemCache", "LOCATION": "other backends"}),
    "files": Backend({"BACKEND": f"{DJANGOS}filebased.FileBasedCache", "LOCATION": "FOLDER"}),
    "Django's Redis": Backend({"BACKEND": f"{DJANGOS}redis.RedisCache", "LOCATION": "URL"}),
    "django-redis": Backend({"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "URL"}),
    "shards": Backend(
        {
            "BACKEND": OURS,
            "LOCATION": ["URL"],
            "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
        },
        locks="ShardClient cannot lock",
    ),
    "herd": Backend(
        {
            "BACKEND": OURS,
            "LOCATION": "URL",
            "OPTIONS": {"CLIENT_CLASS": "django_redis.client.HerdClient"},
        },
        locks="",
    ),
}


@pytest.fixture(params=BACKENDS)
def other(
    request: pytest.FixtureRequest, settings: Any, tmp_path: Path, redis_server: RedisServer
) -> Iterator[Backend]:
    found = BACKENDS[request.param]
    real = {"FOLDER": str(tmp_path), "URL": redis_server.url}
    config = dict(found.config)
    location = config.get("LOCATION")
    if isinstance(location, list):
        config["LOCATION"] = [real[each] for each in location]
    elif location in real:
        config["LOCATION"] = real[location]
    settings.CACHES = {"default": config}
    cache.clear()
    other_backends._logged.clear()
    calls.clear()
    yield found
    cache.clear()


@cached("report-{year}", timeout=60, stale=60)
def report(year: int) -> list[Any]:
    calls.append(year)
    return [year, None]


@cached("areport-{year}", timeout=60, wait=5)
async def areport(year: int) -> list[Any]:
    calls.append(year)
    await asyncio.sleep(0)
    return [year, None]


@cached_page(60, stale=60)
def view(request: HttpRequest) -> HttpResponse:
    calls.append(request.path)
    return HttpResponse("page")


@cached_page(lambda response: 60)
async def aview(request: HttpRequest) -> HttpResponse:
    calls.append(request.path)
    return HttpResponse("page")


@cached_page(60)
def rendered_later(request: HttpRequest) -> SimpleTemplateResponse:
    calls.append(request.path)
    return SimpleTemplateResponse(engines["django"].from_string("page"))


def page_of(view: Callable[..., Any]) -> str:
    response = view(RequestFactory().get("/page/"))
    if hasattr(response, "render"):
        response = response.render()
    return str(response.content.decode())


def tag() -> str:
    text = "{% load redis_lock %}{% cached 60 side stale=60 %}{{ note }}{% endcached %}"
    return Template(text).render(Context({"note": lambda: calls.append("tag") or "page"}))


def middleware() -> str:
    return page_of(CachedPageMiddleware(view.__wrapped__))


def several() -> dict[str, int]:
    def load(keys: list[str]) -> dict[str, int]:
        calls.append(keys)
        return dict.fromkeys(keys, 7)

    return cache.get_or_set_many(["a", "b"], load, timeout=lambda value: 60.0)


def one() -> int:
    return cache.get_or_set("one", lambda: calls.append(1) or 7, 60, stale=30)


WAYS: dict[str, tuple[Callable[[], Any], Any]] = {
    "cached": (lambda: report(2024), [2024, None]),
    "cached, by a task": (lambda: async_to_sync(areport)(2024), [2024, None]),
    "get_or_set": (one, 7),
    "get_or_set_many": (several, {"a": 7, "b": 7}),
    "aget_or_set_many": (
        lambda: async_to_sync(cache.aget_or_set_many)(["a"], lambda k: calls.append(k) or {"a": 1}),
        {"a": 1},
    ),
    "tag": (tag, "page"),
    "cached_page": (lambda: page_of(view), "page"),
    "cached_page, by a task": (lambda: page_of(async_to_sync(aview)), "page"),
    "cached_page, rendered later": (lambda: page_of(rendered_later), "page"),
    "middleware": (middleware, "page"),
}


@pytest.mark.parametrize("way", WAYS)
def test_values_are_computed(other: Backend, way: str, caplog: pytest.LogCaptureFixture) -> None:
    call, expected = WAYS[way]
    with caplog.at_level(logging.WARNING, "django_redis_lock"):
        assert [call(), call(), call()] == [expected] * 3
    assert len(calls) == (1 if other.stores else 3)
    [message] = logged(caplog, "", "computes its own values of the cache 'default'")
    assert OURS in message


def test_what_ends_a_value(other: Backend) -> None:
    def calls_of(change: Callable[[], object]) -> int:
        report(2024)
        before = len(calls)
        change()
        report(2024)
        return len(calls) - before

    assert calls_of(lambda: None) == (0 if other.stores else 1)
    changes: list[Callable[[], object]] = [
        lambda: report.invalidate(2024),
        lambda: report.mark_stale(2024),
        lambda: report.refresh(2024),
    ]
    for change in changes:
        assert calls_of(change) == (2 if change is changes[2] and not other.stores else 1)
    cache.get_or_set("one", 1)
    assert ("one" in cache) is other.stores
    assert cache.mark_stale_many(["one", "two"]) == int(other.stores)
    assert cache.get_or_set("one", 2) == 2


@pytest.mark.django_db
def test_after_the_commit(other: Backend, django_capture_on_commit_callbacks: Any) -> None:
    for change in (report.on_commit().invalidate, report.on_commit().mark_stale):
        report(2024)
        before = len(calls)
        with django_capture_on_commit_callbacks(execute=True):
            change(2024)
            report(2024)
        report(2024)
        assert len(calls) - before == (1 if other.stores else 2)


def test_what_is_wrong_is_refused_as_in_production(other: Backend) -> None:
    calls: list[Any] = [
        lambda *args, **options: cache.get_or_set("a", 1, *args, **options),
        lambda *args, **options: cache.compute("a", 1, *args, **options),
        lambda *args, **options: cache.get_or_set_many(["a"], dict.fromkeys, *args, **options),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="no option 'ttl'"):
            call(ttl=5)  # the mistake
        with pytest.raises(TypeError, match="timeout must be"):
            call("60")  # the mistake
    with pytest.raises(ValueError, match="stale must be"):
        cached("a", stale=-1)(lambda: 5)()
    with pytest.raises(ZeroDivisionError):
        cache.get_or_set("a", lambda: 1 / 0)
    assert cache.get("a") is None


def test_locks_refuse(other: Backend) -> None:
    if not other.locks:
        with cache.lock("a"), pytest.raises(LockNotAcquired):
            locked("a")(lambda: None)()
        return
    with pytest.raises(ImproperlyConfigured, match=other.locks):
        cache.lock("a")
    with pytest.raises(ImproperlyConfigured, match=other.locks):
        cache.reset_all()
    with pytest.raises(ImproperlyConfigured, match=other.locks):
        locked("a")(lambda: None)()
    with pytest.raises(ImproperlyConfigured, match="CACHES has no 'other'"):
        caches["other"]


def test_a_page_for_one_visitor_is_not_stored(other: Backend) -> None:
    """Django's rule allows a cookie if the page varies on it; here it never is the next one's."""

    @cached_page(60)
    def with_cookie(request: HttpRequest) -> HttpResponse:
        calls.append(1)
        response = HttpResponse("page")
        response.set_cookie("visitor", str(len(calls)))
        return response

    for _ in range(2):
        with_cookie(RequestFactory().get("/mine/"))
    assert len(calls) == 2
