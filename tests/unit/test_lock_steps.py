"""What the methods of a lock do after each answer, and what they tell of it. The answers are the
test's, and so is the time."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_redis_lock import AsyncLock, Lock, LockError, LockLost, LockNotOwnedError, events
from django_redis_lock.clock import time
from django_redis_lock.exceptions import TooFewReplicas
from django_redis_lock.keeper import DeferredRelease, Keeper, SentOnce
from django_redis_lock.locking import operations, questions, replicas
from django_redis_lock.locking.hold import Renewal, latest
from django_redis_lock.locking.lock import in_a_thread
from django_redis_lock.locking.questions import Query
from django_redis_lock.locking.unwind import unwinding
from django_redis_lock.locking.waiting import queues
from django_redis_lock.protocol import fingerprint
from django_redis_lock.protocol.acquisition import Acquisition, Extended, Refused
from django_redis_lock.protocol.holder_scripts import HELD
from django_redis_lock.protocol.holders import HolderInfo
from django_redis_lock.protocol.lock_scripts import EXTEND, RELEASE, RENEW
from django_redis_lock.protocol.script import Call
from django_redis_lock.transport import Answer, NotReady, note_sent, pack, pack_words, server_of
from tests.support.clock import FakeClock
from tests.support.holds import Pending
from tests.support.logs import logged

AWAY = redis.ConnectionError("away")
BUSY = redis.ResponseError("BUSY Redis is busy running a script.")
OOM = redis.exceptions.OutOfMemoryError("maxmemory")
FENCE = 1_800_000_000_000_000
REFUSED = b"20000 %d" % FENCE


class Scripted(Lock):
    """Its calls return, or raise, what a test has put there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.acquired_with: list[Any] = []
        self.outcomes: list[Any] = []
        self.calls: list[Any] = []
        self.waits: list[Any] = []
        super().__init__(redis.Redis(port=1), *args, **options)

    def _next(self) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _send_acquire(self, request: Any) -> Any:
        self.acquired_with.append(request)
        time.clock.now += 0.25
        return self._next()

    def _wait(self, request: Any, refused: Any) -> Any:
        self.waits.append((request, refused))
        time.clock.now += 2.0
        return self._next()

    def _run(self, call: Any) -> Any:
        self.calls.append(call)
        outcome = self._next()
        return outcome if isinstance(outcome, Answer) else Answer(outcome, False)


