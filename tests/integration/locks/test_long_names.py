"""Names and keys that visitors choose, of any length and in any number: the process must not keep
them. Every caller that takes a name or a key, for threads and for tasks."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from django.core.cache import caches
from django.test import override_settings

from django_redis_lock import AsyncLock, Lock, MultiLock, Redlock, locked, metrics
from django_redis_lock.cache import RedisCache
from django_redis_lock.decorators import cached
from django_redis_lock.events import MAX_CACHED, MAX_CACHED_LENGTH, group_of
from django_redis_lock.keeper import keeper
from django_redis_lock.protocol import milliseconds
from django_redis_lock.protocol.keys import lock_keys
from django_redis_lock.protocol.lock_scripts import RENEW
from django_redis_lock.protocol.script import Call
from django_redis_lock.transport import pack
from tests.holding import settle
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer

LENGTH, NAMES = 100_000, 30
#: Bytes by which the process may grow: a third of the names, each of which was kept several times.
#: The rest is room for what comes with a server that stands still: new connections, texts in logs.
GROWTH = NAMES * LENGTH // 3


@pytest.fixture
def cache(redis_server: RedisServer) -> Iterator[RedisCache]:
    backend = "django_redis_lock.cache.RedisCache"
    alias = {"BACKEND": backend, "LOCATION": redis_server.url, "OPTIONS": {"LOCK_METRICS": True}}
    with override_settings(CACHES={"default": alias}):
        yield caches["default"]


class Callers:
    """Each uses one name, and leaves nothing in Redis that is worth keeping."""

    def __init__(self, cache: RedisCache, client: redis.Redis, url: str) -> None:
        self.cache, self.client, self.url = cache, client, url

    def lock(self, name: str) -> None:
        with Lock(self.client, name, 30):
            assert not Lock(self.client, name, 30).acquire(blocking_timeout=0.001)

    def lock_with_bytes_and_options(self, name: str) -> None:
        options: Any = {"label": name, "id": name, "renew": True}
        with Lock(self.client, name.encode(), 30, **options) as lock:
            assert lock.holder()
            assert lock.owned()
            lock.extend(10)

    def async_lock(self, name: str) -> None:
        async def take() -> None:
            client = redis.asyncio.Redis.from_url(self.url)
            async with client, AsyncLock(client, name, 30):
                other = AsyncLock(client, name, 30)
                assert not await other.acquire(blocking_timeout=0.001)

        asyncio.run(take())

    def lock_of_a_cache(self, name: str) -> None:
        with self.cache.lock(name, timeout=30):
            assert not self.cache.lock(name).acquire(blocking=False)

    def places(self, name: str) -> None:
        with Lock(self.client, name, 30, limit=3), Lock(self.client, name, 30, limit=3):
            pass

    def several_names(self, name: str) -> None:
        with MultiLock(self.client, [name, name + "2", "short"], 30):
            pass

    def redlock(self, name: str) -> None:
        port = self.client.connection_pool.connection_kwargs["port"]
        clients = [redis.Redis(port=port, db=db) for db in (1, 2, 3)]
        with Redlock(clients, name, 30):
            pass

    def get_or_set(self, name: str) -> None:
        for _ in range(2):
            assert self.cache.get_or_set(name, lambda: 1, 30, stale=10) == 1
        self.cache.delete(name)

    def aget_or_set(self, name: str) -> None:
        assert asyncio.run(self.cache.aget_or_set(name, lambda: 1, 30)) == 1
        self.cache.delete(name)

    def get_or_set_many(self, name: str) -> None:
        keys = [name, name + "2"]
        assert self.cache.get_or_set_many(keys, lambda keys: dict.fromkeys(keys, 1), 30)
        self.cache.delete_many(keys)

    def cached(self, name: str) -> None:
        @cached("f-{name}", timeout=30)
        def compute(name: str) -> int:
            return 1

        assert compute(name) == 1

    def locked(self, name: str) -> None:
        @locked("job-{name}", timeout=30)
        def work(name: str) -> int:
            return 1

        assert work(name) == 1


CALLERS = [name for name in vars(Callers) if not name.startswith("_")]


def memory() -> int:
    """Bytes in use, once the keeper has done what was to be done."""
    settle()
    metrics.flush()
    until(lambda: not keeper().under_way())
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.sample(7)
@pytest.mark.parametrize("caller", CALLERS)
def test_long_names_do_not_stay(
    cache: RedisCache, client: redis.Redis, redis_server: RedisServer, caller: str
) -> None:
    use = getattr(Callers(cache, client, redis_server.url), caller)
    expect_no_growth(use)


def expect_no_growth(use: Callable[[str], Any], clean_up: Callable[[], Any] = int) -> None:
    """What is kept of names makes the process grow each time; what other threads load, once."""
    names = (f"{number:05}" + "n" * LENGTH for number in itertools.count())

    def grows() -> bool:
        before = memory()
        for name in itertools.islice(names, NAMES):
            use(name)
        clean_up()
        ends = time.monotonic() + PATIENCE / 3
        while time.monotonic() < ends:
            if memory() - before < GROWTH:
                return False
            time.sleep(0.1)  # The keeper drops what it has planned when that comes due.
        return True

    use("first")
    tracemalloc.start()
    try:
        assert not (grows() and grows() and grows())
    finally:
        tracemalloc.stop()


@pytest.mark.sample(0)
def test_long_names_in_memory_do_not_stay() -> None:
    """What the server in memory keeps for a name it would keep in Redis, too."""
    backend = "django_redis_lock.cache.LocMemCache"
    with override_settings(CACHES={"default": {"BACKEND": backend, "LOCATION": "long"}}):
        cache: Any = caches["default"]
        client = cache.client.get_client()
        callers = Callers(cache, client, "")

        def use(name: str) -> None:
            callers.get_or_set(name)
            callers.lock_of_a_cache(name)
            callers.cached(name)

        expect_no_growth(use, client.flushdb)


def caches_of_the_package() -> Iterator[Any]:
    for name, module in sorted(sys.modules.items()):
        if name.startswith("django_redis_lock"):
            for each in [*vars(module).values()]:  # A name that is first used here may be added.
                if callable(getattr(each, "cache_info", None)) and not isinstance(each, type):
                    yield each.cache_info.__self__


def test_many_names_do_not_stay(cache: RedisCache, client: redis.Redis) -> None:
    """Short ones, more than are kept: each cache has a bound in entries."""

    for number in range(4 * MAX_CACHED):
        name = f"visitor-{number}-{'x' * (number % (2 * MAX_CACHED_LENGTH))}"
        keys = lock_keys(name.encode())
        keys.at_place(2)
        group_of(name)
        milliseconds(number / 7)
        if number % 10 == 0:
            pack(Call(RENEW, tuple(keys), (name, number, b"token")))
    sizes = [(each, each.cache_info()) for each in caches_of_the_package()]
    assert len(sizes) > 10
    for each, info in sizes:
        assert info.currsize <= MAX_CACHED, each
        assert info.maxsize is not None or info.currsize < 200, each
    held = sum(map(_bytes_of_entries, (each for each, _ in sizes)))
    assert held < 20_000_000


def _bytes_of_entries(cached: Any) -> int:
    """Of the texts and bytes that the cache leads to."""
    seen: set[int] = set()

    def size(of: Any, depth: int = 0) -> int:
        if id(of) in seen or depth > 6:
            return 0
        seen.add(id(of))
        if isinstance(of, (str, bytes)):
            return len(of)
        if isinstance(of, (tuple, list, dict)):
            return sum(size(each, depth + 1) for each in gc.get_referents(of))
        return 0

    return sum(size(each) for each in gc.get_referents(cached))
