"""Values of data that a database transaction changes are invalidated when it is committed: not
before, when a reader would store the old data again, and not if it is rolled back."""

# What fails in an atomic block fails at its end.
# ruff: noqa: PT012

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from asgiref.sync import async_to_sync, sync_to_async
from django.core.cache import caches
from django.db import connections, transaction
from django.test import TestCase
from django_redis.exceptions import ConnectionInterrupted

from django_redis_lock import cached
from tests.processes import PATIENCE
from tests.redis_server import RedisServer
from tests.support.databases import accounts, balance, execute, in_test_case
from tests.support.values import Asking

BACKENDS = ("RedisCache", "LocMemCache")


@pytest.fixture(params=BACKENDS)
def cache(
    request: Any, tmp_path: Path, django_db_blocker: Any, settings: Any, redis_server: RedisServer
) -> Iterator[Any]:
    """With two databases in which an account holds nothing."""
    redis_server.flush()
    location = redis_server.url if request.param == "RedisCache" else str(tmp_path)
    backend = f"django_redis_lock.cache.{request.param}"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": location}}
    with django_db_blocker.unblock(), accounts(tmp_path):
        yield caches["default"]
    caches.close_all()


@cached("account-{number}", timeout=600, stale=600)
def account(number: int) -> int:
    return balance()


@cached("aaccount-{number}", timeout=600, stale=600)
async def aaccount(number: int) -> int:
    return await sync_to_async(balance)()


class Way(NamedTuple):
    """How ``run`` invalidates ``key``, for a cache and the alias of a database. ``left``: what is
    at the key afterwards."""

    run: Callable[[Any, str], Any]
    key: str = "key"
    left: Any = None


