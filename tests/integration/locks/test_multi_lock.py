"""Several names as one lock."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches
from hypothesis import given, settings, strategies

from django_redis_lock import (
    AsyncLock,
    AsyncMultiLock,
    Lock,
    LockError,
    LockLost,
    LockNotAcquired,
    LockNotOwnedError,
    MultiLock,
    current_lock,
    events,
    locked,
)
from django_redis_lock.cache import LocMemCache
from django_redis_lock.contrib import several_names as multi_lock
from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.contrib.several_names import MultiHold
from django_redis_lock.contrib.testing import MemoryServer, VirtualClock, override
from django_redis_lock.events import Acquired, Contended, Rejected, Released, TimedOut
from django_redis_lock.locking import Hold, lock
from django_redis_lock.protocol import Call
from django_redis_lock.transport import NotReady, run, server_of
from tests.lanes import examples
from tests.lock_contract import LockContract
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.backends import Backend, OnRedis, places
from tests.support.background import Background, elsewhere
from tests.support.tasks import ForThreads, InTasks, Tasks, in_this_loop


def names_of(name: str) -> list[str]:
    """Of a lock of the contract: its name is the first in order."""
    return [f"{name} more", name, f"{name} and more"]


class OfSeveral(OnRedis):
    def make_lock(self, name: Any = "contract", timeout: Any = None, **options: Any) -> Any:
        options["lock_class"] = Lock
        return MultiLock(self.client, names_of(name), timeout, **options)


class ContractOfSeveral(LockContract):
    """One of the names is taken, lost, waited for; the others are as it is."""

    shown = "contract, contract and more, contract more"

    @staticmethod
    def fence_of(lock: Any) -> int | None:
        fence: int | None = lock.fences["contract"]
        return fence

    # Of names that are not str, and of tokens that the caller chooses: both are refused, see below.
    test_any_name_will_do = None
    test_what_the_body_raised_comes_before_the_loss = None
    test_a_token_can_be_chosen = None
    test_the_same_token_is_not_the_same_holder = None
    test_another_handle_acts_for_a_token = None
    test_a_handle_with_a_token_takes_the_lock_with_it = None

    def test_the_last_try_counts(self, backend: Backend, make: Any, pace: int) -> None:
        """Free since a moment before the deadline, and nobody said so."""
        holder, other = make(timeout=30), make(timeout=30)
        holder.acquire()
        waiter = Background(lambda: other.acquire(blocking_timeout=0.5 * pace))
        until(lambda: backend.waiting(self.name) or waiter.done)
        for name in names_of(self.name):
            backend.delete_key(name)
        assert waiter.result() is True


@pytest.mark.sample(3)
class TestMultiLock(ContractOfSeveral):
    @pytest.fixture
    def backend(self, client: redis.Redis) -> Backend:
        return OfSeveral(client)


@pytest.mark.sample(7, 4)
class TestMultiLockInMemory(ContractOfSeveral):
    @pytest.fixture
    def backend(self) -> Backend:
        return OfSeveral(client_of(Database("memory")))


class WithFallback(OfSeveral):
    """Each falls back alone, so they are acquired one after the other."""

    def __init__(self, client: redis.Redis, folder: Path) -> None:
        super().__init__(client)
        self._folder = folder

    def make_lock(self, name: Any = "contract", timeout: Any = None, **options: Any) -> Any:
        options |= {"on_redis_down": "local", "local_folder": self._folder}
        names = names_of(name)
        return MultiLock(self.client, names, timeout, lock_class=Lock, **options)


@pytest.mark.sample(7, 5)
class TestMultiLockWithFallback(ContractOfSeveral):
    @pytest.fixture
    def backend(self, client: redis.Redis, tmp_path: Path) -> Backend:
        return WithFallback(client, tmp_path)


class InTasksOfSeveral(InTasks):
    def make_lock(self, name: Any = "contract", timeout: Any = None, **options: Any) -> Any:
        options["lock_class"] = AsyncLock
        made = AsyncMultiLock(self._async_client, names_of(name), timeout, **options)
        return ForThreads(self._tasks, made)


@pytest.mark.sample(7, 6)
class TestAsyncMultiLock(ContractOfSeveral):
    @pytest.fixture
    def backend(self, client: redis.Redis) -> Iterator[Backend]:
        tasks = Tasks()
        async_client = tasks.do(lambda: in_this_loop(client))
        yield InTasksOfSeveral(client, async_client, tasks)
        tasks.do(async_client.connection_pool.disconnect)
        tasks.close()


# -- what only several names have ------------------------------------------------------------------


@pytest.fixture
def make(any_client: redis.Redis) -> Callable[..., MultiLock]:
    def make(*names: str, **options: Any) -> MultiLock:
        return MultiLock(
            any_client, names or ["b", "a"], lock_class=Lock, **{"timeout": 60, **options}
        )

    return make


def test_each_name_is_a_lock(any_client: redis.Redis, make: Callable[..., MultiLock]) -> None:
    with make("b", "a", "b") as lock:
        assert lock.name == ("a", "b")
        for name in lock.name:
            held = Lock(any_client, name).held()
            assert held is not None
            assert held.ttl > 50
        assert len({*lock.fences.values()}) == 2
        assert lock.fence == max(fence for fence in lock.fences.values() if fence)
        assert lock.place == 1
    assert not any_client.exists("a", "b")


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_free_ones_take_one_round_trip_and_so_does_the_release(
    make: Callable[..., MultiLock], monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    sent: list[Call] = []

    def counting(client: Any, call: Call, **options: Any) -> Any:
        sent.append(call)
        return run(client, call, **options)

    monkeypatch.setattr(lock, "run", counting)
    made = make(*names)
    made.acquire()
    assert len(sent) == 1
    made.extend(100)
    assert made.owned()
    assert len(sent) == 3
    made.release()
    assert len(sent) == 4


@pytest.mark.parametrize("taken", ["a", "b", "c"])
def test_all_or_none(any_client: redis.Redis, make: Callable[..., MultiLock], taken: str) -> None:
    three = make("a", "b", "c")
    others = {"a", "b", "c"} - {taken}
    with Lock(any_client, taken, timeout=60):
        assert not three.acquire(blocking=False)
        assert not any_client.exists(*others)
        waiter = Background(three.acquire)
        until(lambda: places(taken))
        assert not any_client.exists(*others)  # Whoever needs only these does not wait for it.
    assert waiter.result()
    assert all(any_client.exists(name) for name in "abc")


def test_a_conflict_names_the_one_that_is_in_the_way(
    any_client: redis.Redis, make: Callable[..., MultiLock]
) -> None:
    with Lock(any_client, "b", timeout=60, label="the other"):
        with pytest.raises(LockNotAcquired) as conflict, make(blocking=False):
            pass
        assert conflict.value.lock_name == "b"
        held = make().held()
        assert held is not None
        assert held.name == "b"


def test_one_that_is_lost_loses_all(
    any_client: redis.Redis, make: Callable[..., MultiLock]
) -> None:
    told: list[str] = []
    lock = make("a", "b", "c", on_lost=lambda: told.append("lost"), renew=True)
    with pytest.raises(LockNotOwnedError), lock:  # noqa: PT012  # so that it is left after that
        assert Lock(any_client, "b").reset()
        until(lambda: told)
        assert lock.lost
        with pytest.raises(LockLost):
            lock.ensure_held()
        until(lambda: not any_client.exists("a", "b", "c"))
        assert Lock(any_client, "a", timeout=60).acquire(blocking=False)
    assert told == ["lost"]
    assert any_client.exists("a")  # It is another's.


def test_what_was_lost_before_all_were_acquired_is_told(
    make: Callable[..., MultiLock],
) -> None:
    """The keeper may learn of it a moment before the caller has the last of them."""
    told: list[str] = []
    lock = make("a", "b")
    lock.acquire()
    holds: Any = [member.local.hold for member in lock.members]
    assert holds[1].lose("by force")
    lost = MultiHold(holds, server_of(lock.redis), 2.0, lambda: told.append("lost"))
    assert (told, lost.is_valid) == (["lost"], False)
    assert [hold.reason for hold in holds] == [
        "it was held with b, which was lost: by force",
        "by force",
    ]


def test_each_name_has_its_events(any_client: redis.Redis, make: Callable[..., MultiLock]) -> None:
    heard: list[Any] = []

    def told() -> list[tuple[str, type]]:
        kinds = [(event.subject.name, type(event)) for event in heard]
        heard.clear()
        return kinds

    events.subscribe(heard.append)
    try:
        with make("a", "b"):
            assert told() == [("a", Acquired), ("b", Acquired)]
        assert told() == [("a", Released), ("b", Released)]
        with Lock(any_client, "b", timeout=60):
            told()
            assert not make("a", "b").acquire(blocking=False)
            assert told() == [("b", Contended), ("b", Rejected)]
            assert not make("a", "b").acquire(blocking_timeout=0.01)
            assert told() == [("b", Contended), ("b", TimedOut)]
    finally:
        events.unsubscribe(heard.append)


@pytest.mark.parametrize("end", ["release", "_leave_to_keeper"])
def test_what_has_ended_is_not_lost(end: str) -> None:
    """Each name has its own end, of which the keeper may learn before the last."""
    told: list[str] = []
    with override() as server:
        lock = caches["default"].lock(["a", "b"], timeout=60, on_lost=lambda: told.append("lost"))
        lock.acquire()
        whole: Any = lock.local.hold
        getattr(lock, end)()
        server.clock.advance(0)
        assert not server.held()
    assert not whole.is_valid
    whole._lose()
    assert not told


def test_a_release_that_fails_is_over(
    any_client: redis.Redis, make: Callable[..., MultiLock]
) -> None:
    lock = make("a", "b")
    lock.acquire()
    assert Lock(any_client, "b").reset()
    with pytest.raises(LockNotOwnedError):
        lock.release()
    assert lock.local.token is None
    assert not any_client.exists("a", "b")


def test_the_task_that_has_lost_one_of_the_names_is_cancelled(client: redis.Redis) -> None:
    async def main() -> None:
        async with caches["default"].alock(["a", "b"], timeout=60, cancel_on_lost=True):
            await caches["default"].alock("b").reset()
            await asyncio.wait_for(asyncio.Event().wait(), PATIENCE)

    with pytest.raises(LockLost):
        asyncio.run(main())


def test_min_hold_is_for_what_was_held(
    any_client: redis.Redis, make: Callable[..., MultiLock]
) -> None:
    lock = make("a", "b", min_hold=600)
    with Lock(any_client, "b", timeout=60):
        assert not lock.acquire(blocking_timeout=0.05)
    assert not any_client.exists("a", "b")
    with lock:
        pass
    assert any_client.exists("a", "b") == 2


def test_what_expires_while_it_waits_for_another_is_taken_again(
    any_client: redis.Redis, make: Callable[..., MultiLock], pace: int
) -> None:
    """Its lifetime is shorter than its wait, and it is not renewed."""
    first, second = (Lock(any_client, name, timeout=60, thread_local=False) for name in "ab")
    assert first.acquire()
    assert second.acquire()
    both = make("a", "b", timeout=0.5 * pace)
    waiter = Background(lambda: (both.acquire(), both.owned()))
    until(lambda: places("a"))
    first.release()
    until(lambda: places("b"))
    until(lambda: not any_client.exists("a"))
    second.release()
    assert waiter.result() == (True, True)


def test_it_keeps_nothing_that_comes_after_what_it_waits_for(
    any_client: redis.Redis, make: Callable[..., MultiLock]
) -> None:
    """Else two could wait for each other."""
    first, second = (Lock(any_client, name, timeout=60) for name in "ab")
    second.acquire()
    waiter = Background(make("a", "b").acquire)
    until(lambda: places("b"))
    first.acquire()
    second.release()
    until(lambda: places("a"))
    with Lock(any_client, "b", timeout=60, blocking_timeout=PATIENCE):
        pass
    first.release()
    assert waiter.result()


SETS = strategies.sets(strategies.sampled_from("abcd"), min_size=1).map(sorted)


@settings(max_examples=examples(100), deadline=None)
@given(
    plans=strategies.lists(strategies.lists(SETS, min_size=1, max_size=4), min_size=2, max_size=5),
    seed=strategies.randoms(use_true_random=False),
)
def test_no_callers_wait_for_each_other(plans: list[list[list[str]]], seed: random.Random) -> None:
    """Whatever the names and their order, no name has two holders, and all callers end."""
    client = client_of(Database("memory"))
    inside: set[str] = set()
    guard = threading.Lock()

    def work(plan: list[list[str]]) -> int:
        for names in plan:
            with MultiLock(client, names, 60, blocking_timeout=PATIENCE, lock_class=Lock):
                with guard:
                    assert inside.isdisjoint(names)
                    inside.update(names)
                time.sleep(0)
                with guard:
                    inside.difference_update(names)
        return len(plan)

    for plan in plans:
        for names in plan:
            seed.shuffle(names)
    callers = [Background(work, plan) for plan in plans]
    assert [caller.result() for caller in callers] == [len(plan) for plan in plans]


#: An error, whether the caller has waited before, its wait, and whether it waits on.
WAITS_ON: list[tuple[Exception, bool, float | None, bool]] = [
    (NotReady("busy"), False, None, True),
    (redis.ResponseError("MISCONF no disk"), False, None, False),
    (redis.ResponseError("MISCONF no disk"), True, None, True),
    (redis.ResponseError("MISCONF no disk"), False, 5.0, True),
    (redis.ConnectionError("away"), False, None, False),
    (redis.ConnectionError("away"), False, 5.0, False),
    (redis.ConnectionError("away"), True, None, True),
    (redis.ResponseError("ERR no such command"), True, 5.0, False),
]


@pytest.mark.parametrize(("error", "contended", "wait", "on"), WAITS_ON)
def test_what_a_waiter_waits_through(
    error: Exception, contended: bool, wait: float | None, on: bool
) -> None:
    assert multi_lock._passes(error, contended, wait) is on


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "1 to 100 names"),
        ([f"name {n}" for n in range(101)], "1 to 100 names"),
        ("name", "a list of str"),
        (5, "a list of str"),
        ([b"name"], "must be a str"),
        (["a", 5], "must be a str"),
        (["a", ""], "empty"),
    ],
)
def test_names_that_are_none(any_client: redis.Redis, names: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        MultiLock(any_client, names, lock_class=Lock)


def test_a_hundred_names(make: Callable[..., MultiLock]) -> None:
    assert make(*map(str, range(100))).acquire()


def test_what_is_for_one_name_is_refused(make: Callable[..., MultiLock]) -> None:
    for options in ({"id": "mine"}, {"reentrant": True}, {"limit": 2}):
        with pytest.raises(ValueError, match="is for a lock with one name"):
            make(**options)
    with pytest.raises(ValueError, match="token must be left out"):
        make().acquire(token="mine")


class TestInCaches:
    @pytest.fixture(params=["redis", "memory"])
    def cache(self, request: pytest.FixtureRequest) -> Any:
        return caches["default"] if request.param == "redis" else LocMemCache("several", {})

    def test_a_lock(self, cache: Any) -> None:
        with cache.lock(["account-1", "account-7"], label="transfer") as lock:
            assert set(lock.fences) == {"account-1", "account-7"}
            assert cache.lock("account-7").locked()
            held = {found.owner.label for found in cache.held_locks().locks}
            assert held <= {"", "transfer"}
            assert len(cache.held_locks().locks) == 2
            with pytest.raises(LockNotAcquired) as conflict:
                cache.lock(("account-7", "account-8"), blocking=False).__enter__()
            assert conflict.value.lock_name == "account-7"
        assert not cache.lock(["account-1", "account-7"]).locked()

    def test_servers_are_refused(self, cache: Any) -> None:
        with pytest.raises(ValueError, match="leave using out"):
            cache.lock(["a", "b"], using=["default", "other", "third"])


@pytest.mark.parametrize("policy", ["local", "run"])
def test_without_redis(own_server: RedisServer, tmp_path: Any, policy: str) -> None:
    def make(*names: str) -> MultiLock:
        options: Any = {"on_redis_down": policy, "local_folder": tmp_path, "blocking": False}
        options["thread_local"] = False  # Else it would end with its thread.
        return MultiLock(own_server.client(), names, 60, lock_class=Lock, **options)

    own_server.stop()
    with make("a", "b") as lock:
        assert lock.degraded == policy
        assert lock.fence is None
        assert lock.owned()
        other = make("0", "b")
        assert elsewhere(other.acquire) == (policy == "run")
        if policy == "local":
            assert make("0").acquire()  # It was taken first, and given back.
    assert elsewhere(make("a").acquire)


class TestLocked:
    def test_functions(self) -> None:
        @locked(["account-{a}", "account-{b}"])
        def transfer(a: int, b: int) -> set[str]:
            return set(current_lock().fences)

        assert transfer(1, 7) == {"account-1", "account-7"}
        with caches["default"].lock("account-7"):
            with pytest.raises(LockNotAcquired, match="account-7 is held") as conflict:
                transfer(1, 7)
            assert conflict.value.lock_name == "account-7"
        assert transfer(7, 7) == {"account-7"}

        @locked(["account-{a}", "account-{b}"])
        async def atransfer(a: int, b: int) -> set[str]:
            return set(current_lock().fences)

        assert asyncio.run(atransfer(1, 7)) == {"account-1", "account-7"}

    def test_a_callable_gives_a_list(self) -> None:
        @locked(key=lambda rows: [f"row-{row}" for row in rows])
        def change(rows: list[int]) -> set[str]:
            return set(current_lock().fences)

        assert change([3, 1]) == {"row-1", "row-3"}
        with pytest.raises(ValueError, match="1 to 100 names"):
            change([])

    def test_a_name_in_common_would_wait_for_itself(self) -> None:
        with locked(["one", "two"]), pytest.raises(LockError, match="wait for itself"):
            locked(["two", "three"], blocking=True).__enter__()

    def test_what_makes_no_sense_is_refused(self) -> None:
        with pytest.raises(ValueError, match="one server"):
            locked(["a", "b"], using=["default", "other", "third"])
        for options in ({"reentrant": True}, {"limit": 2}):
            with pytest.raises(ValueError, match="one name"):
                locked(["a", "b"], **options)
        with pytest.raises(ValueError, match="empty"):
            locked(["a", " "])


def test_what_is_lost_while_its_lifetime_is_extended_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keeper has noted that the time is over, just before the server says that it is not."""
    lost = []

    def overtaken(member: Any, hold: Hold, *args: Any) -> None:
        if not lost:
            lost.append(hold)
            hold.lose("it is over")
        prolonged(member, hold, *args)

    prolonged = Lock._prolonged
    with override(MemoryServer(VirtualClock())):
        cache: Any = caches["default"]
        for name, seconds in (("a", 5.0), ("b", 7.1)):
            assert cache.lock(name, timeout=seconds).acquire()
        monkeypatch.setattr(Lock, "_prolonged", overtaken)
        with cache.lock(["a", "b"], timeout=20) as both:
            assert lost
            assert not both.lost
            assert both.owned()
