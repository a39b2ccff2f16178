"""The list of held locks: what is on it, what it says of each, and what it leaves out."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import redis
from django.core.cache import caches

from django_redis_lock import Lock, history
from django_redis_lock.events import Crashed
from django_redis_lock.history import CrashRecord, heartbeats, note_call
from django_redis_lock.keeper import keeper
from django_redis_lock.management import as_json, note
from django_redis_lock.ops.admin.rows import event_rows, row, waiter_rows
from django_redis_lock.ops.held_locks import HeldLock
from django_redis_lock.ops.inventory import Outcome, listing, release
from django_redis_lock.ops.inventory.listing import (
    FLIGHT,
    Inspection,
    Inventory,
    LockInfo,
    inspect,
    list_held,
)
from django_redis_lock.protocol.acquisition import AcquireRequest
from django_redis_lock.protocol.holder_scripts import CLOCK
from django_redis_lock.protocol.holders import Owner
from django_redis_lock.protocol.identity import fingerprint, new_token, process_id
from django_redis_lock.protocol.keys import (
    INDEX,
    LAST_FENCE,
    events_key,
    lock_keys,
    process_key,
)
from django_redis_lock.protocol.script import Call
from django_redis_lock.transport.server import run, server_of
from tests.events import recording_events
from tests.holding import hurry, renew, settle, table_of
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer

#: Asks for the server's time.
CLOCK_CALL = Call(CLOCK, (), ())


def hold(
    client: redis.Redis, name: str | bytes, timeout: float | None = 30, **options: Any
) -> Lock:
    lock = Lock(client, name, timeout, **options)
    assert lock.acquire(blocking=False)
    return lock


def names(client: redis.Redis, prefix: bytes = b"") -> list[str]:
    return sorted(lock.name for lock in list_held(client, prefix).locks)


def described(client: redis.Redis, name: str) -> LockInfo:
    """The lock once its holder has said who it is."""

    def found() -> LockInfo | None:
        listed = [lock for lock in list_held(client, b"").locks if lock.name == name]
        return listed[0] if listed and listed[0].limit else None

    if not found():
        hurry()
    until(found)
    lock = found()
    assert lock is not None
    return lock


# -- what is on it -----------------------------------------------------------------------------


def test_held_locks_are_listed_by_their_prefix_and_nothing_else_is(client: redis.Redis) -> None:
    assert list_held(client, b"") == Inventory((), 0, complete=True)
    for name in ("one:a", "two:b", "one:replaced"):
        hold(client, name)
    hold(client, "one:free").release()
    client.set("one:value", "that is no lock")
    client.delete("one:replaced")
    client.hset("one:replaced", "x", "y")
    assert names(client, b"one:") == ["a"]
    assert names(client, b"two:") == ["b"]
    assert names(client) == ["one:a", "two:b"]


def test_what_has_expired_or_was_deleted_leaves_the_list_and_the_index(
    client: redis.Redis,
) -> None:
    hold(client, "short", 0.05)
    hold(client, "deleted", None)
    client.delete("deleted")
    until(lambda: not client.exists("short"))
    assert client.zcard(INDEX) == 3
    assert list_held(client, b"") == Inventory((), 0, complete=True)
    assert client.zrange(INDEX, 0, -1) == [LAST_FENCE]


@pytest.fixture
def restricted(client: redis.Redis, redis_server: RedisServer) -> Iterator[redis.Redis]:
    """A client of a user who may read the keys that begin with ``ours``."""
    rights: Any = {"enabled": True, "nopass": True, "categories": ["+@all"]}
    keys = ["ours:*", "{ours:*", "django_redis_lock:*", "{django_redis_lock:*"]
    client.acl_setuser("ours", reset=True, keys=keys, **rights)
    with redis.Redis.from_url(redis_server.url, username="ours") as found:
        yield found
    client.acl_deluser("ours")


def test_a_user_sees_the_locks_that_it_may_read(
    client: redis.Redis, restricted: redis.Redis
) -> None:
    """Two sites may share a database, and its index, with a Redis user each."""
    hold(client, "ours:a")
    hold(client, "theirs:a")
    assert names(restricted) == ["ours:a"]
    assert names(client) == ["ours:a", "theirs:a"]


def test_a_lock_that_is_granted_to_a_waiter_has_no_holder_yet(client: redis.Redis) -> None:
    hold(client, "held", None)
    lock = hold(client, "passed")
    request = AcquireRequest(lock_keys(b"passed"), new_token(), b"", 30.0, 2.0, [])
    assert table_of(run(client, request.acquire_call(b"a waiter")).value)[0] == 0
    lock.release()
    assert client.exists("passed")
    found = list_held(client, b"")
    assert [lock.name for lock in found.locks] == ["held"]
    assert (found.total, found.complete) == (1, True)


# -- what it says of a lock --------------------------------------------------------------------


def test_who_holds_it_and_for_how_long(client: redis.Redis) -> None:
    lock = hold(client, "site:report", label="the nightly report")
    # The server's clock says how long: a fence of an hour ago is an hour ago.
    described(client, "site:report")
    assert list_held(client, b"site:").locks[0].fence == lock.fence
    client.hincrby(lock_keys(b"site:report").owner, "fence", -3_600_000_000)
    (listed,) = list_held(client, b"site:").locks
    assert listed.key == b"site:report"
    assert listed.name == "report"
    assert listed.owner.label == "the nightly report"
    assert listed.owner.host == socket.gethostname()
    assert listed.owner.pid == os.getpid()
    assert listed.owner.thread == threading.current_thread().name
    assert listed.held_for == pytest.approx(3600, abs=10)
    assert listed.ttl == pytest.approx(30, abs=5)
    assert listed.waiters == 0
    assert lock.local.token.decode() not in repr(listed)


def test_a_holder_that_has_not_said_who_it_is(client: redis.Redis) -> None:
    lock = hold(client, "a")
    (listed,) = list_held(client, b"").locks
    assert listed.owner.id
    assert listed.owner.host == socket.gethostname()  # The token names it.
    assert listed.unannounced
    assert listed.held_for is None
    assert listed.fence is None
    assert release(client, b"a", listed.owner.id, fence=listed.fence) is Outcome.RELEASED
    assert not lock.locked()


def test_a_former_holder_is_not_taken_for_the_present_one(client: redis.Redis) -> None:
    hold(client, "a", label="the first")
    described(client, "a")
    # As redis-py's own lock does it.
    client.set("a", "0123456789abcdef" * 2)
    (listed,) = list_held(client, b"").locks
    assert not listed.owner.label
    assert listed.held_for is None
    assert listed.fence is None


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
    hurry()
    until(lambda: list_held(client, b"site:").locks[0].fence)
    (listed,) = list_held(client, b"site:").locks
    assert (listed.key, listed.name) == (b"site:" + name, shown)
    assert listed.fence == lock.fence


def test_the_longest_held_comes_first_and_is_not_cut_off(client: redis.Redis) -> None:
    """It is the one people look for, and often close to its next renewal."""
    for name, age, timeout in (("a", 10, 60), ("b", 30, 30), ("c", 20, 60)):
        hold(client, name, timeout)
        described(client, name)
        owner = lock_keys(name.encode()).owner
        client.hset(owner, "fence", int((time.time() - age) * 1e6))
    hold(client, "new", 60)
    found = list_held(client, b"", limit=4)
    assert [lock.name for lock in found.locks] == ["b", "c", "a", "new"]
    assert found.complete
    found = list_held(client, b"", limit=1)
    assert [lock.name for lock in found.locks] == ["b"]
    assert (found.total, found.complete) == (4, False)


def test_signs_of_life(client: redis.Redis) -> None:
    """What tells a holder that is at work from one that is gone."""
    _kept = hold(client, "renewed", 60, renew=True)
    hold(client, "as it is", 90)
    hold(client, "endless", None)
    until(lambda: heartbeats.get(server_of(client)) in keeper())
    keeper().reschedule(heartbeats.get(server_of(client)), time.monotonic())
    until(lambda: client.exists(process_key(process_id())))
    renewed, as_it_is, endless = (described(client, n) for n in ("renewed", "as it is", "endless"))
    assert (renewed.lifetime, renewed.renews, renewed.heartbeat_interval) == (60, True, 10)
    assert (as_it_is.lifetime, as_it_is.renews) == (90, False)
    assert (as_it_is.renewal_interval, as_it_is.heartbeat_interval) == (30, 10)
    assert (endless.lifetime, endless.renews, endless.heartbeat_interval) == (math.inf, False, 10)
    assert endless.ttl == math.inf
    for _ in range(2):
        renew(client, "renewed")
    seen = described(client, "renewed").seen
    assert seen is not None
    assert 0 <= seen < PATIENCE


def test_a_holder_that_is_silent(client: redis.Redis) -> None:
    """As it is judged where its process sends no heartbeats: one of an older version."""
    hold(client, "a", 30)
    assert described(client, "a").silent is False
    owner = lock_keys(b"a").owner
    client.hdel(owner, "process")
    settle()
    client.hincrby(owner, "seen", -13_000_000)
    assert described(client, "a").silent is True
    client.hdel(owner, "seen")
    assert described(client, "a").silent is None


def test_a_lock_that_rests_until_its_min_hold_is_over(client: redis.Redis) -> None:
    lock = hold(client, "a", 30, min_hold=20)
    assert [found.resting for found in list_held(client, b"").locks] == [False]
    lock.release()
    (listed,) = list_held(client, b"").locks
    assert listed.resting
    assert listed.ttl == pytest.approx(20, abs=5)
    # As redis-py's own lock takes it, without tidying up.
    client.set("a", "0123456789abcdef" * 2)
    assert not list_held(client, b"").locks[0].resting


def test_search(client: redis.Redis) -> None:
    for name in ("site:Report", "site:import", "other:report", "site:%a+"):
        hold(client, name)
    found = [lock.name for lock in list_held(client, b"", search="REPORT").locks]
    assert sorted(found) == ["other:report", "site:Report"]
    assert [lock.name for lock in list_held(client, b"site:", search="report").locks] == ["Report"]
    assert [lock.name for lock in list_held(client, b"", search="%a+").locks] == ["site:%a+"]
    assert list_held(client, b"", search="nowhere") == Inventory((), 0, complete=True)


# -- computations ------------------------------------------------------------------------------


@pytest.fixture
def computing(client: redis.Redis) -> Iterator[Callable[[str], threading.Event]]:
    """Compute the value of a cache key until the event is set."""
    events: list[threading.Event] = []
    threads: list[threading.Thread] = []

    def start(key: str) -> threading.Event:
        done = threading.Event()
        events.append(done)
        work = partial(caches["default"].get_or_set, key, lambda: done.wait(20), 60)
        threads.append(threading.Thread(target=work, name=f"leader of {key}"))
        threads[-1].start()
        return done

    yield start
    for event in events:
        event.set()
    for thread in threads:
        thread.join()


def test_a_computation_is_listed_until_it_is_over(
    client: redis.Redis, restricted: redis.Redis, computing: Any
) -> None:
    assert list_held(client, b"", kind=FLIGHT) == Inventory((), 0, complete=True)
    done = computing("report")
    until(lambda: list_held(client, b"", kind=FLIGHT).locks)
    (flight,) = list_held(client, b":1:", kind=FLIGHT).locks
    assert (flight.key, flight.name, flight.kind) == (b":1:report", "report", FLIGHT)
    assert (flight.owner.host, flight.owner.pid) == (socket.gethostname(), os.getpid())
    assert flight.owner.thread == "leader of report"
    assert flight.held_for is not None
    assert 0.4 < flight.held_for < 10
    assert (flight.lifetime, flight.renews, flight.silent) == (10, True, False)
    assert (flight.fence, flight.waiters) == (None, None)
    assert list_held(client, b"elsewhere", kind=FLIGHT).locks == ()
    assert list_held(client, b"", search="else", kind=FLIGHT).locks == ()
    assert list_held(restricted, b"", kind=FLIGHT).locks == ()
    done.set()
    until(lambda: not list_held(client, b"", kind=FLIGHT).locks)
    assert list_held(client, b"").locks == ()


def test_a_computation_that_is_ended(client: redis.Redis, computing: Any) -> None:
    computing("report")
    until(lambda: list_held(client, b"", kind=FLIGHT).locks)
    (flight,) = list_held(client, b"", kind=FLIGHT).locks
    assert release(client, flight.key, "another", kind=FLIGHT) is Outcome.NOT_OWNER
    assert release(client, flight.key, flight.owner.id, kind=FLIGHT) is Outcome.RELEASED
    assert release(client, flight.key, flight.owner.id, kind=FLIGHT) is Outcome.FREE
    assert inspect(client, flight.key, FLIGHT).lock is None


# -- one lock ----------------------------------------------------------------------------------


def test_a_lock_looked_at_closely_and_released_by_force(client: redis.Redis) -> None:
    """The first waiter acquires it at once, and the holder calls ``on_lost``."""
    told = threading.Event()
    lock = hold(client, "a", 30, label="the nightly report", renew=True, on_lost=told.set)
    before = described(client, "a")
    with in_the_background(waiting := Lock(client, "a", 30, thread_local=False)):
        until(lambda: len(inspect(client, b"a").waiters) == 1)
        found = inspect(client, b"a")
        assert found.lock is not None
        assert found.lock.owner.id == fingerprint(lock.local.token)
        assert found.lock.waiters == 1
        (waiter,) = found.waiters
        assert (waiter.host, waiter.pid) == (socket.gethostname(), os.getpid())
        assert waiter.thread == "waiter"
        assert waiter.waited is not None
        assert 0 <= waiter.waited < PATIENCE
        assert release(client, b"a", before.owner.id, fence=before.fence) is Outcome.RELEASED
        until(lambda: waiting.fence)
        assert release(client, b"a", before.owner.id) is Outcome.NOT_OWNER
    until(lambda: (hurry(), told.is_set())[1])
    assert lock.lost


def test_waiters_in_the_order_in_which_they_came(client: redis.Redis) -> None:
    hold(client, "a")
    alive = (int(client.time()[0]) + 60) * 1000
    ids = {"9 200.5 7 web-2 Main Thread": alive, "3 100.0 8 web-1 T": alive, "odd": alive}
    client.zadd(lock_keys(b"a").waiters, {**ids, "1 50.0 9 dead T": 1})
    assert list_held(client, b"").locks[0].waiters == 3
    waiters = inspect(client, b"a").waiters
    assert [(w.host, w.pid, w.thread) for w in waiters] == [
        ("", 0, ""),
        ("web-1", 8, "T"),
        ("web-2", 7, "Main Thread"),
    ]


def test_what_has_happened_last(client: redis.Redis) -> None:
    began = time.monotonic()
    lock = hold(client, "a", 30, label="first")
    acquired = time.monotonic()
    before = described(client, "a")
    assert inspect(client, b"a").events == ()
    shortest = time.monotonic() - acquired
    lock.release()
    longest = time.monotonic() - began
    until(lambda: inspect(client, b"a").events)
    (released,) = inspect(client, b"a").events
    assert (released.what, released.owner.id) == ("released", before.owner.id)
    assert (released.owner.host, released.owner.pid) == (socket.gethostname(), os.getpid())
    assert released.owner.label == "first"
    assert released.held is not None
    assert shortest - 0.001 <= released.held <= longest + 0.001
    assert before.owner.since is not None
    assert released.at - before.owner.since == pytest.approx(released.held, abs=5)
    assert 3000 < client.ttl(events_key(b"a")) <= 3600


def hold_until_told(link: Link, url: str, timeout: float) -> None:
    with redis.Redis.from_url(url) as client, Lock(client, "a", timeout, label="nightly"):
        until(lambda: client.exists("{a}:owner"))
        link.say("described")
        link.hear()


@pytest.mark.parametrize("next_one", ["waits", "comes later", "comes later and waits"])
def test_who_dies_is_remembered_by_who_has_the_lock_next(
    redis_server: RedisServer,
    client: redis.Redis,
    next_one: str,
    caplog: pytest.LogCaptureFixture,
    pace: int,
) -> None:
    lock = Lock(client, "a", 30)

    def recorded() -> Any:
        def found() -> bool:
            hurry(CrashRecord)
            return bool(client.exists(events_key(b"a")))

        until(found)
        (event,) = inspect(client, b"a").events
        return event

    ending = processes(hold_until_told, redis_server.url, 2 * pace)
    with recording_events("a") as told, ending as (process,):
        process.go()
        assert process.hear() == "described"
        if next_one == "waits":
            with in_the_background(lock):
                until(lambda: inspect(client, b"a").waiters)
                process.kill()
                event = recorded()  # Before the waiter, too, loses the lock.
        else:
            process.kill()
            until(lambda: not client.exists("a"))
            assert lock.acquire(blocking=next_one == "comes later and waits")
            lock.release()
            event = recorded()
        until(lambda: told.only(Crashed))
    assert [crash.owner.pid for crash in told.only(Crashed)] == [process.pid]
    assert (event.what, event.owner.pid) == ("crashed", process.pid)
    assert (event.owner.host, event.owner.label) == (socket.gethostname(), "nightly")
    assert event.held == pytest.approx(2 * pace, abs=1.5 * pace)
    assert 0 <= int(run(client, CLOCK_CALL).value) / 1e6 - event.at < PATIENCE
    until(lambda: f"process {process.pid}" in caplog.text)  # Said when Redis has answered.
    assert client.ttl(events_key(b"a")) > 80_000


def test_who_is_released_or_comes_back_has_not_vanished(client: redis.Redis) -> None:
    checkout_idle = hold(client, "a", 30, min_hold=0.7)
    described(client, "a")
    checkout_idle.release()
    until(lambda: not client.exists("a"))
    assert "crashed" not in [event.what for event in inspect(client, b"a").events]
    lock = hold(client, "b", 30)
    described(client, "b")
    settle()
    (renewal,) = lock.local.renewal.jobs
    keeper().discard(renewal)  # So that the holder is not told at once.
    client.delete("b")
    hold(client, "b").release()
    until(lambda: client.exists(events_key(b"b")))
    assert [event.what for event in inspect(client, b"b").events] == ["crashed"]
    renewal.due = time.monotonic()
    keeper().add(renewal)  # Comes to know it.
    until(lambda: [event.what for event in inspect(client, b"b").events] == ["lost"])


@pytest.mark.parametrize("ended_by", ["its lifetime", "another program"])
def test_a_holder_that_reports_the_loss_has_not_crashed(
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    ended_by: str,
    pace: int,
) -> None:
    monkeypatch.setattr(history, "REPORT_SECONDS", PATIENCE)  # As if it were soon enough.
    lock, following = Lock(client, "a", 1 * pace), Lock(client, "a", 30)
    lock.acquire()
    described(client, "a")
    if ended_by == "another program":
        client.delete("a")
    assert following.acquire()
    until(lambda: lock.lost and client.exists(events_key(b"a")))
    hurry(CrashRecord)
    until(lambda: not any(isinstance(job, CrashRecord) for job in keeper().jobs()))
    following.release()
    assert b"crashed" not in client.get(events_key(b"a"))
    assert "crashed" not in caplog.text


def test_a_lost_lock_is_remembered_for_a_day(client: redis.Redis) -> None:
    hold(client, "a")
    described(client, "a")
    client.delete("a")
    until(lambda: "lost" in [event.what for event in inspect(client, b"a").events])
    assert "deleted" in inspect(client, b"a").events[0].note
    assert client.ttl(events_key(b"a")) > 80_000


def test_the_list_of_events_is_bounded(client: redis.Redis) -> None:
    for number in range(30):
        run(client, note_call(b"a", "released", Owner(str(number), label="x" * 5000)))
    events = inspect(client, b"a").events
    assert [event.owner.id for event in events] == [str(n) for n in range(29, 19, -1)]
    assert len(events[0].owner.label) == 200
    odd = ("no event", "5 no json", "5 []", '5 {"pid": "x"}', '5 {"held": "x"}', "5 {}")
    client.append(events_key(b"a"), "\n" + "\n".join(odd))
    assert len(inspect(client, b"a").events) == 11


#: What can be wrong with what is kept for a lock, and the part that is then said to be unreadable.
DAMAGE: dict[str, tuple[Callable[[redis.Redis, Any], object], str]] = {
    "owner is a string": (lambda c, keys: c.set(keys.owner, "x"), "owner"),
    "owner has many fields": (
        lambda c, keys: c.hset(keys.owner, mapping=dict.fromkeys(map(str, range(100)), 1)),
        "owner",
    ),
    "waiters is a string": (lambda c, keys: c.set(keys.waiters, "x"), "waiters"),
    "grants is a hash": (lambda c, keys: c.hset(keys.grants, "a", 1), "grants"),
    "fence is no number": (lambda c, keys: c.hset(keys.owner, "fence", "a"), ""),
    "fence of 5,000 digits": (lambda c, keys: c.hset(keys.owner, "fence", "9" * 5000), ""),
    "pid of 5,000 digits": (lambda c, keys: c.hset(keys.owner, "pid", "9" * 5000), ""),
    "since is far": (lambda c, keys: c.hset(keys.owner, "since", "1e300"), ""),
    "numbers of 5,000 digits": (
        lambda c, keys: c.hset(keys.owner, mapping=dict.fromkeys(("seen", "lifetime"), "9" * 5000)),
        "",
    ),
    "owner is not text": (lambda c, keys: c.hset(keys.owner, b"\xff", b"\xfe"), ""),
    "waiters are odd": (
        lambda c, keys: c.zadd(
            keys.waiters,
            dict.fromkeys(("1 nan 5 h t", "1 1e300 5 h t", f"1 1 {'9' * 5000} h t"), 1e13),
        ),
        "",
    ),
    "events is a list": (lambda c, keys: c.rpush(events_key(keys.lock), "a"), ""),
    "events are deep": (lambda c, keys: c.set(events_key(keys.lock), "5 " + "[" * 100_000), ""),
    "events are odd": (
        lambda c, keys: c.set(
            events_key(keys.lock),
            f'{"9" * 5000} {{}}\n5 {{"pid": 1e400}}\n5 {{"held": NaN}}\n{10**30} {{}}',
        ),
        "",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_broken_lock_is_one_row(client: redis.Redis, damage: str) -> None:
    hold(client, "whole", label="whole")
    described(client, "whole")
    lock = hold(client, "broken", label="broken")
    described(client, "broken")
    break_it, part = DAMAGE[damage]
    if part:
        client.delete(getattr(lock.keys, part))
    break_it(client, lock.keys)

    found = {held.name: held for held in list_held(client, b"").locks}
    assert (found["whole"].owner.label, found["whole"].broken) == ("whole", ())
    broken = HeldLock("default", "broken", found["broken"])
    assert broken.lock.broken == ((part,) if part else ())
    if part:
        assert part in row(broken, str)["said"]
        assert part in note(broken.lock)
    json.dumps(as_json(broken))
    inspected = inspect(client, b"broken")
    assert inspected.events == ()
    assert event_rows(inspected.events) == []
    waiter_rows(inspected.waiters)
    if part != "grants":
        assert lock.holder() is not None


def test_what_cannot_be_a_lock_is_passed_over(client: redis.Redis) -> None:
    """Somebody wrote to the index; nothing of ours can be at such a key."""
    hold(client, "a")
    for key in (b"{a}:fence", INDEX):
        client.zadd(INDEX, {key: (time.time() + 60) * 1000})
        assert inspect(client, key) == Inspection(None, (), ())
        assert release(client, key, "x") is Outcome.FREE
    assert names(client) == ["a"]


# -- releasing what another holds --------------------------------------------------------------


def test_it_is_released_if_the_holder_is_the_one_that_was_shown(client: redis.Redis) -> None:
    lock = hold(client, "a")
    listed = described(client, "a")
    assert release(client, b"a", "another") is Outcome.NOT_OWNER
    assert release(client, b"a", listed.owner.id, fence=1) is Outcome.NOT_OWNER
    assert lock.owned()
    outcome = release(client, b"a", listed.owner.id, fence=listed.fence, by="an operator")
    assert outcome is Outcome.RELEASED
    assert not lock.locked()
    assert list_held(client, b"").locks == ()
    assert release(client, b"a", listed.owner.id) is Outcome.FREE
    events = inspect(client, b"a").events
    (event,) = [event for event in events if event.what == "reset"]
    assert (event.owner.id, event.note) == (listed.owner.id, "an operator")


def test_one_that_its_holder_releases_just_then_was_free(client: redis.Redis) -> None:
    lock = hold(client, "a")
    listed = described(client, "a")

    def release_just_then(shown: str) -> str:
        lock.release()
        return shown

    outcome = release(client, b"a", listed.owner.id, fence=listed.fence, id_of=release_just_then)
    assert outcome is Outcome.FREE


def test_a_lock_of_redis_py(client: redis.Redis) -> None:
    """Where only locks are stored, its token's form is enough; elsewhere it may be anything."""
    other = redis.lock.Lock(client, "site:a", timeout=30)
    assert other.acquire()
    assert inspect(client, b"site:a").lock is None
    assert inspect(client, b"site:a").other == "string"
    lock = inspect(client, b"site:a", only_locks=(b"site:",)).lock
    assert lock is not None
    assert lock.silent is None
    assert release(client, b"site:a", lock.owner.id) is Outcome.FREE
    assert other.owned()
    only = partial(release, client, b"site:a", lock.owner.id, only_locks=(b"site:",))
    assert only() is Outcome.RELEASED
    assert not other.owned()


@contextmanager
def in_the_background(lock: Lock) -> Iterator[None]:
    """Let a thread wait for ``lock``, and let it end."""
    thread = threading.Thread(target=lambda: lock.acquire(blocking_timeout=20), name="waiter")
    thread.start()
    try:
        yield
    finally:
        lock.reset()
        thread.join()


# -- outages -----------------------------------------------------------------------------------


def test_redis_does_not_answer(own_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "REPLY_TIMEOUT_SECONDS", 0.2)
    with own_server.client(socket_timeout=600) as client:
        client.ping()
        own_server.pause()
        began = time.monotonic()
        with pytest.raises(redis.TimeoutError):
            list_held(client, b"")
        assert time.monotonic() - began < PATIENCE
