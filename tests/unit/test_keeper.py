"""The keeper's thread: when there is one, and what it does in trouble. The server is faked."""

from __future__ import annotations

import _thread
import heapq
import logging
import math
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from django_redis_lock import keeper as keeper_module
from django_redis_lock.contrib.instant_loss import Subscription
from django_redis_lock.keeper import Job, Keeper, exchange
from django_redis_lock.locking.hold import Hold, Renewal
from django_redis_lock.locking.lock import in_a_thread
from django_redis_lock.protocol import Acquisition
from django_redis_lock.protocol.holder_scripts import CLOCK
from django_redis_lock.protocol.keys import lock_keys
from django_redis_lock.protocol.lock_scripts import RENEW
from django_redis_lock.protocol.script import Call
from django_redis_lock.transport.address import Address
from django_redis_lock.transport.circuit_breaker import Breaker
from tests.processes import PATIENCE, until

ASK = Call(CLOCK, (), ())


class FakeServer:
    """Answers every command with ``answer``, raises it, or is silent (None)."""

    retired = is_topology = False
    generation = 0
    address = Address(object, {})

    def __init__(self, answer: Any = 1) -> None:
        self.answer = answer
        self.connected = 0
        self.asked = 0
        self.closed = 0
        self.links_closed = 0
        self.breaker = Breaker("nowhere")

    def locate(self, keys: Any, patience: float) -> FakeServer:
        return self

    def must_discover(self) -> bool:
        return False

    def on_error(self, error: Exception) -> None:
        pass

    def answered(self) -> None:
        pass

    def connect(self, timeout: float, protocol: int) -> FakeLink:
        self.connected += 1
        return FakeLink(self)

    def close(self, but: int = 0) -> None:
        self.closed += 1

    def checkout_unchecked(self) -> None:
        """None is idle."""

    def checkin(self, connection: FakeLink) -> None:
        raise AssertionError("none was taken")


class FakeLink:
    generation = 0

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send_packed_command(self, command: list[bytes]) -> None:
        for each in command:
            self._server.asked += 1
            answer = self._server.answer
            self._answers.put(answer(each) if callable(answer) else answer)

    def can_read(self, timeout: float = 0) -> bool:
        if self._server.answer is None or self._answers.empty():
            time.sleep(min(timeout, 0.01))
            return False
        return True

    def read_response(self) -> Any:
        answer = self._answers.get_nowait()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def disconnect(self) -> None:
        self._server.links_closed += 1


class Counting(Job):
    """Asks every few milliseconds and notes how that went."""

    def __init__(self, server: Any, keeper: Keeper, pause: float = 0.005) -> None:
        super().__init__(server, time.monotonic())
        self.keeper = keeper
        self.pause = pause
        self.answers = 0
        self.failures: list[BaseException] = []
        self.threads: set[int] = set()

    def call(self, now: float) -> Call | None:
        self.threads.add(threading.get_ident())
        return ASK

    def answered(self, value: Any, sent_at: float) -> None:
        self.answers += 1
        self.due = time.monotonic() + self.pause

    def failed(self, error: Exception, now: float) -> None:
        self.failures.append(error)
        self.due = now + self.pause


