"""What a request or a task is doing, for the description of a lock's holder. Tasks say it by the
signals of Celery and of Django's tasks."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from django import VERSION
from django.http import HttpRequest
from django.utils.encoding import escape_uri_path
from django.utils.functional import LazyObject, empty

from .conf import Conf
from .protocol import activity

_CONF = Conf()
#: Characters of a path.
MAX_PATH_LENGTH = 120
#: An id comes from the client, if no proxy replaces it.
REQUEST_ID = r"(?a)[\w.:/+=-]{1,64}"


@contextmanager
def doing(what: object) -> Iterator[None]:
    """Locks acquired in this block are held for ``what``; ``str(what)`` is called in another
    thread, so it must not query a database."""
    before = activity.get()
    activity.set(what)
    try:
        yield
    finally:
        activity.set(before)


def request_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    """The request in the arguments of a view, or of a method of one; None if there is none."""
    for argument in (*args[:2], *kwargs.values()):
        if isinstance(argument, HttpRequest):
            return argument
        # Django REST framework wraps Django's request.
        if isinstance(getattr(argument, "_request", None), HttpRequest):
            return argument
    return None


class RequestActivity:
    """``GET /invoices/17/ (request 4f1c, user 3)``: method and path without the query string, the
    request's id if it has one, and the user's primary key if ``HOLDER_USER`` asks for it. The
    request is not kept alive."""

    def __init__(self, request: HttpRequest) -> None:
        self._request = weakref.ref(getattr(request, "_request", request))

    def __str__(self) -> str:
        request = self._request()
        if request is None:
            return ""
        path = escape_uri_path(request.path)
        if len(path) > MAX_PATH_LENGTH:
            path = f"{path[:MAX_PATH_LENGTH]}…"
        known = {"request": _id_of(request), "user": _user_of(request) if _CONF.HOLDER_USER else ""}
        more = ", ".join(f"{name} {value}" for name, value in known.items() if value)
        return f"{request.method} {path}" + (f" ({more})" if more else "")


def _id_of(request: HttpRequest) -> str:
    given = getattr(request, "id", None) or getattr(request, "request_id", None)
    text = str(given or request.headers.get("X-Request-ID", ""))
    return text if re.fullmatch(REQUEST_ID, text) else ""


def _user_of(request: HttpRequest) -> str:
    """Only if the request has loaded the user: the keeper must not query the database."""
    user = getattr(request, "user", None)
    if isinstance(user, LazyObject) and user._wrapped is empty:
        user = getattr(request, "_acached_user", None)  # From ``request.auser()``.
    key = getattr(user, "pk", None)
    return "" if key is None else str(key)


class TaskActivity:
    """``task shop.tasks.send_invoices (4f1c…)``. ``before`` is what the thread returns to."""

    def __init__(self, name: str, id: str, before: object) -> None:
        self.name, self.id, self.before = name, id, before

    def __str__(self) -> str:
        return f"task {self.name} ({self.id})"


def note_tasks() -> None:
    """The description of a lock's holder says by which task it was acquired."""
    # Celery: a worker has imported it before Django's setup. The last is a backport.
    packages = ["django.tasks"] if VERSION >= (6,) else []
    packages += {"celery", "django_tasks"} & sys.modules.keys()
    for package in packages:
        signals = import_module(f"{package}.signals")
        of_celery = package == "celery"
        (signals.task_prerun if of_celery else signals.task_started).connect(_begin)
        (signals.task_postrun if of_celery else signals.task_finished).connect(_end)


def _begin(sender: Any, task_id: str = "", task_result: Any = None, **kwargs: object) -> None:
    """Celery gives ``task_id``, Django ``task_result``."""
    if task_result is None:
        name = sender.name
    else:
        name, task_id = task_result.task.module_path, task_result.id
    activity.set(TaskActivity(name, str(task_id), activity.get()))


def _end(task_id: str = "", task_result: Any = None, **kwargs: object) -> None:
    current, id = activity.get(), task_id if task_result is None else task_result.id
    if isinstance(current, TaskActivity) and current.id == str(id):
        activity.set(current.before)
