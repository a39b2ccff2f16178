"""What ``locked()`` decorates: functions, classes of views and of commands, tasks."""

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

__all__ = ["decorate"]


def decorate(options: Options, target: Any) -> Any:
    """``target``, one at a time.

    Raises:
        TypeError, ValueError: it cannot be decorated, or not with these options.
    """
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(decorate(options, target.__func__))
    if isinstance(target, type):
        return _class(options, target)
    if is_django_task(target):
        # The worker finds a task by the dotted name of its function, so it finds this one.
        return dataclasses.replace(target, func=decorate(options, target.func))
    task = celery_task(target)
    if task is not None:
        task.run = decorate(options, task.run)
        return target
    if not callable(target):
        raise TypeError(f"locked() decorates what can be called, not {target!r}")
    return LockedFunction(options, target, _dotted(options, target)).wrapper()


def _class(options: Options, target: type) -> type:
    dotted = f"{target.__module__}.{target.__qualname__}"
    # A method is exchanged on the class, which is what decorating a class is for.
    if issubclass(target, BaseCommand):
        options.refuse("a command", "status_code", "retry_after", "default")
        target.handle = LockedFunction(options, target.handle, dotted).wrapper()  # type: ignore[method-assign]
    elif is_api_view(target):
        _refuse_those_of_commands(options, "a view")
        _api_view(options, target, dotted)
    elif issubclass(target, View):
        _refuse_those_of_commands(options, "a view")
        target.dispatch = LockedFunction(options, target.dispatch, dotted).wrapper()  # type: ignore[method-assign]
    else:
        raise TypeError(
            f"locked() decorates functions, views, management commands and tasks, not {target!r}: "
            "decorate its methods"
        )
    return target


def _refuse_those_of_commands(options: Options, kind: str) -> None:
    options.refuse(kind, "exit_code", "lost_exit_code", "unavailable_exit_code", "default")
    if options.on_lost == "terminate":
        raise TypeError(f'on_lost="terminate" means nothing for {kind}: {ONLY_COMMANDS}')


def _dotted(options: Options, target: Any) -> str:
    method = bound_method(target)
    if method is not None:  # By method_decorator: it may be inherited from Django's own View.
        kind = type(method.__self__)
        return f"{kind.__module__}.{kind.__qualname__}.{method.__name__}"
    named = target if hasattr(target, "__qualname__") else type(target)
    if named is not target and options.key is None:
        raise TypeError(f"{target!r} has no name to give its lock: give a key")
    return f"{named.__module__}.{named.__qualname__}"


# -- tasks ----------------------------------------------------------------------------------


def is_django_task(target: Any) -> bool:
    """Whether it is what Django's ``@task`` makes of a function (or its backport, django-tasks)."""
    modules = (sys.modules.get("django.tasks.base"), sys.modules.get("django_tasks.base"))
    return any(module is not None and isinstance(target, module.Task) for module in modules)


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


# -- Django REST framework -------------------------------------------------------------------


def _api_view(options: Options, target: Any, dotted: str) -> None:
    """Take the lock around the handler, ``get``, ``post`` or an action: only then is the user
    known, and what a stranger may not do takes no lock."""
    initial = target.initial

    def handle(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        return self._without_lock(request, *args, **kwargs)

    guarded = LockedFunction(options, handle, dotted).wrapper()

    @functools.wraps(initial)
    def then(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        initial(self, request, *args, **kwargs)
        method = request.method.lower()
        if method in self.http_method_names and method != "options" and hasattr(self, method):
            self._without_lock = getattr(self, method)
            setattr(self, method, functools.partial(guarded, self))

    target.initial = then
