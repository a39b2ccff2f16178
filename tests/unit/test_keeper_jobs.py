"""What the keeper decides without its thread: when a job is due, and whom it wakes."""

from __future__ import annotations

import math
import threading
import time as real_time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_redis_lock import keeper as keeper_module
from django_redis_lock import threads
from django_redis_lock.clock import Clock, time
from django_redis_lock.extension import PACKAGE, OnUse, PartMissing
from django_redis_lock.keeper import (
    DeferredRelease,
    Job,
    Keeper,
    SentOnce,
    exchange,
    use_keeper,
)
from django_redis_lock.protocol.holder_scripts import CLOCK
from django_redis_lock.protocol.script import Call
from django_redis_lock.threads import ThreadEvent
from tests.processes import PATIENCE, until

CALL = Call(CLOCK, (), ())
AWAY = redis.ConnectionError("away")
REFUSED = redis.ResponseError("NOPERM this user may not")
NO_LOCK = redis.ResponseError("WRONGTYPE Operation against a key")


class FakeClock(Clock):
    """It goes on only while somebody sleeps."""

    now = 1000.0
    slept = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    before, fake = time.clock, FakeClock()
    time.use(fake)
    yield fake
    time.use(before)


class Bell:
    """In place of the condition on which the keeper's thread waits."""

    rung = 0

    def notify(self) -> None:
        self.rung += 1


class Quiet(Keeper):
    """A keeper whose thread is about to run."""

    def __init__(self) -> None:
        super().__init__()
        self.bell: Any = Bell()
        self._condition = self.bell

    def _start(self) -> None:
        self._thread = threading.current_thread()


class FakeServer:
    moving: tuple[str, ...] = ()

    def refuses(self, error: Exception) -> bool:
        return str(error).startswith(self.moving) if self.moving else False


class Lasting(Job):
    """It is done at certain times, and renews what lives for a while."""

    def __init__(self, due: float, lifetime: float = math.inf, flush: bool = False) -> None:
        server: Any = FakeServer()
        super().__init__(server, due)
        self.deadline_scale = lifetime
        self.flush_at_exit = flush


@pytest.fixture
def keeper(clock: FakeClock) -> Iterator[Quiet]:
    before, quiet = keeper_module.keeper(), Quiet()
    use_keeper(quiet)
    yield quiet
    use_keeper(before)


# -- what others wait for --------------------------------------------------------------------------


def deferred(keeper: Keeper, lifetime: float | None = 0.0, moving: str = "") -> DeferredRelease:
    server: Any = FakeServer()
    server.moving = (moving,) if moving else ()
    job = DeferredRelease(server, CALL, lifetime)
    keeper.add(job)
    return job


def test_a_release_is_sent_once_more_a_second_after_its_reply(
    keeper: Quiet, clock: FakeClock
) -> None:
    job = deferred(keeper)
    assert (job.due, job.flush_at_exit) == (1000.0, True)
    assert job.call(1000.0) is CALL
    job.answered(1, sent_at=1000.5)
    assert (job.due, job.flush_at_exit) == (1001.5, False)
    assert job.call(1001.5) is CALL
    job.answered(0, sent_at=1001.5)
    assert job in keeper
    assert job.call(1002.5) is None
    assert job not in keeper


