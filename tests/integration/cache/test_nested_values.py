"""Values whose functions need other values: how deep that may go (``docs/cache_stampedes.md``)."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from django.test import override_settings

from django_redis_lock import cached
from tests.processes import in_threads
from tests.redis_server import RedisServer

pytestmark = pytest.mark.uncovered

PAGE = Path(__file__).parents[3] / "docs" / "cache_stampedes.md"


def documented() -> int:
    found = re.search(r"recursion limit of 1000, (\d+) values may need", PAGE.read_text())
    assert found
    return int(found[1])


def get_or_set(n: int) -> int:
    compute = lambda: get_or_set(n - 1)  # noqa: E731  # as users write it
    return 1 + caches["default"].get_or_set(f"level-{n}", compute, 60) if n else 0


def stale(n: int) -> int:
    compute = partial(stale, n - 1)
    return 1 + caches["default"].get_or_set(f"level-{n}", compute, 60, stale=60) if n else 0


def compute(n: int) -> int:
    return 1 + caches["default"].compute(f"level-{n}", lambda: compute(n - 1), 60) if n else 0


def get_or_set_many(n: int) -> int:
    def many(keys: list[str]) -> dict[str, int]:
        return {keys[0]: get_or_set_many(n - 1)}

    name = f"level-{n}"
    return 1 + caches["default"].get_or_set_many([name], many, 60)[name] if n else 0


@cached("level-{n}", timeout=60)
def decorated(n: int) -> int:
    return 1 + decorated(n - 1) if n else 0


@cached(key=lambda n: f"level-{n}", timeout=60)
def by_function(n: int) -> int:
    return 1 + by_function(n - 1) if n else 0


async def aget_or_set(n: int) -> int:
    async def compute() -> int:
        return await aget_or_set(n - 1)

    return 1 + await caches["default"].aget_or_set(f"level-{n}", compute, 60) if n else 0


@cached("level-{n}", timeout=60)
async def adecorated(n: int) -> int:
    return 1 + await adecorated(n - 1) if n else 0


WAYS: list[Callable[[int], Any]] = [
    get_or_set,
    stale,
    compute,
    get_or_set_many,
    decorated,
    by_function,
    aget_or_set,
    adecorated,
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["RedisCache", "LocMemCache"])
def test_so_many_values_may_need_each_other(
    redis_server: RedisServer, way: Callable[[int], Any], kind: str
) -> None:
    location = redis_server.url if kind == "RedisCache" else way.__name__
    config = {"BACKEND": f"django_redis_lock.cache.{kind}", "LOCATION": location}

    def ask(levels: int) -> Any:
        found = way(levels)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    assert sys.getrecursionlimit() == 1000
    with override_settings(CACHES={"default": config}):
        levels = documented()
        [found] = in_threads(1, ask, levels)
        assert found == levels
