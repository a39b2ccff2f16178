"""``Redlock`` and ``AsyncRedlock`` on five servers: the contract, and what only several servers can
do. What happens when some of them fail is in ``tests/faults/test_redlock_faults.py``."""

from __future__ import annotations

import _thread
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncRedlock, Redlock
from django_redis_lock.history import CrashRecord
from django_redis_lock.ops.inventory.listing import inspect
from tests.holding import crash, hurry, settle
from tests.lock_contract import LockContract
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.backends import Backend, places
from tests.support.redlocks import AMPLE, FIVE, clients, five
from tests.support.tasks import ForThreads, Tasks

__all__ = ["clients", "five"]


class OnFive(Backend):
    def __init__(self, clients: list[redis.Redis]) -> None:
        self.clients = clients

    def make_lock(self, name: str | bytes = "contract", **options: Any) -> Any:
        return Redlock(self.clients, name, **{"server_timeout": AMPLE, **options})

    def value(self, name: str) -> bytes | None:
        ((value, count),) = Counter(client.get(name) for client in self.clients).most_common(1)
        return value if count > FIVE // 2 else None

    def expire_in(self, name: str, seconds: float) -> None:
        milliseconds = int(seconds * 1000)
        assert sum(client.pexpire(name, milliseconds) for client in self.clients) > FIVE // 2

    def delete_key(self, name: str) -> None:
        assert sum(client.delete(name) for client in self.clients) > FIVE // 2

    def forget_everything(self) -> None:
        for client in self.clients:
            client.flushdb()

    def waiting(self, name: str) -> int:
        return places(name)


@pytest.mark.sample(3, 1)
class TestRedlock(LockContract):
    @pytest.fixture
    def backend(self, clients: list[redis.Redis]) -> Backend:
        return OnFive(clients)

    @pytest.mark.sample(1)
    def test_who_died_is_remembered_on_each_server(
        self, clients: list[redis.Redis], pace: int
    ) -> None:
        dead = Redlock(clients, "left", timeout=2 * pace, label="nightly")
        assert dead.acquire()
        until(lambda: all(client.hexists("{left}:owner", "id") for client in clients))
        crash(dead)
        until(lambda: not any(client.exists("left") for client in clients))
        with Redlock(clients, "left", timeout=30, server_timeout=AMPLE):
            hurry(CrashRecord)
            until(lambda: all(inspect(client, b"left").events for client in clients))
        for client in clients:
            (event,) = inspect(client, b"left").events
            assert (event.what, event.owner.label) == ("crashed", "nightly")

    @pytest.mark.sample(1)
    def test_it_needs_no_further_thread(
        self, clients: list[redis.Redis], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def start(*_: Any) -> None:
            raise RuntimeError("can't start new thread")

        lock = Redlock(clients, "crowded", 60, server_timeout=AMPLE, blocking=False)
        with monkeypatch.context() as patch:
            patch.setattr(_thread, "start_new_thread", start)
            assert lock.acquire()
            lock.release()

    @pytest.mark.sample(1)
    def test_what_too_few_servers_granted_is_given_back(self, clients: list[redis.Redis]) -> None:
        """Also where the description was evicted."""

        class Evicting(Redlock):
            def _ask_servers(self, calls: Any, patience: float) -> Any:
                for client in clients:
                    client.delete("{part}:owner")
                return super()._ask_servers(calls, patience)

        for client in clients[:3]:
            client.set("part", "another", px=60_000)
        assert not Evicting(clients, "part", 60, server_timeout=AMPLE).acquire(blocking=False)
        assert [client.get("part") for client in clients] == [b"another"] * 3 + [None] * 2

    @pytest.mark.sample(1)
    def test_a_server_that_has_it_no_more_is_not_asked_for_it_at_once(
        self, clients: list[redis.Redis]
    ) -> None:
        """A forced release ends it on one server after the other."""
        lock = Redlock(clients, "forced", 60, renew=True, server_timeout=AMPLE)
        lock.acquire()
        clients[0].delete("forced")
        for _ in range(3):
            hurry()
            settle()
        assert [client.exists("forced") for client in clients] == [0, 1, 1, 1, 1]
        lock.release()


class InTasks(OnFive):
    def __init__(self, clients: list[redis.Redis], async_clients: Any, tasks: Tasks) -> None:
        super().__init__(clients)
        self._async_clients = async_clients
        self._tasks = tasks

    def make_lock(self, name: str | bytes = "contract", **options: Any) -> Any:
        options = {"server_timeout": AMPLE, **options}
        return ForThreads(self._tasks, AsyncRedlock(self._async_clients, name, **options))


@pytest.mark.sample(7)
class TestAsyncRedlock(LockContract):
    @pytest.fixture
    def backend(self, clients: list[redis.Redis], five: list[RedisServer]) -> Iterator[Backend]:
        tasks = Tasks()
        async_clients = [redis.asyncio.Redis.from_url(server.url) for server in five]
        yield InTasks(clients, async_clients, tasks)
        for client in async_clients:
            tasks.do(client.connection_pool.disconnect)
        tasks.close()
