"""``locked()`` on tasks of Celery and of Django, in either order."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, shared_task
from celery.exceptions import Retry
from django.core.cache import caches
from django.views import View

from django_redis_lock import LockNotAcquired, locked
from django_redis_lock.contention import retry_task, skip

app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)


@app.task
@locked("send-{pk}")
def send(pk: int) -> str:
    assert caches["default"].lock(f"send-{pk}").locked()
    return "sent"


@locked("send-{pk}")
@app.task
def send_outside(pk: int) -> str:
    assert caches["default"].lock(f"send-{pk}").locked()
    return "sent"


@locked("send-{pk}")
@app.task(lazy=False, bind=True, max_retries=2)
def send_bound(self: Any, pk: int) -> str:
    assert caches["default"].lock(f"send-{pk}").locked()
    return f"sent by {self.name}"


@app.task(bind=True, max_retries=2)
@locked("send-{pk}-{self.name}", on_conflict=retry_task, retry_after=5)
def send_later(self: Any, pk: int) -> str:
    return "sent"


@app.task
@locked("send-{pk}", on_conflict=skip)
def send_or_skip(pk: int) -> str:
    return "sent"


@pytest.mark.parametrize("task", [send, send_outside, send_bound, send_or_skip])
def test_it_stays_a_task_and_fails_or_is_skipped_if_its_lock_is_taken(task: Any) -> None:
    assert task.name in app.tasks
    assert task(7).startswith("sent")
    assert task.apply(args=[7]).get().startswith("sent")
    assert not caches["default"].lock("send-7").locked()
    with caches["default"].lock("send-7"):
        result = task.apply(args=[7])
        assert task.apply(kwargs={"pk": 8}).get().startswith("sent")
        if task is send_or_skip:
            assert result.get() is None
        else:
            with pytest.raises(LockNotAcquired, match="send-7 is held by"):
                result.get()


@app.task(bind=True, max_retries=None)
@locked("send-{pk}", on_conflict=retry_task)
def send_until_free(self: Any, pk: int) -> str:
    return "sent"


def test_in_eager_mode_the_conflict_is_raised() -> None:
    """Celery would retry at once, and again."""
    with caches["default"].lock("send-7"):
        with pytest.raises(LockNotAcquired, match="send-7 is held by"):
            send_until_free.apply(args=[7]).get()
        app.conf.task_always_eager = True
        try:
            with pytest.raises(LockNotAcquired, match="send-7 is held by"):
                send_until_free.delay(7).get()
        finally:
            app.conf.task_always_eager = False


@locked("send-{pk}", on_conflict=retry_task, retry_after=5)
@app.task(lazy=False)
def send_outside_later(pk: int) -> str:
    return "sent"


@locked("send-{pk}", on_conflict=retry_task, retry_after=5)
@app.task(lazy=False, bind=True)
def send_bound_outside_later(self: Any, pk: int) -> str:
    return "sent"


@app.task
def send_by_another_function_later(pk: int) -> str:
    return send_or_retry(pk)


@locked("send-{pk}", on_conflict=retry_task, retry_after=5)
def send_or_retry(pk: int) -> str:
    return "sent"


@pytest.mark.parametrize(
    "task",
    [
        *(send_later, send_outside_later, send_bound_outside_later),
        send_by_another_function_later,
    ],
)
def test_a_task_that_is_tried_again(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def retry(**options: Any) -> Retry:
        asked.append(options)
        return Retry()

    monkeypatch.setattr(task, "retry", retry)
    assert task(7) == "sent"
    with (
        caches["default"].lock("send-7", timeout=20),
        caches["default"].lock(f"send-7-{task.name}", timeout=20),
        pytest.raises(Retry),
    ):
        task(7)
    (options,) = asked
    assert options["countdown"] == 5
    assert isinstance(options["exc"], LockNotAcquired)


def test_only_a_celery_task_is_tried_again() -> None:
    with caches["default"].lock("send-7"), pytest.raises(TypeError, match="only in a Celery task"):
        send_or_retry(7)
    with pytest.raises(TypeError, match="only in a Celery task"):

        @locked("page", on_conflict=retry_task)
        class Page(View): ...


def test_a_shared_task_is_refused_from_outside() -> None:
    with pytest.raises(TypeError, match="put @locked below @shared_task"):

        @locked("send")
        @shared_task
        def share() -> None: ...


# -- Django's ----------------------------------------------------------------------------------

SOURCE = """
from {module} import task
from django_redis_lock import locked

@task
@locked("send-{{pk}}")
def inside(pk):
    return "sent"

@locked("send-{{pk}}")
@task
def outside(pk):
    return "sent"

@locked("send-{{pk}}")
@task(takes_context=True)
async def awaited(context, pk):
    return "sent"
"""


@pytest.fixture
def module(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with Django's tasks, or those of its backport for older versions."""
    name = "django.tasks" if importlib.util.find_spec("django.tasks") else "django_tasks"
    settings.TASKS = {"default": {"BACKEND": f"{name}.backends.immediate.ImmediateBackend"}}
    (tmp_path / "shop_tasks.py").write_text(SOURCE.format(module=name))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("shop_tasks")
    del sys.modules["shop_tasks"]


@pytest.mark.parametrize("name", ["inside", "outside", "awaited"])
def test_djangos_tasks(module: Any, name: str) -> None:
    task = getattr(module, name)
    with pytest.raises(TypeError, match="exit_code means nothing for a task"):
        locked("send", exit_code=3)(task)
    with pytest.raises(TypeError, match="only in a Celery task"):
        locked("send", on_conflict=retry_task)(task)
    result = task.enqueue(pk=7)
    assert result.return_value == "sent"
    assert result.task.module_path == f"shop_tasks.{name}"
    with caches["default"].lock("send-7"):
        result = task.enqueue(7)
        assert result.status == "FAILED"
        assert result.errors[0].exception_class is LockNotAcquired
        assert task.enqueue(8).return_value == "sent"
