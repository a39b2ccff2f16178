"""``aget_or_set``: one computation among tasks, threads and processes, and no loop held up."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync, sync_to_async

from django_redis_lock import LockError, LockNotAcquired, events
from django_redis_lock.cache import RedisCache
from django_redis_lock.protocol.keys import flight_key
from django_redis_lock.singleflight import tasks
from django_redis_lock.singleflight.flight import in_flight
from django_redis_lock.singleflight.scripts import END_FLIGHT, STORE
from tests.lanes import examples
from tests.processes import PATIENCE, Link, in_threads, processes, until
from tests.redis_server import RedisServer
from tests.support.background import Background
from tests.support.values import (
    KEY,
    TERMS,
    Asking,
    Broken,
    Producer,
    TaskProducer,
    age,
    blocked,
    elsewhere,
    lands_elsewhere,
    make,
    renewals,
)

who: ContextVar[str] = ContextVar("who", default="nobody")


def run(work: Awaitable[Any]) -> Any:
    """Run ``work`` in a loop of its own; no test takes longer than PATIENCE."""

    async def patiently() -> Any:
        return await asyncio.wait_for(work, PATIENCE)

    return asyncio.run(patiently())


async def happens(condition: Callable[[], Any]) -> None:
    """``until`` for a task."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), PATIENCE)


# -- values and producers ----------------------------------------------------------------------


async def coroutine_function(value: int = 5) -> int:
    await asyncio.sleep(0)
    return value


class Callables:
    async def __call__(self) -> int:
        return 5

    async def method(self) -> int:
        return 5


@pytest.mark.parametrize(
    "default",
    [
        coroutine_function,
        functools.partial(coroutine_function, 5),
        lambda: coroutine_function(5),
        lambda: 5,
        functools.partial(int, "5"),
        Callables(),
        Callables().method,
        5,
    ],
    ids=["coroutine", "partial", "lambda", "plain", "type", "callable", "method", "value"],
)
def test_whatever_gives_the_value(cache: RedisCache, default: Any) -> None:
    assert run(cache.aget_or_set("report", default)) == 5
    assert cache.get("report") == 5


def test_a_plain_function_does_not_hold_up_the_loop_and_has_the_callers_context(
    cache: RedisCache,
) -> None:
    async def ask() -> Any:
        producer = Producer()
        producer.finish.clear()
        who.set("somebody")
        task = asyncio.ensure_future(cache.aget_or_set("report", lambda: producer() + who.get()))
        # Did the function run in the loop's thread, none of this could happen.
        await happens(producer.begun.is_set)
        producer.finish.set()
        return await task

    assert run(ask()) == "computedsomebody"


@pytest.mark.parametrize("default", [5, list], ids=["value", "list"])
def test_what_waits_for_nothing_needs_no_other_thread(cache: RedisCache, default: Any) -> None:
    async def ask() -> Any:
        busy = threading.Event()
        task = asyncio.ensure_future(sync_to_async(busy.wait)(PATIENCE))
        try:
            return await asyncio.wait_for(cache.aget_or_set("report", default), PATIENCE / 2)
        finally:
            busy.set()
            await task

    assert run(ask()) == (5 if default == 5 else [])


@pytest.mark.on_redis
def test_a_follower_does_not_hold_up_the_loop_nor_ask_again_and_again(
    cache: RedisCache, client: redis.Redis
) -> None:
    async def ask() -> Any:
        elsewhere(client)
        client.config_resetstat()
        task = asyncio.ensure_future(cache.aget_or_set("report", 1))
        await happens(lambda: blocked(client) == 1)
        await asyncio.sleep(0.3)
        lands_elsewhere(client, 5)
        return await task

    assert run(ask()) == 5
    assert client.info("commandstats")["cmdstat_xread"]["calls"] <= 2


# -- one computation ---------------------------------------------------------------------------