@pytest.fixture(autouse=True)
def clock() -> Iterator[FakeClock]:
    before, fake = time.clock, FakeClock()
    time.use(fake)
    yield fake
    time.use(before)
    latest.clear()
    queues.clear()


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the keeper is given to do, and when to do it, and what is taken from it. Locks of
    earlier tests may be collected meanwhile."""
    noted: list[Any] = []

    def note(*what: Any) -> None:
        if what[0] in noted:
            noted.append(what)

    def add(keeper: Keeper, job: Any) -> None:
        if isinstance(job, (Renewal, SentOnce, DeferredRelease)):  # And not of the metrics.
            noted.append(job)

    monkeypatch.setattr(Keeper, "add", add)
    monkeypatch.setattr(Keeper, "discard", lambda keeper, job: note(job))
    monkeypatch.setattr(Keeper, "reschedule", lambda keeper, job, due: note(job, due))
    return noted


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    """The events that are emitted."""
    found: list[Any] = []
    events.subscribe(found.append)
    yield found
    events.unsubscribe(found.append)


def make(*outcomes: Any, **options: Any) -> Scripted:
    lock = Scripted("report", **{"timeout": 30} | options)
    lock.outcomes += outcomes
    return lock


def held(*outcomes: Any, **options: Any) -> Scripted:
    lock = make(FENCE, *outcomes, **options)
    assert lock.acquire(blocking=False)
    return lock


def waited(**options: Any) -> Acquisition:
    of_it = {"token": b"T", "fence": 7, "began": 1002.0, "deadline": 1030.0, "contended": True}
    return Acquisition(**of_it | options)


def of_kind(jobs: list[Any], kind: type) -> list[Any]:
    return [job for job in jobs if isinstance(job, kind)]


# -- acquire ---------------------------------------------------------------------------------------


def test_a_free_lock_is_taken(heard: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "django_redis_lock.lock")
    lock = held()
    assert (lock.fence, lock.place, lock.fences) == (FENCE, 1, {"report": FENCE})
    assert lock.local.token == lock.acquired_with[0].token
    hold = lock.local.hold
    assert hold is not None
    assert (hold.began, hold.deadline, hold.limit) == (1000.0, 1030.0, 1)
    assert lock.acquired_with[0].waiter == b""
    [acquired] = heard
    assert isinstance(acquired, events.Acquired)
    assert acquired[1:] == (0.25, False, FENCE)
    assert logged(caplog, "lock") == [f"Acquired report after 0.250 s, fence {FENCE}"]
    assert "held, ttl=29.8" in repr(lock)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_lock_that_is_not_obtained(
    heard: list[Any], caplog: pytest.LogCaptureFixture, blocking: bool
) -> None:
    caplog.set_level(logging.DEBUG, "django_redis_lock.lock")
    lock = make(REFUSED, None)
    assert not lock.acquire(blocking=blocking, blocking_timeout=2)
    contended, ended = heard
    assert isinstance(contended, events.Contended)
    if blocking:
        assert isinstance(ended, events.TimedOut)
        assert ended[1] == 2.25
        [(request, refused)] = lock.waits
        assert refused == Refused(20_000, FENCE, 1000.0)
        assert request.deadline == 1002.0
        assert request.margin == 0.01
        assert request.waiter
    else:
        assert isinstance(ended, events.Rejected)
        assert not lock.waits
    seconds = "2.250" if blocking else "0.250"
    assert logged(caplog, "lock") == [f"Did not get report within {seconds} s"]
    assert lock.local.token is None
    assert "not held here" in repr(lock)
    assert lock.fence is lock.place is None


def test_after_a_wait_the_lock_is_contended(heard: list[Any]) -> None:
    lock = make(REFUSED, waited())
    assert lock.acquire()
    assert lock.local.token == b"T"
    assert heard[-1][1:] == (2.25, True, 7)


def test_behind_others_of_its_process_a_caller_sends_nothing(
    heard: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    held()
    heard.clear()
    lock = make(waited(), blocking_timeout=5)
    other: Any = SimpleNamespace()
    queues[lock._queue_key()] = other
    assert lock.acquire()
    assert not lock.acquired_with
    [(request, refused)] = lock.waits
    assert (request.waiter, refused) == (b"", None)
    assert [type(event) for event in heard] == [events.Contended, events.Acquired]
    assert logged(caplog, "lock", "held by the same thread")
    again = make(FENCE)
    assert again.acquire(blocking=False)
    assert again.acquired_with
    assert again._queue_key() == (server_of(again.redis), b"report", None, 1)


@pytest.mark.parametrize(
    ("error", "options", "waits"),
    [
        (BUSY, {"blocking": False}, False),
        (BUSY, {"blocking_timeout": 5}, True),
        (OOM, {"blocking_timeout": 5}, True),
        (OOM, {}, False),
        (NotReady("it runs a script"), {}, True),
        (AWAY, {"blocking_timeout": 5}, False),
    ],
)
def test_what_the_server_refuses_for_now_is_waited_for(
    heard: list[Any], error: Exception, options: dict[str, Any], waits: bool
) -> None:
    """Without a deadline, only what ends by itself: a wait would hide that a disk is full."""
    lock = make(error, waited())
    if waits:
        assert lock.acquire(**options)
        assert lock.waits[0][1] is None
    else:
        with pytest.raises(type(error)):
            lock.acquire(**options)
        assert not lock.waits


def test_a_holder_that_has_vanished_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    note = SimpleNamespace(note_vanished=lambda *args: noted.append(args))
    monkeypatch.setattr(operations, "records", note)
    lock = make([1, FENCE, FENCE, [5, []]])
    assert lock.acquire(blocking=False)
    [(server, keys, vanished, subject)] = noted
    assert (server, keys, subject) == (server_of(lock.redis), lock.keys, lock.subject)
    assert vanished.ended_us == 5
    assert make([1, FENCE, FENCE]).acquire(blocking=False)
    assert len(noted) == 1


@pytest.mark.parametrize(
    ("lifetime", "wait", "patience"),
    [(30, None, 3.0), (30, 0.5, 1.0), (30, 2.5, 2.25), (6, None, 2.0), (None, None, 3.0)],
)
@pytest.mark.parametrize(("still_held", "known"), [(True, 1), (True, 0), (False, 1)])
def test_replicas_have_some_time_to_confirm(
    monkeypatch: pytest.MonkeyPatch,
    lifetime: float | None,
    wait: float | None,
    patience: float,
    still_held: bool,
    known: int,
) -> None:
    lock = make(FENCE, timeout=lifetime, replicas=1)
    asked: list[float] = []

    def confirm(acquired: Any, patience: float) -> Any:
        asked.append(patience)
        return replicas.Confirmed(still_held, known)

    monkeypatch.setattr(lock, "_confirm", confirm)
    if still_held and known:
        assert lock.acquire(blocking_timeout=wait)
    else:
        with pytest.raises(TooFewReplicas):
            lock.acquire(blocking_timeout=wait)
        [request] = lock.acquired_with
        assert request.may_hold == [(request.token, b"", 1)]
    assert asked == [pytest.approx(patience)]


def test_a_lock_whose_replicas_could_not_be_asked_is_released(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question was not sent; the acquisition was."""
    error = redis.ConnectionError("refused")
    note_sent(error, False)

    def confirm(acquired: Any, patience: float) -> Any:
        raise error

    lock = make(FENCE, replicas=1)
    monkeypatch.setattr(lock, "_confirm", confirm)
    with pytest.raises(redis.ConnectionError):
        lock.acquire(blocking=False)
    [release] = of_kind(jobs, DeferredRelease)
    assert release._call.args[0] == lock.acquired_with[0].token


