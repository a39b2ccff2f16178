"""The steps of a wait, one after the other: what is sent, for how long it is waited, and what is
given back. The queue does as it is told, and time is faked."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError, NoScriptError

from django_redis_lock.clock import time
from django_redis_lock.keeper import DeferredRelease, Keeper, SentOnce
from django_redis_lock.locking.waiting import queue as queue_module
from django_redis_lock.locking.waiting import queues
from django_redis_lock.locking.waiting import threads as threads_module
from django_redis_lock.locking.waiting.queue import QueueWatch, WaitQueue, join, unregister
from django_redis_lock.locking.waiting.steps import MayNotBlock, Waiter
from django_redis_lock.locking.waiting.threads import (
    AbandonedPop,
    PendingReply,
    ThreadQueue,
    ThreadWaiter,
    ThreadWakeEvent,
)
from django_redis_lock.protocol.acquisition import (
    LAST_TRY_SECONDS,
    WATCH_INTERVAL_SECONDS,
    AcquireRequest,
    Clock,
    Refused,
    Vanished,
)
from django_redis_lock.protocol.holder_scripts import CLOCK
from django_redis_lock.protocol.keys import lock_keys
from django_redis_lock.protocol.script import Call
from django_redis_lock.steps import drive
from django_redis_lock.transport import may_have_run, pack, pack_words
from django_redis_lock.transport.server import Server
from tests.support.clock import FakeClock

KEYS = lock_keys(b"report")
CALL = Call(CLOCK, (), ())
AWAY = redis.ConnectionError("away")
SERVER_US = 1_800_000_000_000_000
TAKEN = SERVER_US + 5
REFUSED = Refused(20_000, SERVER_US, 1000.0)
REFUSED_REPLY = b"20000 %d" % SERVER_US


@pytest.fixture(autouse=True)
def clock() -> Iterator[FakeClock]:
    class Moving(FakeClock):
        def sleep(self, seconds: float) -> None:
            self.now += seconds

    before, fake = time.clock, Moving()
    time.use(fake)
    FakeQueue.shared = Nowhere()
    yield fake
    time.use(before)
    queues.clear()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the keeper is given to do; an attempt to take something from it is one in a tuple."""
    added: list[Any] = []
    monkeypatch.setattr(Keeper, "add", lambda keeper, job: added.append(job))
    monkeypatch.setattr(Keeper, "discard", lambda keeper, job: added.append((job,)))
    monkeypatch.setattr(Keeper, "hurry", lambda keeper: added.append("hurry"))
    return added


class Nowhere(Server):
    def __init__(self) -> None:
        """It has no address."""
        self.told: list[Any] = []
        self.seen: Any = self
        self.known_scripts = set()

    def seen_at(self, keys: Any) -> Any:
        return self.seen

    def on_error(self, error: BaseException) -> None:
        self.told.append(error)

    def answered(self) -> None:
        self.told.append("answered")

    def checkin(self, connection: Any, unread: Any = None, since: float = 0.0) -> None:
        self.told.append(("checkin", connection, unread))


def request(**options: Any) -> AcquireRequest:
    of_it = {"token": b"mine", "attempt": b"", "lifetime": 30.0, "grant_timeout": 2.0}
    return AcquireRequest(KEYS, may_hold=[], **of_it | options)


class FakeQueue(WaitQueue):
    """Its pops end, and bring what a test has put into ``replies``; ``...``: it does not end."""

    #: Another one in each test.
    shared: Server

    def __init__(self, wanted: AcquireRequest, *replies: Any, loop: Any = None) -> None:
        super().__init__(self.shared, wanted, loop)
        self.replies = list(replies)
        self.done: list[Any] = []
        self.known_while_it_lasts: list[Any] = []
        self.answer: Any = 1100.0
        self.may_not_block = False

    def end(self) -> None:
        self.done.append("end")

    def wake(self) -> None:
        self.done.append("wake")

    def connect(self, client: Any) -> None:
        self.done.append("connect")
        if self.may_not_block:
            raise MayNotBlock

    def begin_pop(self, command: bytes) -> None:
        self.done.append(command)

    def pop_ended(self, seconds: float) -> bool:
        self.done.append(seconds)
        self.known_while_it_lasts += [getattr(waiter, "_reply", None) for waiter in self.waiters]
        if self.replies[0] is ...:
            time.sleep(seconds)
            del self.replies[0]
            return False
        return True

    def reply(self) -> Any:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def send_take_grant(self, call: Call, until: float) -> Any:
        self.done.append(("extend", until))
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(confirmed=lambda: self.answer)

    def disconnect(self) -> None:
        self.done.append("disconnect")

    def steps(self) -> list[Any]:
        """What has been done since the last time."""
        done, self.done = self.done, []
        return done


