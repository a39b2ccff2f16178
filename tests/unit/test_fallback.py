"""``ON_REDIS_DOWN``: what one call of ``acquire`` decides, between the lock in Redis and that of
this host. No Redis runs here, and time passes only while a caller waits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from django_redis_lock import AsyncLock, Lock, Redlock, TooFewReplicas, events
from django_redis_lock.clock import time
from django_redis_lock.contrib import fallback
from django_redis_lock.contrib.fallback import (
    NO_WAIT_SECONDS,
    OUTAGE_PATIENCE_SECONDS,
    Attempt,
    FallbackHold,
    holders,
)
from django_redis_lock.contrib.fallback.file_lock import LocalLock, held_locally
from django_redis_lock.contrib.fallback.host import HostLock, _logged_at
from django_redis_lock.events import FellBack
from django_redis_lock.exceptions import LocalLockUnavailable
from django_redis_lock.locking import Hold
from django_redis_lock.locking.questions import Query
from django_redis_lock.protocol import Acquisition, Owner, fingerprint
from django_redis_lock.protocol.holders import HeldReply, HolderInfo
from django_redis_lock.steps import drive
from django_redis_lock.transport import server_of
from tests.events import no_listeners
from tests.support.clock import FakeClock, clock

__all__ = ["clock", "no_listeners"]

# Quick cells, each of which is another decision.
pytestmark = [pytest.mark.sample(1), pytest.mark.usefixtures("no_listeners")]

OUT = RedisConnectionError("refused")


class Scripted(Lock):
    """A lock whose attempts in Redis have these outcomes: whether it is acquired, or an error.

    Attributes:
        did: what was asked of Redis, in order.
    """

    outcomes: list[Any]
    did: list[Any]
    granted_place = 1
    #: What happens in the meantime.
    before: Callable[[], object] = staticmethod(lambda: None)

    def _acquire_in_redis(self, request: Any, wait: float | None) -> Any:
        self.did.append((request, wait))
        outcome = self.outcomes.pop(0)
        yield from ()
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome:
            hold = Hold(self.timeout)
            until = time.monotonic() + (self.timeout or math.inf)
            granted = Acquisition(request.token, 7, time.monotonic(), until)
            hold.begin(granted, self.keys.at_place(self.granted_place))
            self.local.hold, self.local.token = hold, hold.token
            self.before()
        return outcome

    def _release_steps(self) -> Any:
        self.did.append("release")
        yield from ()

    def _leave_to_keeper(self, before: Any = None) -> None:
        self.did.append("keeper")

    def _abandon(self, request: Any, error: BaseException) -> None:
        self.did.append(error)


@pytest.fixture
def make(
    clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Scripted]:
    def sleep(seconds: float) -> None:
        clock.now += seconds
        assert clock.now < 1100, "it waits forever"

    def make(*outcomes: Any, how: str = "local", **options: Any) -> Scripted:
        client = redis.Redis(port=1)
        options = {"timeout": 30, "on_redis_down": how, "local_folder": tmp_path, **options}
        lock = Scripted(client, "report", **options)
        lock.outcomes, lock.did = [*outcomes], []
        return lock

    monkeypatch.setattr(time, "sleep", sleep)
    _logged_at.clear()
    return make


def acquire(lock: Scripted, wait: float | None = None, token: str | None = None) -> bool:
    request, wait = lock._request(None, wait != 0 and None, wait or None, token)
    return drive(Attempt(lock, request, wait).steps())


def other(lock: Scripted) -> LocalLock:
    """Another attempt to hold the lock of this host."""
    return HostLock.of(lock).attempt()


ME = Owner("abcd", "host", 42, "main", "another")


# -- while Redis answers ---------------------------------------------------------------------------


def test_while_redis_answers_both_are_taken(make: Any) -> None:
    lock = make(True)
    assert acquire(lock) is True
    ((request, wait),) = lock.did
    assert (request.outage_patience, wait) == (OUTAGE_PATIENCE_SECONDS, None)
    assert lock.degraded is None
    assert other(lock).is_in_addition()
    assert not other(lock).try_acquire(ME)
    holder = other(lock).holder()
    assert holder.id == fingerprint(lock.local.token)
    lock.local.hold.end()
    assert other(lock).try_acquire(ME)


@pytest.mark.parametrize("how", ["local", "run"])
def test_what_another_holds_in_redis_is_not_taken_here(make: Any, how: str) -> None:
    lock = make(False, how=how)
    assert acquire(lock, 0) is False
    assert not other(lock).path.exists()


def test_with_run_there_is_no_lock_of_this_host(make: Any) -> None:
    lock = make(True, how="run")
    assert acquire(lock) is True
    assert lock.local.hold.on_end is None
    assert not other(lock).path.exists()


@pytest.mark.parametrize("wait", [0, 0.02])
def test_what_another_holds_on_this_host_is_given_back_in_redis(
    make: Any, clock: FakeClock, wait: float
) -> None:
    """It got it in an outage. A single attempt looks three times: another may be reading it."""
    lock = make(True)
    holder = other(lock)
    assert holder.try_acquire(ME)
    assert acquire(lock, wait) is False
    assert lock.did[1:] == ["release"]
    assert clock.now == pytest.approx(1000 + (wait or 0.002))


def test_who_waits_gets_it_when_the_other_releases_it(
    make: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = make(True)
    holder = other(lock)
    assert holder.try_acquire(ME)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now > 1020:
            holder.release()

    monkeypatch.setattr(time, "sleep", sleep)
    assert acquire(lock) is True
    assert 1020 < clock.now < 1020.1
    assert len(lock.did) == 1


def test_a_holder_that_has_lost_the_lock_in_redis_keeps_no_other_out(make: Any) -> None:
    """It holds that of this host in addition, and the caller has that in Redis."""
    lock = make(True)
    holder = other(lock)
    assert holder.try_acquire(ME, in_addition=True)
    assert acquire(lock, 0) is True
    assert len(lock.did) == 1


@pytest.mark.parametrize(
    ("seconds", "attempts"), [(NO_WAIT_SECONDS / 2, 1), (NO_WAIT_SECONDS * 1.5, 2)]
)
@pytest.mark.parametrize(("wait", "chosen"), [(None, None), (60, None), (60, "chosen")])
def test_a_lock_in_redis_that_expired_during_the_wait_is_taken_again(
    make: Any,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    attempts: int,
    wait: float | None,
    chosen: str | None,
) -> None:
    """Unless the caller had not to wait: then its lifetime is what it has asked for."""
    lock = make(True, True, timeout=0.011)
    holder = other(lock)
    assert holder.try_acquire(ME)

    def sleep(pause: float) -> None:
        clock.now += pause
        if clock.now >= 1000 + seconds:
            holder.release()

    def is_free() -> bool:
        attempt = other(lock)
        try:
            return attempt.try_acquire(ME)
        finally:
            attempt.release()

    free: list[bool] = []
    lock.before = lambda: free.append(is_free())
    monkeypatch.setattr(time, "sleep", sleep)
    assert acquire(lock, wait, chosen) is True
    assert free == [False, True][:attempts]
    assert len(lock.did) == attempts
    assert lock.local.hold.on_end is not None
    if attempts == 2:
        (first, _), (second, left) = lock.did
        assert left == (None if wait is None else pytest.approx(1060 - clock.now))
        assert second.waiter not in (b"", first.waiter)
        assert first.may_hold == [
            (first.token, first.attempt, 1),
            (second.token, second.attempt, 1),
        ]
        if chosen:
            assert (second.token, bool(second.attempt)) == (b"chosen", True)
            assert second.attempt != first.attempt
        else:
            assert (second.token != first.token, second.attempt) == (True, b"")
    # It is held, and released at its end.
    assert not other(lock).try_acquire(ME)
    lock.local.hold.end()
    assert other(lock).try_acquire(ME)


def test_at_the_end_of_the_wait_it_is_tried_once_more_without_waiting(
    make: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = make(True, False, timeout=0.011)
    holder = other(lock)
    assert holder.try_acquire(ME)

    def sleep(pause: float) -> None:
        clock.now += pause
        if clock.now >= 1000.1:
            holder.release()
            clock.now += 100

    monkeypatch.setattr(time, "sleep", sleep)
    assert acquire(lock, 60) is False
    (request, wait) = lock.did[1]
    assert (request.waiter, wait) == (b"", 0.0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError()])
def test_an_interrupted_wait_for_this_host_ends_both(
    make: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    lock = make(True)
    holder = other(lock)
    assert holder.try_acquire(ME)

    def interrupted(seconds: float) -> None:
        raise error

    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(type(error)):
        acquire(lock)
    assert lock.did[1:] == ["keeper"]
    holder.release()
    assert other(lock).try_acquire(ME)


def test_who_is_interrupted_just_after_it_does_not_keep_it(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error refers to what was taken."""

    def interrupted(attempt: Attempt, error: BaseException) -> None:
        assert not other(lock).try_acquire(ME)
        raise KeyboardInterrupt

    lock = make(OUT)
    monkeypatch.setattr(Attempt, "_tell", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        acquire(lock)
    assert other(lock).try_acquire(ME)
    del caught


def test_an_interrupted_wait_leaves_the_lock_of_another_user_of_the_handle(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = make(True)
    holder = other(lock)
    assert holder.try_acquire(ME)

    def interrupted(seconds: float) -> None:
        lock.local.hold = Hold(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        acquire(lock)
    assert lock.did[1:] == []
    holder.release()


@pytest.mark.parametrize("error", [OUT, OSError("broken pipe")])
def test_a_release_without_a_reply_is_left_to_the_keeper(
    make: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    lock = make(True)
    holder = other(lock)
    assert holder.try_acquire(ME)

    def fails() -> Any:
        yield from ()
        raise error

    monkeypatch.setattr(lock, "_release_steps", fails)
    assert acquire(lock, 0) is False
    assert lock.did[1:] == ["keeper"]
    holder.release()


@pytest.mark.parametrize("outcome", [True, OUT])
def test_a_lost_lock_gives_back_that_of_this_host_first(
    make: Any, clock: FakeClock, outcome: Any
) -> None:
    """The same handle acquires again: else it would wait for itself."""
    lock = make(True, outcome, timeout=10)
    assert acquire(lock) is True
    clock.now += 5
    file = other(lock)
    assert not file.try_acquire(ME)
    clock.now += 5
    assert acquire(lock, 0) is True
    assert lock.local.hold.is_valid


def test_a_lock_that_is_held_does_not_give_it_back(make: Any, clock: FakeClock) -> None:
    lock = make(True, False, timeout=10)
    assert acquire(lock) is True
    assert acquire(lock, 0) is False
    assert not other(lock).try_acquire(ME)


def test_a_hold_without_one_of_this_host_is_left_alone(make: Any) -> None:
    lock = make(True, how="run")
    lock.local.hold = Hold(30)
    lock.local.hold.begin(Acquisition(b"token", 7, 0.0, 10.0), lock.keys)
    assert acquire(lock) is True


def test_each_place_of_a_lock_has_its_own_on_this_host(make: Any) -> None:
    first, second = make(True, limit=2), make(True, limit=2)
    second.granted_place = 2
    assert acquire(first) is acquire(second, 0) is True
    for lock in (first, second):
        assert lock.local.hold.on_end.__self__.is_in_addition()
    host = HostLock.of(first)
    second_place = LocalLock(host.identity(second.local.hold.keys.lock), "two", host.folder)
    assert not second_place.try_acquire(ME)
    first.local.hold.end()
    assert other(first).try_acquire(ME)
    assert host.identity() == host.identity(first.keys.lock) == b"localhost:1/0\0report"


def test_without_redis_a_lock_with_places_is_one(
    make: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the call has had a place in Redis before."""
    lock = make(True, OUT, limit=2, timeout=0.011)
    lock.granted_place = 2
    host = HostLock.of(lock)
    holder = LocalLock(host.identity(lock.keys.at_place(2).lock), "two", host.folder)
    assert holder.try_acquire(ME)

    def sleep(pause: float) -> None:
        clock.now += pause
        if clock.now >= 1000.1:
            holder.release()

    monkeypatch.setattr(time, "sleep", sleep)
    assert acquire(lock) is True
    assert lock.degraded == "local"
    assert not other(lock).try_acquire(ME)
    assert holder.try_acquire(ME)


# -- while it does not -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["local", "run"])
def test_without_redis_it_goes_on(make: Any, clock: FakeClock, how: str) -> None:
    told: list[Any] = []
    lock = make(OUT, how=how, label="nightly")
    events.subscribe(told.append)
    try:
        assert acquire(lock) is True
    finally:
        events.unsubscribe(told.append)
    assert (lock.did[1:], lock.did[0][0].may_hold) == ([OUT], [])
    hold = lock.local.hold
    assert isinstance(hold, FallbackHold)
    assert (lock.degraded, lock.fence, hold.deadline) == (how, None, math.inf)
    assert (lock.local.token, lock.local.renewal) == (hold.token, None)
    (event,) = told
    assert event == FellBack(lock.subject, how, OUT)
    clock.now += 60
    owner = hold.owner()
    assert owner.since == pytest.approx(time.time() - 60, abs=30)
    assert (owner.label, owner.pid) == ("nightly", os.getpid())
    held = [name for name, _ in held_locally(lock.local_folder)]
    assert held == (["report"] if how == "local" else [])
    assert not other(lock).is_in_addition()
    hold.end()
    assert held_locally(lock.local_folder) == []


def test_of_an_outage_the_log_has_the_first(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    lock = make()  # While it is there, the others have its server.
    breaker = server_of(lock.redis).breaker
    breaker.answered()
    breaker.fallbacks = 0
    for _ in range(3):
        assert acquire(make(OUT, how="run"))
    assert breaker.fallbacks == 3
    assert caplog.text.count("is skipped, its code runs unlocked (refused)") == 1


def test_of_several_servers_that_which_fails_counts_it(make: Any) -> None:
    lock = make(OUT, how="run")
    several = Redlock([redis.Redis(port=port) for port in (7401, 7402, 7403)], "report")
    failing = several._servers[1].breaker
    failing.failed(OUT, 0.0)
    object.__setattr__(lock, "__class__", type("On", (Scripted,), {"_servers": several._servers}))
    assert acquire(lock)
    assert [server.breaker.fallbacks for server in several._servers] == [0, 1, 0]
    failing.answered()


@pytest.mark.parametrize("wait", [0, 0.05, None])
def test_without_redis_it_waits_for_who_holds_it_here(
    make: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, wait: float | None
) -> None:
    lock = make(OUT)
    holder = other(lock)
    assert holder.try_acquire(ME, in_addition=True)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now > 1005:
            holder.release()

    monkeypatch.setattr(time, "sleep", sleep)
    assert acquire(lock, wait) is (wait is None)
    assert lock.degraded == ("local" if wait is None else None)


@pytest.mark.parametrize(
    "error", [TooFewReplicas(0, 1), ResponseError("WRONGTYPE"), KeyboardInterrupt()]
)
def test_what_is_no_outage_is_raised(make: Any, error: BaseException) -> None:
    lock = make(error)
    with pytest.raises(type(error)) as caught:
        acquire(lock)
    assert caught.value is error
    assert (lock.did[1:], lock.did[0][0].may_hold) == ([error], [])
    assert lock.local.hold is None


def test_what_listeners_keep_does_not_keep_the_lock(make: Any) -> None:
    """The frames of an error, and of its causes."""
    causes = [RedisConnectionError("refused"), OSError("broken"), ValueError("while handling it")]
    for error in causes:
        try:
            raise error
        except Exception:
            pass
    causes[0].__cause__, causes[1].__context__ = causes[1], causes[2]
    assert acquire(make(causes[0], how="run"))
    assert [error.__traceback__ for error in causes] == [None] * 3


def break_folder(lock: Scripted) -> None:
    assert lock.local_folder is not None
    folder = Path(lock.local_folder)
    folder.rmdir()
    folder.touch()


def test_where_the_host_can_have_none_the_lock_in_redis_is_enough(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lock = make(True, True, OUT)
    break_folder(lock)
    for _ in range(2):
        assert acquire(lock) is True
    assert caplog.text.count("is in Redis only, and fails in an outage") == 1
    host = HostLock.of(lock)
    _logged_at.clear()
    assert host.holder(away=False) is None
    assert caplog.text.count("is in Redis only, and fails in an outage") == 2
    with pytest.raises(LocalLockUnavailable, match=r"Not a directory|File exists"):
        acquire(lock)
    with pytest.raises(LocalLockUnavailable):
        host.holder(away=True)


def test_a_task_does_not_sleep_in_its_loop(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[Any] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append("thread"))
    monkeypatch.setattr(time, "asleep", lambda seconds: slept.append("task"))
    lock = make()
    holder = other(lock)
    assert holder.try_acquire(ME)
    for kind in (Lock, AsyncLock):
        client: Any = lock.redis if kind is Lock else redis.asyncio.Redis(port=1)
        host = HostLock.of(kind(client, "report", local_folder=lock.local_folder))
        assert drive(host.take(host.attempt(), ME, -math.inf, False)) is False
    assert slept == ["thread", "thread", "task", "task"]
    holder.release()


# -- who holds it ----------------------------------------------------------------------------------


def in_redis(*holders: HolderInfo) -> Query[list[HolderInfo]]:
    return Query(None, lambda _: [*holders])


SOMEBODY = HolderInfo(HeldReply(b"token", 5000, (), 0))


def test_who_holds_it_in_redis_comes_first(make: Any) -> None:
    lock = make()
    holder = other(lock)
    assert holder.try_acquire(ME)
    assert holders(lock, in_redis(SOMEBODY)).parse(None) == [SOMEBODY]
    (held,) = holders(lock, in_redis()).parse(None)
    assert (held.owner, held.token, held.ttl, held.resting) == (ME, b"", math.inf, False)
    assert (held.held_for, held.place) == (None, 0)
    holder.release()
    assert holders(lock, in_redis()).parse(None) == []


@pytest.mark.parametrize(("since", "seconds"), [(-60.0, 60.0), (60.0, 0.0)])
def test_how_long_it_is_held_here(make: Any, since: float, seconds: float) -> None:
    """Not for less than no time, also if the clock was set back."""
    lock = make()
    holder = other(lock)
    assert holder.try_acquire(replace(ME, since=time.time() + since))
    (held,) = holders(lock, in_redis()).parse(None)
    assert held.held_for == pytest.approx(seconds, abs=30)
    assert seconds or held.held_for == 0.0
    holder.release()


def test_who_holds_it_here_as_well_has_lost_it_in_redis(make: Any) -> None:
    lock = make()
    holder = other(lock)
    assert holder.try_acquire(ME, in_addition=True)
    query = holders(lock, in_redis())
    assert query.parse(None) == []
    (held,) = query.after(OUT)  # But in an outage it is the holder, as far as is known.
    assert held.owner == ME
    holder.release()
    assert query.after(OUT) == []


@pytest.mark.parametrize(
    ("how", "error"), [("run", OUT), ("local", ResponseError("WRONGTYPE")), ("raise", OUT)]
)
def test_who_holds_it_is_not_known_then(make: Any, how: str, error: Exception) -> None:
    with pytest.raises(type(error)):
        holders(make(how=how), in_redis()).after(error)


@pytest.mark.parametrize("how", ["local", "run"])
def test_the_caller_that_holds_it_without_redis(make: Any, clock: FakeClock, how: str) -> None:
    lock = make(OUT, how=how)
    assert acquire(lock)
    clock.now += 60
    query = holders(lock, in_redis(SOMEBODY))
    assert query.call is None
    (held,) = query.parse(None)
    assert held.owner.id == fingerprint(lock.local.token)
    assert held.held_for == pytest.approx(60, abs=30)
    # Another handle sees it on this host only.
    seen = holders(make(how=how), in_redis()).parse(None)
    assert [each.owner.id for each in seen] == ([held.owner.id] if how == "local" else [])
    lock.local.hold.end()
    assert holders(lock, in_redis()).parse(None) == []


def test_the_name_for_people(make: Any) -> None:
    lock = make()
    assert HostLock.of(lock).name == "report"
    lock.cache_key = "shown"
    assert HostLock.of(lock).name == "shown"


def test_policies_are_checked() -> None:
    fallback.check_policy("local")
    with pytest.raises(ValueError, match="must be 'raise', 'local' or 'run'"):
        fallback.check_policy("wait")
