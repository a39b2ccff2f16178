"""``stale=``: the old value at once, while one caller computes the new one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.core.cache import caches

from django_redis_lock.cache import RedisCache
from django_redis_lock.contrib.testing import MemoryServer, VirtualClock, override
from django_redis_lock.protocol.keys import flight_key
from django_redis_lock.signals import value_refresh_failed
from django_redis_lock.singleflight import FlightRenewal, flight, runners
from django_redis_lock.threads import Repeated, ThreadPool
from tests.holding import renew
from tests.processes import PATIENCE, Link, in_threads, processes, until, waiting_in
from tests.redis_server import RedisServer
from tests.support.background import elsewhere
from tests.support.values import KEY, TERMS, Asking, Broken, Producer, TaskProducer, age, make

__all__ = ["slow"]


@pytest.fixture
def slow() -> Iterator[Producer]:
    """A producer that goes on when it is told to."""
    producer = Producer("new")
    producer.finish.clear()
    yield producer
    producer.finish.set()


@pytest.fixture
def stale(cache: RedisCache, client: redis.Redis) -> RedisCache:
    """A cache whose report is ``"old"``, and stale."""
    assert cache.get_or_set("report", "old", **TERMS) == "old"
    age(client)
    return cache


def is_fresh(client: redis.Redis) -> bool:
    return int(client.pttl(KEY)) > 3_600_000


# -- fresh, stale, gone ------------------------------------------------------------------------


def test_a_fresh_value_is_kept_for_both_times_and_not_computed(
    cache: RedisCache, client: redis.Redis
) -> None:
    cache.get_or_set("report", "old", **TERMS)
    assert 3_650_000 < client.pttl(KEY) <= 3_660_000
    assert cache.get_or_set("report", Producer("new"), **TERMS) == "old"
    # One that never ends is never stale.
    cache.set("report", "old", None)
    assert cache.get_or_set("report", Producer("new"), **TERMS) == "old"


def test_a_value_is_stale_to_its_last_moment_and_then_missing() -> None:
    clock = VirtualClock()
    with override(MemoryServer(clock)):
        for way in (caches["default"].get_or_set, async_to_sync(caches["default"].aget_or_set)):
            way("report", "old", 600, stale=60)
            clock.advance(660)
            assert way("report", "new", 600, stale=60) == "new"
            way("report", "never", 600, stale=60)
            clock.advance(661)
            assert not caches["default"].has_key("report")
            caches["default"].delete("report")


@pytest.mark.on_redis
def test_a_fresh_value_costs_one_trip(cache: RedisCache, client: redis.Redis) -> None:
    cache.get_or_set("report", "old", **TERMS)
    client.config_resetstat()
    cache.get_or_set("report", "new", **TERMS)
    calls = client.info("commandstats")
    assert {n: c["calls"] for n, c in calls.items() if "config" not in n} == {
        "cmdstat_get": 1,
        "cmdstat_pttl": 1,
    }


def test_the_setting_of_the_cache_counts_for_each_timeout(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """Whatever the timeout of the call before."""
    cache = make(redis_server, LOCK_STALE=3600)
    cache.get_or_set("forever", "a", None)
    cache.get_or_set("report", "old", 60)
    cache.get_or_set("other", "b", 60.0)
    cache.get_or_set("once more", "c", None)
    lives = [client.pttl(f":1:{key}") for key in ("forever", "report", "other", "once more")]
    kept = pytest.approx(3_660_000, abs=600_000)
    assert lives == [-1, kept, kept, -1]
    age(client)
    assert cache.get_or_set("report", lambda: "new", 60) == "new"
    assert is_fresh(client)


# -- one refreshes, inline ---------------------------------------------------------------------


def test_one_refreshes_and_the_others_get_the_old_value_at_once(
    stale: RedisCache, client: redis.Redis, slow: Producer
) -> None:
    leader = Asking(stale.get_or_set, "report", slow, **TERMS)
    assert slow.begun.wait(PATIENCE)
    other = Producer("never")
    assert in_threads(8, lambda: stale.get_or_set("report", other, **TERMS)) == ["old"] * 8
    assert not other.calls
    slow.finish.set()
    assert leader.found() == "new"
    assert stale.get_or_set("report", other, **TERMS) == "new"
    assert is_fresh(client)


def refresh(link: Link, url: str) -> Any:
    """Ask for the report; whoever computes it says so, and hears what it is to be."""

    def compute() -> Any:
        link.say("computing")
        return link.hear()

    return RedisCache(url, {}).get_or_set("report", compute, **TERMS)


def test_one_of_several_processes_refreshes(
    stale: RedisCache, redis_server: RedisServer, client: redis.Redis
) -> None:
    with processes(refresh, redis_server.url, count=4) as crew:
        crew.go()
        until(lambda: all(worker.speaks() for worker in crew))
        heard = [(worker, worker.hear_anything()) for worker in crew]
        (leader,) = (worker for worker, said in heard if said == ("said", "computing"))
        assert [s for w, s in heard if w is not leader] == [("returned", "old")] * 3
        leader.say("new")
        assert leader.result() == "new"
    assert stale.get("report") == "new"
    assert is_fresh(client)


# -- in the background -------------------------------------------------------------------------


def test_in_the_background_the_caller_too_gets_the_old_value_at_once(
    stale: RedisCache, client: redis.Redis, slow: Producer
) -> None:
    found = in_threads(8, lambda: stale.get_or_set("report", slow, **TERMS, background=True))
    assert found == ["old"] * 8
    assert slow.begun.wait(PATIENCE)
    assert stale.get("report") == "old"
    slow.finish.set()
    until(lambda: stale.get("report") == "new")
    assert is_fresh(client)
    assert slow.calls == 1


def test_the_background_closes_its_database_connections(
    stale: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(
        "django.db.connections.close_all",
        lambda: closed.append(threading.current_thread().name),
    )
    stale.get_or_set("report", lambda: "new", **TERMS, background=True)
    until(lambda: closed == ["django_redis_lock"])


# -- a limit to the wait -----------------------------------------------------------------------


def test_after_the_soft_timeout_it_gets_the_old_one_and_the_refresh_goes_on(
    stale: RedisCache, client: redis.Redis, slow: Producer
) -> None:
    assert stale.get_or_set("report", slow, **TERMS, soft_timeout=0.01) == "old"
    assert slow.begun.wait(PATIENCE)
    assert client.exists(flight_key(KEY))
    assert stale.get_or_set("report", Producer("never"), **TERMS, soft_timeout=0.01) == "old"
    slow.finish.set()
    until(lambda: stale.get("report") == "new")
    assert is_fresh(client)
    assert slow.calls == 1
    age(client)
    assert stale.get_or_set("report", lambda: "newer", **TERMS, soft_timeout=PATIENCE) == "newer"
    assert is_fresh(client)


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_soft_timeout_in_tasks(stale: RedisCache, client: redis.Redis, cancelled: bool) -> None:
    """The refresh goes on after it, and if its caller is cancelled before it."""

    async def main() -> None:
        compute = TaskProducer("new")
        ask = partial(stale.aget_or_set, "report", compute, **TERMS)
        asking = asyncio.ensure_future(ask(soft_timeout=PATIENCE if cancelled else 0.01))
        await compute.begun.wait()
        if cancelled:
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        else:
            assert await asking == "old"
        assert await ask(soft_timeout=0.01) == "old"
        compute.finish.set()
        while await stale.aget("report") != "new":
            await asyncio.sleep(0.001)
        age(client)
        assert await ask(soft_timeout=PATIENCE) == "new"

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_loop_that_ends_during_a_refresh_waits_for_no_reply(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``asyncio.run`` cancels all tasks at once: that which reads replies, before it has begun."""
    monkeypatch.setattr("django_redis_lock.transport.aio_connection.HAS_HIREDIS", False)
    cache = make(redis_server, SOCKET_TIMEOUT=3 * PATIENCE)
    cache.get_or_set("report", "old", **TERMS)
    cache.mark_stale("report", stale=60)

    async def compute() -> Any:
        return await cache.aget("source")

    answer = cache.aget_or_set("report", compute, **TERMS, background=True)
    assert elsewhere(asyncio.run, answer) == "old"


