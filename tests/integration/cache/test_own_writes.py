"""A write by the computation of a value itself, such as that of a signal receiver which deletes the
key, is older than its result: the result is stored all the same, and followers wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from django_redis_lock.cache import LocMemCache, RedisCache
from django_redis_lock.cache.connections import flight_ending
from django_redis_lock.decorators import cached
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.background import Background
from tests.support.values import TaskProducer
from tests.support.writes import REDIS_WRITES, STALE_WRITES, WRITES

pytestmark = pytest.mark.invariant("C6")

Write = Callable[[Any], Any]
OLD = 5

#: What a computation does to its own key.
OWN: dict[str, Write] = {
    **{name: write for name, (write, _) in {**WRITES, **REDIS_WRITES, **STALE_WRITES}.items()},
    "mark_stale": lambda c: c.mark_stale("report", stale=5),
    "mark_stale_many": lambda c: c.mark_stale_many(["a", "report"], stale=5),
    "clear step by step": lambda c: (c.lock("x", timeout=5).acquire(), c.clear()),
    "for ever": lambda c: c.touch("report", None),
    "a pipeline": lambda c: c.set_many({f"k{n}": n for n in range(20)} | {"report": 1}),
    "incr_version away": lambda c: (c.set("report", 1), c.incr_version("report")),
}


def computed_by(cache: Any, way: str, do: Callable[[], Any]) -> Callable[[], Any]:
    """Gets the report, which a function computes that first does ``do``."""

    def report() -> str:
        do()
        return "computed"

    async def areport() -> str:
        do()  # In the event loop, as code that is not aware of it.
        return "computed"

    async def in_thread() -> str:
        await sync_to_async(do)()
        return "computed"

    @cached(key=lambda: "report", timeout=60, using="default")
    def decorated() -> str:
        return report()

    ways: dict[str, Callable[[], Any]] = {
        "get_or_set": lambda: cache.get_or_set("report", report, 60),
        "stale": lambda: cache.get_or_set("report", report, 60, stale=600),
        "compute": lambda: cache.compute("report", report, 60),
        "many": lambda: cache.get_or_set_many(
            ["a", "report"], lambda keys: (do(), dict.fromkeys(keys, "computed"))[1], 60
        )["report"],
        "nested": lambda: cache.get_or_set(
            "report", lambda: cache.get_or_set("inner", report, 0) and "computed", 60
        ),
        "aget_or_set": lambda: asyncio.run(cache.aget_or_set("report", areport, 60)),
        "sync_to_async": lambda: asyncio.run(cache.aget_or_set("report", in_thread, 60)),
        "plain function": lambda: asyncio.run(cache.aget_or_set("report", report, 60)),
        "async_to_sync": lambda: async_to_sync(cache.aget_or_set)("report", areport, 60),
        "acompute": lambda: asyncio.run(cache.acompute("report", in_thread, 60)),
        "amany": lambda: asyncio.run(
            cache.aget_or_set_many(
                ["a", "report"], lambda keys: (do(), dict.fromkeys(keys, "computed"))[1], 60
            )
        )["report"],
    }
    return ways[way]


WAYS = [
    *("get_or_set", "stale", "compute", "many", "nested", "aget_or_set", "sync_to_async"),
    *("plain function", "async_to_sync", "acompute", "amany"),
]


NUMBERS = {"incr", "incr beyond", "decr"}
MISSING = [w for w in OWN if w not in NUMBERS]
#: Every write in a few ways, every way with a few writes; and whether there is an old value.
CASES = [
    *((way, write, False) for way in ("get_or_set", "sync_to_async") for write in MISSING),
    *(("stale", write, True) for write in OWN),
    *((way, write, False) for way in WAYS for write in ("delete", "set", "clear", "touch for 0")),
    *((way, write, True) for way in ("compute", "acompute") for write in ("delete", "incr")),
]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("way", "write", "old"), dict.fromkeys(CASES))
def test_the_result_is_stored(cache: Any, way: str, write: str, old: bool) -> None:
    calls: list[int] = []
    if old:
        cache.set("report", OLD, 60 if way == "stale" else None)

    def do() -> None:
        calls.append(1)
        OWN[write](cache)

    get = computed_by(cache, way, do)
    assert get() == "computed"
    assert cache.get("report") == "computed"
    if "compute" not in way:
        assert get() == "computed"
        assert len(calls) == 1


def test_followers_wait_for_it(redis_server: RedisServer) -> None:
    cache, other = RedisCache(redis_server.url, {}), RedisCache(redis_server.url, {})
    written, finish, calls = threading.Event(), threading.Event(), []

    def report() -> str:
        calls.append(1)
        cache.delete("report")
        written.set()
        assert finish.wait(30)
        return "computed"

    leader = Background(lambda: cache.get_or_set("report", report, 60))
    assert written.wait(30)
    follower = Background(lambda: other.get_or_set("report", report, 60))
    finish.set()
    assert leader.result() == follower.result() == "computed"
    assert len(calls) == 1


def test_a_write_by_another_thread_wins_all_the_same(cache: Any) -> None:
    def report() -> str:
        cache.delete("report")
        thread = threading.Thread(target=lambda: cache.set("report", "newer"))
        thread.start()
        thread.join()
        return "computed"

    assert cache.get_or_set("report", report, 60) == "computed"
    assert cache.get("report") == "newer"


def test_a_write_after_the_computation_is_not_its_own(cache: Any) -> None:
    """A task that it has started goes on after it."""

    async def main() -> Any:
        tasks = []

        async def late() -> None:
            await slow.begun.wait()
            await cache.adelete("report")

        async def report() -> str:
            tasks.append(asyncio.ensure_future(late()))
            return "older"

        slow = TaskProducer()
        await cache.aget_or_set("report", report, 0)
        computing = asyncio.ensure_future(cache.aget_or_set("report", slow, 60))
        await slow.begun.wait()
        await asyncio.gather(*tasks)
        slow.finish.set()
        await computing
        return await cache.aget("report")

    assert asyncio.run(main()) is None


def test_a_write_by_plain_django_redis_wins_over_it(redis_server: RedisServer) -> None:
    """After the computation's own delete, too."""
    cache = RedisCache(redis_server.url, {})
    client = cache.client.get_client(write=True)

    def report() -> str:
        cache.delete("report")
        client.set(":1:report", 7)
        return "computed"

    assert cache.get_or_set("report", report, 60) == "computed"
    assert cache.get("report") == 7


def test_a_callers_own_client(redis_server: RedisServer) -> None:
    cache = RedisCache(redis_server.url, {})
    client = cache.client.get_client(write=True)

    def report() -> str:
        with client.pipeline() as pipeline:
            flight_ending(pipeline).delete(":1:report")
            flight_ending(pipeline).set(":1:report", 1)
            pipeline.execute()
        cache.delete("report", client=client)
        return "computed"

    assert cache.get_or_set("report", report, 60) == "computed"
    assert cache.get("report") == "computed"


def test_in_the_background(cache: Any) -> None:
    cache.set("report", OLD, 60)

    def report() -> str:
        cache.delete("report")
        return "computed"

    assert cache.get_or_set("report", report, 60, stale=600, background=True) == OLD
    until(lambda: cache.get("report") == "computed")


def test_a_delete_of_the_same_key_in_another_cache(cache: Any) -> None:
    other = LocMemCache("another", {})
    cache.set("report", OLD, 60)

    def report() -> str:
        other.delete("report")
        other.delete_pattern("*")
        return "computed"

    assert cache.get_or_set("report", report, 60, stale=600) == "computed"
    assert cache.get("report") == "computed"
