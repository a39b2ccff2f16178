"""What type checkers know of a cache. ``make lint`` reads this, as ``types_of_locked``."""

from __future__ import annotations

from functools import partial
from typing import Any

from typing_extensions import Unpack, assert_type

from django_redis_lock import AsyncLock, Lock, cached
from django_redis_lock.cache import LockArguments, RedisCache, cache, caches


class Report:
    pass


def build() -> list[int]:
    return [1]


async def abuild() -> list[int]:
    return [1]


def load(keys: list[str]) -> dict[str, Report]:
    return {}


async def aload(keys: list[str]) -> dict[str, Report]:
    return {}


def untyped() -> Any:
    return 1


def lock_of(name: str, **options: Unpack[LockArguments]) -> Lock:
    return cache.lock(name, **options)


@cached("report-{year}", timeout=60)
def report(year: int) -> Report:
    return Report()


@cached("report-{year}", timeout=60)
async def areport(year: int) -> Report:
    return Report()


class Shop:
    pk = 7

    @cached("prices-{self.pk}-{year}", timeout=60)
    def prices(self, year: int) -> Report:
        return Report()

    @cached("prices-{self.pk}", timeout=60)
    async def aprices(self) -> Report:
        return Report()


async def check_methods(shop: Shop) -> None:
    assert_type(shop.prices(2024), Report)
    assert_type(Shop.prices(shop, 2024), Report)
    assert_type(shop.prices.refresh(shop, 2024), Report)
    assert_type(await shop.aprices(), Report)
    shop.prices.invalidate(shop, 2024)
    shop.prices("2024")  # type: ignore[arg-type]
    shop.prices.invalidate(2024)  # type: ignore[call-arg, arg-type]


async def check() -> None:
    assert_type(caches["locks"], RedisCache)
    assert_type(cache, RedisCache)
    assert_type(cache.get_or_set("report", build, timeout=300, stale=3600), list[int])
    assert_type(cache.get_or_set("report", lambda: 1.5), float)
    assert_type(cache.get_or_set("report", Report), Report)
    assert_type(cache.get_or_set("report", 5), int)
    assert_type(cache.get_or_set("report", untyped), Any)
    assert_type(cache.get_or_set("report", build, lambda value: 5.0), list[int])
    assert_type(await cache.aget_or_set("report", build, 300), list[int])
    assert_type(await cache.aget_or_set("report", abuild, 300), list[int])
    assert_type(await cache.aget_or_set("report", partial(abuild)), list[int])
    assert_type(await cache.aget_or_set("report", 5), int)
    assert_type(cache.compute("report", build), list[int])
    assert_type(await cache.acompute("report", abuild), list[int])
    assert_type(cache.get_or_set_many(["a"], load), dict[str, Report])
    assert_type(await cache.aget_or_set_many(["a"], aload), dict[str, Report])
    assert_type(await cache.aget_or_set_many(["a"], load), dict[str, Report])
    assert_type(cache.lock("import", blocking_timeout=10, label="prices"), Lock)
    assert_type(cache.alock("import", blocking_timeout=10, cancel_on_lost=True), AsyncLock)
    assert_type(cache.lock(["a", "b"], limit=5), Lock)
    assert_type(report(2024), Report)
    assert_type(report.refresh(2024), Report)
    assert_type(await areport.refresh(2024), Report)

    # mypy must refuse these: an ignore that is not needed would be an error.
    cache.lock("import", expire=3)  # type: ignore[call-arg]
    cache.lock("import", label=3)  # type: ignore[arg-type]
    cache.alock("import", ttl=3)  # type: ignore[call-arg]
    cache.get_or_set("report", build, ttl=3)  # type: ignore[call-overload]
    lock_of("import", lable="x")  # type: ignore[call-arg]
    report("2024")  # type: ignore[arg-type]
    report.invalidate(month=1)  # type: ignore[call-arg]
