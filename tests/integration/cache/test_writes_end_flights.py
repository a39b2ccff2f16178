"""C2: a write or a delete during a computation wins over it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
import redis
from django_redis.cache import RedisCache as DjangoRedisCache

from django_redis_lock.cache import RedisCache
from django_redis_lock.protocol.keys import flight_key, flight_stream
from django_redis_lock.singleflight.flight import in_flight
from tests.processes import PATIENCE, Link, processes, until, waiting_in
from tests.redis_server import RedisServer
from tests.support.background import Background
from tests.support.values import Asking, Producer, TaskProducer
from tests.support.writes import REDIS_WRITES, STALE_WRITES, WRITES, Write

pytestmark = pytest.mark.invariant("C2")

CACHE = {"KEY_PREFIX": "site"}
KEY = b"site:1:report"


#: What is done during the computation without touching its key.
OTHERS: dict[str, Write] = {
    "another key": lambda c: (c.set("other", 1), c.delete("other"), c.delete_pattern("oth*")),
    "another version": lambda c: (c.set("report", 1, version=2), c.delete("report", version=2)),
    "set xx, missing": lambda c: c.set("report", "newer", xx=True),
    "set nx for 0": lambda c: c.set("report", "newer", nx=True, timeout=0),
    "reading": lambda c: (c.get("report"), c.get_many(["report"]), c.has_key("report")),
    "touch": lambda c: (c.touch("report", 60), c.expire("report", 60), c.persist("report")),
    "expire in the future": lambda c: (
        c.expire_at("report", datetime(2200, 1, 1)),
        c.pexpire_at("report", datetime(2200, 1, 1)),
    ),
    "a lock of its name": lambda c: c.lock("report", timeout=60).acquire(),
}


class Computation:
    """A computation of the report that is under way."""

    def __init__(self, cache: RedisCache, **terms: Any) -> None:
        self._compute = Producer("older")
        self._compute.finish.clear()
        terms = {"timeout": None, **terms}
        self._asking = Asking(cache.get_or_set, "report", self._compute, **terms)
        assert self._compute.begun.wait(PATIENCE)

    def finish(self) -> Any:
        """Its caller's value."""
        self._compute.finish.set()
        return self._asking.found()


@pytest.fixture
def computation(cache: RedisCache) -> Iterator[Computation]:
    computation = Computation(cache)
    yield computation
    computation.finish()


@pytest.mark.parametrize("write", WRITES)
def test_a_write_wins_over_the_computation(
    cache: RedisCache, client: redis.Redis, computation: Computation, write: str
) -> None:
    wins(cache, client, computation, *WRITES[write])


def in_a_pipeline(cache: RedisCache) -> None:
    client: redis.Redis = cache.client.get_client()
    with client.pipeline() as pipeline:
        cache.delete("report", client=pipeline)
        assert client.exists(flight_key(KEY))
        pipeline.execute()


@pytest.mark.on_redis
@pytest.mark.parametrize(
    ("do", "kept"),
    [
        *REDIS_WRITES.values(),
        (lambda c: c.set("report", "newer", client=c.client.get_client()), "newer"),
        (in_a_pipeline, None),
    ],
    ids=["incr", "the caller's own client", "the caller's own pipeline"],
)
def test_a_write_of_django_redis_wins_over_the_computation(
    cache: RedisCache, client: redis.Redis, computation: Computation, do: Write, kept: Any
) -> None:
    wins(cache, client, computation, do, kept)


def wins(
    cache: RedisCache, client: redis.Redis, computation: Computation, do: Write, kept: Any
) -> None:
    assert client.exists(flight_key(KEY))
    do(cache)
    assert not client.exists(flight_key(KEY))
    assert computation.finish() == "older"
    assert cache.get("report") == kept


@pytest.mark.sample(3)
@pytest.mark.parametrize("write", WRITES)
def test_followers_get_the_written_value_or_compute_again(
    cache: RedisCache, computation: Computation, write: str
) -> None:
    do, kept = WRITES[write]
    follower = Background(lambda: cache.get_or_set("report", lambda: "anew", None))
    until(lambda: waiting_in("django_redis_lock.singleflight.runners") == 1)
    do(cache)
    computation.finish()
    assert follower.result() == (kept or "anew")
    assert cache.get("report") == follower.result()


