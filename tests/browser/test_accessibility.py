"""axe-core finds nothing serious on any of the pages, in light and dark, wide and narrow."""

from __future__ import annotations

import itertools
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches

from django_redis_lock.contrib import metrics
from django_redis_lock.history import note_call
from django_redis_lock.protocol.holders import Owner
from django_redis_lock.protocol.identity import hostname
from django_redis_lock.transport.server import run
from tests import lanes
from tests.browser.conftest import PAGE, Open
from tests.holding import silence
from tests.support.admin import hold, named, queued

axe_playwright = pytest.importorskip("axe_playwright_python", reason="it is not installed")
expect = pytest.importorskip("playwright.sync_api", reason="it is not installed").expect

SERIOUS = ("serious", "critical")


#: Where each single element stands that is as it should be is nothing to be found out and told.
RUN = """() => axe.run('#content', {resultTypes: ['violations']}).then(
  found => ({violations: found.violations, passes: found.passes.length}))"""
APPEARANCES = (("light", 1280), ("dark", 1280), ("light", 390))
#: One after the other, of which each page has only one without ``--all``.
in_turn = itertools.cycle(APPEARANCES)


def pause(page: Any) -> None:
    """From now on the page does not change by itself."""
    running = page.locator("[data-pause][aria-pressed=false]")
    if running.count():
        running.click()
        page.wait_for_load_state("networkidle")


def check(page: Any) -> None:
    """axe-core has nothing serious to say of this page's own part; the rest is Django's."""
    pause(page)
    page.evaluate(Path(axe_playwright.__file__).with_name("axe.min.js").read_text())
    for scheme, width in APPEARANCES if lanes.everything else (next(in_turn),):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        # Colours on their way from light to dark are nobody's choice.
        page.evaluate("() => Promise.allSettled(document.getAnimations().map(a => a.finished))")
        found = page.evaluate(RUN)
        assert found["passes"], "axe-core has looked at nothing"
        complaints = [
            f"{scheme}, {width}: {rule['id']} ({rule['impact']}): {node['html']}"
            for rule in found["violations"]
            if rule["impact"] in SERIOUS
            for node in rule["nodes"]
        ]
        assert not complaints


@pytest.mark.sample(0)
def test_nothing_serious_on_the_pages_of_processes_and_releases(
    open_page: Open, client: redis.Redis
) -> None:
    lock = named(hold("nightly-report", timeout=60), client)
    since, alive = float(client.time()[0]) - 12, (int(client.time()[0]) + 60) * 1000
    client.zadd(lock.keys.waiters, {f"1 {since} {os.getpid()} {hostname()} MainThread": alive})
    page = open_page(f"{PAGE}processes/")
    page.get_by_text("Deadlock", exact=True).wait_for()
    check(page)
    page.goto(f"{PAGE}history/")
    page.get_by_text("No lock has been released here.").wait_for()
    check(page)
    page.goto(PAGE)
    page.get_by_role("link", name="nightly-report").click()
    page.get_by_role("button", name="Release").click()
    page.get_by_role("button", name="Release 1 lock").click()
    page.goto(f"{PAGE}history/")
    page.get_by_role("link", name="nightly-report").wait_for()
    check(page)


@pytest.mark.sample(0)
def test_a_lock_that_cannot_be_read(open_page: Open, client: redis.Redis) -> None:
    lock = named(hold("nightly-report", timeout=60), client)
    client.set(lock.keys.waiters, "not a sorted set")
    page = open_page()
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="nightly-report"))
    expect(row.get_by_role("cell", name="cannot be read: waiters")).to_be_visible()
    check(page)
    page.get_by_role("link", name="nightly-report").click()
    expect(page.get_by_text("Delete those keys to repair it.")).to_be_visible()
    check(page)


def test_nothing_serious(open_page: Open, client: redis.Redis) -> None:
    page = open_page()
    check(page)
    lock = named(hold("nightly-report", label="Nightly report", timeout=60), client)
    silent = named(hold("silent", timeout=300), client)
    silence(client, silent.keys.lock, 200)
    hold("rests", min_hold=30).release()
    hold("endless", timeout=None)
    run(client, note_call(lock.keys.lock, "lost", Owner("x", "web-1", 7, "T"), "it expired"))
    done = threading.Event()
    work = partial(caches["default"].get_or_set, "dashboard", lambda: done.wait(60), 60)
    leader = threading.Thread(target=work)
    leader.start()
    with queued("nightly-report"):
        metrics.flush()
        page.goto(PAGE)
        page.get_by_role("link", name="dashboard").wait_for()
        check(page)
        page.get_by_role("link", name="nightly-report").click()
        page.get_by_role("heading", name="Who waits for it").wait_for()
        check(page)
        page.get_by_role("button", name="Release").click()
        page.get_by_role("link", name="No, take me back").wait_for()
        check(page)
    done.set()
    leader.join()


@pytest.mark.sample(0)
def test_nothing_serious_on_the_page_of_a_lock_with_a_limit(
    open_page: Open, client: redis.Redis
) -> None:
    named(hold("export", timeout=60, limit=3), client)
    page = open_page()
    check(page)
    page.get_by_role("link", name="export").click()
    page.get_by_role("heading", name="All holders: 1 of 3").wait_for()
    check(page)


@pytest.mark.sample(0)
def test_a_name_without_a_break_is_no_wider_than_a_phone(
    open_page: Open, client: redis.Redis
) -> None:
    named(hold("x" * 150), client)
    page = open_page(viewport={"width": 390, "height": 800})

    def fits() -> bool:
        page.wait_for_load_state()  # With its style.
        return bool(page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"))

    assert fits()
    page.get_by_role("link", name="x" * 150).click()
    page.get_by_role("heading", name="Who holds it").wait_for()
    assert fits()
    page.get_by_role("button", name="Release").click()
    page.get_by_role("link", name="No, take me back").wait_for()
    assert fits()
