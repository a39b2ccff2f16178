"""A site with django-debug-toolbar and its panel "Locks", and requests to it. ``main()`` prints as
JSON what the panel has recorded of each.

The toolbar must be in INSTALLED_APPS, so the site has a process to itself.
"""

# ruff: noqa: PLC0415  (what needs Django is imported after the settings)

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import django
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.urls import include, path

from django_redis_lock.protocol import acquisition
from tests.processes import LAST_TRY, PATIENCE, until, waiting_in

PANEL = "django_redis_lock.debug_toolbar.LocksPanel"


def setup(**options: Any) -> None:
    settings.configure(
        DEBUG=True,
        SECRET_KEY="of a test",
        ALLOWED_HOSTS=["*"],
        INTERNAL_IPS=["127.0.0.1"],
        ROOT_URLCONF=__name__,
        INSTALLED_APPS=["django.contrib.staticfiles", "debug_toolbar", "django_redis_lock"],
        MIDDLEWARE=[
            "django.middleware.locale.LocaleMiddleware",
            "debug_toolbar.middleware.DebugToolbarMiddleware",
        ],
        TEMPLATES=[
            {"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}
        ],
        CACHES={
            "default": {
                "BACKEND": "django_redis_lock.cache.RedisCache",
                "LOCATION": os.environ["REDIS_URL"],
            }
        },
        DEBUG_TOOLBAR_PANELS=["debug_toolbar.panels.history.HistoryPanel", PANEL],
        STATIC_URL="static/",
        USE_TZ=True,
        **options,
    )
    django.setup()
    # The toolbar's URLs can only be imported now.
    urlpatterns.insert(0, path("__debug__/", include("debug_toolbar.urls")))


#: What the views do, by the last part of the path.
work: dict[str, Callable[[], Any]] = {}


def view(request: HttpRequest, name: str) -> HttpResponse:
    return _page(work[name]())


async def async_view(request: HttpRequest, name: str) -> HttpResponse:
    return _page(await work[name]())


def _page(text: Any) -> HttpResponse:
    return HttpResponse(f"<!doctype html><title>Page</title><body>{text}</body>")


urlpatterns = [path("<name>", view), path("async/<name>", async_view)]


class Requests:
    """Sends requests, and has what the panel recorded of them."""

    def __init__(self) -> None:
        from debug_toolbar.toolbar import DebugToolbar
        from django.core.cache import cache

        self.cache: Any = cache
        self.toolbars: list[Any] = []
        DebugToolbar._created.connect(self._created, weak=False)

    def _created(self, toolbar: Any, **_: Any) -> None:
        self.toolbars.append(toolbar)

    def get(self, name: str, do: Callable[[], Any], **cookies: str) -> Any:
        """The response to a request in which the view calls ``do``."""
        from django.test import Client

        work[name] = do
        client = Client()
        client.cookies.load(cookies)
        return client.get(f"/{name}")

    def stats(self, name: str, do: Callable[[], Any]) -> Any:
        return stored(self.get(name, do))

    async def astats(self, name: str, do: Callable[[], Any]) -> Any:
        from django.test import AsyncClient

        work[name] = do
        return stored(await AsyncClient().get(f"/async/{name}"))

    # -- locks ---------------------------------------------------------------------------------

    def free(self) -> Any:
        def do() -> None:
            with self.cache.lock("free", label="an import"):
                pass

        return self.stats("free", do)

    def refused(self) -> Any:
        """The locks that a view, and an async view, do not get, for which they wait and do not."""
        holder = self.cache.lock("taken", label="nightly", thread_local=False)
        holder.acquire()
        until(lambda: holder.holder().process)

        def do() -> None:
            self.cache.lock("taken").acquire(blocking=False)
            self.cache.lock("taken").acquire(blocking_timeout=0.01)

        async def ado() -> None:
            await self.cache.alock("taken").acquire(blocking=False)
            await self.cache.alock("taken").acquire(blocking_timeout=0.01)

        found = [self.stats("refused", do), asyncio.run(self.astats("arefused", ado))]
        holder.release()
        return found

    def waited(self) -> Any:
        """The holder has no name yet when the request begins to wait."""
        holder = self.cache.lock("waited", label="brief")
        holder.acquire()

        def do() -> None:
            with self.cache.lock("waited"):
                pass

        def named() -> Any:
            panel = self.toolbars and self.toolbars[-1].get_panel_by_id("LocksPanel")
            return panel and any("brief" in row.get("holder", "") for row in panel._locks)

        self.toolbars.clear()
        with ThreadPoolExecutor(1) as threads:
            request = threads.submit(self.stats, "waited", do)
            try:
                until(named)
            finally:
                holder.release()
            return request.result()

    def lost(self) -> Any:
        def do() -> None:
            lock = self.cache.lock("lost")
            lock.acquire()
            self.cache.lock("lost").reset()
            with suppress(Exception):
                lock.release()

        return self.stats("lost", do)

    # -- computations --------------------------------------------------------------------------

    def leader_and_follower(self) -> Any:
        """Two requests at once for one value."""
        computing, go_on = threading.Event(), threading.Event()

        def compute() -> int:
            computing.set()
            assert go_on.wait(PATIENCE)
            return 1

        def do() -> None:
            self.cache.get_or_set("report", compute)

        with ThreadPoolExecutor(2) as threads:
            leader = threads.submit(self.stats, "leader", do)
            assert computing.wait(PATIENCE)
            follower = threads.submit(self.stats, "follower", do)
            until(lambda: waiting_in("django_redis_lock.singleflight.runners"))
            go_on.set()
            return leader.result(), follower.result()

    def hit(self) -> Any:
        self.cache.set("there", 1)
        return self.stats("hit", lambda: self.cache.get_or_set("there", 2))

    def stale(self, background: bool) -> Any:
        """The view is done before a refresh in the background is."""
        computing, responded = threading.Event(), threading.Event()
        self.cache.get_or_set("old", 1, 60, stale=3600)
        self.cache.client.get_client().pexpire(self.cache.make_key("old"), 3_500_000)

        def compute() -> int:
            computing.set()
            assert not background or responded.wait(PATIENCE)
            return 2

        def do() -> None:
            self.cache.get_or_set("old", compute, 60, stale=3600, background=background)
            assert computing.wait(PATIENCE)

        found = self.stats("stale", do)
        responded.set()
        return found

    # -- the rest ------------------------------------------------------------------------------

    def two_tasks(self) -> Any:
        return asyncio.run(self._two_tasks())

    async def _two_tasks(self) -> Any:
        """Two requests of one event loop, each with the lock while the other has its own."""
        inside: set[str] = set()
        both = asyncio.Event()

        def one(name: str) -> Callable[[], Any]:
            async def do() -> None:
                async with self.cache.alock(name):
                    inside.add(name)
                    if len(inside) == 2:
                        both.set()
                    await both.wait()
                await self.cache.aget_or_set(f"value of {name}", lambda: 1)

            return do

        return await asyncio.gather(*(self.astats(name, one(name)) for name in ("one", "two")))

    def listeners(self) -> Any:
        """How many listen, outside of requests, with the panel and without it."""
        from django_redis_lock import events

        def count() -> list[int]:
            return [len(events.listeners), len(events.read_listeners)]

        seen = []
        self.get("on", lambda: seen.append(count()))
        self.get("off", lambda: seen.append(count()), djdtLocksPanel="off")
        return [count(), *seen]

    def shown(self) -> Any:
        """What the toolbar shows of a request, in German."""

        def do() -> None:
            with self.cache.lock("<shown>"):
                self.cache.get_or_set("shown", lambda: 1)

        response = self.get("shown", do)
        return [response.content.decode(), panel_of(response)]


def stored(response: Any) -> Any:
    """What the panel has recorded of a request, as the toolbar keeps it for its history."""
    from debug_toolbar.store import get_store

    return get_store().panel(response.headers["djdt-request-id"], "LocksPanel")


def panel_of(response: Any) -> Any:
    """What the toolbar shows of the request."""
    from django.test import Client

    asked = {"request_id": response.headers["djdt-request-id"], "panel_id": "LocksPanel"}
    panel = Client().get("/__debug__/render_panel/", asked)
    return panel.json()["content"]


def main() -> None:
    acquisition.LAST_TRY_SECONDS = LAST_TRY
    setup()
    requests = Requests()
    requests.cache.clear()
    found = {
        "free": requests.free(),
        "refused": requests.refused(),
        "waited": requests.waited(),
        "lost": requests.lost(),
        "leader and follower": requests.leader_and_follower(),
        "hit": requests.hit(),
        "stale": requests.stale(background=False),
        "stale, in the background": requests.stale(background=True),
        "two tasks": requests.two_tasks(),
        "listeners": requests.listeners(),
        "shown": requests.shown(),
    }
    print(json.dumps(found))
