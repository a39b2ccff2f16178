"""Locks with ``limit=N``: the contract at any of the places, and what N holders have in common."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from django_redis_lock import AsyncLock, Lock, LockNotAcquired, LockNotOwnedError, Redlock
from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.history import CrashRecord
from django_redis_lock.ops.inventory import (
    Outcome,
    delete_matching,
    empty,
    inspect,
    list_held,
    release,
)
from django_redis_lock.protocol import lock_keys, parse_acquire, parse_grant
from django_redis_lock.protocol.keys import INDEX, LAST_FENCE
from django_redis_lock.transport import run
from tests.holding import crash, hurry
from tests.lock_contract import LockContract
from tests.processes import PATIENCE, in_threads, until
from tests.support.backends import Backend, OnRedis
from tests.support.backends import places as waiting
from tests.support.background import Background
from tests.support.tasks import ForThreads, Tasks, in_this_loop

pytestmark = pytest.mark.invariant("S7")

LIMIT = 3


class AtPlace(OnRedis):
    """Locks with three places, two of which are taken already by locks that never expire."""

    def __init__(self, client: redis.Redis, place: int) -> None:
        super().__init__(client)
        self.place = place
        self.filled: dict[str | bytes, list[Lock]] = {}
        self.fill("contract")

    def fill(self, name: str | bytes) -> None:
        self.filled[name] = locks = [Lock(self.client, name, limit=LIMIT) for _ in range(LIMIT)]
        assert all(lock.acquire(blocking=False) for lock in locks)
        locks[self.place - 1].release()

    def make_lock(self, name: str | bytes = "contract", **options: Any) -> Any:
        if isinstance(name, (str, bytes)) and name and name not in self.filled:
            self.fill(name)
        return super().make_lock(name, limit=LIMIT, **options)

    def key(self, name: str | bytes) -> bytes:
        encoded = name if isinstance(name, bytes) else name.encode()
        return lock_keys(encoded).at_place(self.place).lock

    def value(self, name: str) -> bytes | None:
        value: bytes | None = self.client.get(self.key(name))
        return value

    def expire_in(self, name: str, seconds: float) -> None:
        assert self.client.pexpire(self.key(name), int(seconds * 1000))

    def delete_key(self, name: str) -> None:
        assert self.client.delete(self.key(name))


class ContractAtPlace(LockContract):
    """The contract, where the holders of the other places make no difference."""

    test_a_wait_for_oneself_is_logged = None  # Another place may become free.

    def test_ttl(self, make: Any) -> None:
        lock = make(timeout=30)
        assert lock.ttl() == math.inf, "that of the others"
        lock.acquire()
        assert 20 < lock.ttl() <= 30
        assert 20 < make().ttl() <= 30
        lock.release()

    def test_the_holder_is_named(self, make: Any) -> None:
        lock = make(timeout=30, label="nightly report")
        lock.acquire()
        hurry()
        until(lambda: make().holder().label == "nightly report")
        assert [held.owner.label for held in make().holders()].count("nightly report") == 1
        assert make().held().place == lock.place
        lock.release()
        assert make().holder().label == ""

    def test_it_can_be_ended_by_force(self, make: Any) -> None:
        lock = make(timeout=30)
        lock.acquire()
        assert make().reset() is True
        assert make().holders() == []
        assert not lock.owned()
        with pytest.raises(LockNotOwnedError):
            lock.release()
        assert lock.reset() is False

    def test_ended_by_force_it_is_the_first_waiters(self, backend: Backend, make: Any) -> None:
        holder = make(timeout=30)
        holder.acquire()
        waiter = Background(lambda: make(timeout=30).acquire())
        self.wait_for_waiters(backend)
        assert make().reset() is True
        assert waiter.result() is True
        assert not holder.owned()
        assert len(holder.holders()) == 1


@pytest.mark.sample(3, 2)
class TestLockAtPlace(ContractAtPlace):
    @pytest.fixture
    def backend(self, client: redis.Redis) -> Backend:
        return AtPlace(client, 3)


@pytest.mark.sample(7, 2)
class TestLockInMemoryAtPlace(ContractAtPlace):
    @pytest.fixture
    def backend(self) -> Backend:
        return AtPlace(client_of(Database("memory")), 1)


class FromTasks(AtPlace):
    def __init__(self, client: redis.Redis, place: int, async_client: Any, tasks: Tasks) -> None:
        super().__init__(client, place)
        self._async_client = async_client
        self._tasks = tasks

    def make_lock(self, name: str | bytes = "contract", **options: Any) -> Any:
        super().make_lock(name, **options)
        lock = AsyncLock(self._async_client, name, limit=LIMIT, **options)
        return ForThreads(self._tasks, lock)


@pytest.mark.sample(7, 3)
class TestAsyncLockAtPlace(ContractAtPlace):
    # A thread has the other places, and may release them.
    test_nor_does_another_handle_of_its_caller = None

    @pytest.fixture
    def backend(self, client: redis.Redis) -> Iterator[Backend]:
        tasks = Tasks()
        async_client = tasks.do(lambda: in_this_loop(client))
        yield FromTasks(client, 2, async_client, tasks)
        tasks.do(async_client.connection_pool.disconnect)
        tasks.close()


class Holders:
    """Locks that are held at the same time."""

    def __init__(self, client: redis.Redis, **options: Any) -> None:
        self.client = client
        self.options = {"timeout": 60, "limit": LIMIT, **options}

    def lock(self, **options: Any) -> Lock:
        return Lock(self.client, "several", **{**self.options, **options})

    def acquired(self, count: int = LIMIT) -> list[Lock]:
        locks = [self.lock() for _ in range(count)]
        assert all(lock.acquire(blocking=False) for lock in locks)
        return locks

    def waiter(self, **options: Any) -> Background:
        """A waiter of its own in Redis; its result is the lock that it has acquired."""

        def wait() -> Lock:
            lock = self.lock(thread_local=False, **options)
            assert lock.acquire(blocking_timeout=PATIENCE)
            return lock

        return Background(wait)


@pytest.fixture
def several(any_client: redis.Redis) -> Holders:
    return Holders(any_client)


@pytest.mark.parametrize("limit", [0, -1, 1001, 1.0, 2.0, True, "3", None])
def test_a_limit_that_makes_no_sense_is_refused(limit: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="limit must be a whole number from 1 to"):
        Lock(redis.Redis(), "several", limit=limit)


def test_as_many_hold_it_as_the_limit_says(several: Holders) -> None:
    locks = several.acquired()
    assert [lock.place for lock in locks] == [1, 2, 3]
    assert len({lock.local.token for lock in locks}) == LIMIT
    fences = [lock.fence for lock in locks]
    assert fences == sorted(set(fences))
    assert all(lock.owned() for lock in locks)
    one_more = several.lock()
    assert not one_more.acquire(blocking=False)
    assert not one_more.acquire(blocking_timeout=0.05)
    locks[1].release()
    assert not one_more.locked()
    assert one_more.acquire(blocking=False)
    assert one_more.place == 2
    assert one_more.fence > max(fences)
    assert one_more.locked()
    with pytest.raises(LockNotAcquired, match="all 3 places are taken") as caught:
        several.lock(blocking=False).__enter__()
    assert 0 < caught.value.retry_after <= 60


def test_nothing_is_left_after_the_last_release(several: Holders) -> None:
    for _ in range(2):
        for lock in several.acquired():
            lock.release()
    assert set(several.client.scan_iter("*")) == {INDEX}
    assert several.client.zrange(INDEX, 0, -1) == [LAST_FENCE]


def test_each_place_is_passed_on_when_it_is_released(several: Holders) -> None:
    locks = several.acquired()
    waiters = []
    for number in range(LIMIT):
        waiters.append(several.waiter())
        until(lambda count=number: waiting("several") > count)
    for lock in reversed(locks):
        lock.release()
    taken = [waiter.result() for waiter in waiters]
    assert {lock.place for lock in taken} == {1, 2, 3}
    assert [lock.fence for lock in taken] == sorted(lock.fence for lock in taken)
    for lock in taken:
        assert lock.owned()
        lock.release()
    assert several.lock().holders() == []


def test_more_threads_than_places_take_turns(several: Holders) -> None:
    inside: list[int] = []
    most: list[int] = []
    mutex = threading.Lock()
    shared = several.lock()

    def work() -> int:
        for _ in range(10):
            with shared:
                with mutex:
                    inside.append(1)
                    most.append(len(inside))
                with mutex:
                    inside.pop()
        return 10

    assert in_threads(8, work) == [10] * 8
    assert max(most) <= LIMIT
    assert several.lock().holders() == []


def test_waiters_have_the_places_of_all_holders_that_have_vanished(several: Holders) -> None:
    several.acquired()
    waiters = [several.waiter() for _ in range(LIMIT)]
    until(lambda: waiting("several") == LIMIT)
    several.client.flushdb()
    assert {waiter.result().place for waiter in waiters} == {1, 2, 3}


@pytest.mark.parametrize("token", [None, "chosen"])
def test_a_repeated_request_has_its_place_again(several: Holders, token: str | None) -> None:
    several.lock().acquire()
    request, _ = several.lock()._request(None, False, None, token)
    call = request.acquire_call()
    words = (call.script.source, len(call.keys), *call.keys, *call.args)
    first, again = several.client.eval(*words), several.client.eval(*words)
    assert (first[0], again[0]) == (2, 2)
    assert again[1] > first[1]
    assert len(several.lock().holders()) == 2
    # The caller that never got a reply does not know its place.
    call = request.release_call(request.token, request.attempt)
    assert several.client.eval(call.script.source, len(call.keys), *call.keys, *call.args) == 1
    assert [held.place for held in several.lock().holders()] == [1]


def test_data_of_somebody_else_at_another_place_are_replaced(several: Holders) -> None:
    several.client.rpush(lock_keys(b"several").at_place(2).lock, "theirs")
    assert [lock.place for lock in several.acquired(2)] == [1, 2]


def test_data_of_somebody_else_at_the_name_are_no_free_place(several: Holders) -> None:
    several.client.rpush("several", "mine")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        several.lock().acquire(blocking=False)
    assert several.client.lrange("several", 0, -1) == [b"mine"]


def test_a_fresh_holder_voids_the_grants_of_its_place_only(several: Holders) -> None:
    """They lie on the list because nobody pops them; who does so late must not believe them."""
    locks = several.acquired()
    keys = lock_keys(b"several")
    several.client.zadd(keys.waiters, {"1 1.000 1 host frozen": time.time() * 1000 + 60_000})
    for lock in locks:
        lock.release()
    assert several.client.llen(keys.grants) == LIMIT
    assert several.lock().holders() == []
    assert not several.lock().locked()
    lock = several.lock()
    assert lock.acquire(blocking=False)
    assert [parse_grant(grant).place for grant in several.client.lrange(keys.grants, 0, -1)] == [
        number for number in (1, 2, 3) if number != lock.place
    ]
    assert lock.owned()


def test_data_of_somebody_else_are_no_grants(several: Holders) -> None:
    several.acquired()
    several.client.set(lock_keys(b"several").grants, "theirs")
    assert not several.lock().acquire(blocking=False)


@pytest.mark.parametrize("first", range(LIMIT))
def test_a_waiter_learns_when_the_first_place_ends(several: Holders, first: int) -> None:
    for place in range(LIMIT):
        several.lock(timeout=20 if place == first else 60).acquire()
    request, _ = several.lock()._request(None, False, None, None)
    refused = parse_acquire(run(several.client, request.acquire_call()).value, 0.0)
    assert 0 < refused.pttl <= 20_000


def test_grants_that_nobody_takes_are_taken_back(several: Holders) -> None:
    """Also of a place whose key is gone."""
    waiter, request = b"1 1.000 1 host thread", several.lock()._request(None, False, None, None)[0]
    locks, keys = several.acquired(), lock_keys(b"several")
    several.client.zadd(keys.waiters, {waiter: time.time() * 1000 + 60_000})
    for lock in locks:
        lock.release()
    several.client.delete(keys.at_place(2).lock)
    run(several.client, request.leave_call(waiter, try_again=False))
    assert not several.client.exists(keys.grants, *(keys.at_place(n).lock for n in (1, 2, 3)))


@pytest.mark.parametrize("waits", [False, True])
def test_who_died_is_remembered_of_each_place(client: redis.Redis, waits: bool, pace: int) -> None:
    """By who takes the place, or by who waits for it."""
    several = Holders(client)
    died = [several.lock(timeout=2 * pace, label=f"the {n}") for n in range(LIMIT)]
    for lock in died:
        assert lock.acquire(blocking=False)
    until(lambda: all(held.owner.label for held in list_held(client, b"sev").locks))
    waiters = [several.waiter() for _ in range(LIMIT if waits else 0)]
    for lock in died:
        crash(lock)
    if waits:
        _taken = [waiter.result() for waiter in waiters]
    else:
        until(lambda: several.lock().holders() == [])
        _taken = several.acquired()
    hurry(CrashRecord)
    keys = [lock_keys(b"several").at_place(place).lock for place in range(1, LIMIT + 1)]

    def remembered() -> set[str]:
        events = [each for key in keys for each in inspect(client, key).events]
        return {each.owner.label for each in events if each.what == "crashed"}

    until(lambda: remembered() == {lock.label for lock in died})


# -- processes with different limits -----------------------------------------------------------


@pytest.mark.parametrize(("limit", "of_the_waiter"), [(LIMIT, 1), (1, LIMIT)])
def test_a_waiter_has_the_first_place_of_a_holder_with_another_limit(
    several: Holders, limit: int, of_the_waiter: int
) -> None:
    first = several.lock(limit=limit)
    first.acquire()
    several.acquired(of_the_waiter - 1)
    waiter = several.waiter(limit=of_the_waiter)
    until(lambda: waiting("several") == 1)
    first.release()
    assert waiter.result().place == 1


def test_a_plain_holder_keeps_a_chosen_token(several: Holders) -> None:
    plain = several.lock(limit=1)
    plain.acquire(token="chosen")
    several.acquired(2)
    assert plain.reacquire()
    assert plain.owned()
    plain.release()
    assert len(several.lock().holders()) == 2


def test_a_lock_on_several_servers_has_no_places() -> None:
    clients = [redis.Redis(port=port) for port in (1, 2, 3)]
    with pytest.raises(ValueError, match="limit must be 1 for a lock on several servers"):
        Redlock(clients, "several", timeout=10, limit=2)


# -- for people --------------------------------------------------------------------------------


def test_each_place_is_listed_and_can_be_released_by_itself(several: Holders) -> None:
    locks = several.acquired()
    waiter = several.waiter()
    until(lambda: waiting("several") == 1)
    until(lambda: all(held.lifetime for held in list_held(several.client, b"sev").locks))
    listed = list_held(several.client, b"sev")
    assert (listed.total, listed.complete) == (LIMIT, True)
    assert {held.place for held in listed.locks} == {1, 2, 3}
    assert {(held.name, held.limit, held.waiters) for held in listed.locks} == {("eral", 3, 1)}
    assert {held.fence for held in listed.locks} == {lock.fence for lock in locks}
    assert {held.lock_key for held in listed.locks} == {b"several"}
    second = next(held for held in listed.locks if held.place == 2)
    looked = inspect(several.client, second.key).lock
    assert looked is not None
    assert (looked.place, looked.fence) == (2, locks[1].fence)
    assert release(several.client, second.key, second.owner.id) is Outcome.RELEASED
    assert waiter.result().place == 2
    assert [lock.owned() for lock in locks] == [True, False, True]
    assert release(several.client, second.key, second.owner.id) is Outcome.NOT_OWNER
    happened = {event.what for event in inspect(several.client, second.key).events}
    assert "reset" in happened
    assert happened <= {"reset", "lost"}


@pytest.mark.parametrize("name", ["several", "{tag}:several", "a}b"])
def test_emptying_the_database_keeps_each_place(any_client: redis.Redis, name: str) -> None:
    several = Holders(any_client)
    locks = [Lock(any_client, name, timeout=60, limit=LIMIT) for _ in range(LIMIT)]
    assert all(lock.acquire(blocking=False) for lock in locks)
    locks[0].release()
    any_client.set("value", "1")
    for empties in (empty, lambda client: delete_matching(client, b"*")):
        empties(several.client)
        assert any_client.get("value") is None
        assert [lock.owned() for lock in locks] == [False, True, True]
        assert {held.place for held in list_held(any_client, name.encode()).locks} == {2, 3}