class Turn:
    """It comes at once or never."""

    has_come = False

    def set(self) -> None:
        self.has_come = True

    def wait(self, seconds: float) -> bool:
        time.sleep(0 if self.has_come else seconds)
        return self.has_come


class Scripted(Waiter):
    """Its calls return what a test has put into ``outcomes``."""

    def __init__(self, wanted: AcquireRequest, queue: FakeQueue, *outcomes: Any) -> None:
        client: Any = None
        super().__init__(client, wanted, queue)
        self.outcomes = list(outcomes)
        self.calls: list[Any] = []
        self.slept: list[float] = []

    def _run(self, call: Call, patience: float | None) -> Any:
        self.calls.append((call, patience))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        time.sleep(seconds)

    def _new_turn(self) -> Any:
        return Turn()


def waiter_of(
    wanted: AcquireRequest, *replies: Any, outcomes: Any = (), registered: bool = True
) -> tuple[Scripted, FakeQueue]:
    queue = FakeQueue(wanted, *replies)
    queue.registered = registered
    queue.clock = Clock(SERVER_US, 1000.0)
    waiter = Scripted(wanted, queue, *outcomes)
    client: Any = None
    join(waiter, queue, waiter._new_turn)
    assert client is None
    return waiter, queue


def grant(age: float = 0.1, place: bytes = b"") -> tuple[bytes, bytes]:
    return KEYS.grants, b"T:%d" % (SERVER_US - age * 1e6) + place


LEFT: Any = (b"{report}:wake:x", b"leave")
POP = pack_words(b"BLPOP", KEYS.grants, request().wake, b"0")


# -- the beginning ---------------------------------------------------------------------------------


def test_the_first_of_a_queue_waits_in_redis(jobs: list[Any]) -> None:
    queue = FakeQueue(request(), grant())
    first = Scripted(request(), queue)
    acquired = drive(first._wait(REFUSED))
    assert acquired is not None
    assert acquired.token == b"T"
    assert queue.registered
    assert queue.steps() == ["connect", POP, 3600.0, ("extend", 1030.0)]
    assert [type(job) for job in jobs] == [QueueWatch]
    queue.leave(first)
    assert queue.steps() == ["end"]


def test_the_next_waits_for_its_turn_until_its_deadline(jobs: list[Any]) -> None:
    first, queue = waiter_of(request())
    other = FakeQueue(request())
    second = Scripted(request(deadline=1000.0), other)
    assert drive(second._wait(REFUSED)) is None
    assert second.queue is queue
    assert not other.registered
    queue.leave(second)
    assert queue.steps() == []
    queue.leave(first)
    assert queue.steps() == ["end"]


def test_a_turn_that_has_come_is_taken(jobs: list[Any]) -> None:
    first, queue = waiter_of(request(), registered=True)
    second = Scripted(request(deadline=1010.0), FakeQueue(request()), TAKEN)
    steps = second._wait(None)
    assert next(steps) is False  # It has waited until its deadline, in memory.
    queue.leave(first)
    queue.registered = False
    assert queue.is_led_by(second)
    assert not queue.is_led_by(first)
    turn: Any = second.turn
    assert turn.wait(0)


def test_a_turn_without_a_deadline_is_waited_for_again(jobs: list[Any]) -> None:
    waiter_of(request())
    second = Scripted(request(), FakeQueue(request()), TAKEN)
    second.queue.registered = False
    steps = second._wait(None)
    assert next(steps) is False
    assert steps.send(False) is False
    second.queue.registered = False
    assert steps.send(True) == TAKEN


def test_the_queue_is_registered_if_the_lock_is_taken(jobs: list[Any], clock: FakeClock) -> None:
    waiter, queue = waiter_of(
        request(deadline=1010.0), grant(), outcomes=[REFUSED_REPLY], registered=False
    )
    assert drive(waiter._wait_through_outages()) is not None
    [(call, patience)] = waiter.calls
    assert queue.id in call.args
    assert patience == pytest.approx(10.1)
    assert queue.registered


def test_a_queue_is_unregistered_if_the_call_that_registers_it_is_not_answered(
    jobs: list[Any],
) -> None:
    waiter, queue = waiter_of(request(), outcomes=[redis.ResponseError("lost")], registered=False)
    assert not queue._may_be_registered
    with pytest.raises(redis.ResponseError):
        drive(waiter._wait_through_outages())
    queue.leave(waiter)
    assert [type(job) for job in jobs] == [SentOnce]


