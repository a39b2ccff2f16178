"""``LOCATION`` with several servers: django-redis reads from the replicas. They are stood in for by
a server that nothing has reached yet, and by one that is down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.cache import caches
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from django_redis_lock import cached, cached_page
from tests.redis_server import RedisServer
from tests.support.background import Background


@pytest.fixture(params=["lags", "is down"])
def replica(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer() as server:
        if request.param == "is down":
            server.stop()
        yield server


@pytest.fixture(params=["raising", "ignoring"], autouse=True)
def cache(
    request: pytest.FixtureRequest, redis_server: RedisServer, replica: RedisServer, settings: Any
) -> Any:
    settings.CACHES = {
        "default": {
            "BACKEND": "django_redis_lock.cache.RedisCache",
            "LOCATION": [redis_server.url, replica.url],
            "OPTIONS": {"IGNORE_EXCEPTIONS": request.param == "ignoring"},
        }
    }
    return caches["default"]


def ask_for_a_page(compute: Callable[[], str]) -> Callable[[], Any]:
    @cached_page(300)
    def page(request: HttpRequest) -> HttpResponse:
        return HttpResponse(compute())

    def ask() -> str:
        return page(RequestFactory().get("/page/")).content.decode()

    return ask


def ask_for_an_asynchronous_page(compute: Callable[[], str]) -> Callable[[], Any]:
    @cached_page(300)
    async def page(request: HttpRequest) -> HttpResponse:
        return HttpResponse(compute())

    def ask() -> Any:
        call: Any = page(RequestFactory().get("/page/"))
        return asyncio.run(call).content.decode()

    return ask


def ask_for_a_result(compute: Callable[[], str]) -> Callable[[], Any]:
    return cached("report", timeout=60)(compute)


WAYS: dict[str, Callable[[Any, Callable[[], str]], Callable[[], Any]]] = {
    "get_or_set": lambda cache, f: lambda: cache.get_or_set("report", f),
    "stale": lambda cache, f: lambda: cache.get_or_set("report", f, 60, stale=60),
    "get_or_set_many": lambda cache, f: (
        lambda: cache.get_or_set_many(["report"], lambda _: {"report": f()})["report"]
    ),
    "aget_or_set": lambda cache, f: lambda: asyncio.run(cache.aget_or_set("report", f)),
    "cached": lambda cache, f: ask_for_a_result(f),
    "cached_page": lambda cache, f: ask_for_a_page(f),
    "asynchronous page": lambda cache, f: ask_for_an_asynchronous_page(f),
}


computed: list[str] = []


def compute() -> str:
    computed.append("computed")
    return "computed"


@pytest.mark.parametrize("way", WAYS)
def test_a_value_is_computed_once(cache: Any, way: str) -> None:
    """The primary is asked before anybody computes."""
    computed.clear()

    ask = WAYS[way](cache, compute)
    assert [ask() for _ in range(5)] == ["computed"] * 5
    herd = [Background(ask) for _ in range(4)]
    assert [each.result() for each in herd] == ["computed"] * 4
    assert len(computed) == 1
