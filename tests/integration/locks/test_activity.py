"""What the holder of a lock is doing: in the description that others read, and where it is from."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery
from django.contrib.auth.models import AnonymousUser, User
from django.core.cache import caches
from django.http import HttpRequest, HttpResponse
from django.test import AsyncRequestFactory, RequestFactory
from django.utils.functional import SimpleLazyObject
from rest_framework.decorators import api_view
from rest_framework.response import Response

from django_redis_lock import LockNotAcquired, current_lock, locked
from django_redis_lock.middleware import RequestActivity, doing, note_request, note_tasks
from django_redis_lock.protocol import activity, hostname
from django_redis_lock.protocol.identity import command_line
from tests.processes import until

FACTORY = RequestFactory()
app = Celery("doing", broker="memory://", backend="cache+memory://", set_as_current=False)


def doing_of(lock: Any) -> str:
    """What the description of the lock's holder would say now."""
    said: str = lock.local.hold.owner().doing
    return said


def doing_here() -> str:
    """The same for a lock that is acquired here."""
    with caches["default"].lock("here") as lock:
        return doing_of(lock)


@pytest.fixture(autouse=True)
def as_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let this process be started by the given command line; by that of a server at first."""

    def begin(*argv: str) -> None:
        monkeypatch.setattr(sys, "argv", list(argv))
        command_line.cache_clear()

    begin("/usr/bin/gunicorn", "site.wsgi")
    yield begin
    command_line.cache_clear()


# -- the first half second ---------------------------------------------------------------------


def test_a_conflict_names_a_holder_who_has_not_described_itself_yet() -> None:
    make = partial(caches["default"].lock, "early", blocking=False)
    with make(), pytest.raises(LockNotAcquired) as conflict, make():
        pass
    assert f"{hostname()}, process {os.getpid()}, thread MainThread" in str(conflict.value)


# -- requests ----------------------------------------------------------------------------------


@locked("activity-{pk}")
def view(request: HttpRequest, pk: int) -> HttpResponse:
    return HttpResponse(doing_of(current_lock()))


@api_view(["POST"])
@locked("activity")
def rest_view(request: Any) -> Response:
    return Response(doing_of(current_lock()))


def test_a_locked_view_names_method_and_path_without_the_query() -> None:
    assert view(FACTORY.post("/invoices/17/?card=4711"), 17).content == b"POST /invoices/17/"


def test_so_does_one_of_django_rest_framework() -> None:
    assert rest_view(FACTORY.post("/api/invoices/")).data == "POST /api/invoices/"


def test_others_read_it_in_redis_and_in_the_error() -> None:
    with doing(RequestActivity(request := FACTORY.get("/report/"))):
        lock = caches["default"].lock("read", label="report")
        with lock:
            until(lambda: lock.holder().label)
            holder = lock.holder()
            assert holder.doing == "GET /report/"
            assert str(holder).endswith("(report; GET /report/)")
    assert request.path == "/report/"  # Else it could have been collected.


@pytest.mark.parametrize(
    ("headers", "attributes", "expected"),
    [
        ({"X-Request-ID": "4f1c-2"}, {}, "GET / (request 4f1c-2)"),
        ({"X-Request-ID": "4f1c"}, {"id": "9a"}, "GET / (request 9a)"),
        ({}, {"request_id": 17}, "GET / (request 17)"),
        ({"X-Request-ID": "x\nforged line"}, {}, "GET /"),
        ({"X-Request-ID": "x" * 65}, {}, "GET /"),
    ],
)
def test_the_id_of_a_request(
    headers: dict[str, str], attributes: dict[str, Any], expected: str
) -> None:
    request = FACTORY.get("/", headers=headers)
    vars(request).update(attributes)
    assert str(RequestActivity(request)) == expected


@pytest.mark.parametrize("asked_for", [False, True])
def test_the_user_is_named_only_if_the_setting_asks_for_it(settings: Any, asked_for: bool) -> None:
    settings.DJANGO_REDIS_LOCK = {"HOLDER_USER": asked_for}
    request = FACTORY.get("/")
    request.user = User(pk=3)
    assert str(RequestActivity(request)) == ("GET / (user 3)" if asked_for else "GET /")
    request.user = AnonymousUser()
    assert str(RequestActivity(request)) == "GET /"


def test_a_user_who_was_not_loaded_is_not_loaded(settings: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"HOLDER_USER": True}
    request = FACTORY.get("/")
    request.user = SimpleLazyObject(lambda: pytest.fail("this would query the database"))
    assert str(RequestActivity(request)) == "GET /"
    request._acached_user = User(pk=3)
    assert str(RequestActivity(request)) == "GET / (user 3)"


# -- the middleware ----------------------------------------------------------------------------


def test_the_middleware_names_the_request_of_each_lock_within() -> None:
    middleware = note_request(lambda request: HttpResponse(doing_here()))
    assert middleware(FACTORY.get("/report/")).content == b"GET /report/"
    assert doing_here() == ""


def test_the_middleware_in_an_asynchronous_chain() -> None:
    async def respond(request: HttpRequest) -> HttpResponse:
        await asyncio.sleep(0)
        async with caches["default"].alock(request.path) as lock:
            return HttpResponse(doing_of(lock))

    async def main() -> None:
        middleware = note_request(respond)
        requests = [AsyncRequestFactory().get(path) for path in ("/a/", "/b/")]
        responses = await asyncio.gather(*map(middleware, requests))
        assert [response.content for response in responses] == [b"GET /a/", b"GET /b/"]
        assert activity.get() is None

    asyncio.run(main())


# -- tasks -------------------------------------------------------------------------------------


@app.task(name="doing.inner")
def inner() -> str:
    return doing_here()


@app.task(name="doing.outer")
def outer() -> list[str]:
    return [doing_here(), inner.apply(task_id="2").get(), doing_here()]


def test_celery_tasks_are_named_also_one_within_another() -> None:
    note_tasks()  # Celery was imported after Django's setup.
    first, second, again = outer.apply(task_id="1").get()
    assert first == again == "task doing.outer (1)"
    assert second == "task doing.inner (2)"
    assert doing_here() == ""


# -- management commands -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("./manage.py import_prices", "manage.py import_prices"),
        ("/venv/bin/django-admin migrate --noinput", "django-admin migrate --noinput"),
        ("/lib/django/__main__.py migrate", "django migrate"),
        (
            "manage.py login admin --password=hush --token hush -phush",
            "manage.py login --password --token",
        ),
        ("manage.py run_locked backup -- pg_dump --host db", "manage.py run_locked"),
        ("manage.py", ""),
        ("/lib/pytest/__main__.py tests", ""),
        ("", ""),
    ],
)
def test_a_management_command_without_the_values_of_its_arguments(
    as_program: Any, argv: str, expected: str
) -> None:
    as_program(*argv.split())
    assert doing_here() == expected