def test_a_round_trip_is_left_for_the_last_try(jobs: list[Any], clock: FakeClock) -> None:
    wanted = request(deadline=1001.0)
    waiter, queue = waiter_of(wanted, grant(), outcomes=[REFUSED_REPLY], registered=False)
    run = waiter._run

    def slow(call: Call, patience: float | None) -> Any:
        clock.now += 0.004
        return run(call, patience)

    waiter._run = slow
    assert drive(waiter._wait_through_outages()) is not None
    assert queue.steps()[2] == pytest.approx(0.996 - 0.004)


def test_what_is_free_is_taken(jobs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    note = SimpleNamespace(note_vanished=lambda *args: noted.append(args))
    monkeypatch.setattr(queue_module, "records", note)
    vanished = [1, [b"id", b"a"]]
    waiter, queue = waiter_of(request(), outcomes=[[1, TAKEN, TAKEN, vanished]], registered=False)
    acquired = drive(waiter._wait_through_outages())
    assert acquired is not None
    assert (acquired.fence, acquired.contended) == (TAKEN, True)
    assert [args[2] for args in noted] == [Vanished(*vanished)]
    assert not queue.steps()


# -- outages ---------------------------------------------------------------------------------------


def test_a_server_that_is_away_is_tried_after_longer_and_longer_pauses(
    jobs: list[Any], clock: FakeClock
) -> None:
    waiter, queue = waiter_of(request(), outcomes=[*[AWAY] * 7, TAKEN], registered=False)
    assert drive(waiter._wait_through_outages()) is not None
    assert waiter.slept == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert queue.steps() == ["disconnect"] * 7
    server: Any = queue.server
    assert server.told == [AWAY] * 7


def test_after_an_answer_the_pauses_begin_with_the_shortest(jobs: list[Any]) -> None:
    waiter, _queue = waiter_of(
        request(),
        *(AWAY, AWAY),
        outcomes=[AWAY, AWAY, REFUSED_REPLY, AWAY, REFUSED_REPLY, TAKEN],
        registered=False,
    )
    assert drive(waiter._wait_through_outages()) is not None
    assert waiter.slept == [0.05, 0.1, 0.05, 0.1, 0.05]


@pytest.mark.parametrize(("patience", "tries"), [(0.0, 1), (0.1, 3), (0.2, 4)])
def test_a_waiter_with_a_fallback_does_not_wait_for_long(
    jobs: list[Any], patience: float, tries: int
) -> None:
    wanted = request(outage_patience=patience)
    waiter, _queue = waiter_of(wanted, outcomes=[AWAY] * 9, registered=False)
    with pytest.raises(redis.ConnectionError):
        drive(waiter._wait_through_outages())
    assert len(waiter.calls) == tries


def test_at_the_deadline_there_is_one_more_try(jobs: list[Any]) -> None:
    waiter, _ = waiter_of(request(deadline=1000.12), AWAY, outcomes=[AWAY] * 9)
    with pytest.raises(redis.ConnectionError):
        drive(waiter._wait_through_outages())
    assert waiter.slept == [0.05, pytest.approx(0.07)]
    waiter, _queue = waiter_of(request(deadline=1000.0), AWAY, outcomes=[TAKEN])
    assert drive(waiter._wait_through_outages()) is not None


@pytest.mark.parametrize("first_sent", [True, False])
def test_the_error_says_whether_anything_may_have_run(jobs: list[Any], first_sent: bool) -> None:
    first, second = redis.ConnectionError("one"), redis.ResponseError("WRONGTYPE")
    first.__dict__["sent_to_redis"] = first_sent
    second.__dict__["sent_to_redis"] = False
    waiter, queue = waiter_of(request(), outcomes=[first, second], registered=False)
    with pytest.raises(redis.ResponseError) as raised:
        drive(waiter._wait_through_outages())
    assert may_have_run(raised.value) is first_sent
    assert queue.steps() == ["disconnect"]  # The second is no outage.


# -- in Redis --------------------------------------------------------------------------------------


def test_a_pop_that_was_ended_is_followed_by_another(jobs: list[Any]) -> None:
    waiter, queue = waiter_of(request(), None, grant())
    assert drive(waiter._wait_in_redis()) is not None
    assert queue.steps() == ["connect", POP, 3600.0, POP, 3600.0, ("extend", 1030.0)]
    assert queue.known_while_it_lasts == [...] * 2
    assert not waiter.calls


def test_a_pop_without_a_deadline_is_waited_for_again(jobs: list[Any]) -> None:
    waiter, queue = waiter_of(request(), ..., grant())
    assert drive(waiter._wait_in_redis()) is not None
    assert queue.steps()[:4] == ["connect", POP, 3600.0, 3600.0]


def test_a_grant_that_was_over_is_followed_by_a_question(jobs: list[Any]) -> None:
    waiter, queue = waiter_of(request(), grant(60), outcomes=[TAKEN])
    queue.answer = -math.inf
    acquired = drive(waiter._wait_in_redis())
    assert acquired is not None
    assert acquired.fence == TAKEN
    assert len(waiter.calls) == 1


@pytest.mark.parametrize("why", ["no right", "no socket"])
def test_who_may_not_block_polls(jobs: list[Any], why: str) -> None:
    wanted = request(deadline=1000.35, sleep=0.1)
    waiter, queue = waiter_of(wanted, NoPermissionError("NOPERM"), outcomes=[REFUSED_REPLY] * 4)
    queue.may_not_block = why == "no socket"
    assert drive(waiter._wait_through_outages()) is None
    assert waiter.slept == [pytest.approx(each) for each in (0.1, 0.1, 0.1, 0.05)]
    assert queue.steps()[-1] == "disconnect"


def test_a_poll_ends_with_the_lock(jobs: list[Any]) -> None:
    waiter, _ = waiter_of(request(sleep=0.0), outcomes=[REFUSED_REPLY, TAKEN])
    assert drive(waiter._poll()) is not None
    assert waiter.slept == [0.001, 0.001]


@pytest.mark.parametrize("outcome", [AWAY, None])
def test_a_grant_whose_extension_failed_is_given_back(jobs: list[Any], outcome: Any) -> None:
    wanted = request(limit=1, attempt=b"chosen")
    wanted.may_hold.append((b"mine", b"chosen", 1))
    waiter, queue = waiter_of(wanted, grant(60, b"/2"))
    queue.answer = outcome
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        drive(waiter._take_grant())
    assert wanted.may_hold == [(b"mine", b"chosen", 1)]  # Elsewhere, it may have the lock.
    releases = [job._call for job in jobs if isinstance(job, DeferredRelease)]
    assert [call.args[0] for call in releases] == [b"T", b"mine"]
    assert all(call.keys == KEYS.at_place(2) for call in releases)


@pytest.mark.parametrize(
    ("attempt", "place", "limit", "held"),
    [
        (b"", b"", 1, [(b"T", b"", 1)]),
        (b"chosen", b"", 1, [(b"T", b"", 1)]),
        (b"chosen", b"/2", 2, [(b"T", b"", 2)]),
        (b"chosen", b"/3", 2, [(b"T", b"", 3), (b"mine", b"chosen", 3)]),
        (b"", b"/3", 2, [(b"T", b"", 3)]),
    ],
)
def test_what_a_grant_may_have_given_is_noted(
    jobs: list[Any], attempt: bytes, place: bytes, limit: int, held: list[Any]
) -> None:
    wanted = request(attempt=attempt, limit=limit)
    waiter, _ = waiter_of(wanted, grant(0.1, place))
    acquired = drive(waiter._take_grant())
    assert acquired is not None
    assert acquired.token == (b"mine" if attempt else b"T")
    assert wanted.may_hold == held
    assert waiter._reply == grant(0.1, place)


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "popped", "fence", "given_back"),
    [
        (REFUSED_REPLY, LEFT, None, []),
        (REFUSED_REPLY, grant(), SERVER_US - 100_000, []),
        (TAKEN, LEFT, TAKEN, []),
        (TAKEN, grant(), TAKEN, [b"T"]),
        (TAKEN, ..., TAKEN, []),
        (REFUSED_REPLY, ..., None, []),
    ],
)
def test_the_last_try(
    jobs: list[Any], reply: Any, popped: Any, fence: int | None, given_back: list[bytes]
) -> None:
    wanted = request(deadline=1001.0)
    waiter, queue = waiter_of(wanted, ..., ..., popped, outcomes=[reply])
    acquired = drive(waiter._wait_in_redis())
    assert (None if acquired is None else acquired.fence) == fence
    [(leave, patience)] = waiter.calls
    assert patience == LAST_TRY_SECONDS
    assert (leave.args[0], leave.args[3]) == (b"mine", queue.id)
    assert [j._call.args[0] for j in jobs if isinstance(j, DeferredRelease)] == given_back
    steps = queue.steps()
    assert steps[:5] == ["connect", POP, 1.0, 0.0, LAST_TRY_SECONDS]
    assert ("disconnect" in steps) is (popped is ...)


