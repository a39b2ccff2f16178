"""``locked()`` on each kind of target: functions, classes of views and of commands, tasks."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

from django.core.management.base import BaseCommand
from django.views import View

from .key_template import bound_method
from .options import Options
from .wrapper import ONLY_COMMANDS, LockedFunction, is_api_view


def decorate(options: Options, target: Any) -> Any:
    """``target``, decorated.

    Raises:
        TypeError, ValueError: ``target`` cannot be decorated, or not with these options.
    """
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(decorate(options, target.__func__))
    if isinstance(target, type):
        return _class(options, target)
    if is_django_task(target):
        # The worker looks a task up by the dotted name of its function, which is unchanged.
        return dataclasses.replace(target, func=decorate(options, target.func))
    task = celery_task(target)
    if task is not None:
        task.run = decorate(options, task.run)
        return target
    if not callable(target):
        raise TypeError(f"locked() decorates callables, not {target!r}")
    return LockedFunction(options, target, _dotted(options, target)).wrapper()


def _class(options: Options, target: type) -> type:
    dotted = f"{target.__module__}.{target.__qualname__}"
    # Decorating a class replaces one of its methods.
    if issubclass(target, BaseCommand):
        options.refuse("a command", "status_code", "retry_after", "default")
        target.handle = LockedFunction(options, target.handle, dotted).wrapper()  # type: ignore[method-assign]
    elif is_api_view(target):
        _refuse_command_options(options, "a view")
        _api_view(options, target, dotted)
    elif issubclass(target, View):
        _refuse_command_options(options, "a view")
        target.dispatch = LockedFunction(options, target.dispatch, dotted).wrapper()  # type: ignore[method-assign]
    else:
        raise TypeError(
            f"locked() decorates functions, views, management commands and tasks, not {target!r}: "
            "decorate its methods"
        )
    return target


def _refuse_command_options(options: Options, kind: str) -> None:
    options.refuse(kind, "exit_code", "lost_exit_code", "unavailable_exit_code", "default")
    if options.on_lost == "terminate":
        raise TypeError(f'on_lost="terminate" means nothing for {kind}: {ONLY_COMMANDS}')


def _dotted(options: Options, target: Any) -> str:
    method = bound_method(target)
    if method is not None:  # From method_decorator; may be inherited from Django's View.
        kind = type(method.__self__)
        return f"{kind.__module__}.{kind.__qualname__}.{method.__name__}"
    named = target if hasattr(target, "__qualname__") else type(target)
    if named is not target and options.key is None:
        raise TypeError(f"{target!r} has no dotted name that could name its lock: give a key")
    return f"{named.__module__}.{named.__qualname__}"


# -- tasks ----------------------------------------------------------------------------------


def is_django_task(target: Any) -> bool:
    """Whether ``target`` is a task made by Django's ``@task`` (or its backport, django-tasks)."""
    modules = (sys.modules.get("django.tasks.base"), sys.modules.get("django_tasks.base"))
    return any(module is not None and isinstance(target, module.Task) for module in modules)


def celery_task(target: Any) -> Any:
    """``target`` if it is a Celery task, else None.

    Raises:
        TypeError: it is a shared task, of which each Celery app makes a copy.
    """
    if type(target).__module__ == "celery.local" and type(target).__name__ == "Proxy":
        raise TypeError(
            "each Celery app has its own copy of a shared task, and locked() would decorate only "
            "one: put @locked below @shared_task, next to the function"
        )
    module = sys.modules.get("celery.app.task")
    return target if module is not None and isinstance(target, module.Task) else None


# -- Django REST framework -------------------------------------------------------------------


def _api_view(options: Options, target: Any, dotted: str) -> None:
    """Take the lock around the handler (``get``, ``post`` or an action): by then the user is
    authenticated, and a request that is not permitted takes no lock."""
    initial = target.initial

    def handle(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        return self._without_lock(request, *args, **kwargs)

    locked_handler = LockedFunction(options, handle, dotted).wrapper()

    @functools.wraps(initial)
    def then(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        initial(self, request, *args, **kwargs)
        method = request.method.lower()
        if method in self.http_method_names and method != "options" and hasattr(self, method):
            self._without_lock = getattr(self, method)
            setattr(self, method, functools.partial(locked_handler, self))

    target.initial = then