@pytest.mark.parametrize(
    ("error", "pauses"),
    [
        (AWAY, [0.5, 1.0, 2.0, 2.0, 2.0]),
        (redis.ResponseError("MOVED 1 host:1"), [0.5, 1.0, 2.0, 2.0, 2.0]),
        (REFUSED, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
    ],
)
def test_between_two_attempts_to_release_are_pauses(
    keeper: Quiet, clock: FakeClock, error: Exception, pauses: list[float]
) -> None:
    job = deferred(keeper, lifetime=None, moving="MOVED")
    for pause in pauses:
        clock.now = job.due
        assert job.call(clock.now) is CALL
        job.failed(error, clock.now)
        assert job.due - clock.now == pause


@pytest.mark.parametrize(
    ("error", "lifetime", "tries_until"),
    [
        (AWAY, 30.0, 1000.0 + 3600),
        (AWAY, 7200.0, 1000.0 + 7200),
        (REFUSED, 30.0, 1000.0 + 30),
        (REFUSED, 7200.0, 1000.0 + 7200),
        (REFUSED, None, math.inf),
        (NO_LOCK, 30.0, 1000.0),
        (NO_LOCK, None, 1000.0),
    ],
)
def test_a_release_that_fails_is_given_up(
    keeper: Quiet, clock: FakeClock, error: Exception, lifetime: float | None, tries_until: float
) -> None:
    job = deferred(keeper, lifetime)
    last = 0.0
    while job.call(clock.now) is CALL and clock.now < 20_000:
        last = clock.now
        job.failed(error, clock.now)
        clock.now = job.due
    # After a refusal that does not pass it is tried once more.
    assert last >= min(tries_until, 20_000) - 30.0
    assert last <= tries_until + 60.5


def test_what_is_sent_once_is_not_sent_again(keeper: Quiet, clock: FakeClock) -> None:
    for end in ("answered", "failed"):
        server: Any = FakeServer()
        job = SentOnce(server, CALL)
        keeper.add(job)
        assert (job.due, job.flush_at_exit) == (clock.now, True)
        assert job.call(clock.now) is CALL
        getattr(job, end)(AWAY, clock.now)
        assert job not in keeper


def test_what_is_to_be_renewed_soonest_goes_first() -> None:
    ends = [Lasting(1000.0, lifetime).ends_at() for lifetime in (0.9, 5.0, 60.0, math.inf)]
    assert ends == [1000.9, 1005.0, 1010.0, 1010.0]


# -- the end of a process --------------------------------------------------------------------------


def test_a_process_waits_a_second_for_what_must_be_done_before_it_ends(
    keeper: Quiet, clock: FakeClock
) -> None:
    keeper.add(Lasting(clock.now))
    keeper.flush()
    assert clock.slept == 0
    keeper.add(Lasting(clock.now, flush=True))
    keeper.flush()
    assert clock.now == pytest.approx(1000 + keeper_module.FLUSH_SECONDS, abs=0.01)
    assert clock.slept > 100


def test_and_then_for_its_notices(keeper: Quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(keeper, "flush", lambda: done.append("jobs"))
    monkeypatch.setattr(threads, "flush", done.append)
    keeper_module.finish()
    assert done == ["jobs", keeper_module.FLUSH_SECONDS]


def test_replies_are_waited_for_until_the_next_job_is_due(keeper: Quiet, clock: FakeClock) -> None:
    done: list[Any] = []

    class Exchanges:
        pause = 1.0

        def begin(self, jobs: Any, shortest: float) -> None:
            done.append((jobs, shortest))

        def turn(self, next_due: float) -> Any:
            done.append(next_due)
            return []

    fake: Any = Exchanges()
    keeper._loaded = fake
    first, second = Lasting(1000.0, 30.0), Lasting(1010.0)
    for job in (first, second):
        keeper.add(job)
    keeper._serve(keeper._pop_due(1000.0))
    clock.now = 1010.0
    keeper._serve(keeper._pop_due(1010.0))
    assert done == [([first], 30.0), 1010.0, ([second], 30.0), math.inf]


def test_what_the_thread_uses_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(exchange, "import_module", loaded.append)
    monkeypatch.setattr(exchange, "part", loaded.append)
    exchange.Exchanges.load()
    assert loaded == [*(f"{PACKAGE}.{name}" for name in OnUse.in_keeper), "instant_loss"]
    assert "locking.records" in OnUse.in_keeper


def test_what_jobs_use_is_loaded_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later, the process may fork at any moment. What is missing raises where it is used."""
    loaded: list[int] = []

    def load() -> None:
        loaded.append(1)
        raise ImportError

    monkeypatch.setattr(exchange.Exchanges, "load", staticmethod(load))
    keeper = Keeper()
    first = keeper._exchanges
    assert keeper._exchanges is first
    assert loaded == [1]


def test_it_listens_where_the_part_for_that_is_installed(
    keeper: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Subscription:
        def __init__(self, *args: Any) -> None:
            self.args = args

        def start(self) -> None:
            started.append(self)

    installed = True

    def part(name: str) -> Any:
        if not installed:
            raise PartMissing(name)
        return SimpleNamespace(Subscription=Subscription)

    monkeypatch.setattr(keeper_module, "part", part)
    server: Any = FakeServer()
    found: Any = keeper.subscribe(server, b"channel", print)
    assert started == [found]
    assert found.args == (server, b"channel", print)
    installed = False
    assert keeper.subscribe(server, b"channel", print) is None


def test_a_job_is_discarded_by_the_keeper_that_has_it(keeper: Quiet, clock: FakeClock) -> None:
    """Another one may be in use by now."""
    job = Lasting(1010.0)
    keeper.add(job)
    Keeper().discard(job)
    assert job not in keeper
    Keeper().discard(Lasting(1010.0))  # That one was never added.


# -- the heap --------------------------------------------------------------------------------------


def test_a_job_is_due_at_its_latest_time_only(keeper: Quiet, clock: FakeClock) -> None:
    job, other, gone = Lasting(1010.0), Lasting(1012.0), Lasting(1010.0)
    for each in (job, other, gone):
        keeper.add(each)
    keeper.discard(gone)
    keeper.reschedule(gone, 1011.0)
    keeper.reschedule(job, 1020.0)
    assert keeper._pop_due(1009.0) == []
    assert keeper._pop_due(1015.0) == [other]
    assert keeper._pop_due(1025.0) == [job]
    assert gone not in keeper
    assert sorted(map(id, keeper.jobs())) == sorted(map(id, (job, other)))


def test_what_is_rescheduled_while_it_is_done_is_due_at_the_earlier_time(
    keeper: Quiet, clock: FakeClock
) -> None:
    job = Lasting(1000.0)
    keeper.add(job)
    assert keeper._pop_due(1000.0) == [job]
    for due in (1007.0, 1005.0, 1006.0):
        keeper.reschedule(job, due)
    job.due = 1010.0  # Its answer says so.
    keeper._requeue([job])
    assert job.due == 1005.0
    assert keeper._pop_due(1005.0) == [job]
    keeper.discard(job)
    keeper._requeue([job])
    assert keeper._pop_due(math.inf) == []


def test_hurry_makes_all_jobs_due(keeper: Quiet, clock: FakeClock) -> None:
    jobs = {Lasting(1010.0), Lasting(1020.0)}
    for job in jobs:
        keeper.add(job)
    keeper.hurry()
    assert set(keeper._pop_due(clock.now)) == jobs


def test_entries_of_jobs_that_are_gone_are_cleared_away_now_and_then(
    keeper: Quiet, clock: FakeClock
) -> None:
    """Not with each job: that would take the longer, the more there are."""
    stays = [Lasting(5000.0 - number) for number in range(3)]
    for job in stays:
        keeper.add(job)
    heap = keeper._due
    while len(heap) < 2 * (len(stays) + 1) + 64:
        assert keeper._due is heap
        short = Lasting(2000.0)
        keeper.add(short)
        keeper.discard(short)
    assert keeper._due is heap
    keeper.add(last := Lasting(3000.0))
    assert keeper._due is not heap
    assert len(keeper._due) == 4
    assert [keeper._pop_due(due) for due in (2999, 3000, 4998, 4999, 5000)] == [
        [],
        [last],
        *([job] for job in reversed(stays)),
    ]


def test_the_shortest_lifetime_counts_from_its_job_on_and_a_second_longer_than_it(
    keeper: Quiet, clock: FakeClock
) -> None:
    def shortest() -> float:
        return keeper._shortest_lifetime(clock.now)

    assert shortest() == math.inf
    long, short = Lasting(2000.0, 60.0), Lasting(2000.0, 0.6)
    keeper.add(long)
    assert shortest() == 60.0
    keeper.add(short)
    assert shortest() == 0.6
    keeper.discard(short)
    clock.now += 0.9 * keeper_module.LOOK_SECONDS
    assert shortest() == 0.6
    clock.now += 0.2 * keeper_module.LOOK_SECONDS
    assert shortest() == 60.0
    keeper.add(Lasting(2000.0, 5.0))
    keeper.add(Lasting(2000.0, 50.0))
    clock.now += 2 * keeper_module.LOOK_SECONDS
    assert shortest() == 5.0


# -- whom it wakes ---------------------------------------------------------------------------------


def test_the_thread_is_woken_by_what_is_due_before_it_wakes_by_itself(keeper: Quiet) -> None:
    keeper.add(Lasting(1010.0))  # This one starts it.
    keeper._wakes_at = 1010.0
    keeper.add(later := Lasting(1020.0))
    assert keeper.bell.rung == 0
    keeper.add(Lasting(1005.0))
    assert keeper.bell.rung == 1
    keeper.reschedule(later, 1015.0)
    assert keeper.bell.rung == 1
    keeper.reschedule(later, 1004.0)
    assert keeper.bell.rung == 2


class Noted(ThreadEvent):
    """A thread's start: who has waited for it, and whether in vain."""

    waits: list[tuple[float, bool]]

    def wait(self, seconds: float) -> bool:
        came = super().wait(min(seconds, PATIENCE))
        self.waits.append((seconds, came))
        return came


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    waits: list[tuple[float, bool]] = []
    monkeypatch.setattr(Noted, "waits", waits, raising=False)
    monkeypatch.setattr(keeper_module, "ThreadEvent", Noted)
    monkeypatch.setattr(keeper_module, "STARTING_SECONDS", PATIENCE - 1)
    monkeypatch.setattr(keeper_module, "IDLE_SECONDS", 0.05)
    return waits


class Turn(Job):
    """It has nothing to send, once."""

    done = False

    def __init__(self, keeper: Keeper) -> None:
        server: Any = type("OneServer", (FakeServer,), {"is_topology": True})()
        super().__init__(server, time.monotonic())
        self._keeper = keeper
        self.wakes_at: float | None = None

    def call(self, now: float) -> None:
        self.wakes_at = self._keeper._wakes_at
        self.in_keeper = threads.this_thread.is_keeper
        self._keeper.discard(self)
        self.done = True


def do_one(keeper: Keeper) -> Turn:
    job = Turn(keeper)
    keeper.add(job)
    until(lambda: job.done)
    return job


def ended(keeper: Keeper) -> bool:
    return keeper._thread is None


def test_only_the_first_caller_waits_for_the_thread_to_start(
    started: list[tuple[float, bool]],
) -> None:
    keeper = Keeper()
    for _ in range(2):
        job = do_one(keeper)
        assert job.wakes_at == -math.inf  # While it works nobody need wake it.
        assert job.in_keeper  # So users' code does not run there.
        until(lambda: ended(keeper))
    assert started == [(PATIENCE - 1, True)]


def test_one_thread_is_started_however_long_that_takes(
    keeper: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[threading.Thread] = []
    monkeypatch.setattr(threads, "start", lambda thread, failed: made.append(thread))
    slow = Keeper()
    slow._loaded = object()  # then nobody waits for its start
    for due in (1010.0, 1020.0):
        slow.add(Lasting(due))
    [thread] = made
    assert slow._thread is thread
    assert thread.daemon


def test_a_thread_that_could_not_start_is_not_waited_for(
    started: list[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "start", lambda thread, failed: failed(RuntimeError("no more")))
    keeper = Keeper()
    keeper.add(Turn(keeper))
    assert started == [(PATIENCE - 1, True)]
    assert keeper._thread is None


def test_a_thread_whose_start_was_interrupted_works_all_the_same(
    started: list[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler raises just when it was started."""
    start, threads_made = threads.start, []

    def interrupted(thread: threading.Thread, failed: Any) -> None:
        start(thread, failed)
        threads_made.append(thread)
        raise KeyboardInterrupt

    keeper = Keeper()
    job = Turn(keeper)
    monkeypatch.setattr(threads, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keeper.add(job)
    until(lambda: job.done)
    until(lambda: ended(keeper))
    threads_made[0].join(PATIENCE)
    assert not threads_made[0].is_alive()


def test_a_thread_that_never_started_is_started_by_the_next_job(
    started: list[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler raises just before."""

    def interrupted(thread: threading.Thread, failed: Any) -> None:
        raise KeyboardInterrupt

    keeper = Keeper()
    with monkeypatch.context() as patch:
        patch.setattr(threads, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            keeper.add(Turn(keeper))
    do_one(keeper)


@pytest.mark.parametrize("discarded", ["while it is done", "while the thread waits"])
def test_the_thread_stays_for_the_next_job(
    started: list[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch, discarded: str
) -> None:
    """One for each lock that is held for a moment would cost more than the lock."""
    for name in ("IDLE_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(keeper_module, name, 3600.0)
    keeper = Keeper()
    if discarded == "while it is done":
        do_one(keeper)
    else:
        waiting = Lasting(time.monotonic() + 3600)
        keeper.add(waiting)
        until(lambda: keeper._wakes_at == waiting.due)
        keeper.discard(waiting)
        with keeper._mutex:
            keeper._condition.notify()
    until(lambda: keeper._wakes_at > -math.inf)
    thread = keeper._thread
    assert thread is not None
    real_time.sleep(0)  # Others run.
    do_one(keeper)
    assert keeper._thread is thread
    for name in ("IDLE_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(keeper_module, name, 0.05)
    do_one(keeper)
    until(lambda: ended(keeper))


def test_after_an_internal_error_the_keeper_closes_its_connections_and_goes_on(
    started: list[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "IDLE_SECONDS", PATIENCE)  # When it ends, it closes, too.
    keeper = Keeper()
    do_one(keeper)
    closed: list[bool] = []
    pauses: list[float] = []
    exchanges = keeper._exchanges
    close, turn = exchanges.close, exchanges.turn

    def fail(until: float) -> Any:
        monkeypatch.setattr(exchanges, "turn", turn)
        raise MemoryError

    monkeypatch.setattr(exchanges, "close", lambda: (closed.append(True), close()))
    monkeypatch.setattr(exchanges, "turn", fail)
    monkeypatch.setattr(time, "sleep", pauses.append)
    do_one(keeper)
    until(lambda: pauses)
    assert closed == [True]
    assert pauses == [0.1]
    monkeypatch.setattr(keeper_module, "IDLE_SECONDS", 0.05)
    do_one(keeper)
    until(lambda: ended(keeper))
