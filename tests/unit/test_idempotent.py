"""``idempotent()``, as far as it needs no server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from django_redis_lock import current_lock, idempotent
from django_redis_lock.cache import cache
from django_redis_lock.contrib import idempotency
from django_redis_lock.contrib.testing import MemoryServer

Act = Callable[[Any], Any]


def function(act: Act, **options: Any) -> Any:
    @idempotent(scope=None, **options)
    def view(request: HttpRequest) -> Any:
        return act(request)

    return view


def coroutine_function(act: Act, **options: Any) -> Any:
    @idempotent(scope=None, **options)
    async def view(request: HttpRequest) -> Any:
        return act(request)

    return lambda request: asyncio.run(view(request))


of_each_kind = pytest.mark.parametrize("kind", [function, coroutine_function])


def sent(**headers: str) -> Any:
    return RequestFactory().post("/pay", {"a": 1}, headers={"Idempotency-Key": "k", **headers})


@of_each_kind
@pytest.mark.parametrize("policy", ["raise", "run"])
def test_without_redis_nothing_runs(
    redis_locks: MemoryServer, settings: Any, kind: Any, policy: str
) -> None:
    settings.DJANGO_REDIS_LOCK = {"ON_REDIS_DOWN": policy}
    view = kind(lambda request: pytest.fail("it runs"))
    redis_locks.away = True
    response = view(sent())
    assert (response.status_code, response["Content-Type"]) == (503, "application/json")
    assert json.loads(response.content)


@of_each_kind
def test_an_outage_after_the_view_began_is_its_own(redis_locks: MemoryServer, kind: Any) -> None:
    def fail(request: Any) -> Any:
        raise redis.ConnectionError("of the view")

    with pytest.raises(redis.ConnectionError, match="of the view"):
        kind(fail)(sent())


@of_each_kind
@pytest.mark.parametrize("attempt", [1, 2, None])
def test_who_has_lost_its_lock_does_not_replace_what_another_has_stored(
    redis_locks: MemoryServer, kind: Any, attempt: int | None
) -> None:
    def lose(request: Any) -> Any:
        lock: Any = current_lock()
        redis_locks.lose(lock.name)
        assert lock.lost
        [name] = cache.keys("idempotent-*")
        cache.delete(name)
        if attempt is not None:
            cache.set(name, {"attempt": attempt, "by": "another"})
        return HttpResponse(status=204)

    kind(lose)(sent())
    [name] = cache.keys("idempotent-*")
    stored: Any = cache.get(name)
    assert ("by" in stored) is (attempt == 2)
    assert stored["attempt"] == (attempt or 1)


async def a_coroutine_function(request: HttpRequest) -> str:
    return "never awaited"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key": "Idempotency-Key"}, "key must be a callable"),
        ({"key": a_coroutine_function}, "key must be a plain function"),
        ({"scope": a_coroutine_function}, "scope must be a plain function"),
        ({"ttl": 0}, "ttl must be"),
        ({"wait": -1}, "wait must be"),
        ({"max_body": -1}, "max_body must be"),
        ({"methods": "POST"}, "methods must be"),
        ({"methods": [5]}, "methods must be"),
        ({"scope": 5}, "scope must be"),
    ],
)
def test_bad_arguments(options: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        idempotent(**{"scope": None, **options})


#: What a view returns, and the status that is stored.
STATUSES = [
    (HttpResponse(status=402), 402),
    (SimpleNamespace(status_code="503"), 503),
    ((201, {"id": 5}), 201),
    (("201", {}), 200),
    ((), 200),
    ({"id": 5}, 200),
    (None, 200),
]


@pytest.mark.parametrize(("response", "status"), STATUSES)
def test_the_status_of_what_a_view_returns(response: Any, status: int) -> None:
    assert idempotency._status_of(response) == status


@of_each_kind
@pytest.mark.parametrize("status", [200, 499, 500, 503])
@pytest.mark.parametrize("keep_errors", [True, False])
def test_which_responses_are_kept(
    redis_locks: MemoryServer, kind: Any, status: int, keep_errors: bool
) -> None:
    view = kind(lambda request: HttpResponse(status=status), keep_errors=keep_errors)
    first, again = view(sent()), view(sent())
    assert (first.status_code, again.status_code) == (status, status)
    assert ("Idempotency-Replayed" in again.headers) is (status < 500 or keep_errors)


@pytest.mark.parametrize("length", [9, 10, 11])
def test_a_body_that_is_too_long_is_not_kept(redis_locks: MemoryServer, length: int) -> None:
    view = function(lambda request: HttpResponse(b"x" * length), max_body=10)
    assert view(sent()).status_code == 200
    assert view(sent()).status_code == (200 if length <= 10 else 409)
