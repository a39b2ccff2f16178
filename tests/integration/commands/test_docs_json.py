"""docs/commands.md names the fields of all that ``locks --json`` prints."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import cache
from django.core.management import CommandError, call_command

from django_redis_lock.contrib import metrics
from django_redis_lock.history import note_call
from django_redis_lock.management import listing
from django_redis_lock.ops.held_locks import Truncation
from django_redis_lock.protocol.holders import Owner
from django_redis_lock.transport import run as run_call
from tests.support.commands import held, waiting

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "commands.md").read_text()
TABLE = TEXT.split("\n## JSON\n")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| (.*?) \| (.*) \|$", TABLE, re.MULTILINE)
FIELDS = {of.replace("`", ""): set(re.findall(r"`(\w+)`", told)) for of, told in ROWS}
#: Of a group the page names two fields more than the other page has attributes, and three less.
FIGURES = (DOCS / "monitoring.md").read_text().partition("| attribute of a `Summary` |")[2]
FIRST_CELLS = re.findall(r"^\| ([^|]*) \|", FIGURES.partition("\n\n")[0], re.MULTILINE)
FIELDS["a group"] ^= set(re.findall(r"`(\w+)`", " ".join(FIRST_CELLS)))


def printed(*words: str) -> dict[str, Any]:
    out = StringIO()
    with suppress(CommandError):  # Its exit code.
        call_command("locks", *words, "--json", stdout=out, stderr=StringIO())
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def check(of: str, *objects: dict[str, Any]) -> None:
    assert objects
    for one in objects:
        assert set(one) == FIELDS[of], of


def test_list_and_show(client: redis.Redis, settings: Any) -> None:
    with held(client, "nightly") as lock, waiting(client, lock):
        run_call(client, note_call(lock.keys.lock, "lost", Owner("x"), "it expired"))
        found = printed("list")
        shown = printed("show", "nightly")
    check("list", found)
    check("show", shown)
    check("a lock", *found["locks"], shown["lock"])
    check("a lock's holder", *(lock["holder"] for lock in found["locks"]))
    for part in ("holders", "waiters", "events"):
        check(f"one of {part}", *shown[part])


def test_what_a_list_does_not_have(
    client: redis.Redis, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = {**settings.CACHES["default"], "LOCATION": "redis://127.0.0.1:1/0"}
    settings.CACHES = {**settings.CACHES, "away": away}
    asked = listing.held_locks

    def cut(*args: Any, **options: Any) -> Any:
        result = asked(*args, **options)
        result.truncations.append(Truncation("default", "lock", 1, 2))
        result.local.append(("import", "web-1"))
        return result

    monkeypatch.setattr(listing, "held_locks", cut)
    found = printed("list")
    for part in ("cut", "failures", "local"):
        check(f"one of {part}", *found[part])


def test_stats(client: redis.Redis) -> None:
    with cache.lock("invoice-7"):
        metrics.flush()
    found = printed("stats")
    check("stats", found)
    check("a group", *found["caches"]["default"])
    check("a distribution", *(found["caches"]["default"][0][of] for of in ("waits", "holds")))


def test_doctor(client: redis.Redis) -> None:
    found = printed("doctor", "--using", "default")
    (of_cache,) = found["caches"].values()
    check("doctor", {**found, **of_cache})
    check("a finding", *of_cache["findings"])
