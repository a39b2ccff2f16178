"""The recipes of docs/recipes.md do what the page says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.http import HttpResponse
from django.test import RequestFactory
from django.urls import path

from django_redis_lock import LockNotAcquired
from django_redis_lock.contrib.testing import MemoryServer

TEXT = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()


def code(heading: str) -> str:
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (found,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return found


def names(heading: str, **given: Any) -> dict[str, Any]:
    exec(compile(code(heading), heading, "exec"), given)
    return given


@pytest.mark.django_db
def test_rows_that_change(
    redis_locks: MemoryServer, django_capture_on_commit_callbacks: Any
) -> None:
    found: dict[str, Any] = {"User": User}
    heading = "Values of rows that change"
    exec(compile(code(heading).replace('"shop.Order"', "User"), heading, "exec"), found)
    try:
        cache.set_many({"orders": 1, "order-7": 1, "order-8": 1})
        with django_capture_on_commit_callbacks(execute=True):
            user = User.objects.create(pk=7, username="eve")
            assert cache.get("orders") == 1
        assert list(cache.get_many(["orders", "order-7", "order-8"])) == ["order-8"]
        cache.set("orders", 2)
        with django_capture_on_commit_callbacks(execute=True):
            user.delete()
        assert cache.get("orders") is None
    finally:
        for signal in (found["post_save"], found["post_delete"]):
            assert signal.disconnect(found["order_changed"], sender=User)


urlpatterns = [path("orders", lambda request: HttpResponse(), name="orders")]


def test_a_celery_task(redis_locks: MemoryServer) -> None:
    done: list[Any] = []
    found = names(
        "A Celery task that must not overlap",
        deliver=done.append,
        load_prices=lambda: done.append("prices"),
    )
    found["import_prices"]()
    found["send_mailing"](7)
    assert done == ["prices", 7]
    with cache.lock("prices"):
        assert found["import_prices"]() is None
    with cache.lock("mailing-7"), pytest.raises(LockNotAcquired):
        found["send_mailing"](7)  # Called directly: Celery raises what it would be retried for.
    assert done == ["prices", 7]


@pytest.mark.skipif(not importlib.util.find_spec("django.tasks"), reason="Django 6.0 has tasks")
def test_a_task_of_django(redis_locks: MemoryServer) -> None:
    done: list[int] = []
    found = names("Django tasks", draw=done.append)
    found["make_thumbnails"].call(3)
    assert done == [3]


def test_an_endpoint_of_rest_framework(redis_locks: MemoryServer) -> None:
    mailed: list[Any] = []
    found = names("An endpoint of Django REST framework", mail_invoice=mailed.append)
    view = found["Invoices"].as_view({"post": "send"})
    request = RequestFactory().post("/")
    assert view(request, pk=7).data == {"sent": True}
    with cache.lock("invoice-7"):
        assert view(request, pk=7).status_code == 409
    assert mailed == [7]


@pytest.mark.urls(__name__)
def test_a_form_that_is_sent_twice(redis_locks: MemoryServer, monkeypatch: Any) -> None:
    placed: list[Any] = []
    monkeypatch.setattr("django_redis_lock.contention.messages.warning", lambda *_: None)
    found = names(
        "A form that is sent twice", place_order=lambda user, data: placed.append(data["token"])
    )
    request = RequestFactory().post("/", {"token": "abc"})
    request.user = SimpleNamespace()
    assert found["order"](RequestFactory().get("/")).status_code == 405
    assert found["order"](request).status_code == 302
    assert found["order"](request).status_code == 303
    redis_locks.clock.advance(61)
    assert found["order"](request).status_code == 302
    assert placed == ["abc", "abc"]


def test_a_slow_report(redis_locks: MemoryServer) -> None:
    built = iter(("first", "second"))
    found = names("A slow report", build_report=lambda: next(built), show=lambda rows: rows)
    assert found["report"](None) == "first"
    redis_locks.clock.advance(301)
    assert found["report"](None) == "first"
    (call,) = re.findall(r"`(cache\.compute\(.*?\))`", TEXT)
    assert eval(call, {"cache": cache, "build_report": lambda: "third"}) == "third"


def test_a_transfer_between_two_accounts(redis_locks: MemoryServer) -> None:
    found = names("A transfer between two accounts")
    moved: list[int] = []
    accounts = [
        SimpleNamespace(pk=pk, withdraw=lambda amount: moved.append(-amount), deposit=moved.append)
        for pk in (1, 7)
    ]
    found["transfer"](*accounts, 100)
    assert moved == [-100, 100]


def test_a_leader_that_loses_its_lock_waits_again(redis_locks: MemoryServer) -> None:
    terms: list[int] = []
    found = names("A leader for a scheduler", run_due_jobs=None)
    found["time"] = SimpleNamespace(sleep=lambda seconds: None)

    class Stop(Exception):
        pass

    def run_due_jobs(fence: int) -> None:
        if fence in terms:
            return
        terms.append(fence)
        if len(terms) == 2:
            raise Stop
        redis_locks.lose(":lock:1:scheduler")
        redis_locks.clock.advance(31)

    found["run_due_jobs"] = run_due_jobs
    with pytest.raises(Stop):
        found["run_scheduler"]()
    assert terms == sorted(terms)
    assert redis_locks.held() == []
