"""``limit=`` where projects write it: ``cache.lock``, ``locked()``, ``run_locked``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from django.core.management import CommandError, call_command
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from django_redis_lock import LockNotAcquired, current_lock, locked
from django_redis_lock.contention import Conflict


@pytest.fixture(params=["default", "memory"])
def using(request: pytest.FixtureRequest, settings: Any) -> str:
    local = {"BACKEND": "django_redis_lock.cache.LocMemCache", "LOCATION": request.node.name}
    settings.CACHES = {**settings.CACHES, "memory": local}
    found: str = request.param
    return found


def hold(using: str, count: int = 2) -> list[Any]:
    """Take so many of two places."""
    locks = [caches[using].lock("export", limit=2) for _ in range(count)]
    assert all(lock.acquire(blocking=False) for lock in locks)
    return locks


def test_a_lock_of_a_cache(using: str) -> None:
    locks = hold(using)
    assert [lock.place for lock in locks] == [1, 2]
    one_more = caches[using].lock("export", limit=2)
    assert one_more.locked()
    assert not one_more.acquire(blocking=False)
    assert {held.owner.id for held in one_more.holders()} == {
        lock.holder().id for lock in locks
    } | {held.owner.id for held in locks[0].holders()}
    for lock in locks:
        lock.release()
    assert one_more.acquire(blocking=False)
    one_more.release()


def test_a_function(using: str) -> None:
    @locked("export", using=using, limit=2)
    def export() -> int:
        lock: Any = current_lock()
        return int(lock.place)

    @locked("export", using=using, limit=2)
    async def aexport() -> int:
        lock: Any = current_lock()
        return int(lock.place)

    [first] = hold(using, 1)
    assert export() == 2
    assert asyncio.run(aexport()) == 2
    [second] = hold(using, 1)
    with pytest.raises(LockNotAcquired, match="all 2 places of export are taken") as caught:
        export()
    assert caught.value.holder is not None
    with pytest.raises(LockNotAcquired), locked("export", using=using, limit=2):
        raise AssertionError("the body ran without the lock")
    first.release()
    assert asyncio.run(aexport()) == 1
    second.release()


def test_a_view_says_when_to_come_again(using: str) -> None:
    seen: list[Conflict] = []

    def note(conflict: Conflict, request: HttpRequest) -> HttpResponse:
        seen.append(conflict)
        return conflict.response(request)

    @locked("export", using=using, limit=2, on_conflict=note)
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse("done")

    locks = hold(using)
    response = view(RequestFactory().get("/"))
    assert response.status_code == 409
    assert int(response["Retry-After"]) >= 1
    assert (seen[0].limit, seen[0].name) == (2, "export")
    assert str(seen[0]).startswith("all 2 places of export are taken")
    locks[0].release()
    assert view(RequestFactory().get("/")).content == b"done"
    locks[1].release()


def test_run_locked(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--limit", "2", "--shell", "--", "echo $REDIS_LOCK_PLACE")
    [lock] = hold("default", 1)
    call_command("run_locked", "export", *words)
    assert capfd.readouterr().out == "2\n"
    others = hold("default", 1)
    with pytest.raises(CommandError, match="all 2 places of export are taken"):
        call_command("run_locked", "export", *words)
    lock.release()
    call_command("run_locked", "export", *words)
    assert capfd.readouterr().out == "1\n"
    others[0].release()
    with pytest.raises(CommandError, match="limit must be a whole number from 1 to 1000"):
        call_command("run_locked", "export", "--limit", "0", "--shell", "--", sys.executable)


def test_this_hosts_lock_without_redis_has_one_holder(settings: Any, tmp_path: Path) -> None:
    away = {"BACKEND": "django_redis_lock.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
    settings.CACHES = {**settings.CACHES, "away": away}
    settings.DJANGO_REDIS_LOCK = {"ON_REDIS_DOWN": "local", "LOCAL_LOCK_FOLDER": str(tmp_path)}
    one, two = (caches["away"].lock("export", limit=2) for _ in range(2))
    assert one.acquire(blocking=False)
    assert one.degraded == "local"
    assert one.locked()
    assert not two.acquire(blocking=False)
    assert two.locked()
    assert [held.owner.id for held in two.holders()] == [one.holder().id]
    one.release()
    assert two.acquire(blocking=False)
    two.release()