def test_tasks_of_a_loop_share_one_computation_and_have_copies(cache: RedisCache) -> None:
    async def ask() -> list[Any]:
        producer = TaskProducer({"rows": []})
        tasks = [asyncio.ensure_future(cache.aget_or_set("report", producer)) for _ in range(20)]
        await producer.begun.wait()
        producer.finish.set()
        found = await asyncio.gather(*tasks)
        assert producer.calls == 1
        return found

    found = run(ask())
    assert found == [{"rows": []}] * 20
    assert len({id(each["rows"]) for each in found}) == 20


@pytest.mark.on_redis
def test_a_crowd_of_tasks_needs_few_connections(cache: RedisCache, client: redis.Redis) -> None:
    async def ask() -> None:
        slow = TaskProducer()
        before = int(client.info("clients")["connected_clients"])
        tasks = [asyncio.ensure_future(cache.aget_or_set("report", slow)) for _ in range(400)]
        await slow.begun.wait()
        tasks += [asyncio.ensure_future(cache.aget_or_set("report", slow)) for _ in range(400)]
        await asyncio.sleep(0)
        slow.finish.set()
        assert await asyncio.gather(*tasks) == ["computed"] * 800
        found = [asyncio.ensure_future(cache.aget_or_set("report", slow)) for _ in range(400)]
        assert await asyncio.gather(*found) == ["computed"] * 400
        assert slow.calls == 1
        assert int(client.info("clients")["connected_clients"]) - before <= 4

    run(ask())


@pytest.mark.on_redis
def test_a_hit_is_one_read_and_a_miss_needs_one_script(
    cache: RedisCache, client: redis.Redis
) -> None:
    async def ask() -> None:
        await cache.aget_or_set("warm", 1)
        for scripts in (1, 0):
            client.config_resetstat()
            await cache.aget_or_set("report", 1)
            stats = client.info("commandstats")
            assert stats.get("cmdstat_evalsha", {"calls": 0})["calls"] == scripts
        assert stats["cmdstat_get"]["calls"] == 1

    run(ask())


def ask_somehow(link: Link, url: str, kind: str) -> list[Any]:
    """Ask for the report four times at once, in tasks, in threads, or in a loop for each thread."""
    cache = RedisCache(url, {})

    def compute() -> Any:
        link.say("computing")
        return link.hear()

    async def ask(times: int) -> list[Any]:
        return await asyncio.gather(*(cache.aget_or_set("report", compute) for _ in range(times)))

    if kind == "tasks":
        return asyncio.run(ask(4))
    if kind == "threads":
        return in_threads(4, cache.get_or_set, "report", compute)
    return [each for found in in_threads(2, async_to_sync(ask), 2) for each in found]


@pytest.mark.parametrize("leading", ["tasks", "threads", "loops"])
def test_tasks_threads_and_processes_share_one_computation(
    redis_server: RedisServer, client: redis.Redis, leading: str
) -> None:
    url = redis_server.url
    with (
        processes(ask_somehow, url, leading) as (leader,),
        processes(ask_somehow, url, "tasks") as (tasks,),
        processes(ask_somehow, url, "threads") as (threads,),
        processes(ask_somehow, url, "loops") as (loops,),
    ):
        leader.go()
        assert leader.hear() == "computing"
        for others in (tasks, threads, loops):
            others.go()
        # One for the tasks, one for the threads, one for each loop.
        until(lambda: blocked(client) >= 4)
        leader.say("the report")
        for worker in (leader, tasks, threads, loops):
            assert worker.result() == ["the report"] * 4


def test_a_thread_leads_and_a_task_follows(cache: RedisCache, client: redis.Redis) -> None:
    producer = Producer()
    producer.finish.clear()
    leader = Asking(cache.get_or_set, "report", producer)
    assert producer.begun.wait(PATIENCE)
    task = Asking(lambda: run(cache.aget_or_set("report", 1)))
    until(lambda: blocked(client) == 1)
    producer.finish.set()
    assert (leader.found(), task.found()) == ("computed", "computed")


# -- failures, cancellation --------------------------------------------------------------------