@pytest.mark.parametrize(("write", "found"), [("set", "newer"), ("delete", "anew")])
def test_followers_in_the_leaders_process_hear_of_a_write_during_the_computation(
    redis_server: RedisServer, write: str, found: str, pace: int
) -> None:
    cache = RedisCache(redis_server.url, {"OPTIONS": {"LOCK_FLIGHT_TIMEOUT": 1.5 * pace}})
    computation = Computation(cache)
    followers = [Background(lambda: cache.get_or_set("report", lambda: "anew")) for _ in range(3)]
    until(lambda: waiting_in("django_redis_lock.singleflight.runners") == 3)
    WRITES[write][0](cache)
    assert [follower.result() for follower in followers] == [found] * 3
    assert computation.finish() == "older"
    assert cache.get("report") == found


def test_tasks_in_the_leaders_loop_hear_of_a_write_during_the_computation(
    redis_server: RedisServer, pace: int
) -> None:
    cache = RedisCache(redis_server.url, {"OPTIONS": {"LOCK_FLIGHT_TIMEOUT": 1.5 * pace}})

    async def ask() -> None:
        compute = TaskProducer("older")
        leader = asyncio.create_task(cache.aget_or_set("report", compute))
        await compute.begun.wait()
        followers = [asyncio.create_task(cache.aget_or_set("report", "anew")) for _ in range(3)]
        [shared] = in_flight.values()
        while len(shared.ended._waiters) < 3:
            await asyncio.sleep(0)
        await cache.aset("report", "newer")
        done, _ = await asyncio.wait(followers, timeout=PATIENCE)
        assert [follower.result() for follower in done] == ["newer"] * 3
        compute.finish.set()
        assert await leader == "older"

    asyncio.run(ask())


@pytest.mark.sample(3)
@pytest.mark.parametrize("write", STALE_WRITES)
def test_a_write_wins_over_the_refresh_of_an_old_value(cache: RedisCache, write: str) -> None:
    do, kept = STALE_WRITES[write]
    cache.set("report", 5, 1000)
    computation = Computation(cache, timeout=60, stale=2000)
    do(cache)
    assert computation.finish() == "older"
    assert cache.get("report") == kept


@pytest.mark.parametrize("other", OTHERS)
def test_what_writes_nothing_ends_no_flight(
    cache: RedisCache, client: redis.Redis, computation: Computation, other: str
) -> None:
    OTHERS[other](cache)
    assert client.exists(flight_key(KEY))
    assert computation.finish() == "older"
    assert cache.get("report") == "older"
    assert client.pttl(KEY) == -1


@pytest.mark.parametrize(
    ("write", "found"), [("set", "newer"), ("delete", "anew"), ("delete_pattern", "anew")]
)
def test_a_follower_of_another_process_has_the_write_while_the_computation_goes_on(
    cache: RedisCache,
    redis_server: RedisServer,
    client: redis.Redis,
    computation: Computation,
    write: str,
    found: str,
) -> None:
    stream = flight_stream(KEY, client.get(flight_key(KEY)))
    with processes(follow_in_a_process, redis_server.url) as (follower,):
        follower.go()
        until(lambda: client.info("clients")["blocked_clients"])
        WRITES[write][0](cache)
        assert follower.result() == found
    # It need not look again to find out.
    assert client.xrange(stream)[-1][1] == {b"outcome": b"ended"}
    assert 0 < client.pttl(stream) <= 10_000


def follow_in_a_process(link: Link, url: str) -> Any:
    return RedisCache(url, {"KEY_PREFIX": "site"}).get_or_set("report", lambda: "anew", None)


@pytest.mark.sample(5)
@pytest.mark.parametrize("key", ["{tag}x", "a}b", "{", "a{b}c*", "ключ", "x y"])
@pytest.mark.parametrize("write", ["set", "delete", "set_many", "delete_many"])
def test_whatever_the_key_looks_like(
    cache: RedisCache, client: redis.Redis, key: str, write: str
) -> None:
    flight = flight_key(f"site:1:{key}".encode())
    client.set(flight, "another")
    arguments: dict[str, tuple[Any, ...]] = {
        "set": (key, 1),
        "delete": (key,),
        "set_many": ({key: 1},),
        "delete_many": ([key],),
    }
    getattr(cache, write)(*arguments[write])
    assert not client.exists(flight)


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("{tag}x", "*x"),
        ("{tag}x", "{tag}*"),
        ("a}x", "*x"),
        ("a}x", "a?x"),
        ("{x", "*x"),
        ("x", "x"),
    ],
)
def test_a_pattern_ends_the_computations_of_what_it_matches(
    cache: RedisCache, client: redis.Redis, key: str, pattern: str
) -> None:
    flight = flight_key(f"site:1:{key}".encode())
    # Neither the flights of other sites nor values that are called like flights.
    others = {b"{other:site:1:x}:flight": b"1", b"site:1:x:flight": b"2", b"x}:flight": b"3"}
    for stored, value in {flight: b"another", **others}.items():
        client.set(stored, value)
    cache.delete_pattern(pattern)
    assert not client.exists(flight)
    assert {stored: client.get(stored) for stored in others} == others