def test_without_an_old_value_it_waits_as_ever(cache: RedisCache, slow: Producer) -> None:
    asking = Asking(cache.get_or_set, "report", slow, **TERMS, soft_timeout=0.001)
    assert slow.begun.wait(PATIENCE)
    following = Asking(cache.get_or_set, "report", slow, **TERMS, soft_timeout=0.001)
    until(lambda: waiting_in("django_redis_lock.singleflight.runners") == 1)
    slow.finish.set()
    assert [asking.found(), following.found()] == ["new", "new"]


def test_a_full_background_leaves_it_to_the_next_caller(
    stale: RedisCache, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadPool, "submit", lambda *args: False)
    assert stale.get_or_set("report", "new", **TERMS, background=True) == "old"
    assert not client.exists(flight_key(KEY))
    monkeypatch.undo()
    stale.get_or_set("report", "new", **TERMS, background=True)
    until(lambda: stale.get("report") == "new")


def test_the_background_is_bounded_and_no_thread_stays() -> None:
    background = ThreadPool("test", threads=2, max_waiting=3, idle_seconds=0.05)
    go_on, begun, done = threading.Event(), threading.Semaphore(0), []

    def work() -> None:
        begun.release()
        assert go_on.wait(PATIENCE)
        done.append(threading.get_ident())

    for _ in range(2):
        assert background.submit(work, lambda: None)
        assert begun.acquire(timeout=PATIENCE)
    taken = [background.submit(work, lambda: None) for _ in range(5)]
    assert taken == [True] * 3 + [False] * 2
    go_on.set()
    until(lambda: len(done) == 5)
    assert len(set(done)) == 2
    until(lambda: not background._threads)