def test_a_last_try_that_is_not_answered_may_still_be_carried_out(jobs: list[Any]) -> None:
    wanted = request(deadline=1000.0)
    wanted.may_hold[:] = [(wanted.token, wanted.attempt, 1)]
    waiter, queue = waiter_of(wanted, ..., outcomes=[redis.TimeoutError("late")])
    assert drive(waiter._last_try()) is None
    assert not wanted.may_hold  # It is the keeper's.
    assert [type(job) for job in jobs] == [DeferredRelease]
    assert queue._may_be_registered
    assert queue.steps() == ["disconnect"]
    queue.leave(waiter)
    assert [type(job) for job in jobs] == [DeferredRelease, SentOnce]


# -- the queue -------------------------------------------------------------------------------------


def test_the_keeper_looks_again_when_the_holders_lifetime_is_over(clock: FakeClock) -> None:
    queue = FakeQueue(request())
    reading = Clock(SERVER_US, 1000.0)
    for pttl, due in ((500, 1000.5), (0, 1000.0), (-1, 1002.0), (60_000, 1002.0)):
        assert queue.next_look(pttl, reading) == due
    assert queue.clock is reading


def test_a_queue_has_one_watch(jobs: list[Any], clock: FakeClock) -> None:
    queue = FakeQueue(request())
    queue.note_refused(REFUSED)
    clock.now += 1
    queue.note_refused(REFUSED._replace(pttl=500))
    assert jobs[0] is jobs[1]
    assert jobs[0].due == 1001.5
    assert queue._may_be_registered
    queue.dissolve()
    assert jobs[2] == (jobs[0],)
    assert isinstance(jobs[3], SentOnce)
    queue.dissolve()
    assert len([job for job in jobs if isinstance(job, SentOnce)]) == 1


