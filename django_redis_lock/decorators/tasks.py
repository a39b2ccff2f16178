"""Functions that a task queue has wrapped up before ``locked()`` gets them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["celery_task", "is_django_task", "with_function"]


def is_django_task(target: Any) -> bool:
    """Whether it is what Django's ``@task`` makes of a function (or its backport, django-tasks)."""
    modules = (sys.modules.get("django.tasks.base"), sys.modules.get("django_tasks.base"))
    return any(module is not None and isinstance(target, module.Task) for module in modules)


def with_function(task: Any, function: Callable[..., Any]) -> Any:
    """The same task with another function. The worker finds it by the function's name, so it finds
    this one."""
    return dataclasses.replace(task, func=function)


def celery_task(target: Any) -> Any:
    """The Celery task that ``target`` is; None if it is something else.

    Raises:
        TypeError: it is a shared task, which each app makes its own copy of.
    """
    if type(target).__module__ == "celery.local" and type(target).__name__ == "Proxy":
        raise TypeError(
            "a shared task exists once in each app, and locked() would reach but one of them: put "
            "@locked below @shared_task, next to the function"
        )
    module = sys.modules.get("celery.app.task")
    return target if module is not None and isinstance(target, module.Task) else None
