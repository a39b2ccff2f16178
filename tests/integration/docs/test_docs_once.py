"""The unique task of docs/once.md is queued once, and its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from celery import Celery

from django_redis_lock.contrib import unique_tasks
from django_redis_lock.contrib.testing import MemoryServer
from django_redis_lock.contrib.unique_tasks import django

TEXT = (Path(__file__).parents[3] / "docs" / "once.md").read_text()


def test_its_task(redis_locks: MemoryServer) -> None:
    app = Celery("docs", broker="memory://", backend="cache+memory://")
    app.conf.task_default_queue = "docs"
    uploaded: list[int] = []
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    found: dict[str, Any] = {"upload": uploaded.append, "__name__": "docs_tasks"}
    exec(compile(code, "once.md", "exec"), found)
    sync = found["sync"]
    assert sync.app is app
    first = sync.delay(7)
    assert sync.delay(7).id == first.id
    assert sync.delay(8).id != first.id
    redis_locks.clock.advance(3601)
    assert sync.delay(7).id != first.id
    sync(7)
    assert uploaded == [7]


def test_its_names_are_those_of_the_code() -> None:
    assert f"`{unique_tasks.PREFIX}sync-7`" in TEXT
    assert f"`{django.TRAVELS}`" in TEXT
    assert unique_tasks.PATIENCE == 10
    for name in unique_tasks.__all__:
        assert f"`{name}`" in TEXT or name == "unique_task"
