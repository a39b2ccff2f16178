"""A real Chromium, headless, that looks at a live server. Whatever goes wrong in it fails the test:
a violation of the content security policy, an error in the console, a page that did not load.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib import admin
from django.contrib.auth.models import User
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.handlers.wsgi import WSGIHandler
from django.test import Client

from django_redis_lock.models import HeldLock
from tests.browser import site

OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
#: Milliseconds to wait for what is to be seen.
PATIENCE = 15_000
PAGE = "/admin/django_redis_lock/heldlock/"
WINDOW = {"width": 1280, "height": 720}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in item.path.parts:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.django_db(transaction=True))


def _find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """Chromium, started once. It ends with these tests: beside Playwright's event loop in this
    thread no other test could run one."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the package playwright is not installed"
    )
    path = _find_chromium()
    if path is None:
        pytest.skip("there is no Chromium on the PATH, nor one named by CHROMIUM")
    with pytest.MonkeyPatch.context() as patch:
        # Playwright runs an event loop in this thread, which is none of Django's business.
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(executable_path=path, args=list(OPTIONS))
            yield browser
            browser.close()


@pytest.fixture(scope="package")
def first_page(chromium: Any, live_server: Any) -> Any:
    """A page for the first to be opened by each test: for a new one Chromium starts processes,
    which takes more than most tests do."""
    return chromium.new_context(base_url=live_server.url).new_page()


@pytest.fixture
def refresh_every(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds between two refreshes of a page that is opened from then on."""
    (page,) = (page for page in admin.site._registry.values() if page.model is HeldLock)
    return partial(monkeypatch.setattr, page, "refresh_every")


@pytest.fixture
def impatient(refresh_every: Callable[[float], None]) -> None:
    refresh_every(0.25)


@pytest.fixture
def strict(live_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strictest policy under which the page must work. The server has read its settings before
    a test could change them."""
    handler = live_server.thread.httpd.get_app()
    while not isinstance(handler, WSGIHandler) or isinstance(handler, StaticFilesHandler):
        handler = handler.application
    monkeypatch.setattr(handler, "_middleware_chain", site.strict(handler._middleware_chain))


Open = Callable[..., Any]
#: What an event says has gone wrong; empty: nothing.
TROUBLES: dict[str, Callable[[Any], str]] = {
    "console": lambda said: said.text if said.type == "error" else "",
    "pageerror": str,
    "requestfailed": lambda request: f"{request.url}: {request.failure}",
}


@pytest.fixture
def open_page(
    chromium: Any, first_page: Any, strict: None, impatient: None, live_server: Any, client: Any
) -> Iterator[Open]:
    """Opens a page as a logged-in user, the second one in a browser of its own; options are
    Playwright's."""
    pages: list[Any] = []
    sessions: dict[Any, str] = {}
    troubles: list[str] = []
    listeners: list[tuple[Any, str, Callable[[Any], None]]] = []

    def listen(page: Any, event: str, trouble_of: Callable[[Any], str]) -> None:
        def listener(said: Any) -> None:
            troubles.append(trouble_of(said))

        listeners.append((page, event, listener))
        page.on(event, listener)

    def open_page(
        path: str = PAGE,
        user: User | None = None,
        trouble: bool = True,
        viewport: Any = WINDOW,
        **options: Any,
    ) -> Any:
        if user is None:
            user, _ = User.objects.get_or_create(
                username="operator", defaults={"is_staff": True, "is_superuser": True}
            )
        name = django_settings.SESSION_COOKIE_NAME
        if user.pk not in sessions:
            session = Client()
            session.force_login(user)
            sessions[user.pk] = session.cookies[name].value
        page = first_page
        if page in pages or options:
            page = chromium.new_context(base_url=live_server.url, **options).new_page()
        pages.append(page)
        cookie = {"name": name, "value": sessions[user.pk], "url": live_server.url}
        page.context.add_cookies([cookie])
        page.set_default_timeout(PATIENCE)
        page.set_viewport_size(viewport)
        if trouble:
            for event, trouble_of in TROUBLES.items():
                listen(page, event, trouble_of)
        page.goto(path)
        return page

    yield open_page
    for page in pages:
        if page is first_page:
            page.unroute_all()
            page.emulate_media(color_scheme="light")
            page.context.clear_cookies()
            page.goto("/admin/login/")  # Which asks for nothing more; it needs no other process.
        else:
            page.context.close()
    for page, event, listener in listeners:
        page.remove_listener(event, listener)
    # A page that is left cancels what it was asking for.
    troubles = [text for text in troubles if text and "ERR_ABORTED" not in text]
    assert not troubles
