"""Redis goes away, comes back with or without its data, freezes, or loses what it knew."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redis_lock import Lock
from django_redis_lock.transport import server_of
from tests.processes import PATIENCE, in_threads, until
from tests.redis_server import RedisServer
from tests.support.backends import places
from tests.support.background import Background
from tests.support.values import blocked


@pytest.fixture
def lasting_server() -> Iterator[RedisServer]:
    """One that keeps its data."""
    with RedisServer(persistent=True) as server:
        yield server


def client_of(server: RedisServer, **options: Any) -> redis.Redis:
    return server.client(retry=Retry(NoBackoff(), 0), **options)


class Holder:
    """A renewed lock, and whether it was told of its loss."""

    def __init__(self, client: redis.Redis, timeout: float = 1.0) -> None:
        self.told = threading.Event()
        self.lock = Lock(client, "faulty", timeout=timeout, renew=True, on_lost=self.told.set)
        assert self.lock.acquire()


def in_background(client: redis.Redis, **options: Any) -> Background:
    """Another, which waits for the lock and gives it back."""
    options = {"timeout": 30, "blocking_timeout": PATIENCE} | options

    def wait() -> int | None:
        with Lock(client, "faulty", **options) as lock:
            return lock.fence

    waiter = Background(wait)
    until(lambda: places("faulty"))
    return waiter


class TestLosingTheData:
    @pytest.mark.parametrize("how", ["flush", "delete", "restart", "crash", "away for a while"])
    def test_the_waiter_acquires_and_the_holder_calls_on_lost(
        self, own_server: RedisServer, how: str
    ) -> None:
        client = client_of(own_server)
        holder = Holder(client)
        before = holder.lock.fence
        waiter = in_background(client)
        until(lambda: blocked(client))
        if how == "flush":
            client.flushall()
        elif how == "delete":
            client.delete("faulty")
        elif how == "restart":
            own_server.restart()
        elif how == "crash":
            own_server.kill()
            own_server.start()
        else:
            own_server.stop()
            assert holder.told.wait(PATIENCE)
            own_server.start()
        fence = waiter.result()
        assert fence is not None
        assert before is not None
        assert fence > before
        assert holder.told.wait(PATIENCE)
        assert holder.lock.lost


class TestKeepingTheData:
    @pytest.mark.parametrize("how", ["restart", "kill"])
    def test_the_holder_keeps_the_lock(self, lasting_server: RedisServer, how: str) -> None:
        client = client_of(lasting_server)
        holder = Holder(client, timeout=15)
        waiter = in_background(client)
        until(lambda: blocked(client))
        token = holder.lock.local.token
        if how == "kill":
            lasting_server.kill()
            time.sleep(0.5)
            lasting_server.start()
        else:
            lasting_server.restart()
        until(lambda: client.zcard("{faulty}:waiters") and blocked(client))
        assert not waiter.done
        assert client.get("faulty") == token
        assert holder.lock.owned()
        holder.lock.ensure_held()
        holder.lock.release()
        assert waiter.result()
        assert not holder.told.is_set()


@pytest.mark.invariant("L5")
class TestFreezing:
    def test_the_holder_keeps_the_lock(self, own_server: RedisServer, pace: int) -> None:
        client = client_of(own_server)
        holder = Holder(client, timeout=3.0 * pace)
        waiter = in_background(client)
        own_server.pause()
        time.sleep(1.3 * pace)  # A renewal gets no reply.
        own_server.resume()
        until(lambda: client.pttl("faulty") > 2700 * pace)
        assert not waiter.done
        holder.lock.ensure_held()
        holder.lock.release()
        assert waiter.result()
        assert not holder.told.is_set()

    def test_the_holder_calls_on_lost_before_the_deadline(
        self, own_server: RedisServer, pace: int
    ) -> None:
        """Before the server can give the lock to anybody."""
        client = client_of(own_server)
        holder = Holder(client, timeout=0.8 * pace)
        waiter = in_background(client)
        own_server.pause()
        assert holder.told.wait(PATIENCE)
        assert holder.lock.lost
        assert not waiter.done
        own_server.resume()
        assert waiter.result()

    @pytest.mark.parametrize("waits_already", [True, False])
    def test_a_wait_ends_at_its_deadline(
        self, own_server: RedisServer, waits_already: bool
    ) -> None:
        client = client_of(own_server, socket_timeout=3 * PATIENCE)
        holder = Holder(client, timeout=60)
        lock = Lock(client, "faulty")
        if not waits_already:
            own_server.pause()
        began = time.monotonic()
        waiter = Background(lambda: lock.acquire(blocking_timeout=1))
        if waits_already:
            until(lambda: blocked(client))
            own_server.pause()
        try:
            assert waiter.result() is False
        except redis.TimeoutError:
            assert not waits_already
        assert time.monotonic() - began < PATIENCE
        own_server.resume()
        holder.lock.ensure_held()
        holder.lock.release()
        assert Lock(client, "faulty").acquire(blocking_timeout=PATIENCE)


class TestConnections:
    def test_idle_connections_break_with_the_server(self, lasting_server: RedisServer) -> None:
        """All at once, and before it could be noticed; a call takes the next one only once."""
        client = client_of(lasting_server)
        numbers = iter(range(8))
        lock = Lock(client, "faulty", timeout=30, thread_local=False)

        def work() -> None:
            name = f"lock-{next(numbers)}"
            for _ in range(50):
                with Lock(client, name, timeout=30):
                    pass

        in_threads(8, work)
        lasting_server.restart()
        assert lock.acquire(blocking=False)
        assert in_threads(8, lock.owned) == [True] * 8
        lasting_server.restart()
        assert in_threads(8, lock.owned) == [True] * 8
        assert not server_of(client).breaker.failing
        lasting_server.restart()
        lock.release()
        assert not lock.locked()

    @pytest.mark.parametrize("reason", ["ERROR", "TIMEOUT", "kill"])
    def test_an_operator_ends_a_wait(self, own_server: RedisServer, reason: str) -> None:
        client = client_of(own_server)
        holder = Holder(client, timeout=30)
        waiter = in_background(client)
        for _ in range(3):
            until(lambda: blocked(client))
            (waiting,) = [c for c in client.client_list() if "b" in c["flags"]]
            if reason == "kill":
                client.client_kill_filter(_id=waiting["id"])
            else:
                client.client_unblock(int(waiting["id"]), error=reason == "ERROR")
        until(lambda: blocked(client))
        assert not waiter.done
        holder.lock.release()
        assert waiter.result()