@pytest.mark.parametrize("still_held", [1, 0])
def test_replicas_are_asked_after_a_write_on_the_same_connection(
    monkeypatch: pytest.MonkeyPatch, still_held: int
) -> None:
    asked: list[Any] = []

    def exchange(*args: Any) -> Any:
        asked.append(args)
        return [still_held, 2]

    server: Any = SimpleNamespace(exchange=exchange)
    server.locate = lambda keys: server
    monkeypatch.setattr(replicas, "server_of", lambda client: server)
    lock = make()
    confirmed = replicas.confirm(lock.redis, lock.keys, b"T", 2, 1.5)
    assert confirmed == (bool(still_held), 2)
    mark = pack(Call(replicas.MARK, lock.keys, (b"T",)), known=False)
    assert asked == [(mark + pack_words(b"WAIT", b"2", b"1500"), 2, 2.5)]


@pytest.mark.parametrize("sent", [True, False])
def test_a_failed_acquisition_leaves_what_it_may_hold_to_the_keeper(
    jobs: list[Any], sent: bool
) -> None:
    error = redis.ConnectionError("broke")
    note_sent(error, sent)
    lock = make(error)
    with pytest.raises(redis.ConnectionError):
        lock.acquire()
    left = [type(job) for job in jobs if isinstance(job, (SentOnce, DeferredRelease))]
    assert left == ([SentOnce, DeferredRelease] if sent else [])
    jobs.clear()
    chosen = make(error)
    with pytest.raises(redis.ConnectionError):
        chosen.acquire(blocking=False, token="mine")
    assert [type(job) for job in jobs] == [DeferredRelease] * sent
    assert all(job._call.args[0] == b"mine" for job in jobs)