def test_a_queue_is_closed_by_the_last_that_leaves(jobs: list[Any]) -> None:
    one, queue = waiter_of(request())
    two = Scripted(request(), FakeQueue(request()))
    join(two, FakeQueue(request()), two._new_turn)
    assert two.queue is queue
    assert queue.id_to_unregister() == b""
    assert not queue.closed
    queue.leave(two)
    queue._may_be_registered = True
    assert queue.id_to_unregister() == queue.id
    assert queue.closed
    assert queue.id_to_unregister() == b""
    queue.leave(one)
    assert not jobs  # What was sent has unregistered it.
    late, other = waiter_of(request())
    assert late.queue is other


def test_the_id_of_a_request_is_unregistered_unless_a_queue_goes_on_with_it(
    jobs: list[Any],
) -> None:
    _waiter, queue = waiter_of(request(waiter=b"first"))
    assert (queue.id, queue._may_be_registered) == (b"first", True)
    second = request(waiter=b"second")
    joining = Scripted(second, FakeQueue(second))
    join(joining, joining.queue, joining._new_turn)
    [sent] = jobs
    assert b"second" in sent._call.args
    server: Any = queue.server
    unregister(server, request(waiter=b"first"))
    assert len(jobs) == 1
    bare = Scripted(request(), FakeQueue(request()))
    assert not bare.queue._may_be_registered
    join(bare, bare.queue, bare._new_turn)
    assert len(jobs) == 1


def test_a_queue_has_moved_if_another_server_has_its_lock_now() -> None:
    queue = FakeQueue(request())
    server: Any = queue.server
    assert not queue.has_moved()
    queue.node = server
    assert not queue.has_moved()
    server.seen = None
    assert queue.has_moved()


def test_each_reply_is_a_sign_of_life(clock: FakeClock) -> None:
    queue = FakeQueue(request())
    node: Any = Nowhere()
    queue.received(request(), None)
    queue.node = node
    queue.received(request(), None)
    assert queue.server.told == node.told == ["answered"]


@pytest.mark.parametrize(
    ("age", "grant_timeout", "replicas", "until"),
    [
        (0.1, 2.0, 0, 1001.9),
        (0.49, 2.0, 0, 1001.51),
        (0.5, 2.0, 0, None),
        (-0.4, 2.0, 0, 1002.0),
        (-0.5, 2.0, 0, None),
        (0.1, 0.4, 0, None),
        (0.05, 0.4, 0, 1000.35),
        (0.1, 2.0, 1, None),
        (0.1, 60.0, 0, 1030.0),
    ],
)
def test_until_when_a_grant_is_believed(
    age: float, grant_timeout: float, replicas: int, until: float | None
) -> None:
    wanted = request(grant_timeout=grant_timeout, replicas=replicas)
    queue = FakeQueue(wanted)
    queue.clock = Clock(SERVER_US, 1000.0)
    received = queue.received(wanted, grant(age))
    assert received is not None
    assert received.arrived_at == 1000.0
    assert received.until == (None if until is None else pytest.approx(until))


