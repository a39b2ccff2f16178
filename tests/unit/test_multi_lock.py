"""Locks of several names, as far as they need no server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_redis_lock import Lock, locked
from django_redis_lock.cache import cache
from django_redis_lock.contrib import several_names
from django_redis_lock.contrib.several_names import MultiLock
from django_redis_lock.contrib.testing import MemoryServer
from django_redis_lock.exceptions import LockError, LockLost
from django_redis_lock.steps import drive
from tests.processes import until
from tests.support.background import Background

#: All names in one request; or one after the other, as where each may fall back.
WAYS: dict[str, dict[str, Any]] = {"at once": {}, "in order": {"on_redis_down": "run"}}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, redis_locks: MemoryServer) -> dict[str, Any]:
    return WAYS[request.param]


def held(server: MemoryServer) -> str:
    return "".join(sorted(key[-1] for key in server.held()))


def keys() -> set[bytes]:
    return set(cache._lock_client().keys("*"))


@pytest.mark.parametrize("options", [{}, {"blocking_timeout": 0.01}, {"blocking": False}])
def test_all_names_or_none(
    way: dict[str, Any], redis_locks: MemoryServer, options: dict[str, Any]
) -> None:
    lock = cache.lock(["a", "b", "c"], **way, **options)
    assert lock.acquire()
    assert held(redis_locks) == "abc"
    lock.release()
    assert not held(redis_locks)
    if options:
        with locked("b"):
            before = keys()
            assert not lock.acquire()
            assert held(redis_locks) == "b"
            if options == {"blocking": False}:  # Who does not wait is in no queue.
                assert keys() == before


def test_names_of_an_attempt_that_fails_are_free_at_once(
    way: dict[str, Any], redis_locks: MemoryServer
) -> None:
    """Only after an acquisition are they kept for a while."""
    with locked("b"):
        assert not cache.lock(["a", "b"], min_hold=30, blocking=False, **way).acquire()
        assert held(redis_locks) == "b"


@pytest.mark.parametrize("executed", [True, False])
def test_an_attempt_whose_outcome_is_unknown_holds_nothing(
    redis_locks: MemoryServer, executed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller waits through the outage, and not for what it may hold itself."""
    other, lock = cache.lock("a"), cache.lock(["a", "b"], timeout=60)
    send, sent = MultiLock._send, []

    def lossy(self: Any, call: Any, patience: Any) -> Any:
        sent.append(call)
        if len(sent) == 2:  # It has got the first name.
            if executed:
                send(self, call, patience)
            raise redis.ConnectionError("the reply is lost")
        return send(self, call, patience)

    monkeypatch.setattr(MultiLock, "_send", lossy)
    other.acquire()
    waiting = Background(lock.acquire)
    until(lambda: other.keys.waiters in keys())
    before = redis_locks.clock()
    other.release()
    assert waiting.result()
    assert held(redis_locks) == "ab"
    assert len(sent) >= 2
    assert redis_locks.clock() - before < 30  # It has not waited for the end of a lifetime.


def test_names_that_become_free_one_after_the_other(
    way: dict[str, Any], redis_locks: MemoryServer
) -> None:
    others = [cache.lock(name) for name in "ab"]
    for other in others:
        other.acquire()
    lock = cache.lock(["a", "b"], **way)
    waiting = Background(lock.acquire)
    for other in others:
        until(lambda other=other: other.keys.waiters in keys())
        assert not waiting.done
        other.release()
    assert waiting.result()
    assert held(redis_locks) == "ab"


#: The options, the seconds that have passed, whether a name is gone, if that is noticed, and if the
#: lifetimes begin anew.
LATE: list[tuple[dict[str, Any], float, bool, bool, bool]] = [
    ({"timeout": 60}, 5.9, True, False, False),
    ({"timeout": 60}, 6.1, True, True, False),
    ({"timeout": 60}, 6.1, False, False, True),
    ({"timeout": 60, "renew": True}, 6.1, True, False, False),
    ({"timeout": None}, 6.1, True, False, False),
]


@pytest.mark.parametrize(("options", "passed", "gone", "noticed", "anew"), LATE)
def test_after_a_long_wait_all_names_have_their_full_lifetime(
    redis_locks: MemoryServer,
    options: Any,
    passed: float,
    gone: bool,
    noticed: bool,
    anew: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock: Any = cache.lock(["a", "b"], **options)
    lock.acquire()
    began = min(hold.began for hold in lock._holds())
    clock = SimpleNamespace(monotonic=lambda: began + passed)
    monkeypatch.setattr(several_names, "time", clock)
    extended: list[Any] = []
    change = several_names.Member._change_steps

    def noting(member: Any, *args: Any) -> Any:
        extended.append(args)
        return (yield from change(member, *args))

    monkeypatch.setattr(several_names.Member, "_change_steps", noting)
    if gone:
        cache._lock_client().delete(lock.members[1].keys.lock)
    assert drive(lock._are_held()) is not noticed
    assert bool(extended) is (anew or noticed)


@pytest.mark.parametrize("gone", [None, 0, 1])
def test_it_is_owned_if_all_its_names_are(redis_locks: MemoryServer, gone: int | None) -> None:
    lock = cache.lock(["a", "b"], timeout=60)
    assert not lock.owned()
    with pytest.raises(LockError) as error:
        lock.extend(5)
    assert error.value.lock_name == "a, b"
    assert lock.acquire()
    if gone is not None:
        cache._lock_client().delete(lock.members[gone].keys.lock)
    assert lock.owned() is (gone is None)
    lock.reset()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_task_that_loses_one_of_its_names_is_cancelled(
    redis_locks: MemoryServer, lost: int
) -> None:
    async def hold() -> None:
        async with cache.alock(["a", "b"], timeout=60, cancel_on_lost=True) as lock:
            lock.members[lost].local.hold.lose("test")
            await asyncio.sleep(5)
            raise AssertionError("it was not told")

    with pytest.raises(LockLost, match="so its task was cancelled"):
        asyncio.run(hold())
    assert not held(redis_locks)


@pytest.mark.parametrize("is_cluster", [False, True])
@pytest.mark.parametrize("names", [("a", "b"), ("{a}1", "{a}2")])
def test_names_in_several_slots_of_a_cluster_are_in_several_places(
    redis_locks: MemoryServer, names: Any, is_cluster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_names, "is_cluster", lambda client: is_cluster)
    assert cache.lock(names)._in_one_place is (not is_cluster or "{" in names[0])


class Interrupted(BaseException):
    """As of a signal handler."""


def test_who_is_interrupted_while_it_holds_a_part_leaves_nothing(
    redis_locks: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {name: cache.lock(name, thread_local=False) for name in "ab"}
    for other in others.values():
        other.acquire()
    wait, waits = Lock._wait, []

    def waiting(member: Any, *args: Any) -> Any:
        waits.append(member)
        if len(waits) == 2:
            assert held(redis_locks) == "ab"  # The first is its own by now.
            raise Interrupted
        others["a"].release()
        return wait(member, *args)

    monkeypatch.setattr(Lock, "_wait", waiting)
    lock = cache.lock(["a", "b"])  # Without a reference, it would be released in any case.
    with pytest.raises(Interrupted):
        lock.acquire()
    assert [member.local.token for member in lock.members] == [None, None]
    redis_locks.clock.advance(1)  # The keeper releases it.
    assert held(redis_locks) == "b"