@pytest.fixture(autouse=True)
def _no_subscriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake server has no channels."""
    monkeypatch.setattr(Subscription, "start", lambda subscription: None)


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    monkeypatch.setattr(keeper_module, "IDLE_SECONDS", 0.1)
    keeper = Keeper()
    yield keeper
    for job in keeper.jobs():
        keeper.discard(job)
    thread = keeper._thread
    if thread is not None:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_the_link_to_a_server_that_has_left_its_cluster_is_closed(keeper: Keeper) -> None:
    old, new, other = FakeServer(), FakeServer(), FakeServer()
    jobs = [Counting(server, keeper) for server in (old, other)]
    for job in jobs:
        keeper.add(job)
    until(lambda: all(job.answers for job in jobs))
    old.retired = True
    jobs[0].server = new
    until(lambda: old.links_closed and new.connected)
    assert (old.links_closed, new.connected, other.links_closed) == (1, 1, 0)


class Failover(FakeServer):
    """The first call goes to the old primary. When the next is located there is a new one."""

    is_topology = True

    def __init__(self) -> None:
        super().__init__()
        self.old, self.new = FakeServer(), FakeServer()
        self.located = 0

    def locate(self, keys: Any, patience: float) -> FakeServer:
        self.located += 1
        self.old.retired = self.located > 1
        return self.new if self.old.retired else self.old


def test_a_call_that_waits_to_be_sent_is_not_forgotten_when_its_server_leaves(
    keeper: Keeper,
) -> None:
    server = Failover()
    jobs = [Counting(server, keeper, pause=0.05) for _ in range(3)]
    with keeper._mutex:  # They are in one batch.
        for job in jobs:
            keeper.add(job)
    until(lambda: all(job.answers > 1 for job in jobs))


def thread_of(keeper: Keeper) -> threading.Thread:
    assert keeper._thread is not None
    return keeper._thread


class TestThread:
    def test_there_is_none_before_it_is_needed(self, keeper: Keeper) -> None:
        assert keeper._thread is None

    def test_there_is_none_for_long_after_the_last_job(self, keeper: Keeper) -> None:
        server = FakeServer()
        job = Counting(server, keeper)
        keeper.add(job)
        thread = thread_of(keeper)
        assert thread.daemon
        until(lambda: job.answers)
        keeper.discard(job)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert keeper._thread is None
        assert server.closed == 1
        assert not keeper._exchanges._links

    def test_it_comes_back(self, keeper: Keeper) -> None:
        for _ in range(2):
            job = Counting(FakeServer(), keeper)
            keeper.add(job)
            until(lambda job=job: job.answers)
            keeper.discard(job)
            thread_of(keeper).join(PATIENCE)

    def test_one_does_everything(self, keeper: Keeper) -> None:
        servers = [FakeServer() for _ in range(3)]
        jobs = [Counting(server, keeper) for server in servers for _ in range(50)]
        for job in jobs:
            keeper.add(job)
        until(lambda: all(job.answers > 2 for job in jobs))
        assert len(set().union(*(job.threads for job in jobs))) == 1
        assert [server.connected for server in servers] == [1, 1, 1]

    def test_many_threads_may_add_and_discard(self, keeper: Keeper) -> None:
        """Enough of them for the heap to be tidied up meanwhile."""
        server = FakeServer()
        keep = Counting(server, keeper)
        keeper.add(keep)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(10):
                    jobs = [Counting(server, keeper, pause=60) for _ in range(100)]
                    for job in jobs:
                        job.due += 60
                        keeper.add(job)
                    for job in jobs:
                        keeper.discard(job)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not failures
        answers = keep.answers
        until(lambda: keep.answers > answers)
        assert len(keeper._due) < 1000


class TestTrouble:
    @pytest.mark.parametrize(
        "error",
        [redis.ConnectionError("away"), redis.TimeoutError("slow"), OSError("broken"), EOFError()],
        ids=repr,
    )
    def test_a_server_that_fails_is_asked_again(self, keeper: Keeper, error: Exception) -> None:
        server = FakeServer(error)
        job = Counting(server, keeper)
        keeper.add(job)
        until(lambda: len(job.failures) > 2)
        server.answer = 1
        until(lambda: job.answers > 2)

    def test_an_error_the_server_replies_concerns_one_job(self, keeper: Keeper) -> None:
        def answer(command: bytes) -> Any:
            return redis.ResponseError("WRONGTYPE") if RENEW.source.encode() in command else 1

        class Bad(Counting):
            def call(self, now: float) -> Call:
                return Call(RENEW, (), ())

        server = FakeServer(answer)
        good, bad = Counting(server, keeper), Bad(server, keeper)
        for job in (bad, good):
            keeper.add(job)
        until(lambda: good.answers > 5 and len(bad.failures) > 5)
        assert not good.failures
        assert not bad.answers
        assert server.connected == 1

    def test_a_silent_server_delays_no_other_for_long(self, keeper: Keeper) -> None:
        silent, fine = FakeServer(None), FakeServer()
        quick = Counting(fine, keeper)
        quick.deadline_scale = 0.6
        keeper.add(Counting(silent, keeper))
        keeper.add(quick)
        began = time.monotonic()
        until(lambda: quick.answers > 3)
        assert time.monotonic() - began < 5

    @pytest.mark.parametrize("method", ["call", "answered", "failed"])
    @pytest.mark.parametrize("error", [RuntimeError("bug"), SystemExit(1)], ids=repr)
    def test_a_broken_job_does_not_end_it(
        self, keeper: Keeper, method: str, error: BaseException, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(*_: Any) -> None:
            raise error

        server = FakeServer()
        good = Counting(server, keeper)
        bad = Counting(FakeServer(OSError()) if method == "failed" else server, keeper, pause=0.05)
        setattr(bad, method, broken)
        keeper.add(bad)
        keeper.add(good)
        until(lambda: good.answers > 5)
        assert thread_of(keeper).is_alive()
        # It is logged by another thread.
        until(lambda: any(r.levelno == logging.ERROR and r.exc_info for r in caplog.records))

    def test_a_server_that_refuses_its_connection_is_no_bug(
        self, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Such as with a database that this user may not select any more."""
        server = FakeServer()
        refused: list[Exception] = [redis.ResponseError("NOPERM select"), RuntimeError("bug")]

        def refuse(**_: Any) -> None:
            raise refused[len(job.failures) >= 3]

        monkeypatch.setattr(server, "connect", refuse)
        job = Counting(server, keeper, pause=0.01)
        keeper.add(job)
        # In the order in which they are logged, by another thread.
        until(lambda: any(r.levelno == logging.ERROR for r in caplog.records))
        keeper.discard(job)
        first = next(r for r in caplog.records if r.levelno == logging.ERROR)
        assert first.exc_info
        assert first.exc_info[1] is refused[1]

    @pytest.mark.parametrize("step", ["heappush", "heappop"])
    def test_nothing_ends_it(
        self, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """Such as having no memory while it looks what is to be done: it would never come back."""
        job = Counting(FakeServer(), keeper)
        keeper.add(job)
        until(lambda: job.answers)
        real = getattr(heapq, step)

        def out_of_memory(*args: Any) -> Any:
            if threading.current_thread() is not keeper._thread:
                return real(*args)
            monkeypatch.setattr(heapq, step, real)
            raise MemoryError

        monkeypatch.setattr(heapq, step, out_of_memory)
        until(lambda: getattr(heapq, step) is real)
        before = job.answers
        until(lambda: job.answers > before)
        keeper.discard(job)

    def test_what_is_discarded_while_it_fails_is_over(
        self, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = Counting(FakeServer(), keeper)

        def begin(*_: Any) -> None:
            keeper.discard(job)
            raise MemoryError

        monkeypatch.setattr(keeper._exchanges, "begin", begin)
        keeper.add(job)
        until(lambda: not (job in keeper or keeper._under_way))

    def test_each_reply_gives_the_next_its_whole_time(
        self, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that needs almost all its time for each of several calls is not silent."""
        now, in_vain = 0.0, 0

        def can_read(link: FakeLink, timeout: float = 0) -> bool:
            nonlocal in_vain
            in_vain -= 1
            return in_vain < 0 and not link._answers.empty()

        def read_response(link: FakeLink) -> Any:
            nonlocal now, in_vain
            now, in_vain = now + 0.9 * keeper._exchanges._timeout, 2  # Looks at the next reply.
            return link._answers.get_nowait()

        monkeypatch.setattr(exchange, "awake", lambda: now)
        monkeypatch.setattr(FakeLink, "can_read", can_read)
        monkeypatch.setattr(FakeLink, "read_response", read_response)
        server = FakeServer()
        jobs = [Counting(server, keeper, pause=60) for _ in range(4)]
        with keeper._mutex:  # They are in one batch.
            for job in jobs:
                keeper.add(job)
        until(lambda: all(job.answers or job.failures for job in jobs))
        assert not any(job.failures for job in jobs)

    def test_what_cannot_be_sent_concerns_one_job(self, keeper: Keeper) -> None:
        class Bad(Counting):
            def call(self, now: float) -> Call:
                return Call(RENEW, (), (object(),))

        server = FakeServer()
        good, bad = Counting(server, keeper), Bad(server, keeper)
        for job in (bad, good):
            keeper.add(job)
        until(lambda: good.answers > 20)
        assert not bad.answers

    @pytest.mark.parametrize("renews", [False, True])
    def test_a_thread_that_cannot_start_is_no_error(
        self,
        keeper: Keeper,
        renews: bool,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The log says so if that costs a lock, not if figures stay unwritten."""

        def start(*_: Any) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(_thread, "start_new_thread", start)
            job = Counting(FakeServer(), keeper)
            job.deadline_scale = 30.0 if renews else math.inf
            keeper.add(job)
        assert ("not be renewed" in caplog.text) is renews
        keeper.add(Counting(FakeServer(), keeper))
        until(lambda: job.answers)


def test_the_source_of_a_script_is_sent_once_in_a_batch_to_a_server(keeper: Keeper) -> None:
    first, second = FakeServer(), FakeServer()
    sent: dict[FakeServer, list[bytes]] = {first: [], second: []}
    for server, commands in sent.items():
        server.answer = lambda command, commands=commands: commands.append(command) or 1
    together = threading.Barrier(2, timeout=PATIENCE)

    class Blocking(Counting):
        def call(self, now: float) -> None:
            keeper.discard(self)
            together.wait()
            together.wait()

    class Renewing(Counting):
        def call(self, now: float) -> Call:
            return Call(RENEW, (), ())

    jobs = [kind(server, keeper) for kind in (Counting, Renewing) for server in sent for _ in "123"]
    for _ in range(2):  # A server may have been restarted since the last batch.
        keeper.add(Blocking(first, keeper))
        together.wait()
        for job in jobs:
            job.due, job.pause = time.monotonic(), math.inf
            keeper.add(job)
        together.wait()
        until(lambda: all(len(commands) == 6 for commands in sent.values()))
        for commands in sent.values():
            known = [b"EVALSHA" in command for command in commands]
            assert known == [False, True, True, False, True, True]
            commands.clear()


class TestTime:
    def test_it_sleeps_until_something_is_due(self, keeper: Keeper) -> None:
        server = FakeServer()
        job = Counting(server, keeper, pause=60)
        keeper.add(job)
        until(lambda: job.answers == 1)
        other = Counting(server, keeper, pause=60)
        keeper.add(other)
        until(lambda: other.answers == 1)
        assert job.answers == 1
        assert server.asked == 2

    def test_what_is_rescheduled_while_it_is_done_is_done_again(self, keeper: Keeper) -> None:
        """Its answer, which is on the way, may be from before what the caller knows."""

        def reschedule(command: bytes) -> int:
            if server.asked == 1:
                keeper.reschedule(job, time.monotonic())
            return 1

        server = FakeServer(reschedule)
        job = Counting(server, keeper, pause=3600)
        keeper.add(job)
        until(lambda: job.answers == 2)

    def test_what_is_rescheduled_is_done_then(self, keeper: Keeper) -> None:
        job = Counting(FakeServer(), keeper, pause=math.inf)
        keeper.add(job)
        until(lambda: job.answers == 1)
        until(lambda: keeper._wakes_at > time.monotonic())
        keeper.reschedule(job, time.monotonic())
        until(lambda: job.answers == 2)
        keeper.discard(job)
        keeper.reschedule(job, time.monotonic())
        assert job not in keeper._jobs

    def test_locks_held_for_a_moment_do_not_wake_it_one_after_the_other(
        self, keeper: Keeper
    ) -> None:
        short, last = Counting(FakeServer(), keeper), Counting(FakeServer(), keeper)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("IDLE_SECONDS", "LOOK_SECONDS"):
                patch.setattr(keeper_module, name, 60.0)
            short.due = time.monotonic() + 30
            keeper.add(short)
            until(lambda: keeper._wakes_at == short.due)
            keeper.discard(short)
            with keeper._mutex:
                keeper._condition.notify()
            until(lambda: not keeper._due)
            with keeper._mutex:  # The next one is due later, so it need not wake the keeper.
                assert keeper._wakes_at == short.due
        keeper.add(last)
        until(lambda: last.answers == 1)


class TestOnLost:
    """What a holder wants to be told is done apart from the keeper."""

    def make(self, server: Any, on_lost: Any, lifetime: float = 60.0) -> Renewal:
        now = time.monotonic()
        hold = Hold(lifetime, on_lost=on_lost)
        hold.begin(Acquisition(b"token", 1, now, now + lifetime), lock_keys(b"report"))
        renewal = Renewal(server, hold)
        renewal.schedule(hold.began)
        return renewal

    def test_a_blocking_on_lost_does_not_delay_the_keeper(self, keeper: Keeper) -> None:
        released, called = threading.Event(), threading.Event()

        def on_lost() -> None:
            called.set()
            assert released.wait(PATIENCE)

        good = Counting(FakeServer(), keeper)
        keeper.add(self.make(FakeServer(), in_a_thread(on_lost, b"work"), lifetime=0.01))
        keeper.add(good)
        assert called.wait(PATIENCE)
        answers = good.answers
        until(lambda: good.answers > answers + 3)
        released.set()

    def test_it_may_raise_anything(self, keeper: Keeper, caplog: pytest.LogCaptureFixture) -> None:
        def on_lost() -> None:
            raise SystemExit("no lock, no work")

        good = Counting(FakeServer(), keeper)
        keeper.add(self.make(FakeServer(), in_a_thread(on_lost, b"work"), lifetime=0.01))
        keeper.add(good)
        until(lambda: "on_lost" in caplog.text)
        answers = good.answers
        until(lambda: good.answers > answers)


class TestMany:
    """Thousands of jobs that are due at once, as after a server was frozen."""

    MANY = 2000

    def make(self, keeper: Keeper, server: Any, lifetime: float = 6.0) -> Counting:
        job = Counting(server, keeper, pause=3600.0)
        job.deadline_scale = lifetime
        return job

    def add(self, keeper: Keeper, jobs: list[Counting]) -> None:
        with keeper._mutex:
            for job in jobs:
                keeper.add(job)

    def test_each_reply_restarts_the_timeout(self, keeper: Keeper) -> None:
        """In all they take longer than one may."""

        class SlowLink(FakeLink):
            def read_response(self) -> Any:
                time.sleep(1.5 * exchange.REPLY_TIMEOUT_SECONDS / TestMany.MANY)
                return super().read_response()

        server = FakeServer()
        server.connect = lambda timeout, protocol: SlowLink(server)
        jobs = [self.make(keeper, server) for _ in range(self.MANY)]
        self.add(keeper, jobs)
        until(lambda: all(job.answers or job.failures for job in jobs))
        assert not any(job.failures for job in jobs)

    def test_the_most_urgent_goes_first(self, keeper: Keeper) -> None:
        sent: list[bytes] = []

        class Named(Counting):
            def call(self, now: float) -> Call:
                return Call(RENEW, (), (b"lifetime %.1f" % self.deadline_scale,))

        def note(command: bytes) -> int:
            sent.append(command.rpartition(b"lifetime ")[2].strip())
            return 1

        server = FakeServer(note)
        lifetimes = [3600.0, 5.0, math.inf, 60.0, 0.9, 7.0] * 100
        jobs = []
        for lifetime in lifetimes:
            job = Named(server, keeper, pause=3600.0)
            job.deadline_scale = lifetime
            jobs.append(job)
        self.add(keeper, jobs)
        until(lambda: all(job.answers for job in jobs))
        assert sent[:300] == [b"0.9"] * 100 + [b"5.0"] * 100 + [b"7.0"] * 100

    def test_what_was_not_sent_does_not_fail(self, keeper: Keeper) -> None:
        server = FakeServer(None)
        jobs = [self.make(keeper, server) for _ in range(self.MANY)]
        self.add(keeper, jobs)
        until(lambda: any(job.failures for job in jobs))
        assert sum(bool(job.failures) for job in jobs) < self.MANY / 2
        server.answer = 1
        for job in jobs:
            job.pause = 3600.0
            keeper.reschedule(job, time.monotonic())
        until(lambda: all(job.answers for job in jobs))

    @pytest.mark.parametrize("away", [None, redis.ConnectionError("refused")], ids=repr)
    def test_servers_do_not_wait_for_each_other(
        self, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, away: Any
    ) -> None:
        """One that hangs, or is refused, has many jobs, and another has many, too."""
        monkeypatch.setattr(exchange, "REPLY_TIMEOUT_SECONDS", PATIENCE)
        silent, fine = FakeServer(away), FakeServer()
        stuck = [self.make(keeper, silent, 6 * PATIENCE) for _ in range(self.MANY)]
        served = [self.make(keeper, fine, 6 * PATIENCE) for _ in range(self.MANY)]
        quick = Counting(fine, keeper, pause=0.001)
        self.add(keeper, [*stuck, *served, quick])
        until(lambda: all(job.answers for job in served) and quick.answers > 20)
        if away is None:  # It is still being waited for.
            assert not any(job.failures for job in stuck)
            monkeypatch.setattr(exchange, "REPLY_TIMEOUT_SECONDS", 0.1)
        until(lambda: any(job.failures for job in stuck))

    def test_a_job_that_is_released_while_it_waits_is_not_sent(self, keeper: Keeper) -> None:
        class Released(Counting):
            def call(self, now: float) -> Call | None:
                return super().call(now) if self in keeper else None

        server = FakeServer(None)
        jobs: list[Counting] = [Released(server, keeper, pause=3600.0) for _ in range(self.MANY)]
        self.add(keeper, jobs)
        until(lambda: server.asked)
        for job in jobs:
            keeper.discard(job)
        server.answer = 1
        until(lambda: not keeper._under_way)
        assert server.asked <= exchange.BATCH


def test_a_job_is_discarded_by_the_keeper_that_has_it(keeper: Keeper) -> None:
    """Another one may be in use by now."""
    job = Counting(FakeServer(), keeper)
    keeper.add(job)
    until(lambda: job.answers)
    Keeper().discard(job)
    assert job not in keeper


def test_the_jobs_that_are_not_due_cost_no_time(keeper: Keeper) -> None:
    """With 100,000 held locks, a look at each of them for each batch would take all of the time."""
    looks = 0

    class Later(Counting):
        @property
        def deadline_scale(self) -> float:
            nonlocal looks
            looks += 1
            return 60.0

    server = FakeServer()
    for _ in range(1000):
        job = Later(server, keeper)
        job.due += 3600
        keeper.add(job)
    busy = Counting(server, keeper, pause=0.001)
    began = time.monotonic()
    keeper.add(busy)
    until(lambda: busy.answers > 200)
    # Once when it is added, and once a second.
    assert looks < 1000 * (3 + time.monotonic() - began)


class Unresolved(FakeServer):
    """Its host has a name, which the system does not resolve until ``resolve`` is set."""

    address = Address(object, {"host": "redis.example"})

    def __init__(self) -> None:
        super().__init__()
        self.asked_for_name, self.resolve = threading.Event(), threading.Event()

    def connect(self, timeout: float, protocol: int) -> FakeLink:
        self.asked_for_name.set()
        assert self.resolve.wait(PATIENCE)
        return super().connect(timeout, protocol)


class UnresolvedSentinels(Unresolved):
    """Those of a service whose primary is not known yet."""

    is_topology = True

    def must_discover(self) -> bool:
        return not self.resolve.is_set()

    def locate(self, keys: Any, patience: float) -> FakeServer:
        self.asked_for_name.set()
        assert self.resolve.wait(PATIENCE)
        return self


@pytest.mark.parametrize("kind", [Unresolved, UnresolvedSentinels])
def test_a_name_that_is_not_resolved_delays_no_other_server(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, kind: type[Unresolved]
) -> None:
    """Kind: the system's resolver has no time-out of ours."""
    monkeypatch.setattr(exchange, "REPLY_TIMEOUT_SECONDS", 0.1)
    named = kind()
    slow, other = Counting(named, keeper), Counting(FakeServer(), keeper)
    keeper.add(slow)
    assert named.asked_for_name.wait(PATIENCE)
    keeper.add(other)
    until(lambda: other.answers > 5 and len(slow.failures) > 1)
    assert named.connected == 0
    named.resolve.set()
    until(lambda: slow.answers)
    assert named.connected == 1
    for job in (slow, other):
        keeper.discard(job)
