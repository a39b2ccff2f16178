"""What a person who was paged sees: holders that died as soon as they had their locks, long names,
searches without a match."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core.cache import caches
from django.test import Client

from django_redis_lock.locking import hold as holding
from django_redis_lock.protocol.identity import hostname
from tests.processes import Link, processes
from tests.support.admin import PAGE, rows_of, text_of
from tests.support.commands import Run, held, run

__all__ = ["run"]


def by_a_thread(**options: Any) -> None:
    assert caches["default"].lock("nightly", timeout=60, **options).acquire()


def by_a_task() -> None:
    async def acquire() -> None:
        assert await caches["default"].alock("nightly", timeout=60).acquire()

    asyncio.run(acquire())


def by_several_names() -> None:
    assert caches["default"].lock(["nightly", "other"], timeout=60).acquire()


def by_place() -> None:
    by_a_thread(limit=3)


WAYS = [by_a_thread, by_a_task, by_several_names, by_place]


def die(link: Link, number: int) -> None:
    holding.DESCRIBE_AFTER = 60.0  # However busy the machine is, it dies before that.
    WAYS[number]()
    link.say("held")
    link.hear()


@pytest.mark.parametrize("number", range(len(WAYS)), ids=[way.__name__ for way in WAYS])
@pytest.mark.django_db
def test_a_process_that_died_as_soon_as_it_held_the_lock_is_named(
    run: Run, client: redis.Redis, number: int
) -> None:
    with processes(die, number) as (worker,):
        worker.go()
        assert worker.hear() == "held"
        worker.kill()
        pid = worker.pid
    here = f"{hostname()}:{pid}"
    browser = Client()
    browser.force_login(User.objects.create_superuser("operator"))
    (row,) = (r for r in rows_of(browser.get(PAGE)) if r["name"].startswith("nightly"))
    assert row["holder"] == here
    assert row["status"] == "no heartbeat yet"
    page = browser.get(PAGE).content.decode()
    address = re.search(r'href="([^"]+/change/)"[^>]*>nightly<', page)
    assert address is not None
    text = text_of(browser.get(address[1]))
    assert f"process {pid}" in text
    assert "or died so soon" in text
    # The last: a command closes the connections to the database.
    line = next(line for line in run()[1].splitlines() if line.startswith("nightly"))
    assert here in line
    assert line.endswith("no heartbeat yet")
    (listed,) = (h for h in json.loads(run("--json")[1])["locks"] if h["name"] == "nightly")
    assert listed["holder"]["pid"] == pid
    assert listed["holder"]["host"] == hostname()
    shown = run("show", "nightly")[1]
    assert f"by             {hostname()}, process {pid}, thread MainThread" in shown
    assert "none yet: acquired less than half a second ago, or its process died so soon" in shown
    assert here in run("release", "nightly", "--yes")[1]


# -- long names --------------------------------------------------------------------------------

LONG = f"reports:{'x' * 250}:2026-11"


def test_in_a_pipe_a_long_name_is_shortened_in_its_middle(run: Run, client: redis.Redis) -> None:
    with held(client, LONG, label="report"), held(client, "short"):
        out = run()[1]
        lines = out.splitlines()
        assert max(map(len, lines)) <= 120
        assert any(re.match(r"reports:x+…x+:2026-11 ", line) for line in lines)
        assert LONG in run("--wide")[1]
        assert LONG in run("reset", "*", "--wide")[1]
        assert LONG not in run("reset", "*")[1]
        assert LONG in run("--json")[1]
        assert run("stats", "--wide")[0] == 0
