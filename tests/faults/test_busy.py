"""Somebody's long script keeps Redis from doing anything else: it answers BUSY. That passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import redis

from django_redis_lock import Lock
from django_redis_lock.cache import RedisCache
from django_redis_lock.keeper import SentOnce, keeper
from django_redis_lock.locking.lock import ThreadQueue
from django_redis_lock.protocol.holder_scripts import CLOCK
from django_redis_lock.protocol.script import Call
from django_redis_lock.transport.refusals import is_outage
from django_redis_lock.transport.server import RetryPolicy, run_all
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.background import Background
from tests.support.interrupts import TimeLimit
from tests.support.tasks import in_tasks

pytestmark = pytest.mark.invariant("P3")


@pytest.fixture
def own_client(own_server: RedisServer) -> Iterator[redis.Redis]:
    with own_server.client() as client:
        client.config_set("lua-time-limit", 1)
        yield client


@contextmanager
def busy(server: RedisServer) -> Iterator[Callable[[], None]]:
    """Redis runs a script until the block is left, or what it gives is called."""

    def run_forever() -> None:
        with suppress(redis.ResponseError), server.client(socket_timeout=None) as client:
            client.eval("while true do end", 0)

    script = threading.Thread(target=run_forever, daemon=True)
    script.start()
    with server.client() as client:

        def answers_busy() -> bool:
            try:
                client.exists("x")
            except redis.ResponseError as error:
                return str(error).startswith("BUSY ")
            return False

        def end() -> None:
            if script.is_alive():
                client.script_kill()
                script.join(PATIENCE)

        until(answers_busy)
        try:
            yield end
        finally:
            end()


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What calls were refused with."""
    found: list[Exception] = []
    after = RetryPolicy.after

    def noted(self: RetryPolicy, error: Exception, node: Any) -> float:
        found.append(error)
        return after(self, error, node)

    monkeypatch.setattr(RetryPolicy, "after", noted)
    return found


def ask_the_time_twice(client: redis.Redis, lock: Any) -> Any:
    return len(run_all(client, [Call(CLOCK, (), ())] * 2)) == 2


CALLS: dict[str, Callable[[redis.Redis, Any], Any]] = {
    "release": lambda client, lock: lock.release(),
    "extend": lambda client, lock: lock.extend(5),
    "owned": lambda client, lock: lock.owned(),
    "acquire": lambda client, lock: Lock(client, "free", 30).acquire(),
    "try": lambda client, lock: Lock(client, "free", 30).acquire(blocking=False),
    "several calls": ask_the_time_twice,
}


@pytest.mark.parametrize(
    ("call", "asynchronous"),
    [*((call, False) for call in CALLS), ("release", True), ("owned", True)],
)
def test_calls_wait_until_it_is_over(
    call: str,
    asynchronous: bool,
    own_server: RedisServer,
    own_client: redis.Redis,
    refusals: list[Exception],
) -> None:
    with in_tasks(own_client) as tasks:
        make = tasks.make_lock if asynchronous else partial(Lock, own_client)
        lock = make("busy", timeout=30, thread_local=False)
        assert lock.acquire(blocking=False)
        with busy(own_server) as end:
            calling = Background(lambda: CALLS[call](own_client, lock))
            began = time.monotonic()
            until(lambda: len(refusals) > 7 or calling.done)
            assert time.monotonic() - began > 0.3, "the pauses grow"
            assert not calling.done
            end()
            assert calling.result() in (True, None)


def test_an_interrupted_waiter_leaves_no_pop_behind(
    own_server: RedisServer, own_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next grant would go into it."""
    go_on, connections = threading.Event(), []

    def interrupted(self: ThreadQueue, seconds: float) -> bool:
        connections.append(self.connection)
        assert go_on.wait(PATIENCE)
        raise TimeLimit

    monkeypatch.setattr(ThreadQueue, "pop_ended", interrupted)
    unrelated = Lock(own_client, "unrelated", timeout=60, renew=True)
    holder = Lock(own_client, "slow", timeout=60, grant_timeout=60)
    with unrelated, holder:
        waiter = Background(Lock(own_client, "slow", timeout=60).acquire)
        with own_server.client() as asking:
            until(lambda: asking.info("clients")["blocked_clients"])
            with busy(own_server):
                go_on.set()
                with pytest.raises(TimeLimit):
                    waiter.result()
                until(lambda: not any(isinstance(job, SentOnce) for job in keeper().jobs()))
                with pytest.raises(redis.ConnectionError, match="closed"):
                    connections[0].can_read()


@pytest.mark.parametrize("warm", [False, True])
def test_a_value_is_computed_once(
    own_server: RedisServer, own_client: redis.Redis, refusals: list[Exception], warm: bool
) -> None:
    cache = RedisCache(own_server.url, {})
    if warm:
        cache.set("report", 1, 60)
    with busy(own_server) as end:
        reading = Background(lambda: cache.get_or_set("report", lambda: 2, 60))
        until(lambda: len(refusals) > 3 or reading.done)
        assert not reading.done
        end()
        assert reading.result() == (1 if warm else 2)
    assert cache.get("report") == (1 if warm else 2)


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL.", True),
        ("BUSYKEY Target key name already exists.", False),
        ("BUSYGROUP Consumer Group name already exists", False),
    ],
)
def test_what_passes_by_itself(said: str, passes: bool) -> None:
    assert is_outage(redis.ResponseError(said)) is passes