def compute_in_a_process(link: Link, url: str) -> Any:
    def compute() -> str:
        link.say("computing")
        return str(link.hear())

    return RedisCache(url, {"KEY_PREFIX": "site"}).get_or_set("report", compute, None)


def test_an_old_leader_does_not_overwrite_a_new_one(
    cache: RedisCache, redis_server: RedisServer
) -> None:
    with processes(compute_in_a_process, redis_server.url, count=2) as (first, second):
        first.go()
        assert first.hear() == "computing"
        cache.delete("report")
        second.go()
        assert second.hear() == "computing"
        first.say("older")
        assert first.result() == "older"
        assert cache.get("report") is None
        second.say("newer")
        assert second.result() == "newer"
    assert cache.get("report") == "newer"


# -- writes by others, who know nothing of flights -----------------------------------------------

SMALL, LARGE = "x" * 100, "x" * 50_000


def same_size(value: str) -> str:
    """Another value that looks the same from both ends."""
    middle = len(value) // 2
    return f"{value[:middle]}y{value[middle + 1 :]}"


#: The last two also where there is a value.
WAYS = ("get_or_set", "aget_or_set", "get_or_set_many", "compute", "stale")


def ways_to_compute(cache: RedisCache) -> dict[str, Callable[[Any], Any]]:
    """By the name of each: how to compute the report by a function."""

    def many(function: Callable[[], Any]) -> Any:
        return cache.get_or_set_many(["report"], lambda keys: {"report": function()})

    return {
        "get_or_set": lambda function: cache.get_or_set("report", function),
        "aget_or_set": lambda function: asyncio.run(cache.aget_or_set("report", function)),
        "get_or_set_many": many,
        "compute": lambda function: cache.compute("report", function),
        "stale": lambda function: cache.get_or_set("report", function, stale=2000),
    }


#: What others do while it is computed, and what the cache holds after it.
OTHERS_WRITES: dict[str, tuple[Callable[[DjangoRedisCache, str], Any], Callable[[str], Any]]] = {
    "set": (lambda c, old: c.set("report", same_size(old), 1000), same_size),
    "set for ever": (lambda c, old: c.set("report", same_size(old), None), same_size),
    "set to another size": (lambda c, old: c.set("report", "newer", 1000), lambda old: "newer"),
    "delete": (lambda c, old: c.delete("report"), lambda old: None),
}


#: A delete of what is missing leaves no trace: see Limits in docs/cache_stampedes.md.
SEEN = [
    *((write, way, None) for write in OTHERS_WRITES if write != "delete" for way in WAYS),
    *((write, way, old) for write in OTHERS_WRITES for way in WAYS[-2:] for old in (SMALL, LARGE)),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("write", "way", "before"), SEEN)
def test_a_write_by_plain_django_redis_wins(
    redis_server: RedisServer, client: redis.Redis, write: str, way: str, before: str | None
) -> None:
    """As in a rolling deploy."""
    plain, ours = (kind(redis_server.url, {}) for kind in (DjangoRedisCache, RedisCache))
    if before is not None:
        plain.set("report", before, 500)
    do, kept = OTHERS_WRITES[write]

    def compute() -> str:
        do(plain, before or SMALL)
        return "older"

    assert ways_to_compute(ours)[way](compute) in ("older", {"report": "older"})
    assert ours.get("report") == kept(before or SMALL)
    assert not client.exists(flight_key(b":1:report"))


@pytest.mark.parametrize("before", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("way", ["compute", "stale"])
def test_a_value_that_expired_as_it_had_to_is_replaced(
    redis_server: RedisServer, client: redis.Redis, way: str, before: str
) -> None:
    ours = RedisCache(redis_server.url, {})
    ours.set("report", before, 0.2)

    def compute() -> str:
        until(lambda: not client.exists(":1:report"))
        return "newer"

    assert ways_to_compute(ours)[way](compute) == "newer"
    assert ours.get("report") == "newer"


def test_what_is_no_text_is_replaced_by_what_is_computed_on_request(
    cache: RedisCache, client: redis.Redis
) -> None:
    client.hset(KEY, "a", "1")
    assert cache.compute("report", lambda: "newer") == "newer"
    assert cache.get("report") == "newer"