WAYS: dict[str, Way] = {
    "delete": Way(lambda c, db: c.on_commit(db).delete("key")),
    "delete_many": Way(lambda c, db: c.on_commit(db).delete_many(iter(["key", "other"]))),
    "mark_stale": Way(lambda c, db: c.on_commit(db).mark_stale("key", stale=60), left="stale"),
    "mark_stale_many": Way(
        lambda c, db: c.on_commit(db).mark_stale_many(["key"], stale=60), left="stale"
    ),
    "version": Way(lambda c, db: c.on_commit(db).delete("key", version=1)),
    "invalidate": Way(lambda c, db: account.on_commit(db).invalidate(7), "account-%(int)7"),
    "mark_stale of a function": Way(
        lambda c, db: account.on_commit(db).mark_stale(number=7), "account-%(int)7", "stale"
    ),
    "refresh": Way(lambda c, db: account.on_commit(db).refresh(7), "account-%(int)7", 1),
    "adelete": Way(lambda c, db: async_to_sync(c.on_commit(db).adelete)("key")),
    "adelete_many": Way(lambda c, db: async_to_sync(c.on_commit(db).adelete_many)(["key"])),
    "amark_stale": Way(
        lambda c, db: async_to_sync(c.on_commit(db).amark_stale)("key", stale=60), left="stale"
    ),
    "amark_stale_many": Way(
        lambda c, db: async_to_sync(c.on_commit(db).amark_stale_many)(["key"], stale=60),
        left="stale",
    ),
    "ainvalidate": Way(
        lambda c, db: async_to_sync(aaccount.on_commit(db).invalidate)(7), "aaccount-%(int)7"
    ),
    "arefresh": Way(
        lambda c, db: async_to_sync(aaccount.on_commit(db).refresh)(7), "aaccount-%(int)7", 1
    ),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def put(cache: Any, way: Way) -> None:
    for key in (way.key, "other"):
        cache.set(key, "old", 6000)


def is_old(cache: Any, way: Way) -> bool:
    """Whether nothing has been done yet."""
    return bool(cache.get(way.key) == "old" and cache.ttl(way.key) > 600)


def is_done(cache: Any, way: Way) -> bool:
    if way.left == "stale":
        return bool(cache.get(way.key) == "old" and cache.ttl(way.key) <= 600)
    return bool(cache.get(way.key) == way.left)


def change() -> None:
    execute("UPDATE account SET balance = 1")


@each_way
def test_at_the_commit(cache: Any, way: Way) -> None:
    put(cache, way)
    with transaction.atomic("shop"):
        change()
        assert way.run(cache, "shop") is None
        assert is_old(cache, way)
        with transaction.atomic("shop"):
            way.run(cache, "shop")
        assert is_old(cache, way)
    assert is_done(cache, way)


@pytest.mark.sample(3)
@each_way
def test_a_rollback(cache: Any, way: Way) -> None:
    put(cache, way)
    with pytest.raises(LookupError), transaction.atomic("shop"):
        change()
        way.run(cache, "shop")
        raise LookupError
    assert is_old(cache, way)
    with transaction.atomic("shop"), pytest.raises(LookupError), transaction.atomic("shop"):
        way.run(cache, "shop")
        raise LookupError
    assert is_old(cache, way)


@pytest.mark.sample(3)
@each_way
def test_each_database_has_its_own_transactions(cache: Any, way: Way) -> None:
    put(cache, way)
    with transaction.atomic("till"):
        with transaction.atomic("shop"):
            change()
            way.run(cache, "till")
        assert is_old(cache, way)
    assert is_done(cache, way)
    put(cache, way)
    with transaction.atomic("till"):
        way.run(cache, "shop")  # Where none is open, at once.
        assert is_done(cache, way)


def test_in_tests(cache: Any) -> None:
    seen: list[Any] = []

    def body(case: TestCase) -> None:
        put(cache, WAYS["delete"])
        with case.captureOnCommitCallbacks(using="shop", execute=True) as callbacks:
            cache.on_commit("shop").delete("key")
            account.on_commit("shop").refresh(3)
            seen.append(cache.get("key"))
        seen.extend([cache.get("key"), cache.get("account-%(int)3"), len(callbacks)])

    in_test_case(body)
    assert seen == ["old", None, 0, 2]


def test_a_task(cache: Any) -> None:
    """The transaction is in Django's thread for synchronous code."""

    async def invalidate() -> None:
        cache.set("key", "old")
        await cache.on_commit("shop").adelete("key")
        assert await aaccount.on_commit("shop").refresh(7) is None
        assert cache.get("aaccount-%(int)7") == 0

    asyncio.run(invalidate())
    assert cache.get("key") is None


# -- readers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_a_reader_of_the_old_data_stores_nothing_that_stays(cache: Any, late: bool) -> None:
    """It has read before the commit, and stores before it, or after."""
    read, store = threading.Event(), threading.Event()

    def slow() -> int:
        found = balance()
        read.set()
        assert store.wait(PATIENCE)
        return found

    with transaction.atomic("shop"):
        change()
        cache.on_commit("shop").delete("account")
        reader = Asking(cache.get_or_set, "account", slow, 600)
        assert read.wait(PATIENCE)
        if not late:
            store.set()
            assert reader.found() == 0
            assert cache.get("account") == 0
    store.set()
    assert reader.found() == 0
    assert cache.get("account") is None
    assert cache.get_or_set("account", balance, 600) == 1


# -- arguments, keys and errors --------------------------------------------------------------------


def test_wrong_arguments_are_refused_at_the_call(cache: Any) -> None:
    with transaction.atomic("shop"):
        for call, error in (
            (lambda: cache.on_commit("shop").mark_stale("key"), ValueError),
            (lambda: cache.on_commit("shop").mark_stale("key", stale="x"), TypeError),
            (lambda: cache.on_commit("shop").delete("x", "lock:1"), ValueError),
            (lambda: account.on_commit("shop").invalidate(), TypeError),
            (lambda: account.on_commit("shop").refresh(other=1), TypeError),
            (lambda: cache.on_commit("nowhere").delete("key"), Exception),
        ):
            with pytest.raises(error):
                call()
        assert not connections["shop"].run_on_commit


@pytest.mark.parametrize("robust", [False, True])
def test_redis_is_down_at_the_commit(
    cache: Any, settings: Any, own_server: RedisServer, robust: bool
) -> None:
    backend = "django_redis_lock.cache.RedisCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": own_server.url}}
    after: list[int] = []

    def commit() -> None:
        with transaction.atomic("shop"):
            change()
            caches["default"].on_commit("shop", robust=robust).delete("key")
            transaction.on_commit(lambda: after.append(1), using="shop")
            own_server.stop()

    if robust:
        commit()
    else:
        with pytest.raises((ConnectionInterrupted, redis.RedisError)):
            commit()
    assert balance() == 1
    assert after == [1] * robust