def test_what_waits_in_the_background_is_computed_once_and_kept(
    redis_server: RedisServer, client: redis.Redis, slow: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it waits for longer than a flight lives."""
    single = ThreadPool("test", threads=1, max_waiting=64, idle_seconds=5)
    monkeypatch.setattr(runners, "background", single)
    cache, new = make(redis_server, LOCK_FLIGHT_TIMEOUT=60), Producer("new")
    terms = {**TERMS, "background": True}
    for key in ("report", "other"):
        cache.get_or_set(key, "old", **terms)
        client.pexpire(f":1:{key}", 3_500_000)
    cache.get_or_set("other", slow, **terms)
    assert slow.begun.wait(PATIENCE)
    assert cache.get_or_set("report", new, **terms) == "old"
    token = client.get(flight_key(KEY))
    for _ in range(4):
        renew(client, flight_key(KEY), FlightRenewal)
    assert client.get(flight_key(KEY)) == token
    assert cache.get_or_set("report", new, **terms) == "old"
    slow.finish.set()
    until(lambda: cache.get("report") == "new")
    assert new.calls == 1


def test_a_child_starts_with_an_empty_pool() -> None:
    pool = ThreadPool("test", threads=1, max_waiting=1, idle_seconds=5)
    release = threading.Event()
    assert pool.submit(release.wait)
    until(lambda: pool._busy == 1)
    assert pool.submit(lambda: None)
    pool._reset()  # As ``threads`` does after a fork.
    done = threading.Event()
    assert pool.submit(done.set)
    assert done.wait(PATIENCE)
    release.set()


# -- the refresh fails -------------------------------------------------------------------------


@pytest.fixture
def told() -> Iterator[list[dict[str, Any]]]:
    """What receivers of the signal are told."""
    told: list[dict[str, Any]] = []

    def receive(**news: Any) -> None:
        told.append(news)
        raise RuntimeError("a receiver's own trouble")

    value_refresh_failed.connect(receive)
    yield told
    value_refresh_failed.disconnect(receive)


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_refresh_serves_the_old_value_and_says_so(
    stale: RedisCache,
    client: redis.Redis,
    told: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    background: bool,
) -> None:
    monkeypatch.setattr("django_redis_lock.threads.LOG_PAUSE_SECONDS", 0.0)
    error = Broken("no data")
    assert stale.get_or_set("report", Producer(error), **TERMS, background=background) == "old"
    until(lambda: told)
    assert told[0]["error"] is error
    assert told[0]["cache"] is stale
    assert told[0]["sender"] is type(stale)
    until(lambda: "The refresh of :1:report failed" in caplog.text)
    assert "no data" in caplog.text
    until(lambda: not client.exists(flight_key(KEY)))
    assert stale.get_or_set("report", lambda: "new", **TERMS) == "new"


@pytest.mark.on_redis
def test_a_full_queue_of_refreshes_asks_nothing_of_redis_and_warns_once(
    cache: RedisCache,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(flight, "_too_many", Repeated(flight.logger, "Too many: %s"))
    held, begun = threading.Event(), threading.Event()
    pool = ThreadPool("few", threads=1, max_waiting=1, idle_seconds=1.0)
    before = runners.use_background(pool)
    try:
        pool.submit(lambda: (begun.set(), held.wait(PATIENCE)))
        assert begun.wait(PATIENCE)
        pool.submit(lambda: None)
        for number in range(20):
            cache.get_or_set(f"report-{number}", lambda: "old", **TERMS)
            age(client, cache._encoded_key(f"report-{number}", None))
        scripts = client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
        for number in range(20):
            value = cache.get_or_set(f"report-{number}", lambda: "new", **TERMS, background=True)
            assert value == "old"
    finally:
        held.set()
        runners.use_background(before)
    # With ``stale`` a read is a script.
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] <= scripts + 20
    lines = [record.getMessage() for record in caplog.records if "Too many" in record.msg]
    assert len(lines) == 1
    with monkeypatch.context() as patch:
        patch.setattr("django_redis_lock.threads.LOG_PAUSE_SECONDS", 0.0)
        flight._too_many.warn("another")
    assert "19 more" in caplog.records[-1].getMessage()


def test_after_a_failed_refresh_no_caller_tries_for_a_while(
    stale: RedisCache, client: redis.Redis
) -> None:
    producer = Producer(Broken())
    for _ in range(3):
        assert stale.get_or_set("report", producer, **TERMS, error_ttl=60) == "old"
    assert producer.calls == 1
    client.delete(flight_key(KEY))
    assert stale.get_or_set("report", "new", **TERMS, error_ttl=60) == "new"


def test_a_refresh_that_is_broken_off_ends_its_flight(
    stale: RedisCache, client: redis.Redis
) -> None:
    with pytest.raises(KeyboardInterrupt):
        stale.get_or_set("report", Producer(KeyboardInterrupt()), **TERMS)
    assert not client.exists(flight_key(KEY))


# -- writes win, and Redis is away -------------------------------------------------------------


def test_redis_dies_during_a_refresh(own_server: RedisServer, slow: Producer) -> None:
    cache = make(own_server)
    cache.get_or_set("report", "old", **TERMS)
    with own_server.client() as client:
        age(client)
    leader = Asking(cache.get_or_set, "report", slow, **TERMS)
    assert slow.begun.wait(PATIENCE)
    own_server.kill()
    slow.finish.set()
    assert leader.found() == "new"