# -- the keeper's look at a queue ------------------------------------------------------------------


def watched(queue: FakeQueue, *, pttl: int = 500, untaken: int = 0) -> QueueWatch:
    watch = QueueWatch(queue)
    queue._watch = watch
    watch.answered([pttl, SERVER_US, untaken], 1000.0)
    return watch


def test_a_look_keeps_the_queue_registered(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    noted: list[Any] = []
    note = SimpleNamespace(note_vanished=lambda *args: noted.append(args[2]))
    monkeypatch.setattr(queue_module, "records", note)
    _waiter, queue = waiter_of(request())
    watch = QueueWatch(queue)
    assert watch.due == 1000.0 + WATCH_INTERVAL_SECONDS
    call: Any = watch.call(1000.0)
    assert call.args[0] == queue.id
    watch.answered([500, SERVER_US, 0, [1, [b"id", b"a"]]], 1000.0)
    assert watch.due == 1000.5
    assert queue.clock == Clock(SERVER_US, 1000.0)
    assert noted == [Vanished(1, [b"id", b"a"])]
    assert queue._may_be_registered
    assert not queue.steps()


def test_a_grant_that_is_untaken_twice_means_that_the_pop_is_dead(
    jobs: list[Any], clock: FakeClock
) -> None:
    _waiter, queue = waiter_of(request())
    watch = watched(queue, untaken=1, pttl=60_000)
    assert watch.due == pytest.approx(1000.2)
    assert not queue.steps()
    watch.answered([60_000, SERVER_US, 0], 1000.0)
    watch.answered([100, SERVER_US, 1], 1000.0)
    assert watch.due == pytest.approx(1000.1)
    assert not queue.steps()
    watch.answered([60_000, SERVER_US, 1], 1000.0)
    assert queue.steps() == ["wake"]
    watch.answered([60_000, SERVER_US, 1], 1000.0)  # It is counted from the beginning.
    assert not queue.steps()
    queue.node = Nowhere()
    watch.answered([60_000, SERVER_US, 0], 1000.0)
    assert queue.steps() == ["wake"]


@pytest.mark.parametrize(("patience", "wakes"), [(math.inf, False), (0.5, True)])
def test_a_look_that_fails_wakes_those_who_do_not_wait_through_an_outage(
    jobs: list[Any], patience: float, wakes: bool
) -> None:
    waiter_of(request())
    waiter, queue = waiter_of(request(outage_patience=patience))
    queue.waiters.extend([waiter])
    watch = QueueWatch(queue)
    watch.failed(AWAY, 1000.0)
    assert watch.due == 1000.5
    assert queue.steps() == (["wake"] if wakes else [])


def test_a_queue_whose_loop_is_closed_is_dissolved(jobs: list[Any]) -> None:
    class Loop:
        def is_closed(self) -> bool:
            return closed

    loop: Any = Loop()
    queue = FakeQueue(request(waiter=b"first"), loop=loop)
    queues[queue.key] = queue
    watch = queue._watch = QueueWatch(queue)
    closed = False
    assert watch.call(1000.0) is not None
    closed = True
    assert watch.call(1000.0) is None
    assert queue.closed
    assert queue.steps() == ["wake"]
    assert (watch,) in jobs


# -- threads ---------------------------------------------------------------------------------------


class Connection:
    """It has the replies that a test has put there."""

    generation = 0

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.sent: list[Any] = []
        self.looks: list[float] = []
        self.closed = False

    def send_packed_command(self, command: list[bytes]) -> None:
        self.sent += command

    def can_read(self, timeout: float = 0) -> bool:
        self.looks.append(timeout)
        if self.replies and self.replies[0] is AWAY:
            raise AWAY
        return bool(self.replies)

    def read_response(self) -> Any:
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def disconnect(self) -> None:
        self.closed = True


def pending_on(connection: Any, server: Any = None) -> PendingReply:
    return PendingReply(connection, CALL, server or Nowhere(), 1100.0)


@pytest.mark.parametrize(
    ("reply", "confirmed", "closes", "hurries"),
    [
        (1, 1100.0, False, False),
        (0, -math.inf, False, False),
        (NoScriptError(), None, False, True),
        (AWAY, None, True, True),
        (redis.ResponseError("OOM"), None, True, True),
    ],
)
@pytest.mark.parametrize("wait", [True, False])
def test_the_answer_about_a_grant(
    jobs: list[Any], reply: Any, confirmed: float | None, closes: bool, hurries: bool, wait: bool
) -> None:
    connection, server = Connection(), Nowhere()
    pending = pending_on(connection, server)
    assert connection.sent == [pack(CALL, known=False)]
    assert CALL.script.sha in server.known_scripts
    assert pending.read_reply(False) is None
    assert connection.looks == [0]
    connection.replies.append(reply)
    assert pending.read_reply(wait) == confirmed
    assert pending.confirmed() == confirmed  # It is read once.
    assert connection.closed is closes
    assert jobs == ["hurry"] * hurries
    assert (CALL.script.sha in server.known_scripts) is not isinstance(reply, NoScriptError)
    assert server.told == ["answered"] * isinstance(reply, int)
    pending_on(connection, server)
    assert connection.sent[1] == pack(CALL, known=not isinstance(reply, NoScriptError))


def test_the_answer_about_a_grant_is_its_parents_in_a_forked_child(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = Connection(1)
    pending = pending_on(connection)
    monkeypatch.setattr(threads_module.os, "getpid", lambda: -1)
    assert pending.confirmed() is None
    assert connection.replies == [1]
    assert os.getpid() == -1


def test_a_thread_that_reads_the_answer_is_not_waited_for(jobs: list[Any]) -> None:
    pending = pending_on(Connection(1))
    pending._mutex = SimpleNamespace(acquire=lambda blocking: blocking, release=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pending.read_reply(False)
    assert pending._open

    def fail() -> None:
        raise RuntimeError("cannot release un-acquired lock")

    pending._mutex.release = fail
    assert pending.read_reply(False) is None
    assert pending.read_reply(True) == 1100.0


def test_an_answer_that_has_not_come_is_waited_for_if_wanted(jobs: list[Any]) -> None:
    connection = Connection(1)
    connection.can_read = lambda timeout=0: False
    pending = pending_on(connection)
    assert pending.read_reply(False) is None
    assert pending.confirmed() == 1100.0
    queue, _ = thread_queue(connection)
    queue.send_take_grant(CALL, 1100.0)
    connection.replies.append(1)
    client: Any = None
    queue.connect(client)
    assert not connection.replies


def test_a_connection_that_has_ended_is_not_waited_for(jobs: list[Any]) -> None:
    connection = Connection(AWAY)
    assert pending_on(connection).read_reply(False) is None
    assert connection.closed


def test_an_interrupt_while_the_answer_is_read_ends_the_connection(jobs: list[Any]) -> None:
    connection = Connection(KeyboardInterrupt())
    pending = pending_on(connection)
    with pytest.raises(KeyboardInterrupt):
        pending.confirmed()
    assert connection.closed
    assert pending.confirmed() is None


def thread_queue(connection: Any) -> tuple[ThreadQueue, Any]:
    node: Any = Nowhere()
    node.checkout = lambda: connection
    queue = ThreadQueue(node, request())
    client: Any = None
    queue.connect(client)
    return queue, node


def test_a_connection_for_pops_has_nothing_left_to_read(jobs: list[Any]) -> None:
    connection = Connection(1)
    queue, node = thread_queue(connection)
    assert queue.node is node
    pending = queue.send_take_grant(CALL, 1100.0)
    client: Any = None
    queue.connect(client)
    assert queue.connection is connection
    assert not connection.replies
    assert pending.read_reply(False) == 1100.0
    assert queue.pending is None
    pending = queue.send_take_grant(CALL, 1100.0)
    queue.end()
    assert node.told[-1] == ("checkin", connection, pending)
    assert queue.connection is None
    told = len(node.told)
    queue.end()
    assert len(node.told) == told


def test_a_grant_is_extended_where_the_pop_is(jobs: list[Any]) -> None:
    connection = Connection()
    queue, server = thread_queue(connection)
    node = queue.node = Nowhere()
    queue.begin_pop(b"pop")
    queue.send_take_grant(CALL, 1100.0)
    assert connection.sent == [b"pop", pack(CALL, known=False)]
    assert (len(node.known_scripts), len(server.known_scripts)) == (1, 0)


def test_a_queue_is_woken_by_the_end_of_its_connection(jobs: list[Any]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection()
        connection._sock = ours
        queue, _ = thread_queue(connection)
        theirs.setblocking(False)
        queue.wake()
        assert theirs.recv(1) == b""


@pytest.mark.parametrize("outcome", [5, AWAY, KeyboardInterrupt()])
def test_each_end_of_a_wait_leaves_the_queue(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch, clock: FakeClock, outcome: Any
) -> None:
    waiter, _ = thread_waiter(monkeypatch)
    left: list[int] = []
    leave = waiter._leave_anywhere

    def steps(refused: Any) -> Any:
        waiter._sleep(2.0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome
        yield

    def interrupted() -> None:
        left.append(1)
        if len(left) == 1:
            raise KeyboardInterrupt
        leave()

    monkeypatch.setattr(waiter, "_wait", steps)
    monkeypatch.setattr(waiter, "_leave_anywhere", interrupted)
    if outcome == 5:
        assert waiter.wait() == 5
        assert not left
    else:
        with pytest.raises(KeyboardInterrupt):
            waiter.wait()
        assert len(left) == 2
    assert clock.now == 1002.0
    assert not waiter.queue.waiters


def test_a_connection_without_a_socket_cannot_be_waited_on(jobs: list[Any]) -> None:
    connection = Connection()
    connection._sock = object()
    with pytest.raises(MayNotBlock):
        thread_queue(connection)
    assert connection.closed


def test_a_pop_is_waited_for_in_parts(jobs: list[Any], clock: FakeClock) -> None:
    connection = Connection()
    queue, _ = thread_queue(connection)
    looks = connection.looks

    def can_read(timeout: float = 0) -> bool:
        looks.append(timeout)
        clock.now += timeout
        return False

    connection.can_read = can_read
    assert not queue.pop_ended(3.0)
    assert sum(looks) == pytest.approx(3.0)
    looks.clear()
    assert not queue.pop_ended(1e9)
    assert sum(looks) == pytest.approx(3600)


def thread_waiter(monkeypatch: pytest.MonkeyPatch, *replies: Any) -> tuple[Any, Any]:
    """A waiter of a thread whose pop is under way."""
    connection = Connection(*replies)
    _queue, node = thread_queue(connection)
    monkeypatch.setattr(threads_module, "server_of", lambda client: node)
    client: Any = None
    waiter = ThreadWaiter(client, request())
    waiter.queue.connect(client)
    join(waiter, waiter.queue, waiter._new_turn)
    waiter._reply = ...
    return waiter, connection


def test_who_is_interrupted_leaves_the_end_of_its_pop_to_the_keeper(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter, connection = thread_waiter(monkeypatch, grant())
    waiter._leave_anywhere()
    assert not connection.closed
    [pop] = jobs
    assert isinstance(pop, AbandonedPop)
    assert pop._call.args[0] == b""  # No last try.
    pop.answered(1, 1000.0)
    assert connection.looks == [LAST_TRY_SECONDS]
    assert connection.closed
    assert [type(job) for job in jobs if not isinstance(job, tuple)] == [
        AbandonedPop,
        DeferredRelease,
    ]
    assert jobs[-1] == (pop,)
    waiter._leave_anywhere()  # Once more, as an interrupt may have cut it short.
    assert not waiter.queue.waiters


def test_the_keeper_gives_up_an_abandoned_pop_that_it_cannot_end(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter, connection = thread_waiter(monkeypatch)
    waiter._leave_anywhere()
    pop = jobs[0]
    pop.failed(AWAY, 1000.0)
    assert connection.closed
    assert jobs[-1] == (pop,)
    waiter, connection = thread_waiter(monkeypatch, AWAY)
    waiter._leave_anywhere()
    jobs[-1].answered(1, 1000.0)
    assert connection.closed


@pytest.mark.parametrize("reply", [grant(), LEFT, None])
def test_who_is_interrupted_with_a_grant_gives_it_back(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch, reply: Any
) -> None:
    waiter, connection = thread_waiter(monkeypatch)
    waiter._reply = reply
    waiter._leave_anywhere()
    assert connection.closed
    kinds = [type(job) for job in jobs if not isinstance(job, tuple)]
    assert kinds == [DeferredRelease] * (reply == grant())
    waiter._leave_anywhere()
    assert len(jobs) == len(kinds)


def test_a_turn_may_come_before_it_is_waited_for(clock: FakeClock) -> None:
    turn = ThreadWakeEvent()
    assert not turn.wait(0)
    turn.set()
    turn.set()
    assert turn.wait(0)
    assert turn.wait(0)


def test_a_forked_child_has_no_queues() -> None:
    _, queue = waiter_of(request(waiter=b"first"))
    queue.connection = object()
    queue_module._forget_queues()
    assert not queues
    assert not queue.waiters
    assert not queue.registered
    assert not queue._may_be_registered
    assert queue.connection is None