@pytest.mark.parametrize("ended_by", ["failure", "cancellation"])
def test_after_its_end_another_task_takes_over(
    cache: RedisCache, client: redis.Redis, ended_by: str
) -> None:
    async def ask() -> None:
        slow, good = TaskProducer(Broken()), TaskProducer()
        good.finish.set()
        first = asyncio.ensure_future(cache.aget_or_set("report", slow))
        await slow.begun.wait()
        others = [asyncio.ensure_future(cache.aget_or_set("report", good)) for _ in range(5)]
        await asyncio.sleep(0)
        if ended_by == "failure":
            slow.finish.set()
        else:
            first.cancel()
        with pytest.raises((Broken, asyncio.CancelledError)) as caught:
            await first
        assert ended_by != "failure" or caught.value is slow.value
        assert await asyncio.gather(*others) == ["computed"] * 5
        assert good.calls == 1

    run(ask())
    assert not client.exists(flight_key(KEY))


def test_whenever_it_is_cancelled_no_flight_stays(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """Also while it asks who leads, and while it stores."""
    cache = make(redis_server, LOCK_FLIGHT_TIMEOUT=600)

    async def ask() -> None:
        await cache.aget_or_set("warm", 1)
        for turns in range(40):
            await cache.adelete("report")
            task = asyncio.ensure_future(cache.aget_or_set("report", coroutine_function))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            await happens(lambda: not client.exists(flight_key(KEY)))

    run(ask())


def test_threads_with_short_lived_loops(cache: RedisCache) -> None:
    """As under WSGI, where each call of ``async_to_sync`` makes a loop."""
    cache.set("report", "there")
    calls = examples(100)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        found = in_threads(
            6, lambda: [asyncio.run(cache.aget_or_set("report", "never")) for _ in range(calls)]
        )
    finally:
        sys.setswitchinterval(interval)
    assert found == [["there"] * calls] * 6


@pytest.mark.on_redis
def test_nothing_is_left_open(cache: RedisCache, client: redis.Redis) -> None:
    async def follow() -> None:
        elsewhere(client)
        await cache.aget_or_set("warm", 1)
        before = {each["id"] for each in client.client_list()}
        task = asyncio.ensure_future(cache.aget_or_set("report", 1))
        await happens(lambda: blocked(client) == 1)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        # What a cancelled follower waited on is closed.
        await happens(lambda: {each["id"] for each in client.client_list()} <= before)

    gc.collect()  # What other tests have left open, with its warnings.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = int(client.info("clients")["connected_clients"])
        for _ in range(3):
            run(cache.aget_or_set("other", coroutine_function))
            run(follow())
            client.flushdb()
        gc.collect()
        until(lambda: int(client.info("clients")["connected_clients"]) <= before + 1)
    assert [str(w.message) for w in caught if issubclass(w.category, ResourceWarning)] == []


def test_a_value_that_needs_itself_is_refused(cache: RedisCache) -> None:
    async def recursive() -> Any:
        return await cache.aget_or_set("report", recursive)

    def in_a_thread() -> Any:
        return cache.get_or_set("report", in_a_thread)

    for compute in (recursive, in_a_thread):
        with pytest.raises(LockError, match="requests the value"):
            run(cache.aget_or_set("report", compute))


def test_a_function_may_not_raise_stop_iteration(cache: RedisCache) -> None:
    """No future takes it, so the task would wait forever."""
    with pytest.raises(RuntimeError, match="the function raised StopIteration"):
        run(cache.aget_or_set("report", lambda: next(iter(()))))


def test_a_task_that_a_computation_leaves_behind_may_ask_for_the_value(cache: RedisCache) -> None:
    async def ask() -> Any:
        over, left_behind = asyncio.Event(), list[asyncio.Task[Any]]()

        async def later() -> Any:
            await over.wait()
            return await cache.aget_or_set("report", "anew")

        async def compute() -> str:
            left_behind.append(asyncio.create_task(later()))
            return "computed"

        await cache.aget_or_set("report", compute)
        await cache.adelete("report")
        over.set()
        return await left_behind[0]

    assert run(ask()) == "anew"


def test_a_loop_that_is_closed_leaves_no_flight_alive(cache: RedisCache) -> None:
    async def begin() -> None:
        slow = TaskProducer()
        tasks.append(asyncio.ensure_future(cache.aget_or_set("report", slow)))
        await slow.begun.wait()

    tasks: list[Any] = []
    others = set(in_flight)  # Of callers that an interrupt ended; who comes next replaces them.
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    assert renewals()
    del loop
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of sockets that the loop should have closed.
        tasks.clear()
        gc.collect()
    assert not renewals()
    assert set(in_flight) <= others


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_stale(cache: RedisCache, client: redis.Redis, background: bool) -> None:
    cache.get_or_set("report", "old", **TERMS)
    age(client)

    async def ask() -> None:
        slow = TaskProducer("new")
        leader = asyncio.ensure_future(
            cache.aget_or_set("report", slow, **TERMS, background=background)
        )
        await slow.begun.wait()
        assert await cache.aget_or_set("report", "never", **TERMS) == "old"
        if background:
            assert await leader == "old"
        slow.finish.set()
        if not background:
            assert await leader == "new"
        await happens(lambda: cache.get("report") == "new")

    run(ask())


def test_redis_dies_while_a_task_computes(own_server: RedisServer) -> None:
    cache = make(own_server)

    async def ask() -> Any:
        slow = TaskProducer()
        task = asyncio.ensure_future(cache.aget_or_set("report", slow))
        await slow.begun.wait()
        await asyncio.to_thread(own_server.kill)
        slow.finish.set()
        return await task

    assert run(ask()) == "computed"


@pytest.mark.parametrize("call", ["get_or_set", "get_or_set_many", "raise"])
def test_a_thread_does_not_wait_for_a_task_of_its_own_loop(cache: RedisCache, call: str) -> None:
    """That would stop the loop and the task's computation; so the value is computed twice."""
    for_long: dict[str, Any] = {"wait": 100 * PATIENCE}

    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def compute() -> str:
            begun.set()
            await go_on.wait()
            return "the task's"

        leader = asyncio.ensure_future(cache.aget_or_set("report", compute, 60))
        await begun.wait()
        if call == "get_or_set":
            assert cache.get_or_set("report", lambda: "ours", **for_long) == "ours"
        elif call == "get_or_set_many":
            values = cache.get_or_set_many(
                ["report"], lambda keys: dict.fromkeys(keys, "ours"), **for_long
            )
            assert values == {"report": "ours"}
        else:
            with pytest.raises(LockNotAcquired):
                cache.get_or_set("report", lambda: "", on_wait_timeout="raise", **for_long)
        go_on.set()
        assert await leader == "the task's"

    Background(lambda: asyncio.run(main())).result()


def many_of(producer: Callable[[], Any]) -> Callable[[list[str]], dict[str, Any]]:
    return lambda keys: {key: producer() for key in keys}


def coroutine_of(producer: Callable[..., Any]) -> Callable[..., Any]:
    async def compute(*args: Any) -> Any:
        return producer(*args)

    return compute


BOTH = ["report", "other"]
#: In Django's thread for synchronous code: a call itself, or a task that the thread waits for.
FOLLOWING: dict[str, Callable[[RedisCache, Producer], Any]] = {
    "get_or_set": lambda c, f: [c.get_or_set(key, f) for key in BOTH],
    "get_or_set_many": lambda c, f: [*c.get_or_set_many(BOTH, many_of(f)).values()],
    "aget_or_set": lambda c, f: [
        async_to_sync(c.aget_or_set)(key, coroutine_of(f)) for key in BOTH
    ],
    "aget_or_set, plain": lambda c, f: [
        async_to_sync(c.aget_or_set)(key, async_to_sync(coroutine_of(f))) for key in BOTH
    ],
    "aget_or_set_many": lambda c, f: [
        *async_to_sync(c.aget_or_set_many)(BOTH, coroutine_of(many_of(f))).values()
    ],
}


@pytest.mark.parametrize("leading", ["aget_or_set", "aget_or_set_many", "acompute"])
@pytest.mark.parametrize("following", FOLLOWING)
def test_a_plain_function_waits_for_the_thread_that_needs_the_value(
    cache: RedisCache, client: redis.Redis, leading: str, following: str
) -> None:
    """Django's thread for synchronous code computes the value itself, once for both: it cannot come
    to the leader's function before."""
    begun, go_on = threading.Event(), threading.Event()
    view, never = Producer(), Producer()
    heard: list[Any] = []

    def in_the_thread() -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        return FOLLOWING[following](cache, view)

    async def lead() -> Any:
        if leading == "aget_or_set_many":
            return [*(await cache.aget_or_set_many(BOTH, many_of(never))).values()]
        compute = getattr(cache, leading)
        return await asyncio.gather(*(compute(key, never) for key in BOTH))

    async def ask() -> Any:
        thread = asyncio.ensure_future(sync_to_async(in_the_thread)())
        await happens(begun.is_set)
        leaders = asyncio.ensure_future(lead())
        await happens(lambda: client.exists(flight_key(KEY), flight_key(b":1:other")) == 2)
        go_on.set()
        return await asyncio.gather(thread, leaders)

    events.subscribe(heard.append)
    try:
        assert run(ask()) == [["computed"] * 2] * 2
    finally:
        events.unsubscribe(heard.append)
    assert never.calls == 0
    assert view.calls == 2
    computed = [event for event in heard if type(event) is events.Computed]
    assert sum(event.values for event in computed) == 2
    assert not any(event.error for event in computed)
    assert not client.exists(flight_key(KEY), flight_key(b":1:other"))


@pytest.mark.parametrize("when", ["query", "compute", "store"])
def test_a_leader_whose_loop_has_ended_ends_its_flight(
    redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its coroutine is closed, and can await nothing: the keeper ends the flight."""
    cache = make(redis_server, LOCK_FLIGHT_TIMEOUT=600)
    going, running = asyncio.Event(), []

    async def forever() -> None:
        going.set()
        await asyncio.Event().wait()

    def stopping(call: Any) -> Any:
        async def stopped(*args: Any) -> Any:
            replies = await call(*args)
            if when == "query" or (when == "store" and args[1][0].script is STORE):
                await forever()
            return replies

        return stopped

    async def begin() -> Any:
        default = forever if when == "compute" else coroutine_function
        call = cache.aget_or_set("report", default)
        running.append(asyncio.ensure_future(call))
        await asyncio.wait_for(going.wait(), PATIENCE)
        return call

    name = "aexchange" if when == "query" else "arun_all"
    monkeypatch.setattr(tasks, name, stopping(getattr(tasks, name)))
    loop = asyncio.new_event_loop()
    call = loop.run_until_complete(begin())
    monkeypatch.undo()
    call.close()
    until(lambda: not client.exists(flight_key(KEY)))
    assert cache.get_or_set("report", "next") == (5 if when == "store" else "next")
    running[0].cancel()
    loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
    loop.close()


def test_who_is_cancelled_again_and_again_ends_its_flight_all_the_same(
    redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(redis_server, LOCK_FLIGHT_TIMEOUT=600)

    async def ask() -> None:
        async def run_all(client: Any, calls: Any) -> Any:
            if calls[0].script is END_FLIGHT:
                leader.cancel()
                await asyncio.sleep(0)
            return await before(client, calls)

        before = tasks.arun_all
        slow = TaskProducer()
        leader = asyncio.ensure_future(cache.aget_or_set("report", slow))
        await slow.begun.wait()
        monkeypatch.setattr(tasks, "arun_all", run_all)
        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        await happens(lambda: not client.exists(flight_key(KEY)))

    run(ask())
