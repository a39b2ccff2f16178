"""The road that every site takes, walked with an installation that lacks one optional part.

``python tests/integration/core_road.py PART``, with the package on the path, and ``REDIS_URL``.
What needs PART must say so in one sentence; everything else must work.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import django
from django.conf import settings
from django.core.cache import caches
from django.http import HttpRequest, HttpResponse

import django_redis_lock

CACHE = {
    "BACKEND": "django_redis_lock.cache.RedisCache",
    "LOCATION": os.environ.get("REDIS_URL", ""),
}
LOCAL = {"BACKEND": "django_redis_lock.cache.LocMemCache", "LOCATION": "one"}


def set_up() -> Any:
    settings.configure(
        SECRET_KEY="secret",
        INSTALLED_APPS=["django.contrib.contenttypes", "django_redis_lock"],
        CACHES={"default": CACHE, "b": CACHE, "c": CACHE, "local": LOCAL},
    )
    django.setup()
    return caches["default"]


def locks_of_threads(cache: Any) -> None:
    with cache.lock("road", timeout=5) as lock:
        assert lock.owned()
        assert lock.locked()
        assert lock.fence
        assert not cache.lock("road", blocking=False).acquire()
        waiter = cache.lock("road", blocking_timeout=20, thread_local=False)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(waiter.acquire)
            lock.release()
            assert waiting.result()
        waiter.release()
        assert lock.acquire()
    assert not lock.locked()
    with cache.lock("road", reentrant=True), cache.lock("road", reentrant=True):
        pass


def locks_of_tasks(cache: Any) -> None:
    async def take() -> None:
        async with cache.alock("road") as lock:
            assert await lock.owned()
            waiting = asyncio.ensure_future(cache.alock("road", blocking_timeout=20).acquire())
            await asyncio.sleep(0)
        assert await waiting
        assert await cache.alock("road").reset()

    asyncio.run(take())


def values(cache: Any) -> None:
    started, computed = threading.Barrier(4), []

    def compute() -> int:
        computed.append(1)
        return 42

    def get() -> Any:
        started.wait()
        return cache.get_or_set("value", compute, 60)

    with ThreadPoolExecutor(4) as pool:
        assert [f.result() for f in [pool.submit(get) for _ in range(4)]] == [42] * 4
    assert computed == [1]
    assert cache.get_or_set_many(["value", "more"], lambda keys: dict.fromkeys(keys, 1)) == {
        "value": 42,
        "more": 1,
    }
    assert asyncio.run(cache.aget_or_set("value", 0)) == 42
    cache.set("value", 1)
    assert cache.delete("value")


def decorated(cache: Any) -> None:
    @django_redis_lock.locked("decorated")
    def work() -> str:
        return "done"

    @django_redis_lock.cached("square-{n}")
    def square(n: int) -> int:
        return n * n

    assert work() == "done"
    assert square(3) == square(3) == 9
    with cache.lock("decorated"):
        try:
            work()
        except django_redis_lock.LockNotAcquired:
            return
    raise AssertionError("it ran although its lock was taken")


def page() -> HttpResponse:
    return django_redis_lock.cached_page(60)(lambda request: HttpResponse("page"))(HttpRequest())


#: What needs each part.
NEEDS: dict[str, Callable[[Any], Any]] = {
    "debug_toolbar": lambda cache: import_module("django_redis_lock.debug_toolbar").LocksPanel,
    "exporters": lambda cache: import_module("django_redis_lock.exporters").load,
    "fallback": lambda cache: cache.lock("part", on_redis_down="run"),
    "idempotency": lambda cache: django_redis_lock.idempotent,
    "limit": lambda cache: cache.lock("part", limit=2).acquire(),
    "locmem": lambda cache: caches["local"],
    "metrics": lambda cache: import_module("django_redis_lock.metrics").flush,
    "pages": lambda cache: page(),
    "redlock": lambda cache: cache.lock("part", using=["default", "b", "c"]),
    "several_names": lambda cache: cache.lock(["part", "whole"]),
    "testing": lambda cache: import_module("django_redis_lock.testing").override,
    "topology": lambda cache: import_module("django_redis_lock.clients").ClusterClient,
    "unique_tasks": lambda cache: django_redis_lock.unique_task,
}


def main(missing: str) -> None:
    cache = set_up()
    for walk in (locks_of_threads, locks_of_tasks, values, decorated):
        walk(cache)
    if missing not in NEEDS:
        return
    try:
        NEEDS[missing](cache)
        said = "nothing"
    except Exception as error:
        said = str(error)
    if f"contrib.{missing}" not in said or "\n" in said:
        raise AssertionError(f"contrib.{missing} is not there, and what needs it says: {said}")


if __name__ == "__main__":
    main(sys.argv[1])
