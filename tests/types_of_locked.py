"""What type checkers know of what ``locked()`` decorates. ``make lint`` reads this, with mypy; what
must be refused is marked by an ignored error, which mypy misses if it does not occur."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views import View
from typing_extensions import assert_type

from django_redis_lock import AsyncLock, Lock, LockNotAcquired, current_lock, locked
from django_redis_lock.contention import raise_error, redirect_to, skip


@locked
def bare(pk: int, size: str = "") -> float:
    return 1.0


@locked("work-{pk}", timeout=5, blocking=True, blocking_timeout=1.5, release="now")
def named(pk: int, *, size: str = "") -> float:
    return 1.0


@locked(key=lambda pk: f"work-{pk}")
async def awaited(pk: int) -> list[str]:
    return []


@locked("work", default=None)
def or_none(pk: int) -> float:
    return 1.0


@locked("work", default=0)
async def awaited_or_zero(pk: int) -> str:
    return ""


@locked("work", on_conflict=skip)
def skipped(pk: int) -> float:
    return 1.0


@locked("work", on_conflict=skip)
async def awaited_and_skipped(pk: int) -> str:
    return ""


@locked("work", on_conflict=skip)
def view_skipped(request: HttpRequest, pk: int) -> HttpResponse:
    return HttpResponse()


@locked("work", on_conflict=redirect_to("home"))
def redirected(request: HttpRequest, pk: int) -> JsonResponse:
    return JsonResponse({})


@locked("work", on_conflict=raise_error)
def raised(pk: int) -> float:
    return 1.0


@locked("work", on_conflict=redirect_to("home"))
class Redirected(View):
    number = 7


@locked("view-{pk}")
def view(request: HttpRequest, pk: int) -> HttpResponse:
    return HttpResponse()


@locked
class Page(View):
    number = 7


@locked("nightly", exit_code=0, on_lost="terminate")
class Command(BaseCommand):
    number = 7


class Shop:
    @locked("shop-{self.number}")
    def close(self, at: int) -> bytes:
        return b""

    @classmethod
    @locked("shop")
    def all(cls) -> list[Shop]:
        return []


async def check() -> None:
    assert_type(bare(1, size="x"), float)
    assert_type(named(1, size="x"), float)
    assert_type(await awaited(1), list[str])
    assert_type(or_none(1), float | None)
    assert_type(await awaited_or_zero(1), str | int)
    assert_type(view(HttpRequest(), pk=1), HttpResponse)
    assert_type(Shop().close(at=1), bytes)
    assert_type(Shop.all(), list[Shop])
    assert_type(Page().number, int)
    assert_type(Command().number, int)
    with locked("work") as lock:
        assert_type(lock, Lock)
        assert_type(current_lock().fence, int | None)
        current_lock().extend(5)
        current_lock().min_hold = 0
        current_lock().ensure_held()
    async with locked("work") as alock:
        assert_type(alock, AsyncLock)
        await current_lock().extend(5)
    assert_type(skipped(1), float | None)
    assert_type(await awaited_and_skipped(1), str | None)
    assert_type(view_skipped(HttpRequest(), pk=1), HttpResponse)
    assert_type(redirected(HttpRequest(), pk=1), JsonResponse | HttpResponse)
    assert_type(raised(1), float)
    assert_type(Redirected().number, int)
    try:
        bare(1)
    except LockNotAcquired as error:
        assert_type(error.lock_name, str | None)

    # mypy must refuse these: an ignore that is not needed would be an error.
    bare("1")  # type: ignore[arg-type]
    named(1, length=2)  # type: ignore[call-arg]
    or_none("1")  # type: ignore[arg-type]
    Shop().close()  # type: ignore[call-arg]
    locked("work", expire=3)  # type: ignore[call-overload]
    locked("work", timeout="3")  # type: ignore[call-overload]
    locked("work", release="later")  # type: ignore[call-overload]


def of_any_type(function: Any) -> Any:
    return locked("work")(function)
