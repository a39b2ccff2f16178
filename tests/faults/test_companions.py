"""The keys beside a lock's own vanish (evicted, deleted by hand), or hold something else than they
should: no script may trip over that, and no name may be dead for ever (S8)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import redis

from django_redis_lock import Lock, LockNotOwnedError
from django_redis_lock.contrib.redlock.votes import VOTE
from django_redis_lock.locking.waiting import QueueWatch
from django_redis_lock.ops.inventory import list_held
from django_redis_lock.protocol import acquisition
from django_redis_lock.protocol.acquisition import AcquireRequest, parse_grant, renew_call
from django_redis_lock.protocol.holder_scripts import HELD, RESET
from django_redis_lock.protocol.keys import LAST_FENCE, lock_keys, quorum_fence_key
from django_redis_lock.protocol.lock_scripts import EXTEND
from django_redis_lock.protocol.script import Call
from django_redis_lock.protocol.validation import milliseconds
from django_redis_lock.transport import run as run_call
from tests.holding import hurry
from tests.processes import until
from tests.redis_server import GivenServer, RedisServer
from tests.support.background import Background

pytestmark = pytest.mark.invariant("S8")

KEYS = lock_keys(b"name")
#: What can be in the place of each companion key.
FORMS: dict[str, Callable[[redis.Redis, bytes], Any]] = {
    "nothing": lambda client, key: None,
    "text": lambda client, key: client.set(key, "no number here"),
    "a huge number": lambda client, key: client.set(key, "9" * 5000),
    "list": lambda client, key: client.rpush(key, "what is", "this"),
    "set": lambda client, key: client.sadd(key, "what is", "this"),
    "hash": lambda client, key: client.hset(key, "what is", "this"),
    "sorted set": lambda client, key: client.zadd(key, {"what is this": 1}),
}
PARTS = ("grants", "waiters", "owner", "held_index")


def first() -> AcquireRequest:
    return AcquireRequest(KEYS, b"first", b"", 30.0, 2.0, [])


def second() -> AcquireRequest:
    """With a token that the caller has chosen, and on several servers it is always so."""
    return AcquireRequest(KEYS, b"second", b"this attempt", 30.0, 2.0, [])


def taken_grant(client: redis.Redis) -> Call:
    found = client.lpop(KEYS.grants) if client.type(KEYS.grants) == b"list" else None
    return second().take_grant_call(parse_grant(found or b"granted:1"), b"waiter")


def renewed(token: bytes, *described: str) -> Call:
    return renew_call(KEYS, token, b"", *described, wanted=milliseconds(60.0))


def steps(client: redis.Redis) -> list[Call | Callable[[redis.Redis], Call]]:
    """A life of a lock with all its scripts, each of which is sent once more."""
    vote = (b"second", milliseconds(30.0), b"this attempt", 5)
    once: list[Call | Callable[[redis.Redis], Call]] = [
        first().acquire_call(),
        Call(EXTEND, KEYS, (b"first", 10_000, "0", b"", b"extension")),
        renewed(b"first", "id", "me", "host", "here"),
        Call(HELD, KEYS, ()),
        second().acquire_call(b"waiter"),
        second().watch_call(b"waiter"),
        acquisition.release_call(KEYS, b"first", b"granted", 2.0),
        taken_grant,
        renewed(b"second"),
        Call(VOTE, (*KEYS, quorum_fence_key(b"name")), vote),
        acquisition.release_call(
            KEYS, b"second", b"resting", 2.0, min_hold=0.001, attempt=b"this attempt"
        ),
        first().leave_call(b"waiter", try_again=True),
        Call(RESET, KEYS, (b"granted", 2000, b"first", 2**53)),
    ]
    return [step for step in once for _ in range(2)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", PARTS)
def test_no_script_trips_over_it(client: redis.Redis, part: str, form: str) -> None:
    key = getattr(KEYS, part)
    for step in steps(client):
        client.delete(key)
        FORMS[form](client, key)
        run_call(client, step(client) if callable(step) else step)
        if form == "nothing":
            _expect_lifetimes(client)
    client.delete(KEYS.lock)
    with Lock(client, "name", timeout=30, blocking_timeout=5) as lock:
        assert lock.owned()
        assert lock.fence > 0


def _expect_lifetimes(client: redis.Redis) -> None:
    """Of all but the index."""
    assert [key for key in client.keys() if client.pttl(key) == -1] in ([], [KEYS.held_index])


@pytest.mark.parametrize("token", [None, "chosen"])
@pytest.mark.parametrize("form", ["nothing", "set"])
@pytest.mark.parametrize("part", PARTS)
def test_a_waiter_is_served(client: redis.Redis, part: str, form: str, token: str | None) -> None:
    """It comes, waits, and is granted the lock while a companion key is of no use."""
    key = getattr(KEYS, part)
    holder, waiter = (Lock(client, "name", timeout=30, thread_local=False) for _ in range(2))
    assert holder.acquire()

    def damage() -> None:
        with client.pipeline() as pipe:  # The keeper may write there, too.
            pipe.delete(key)
            FORMS[form](pipe, key)
            pipe.execute()

    damage()
    waiting = Background(lambda: waiter.acquire(token=token))
    until(lambda: client.info("clients")["blocked_clients"])
    damage()
    holder.release()
    hurry(QueueWatch)  # Whose waiters are forgotten is found by the keeper of one.
    assert waiting.result() is True
    damage()
    waiter.extend(10)
    waiter.release()
    with Lock(client, "name", timeout=30, blocking_timeout=5) as lock:
        assert lock.fence > waiter.fence


def test_an_acquire_that_fails_takes_nothing(
    client: redis.Redis, redis_server: RedisServer | GivenServer
) -> None:
    """Not even half of it: the lock would be taken, and nobody's."""
    client.acl_setuser("cannot", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-set"])
    with (
        redis_server.client(username="cannot", password="any") as limited,
        pytest.raises(redis.ResponseError),
    ):
        Lock(limited, "name").acquire(blocking=False)
    client.acl_deluser("cannot")
    assert client.keys() in ([], [KEYS.held_index])
    assert list_held(client, b"").locks == ()


def test_fences_increase_while_clock_or_counter_is_there(client: redis.Redis) -> None:
    """Each of them is enough: the last fence on the index, or a clock that is not set back."""
    fences = []
    ahead = 10**10
    for change in itertools.chain(
        [lambda: None, lambda: client.delete(KEYS.held_index), client.flushall],
        # As after the clock was set back: the counter is far ahead of it.
        [lambda: client.zadd(KEYS.held_index, {LAST_FENCE: fences[-1] + ahead}), lambda: None],
    ):
        change()
        with Lock(client, "name", timeout=30) as lock:
            fences.append(lock.fence)
    assert fences == sorted(set(fences))
    assert fences[-1] == fences[-2] + 1


@pytest.mark.parametrize("form", FORMS)
def test_a_lost_lock_is_reported_as_such(client: redis.Redis, form: str) -> None:
    """Whatever is beside it."""
    lock = Lock(client, "name", timeout=30)
    lock.acquire()
    client.delete("name")
    for part in PARTS:
        client.delete(getattr(KEYS, part))
        FORMS[form](client, getattr(KEYS, part))
    with pytest.raises(LockNotOwnedError):
        lock.extend(10)
    with pytest.raises(LockNotOwnedError):
        lock.release()
