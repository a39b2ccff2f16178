"""A view that empties the cache, or deletes its own page, while it leads the page's computation:
what it deletes is older than its page, which is stored all the same (invariant C6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from asgiref.sync import sync_to_async
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.utils.cache import get_cache_key, patch_vary_headers

from django_redis_lock import cached_page
from django_redis_lock.middleware import CachedPageMiddleware
from tests.lanes import IN_MEMORY
from tests.processes import in_threads
from tests.support.cached_pages import MEMORY, ask, finished

pytestmark = pytest.mark.invariant("C6")

#: What a view does to its own page.
WRITES: dict[str, Callable[[HttpRequest], Any]] = {
    "clear": lambda request: cache.clear(),
    "clear twice": lambda request: (cache.clear(), cache.clear()),
    "delete_pattern": lambda request: cache.delete_pattern("views.decorators.cache*"),
    "keys": lambda request: cache.delete_many(cache.keys("*cache_page*")),
    "its page": lambda request: cache.delete(get_cache_key(request) or "unknown"),
    "all": lambda request: cache.delete_pattern("*"),
}


def plain(response: HttpResponse) -> HttpResponse:
    return response


def varied(response: HttpResponse) -> HttpResponse:
    patch_vary_headers(response, ["X-Kind"])
    return response


class Views:
    """Ways to answer. ``write``: what they do; ``calls``: how often they were called."""

    def __init__(self, write: Callable[[HttpRequest], Any], finish: Any = plain) -> None:
        self.write, self.finish, self.calls = write, finish, 0

    def text(self) -> str:
        self.calls += 1
        return f"page {self.calls}"

    def function(self, request: HttpRequest) -> HttpResponse:
        text = self.text()
        self.write(request)
        return self.finish(HttpResponse(text))

    def template(self, request: HttpRequest) -> HttpResponse:
        text = self.text()
        self.write(request)
        page = engines["django"].from_string(text)
        return self.finish(TemplateResponse(request, page))

    async def coroutine(self, request: HttpRequest) -> HttpResponse:
        text = self.text()
        await sync_to_async(self.write)(request)
        return self.finish(HttpResponse(text))


def respond(view: Any, request: HttpRequest) -> str:
    return str(finished(view(request)).content.decode())


@pytest.fixture(autouse=True, params=["redis", "prefix", IN_MEMORY])
def _empty_cache(request: pytest.FixtureRequest, client: redis.Redis, settings: Any) -> None:
    ours = dict(MEMORY if request.param == "memory" else settings.CACHES["default"])
    if request.param == "prefix":
        ours["OPTIONS"] = {**ours.get("OPTIONS", {}), "LOCK_CLEAR": "prefix"}
    settings.CACHES = {"default": ours}
    cache.clear()


@pytest.mark.sample(5)
@pytest.mark.parametrize("finish", [plain, varied])
@pytest.mark.parametrize("kind", ["function", "template", "coroutine"])
@pytest.mark.parametrize("write", WRITES)
def test_the_page_is_stored(write: str, kind: str, finish: Any) -> None:
    views = Views(WRITES[write], finish)
    view = cached_page(60)(getattr(views, kind))
    assert [respond(view, ask()) for _ in range(3)] == ["page 1"] * 3
    assert respond(view, ask(x_kind="other")) == ("page 2" if finish is varied else "page 1")
    # What its pages vary on is known then, so the view leads the flight of the page.
    cache.delete(get_cache_key(ask()))
    last = f"page {views.calls + 1}"
    assert [respond(view, ask()) for _ in range(3)] == [last] * 3


def test_the_middleware() -> None:
    views = Views(WRITES["clear"])
    middleware = CachedPageMiddleware(views.function)
    assert [respond(middleware, ask()) for _ in range(3)] == ["page 1"] * 3


@pytest.mark.parametrize("kind", ["function", "template", "coroutine"])
@pytest.mark.parametrize("first", [True, False])
def test_somebody_elses_clear_wins_over_it(kind: str, first: bool) -> None:
    """Before the view's own, or after it."""

    def write(request: HttpRequest) -> None:
        if first:
            in_threads(1, cache.clear)
        cache.clear()
        if not first:
            in_threads(1, cache.clear)

    views = Views(write)
    view = cached_page(60)(getattr(views, kind))
    assert [respond(view, ask()) for _ in range(3)] == ["page 1", "page 2", "page 3"]
