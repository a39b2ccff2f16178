"""What docs/without_redis.md shows works as it stands there."""

from __future__ import annotations

import re
import unittest
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches

from django_redis_lock import locked
from django_redis_lock.cache import LocMemCache, RedisCache
from django_redis_lock.contrib.testing import MemoryServer
from tests.redis_server import RedisServer

TEXT = (Path(__file__).parents[3] / "docs" / "without_redis.md").read_text()
ANSWER, CHOICE, KIT, TIME = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_answer_is_a_cache_with_locks(settings: Any) -> None:
    names: dict[str, Any] = {}
    exec(ANSWER, names)
    settings.CACHES = names["CACHES"]
    with caches["default"].lock("import") as lock:
        assert lock.fence > 0
        assert not caches["default"].lock("import").acquire(blocking=False)


@pytest.mark.parametrize(
    ("url", "backend"), [(None, LocMemCache), ("redis://127.0.0.1:1/0", RedisCache)]
)
def test_one_variable_chooses_the_backend(
    url: str | None, backend: type, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    if url is not None:
        monkeypatch.setenv("REDIS_URL", url)
    names: dict[str, Any] = {}
    exec("import os\n" + CHOICE, names)
    settings.CACHES = names["CACHES"]
    assert type(caches["default"]) is backend


def test_the_kit_for_tests(settings: Any, redis_server: RedisServer) -> None:
    """Without a Redis: nobody listens at that address."""
    cache = RedisCache("redis://127.0.0.1:1/0", {})
    settings.CACHES = {
        "default": {
            "BACKEND": "django_redis_lock.cache.RedisCache",
            "LOCATION": "redis://127.0.0.1:1/0",
        }
    }

    @locked("import")
    def import_prices() -> None: ...

    names = {"cache": cache, "pytest": pytest, "redis": redis, "import_prices": import_prices}
    exec(KIT, names)
    tests = [test for name, test in names.items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()


def test_the_fixture_and_the_mixin(redis_locks: MemoryServer) -> None:
    @locked("import")
    def import_prices() -> None: ...

    values = iter(("first", "second"))
    names: dict[str, Any] = {"cache": caches["default"], "build": lambda: next(values)}
    names.update(TestCase=unittest.TestCase, import_prices=import_prices)
    exec(TIME, names)
    names["test_the_value_is_computed_again_after_an_hour"](redis_locks)
    result = unittest.TestResult()
    names["ImportTest"]("test_the_lock_is_released").run(result)
    assert result.testsRun == 1
    assert result.wasSuccessful()