def test_an_interrupt_after_the_lock_was_noted_gives_it_back(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = make(FENCE)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lock, "_emit_acquired", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lock.acquire(blocking=False)
    assert lock.local.token is lock.local.hold is lock.local.renewal is None
    [renewal] = of_kind(jobs, Renewal)
    assert renewal.hold.released
    assert (renewal,) in jobs
    assert len(of_kind(jobs, DeferredRelease)) == 1


# -- release ---------------------------------------------------------------------------------------

NOT_HELD = [b"", b"", b"", b"", b""]


def test_a_release(
    heard: list[Any], jobs: list[Any], clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "django_redis_lock.lock")
    lock = held(1, min_hold=2.0)
    [renewal] = of_kind(jobs, Renewal)
    renewal._may_be_described = True
    clock.now = 1003.0
    lock.release()
    [call] = lock.calls
    assert call.script is RELEASE
    assert call.args[3] == 2000
    assert (renewal,) in jobs
    assert lock.local.token is lock.local.renewal is lock.local.entry is None
    assert lock.local.hold is not None
    assert lock.local.hold.released
    assert heard[-1][1:] == (3.0, FENCE)
    assert isinstance(heard[-1], events.Released)
    assert "Released report" in caplog.text
    [record] = of_kind(jobs, SentOnce)
    assert '"released"' in record._call.args[0]
    with pytest.raises(LockError, match="has not acquired it in this thread"):
        lock.release()


@pytest.mark.parametrize(
    ("answer", "again", "released"),
    [
        (Answer(1, False), False, True),
        (Answer(0, True), False, True),
        (Answer(0, False), False, False),
        (Answer(0, False), True, True),
    ],
)
def test_whether_a_release_counts(
    heard: list[Any], jobs: list[Any], answer: Answer, again: bool, released: bool
) -> None:
    lock = held(answer, NOT_HELD)
    [renewal] = of_kind(jobs, Renewal)
    renewal._may_be_described = True
    hold: Any = lock.local.hold
    if again:
        hold.end()  # A release before this one has failed.
    if released:
        lock.release()
        assert isinstance(heard[-1], events.Released)
        assert len(lock.calls) == 1
    else:
        with pytest.raises(LockNotOwnedError, match="no longer owned: Redis has lost its data"):
            lock.release()
        assert [call.script for call in lock.calls] == [RELEASE, RENEW]
        assert lock.calls[1].args[0] == lock.acquired_with[0].token
        assert isinstance(heard[-1], events.Lost)
        assert (heard[-1].held, heard[-1].fence) == (0.25, FENCE)
        [record] = of_kind(jobs, SentOnce)
        assert '"lost"' in record._call.args[0]
    assert lock.local.token is None


@pytest.mark.parametrize(("at", "reason"), [(1029.0, "deleted or rep"), (1030.0, "expired before")])
def test_why_a_release_came_too_late(clock: FakeClock, at: float, reason: str) -> None:
    lock = held(0, [b"", b"%d" % FENCE, b"", b"1", b""])
    clock.now = at
    with pytest.raises(LockNotOwnedError, match=reason):
        lock.release()


def test_why_is_not_asked_where_it_is_known(heard: list[Any], jobs: list[Any]) -> None:
    lock = held(0)
    [renewal] = of_kind(jobs, Renewal)
    renewal._may_be_described = True
    assert lock.local.hold is not None
    lock.local.hold.lose("it is known")
    before = len(heard)
    with pytest.raises(LockNotOwnedError, match="it is known"):
        lock.release()
    assert len(heard) == before  # Nor is it told twice, or recorded.
    assert not of_kind(jobs, SentOnce)


def test_without_an_answer_a_release_can_be_done_again(jobs: list[Any]) -> None:
    lock = held(AWAY, 1)
    token = lock.local.token
    with pytest.raises(redis.ConnectionError):
        lock.release()
    assert lock.local.token == token
    assert not of_kind(jobs, DeferredRelease)
    lock.release()
    assert lock.local.token is None


def test_an_interrupted_release_is_left_to_the_keeper(jobs: list[Any], heard: list[Any]) -> None:
    lock = held(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        lock.release()
    [release] = of_kind(jobs, DeferredRelease)
    assert release._call.script is RELEASE
    assert lock.local.token is lock.local.renewal is None
    assert isinstance(heard[-1], events.Released)
    count = len(jobs)
    lock._leave_to_keeper()  # There is nothing more to release.
    assert len(jobs) == count


def test_a_lock_that_nothing_releases_is_left_to_the_keeper(jobs: list[Any]) -> None:
    lock = held()
    [renewal] = of_kind(jobs, Renewal)
    lock._leave_to_keeper()
    assert lock.local.hold is not None
    assert lock.local.hold.released
    assert (renewal,) in jobs
    assert len(of_kind(jobs, DeferredRelease)) == 1
    inner = held(reentrant=True)
    inner._leave_to_keeper()
    assert inner.local.token is None
    assert len(of_kind(jobs, DeferredRelease)) == 2
    unsure = make(AWAY, id="theirs")
    unsure._leave_to_keeper()
    assert of_kind(jobs, DeferredRelease)[-1]._call.args[0] == b"theirs"


@pytest.mark.parametrize(
    ("error", "raises", "body_failed", "swallowed"),
    [
        (AWAY, True, False, False),
        (AWAY, True, True, True),
        (AWAY, False, False, False),
        (LockError("not owned", "report"), True, False, False),
        (LockError("not owned", "report"), False, False, True),
        (KeyboardInterrupt(), False, True, False),
    ],
)
def test_an_error_at_the_end_of_a_block(
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    raises: bool,
    body_failed: bool,
    swallowed: bool,
) -> None:
    lock = held(raise_on_release_error=raises)
    before = lock._state()
    assert lock._release_failed(before, error, body_failed) is swallowed
    assert lock.local.token is None
    assert bool(logged(caplog, "lock", "does not raise")) is swallowed
    lost = held(raise_on_release_error=raises)
    assert lost.local.hold is not None
    lost.local.hold.lose("it is gone")
    caplog.clear()
    assert lost._release_failed(lost._state(), error, body_failed) is swallowed
    assert not logged(caplog, "lock", "does not raise")  # The loss was logged.


def test_a_lock_without_redis_is_given_up_without_a_call(jobs: list[Any]) -> None:
    ends: list[int] = []
    lock = held()
    hold: Any = lock.local.hold
    hold.degraded, hold.on_end = "local", lambda: ends.append(1)
    assert lock.degraded == "local"
    assert lock.extend(5)
    assert lock.owned()
    lock.release()
    assert ends == [1]
    assert not lock.calls
    assert lock.degraded is lock.local.token is None
    assert not of_kind(jobs, DeferredRelease)


# -- extend ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replace", "answered_until"), [(False, 1030.0 + 5.0), (True, 1010.25 + 5.0)]
)
def test_an_extension_prolongs_the_hold(
    jobs: list[Any], clock: FakeClock, replace: bool, answered_until: float
) -> None:
    lock = held(Extended.DONE)
    [renewal] = of_kind(jobs, Renewal)
    hold: Any = lock.local.hold
    clock.now = 1010.25
    assert lock.extend(5, replace_ttl=replace)
    [call] = lock.calls
    assert call.script is EXTEND
    assert call.args[1:3] == (5000, "1" if replace else "0")
    assert len(call.args[4]) == (0 if replace else 16)
    assert hold.deadline == answered_until
    assert jobs[-1] == (renewal, 1010.25)


def test_a_lock_is_acquired_for_its_lifetime_again(clock: FakeClock) -> None:
    lock = held(Extended.DONE, timeout=3)
    clock.now = 1002.0
    assert lock.reacquire() is True
    assert lock.calls[0].args[1:3] == (3000, "1")
    assert lock.local.hold is not None
    assert lock.local.hold.deadline == 1005.0


def test_a_lock_that_another_thread_releases_just_after_was_extended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = held(thread_local=False)
    hold: Any = lock.local.hold

    def run(call: Any) -> Answer:
        hold.end()
        return Answer(Extended.DONE, False)

    monkeypatch.setattr(lock, "_run", run)
    assert lock.extend(5) is True


def test_one_after_the_deadline_begins_now(clock: FakeClock) -> None:
    lock = held(Extended.DONE, timeout=3)
    clock.now = 1010.0
    assert lock.extend(5)
    assert lock.local.hold is not None
    assert lock.local.hold.deadline == 1015.0


@pytest.mark.parametrize("replace", [True, False])
def test_an_extension_follows_the_confirmation_of_a_grant(replace: bool) -> None:
    lock = held(Extended.DONE)
    hold: Any = lock.local.hold
    asked: list[bool] = []
    hold.pending = Pending(asked.append)
    lock.extend(5, replace_ttl=replace)
    assert asked == [True]
    assert (hold.pending is None) is replace


@pytest.mark.parametrize("verb", ["extend", "reacquire"])
def test_an_extension_that_is_refused(clock: FakeClock, verb: str) -> None:
    def change(lock: Scripted) -> Any:
        return lock.extend(5) if verb == "extend" else lock.reacquire()

    deleted = [b"", b"%d" % FENCE, b"", b"1", b""]
    for at, reason in ((1010.0, "deleted or replaced"), (1030.0, "expired before")):
        clock.now = 1000.0
        lock = held(Extended.NOT_OWNED, deleted)
        clock.now = at
        with pytest.raises(LockNotOwnedError, match=f"Cannot {verb} .*: .*{reason}"):
            change(lock)
    with pytest.raises(LockError, match=f"Cannot {verb} a lock with no timeout"):
        change(held(Extended.NO_LIFETIME))
    with pytest.raises(LockError, match=f"Cannot {verb} a lock with no timeout"):
        change(held(timeout=None))
    with pytest.raises(LockError, match=f"Cannot {verb} a lock that's not owned"):
        change(make())


def test_a_token_from_elsewhere(clock: FakeClock) -> None:
    lock = make(Extended.DONE, 1, id="theirs", timeout=None)
    assert lock.extend(5)
    with pytest.raises(LockError, match="no timeout"):
        lock.reacquire()
    lock.release()
    extend, release = lock.calls
    assert extend.args[0] == release.args[0] == b"theirs"
    assert release.args[2:4] == (2000, 0)
    assert lock.local.token is None
    event = b'5000000 {"what": "reset", "id": "%b"}' % fingerprint(b"theirs").encode()
    reset = make(0, [event, b"", b"", b"", b""], id="theirs")
    with pytest.raises(LockNotOwnedError, match="released by force"):
        reset.release()
    shared = make(0, OSError(), id="theirs", thread_local=False)
    with pytest.raises(LockNotOwnedError, match="it expired, was released by force, or its key"):
        shared.release()


# -- what is known ---------------------------------------------------------------------------------


def test_whether_it_is_held(clock: FakeClock) -> None:
    with pytest.raises(LockError, match="has not been acquired"):
        make().ensure_held()
    lock = held()
    lock.ensure_held()
    assert lock.lost_reason == ""
    clock.now = 1030.0
    with pytest.raises(LockLost, match="its lifetime is over, and Redis confirmed no renewal"):
        lock.ensure_held()
    assert lock.lost
    assert "lost" in repr(lock)
    gone = held()
    assert gone.local.hold is not None
    gone.local.hold.lose("it is gone")
    with pytest.raises(LockLost, match="any more: it is gone; stop"):
        gone.ensure_held()
    released = held(1)
    released.release()
    with pytest.raises(LockLost, match="any more; stop"):
        released.ensure_held()
    assert not released.lost


def of_holder(token: bytes, pttl: int = 5000, place: int = 1) -> list[Any]:
    return [token, pttl, [], FENCE, place]


def test_who_holds_it(clock: FakeClock) -> None:
    lock = held()
    token = lock.acquired_with[0].token
    answers: list[tuple[Any, Any, Any]] = [
        (lock.locked, of_holder(b"x"), True),
        (lock.locked, None, False),
        (lock.owned, of_holder(token), True),
        (lock.owned, of_holder(b"x"), False),
        (lock.owned, None, False),
        (lock.ttl, of_holder(b"x", 2500), 2.5),
        (lock.ttl, of_holder(b"x", -1), math.inf),
        (lock.ttl, None, None),
        (lock.get_owner_id, of_holder(b"x\xff"), "x\ufffd"),
        (lock.get_owner_id, None, None),
        (lock.held, None, None),
        (lock.holder, None, None),
        (lock.holders, None, []),
    ]
    for method, reply, answer in answers:
        lock.outcomes.append(reply)
        assert method() == answer
    assert {call.script for call in lock.calls} == {HELD}
    clock.now = 1030.0
    lock.outcomes.append(of_holder(token))
    assert not lock.owned()  # By our own clock it is over.
    assert not make().owned()


@pytest.mark.parametrize(("taken", "locked"), [(2, False), (3, True)])
def test_with_a_limit_it_is_locked_if_all_places_are_taken(taken: int, locked: bool) -> None:
    lock = make(limit=3)
    places = [of_holder(b"%d" % place, 9000 - place, place) for place in range(1, taken + 1)]
    lock.outcomes += [places, places, places]
    assert lock.locked() is locked
    assert [holder.place for holder in lock.holders()] == [3, 2, 1][-taken:]
    first = lock.held()
    assert first is not None
    assert (first.place, first.limit) == (taken, 3)
    elsewhere = make(places, limit=2, id="2")
    assert elsewhere.owned()
    inside = make([2, FENCE, FENCE], of_holder(b"x"), limit=2)
    assert inside.acquire(blocking=False)
    assert not inside.owned()
    assert inside.calls[-1].keys == inside.keys.at_place(2)
    inside.outcomes.append(of_holder(b"text"))
    inside.local.token = "text"
    assert inside.owned()
    inside.outcomes.append(1)
    inside.release()
    assert inside.calls[-1].args[0] == b"text"


def test_with_a_fallback_who_holds_it_is_asked_in_either_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    either: Query[Any] = Query(None, lambda reply: [])
    fallback = SimpleNamespace(holders=lambda lock, in_redis: either, check_policy=str)
    lock, falling_back = make(), make(on_redis_down="run")
    monkeypatch.setattr(questions, "part", lambda name: fallback)
    assert questions.holders(falling_back) is either
    assert questions.holders(lock) is not either


def test_a_question_may_have_another_answer_after_an_error() -> None:
    query: Query[int] = Query(None, lambda reply: 1)
    assert query.then(lambda answer: answer + 1).parse(None) == 2
    with pytest.raises(redis.ConnectionError):
        query.after(AWAY)
    other = query.or_else(lambda error: 5)
    assert other.after(AWAY) == 5
    assert other.then(lambda answer: answer * 2).after(AWAY) == 10
    assert other.parse(None) == 1
    several = Query(None, lambda reply: 1, queries=[query])
    assert several.then(str).queries == several.or_else(lambda error: 2).queries == [query]


def test_who_is_in_the_way_of_a_block() -> None:
    lock = make(REFUSED, of_holder(b"x", 2500), blocking=False)
    with pytest.raises(LockError, match="report") as refused, lock:
        pass
    assert refused.value.holder is not None
    away = make(REFUSED, AWAY, blocking=False)
    with pytest.raises(LockError) as unknown, away:
        pass
    assert unknown.value.holder is None


def test_the_heartbeat_of_a_silent_holder_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    known = SimpleNamespace(heartbeat_call=seen.append, with_heartbeat=lambda owner, reply: owner)
    monkeypatch.setattr(questions, "records", known)
    info = HolderInfo(of_holder(b"x"))
    query = questions.heartbeat(info)
    assert query.call is None
    assert query.parse(None) == info.in_the_way
    assert seen == [info.in_the_way]
    assert questions.heartbeat(None).parse(None) is None


def test_each_holder_is_reset() -> None:
    lock = make(of_holder(b"x"), 1, None)
    assert lock.reset()
    assert not lock.reset()
    assert len(lock.calls) == 3


# -- deadlocks -------------------------------------------------------------------------------------


def test_who_waits_for_itself_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    first = held(timeout=30)
    warnings = 0
    for options, warns in (
        ({}, 1),
        ({"thread_local": False}, 0),
        ({"limit": 2}, 0),
        ({"blocking": False}, 0),
    ):
        limit = options.get("limit", 1)
        refused: Any = REFUSED if limit == 1 else [0, 20_000, FENCE]
        other = make(refused, None, blocking_timeout=1, **options)
        assert not other.acquire()
        warnings += warns
        assert len(logged(caplog, "lock", "held by the same thread")) == warnings
    first.outcomes.append(1)
    first.release()
    make(REFUSED, None, blocking_timeout=1).acquire()
    assert len(logged(caplog, "lock", "held by the same thread")) == warnings


def test_a_wait_that_stops_a_loop_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        make(REFUSED, None, blocking_timeout=1).acquire()

    asyncio.run(main())
    assert logged(caplog, "lock", "stops this event loop")


@pytest.mark.parametrize(
    ("options", "refuses"),
    [
        ({"timeout": None}, True),
        ({"renew": True}, True),
        ({}, False),
        ({"timeout": None, "thread_local": False}, False),
        ({"timeout": None, "blocking_timeout": 1}, False),
    ],
)
def test_a_wait_for_itself_without_an_end_is_refused(
    options: dict[str, Any], refuses: bool
) -> None:
    lock = held(**options)
    lock.outcomes += [REFUSED, None]
    if refuses:
        with pytest.raises(LockError, match="would wait for itself forever"):
            lock.acquire()
    else:
        lock.acquire()
    assert lock.acquire(blocking=False) is False if refuses else True


# -- blocks ----------------------------------------------------------------------------------------


def test_one_goes_in_again_without_a_call(jobs: list[Any]) -> None:
    lock = held(1, reentrant=True)
    [renewal] = of_kind(jobs, Renewal)
    assert lock.local.entry is not None
    with lock:
        assert lock.local.entry.depth == 2
        assert renewal.kept_by is not None
        assert renewal.kept_by.__callback__ is None  # The block around this one is left later.
    assert not lock.calls
    lock.release()
    assert [call.script for call in lock.calls] == [RELEASE]
    lock.outcomes += [FENCE, 1]
    with lock:
        renewal = of_kind(jobs, Renewal)[-1]
        assert renewal.kept_by is not None
        assert renewal.kept_by.__callback__ is not None
        assert lock.acquire() is True
        lock.release()
    assert len(lock.calls) == 2
    refused = make(REFUSED, reentrant=True)
    assert refused.acquire(blocking=False) is False
    plain = held()
    assert refused.local.entry is plain.local.entry is None


def test_inside_a_lost_lock_each_release_says_so() -> None:
    lock = held(reentrant=True)
    assert lock.acquire()
    assert lock.local.entry is not None
    lock.local.entry.hold.lose("it is gone")
    with pytest.raises(LockNotOwnedError, match=r"Cannot release .*: it is gone"):
        lock.release()
    assert lock.local.entry.depth == 1
    assert not lock.calls


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def released_by_keeper(jobs: list[Any]) -> list[Any]:
    return [job._call.args[0] for job in of_kind(jobs, DeferredRelease)]


@pytest.mark.parametrize("where", ["_entered", "_state"])
def test_an_interrupt_at_the_edge_of_a_block_leaves_the_lock_to_the_keeper(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    lock = make(FENCE)

    def block() -> None:
        with monkeypatch.context() as patch:
            if where == "_entered":
                patch.setattr(lock, where, interrupt)
            with lock:
                patch.setattr(lock, where, interrupt)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert released_by_keeper(jobs) == [lock.acquired_with[0].token]
    assert lock.local.token is None
    assert not lock.calls


def test_a_block_that_is_not_entered_leaves_what_was_held_before(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = held(AWAY)
    with pytest.raises(redis.ConnectionError), lock:
        pass
    assert lock.local.hold is not None
    assert lock.local.hold.is_valid
    shared, others = make(thread_local=False), held()
    assert others.local.hold is not None
    others.local.hold._thread_id = -1

    def acquire() -> None:
        shared.local = others.local  # Another thread has it, just before the interrupt.
        raise KeyboardInterrupt

    monkeypatch.setattr(shared, "acquire", acquire)
    with pytest.raises(KeyboardInterrupt), shared:
        pass
    assert others.local.token is not None
    assert not [job for job in released_by_keeper(jobs) if job == others.local.token]


@pytest.mark.parametrize(
    ("outcome", "body_fails", "raises"),
    [(0, False, True), (0, True, False), (AWAY, False, True), (AWAY, True, False)],
)
def test_a_release_that_fails_hides_no_error_of_the_block(
    outcome: Any, body_fails: bool, raises: bool
) -> None:
    lock = make(FENCE, outcome, NOT_HELD)

    def block() -> None:
        with lock:
            if body_fails:
                raise ZeroDivisionError

    with pytest.raises(redis.RedisError if raises else ZeroDivisionError):
        block()
    assert lock.local.token is None


def inside(lock: Scripted) -> tuple[Scripted, Any]:
    """Another object by which the caller has gone in again, and the entry of both."""
    other = make(reentrant=True)
    assert other.acquire()
    return other, lock.local.entry


def test_an_interrupt_undoes_what_acquire_has_done(jobs: list[Any]) -> None:
    """At each line at which one may come."""
    plain = held()
    plain._undo(plain._state())  # It waited for itself.
    assert plain.local.hold is not None
    assert plain.local.hold.is_valid
    lock = held(reentrant=True)
    lock._undo(lock._state())  # It has not gone in.
    other, entry = inside(lock)
    other._undo(other._state())
    assert entry.depth == 2
    before = other._state()
    assert other.acquire()
    other._undo(before)
    assert (entry.depth, other.local.token) == (2, lock.local.token)
    other.release()
    before = other._state()
    other.local.entry = entry
    other._undo(before)
    assert other.local.entry is None
    assert (entry.depth, entry.hold.is_valid) == (1, True)


@pytest.mark.parametrize("noted", ["hold", "hold and renewal"])
@pytest.mark.parametrize("held_before", [True, False])
def test_an_interrupt_restores_what_was_noted_before(
    jobs: list[Any], noted: str, held_before: bool
) -> None:
    lock = held() if held_before else make()
    before, new = lock._state(), held()
    kept = of_kind(jobs, Renewal)[:held_before]
    lock.local.hold = new.local.hold
    if "renewal" in noted:
        lock.local.renewal = new.local.renewal
    lock._undo(before)
    assert lock._state() == before
    assert new.local.hold is not None
    assert new.local.hold.released
    [renewal] = [job for job in of_kind(jobs, Renewal) if job not in kept]
    assert ((renewal,) in jobs) is ("renewal" in noted)
    assert not any((job,) in jobs for job in kept)


def test_an_interrupt_leaves_the_lock_of_another_thread() -> None:
    lock = make(thread_local=False)
    before, other = lock._state(), held()
    lock.local.hold = hold = other.local.hold
    assert hold is not None
    hold._thread_id = -1
    for ended in (False, True):
        hold.ended = ended
        lock._undo(before)
        assert lock.local.hold is hold


def test_an_interrupted_release_is_completed_once(jobs: list[Any]) -> None:
    lock = held(reentrant=True)
    other, entry = inside(lock)
    before = other._state()
    other._leave_to_keeper(before)  # It came before anything was done,
    assert (entry.depth, other.local.token, other.local.entry) == (1, None, None)
    other._leave_to_keeper(before)  # and after all was.
    assert entry.depth == 1
    assert other.acquire()
    before = other._state()
    entry._times.pop(other.local)
    other._leave_to_keeper(before)  # In between.
    assert (other.local.token, other.local.entry) == (None, None)
    assert other.acquire()
    assert other.acquire()
    before = other._state()
    assert entry.leave(other.local)
    other._leave_to_keeper(before)
    assert (entry.depth, entry.times(other.local)) == (2, 1)
    assert not of_kind(jobs, DeferredRelease)
    before = lock._state()
    lock.local.hold = held().local.hold
    lock._leave_to_keeper(before)
    assert not of_kind(jobs, DeferredRelease)


@pytest.mark.parametrize("wanted", [(), (signal.SIGTERM, signal.SIGUSR1)])
def test_signals_unwind_a_block(wanted: tuple[signal.Signals, ...]) -> None:
    numbers = wanted or (signal.SIGTERM,)
    before = [signal.getsignal(number) for number in numbers]
    for number in numbers:
        with pytest.raises(SystemExit) as ended, unwinding(*wanted):
            signal.getsignal(number)(number, None)
        assert ended.value.code == 128 + number
        assert [signal.getsignal(number) for number in numbers] == before


# -- options ---------------------------------------------------------------------------------------


def test_what_one_call_asks_for(clock: FakeClock) -> None:
    lock = make(sleep=0.5, blocking_timeout=7, grant_timeout=3, replicas=1, limit=2)
    request, wait = lock._request(None, None, None, None)
    assert (wait, request.deadline, request.sleep, request.grant_timeout) == (7, 1007.0, 0.5, 3)
    assert (request.replicas, request.limit, request.attempt) == (1, 2, b"")
    assert request.may_hold == [(request.token, b"", 1)]
    assert request.waiter
    request, wait = lock._request(0.0, False, 9, "mine")
    assert (wait, request.deadline, request.sleep, request.waiter) == (0.0, None, 0.0, b"")
    assert request.token == b"mine"
    assert len(request.attempt) == 16
    assert request.may_hold == [(b"mine", request.attempt, 1)]
    for blocking_timeout, deadline in ((9, 1009.0), (0, None)):
        request, wait = lock._request(None, True, blocking_timeout, None)
        assert (wait, request.deadline) == (blocking_timeout, deadline)
    never = make(blocking=False)
    assert never._request(None, None, None, None)[1] == 0.0
    assert never._request(None, True, None, None)[1] is None
    with pytest.raises(ValueError, match="token must be left out"):
        make(reentrant=True)._request(None, None, None, "mine")


def test_what_a_hold_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_lost() -> None:
        """It is called."""

    for options, renews_for in (
        ({}, -math.inf),
        ({"renew": True}, math.inf),
        ({"renew": True, "max_hold": 60}, 60),
    ):
        hold = make(on_lost=on_lost, label="nightly", **options)._new_hold()
        assert hold._renews_for == renews_for
        assert hold.label == "nightly"
        assert hold.subject is not None
        assert callable(hold.on_lost)
    monkeypatch.setattr(events, "listeners", [])
    assert make()._new_hold().on_lost is make()._new_hold().subject is None
    assert make()._new_hold()._warns_after == 24.0
    assert make(warn_after=3)._new_hold()._warns_after == 3
    assert make(renew=True, max_hold=100)._new_hold()._warns_after == 80.0


def test_no_process_waits_for_what_on_lost_does() -> None:
    start: Any = in_a_thread(print, b"report")
    assert start.__self__.daemon


def test_a_place_above_the_limit_is_not_passed_on() -> None:
    for place, limit in ((2, 2), (3, 0)):
        lock = make([0, 20_000, FENCE], waited(place=place), limit=2)
        assert lock.acquire()
        hold = lock.local.hold
        assert hold is not None
        assert (hold.limit, hold.keys.place, lock.place) == (limit, place, place)


def test_what_is_refused_when_it_is_made() -> None:
    for misspelt, meant in (("timeuot", "timeout"), ("local_foldr", "local_folder")):
        with pytest.raises(TypeError, match=f"{misspelt}'; write {meant}="):
            make(**{misspelt: None})
    with pytest.raises(ValueError, match="on_redis_down"):
        make(on_redis_down="wait")
    assert make(on_redis_down="raise").on_redis_down == make().on_redis_down == "raise"
    with pytest.raises(ValueError, match="reentrant and id exclude each other"):
        make(reentrant=True, id="x")
    with pytest.raises(TypeError, match="cancel_on_lost must be False"):
        make(cancel_on_lost=True)

    async def on_lost() -> None:
        """It is a coroutine function."""

    with pytest.raises(TypeError, match="must be a plain function"):
        make(on_lost=on_lost)
    assert AsyncLock(redis.asyncio.Redis(), "report", 30, on_lost=on_lost).on_lost is on_lost
    lock, other = make(), make()
    assert lock.local is not other.local
    lock._take_over(other)
    assert lock.local is other.local


@pytest.mark.parametrize("thread_local", [True, False])
def test_each_thread_may_release_a_token_from_elsewhere(thread_local: bool) -> None:
    lock, plain = make(id="theirs", thread_local=thread_local), held(thread_local=thread_local)
    known: list[Any] = []
    thread = threading.Thread(target=lambda: known.extend((lock.local.token, plain.local.token)))
    thread.start()
    thread.join()
    assert known == [b"theirs", None if thread_local else plain.local.token]
    assert lock.local.token == b"theirs"


def test_a_fork_of_the_holder_may_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = held()
    assert lock.local.hold is not None
    lock.local.hold.process = None
    for call in (lock.release, lambda: lock.extend(5)):
        with pytest.raises(LockNotOwnedError, match="a parent process's lock"):
            call()
    lock._leave_to_keeper()
    lock.__exit__(None, None, None)
    lock.local.hold.degraded = "local"
    with pytest.raises(LockNotOwnedError, match="a parent process's lock"):
        lock.extend(5)
    assert not lock.calls
    assert lock.local.token is not None
