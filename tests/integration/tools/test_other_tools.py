"""What other tools see: what_tools_see.md says it, and docs/other_tools.md in brief. The tools are
real, each in a process of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis

from tests.redis_server import RedisServer
from tests.support.python import python

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "other_tools.md").read_text()
TABLES = Path(__file__).with_name("what_tools_see.md").read_text()

#: The heads of the table's columns, and the packages that they need.
COLUMNS = {
    "Sentry": ("sentry", "sentry_sdk"),
    "OpenTelemetry, redis": ("opentelemetry", "opentelemetry.instrumentation.redis"),
    "Elastic APM": ("elastic", "elasticapm"),
    "Datadog": ("datadog", "ddtrace"),
    "New Relic": ("new_relic", "newrelic.agent"),
    "django-prometheus": ("django_prometheus", "django_prometheus"),
    "exporter `sentry`": ("sentry_exporter", "sentry_sdk"),
    "exporter `opentelemetry`": ("opentelemetry_exporter", "opentelemetry.sdk"),
}


#: The calls of which Sentry records that they put something.
PUTS = ("set", "aset", "set_many", "aset_many")


def is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@cache
def seen_by(tool: str, package: str, redis_server: RedisServer) -> Mapping[str, list[str]]:
    """What the tool sees of each operation."""
    if not is_installed(package):
        pytest.skip(f"{package} is not installed")
    words = ("-m", "tests.integration.tools.observed", tool)
    ended = python(*words, REDIS_URL=redis_server.url, PYTHONPATH=ROOT)
    seen: dict[str, list[str]] = json.loads(ended.stdout)
    return seen


def table() -> dict[str, dict[str, str]]:
    """The tables: for each tool what stands in the row of each operation."""
    found: dict[str, dict[str, str]] = {}
    for text in re.findall(r"^\| call .*\n(?:\|.*\n)+", TABLES, re.MULTILINE):
        head, _, *rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
        ]
        for number, title in list(enumerate(head))[1:]:
            for calls, *cells in rows:
                for call in calls.replace("`", "").split("; "):
                    found.setdefault(title, {})[call] = cells[number - 1]
    return found


@pytest.mark.sample(len(COLUMNS))
@pytest.mark.parametrize("title", COLUMNS)
def test_the_table_says_what_the_tool_sees(
    redis_server: RedisServer, client: redis.Redis, title: str
) -> None:
    seen = seen_by(*COLUMNS[title], redis_server)
    shown = table()[title]
    assert {call: as_cell(seen[call]) for call in shown} == shown
    # Some tools have no column in the table of the less frequent calls.
    assert "get_or_set, miss" in shown
    assert table()["Sentry"].keys() == seen.keys()


def as_cell(found: list[str]) -> str:
    return ", ".join(f"`{one}`" for one in sorted(found)) or "–"


def test_reads_are_seen_as_of_django_redis(redis_server: RedisServer, client: redis.Redis) -> None:
    """Each call of ``get_or_set`` is one read to Sentry: a hit, or a miss. It cannot see
    ``aget_or_set_many``."""
    seen = seen_by(*COLUMNS["Sentry"], redis_server)
    reads = {
        call: [one for one in found if one.startswith("cache.get")] for call, found in seen.items()
    }
    for call, found in reads.items():
        if "get" in call and "aget_or_set_many" not in call:
            assert found == [f"cache.get {'miss' if 'miss' in call else 'hit'}"], call


@pytest.mark.sample(0)
def test_a_read_has_one_span_of_sentry(redis_server: RedisServer, client: redis.Redis) -> None:
    """The exporter leaves a cache that Sentry observes to Sentry."""
    for call, found in seen_by("sentry_both", "sentry_sdk", redis_server).items():
        reads = [one for one in found if one.startswith("cache.get")]
        assert len(reads) == ("get" in call and "aget_or_set_many" not in call), call
        assert ("cache.put" in found) == (call in PUTS or "miss" in call or "stale" in call[-6:])


@pytest.mark.parametrize(("package", "check"), [("django_ratelimit", "W001"), ("cachalot", "W001")])
def test_the_checks_to_silence_are_named(package: str, check: str) -> None:
    assert f'"{package}.{check}"' in TEXT
