"""Redis has no memory left (S8): with ``noeviction`` it refuses what may allocate, with the other
policies it throws keys away. Neither loses a healthy lock, nor keeps a free one from anybody."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.test import override_settings
from redis.exceptions import OutOfMemoryError

from django_redis_lock import Lock, Redlock
from django_redis_lock.singleflight.flight import FlightRenewal
from tests.holding import hurry, renew
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.backends import places
from tests.support.background import Background
from tests.support.values import Producer

pytestmark = [
    pytest.mark.invariant("S8"),
    pytest.mark.usefixtures("patient", "watched_often"),
]

NAME = "full"
#: A grant lives so long that nothing but the release can have brought it in time.
GRANT = 60.0


class Memory:
    """Three servers whose memory can be used up, and back again."""

    def __init__(self, servers: list[RedisServer]) -> None:
        self.clients = [server.client() for server in servers]

    @property
    def client(self) -> redis.Redis:
        return self.clients[0]

    def is_used_up(self) -> None:
        for client in self.clients:
            client.config_set("maxmemory", 1)
        with pytest.raises(OutOfMemoryError):
            self.client.set("anything", "")

    def is_there(self) -> None:
        for client in self.clients:
            client.config_set("maxmemory", 0)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RedisServer]]:
    with RedisServer() as one, RedisServer() as two, RedisServer() as three:
        yield [one, two, three]


@pytest.fixture
def memory(servers: list[RedisServer]) -> Iterator[Memory]:
    memory = Memory(servers)
    memory.is_there()
    for client in memory.clients:
        client.flushall()
        client.config_set("maxmemory-policy", "noeviction")
    yield memory
    memory.is_there()
    for client in memory.clients:
        client.close()


#: Handles of every kind of token, and on several servers. They may be released in another thread.
KINDS: dict[str, Callable[..., Any]] = {
    "random token": lambda memory, **options: Lock(memory.client, NAME, **SHARED, **options),
    "chosen token": lambda memory, **options: Lock(
        memory.client, NAME, id=secrets.token_hex(8), **SHARED, **options
    ),
    "several servers": lambda memory, **options: Redlock(
        memory.clients, NAME, server_timeout=5, **SHARED, **options
    ),
}
SHARED = {"thread_local": False}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())


def waits(memory: Memory) -> bool:
    return any(client.info("clients")["blocked_clients"] for client in memory.clients)


@kinds
@pytest.mark.parametrize("renew_it", [True, False])
def test_a_lock_is_kept_and_its_holder_described(
    memory: Memory, make: Callable[..., Any], renew_it: bool
) -> None:
    with make(memory, timeout=60, renew=renew_it, label="for people") as lock:
        memory.is_used_up()
        for _ in range(4 if renew_it else 0):
            renew(memory.client, NAME)
        until(lambda: lock.holder().label)
        assert lock.holder().label == "for people"
        lock.ensure_held()
        assert lock.owned()


@kinds
@pytest.mark.parametrize("min_hold", [0, 0.3])
def test_it_is_passed_on_extended_and_released(
    memory: Memory, make: Callable[..., Any], min_hold: float
) -> None:
    options: dict[str, Any] = {"timeout": 50, "grant_timeout": GRANT, "blocking_timeout": 10}
    holder = make(memory, min_hold=min_hold, **options)
    assert holder.acquire()
    waiter = make(memory, **options)
    waiting = Background(waiter.acquire)
    until(lambda: waits(memory))
    memory.is_used_up()
    holder.release()
    assert waiting.result() is True
    assert waiter.fence > holder.fence
    waiter.extend(40)
    assert 80 < waiter.ttl() < 91
    waiter.reacquire()
    assert 40 < waiter.ttl() < 51
    waiter.release()
    memory.is_there()
    with make(memory, timeout=30, blocking_timeout=0.1) as lock:
        assert lock.fence > waiter.fence


@kinds
def test_a_waiter_that_stops_leaves_the_queue_at_once(
    memory: Memory, make: Callable[..., Any], pace: int
) -> None:
    with (
        Lock(memory.client, NAME, timeout=30) as first,
        Redlock(memory.clients, NAME + " elsewhere", timeout=30),
    ):
        assert first.owned()
        patience = 0.5 * pace
        waiting = Background(lambda: make(memory, timeout=30).acquire(blocking_timeout=patience))
        until(lambda: waits(memory) or waiting.done)
        memory.is_used_up()
        assert waiting.result() is False
        until(lambda: not waits(memory))


def test_holders_of_places_keep_them_and_pass_them_on(memory: Memory) -> None:
    options: dict[str, Any] = {"limit": 2, "grant_timeout": GRANT, **SHARED}
    first, second = (Lock(memory.client, NAME, timeout=60, renew=True, **options) for _ in "12")
    assert first.acquire()
    assert second.acquire()
    waiters = [Lock(memory.client, NAME, timeout=50, **options) for _ in range(2)]
    waiting = [Background(lock.acquire, None, None, PATIENCE) for lock in waiters]
    until(lambda: waits(memory) and places(NAME) == 2)
    memory.is_used_up()
    for lock in (first, second) * 2:
        renew(memory.client, lock.local.hold.keys.lock)
    assert first.owned()
    assert second.owned()
    second.release()
    until(lambda: any(each.done for each in waiting))
    memory.client.delete(NAME)  # The first holder has vanished.
    assert [each.result() for each in waiting] == [True, True]
    assert {lock.place for lock in waiters} == {1, 2}
    assert min(lock.fence for lock in waiters) > second.fence
    for lock in waiters:
        lock.extend(40)
        assert lock.owned()
        lock.release()
    assert not first.holders()


@pytest.mark.parametrize("token", [None, "chosen"])
def test_a_free_lock_may_be_refused_and_nothing_is_left_of_it(
    memory: Memory, token: str | None
) -> None:
    memory.is_used_up()
    lock = Lock(memory.client, NAME)  # It would never expire.
    # redis-py takes the word OOM away; before Redis 7 it stands within the text.
    with pytest.raises(redis.ResponseError, match="used memory > 'maxmemory'"):
        Background(lambda: lock.acquire(token=token)).result()
    assert not memory.client.keys()
    memory.is_there()
    with Lock(memory.client, NAME, blocking_timeout=0.1):
        pass


class TestComputations:
    @pytest.fixture
    def cache(self, memory: Memory, servers: list[RedisServer]) -> Iterator[Any]:
        settings = {
            "BACKEND": "django_redis_lock.cache.RedisCache",
            "LOCATION": servers[0].url,
            "OPTIONS": {"LOCK_FLIGHT_TIMEOUT": 60},
        }
        with override_settings(CACHES={"default": settings}):
            yield caches["default"]

    def test_one_that_began_before_ends_as_others_do(self, memory: Memory, cache: Any) -> None:
        """It is renewed meanwhile, and nobody waits for its lifetime to run out at its end."""
        slow = Producer()
        slow.finish.clear()
        leader = Background(cache.get_or_set, "key", slow)
        assert slow.begun.wait(PATIENCE)
        (flight,) = memory.client.keys("*flight")
        memory.is_used_up()
        leading = memory.client.get(flight)
        memory.client.pexpire(flight, 30_000)
        until(lambda: (hurry(FlightRenewal), memory.client.pttl(flight) > 40_000)[1])
        assert memory.client.get(flight) == leading
        slow.finish.set()
        assert leader.result() == "computed"
        assert not memory.client.exists(flight)
        assert cache.get("key") is None, "a value is not worth more memory"

    def test_values_are_computed_all_the_same(self, memory: Memory, cache: Any) -> None:
        memory.is_used_up()
        assert cache.get_or_set("key", lambda: "computed") == "computed"


@kinds
def test_it_can_be_reset(memory: Memory, make: Callable[..., Any]) -> None:
    assert make(memory, timeout=50).acquire()
    waiter = make(memory, timeout=50, grant_timeout=GRANT, blocking_timeout=10)
    waiting = Background(waiter.acquire)
    until(lambda: waits(memory))
    memory.is_used_up()
    assert make(memory, grant_timeout=GRANT).reset() is True
    assert waiting.result() is True
    waiter.release()


def test_a_vanished_holders_lock_is_the_waiters(memory: Memory) -> None:
    assert Lock(memory.client, NAME, timeout=50).acquire()
    waiter = KINDS["random token"](memory, timeout=50, blocking_timeout=10)
    waiting = Background(waiter.acquire)
    until(lambda: waits(memory))
    memory.is_used_up()
    memory.client.delete(NAME)
    assert waiting.result() is True
    waiter.release()
