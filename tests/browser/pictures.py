"""The pictures of the admin pages, and of the demo, in docs/images: ``make pictures``.

They run as tests, so that they have a server and a browser. docs/images has all pictures of the
newest Django, and of Django 5.2 the list; PICTURES names another folder, for all of them. Those of
another theme need its package, and THEME=unfold (or jazzmin, grappelli) with
DJANGO_SETTINGS_MODULE=tests.browser.theme_settings.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from io import StringIO
from pathlib import Path
from typing import Any

import django
import pytest
import redis
from celery import Celery
from django.core.cache import caches
from rich.console import Console
from rich.text import Text

from django_redis_lock import Lock, unique_task
from django_redis_lock.contrib import metrics
from django_redis_lock.history import note_call
from django_redis_lock.middleware import doing
from django_redis_lock.protocol.holders import Owner
from django_redis_lock.transport import server_of
from django_redis_lock.transport.server import run
from tests.browser.conftest import PAGE, Open
from tests.holding import silence
from tests.support.admin import hold, named, queued

FOLDER = Path(os.environ.get("PICTURES") or Path(__file__).parents[2] / "docs/images")
OLDER = "" if django.VERSION >= (6, 1) else f"django-{django.VERSION[0]}.{django.VERSION[1]}"
newest = pytest.mark.skipif(
    bool(OLDER) and "PICTURES" not in os.environ,
    reason="docs/images has those of the newest Django",
)
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
DOING = {
    "nightly-report": "manage.py nightly_report --all",
    "import-42": "POST /imports/ (request 7b20e4)",
    "invoice-2031": "POST /invoices/2031/send/ (request 4f1c9a)",
    "stock.sync": "task shop.tasks.sync_stock (9a3e51)",
}
JOBS = (
    *(("nightly-report", "Nightly report"), ("import-42", "Import of branch 42")),
    *(("invoice-2031", ""), ("invoice-2032", ""), ("search-index", "Rebuild of the index")),
    *(("newsletter", "September"), ("stock.sync", "")),
)
HOSTS = (("web-1", 4711), ("web-2", 3180), ("batch-1", 812))


@pytest.fixture(autouse=True)
def calm(refresh_every: Any, impatient: None) -> None:
    """Nothing changes while the picture is taken."""
    refresh_every(5)


def staged(client: redis.Redis, number: int = len(JOBS)) -> dict[str, Lock]:
    """Locks of several processes, one of them silent."""
    names = [*JOBS, *((f"job-{n:04}", "") for n in range(len(JOBS), number))][:number]
    timeouts = {"import-42": 64}
    locks = {n: hold(n, label=label, timeout=timeouts.get(n, 300)) for n, label in names}
    for place, (name, lock) in enumerate(locks.items()):
        host, pid = HOSTS[place % len(HOSTS)]
        owner = named(lock, client).keys.owner
        client.hset(owner, mapping={"host": host, "pid": pid, "doing": DOING.get(name, "")})
        since = float(client.time()[0])
        client.hset(owner, "since", f"{since - 17 * place - 43:.6f}")
    if "import-42" in locks:  # Last: each of the others made all describe themselves once more.
        keys = locks["import-42"].keys
        client.hset(keys.owner, "lifetime", 300_000)
        silence(client, keys.lock, 236)
        of = Owner("x", "web-1", 7, "MainThread")
        run(client, note_call(keys.lock, "reset", of, "ops (admin)", 43))
    return locks


def take(page: Any, name: str, **options: Any) -> None:
    page.wait_for_load_state("networkidle")
    page.wait_for_function("() => document.fonts.status === 'loaded'")
    FOLDER.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(FOLDER / f"{name}.png"), animations="disabled", **options)


def used(times: int = 24) -> None:
    """Something to show in the figures."""
    for number in range(times):
        with caches["default"].lock("nightly-report"):
            assert not caches["default"].lock("nightly-report").acquire(blocking=False)
        caches["default"].lock(f"invoice-{number}").acquire()
    caches["default"].get_or_set("dashboard", lambda: 1, 60)
    metrics.flush()


@pytest.mark.skipif(not OLDER, reason="the newest Django has all pictures")
def test_list_of_an_older_django(open_page: Open, client: redis.Redis) -> None:
    used(24)
    staged(client)
    take(open_page(viewport=WIDE), f"admin-list-{OLDER}")


@newest
def test_list(open_page: Open, client: redis.Redis) -> None:
    used(24)
    for number in range(24):
        caches["default"].lock(f"invoice-{number}").reset()
    staged(client)
    with queued("nightly-report"):
        metrics.flush()
        page = open_page(viewport=WIDE)
        take(page, "admin-list", full_page=True)
        page.emulate_media(color_scheme="dark")
        take(page, "admin-list-dark", full_page=True)
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(PHONE)
        take(page, "admin-phone", full_page=True)


@newest
def test_numbers(open_page: Open, client: redis.Redis) -> None:
    for number in (0, 1, 30, 1000):
        client.flushdb()
        staged(client, number)
        page = open_page(viewport=WIDE)
        take(page, f"admin-{number}")


@newest
def test_one_lock(open_page: Open, client: redis.Redis) -> None:
    staged(client)
    with queued("import-42"):
        page = open_page(viewport=WIDE)
        page.get_by_role("link", name="import-42").click()
        take(page, "admin-lock", full_page=True)
        page.go_back()
        for name in ("import-42", "nightly-report"):
            page.get_by_role("checkbox", name=f"Select {name}").check()
        page.get_by_role("button", name="Release the selected").first.click()
        take(page, "admin-release", full_page=True)


@newest
def test_processes(open_page: Open, client: redis.Redis) -> None:
    locks = staged(client)
    alive = (int(client.time()[0]) + 60) * 1000
    for name, (host, pid) in (("nightly-report", HOSTS[1]), ("import-42", HOSTS[0])):
        began = float(client.time()[0]) - 12
        client.zadd(locks[name].keys.waiters, {f"1 {began} {pid} {host} MainThread": alive})
    page = open_page(f"{PAGE}processes/", viewport=WIDE)
    take(page, "admin-processes", full_page=True)


@newest
def test_queued_tasks(open_page: Open, client: redis.Redis) -> None:
    """Of unique tasks, and the lock of a run."""
    app = Celery("shop", broker="memory://", set_as_current=False)

    @unique_task("sync-{shop}", timeout=3600)
    @app.task(name="shop.tasks.sync_stock")
    def sync_stock(shop: int) -> None: ...

    for number, (host, pid) in zip((7, 12, 31), HOSTS, strict=True):
        with doing("POST /products/4711/ (request 4f1c9a)" if number < 20 else None):
            sync_stock.apply_async((number,), task_id=str(uuid.UUID(int=number * 2**120 + 4711)))
        lock = caches["default"].lock(f"queued:sync-{number}")
        client.hset(lock.keys.owner, mapping={"host": host, "pid": pid})
        client.hset(lock.keys.owner, "since", f"{float(client.time()[0]) - 9 * number:.6f}")
    staged(client, 1)
    page = open_page(viewport=WIDE)
    take(page, "admin-queued")


@newest
@pytest.mark.parametrize("language", ["de", "zh-hans"])
def test_translations(open_page: Open, client: redis.Redis, settings: Any, language: str) -> None:
    """The longest words, and the narrowest."""
    settings.LANGUAGE_CODE = language
    used()
    for number in range(24):
        caches["default"].lock(f"invoice-{number}").reset()
    staged(client)
    metrics.flush()
    page = open_page(viewport=WIDE)
    take(page, f"admin-list-{language[:2]}", full_page=True)


@newest
def test_events(open_page: Open, client: redis.Redis) -> None:
    troubled(staged(client))
    page = open_page(f"{PAGE}events/", viewport=WIDE)
    take(page, "admin-events")


def troubled(locks: dict[str, Lock]) -> None:
    """What has happened to some locks."""
    lock = locks["nightly-report"]
    server = server_of(lock.redis)
    for name, what, note, who in (
        (
            "nightly-report",
            "crashed",
            "",
            Owner("a", "batch-1", 812, "MainThread", "Nightly report"),
        ),
        (
            "stock.sync",
            "lost",
            "it expired: Redis confirmed no renewal",
            Owner("b", *HOSTS[1], "T"),
        ),
        (
            "import-42",
            "reset",
            "ops (admin): it hangs",
            Owner("c", *HOSTS[0], "MainThread", "Import"),
        ),
    ):
        key = locks[name].keys.name
        run(lock.redis, note_call(key, what, who, note, 43, server=server))


@newest
def test_from_right_to_left(open_page: Open, client: redis.Redis, settings: Any) -> None:
    settings.LANGUAGE_CODE = "ar"
    named(hold("تقرير-2026", label="التقرير الليلي", timeout=300), client)
    troubled(staged(client))
    page = open_page(viewport=WIDE)
    take(page, "admin-list-ar")
    page.get_by_role("link", name="import-42").click()
    take(page, "admin-lock-ar")
    page.goto(f"{PAGE}events/")
    take(page, "admin-events-ar")


THEME = os.environ.get("THEME", "")


@pytest.mark.skipif(not THEME, reason="THEME names none")
def test_theme(open_page: Open, client: redis.Redis) -> None:
    """With DJANGO_SETTINGS_MODULE=tests.browser.theme_settings."""
    used(24)
    troubled(staged(client))
    # Two of the themes cannot work under the strict policy.
    page = open_page(viewport=WIDE, trouble=False, bypass_csp=True)
    take(page, f"admin-{THEME}", full_page=True)
    page.get_by_role("link", name="import-42").click()
    take(page, f"admin-{THEME}-lock", full_page=True)
    page.get_by_role("button", name="Release").first.click()
    take(page, f"admin-{THEME}-release", full_page=True)
    page.goto(f"{PAGE}events/")
    take(page, f"admin-{THEME}-events")


@newest
def test_the_demo() -> None:
    """What ``make demo`` prints, as a terminal shows it."""
    width = 90
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(width)}
    environment.pop("REDIS_URL", None)  # The demo starts a server.
    done = subprocess.run(
        [sys.executable, "manage.py", "demo", "--no-serve"],
        cwd=Path(__file__).parents[2],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    console = Console(record=True, width=width, file=StringIO())
    console.print(Text.from_ansi(done.stdout.rstrip()))
    picture = console.export_svg(title="make demo")
    # Without the fonts, which a browser would have to fetch from elsewhere.
    picture = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", picture, flags=re.DOTALL)
    (FOLDER / "demo.svg").write_text(picture)
