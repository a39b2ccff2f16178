"""What docs/locks.md and docs/lock_variants.md show works as it stands there, and their tables say
what the code does."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches

import django_redis_lock
from django_redis_lock import Lock, LockNotAcquired
from tests.processes import PATIENCE

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "locks.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
ANSWER, TRIED, LONG, TASKS, CANCELLED, BARE = BLOCK.findall(TEXT)
SEVERAL, LIMITED, AGAIN = BLOCK.findall((DOCS / "lock_variants.md").read_text())
TAKEN_OFF = ("using", "critical")  # By ``cache.lock`` itself.
#: Which ``cache.lock`` takes from the settings.
FROM_SETTINGS = ("grant_timeout", "local_folder")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below ``heading``, without its head."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_three_callers_have_the_lock_one_after_the_other(
    client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(threading.enumerate())
    exec(ANSWER.replace("sleep(1)", "sleep(0.05)"), names := {})
    for thread in set(threading.enumerate()) - before:
        if thread.name.endswith("(import_prices)"):
            thread.join()
    lines = capsys.readouterr().out.splitlines()
    holders, fences = zip(*(line.split(" has the lock, fence ") for line in lines), strict=True)
    assert sorted(holders) == ["A", "B", "C"]
    assert sorted(map(int, fences)) == [int(fence) for fence in fences]
    with names["cache"].lock("import", label="another"):
        short = "import_prices('D')"
        exec(
            ANSWER.partition("\nfor ")[0].replace("blocking_timeout=10", "blocking_timeout=0.01"),
            names,
        )
        with pytest.raises(LockNotAcquired, match="is held by"):
            exec(short, names)


def test_a_try(client: redis.Redis, capsys: pytest.CaptureFixture[str]) -> None:
    imported: list[str] = []
    names = {"cache": caches["default"], "import_prices": imported.append}
    exec(TRIED, names)
    with caches["default"].lock("import"):
        exec(TRIED, names)
    assert imported == ["D"]
    assert capsys.readouterr().out.endswith(" is importing.\n")


def test_long_work(client: redis.Redis) -> None:
    stored: list[Any] = []
    names: dict[str, Any] = {"cache": caches["default"], "rows": lambda: "ab"}
    names["store"] = lambda row, fence: stored.append(row)
    exec(LONG, names)
    assert stored == ["a", "b"]


def test_n_at_a_time(client: redis.Redis) -> None:
    cache = caches["default"]
    names: dict[str, Any] = {"cache": cache, "PROXIES": dict(enumerate("abcde", 1))}
    names["send"] = lambda request, through: (request, through)
    exec(LIMITED, names)
    with cache.lock("api", limit=5), cache.lock("api", limit=5):
        assert names["call_api"]("this") == ("this", "c")


def test_how_long_a_lock_lives(client: redis.Redis) -> None:
    found = {}
    for call, lives in rows("How long a lock lives"):
        lock = eval(call.strip("`"), {"cache": caches["default"]})
        found[lives] = (lock.timeout, lock.renew)
        assert lock.renew == ("**renewed**" in lives or "as the first" in lives or "least" in lives)
    assert list(found.values()) == [
        *((30, True), (600, False), (600, True), (30, True), (30, True), (None, False))
    ]


def test_the_options_are_those_there_are() -> None:
    listed = {name.strip("`") for name, *_ in rows("Options")}
    own = set(inspect.signature(Lock.__init__).parameters)
    assert listed - own == set(TAKEN_OFF)
    of_redis_py = {"timeout", "sleep", "blocking", "blocking_timeout", "thread_local"}
    assert own - listed - of_redis_py == {"self", "redis", "name", "unknown", *FROM_SETTINGS}


def test_what_a_lock_can_do_it_can(client: redis.Redis) -> None:
    lock = caches["default"].lock("import")
    names = re.findall(r"`(\w+)[(`]", " ".join(row[0] for row in rows("What a lock can do")))
    assert len(names) > 10
    assert [name for name in names if not hasattr(lock, name)] == []
    errors = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows("Errors")))
    public = django_redis_lock.__all__
    assert [e for e in errors if e not in public] == ["ConnectionError", "TimeoutError"]


def test_tasks(client: redis.Redis) -> None:
    fences: list[int] = []

    async def fetch(fence: int) -> None:
        fences.append(fence)

    names: dict[str, Any] = {"cache": caches["default"], "fetch": fetch}
    exec(TASKS, names)
    asyncio.run(names["sync_prices"]())
    assert fences[0] > 0


def test_a_task_that_is_cancelled(client: redis.Redis, capsys: pytest.CaptureFixture[str]) -> None:
    async def fetch(fence: int) -> None:
        await caches["default"].alock("import").reset()
        await asyncio.sleep(PATIENCE)

    names: dict[str, Any] = {"cache": caches["default"], "fetch": fetch}
    exec(CANCELLED, names)
    asyncio.run(names["sync_or_stop"]())
    assert capsys.readouterr().out == "Another process has the lock now.\n"


def test_several_names(client: redis.Redis) -> None:
    moved: list[Any] = []
    cache = caches["default"]
    names: dict[str, Any] = {
        "cache": cache,
        "move": lambda amount, fences: moved.append((amount, set(fences))),
    }
    exec(SEVERAL.replace("blocking_timeout=10", "blocking_timeout=0.01"), names)
    names["transfer"](1, 7, 100)
    assert moved == [(100, {"account-1", "account-7"})]
    with cache.lock("account-7"), pytest.raises(LockNotAcquired) as conflict:
        names["transfer"](1, 7, 100)
    assert conflict.value.lock_name == "account-7"


def test_re_entry(client: redis.Redis) -> None:
    fences: list[int] = []
    names: dict[str, Any] = {
        "cache": caches["default"],
        "write": lambda amount, fence: fences.append(fence),
    }
    exec(AGAIN, names)
    names["book_all"]([1, 2])
    names["book"](3)
    assert fences[0] == fences[1] < fences[2]


def test_without_django(client: redis.Redis) -> None:
    exec(BARE, {"client": client})
    assert not client.exists("import")
