"""The list of held locks: what is on it, what it says of each, and what it leaves out."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from typing import Any

import pytest
import redis

from django_redis_lock import Lock
from django_redis_lock.locking import inventory
from django_redis_lock.locking.calls import run
from django_redis_lock.locking.grants import Request, new_token
from django_redis_lock.locking.inventory import HeldLock, Inventory, list_held
from django_redis_lock.locking.keys import INDEX, lock_keys
from tests.processes import until
from tests.redis_server import RedisServer


def hold(
    client: redis.Redis, name: str | bytes, timeout: float | None = 30, **options: Any
) -> Lock:
    lock = Lock(client, name, timeout, **options)
    assert lock.acquire(blocking=False)
    return lock


def names(client: redis.Redis, prefix: bytes = b"") -> list[str]:
    return sorted(lock.name for lock in list_held(client, prefix).locks)


def described(client: redis.Redis, name: str) -> HeldLock:
    """The lock once its holder has said who it is."""

    def found() -> HeldLock | None:
        listed = [lock for lock in list_held(client, b"").locks if lock.name == name]
        return listed[0] if listed and listed[0].owner.host else None

    until(found)
    lock = found()
    assert lock is not None
    return lock


# -- what is on it -----------------------------------------------------------------------------


def test_nothing_is_held(client: redis.Redis) -> None:
    assert list_held(client, b"") == Inventory((), 0, complete=True)


def test_held_locks_are_listed_and_free_ones_are_not(client: redis.Redis) -> None:
    hold(client, "a")
    hold(client, "b").release()
    hold(client, "c")
    client.set("a value", "that is no lock")
    assert names(client) == ["a", "c"]


def test_an_expired_lock_leaves_the_list_and_the_index(client: redis.Redis) -> None:
    hold(client, "short", 0.05)
    assert names(client) == ["short"]
    until(lambda: not client.exists("short"))
    assert client.zcard(INDEX) == 1
    assert names(client) == []
    assert client.zcard(INDEX) == 0


def test_a_lock_whose_key_was_deleted_leaves_the_list_and_the_index(client: redis.Redis) -> None:
    hold(client, "deleted", None)
    client.delete("deleted")
    assert list_held(client, b"") == Inventory((), 0, complete=True)
    assert client.zcard(INDEX) == 0


def test_the_index_may_be_wrong_about_the_end(client: redis.Redis) -> None:
    """redis-py's own lock does not know the index; it may extend a lock of ours."""
    hold(client, "a", 60)
    client.zadd(INDEX, {"a": 1000})
    (lock,) = list_held(client, b"").locks
    assert lock.ttl == pytest.approx(60, abs=5)


def test_two_prefixes_do_not_see_each_other(client: redis.Redis) -> None:
    hold(client, "one:a")
    hold(client, "two:b")
    assert names(client, b"one:") == ["a"]
    assert names(client, b"two:") == ["b"]
    assert names(client) == ["one:a", "two:b"]


def test_another_sites_dead_entries_are_left_to_it(client: redis.Redis) -> None:
    hold(client, "one:a")
    hold(client, "two:b")
    client.delete("one:a", "two:b")
    assert names(client, b"one:") == []
    assert client.zrange(INDEX, 0, -1) == [b"two:b"]


def test_a_lock_that_is_passed_to_a_waiter_belongs_to_nobody_yet(client: redis.Redis) -> None:
    hold(client, "held", None)
    lock = hold(client, "passed")
    request = Request(lock_keys(b"passed"), new_token(), b"", 30.0, 2.0)
    assert run(client, request.acquire(b"a waiter")).value[0] == 0
    lock.release()
    assert client.exists("passed")
    found = list_held(client, b"")
    assert [lock.name for lock in found.locks] == ["held"]
    assert (found.total, found.complete) == (1, True)


def test_a_value_that_took_a_locks_key_is_passed_over(client: redis.Redis) -> None:
    hold(client, "a")
    hold(client, "b")
    client.delete("a")
    client.hset("a", "x", "y")
    assert names(client) == ["b"]


# -- what it says of a lock --------------------------------------------------------------------


def test_who_holds_it_and_for_how_long(client: redis.Redis) -> None:
    lock = hold(client, "site:report", label="the nightly report")
    # The server's clock says how long: what the holder says is an hour ago is an hour ago.
    described(client, "site:report")
    owner = lock_keys(b"site:report").owner
    client.hset(owner, "since", str(float(client.hget(owner, "since") or 0) - 3600))
    (listed,) = list_held(client, b"site:").locks
    assert listed.key == b"site:report"
    assert listed.name == "report"
    assert listed.owner.label == "the nightly report"
    assert listed.owner.host == socket.gethostname()
    assert listed.owner.pid == os.getpid()
    assert listed.owner.thread == threading.current_thread().name
    assert listed.held_for == pytest.approx(3600, abs=10)
    assert listed.ttl == pytest.approx(30, abs=5)
    assert listed.fence == lock.fence
    assert listed.waiters == 0


def test_the_token_is_not_given_away(client: redis.Redis) -> None:
    lock = hold(client, "a")
    assert lock.local.token.decode() not in repr(list_held(client, b""))


def test_a_holder_that_has_not_said_who_it_is(client: redis.Redis) -> None:
    hold(client, "a")
    (listed,) = list_held(client, b"").locks
    assert listed.owner.id
    assert not listed.owner.host
    assert listed.held_for is None


