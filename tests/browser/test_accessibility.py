"""axe-core finds nothing serious on any of the pages, in light and dark, wide and narrow."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches

from django_redis_lock.locking.inspection import inspect
from tests.browser.conftest import PAGE, Open
from tests.browser.test_page import named, queued
from tests.integration.test_admin import hold
from tests.processes import until

axe_playwright = pytest.importorskip("axe_playwright_python", reason="it is not installed")

SERIOUS = ("serious", "critical")


def findings(page: Any) -> list[str]:
    """What axe-core has to complain of in this page's own part; the rest is Django's."""
    source = Path(axe_playwright.__file__).with_name("axe.min.js").read_text()
    page.evaluate(source)
    found = page.evaluate("() => axe.run('#main, #content')")
    return [
        f"{rule['id']} ({rule['impact']}): {node['html']} {node['failureSummary']}"
        for rule in found["violations"]
        if rule["impact"] in SERIOUS
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark"},
        {"viewport": {"width": 390, "height": 844}},
    ],
    ids=["light", "dark", "phone"],
)
def test_nothing_serious(open_page: Open, client: redis.Redis, options: Any) -> None:
    empty = open_page(**options)
    assert findings(empty) == []
    lock = named(hold("nightly-report", label="Nightly report", timeout=60), client)
    silent = named(hold("silent", timeout=300), client)
    client.hincrby(silent.keys.owner, "seen", -200_000_000)
    hold("rests", min_hold=30).release()
    hold("endless", timeout=None)
    done = threading.Event()
    work = partial(caches["default"].get_or_set, "dashboard", lambda: done.wait(60), 60)
    leader = threading.Thread(target=work)
    leader.start()
    with queued("nightly-report"):
        until(lambda: inspect(client, lock.keys.lock).events)
        page = open_page(**options)
        page.get_by_role("link", name="dashboard").wait_for()
        assert findings(page) == []
        page.get_by_role("button", name="Pause").click()
        assert findings(page) == []
        page.get_by_role("link", name="nightly-report").click()
        page.get_by_role("heading", name="Who waits for it").wait_for()
        assert findings(page) == []
        page.get_by_role("button", name="Release").click()
        page.get_by_role("link", name="No, take me back").wait_for()
        assert findings(page) == []
        page.goto(f"{PAGE}?q=nothing")
        page.get_by_text("Nothing that is held now matches.").wait_for()
        assert findings(page) == []
    done.set()
    leader.join()
