"""Tasks as people name them, by the signals of Celery and of Django's tasks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..locking import activity


@dataclass(frozen=True)
class TaskActivity:
    """``task shop.tasks.send_invoices (4f1c…)``: the name and id of a task.

    Attributes:
        before: the activity to which the thread returns.
    """

    name: str
    id: str
    before: object

    def __str__(self) -> str:
        return f"task {self.name} ({self.id})"


def note_tasks() -> None:
    """The description of a lock's holder says by which task it was acquired."""
    if "celery" in sys.modules:  # A worker has imported it before Django's setup.
        signals = import_module("celery.signals")
        signals.task_prerun.connect(_celery_begins)
        signals.task_postrun.connect(_celery_ends)
    for module in ("django.tasks.signals", "django_tasks.signals"):
        try:
            signals = import_module(module)
        except ImportError:  # Django before 6.0; the backport is not installed.
            continue
        signals.task_started.connect(_django_begins)
        signals.task_finished.connect(_django_ends)


def _celery_begins(sender: Any, task_id: str, **kwargs: Any) -> None:
    _begin(sender.name, task_id)


def _celery_ends(task_id: str, **kwargs: Any) -> None:
    _end(task_id)


def _django_begins(task_result: Any, **kwargs: Any) -> None:
    _begin(task_result.task.module_path, task_result.id)


def _django_ends(task_result: Any, **kwargs: Any) -> None:
    _end(task_result.id)


def _begin(name: str, id: str) -> None:
    activity.set(TaskActivity(name, str(id), activity.get()))


def _end(id: str) -> None:
    current = activity.get()
    if isinstance(current, TaskActivity) and current.id == str(id):
        activity.set(current.before)