def test_a_former_holder_is_not_taken_for_the_present_one(client: redis.Redis) -> None:
    hold(client, "a", label="the first")
    described(client, "a")
    # As redis-py's own lock does it.
    client.set("a", "a token of somebody else")
    (listed,) = list_held(client, b"").locks
    assert not listed.owner.label
    assert listed.held_for is None


def test_a_lock_without_an_end(client: redis.Redis) -> None:
    hold(client, "a", None)
    (listed,) = list_held(client, b"").locks
    assert listed.ttl == math.inf


def test_a_forgotten_fence(client: redis.Redis) -> None:
    hold(client, "a")
    client.delete(lock_keys(b"a").fence)
    (listed,) = list_held(client, b"").locks
    assert listed.fence is None


def test_a_fence_with_the_attempt_behind_it(client: redis.Redis) -> None:
    lock = Lock(client, "a", 30)
    assert lock.acquire(token="chosen")
    (listed,) = list_held(client, b"").locks
    assert listed.fence == lock.fence


def test_waiters_are_counted_while_they_live(client: redis.Redis) -> None:
    hold(client, "a")
    now = int(client.time()[0] * 1000)
    waiters = {"one": now + 5000, "two": now + 5000, "dead": now - 5000}
    client.zadd(lock_keys(b"a").waiters, waiters)
    (listed,) = list_held(client, b"").locks
    assert listed.waiters == 2


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"a}b", "a}b"),
        (b"{tag}a", "{tag}a"),
        (b"two\nlines", "two\nlines"),
        (b"<script>", "<script>"),
        (b"\xff\xfe", "\\xff\\xfe"),
        ("锁".encode(), "锁"),
        (b"x" * 10_000, "x" * 10_000),
    ],
    ids=["brace", "tag", "newline", "script", "not UTF-8", "Chinese", "long"],
)
def test_any_name_will_do(client: redis.Redis, name: bytes, shown: str) -> None:
    lock = hold(client, b"site:" + name)
    (listed,) = list_held(client, b"site:").locks
    assert (listed.key, listed.name) == (b"site:" + name, shown)
    assert listed.fence == lock.fence


def test_the_longest_held_comes_first(client: redis.Redis) -> None:
    for name, age in (("a", 10), ("b", 30), ("c", 20)):
        hold(client, name)
        described(client, name)
        owner = lock_keys(name.encode()).owner
        client.hset(owner, "since", str(time.time() - age))
    hold(client, "new")
    assert [lock.name for lock in list_held(client, b"").locks] == ["b", "c", "a", "new"]


def test_a_client_that_decodes(redis_server: RedisServer, client: redis.Redis) -> None:
    lock = hold(client, "site:ä")
    with redis_server.client(decode_responses=True) as decoding:
        (listed,) = list_held(decoding, b"site:").locks
    assert (listed.name, listed.fence) == ("ä", lock.fence)


# -- its limits --------------------------------------------------------------------------------


def test_it_says_when_it_is_cut_off(client: redis.Redis) -> None:
    for number in range(4):
        hold(client, f"{number}")
    assert list_held(client, b"", limit=4).complete
    found = list_held(client, b"", limit=3)
    assert (len(found.locks), found.total, found.complete) == (3, 4, False)


def test_the_longest_held_is_not_cut_off(client: redis.Redis) -> None:
    """It is the one people look for, and often close to its next renewal."""
    hold(client, "oldest", 30)
    described(client, "oldest")
    for number in range(3):
        hold(client, f"{number}", 60)
    assert list_held(client, b"", limit=1).locks[0].name == "oldest"


def test_of_too_many_those_that_end_first_are_left_out(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "MOST_DESCRIBED", 3)
    for number in range(4):
        hold(client, f"{number}", 30 + number)
    found = list_held(client, b"", limit=2)
    assert (len(found.locks), found.total, found.complete) == (2, 4, False)
    assert "0" not in [lock.name for lock in list_held(client, b"", limit=3).locks]


def test_other_prefixes_do_not_use_the_limit_up(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "MOST_DESCRIBED", 3)
    for number in range(3):
        hold(client, f"other:{number}", 60)
        hold(client, f"site:{number}", 30)
    found = list_held(client, b"site:", limit=3)
    assert (len(found.locks), found.total, found.complete) == (3, 3, True)


def test_it_looks_at_a_part_of_a_huge_index_only(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        hold(client, f"{number}")
    monkeypatch.setattr(inventory, "MOST_ENTRIES", 3)
    found = list_held(client, b"")
    assert (len(found.locks), found.total, found.complete) == (3, 3, False)
    monkeypatch.setattr(inventory, "MOST_ENTRIES", 4)
    assert list_held(client, b"").complete


# -- outages -----------------------------------------------------------------------------------


def test_redis_is_away(own_server: RedisServer) -> None:
    with own_server.client() as client:
        own_server.stop()
        with pytest.raises(redis.ConnectionError):
            list_held(client, b"")


def test_redis_does_not_answer(own_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "PATIENCE", 0.2)
    with own_server.client() as client:
        client.ping()
        own_server.pause()
        began = time.monotonic()
        with pytest.raises(redis.TimeoutError):
            list_held(client, b"")
        assert time.monotonic() - began < 2
