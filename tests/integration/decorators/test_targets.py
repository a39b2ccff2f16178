"""What each decorator takes: every decorator with every kind of target, against the table in the
documentation."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, shared_task
from django.core.cache import caches
from django.core.management.base import BaseCommand
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.views import View
from rest_framework.views import APIView

from django_redis_lock import (
    LockNotAcquired,
    cached,
    cached_page,
    idempotent,
    locked,
    unique_task,
)
from django_redis_lock.decorators.targets import TAKEN_BY

app = Celery("targets", broker="memory://", set_as_current=False)
backport = "django.tasks" if importlib.util.find_spec("django.tasks") else "django_tasks"
task = importlib.import_module(backport).task

DECORATORS: dict[str, Callable[[], Any]] = {
    "locked": lambda: locked("target"),
    "cached": lambda: cached(key=lambda *args: "target"),
    "cached_page": lambda: cached_page(60),
    "idempotent": lambda: idempotent(scope=None),
    "unique_task": lambda: unique_task("target-{request}", timeout=60),
}


def view(request: Any, size: int = 0) -> HttpResponse:
    return HttpResponse("page")


async def aview(request: Any) -> HttpResponse:
    return HttpResponse("page")


class Callable_:
    def __call__(self, request: Any) -> HttpResponse:
        return HttpResponse("page")


def generator(request: Any) -> Any:
    yield request


async def agenerator(request: Any) -> Any:
    yield request


class Generates:
    def __call__(self, request: Any) -> Any:
        yield request


class Page(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("page")


class Api(APIView):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("page")


class Command(BaseCommand):
    def handle(self, *args: object, **options: object) -> str:
        return "done"


@task
def of_django(request: Any) -> str:
    return "done"


def fresh(kind: type) -> Any:
    return type(kind.__name__, (kind,), {"__module__": __name__})


#: Each kind as the documentation names it, and targets of it.
TARGETS: dict[str, list[Callable[[], Any]]] = {
    "a function or a coroutine function, a method": [
        lambda: view,
        lambda: aview,
        lambda: Callable_().__call__,
        lambda: functools.cache(view),
    ],
    "a static method": [lambda: staticmethod(view), lambda: staticmethod(aview)],
    "a class method": [lambda: classmethod(lambda cls, request: request)],
    "a `partial` of these": [
        lambda: functools.partial(view, size=1),
        lambda: functools.partial(aview),
        lambda: functools.partial(Callable_().__call__),
    ],
    "another object that is called": [
        Callable_,
        lambda: functools.partial(Callable_()),
        lambda: functools.partial(Page),
    ],
    "a generator function": [
        lambda: generator,
        lambda: agenerator,
        Generates,
        lambda: functools.partial(generator),
        lambda: staticmethod(generator),
    ],
    "a class of views": [lambda: fresh(Page)],
    "a class of views of Django REST framework": [lambda: fresh(Api)],
    "a class of a management command": [lambda: fresh(Command)],
    "another class": [lambda: dict],
    "a task of Celery": [
        lambda: app.task(name="eager", lazy=False)(view),
        lambda: app.task(name="lazy")(view),
    ],
    "a shared task of Celery": [lambda: shared_task(name="shared")(view)],
    "a task of Django": [lambda: of_django],
    "anything else": [lambda: 5, lambda: "text", lambda: property(view)],
}


def documented() -> dict[str, dict[str, bool]]:
    text = (Path(__file__).parents[3] / "docs" / "reference.md").read_text()
    table = text.partition("### What each decorator takes\n")[2].partition("\n#")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    names = [name.strip("`()") for name in rows[0][1:]]
    return {
        row[0]: {name: cell.startswith("yes") for name, cell in zip(names, row[1:], strict=True)}
        for row in rows[2:]
    }


def test_the_documentation_has_each_kind_and_each_decorator() -> None:
    table = documented()
    assert list(table) == list(TARGETS)
    assert all(list(row) == list(DECORATORS) for row in table.values())
    assert [set(filter(row.get, row)) for row in table.values()] == list(TAKEN_BY.values())


@pytest.mark.sample(len(DECORATORS) * len(TARGETS))
@pytest.mark.parametrize("decorator", DECORATORS)
@pytest.mark.parametrize("kind", TARGETS)
def test_what_a_decorator_takes(kind: str, decorator: str) -> None:
    for make in TARGETS[kind]:
        target = make()
        if documented()[kind][decorator]:
            DECORATORS[decorator]()(target)
        else:
            words = rf"{decorator}\(\) decorates |key must be|takes the key once"
            with pytest.raises(TypeError, match=words):
                DECORATORS[decorator]()(target)


def ask(user: Any = None) -> HttpRequest:
    request = RequestFactory().get("/")
    request.user = user
    return request


#: Calls of what is decorated.
CALLS: dict[str, Callable[[Any], Any]] = {
    "function": lambda decorate: decorate(view)(ask()),
    "coroutine function": lambda decorate: asyncio.run(decorate(aview)(ask())),
    "static method": lambda decorate: type(
        "Views", (), {"page": decorate(staticmethod(view))}
    )().page(ask()),
    "partial": lambda decorate: decorate(functools.partial(view, size=1))(ask()),
    "partial of a coroutine function": lambda decorate: asyncio.run(
        decorate(functools.partial(aview))(ask())
    ),
    "class of views": lambda decorate: decorate(fresh(Page)).as_view()(ask()),
    "class of views of Django REST framework": lambda decorate: decorate(fresh(Api)).as_view()(
        ask()
    ),
}


@pytest.mark.sample(len(CALLS))
@pytest.mark.parametrize("kind", CALLS)
def test_each_target_is_called(kind: str) -> None:
    """Under its lock; once for one key; and its page is stored."""
    call, under_lock = CALLS[kind], locked("target")
    assert call(under_lock).content == b"page"
    with caches["default"].lock("target"):
        try:
            status = call(under_lock).status_code
        except LockNotAcquired:
            status = 409  # What is no view for Django.
    assert status == 409
    once = idempotent(scope=None, methods=["GET"], key=lambda request: "key")
    assert call(once).content == b"page"
    assert call(once).headers["Idempotency-Replayed"] == "true"
    if "class" not in kind:
        assert not call(cached_page(60)).has_header("Age")
        assert call(cached_page(60)).has_header("Age")


@pytest.mark.sample(5)
@pytest.mark.parametrize("decorator", ["locked", "cached", "cached_page", "idempotent", "with key"])
def test_a_function_that_raises_stop_iteration_raises_it_to_its_caller(decorator: str) -> None:
    def exhausted(request: Any) -> HttpResponse:
        return next(iter(()))

    with_key = idempotent(scope=None, methods=["GET"], key=lambda request: "key")
    decorate = with_key if decorator == "with key" else DECORATORS[decorator]()
    with pytest.raises(StopIteration):
        decorate(exhausted)(ask())


def test_two_partials_are_two_operations() -> None:
    """The requests of one client with one key, for two operations."""
    decorate = idempotent(scope=None, methods=["GET"], key=lambda request: "key")
    small, large, again = (decorate(functools.partial(view, size=size)) for size in (1, 2, 1))
    small(ask())
    assert "Idempotency-Replayed" not in large(ask()).headers
    assert "Idempotency-Replayed" in again(ask()).headers
    other = functools.partial(lambda request: HttpResponse("other"))
    assert decorate(other)(ask()).content == b"other"
