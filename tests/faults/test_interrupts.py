"""An exception from a signal handler (Ctrl-C, a time limit) at each point at which one can come:
at the entry of each function, before each further line, and after each call of a function in C, of
an acquire or a release.

Whatever the point: nobody is kept from the lock for as long as its lifetime lasts, a minute here.
Only a grant that is just being read when its waiter is interrupted may be lost, and keeps others
from the lock for its own lifetime, half a minute here.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redis_lock import Lock, MultiLock, Redlock, cached, cached_page, locked
from django_redis_lock.contrib import fallback
from django_redis_lock.contrib.fallback import Attempt
from django_redis_lock.contrib.fallback.file_lock import held_locally
from django_redis_lock.decorators import section
from django_redis_lock.keeper import SentOnce, keeper
from django_redis_lock.locking.lock import ThreadQueue
from django_redis_lock.protocol import acquisition
from django_redis_lock.protocol.lock_scripts import ACQUIRE
from django_redis_lock.singleflight.runners import under_computation
from django_redis_lock.transport import server_of
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.backends import blocked, places
from tests.support.background import Background, elsewhere
from tests.support.interrupts import (
    Interrupt,
    Points,
    TimeLimit,
    TooLate,
    each_point,
)
from tests.support.values import renewals

pytestmark = pytest.mark.usefixtures("patient")

NAME = "interrupted"
#: The part of it that may catch an ``Exception``, and must not then take it for an error of Redis.
CATCHING = tuple(
    f"django_redis_lock.{name}"
    for name in ("locking", "steps", "contrib.redlock", "contrib.fallback")
)
ERRORS = [Interrupt, TimeLimit, pytest.param(TooLate, marks=pytest.mark.sample(0))]
#: Seconds within which the lock must be free; far more than it takes, far less than a minute.
SOON = 10.0
#: Seconds for which a grant lives.
GRANT = 30.0
#: What waits for the end of the blocking pop.
WAITS = "lock.pop_ended"


def in_a_block() -> None:
    with locked(NAME, timeout=60):
        pass


@pytest.mark.parametrize("work", [locked(NAME, timeout=60)(lambda: None), in_a_block])
def test_what_locked_runs(client: redis.Redis, work: Callable[[], None]) -> None:
    key = caches["default"].lock(NAME).keys.lock

    def attempt(points: Points) -> None:
        try:
            with points.watched():
                work()
        except Interrupt:
            pass
        if points.at_the_end:
            section._entered.set(())  # As when the thread's context ends.
        until(lambda: not client.exists(key))

    each_point(attempt, begin="section.enter", modules=("django_redis_lock.decorators",))


def prepare(client: redis.Redis) -> None:
    """Have connections at rest: making one is no matter of locks."""
    server = server_of(client)
    for connection in [server.checkout() for _ in range(3)]:
        server.checkin(connection)


def until_nobody_leaves() -> None:
    """As long as somebody is registered, a grant may be made for him."""
    while any(isinstance(job, SentOnce) for job in keeper().jobs()):
        time.sleep(0.0005)


def expire_grant(client: redis.Redis, key: str | bytes = NAME) -> None:
    """The lifetime of a grant that was lost is over, if one was."""
    if client.pttl(key) <= GRANT * 1000:
        client.delete(key)


def expect_free(client: redis.Redis, points: Points) -> None:
    until_nobody_leaves()
    assert not client.exists(f"{{{NAME}}}:waiters"), points.where
    if points.in_a_pop:
        expire_grant(client)
    lock = Lock(client, NAME, timeout=60, grant_timeout=GRANT)
    assert lock.acquire(blocking_timeout=SOON), points.where
    lock.release()
    assert not places(NAME), points.where
    assert not client.exists(NAME), points.where


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("wait", [0, None])
def test_a_free_lock(client: redis.Redis, wait: float | None, error: type[BaseException]) -> None:
    def attempt(points: Points) -> None:
        prepare(client)
        lock = Lock(client, NAME, timeout=60, blocking_timeout=wait, renew=True)
        try:
            with points.watched(), lock:
                assert lock.fence
        except error:
            assert lock.local.token is None or points.at_the_end, points.where
        del lock
        expect_free(client, points)

    each_point(attempt, error=error)


# Not TooLate: in a thread, where no handler runs, it is a time-out of the server's, after which a
# waiter's entry ends by itself. tests/faults/test_signal_errors.py raises it in the main thread.
@pytest.mark.parametrize("error", ERRORS[:2])
def test_a_lock_that_is_passed_on(client: redis.Redis, error: type[BaseException]) -> None:
    holder = Lock(client, NAME, timeout=60, grant_timeout=GRANT, thread_local=False)

    def attempt(points: Points) -> None:
        prepare(client)
        holder.acquire()
        lock = Lock(client, NAME, timeout=60, grant_timeout=GRANT, renew=True)
        try:
            with points.watched(), lock:
                assert lock.fence
        except error:
            assert lock.local.token is None or points.at_the_end, points.where
        del lock
        if holder.owned():
            holder.release()
        expect_free(client, points)

    each_point(attempt, function=WAITS, meanwhile=holder.release, error=error)


def test_going_in_again(client: redis.Redis) -> None:
    """Who goes in again leaves the lock to the block around it, and that one releases it."""

    def make() -> Lock:
        return Lock(client, NAME, timeout=60, renew=True, reentrant=True)

    def attempt(points: Points) -> None:
        prepare(client)
        outer, inner = make(), make()
        with outer:
            try:
                with points.watched(), inner:
                    assert inner.fence == outer.fence
            except Interrupt:
                assert inner.local.token is None or points.at_the_end, points.where
            del inner
            assert outer.owned(), points.where
            assert outer.local.entry.depth == 1, points.where
        expect_free(client, points)

    each_point(attempt, modules=("django_redis_lock.",))


@pytest.mark.parametrize("contended", [False, True])
def test_a_place(client: redis.Redis, contended: bool) -> None:
    """The second of a lock with ``limit=2``, whose first is held."""
    options: Any = {"timeout": 60, "grant_timeout": GRANT, "thread_local": False, "limit": 2}
    first, holder = Lock(client, NAME, **options), Lock(client, NAME, **options)
    assert first.acquire()
    key = first.keys.at_place(2).lock

    def attempt(points: Points) -> None:
        prepare(client)
        lock = Lock(client, NAME, renew=True, **options)
        if contended:
            holder.acquire()
        try:
            with points.watched(), lock:
                assert lock.place == 2
        except Interrupt:
            assert lock.local.token is None or points.at_the_end, points.where
        del lock
        if contended and holder.owned():
            holder.release()
        until_nobody_leaves()
        assert not client.exists(first.keys.waiters), points.where
        if points.in_a_pop:
            expire_grant(client, key)
        assert holder.acquire(blocking_timeout=SOON), points.where
        assert holder.place == 2, points.where
        holder.release()
        assert not places(NAME), points.where
        assert not client.exists(key), points.where
        assert first.owned(), points.where

    function = WAITS if contended else ""
    each_point(
        attempt, function=function, meanwhile=holder.release, modules=("django_redis_lock.",)
    )


def redlock(servers: list[redis.Redis], folder: Path, **options: Any) -> Lock:
    options |= {"grant_timeout": GRANT, "server_timeout": SOON, "renew": True}
    return Redlock(servers, NAME, timeout=60, **options)


def with_fallback(servers: list[redis.Redis], folder: Path, **options: Any) -> Lock:
    options |= {"on_redis_down": "local", "local_folder": folder}
    return Lock(servers[0], NAME, timeout=60, grant_timeout=GRANT, renew=True, **options)


@pytest.fixture(scope="module")
def three() -> Iterator[list[redis.Redis]]:
    with ExitStack() as stack:
        yield [stack.enter_context(RedisServer()).client() for _ in range(3)]


def several(servers: list[redis.Redis], folder: Path, **options: Any) -> Lock:
    names = [NAME, f"{NAME} too"]
    options |= {"grant_timeout": GRANT, "renew": True, "lock_class": Lock}
    return MultiLock(servers[0], names, 60, **options)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("make", [redlock, with_fallback, several])
@pytest.mark.parametrize("contended", [False, True])
def test_other_kinds(
    three: list[redis.Redis],
    tmp_path: Path,
    make: Any,
    contended: bool,
    error: type[BaseException],
) -> None:
    servers = three if make is redlock else three[:1]

    def attempt(points: Points) -> None:
        for server in servers:
            prepare(server)
        lock = make(servers, tmp_path)
        holder = make(servers, tmp_path, thread_local=False)
        if contended:
            holder.acquire()
            points.function, points.meanwhile = "waiting._wait_in_redis", holder.release
        try:
            with points.watched(), lock:
                assert lock.fence
        except error:
            assert lock.local.token is None or points.at_the_end, points.where
        del lock
        if contended and holder.local.token:
            holder.release()
        until_nobody_leaves()
        if points.in_a_pop:
            for server in servers:
                expire_grant(server)
        assert holder.acquire(blocking_timeout=SOON), points.where
        holder.release()
        deadline = time.monotonic() + SOON
        while any(server.exists(NAME) for server in servers):
            assert time.monotonic() < deadline, points.where
            time.sleep(0.001)

    each_point(
        attempt, modules=CATCHING if error is TimeLimit else ("django_redis_lock.",), error=error
    )


class LateOnHost(Attempt):
    """Its lock in Redis expires while it takes the one of this host, and another takes it."""

    def _take_file(self, file: Any, hold: Any, **options: Any) -> Any:
        client = self._lock.redis
        until(lambda: not hold.is_valid and not client.exists(NAME))
        assert Lock(client, NAME, timeout=60).acquire(blocking=False)
        return super()._take_file(file, hold, **options)


class RepeatedAcquire(Lock):
    """Its second request is interrupted when the waiter is registered."""

    asked = 0

    def _run(self, call: Any, *args: Any) -> Any:
        reply = super()._run(call, *args)
        self.asked += call.script is ACQUIRE
        if self.asked == 2:
            assert self.redis.zcard(self.keys.waiters) == 1
            raise Interrupt
        return reply


def test_a_repeated_acquire_leaves_no_waiter_behind(
    client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquisition, "WAITER_LIFETIME_SECONDS", 600.0)
    prepare(client)
    options: Any = {"on_redis_down": "local", "local_folder": tmp_path}
    monkeypatch.setattr(fallback, "Attempt", LateOnHost)
    lock = RepeatedAcquire(client, NAME, timeout=0.1, **options)
    with pytest.raises(Interrupt):
        lock.acquire()
    until(lambda: not client.exists(lock.keys.waiters))
    assert not held_locally(tmp_path)


@pytest.mark.parametrize("how", ["local", "run"])
def test_without_redis(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Records that pytest keeps lead to errors, their frames and so to the handle.
    for name in ("outage", "waiting"):
        monkeypatch.setattr(logging.getLogger(f"django_redis_lock.{name}"), "disabled", True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = redis.Redis(port=unused.getsockname()[1], retry=Retry(NoBackoff(), 0))

        def attempt(points: Points) -> None:
            options: Any = {"on_redis_down": how, "local_folder": tmp_path, "timeout": 60}
            lock = Lock(nobody, NAME, **options)
            try:
                with points.watched(), lock:
                    assert lock.degraded
            except Interrupt:
                assert lock.degraded is None or points.at_the_end, points.where
            del lock
            if points.at_the_end:
                gc.collect()  # Errors and frames refer to each other.
            assert not held_locally(tmp_path), points.where

        each_point(attempt, modules=("django_redis_lock.",))


def test_a_grant_that_arrives_unread_is_given_back(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Lock(client, NAME, timeout=60, grant_timeout=GRANT)
    lock = Lock(client, NAME, timeout=60, grant_timeout=GRANT, thread_local=False)

    def interrupted(self: ThreadQueue) -> None:
        raise Interrupt

    prepare(client)
    holder.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(ThreadQueue, "reply", interrupted)
        waiting = Background(lock.acquire)
        until(lambda: blocked(client))
        holder.release()
        with pytest.raises(Interrupt):
            waiting.result()
    assert lock.local.token is None
    expect_free(client, Points())


@pytest.mark.parametrize("when", ["sending", "reading"])
def test_a_grant_that_is_lost_with_its_waiter_ends_with_its_own_lifetime(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    holder = Lock(client, NAME, timeout=60, grant_timeout=0.5, thread_local=False)
    lock = Lock(client, NAME, timeout=60, thread_local=False)
    method = {"sending": "begin_pop", "reading": "reply"}[when]
    do = getattr(ThreadQueue, method)

    def interrupted(self: ThreadQueue, *args: Any) -> None:
        do(self, *args)
        if when == "sending":
            until(lambda: blocked(client))
            holder.release()
        self.disconnect()  # As redis-py does when it is interrupted.
        raise Interrupt

    prepare(client)
    holder.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(ThreadQueue, method, interrupted)
        waiting = Background(lock.acquire)
        if when == "reading":
            until(lambda: blocked(client))
            holder.release()
        with pytest.raises(Interrupt):
            waiting.result()
    assert lock.local.token is None
    expect_free(client, Points())


@pytest.mark.parametrize("freed", [True, False])
def test_a_wait_that_ends(client: redis.Redis, freed: bool) -> None:
    """At its deadline, when the last try finds the lock free, or does not."""
    lock = Lock(client, NAME, timeout=60, grant_timeout=GRANT, blocking_timeout=0.001)

    def attempt(points: Points) -> None:
        prepare(client)
        client.set(NAME, "another's")
        try:
            with points.watched():
                acquired = lock.acquire()
            assert acquired is freed, points.where
            if acquired:
                lock.release()
        except Interrupt:
            assert lock.local.token is None, points.where
        if client.get(NAME) == b"another's":
            client.delete(NAME)
        expect_free(client, points)

    free = (lambda: client.delete(NAME)) if freed else None
    each_point(
        attempt, begin="waiting._wait_in_redis", function="waiting._last_try", meanwhile=free
    )


def test_a_thread_behind_another(client: redis.Redis) -> None:
    """Who waits in memory passes its turn on, and takes none with it."""
    lock = Lock(client, NAME, timeout=60, grant_timeout=GRANT)

    def attempt(points: Points) -> None:
        prepare(client)
        client.set(NAME, "another's")
        first = Background(lambda: lock.acquire() and lock.release() is None)
        until(lambda: places(NAME) == 1 and blocked(client))
        connections = blocked(client)
        second = Background(lambda: lock.acquire() and lock.release() is None)
        until(lambda: places(NAME) == 2)
        try:
            with points.watched():
                assert not lock.acquire(blocking_timeout=0.001)
        except Interrupt:
            assert lock.local.token is None, points.where
        assert blocked(client) == connections, points.where
        assert Lock(client, NAME).reset()
        assert first.result()
        assert second.result()
        expect_free(client, points)

    each_point(attempt, begin="waiting._wait")


def empty() -> str:
    return ""


def page(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


def in_a_task(cache: Any) -> None:
    """The task goes on after the interrupt."""

    async def work() -> None:
        try:
            await cache.aget_or_set("report", str, 60)
        finally:
            assert not any(under_computation.get())

    asyncio.run(work())


COMPUTING: dict[str, Callable[[Any], Any]] = {
    "get_or_set": lambda cache: cache.get_or_set("report", str, 60),
    "stale": lambda cache: cache.get_or_set("report", str, 60, stale=60),
    "refreshed in the background": lambda cache: cache.get_or_set(
        "report", str, 60, stale=60, background=True
    ),
    "compute": lambda cache: cache.compute("report", str, 60),
    "get_or_set_many": lambda cache: cache.get_or_set_many(
        ["report", "other"], lambda keys: dict.fromkeys(keys, ""), 60
    ),
    "cached_page": lambda cache: cached_page(60)(page)(RequestFactory().get("/page/")),
    "cached": lambda cache: cached("report", timeout=60)(empty)(),
    "aget_or_set": in_a_task,
}


# An interrupt may come between making a coroutine and awaiting it.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("name", COMPUTING)
def test_nothing_counts_as_being_computed_after_the_call(client: redis.Redis, name: str) -> None:
    """Else the caller could not request the value again: its function would seem to do so."""
    cache: Any = caches["default"]

    def attempt(points: Points) -> None:
        client.flushdb()
        try:
            with points.watched():
                COMPUTING[name](cache)
        except Interrupt:
            assert not any(under_computation.get()), points.where
        COMPUTING[name](cache)
        client.flushdb()
        elsewhere(COMPUTING[name], cache)  # It waits for nobody.

    each_point(attempt, modules=("django_redis_lock.singleflight", "contextlib"))


# An interrupt may come between making a coroutine and awaiting it.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("error", [Interrupt, TimeLimit])
@pytest.mark.parametrize("name", COMPUTING)
def test_a_computation(
    client: redis.Redis, settings: Any, name: str, error: type[BaseException]
) -> None:
    """Its flight ends at once, wherever it is interrupted: others would wait for nothing."""
    settings.DJANGO_REDIS_LOCK = {"FLIGHT_TIMEOUT": 600}
    cache: Any = caches["default"]

    def attempt(points: Points) -> None:
        client.flushdb()
        if "stale" in name or "background" in name:
            cache.set("report", "old", timeout=30)
        try:
            with points.watched():
                COMPUTING[name](cache)
        except error:
            pass
        until(lambda: not client.keys("*:flight") and not renewals())

    each_point(attempt, modules=("django_redis_lock.", "contextlib"), error=error)
