"""The Django signals: with which arguments, where receivers run, and that they harm nothing."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.core.cache import caches
from django.dispatch import Signal

from django_redis_lock import signals
from django_redis_lock.cache import RedisCache
from tests.holding import renew
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.values import TERMS, Broken, Producer, age

ALL = {name: each for name, each in vars(signals).items() if isinstance(each, Signal)}


@pytest.fixture
def cache() -> RedisCache:
    found: Any = caches["default"]
    return found


class Told(list[tuple[str, dict[str, Any]]]):
    """Which signals were sent, with which arguments, and in which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []
        self._receivers = {name: self._receiver(name) for name in ALL}

    def _receiver(self, name: str) -> Any:
        def receive(signal: Signal, **arguments: Any) -> None:
            self.threads.append(threading.current_thread())
            self.append((name, arguments))
            raise RuntimeError("a receiver's own trouble")

        return receive

    def connect(self, stack: ExitStack) -> None:
        for name, signal in ALL.items():
            signal.connect(self._receivers[name])
            stack.callback(signal.disconnect, self._receivers[name])

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self]


@pytest.fixture
def told() -> Iterator[Told]:
    with ExitStack() as stack:
        told = Told()
        told.connect(stack)
        yield told


def test_a_lock(cache: RedisCache, told: Told) -> None:
    lock = cache.lock("invoice-17", label="nightly", group="invoices")
    with lock:
        fence = lock.fence
        assert not cache.lock("invoice-17").acquire(blocking=False)
        assert not cache.lock("invoice-17").acquire(blocking_timeout=0.03)
    assert told.names == ["lock_acquired", "lock_rejected", "lock_timed_out", "lock_released"]
    (_, acquired), (_, rejected), (_, timed_out), (_, released) = told
    waited, held = acquired.pop("waited"), released.pop("held")
    assert 0 <= waited < PATIENCE
    assert 0 < held < PATIENCE
    # It is counted from a moment after the deadline was set.
    assert timed_out.pop("waited") > 0.003
    common = {"sender": RedisCache, "cache": cache, "name": "invoice-17"}
    mine = {**common, "group": "invoices", "label": "nightly"}
    assert acquired == {**mine, "fence": fence, "contended": False}
    assert released == {**mine, "fence": fence}
    assert rejected == timed_out == {**common, "group": "invoice-*", "label": ""}
    assert set(told.threads) == {threading.current_thread()}


def test_a_lost_lock(cache: RedisCache, told: Told) -> None:
    lock = cache.lock("import", timeout=0.05)
    lock.acquire()
    until(lambda: "lock_lost" in told.names)
    lost = dict(told)["lock_lost"]
    assert lost["fence"] == lock.fence
    assert lost["held"] > 0
    assert re.search("lifetime|expired", lost["reason"])
    assert told.threads[-1].name == "django_redis_lock signals"


def test_a_receiver_that_hangs_keeps_no_lock_from_its_renewal(
    client: redis.Redis, cache: RedisCache
) -> None:
    came, go_on = threading.Event(), threading.Event()

    def hang(**news: Any) -> None:
        came.set()
        assert go_on.wait(PATIENCE)

    signals.lock_lost.connect(hang)
    try:
        with cache.lock("renewed", timeout=60, renew=True) as renewed:
            cache.lock("lost", timeout=0.05).acquire()
            assert came.wait(PATIENCE)
            for _ in range(4):
                renew(client, renewed.keys.lock)
            assert renewed.owned()
    finally:
        go_on.set()
        signals.lock_lost.disconnect(hang)


def test_values(cache: RedisCache, client: redis.Redis, told: Told) -> None:
    cache.get_or_set("report", Producer(), **TERMS)
    age(client)
    error = Broken("no data")
    assert cache.get_or_set("report", Producer(error), **TERMS) == "computed"
    assert told.names == ["value_computed", "value_refresh_failed"], "one failed: not computed"
    computed, failed = (arguments for _, arguments in told)
    assert computed.pop("seconds") >= 0
    common = {"sender": RedisCache, "cache": cache, "name": "report", "group": "report"}
    assert computed == {**common, "label": "", "values": 1, "without_redis": False}
    assert failed == {**common, "label": "", "error": error}


def as_a_view(work: Coroutine[Any, Any, None]) -> None:
    async def view() -> None:
        await work

    async_to_sync(view)()


@pytest.mark.parametrize("run", [asyncio.run, as_a_view])
def test_the_end_of_an_event_loop_keeps_nothing_from_receivers(
    cache: RedisCache, told: Told, run: Any
) -> None:
    async def work() -> None:
        await cache.aget_or_set("report", Producer(), 60)

    async def locked_work() -> None:
        async with cache.alock("import"):
            await work()

    for each in (work, locked_work, locked_work):
        cache.delete("report")
        run(each())
    until(lambda: len(told) == 7)
    assert Counter(told.names) == {"value_computed": 3, "lock_acquired": 2, "lock_released": 2}


def test_in_an_event_loop_receivers_do_not_block(cache: RedisCache) -> None:
    here: list[str] = []
    go_on = threading.Event()

    async def in_the_loop(name: str, **news: Any) -> None:
        assert asyncio.get_running_loop()
        here.append(f"async {name}")

    def in_a_thread(name: str, **news: Any) -> None:
        assert go_on.wait(PATIENCE)
        here.append(f"sync {name}")

    async def main() -> None:
        async with cache.alock("import"):
            go_on.set()  # Not before the acquisition has been told of.
        while len(here) < 2:
            await asyncio.sleep(0.01)

    with ExitStack() as stack:
        for receiver in (in_the_loop, in_a_thread):
            signals.lock_acquired.connect(receiver)
            stack.callback(signals.lock_acquired.disconnect, receiver)
        asyncio.run(main())
    assert sorted(here) == ["async import", "sync import"]


def test_coroutine_functions_receive_what_threads_do(cache: RedisCache) -> None:
    here: list[str] = []

    async def receive(name: str, **news: Any) -> None:
        here.append(name)

    signals.lock_acquired.connect(receive)
    try:
        with cache.lock("import"):
            assert here == ["import"]
    finally:
        signals.lock_acquired.disconnect(receive)


def test_an_outage(own_server: RedisServer, told: Told, tmp_path: Path) -> None:
    options = {"LOCK_ON_REDIS_DOWN": "local", "LOCK_LOCAL_LOCK_FOLDER": str(tmp_path)}
    cache = RedisCache(own_server.url, {"OPTIONS": options})
    own_server.stop()
    with cache.lock("nightly"):
        until(lambda: "server_down" in told.names)
    own_server.start()
    with cache.lock("nightly"):
        until(lambda: "server_up" in told.names)
    said = dict(told)
    server = f"127.0.0.1:{own_server.port}/0"
    assert said["server_down"]["server"] == said["server_up"]["server"] == server
    assert said["server_down"]["sender"] is None
    assert isinstance(said["server_down"]["error"], redis.ConnectionError)
    assert (said["server_up"]["spared"], said["server_up"]["fallbacks"]) == (0, 1)
    assert said["server_up"]["seconds"] > 0
    assert (said["lock_fell_back"]["name"], said["lock_fell_back"]["how"]) == ("nightly", "local")
    assert told.names.count("server_down") == told.names.count("server_up") == 1
