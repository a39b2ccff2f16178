"""What executes the steps of a flight, in threads and in tasks: which connection each step uses,
and what it leaves behind. No Redis runs here."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_redis_lock import threads
from django_redis_lock.protocol import Call
from django_redis_lock.singleflight import runners
from django_redis_lock.singleflight import tasks as in_tasks
from django_redis_lock.singleflight.runners import (
    Computation,
    ProducerFailed,
    ThreadRunner,
    arguments_of,
    pause_before,
    reading,
    refreshes_in_caller,
    trace_in,
    under_computation,
    use_background,
)
from django_redis_lock.singleflight.scripts import END_FLIGHT, READ
from django_redis_lock.singleflight.tasks import AsyncRunner, _within
from django_redis_lock.threads import InCaller, ThreadEvent
from django_redis_lock.transport import pack_words
from tests.processes import PATIENCE
from tests.support.clock import FakeClock, clock
from tests.support.connections import Connection

__all__ = ["clock"]

# Quick cells, each of which is another decision.
pytestmark = pytest.mark.sample(1)

OUT = RedisConnectionError("away")
CALL = Call(END_FLIGHT, (b"a",), (b"token",))
MARK: Any = ({("server", b"a"): "computation"},)


def thread_runner(**options: Any) -> Any:
    return ThreadRunner(redis.Redis(port=7601), **options)


@pytest.fixture
def run() -> Callable[..., Any]:
    """What steps return, in threads or in tasks."""

    def run(kind: str, make: Callable[[], Any]) -> Any:
        if kind == "thread":
            return thread_runner().do(make())

        async def main() -> Any:
            return await AsyncRunner(redis.asyncio.Redis(port=7601)).do(make())

        return asyncio.run(main())

    return run


def step(kind: str, result: Any = None) -> Any:
    """What a method of a runner returns."""

    async def awaitable() -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    return awaitable() if kind == "task" else result


KINDS = pytest.mark.parametrize("kind", ["thread", "task"])


@KINDS
def test_steps_are_done_and_functions_called(kind: str, run: Any) -> None:
    def steps() -> Any:
        first = yield step(kind, 1)
        value = yield Computation(lambda: 2)
        third = yield step(kind, 3)
        return first, value, third

    assert run(kind, steps) == (1, 2, 3)


@KINDS
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), StopIteration()])
def test_what_a_function_raises_comes_to_the_caller(
    kind: str, run: Any, error: BaseException
) -> None:
    seen: list[BaseException] = []

    def fail() -> None:
        raise error

    def steps() -> Any:
        try:
            yield Computation(fail)
        except ProducerFailed as failed:
            seen.append(failed.error)
            yield step(kind)
            raise

    expected = RuntimeError if kind == "task" and isinstance(error, StopIteration) else type(error)
    with pytest.raises(expected):
        run(kind, steps)
    assert seen == [error]


@KINDS
def test_an_error_that_the_steps_handle(kind: str, run: Any) -> None:
    def fail() -> None:
        raise ValueError

    def steps() -> Any:
        try:
            yield Computation(fail)
        except ProducerFailed:
            value = yield step(kind, 5)
            return value

    assert run(kind, steps) == 5


@KINDS
@pytest.mark.parametrize("fails", [True, False])
def test_what_is_computed_is_forgotten_at_the_end(kind: str, fails: bool) -> None:
    """Also if an interrupt keeps the block from that."""

    def steps() -> Any:
        under_computation.set(MARK)
        yield step(kind)
        if fails:
            raise ValueError("no")

    async def main() -> Any:
        with suppress(ValueError):
            await AsyncRunner(redis.asyncio.Redis(port=7601)).do(steps())
        return under_computation.get()

    if kind == "task":
        assert asyncio.run(main()) == ()
    else:
        with suppress(ValueError):
            thread_runner().do(steps())
        assert under_computation.get() == ()


def test_an_interrupt_between_two_steps_ends_them() -> None:
    """Their ``finally`` runs at once, and not when a traceback is dropped."""
    ended: list[int] = []

    class Interrupted:
        def __init__(self) -> None:
            self.steps = self._steps()

        def _steps(self) -> Any:
            try:
                yield 1
            finally:
                ended.append(1)

        def __next__(self) -> Any:
            return next(self.steps)

        def send(self, value: Any) -> Any:
            raise KeyboardInterrupt

        def close(self) -> None:
            self.steps.close()

    steps: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt) as caught:
        thread_runner().do(steps)
    assert ended == [1]
    del caught


def test_a_thread_does_not_await() -> None:
    coroutines: list[Any] = []

    async def compute() -> None: ...

    def begin() -> Any:
        coroutines.append(compute())
        return coroutines[0]

    def steps() -> Any:
        yield Computation(begin)

    with pytest.raises(TypeError, match=r"use aget_or_set\(\)"):
        thread_runner().do(steps())
    assert inspect.getcoroutinestate(coroutines[0]) == inspect.CORO_CLOSED


def test_a_task_awaits_what_functions_return(run: Any) -> None:
    async def value() -> int:
        return 5

    async def awaitable() -> Awaitable[int]:
        return value()

    def steps() -> Any:
        waits = yield Computation(awaitable)
        other = yield step("task", steps)  # No computation: what it returns is not awaited.
        return waits, other is steps

    assert run("task", steps) == (5, True)


def test_a_loop_that_ends_ends_the_steps_as_such() -> None:
    """What closes the coroutine is no error of the function."""
    seen: list[str] = []

    def steps() -> Any:
        try:
            yield Computation(asyncio.Event().wait)
        except GeneratorExit:
            seen.append("closed")
            raise
        except ProducerFailed:
            seen.append("failed")

    async def main() -> None:
        work = AsyncRunner(redis.asyncio.Redis(port=7601)).do(steps())
        work.send(None)
        work.close()

    asyncio.run(main())
    assert seen == ["closed"]


@pytest.mark.parametrize("length", [10, 600])
def test_a_failure_in_words(length: int) -> None:
    text = f"ValueError: {'x' * length}"
    assert ProducerFailed(ValueError("x" * length)).describe() == text[:500]


# -- the steps of threads --------------------------------------------------------------------------


def test_a_forked_child_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = thread_runner()
    sent: list[str] = []
    monkeypatch.setattr(runners, "run_all", lambda *_: sent.append("calls") or [5])
    monkeypatch.setattr(runners, "exchange_with", lambda *_: sent.append("command") or 6)
    assert (runner.run(CALL), runner.exchange(b"", 1)) == ([5], 6)
    monkeypatch.setattr(threads, "_process", threads.Process(-1))
    for call in (lambda: runner.run(CALL), lambda: runner.exchange(b"", 1)):
        with pytest.raises(RedisConnectionError, match="leaves the flight to its parent"):
            call()
    assert sent == ["calls", "command"]


class Reads:
    """How a value is read: by the client, which a tool observes; by plain commands; by a script."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, value: Any) -> None:
        self.ways: list[Any] = []
        self.observed, self.value = False, value
        monkeypatch.setattr(module, "is_observed", lambda client: self.observed)

    def by(self, way: str) -> Any:
        self.ways.append(way)
        if isinstance(self.value, Exception) and way != "script":
            raise self.value
        return f"by {way}"


@pytest.mark.parametrize(
    ("observed", "topology", "failing", "value", "ways"),
    [
        (False, False, False, None, ["commands"]),
        (True, False, False, None, ["client"]),
        (True, True, False, None, ["client"]),
        (False, True, False, None, ["script"]),
        (False, False, True, None, ["script"]),
        (True, False, True, None, ["script"]),
        (True, False, False, NoScriptError("NOSCRIPT"), ["client", "script"]),
        (False, False, False, OUT, ["commands", "script"]),
        (False, False, False, ResponseError("BUSY"), ["commands", "script"]),
    ],
)
@KINDS
def test_how_a_value_is_read(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    observed: bool,
    topology: bool,
    failing: bool,
    value: Any,
    ways: list[str],
) -> None:
    reads = Reads(monkeypatch, runners if kind == "thread" else in_tasks, value)
    reads.observed = observed

    def prepare(runner: Any) -> None:
        runner.server.breaker.answered()
        monkeypatch.setattr(runner.server, "is_topology", topology)
        if failing:
            runner.server.breaker.failed(OUT, 0.0)

    def read_value(client: Any, key: bytes, *, lifetime: bool) -> Any:
        assert (key, lifetime) == (b"a", True)
        return reads.by("commands")

    def evalsha(*words: Any) -> Any:
        assert words == (READ.sha, 1, b"a")
        return reads.by("client")

    def run(*calls: Call) -> Any:
        assert calls == (Call(READ, (b"a",), ()),)
        return [reads.by("script")]

    async def main() -> Any:
        client = redis.asyncio.Redis(port=7601)
        runner: Any = AsyncRunner(client)
        prepare(runner)

        async def aread_value(client: Any, key: bytes) -> Any:
            return reads.by("commands")

        async def aevalsha(*words: Any) -> Any:
            return evalsha(*words)

        async def arun(*calls: Call) -> Any:
            return run(*calls)

        monkeypatch.setattr(in_tasks, "aread_value", aread_value)
        monkeypatch.setattr(client, "evalsha", aevalsha)
        monkeypatch.setattr(runner, "run", arun)
        return await runner.read(b"a")

    if kind == "thread":
        runner = thread_runner()
        prepare(runner)
        monkeypatch.setattr(runners, "read_value", read_value)
        monkeypatch.setattr(runner._client, "evalsha", evalsha)
        monkeypatch.setattr(runner, "run", run)
        found = runner.read(b"a")
    else:
        found = asyncio.run(main())
    assert (found, reads.ways) == (f"by {ways[-1]}", ways)
    thread_runner().server.breaker.answered()


def test_a_script_by_its_name() -> None:
    call = Call(END_FLIGHT, (b"a", b"b"), (b"token", 5))
    assert arguments_of(call) == (END_FLIGHT.sha, 2, b"a", b"b", b"token", 5)


@pytest.mark.parametrize(("until", "seconds"), [(1002.0, 2.0), (999.0, 0.0)])
@pytest.mark.parametrize("came", [True, False])
def test_a_thread_waits_for_an_event(
    clock: FakeClock, until: float, seconds: float, came: bool
) -> None:
    waits: list[float] = []
    event = SimpleNamespace(wait=lambda seconds: waits.append(seconds) or came)
    assert thread_runner().wait_for_event(event, until) is came
    assert waits == [seconds]


def test_a_thread_pauses(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(runners.time, "sleep", slept.append)
    thread_runner().pause(0.1)
    assert slept == [0.1]
    called: list[int] = []
    thread_runner().call_soon(called.append, 5)
    assert called == [5]


def test_where_stale_values_are_refreshed() -> None:
    assert not refreshes_in_caller()
    mine = InCaller()
    before = use_background(mine)
    assert refreshes_in_caller()
    assert use_background(before) is mine
    assert not refreshes_in_caller()


@pytest.mark.parametrize("accepted", [True, False, MemoryError()])
def test_what_waits_in_the_background_is_renewed(
    monkeypatch: pytest.MonkeyPatch, accepted: Any
) -> None:
    jobs: list[Any] = []
    keeping = SimpleNamespace(add=jobs.append, discard=lambda job: jobs.append(("not", job)))
    monkeypatch.setattr(runners, "keeper", lambda: keeping)
    work: list[Any] = []

    def submit(*parts: Any) -> bool:
        work.extend(parts)
        if isinstance(accepted, BaseException):
            raise accepted
        return bool(accepted)

    def steps() -> Any:
        yield 1
        work.append("done")

    def afterwards() -> None: ...

    monkeypatch.setattr(runners, "background", SimpleNamespace(submit=submit))
    runner = thread_runner(afterwards=afterwards)
    if isinstance(accepted, BaseException):
        with pytest.raises(MemoryError):
            runner.run_in_background(steps(), "renewal")
    else:
        assert runner.run_in_background(steps(), "renewal") is accepted
    assert jobs == ["renewal", *([] if accepted is True else [("not", "renewal")])]
    assert work[1] is afterwards
    work[0]()
    assert work[2:] == ["done"]


def entry(*fields: bytes) -> Any:
    return [[b"stream", [[b"1-1", list(fields)]]]]


@pytest.mark.parametrize(
    ("reply", "trace"),
    [
        (None, ""),
        ([], ""),
        (entry(b"outcome", b"stored"), ""),
        (entry(b"outcome", b"stored", b"trace", b"00-1"), "00-1"),
        (entry(b"outcome", b"trace"), ""),
        ({b"stream": [[b"1-1", [b"outcome", b"x", b"trace", b"00-1"]]]}, "00-1"),
        ([*entry(b"outcome", b"x"), *entry("trace", "00-2")], "00-2"),
    ],
)
def test_the_trace_in_the_end_of_a_flight(reply: Any, trace: str) -> None:
    assert trace_in(reply) == trace


@pytest.mark.parametrize(
    ("until", "milliseconds", "pause"),
    [(1002.0, b"2000", 0.05), (1000.0301, b"31", 0.0301), (999.0, b"1", 0.0), (1000.0, b"1", 0.0)],
)
def test_how_long_redis_lets_a_follower_wait(
    clock: FakeClock, until: float, milliseconds: bytes, pause: float
) -> None:
    words = (b"XREAD", b"BLOCK", milliseconds, b"STREAMS", b"one", b"two", b"0-1", b"0-1")
    assert reading([b"one", b"two"], until) == pack_words(*words)
    assert pause_before(until) == pytest.approx(pause)


class Node:
    """Where a follower waits."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.did: list[Any] = []

    def in_one_call(self, streams: Any) -> Any:
        return streams[:1]

    def locate(self, streams: Any) -> Any:
        assert streams == (b"one",)
        return self

    def seen_at(self, streams: Any) -> Any:
        self.locate(streams)
        return self.primary

    #: That of the streams, None if it is not known.
    primary: Any = None

    def checkout(self) -> Any:
        if isinstance(self.connection, Exception):
            raise self.connection
        return self.connection

    def checkin(self, connection: Any) -> None:
        self.did.append("kept")

    def answered(self) -> None:
        self.did.append("answered")

    def on_error(self, error: Any) -> None:
        self.did.append(error)


class Blocking(Connection):
    def can_read(self, timeout: float = 0) -> bool:
        self.patience = timeout
        return bool(self.replies)

    async def request(self, command: bytes) -> Any:
        self.sent.append(command)
        if not self.replies:
            await asyncio.Event().wait()
        return self.read_response()


TRACE = entry(b"trace", b"00-1")
BROKEN = RedisTimeoutError("frozen")


@pytest.mark.parametrize(
    ("connection", "did", "outcome"),
    [
        (Blocking(TRACE), ["answered", "kept"], "00-1"),
        (Blocking(), [], ""),
        (Blocking(), [], None),
        (Blocking(BROKEN), [BROKEN, 0.05], ""),
        (OUT, [OUT, 0.05], ""),
        (Blocking(ResponseError("NOPERM")), None, ResponseError),
    ],
)
def test_a_thread_waits_for_the_end_of_a_flight(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, connection: Any, did: Any, outcome: Any
) -> None:
    runner = thread_runner()
    runner.server = node = Node(connection)
    monkeypatch.setattr(runners.time, "sleep", node.did.append)
    until = 999.0 if outcome is None else 1002.0

    def wait() -> Any:
        return runner.wait_for_leader((b"one", b"two"), until)

    if outcome is None or isinstance(outcome, str):
        assert wait() == (outcome or "")
        assert node.did == did
    else:
        with pytest.raises(outcome):
            wait()
        assert len(node.did) == 1
    if isinstance(connection, Blocking):
        assert connection.sent == [reading([b"one"], until)]
        assert connection.patience == max(0.0, until - clock.now)
        assert connection.closed is (node.did != ["answered", "kept"])


@pytest.mark.parametrize(
    ("connection", "known", "until", "did", "outcome"),
    [
        (Blocking(TRACE), False, 1e9, ["answered"], "00-1"),
        (Blocking(TRACE), True, 1e9, ["answered"], "00-1"),
        (Blocking(), False, 0.0, [], ""),
        (Blocking(BROKEN), False, 1e9, [BROKEN, 0.05], ""),
        (OUT, False, 1e9, [OUT, 0.05], ""),
        (Blocking(ResponseError("NOPERM")), False, 1e9, None, ResponseError),
    ],
)
def test_a_task_waits_for_the_end_of_a_flight(
    monkeypatch: pytest.MonkeyPatch,
    connection: Any,
    known: bool,
    until: float,
    did: Any,
    outcome: Any,
) -> None:
    node = Node(connection)

    async def aconnect(client: Any, streams: Any, timeout: float) -> Any:
        assert (streams, timeout) == ((b"one",), 5.0)
        return node.checkout()

    async def asleep(seconds: float) -> None:
        node.did.append(seconds)

    monkeypatch.setattr(in_tasks, "aconnect", aconnect)
    monkeypatch.setattr(in_tasks.time, "asleep", asleep)

    if known:
        node.primary = Node(None)

    async def main() -> Any:
        runner: Any = AsyncRunner(redis.asyncio.Redis(port=7601))
        runner.server = node
        return await asyncio.wait_for(runner.wait_for_leader((b"one", b"two"), until), PATIENCE)

    if isinstance(outcome, str):
        assert asyncio.run(main()) == outcome
        assert (node.primary.did if known else node.did) == did
    else:
        with pytest.raises(outcome):
            asyncio.run(main())
        assert len(node.did) == 1
    if isinstance(connection, Blocking):
        assert connection.closed


# -- the steps of tasks ----------------------------------------------------------------------------


def test_what_is_done_in_any_case_outlasts_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    async def main() -> None:
        go_on = asyncio.Event()

        async def arun_all(client: Any, calls: Any) -> Any:
            await go_on.wait()
            ran.append(len(calls))
            return [5] * len(calls)

        monkeypatch.setattr(in_tasks, "arun_all", arun_all)
        runner = AsyncRunner(redis.asyncio.Redis(port=7601))
        for done in (True, False):
            task = asyncio.create_task(runner.run(CALL, CALL, done=done))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        go_on.set()
        assert await runner.run(CALL) == [5]
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert sorted(ran) == [1, 2]


@pytest.mark.parametrize("in_caller", [True, False])
def test_a_refresh_in_the_background_of_a_loop(in_caller: bool) -> None:
    ran: list[int] = []

    def steps() -> Any:
        yield step("task")
        ran.append(1)

    async def main() -> list[int]:
        runner = AsyncRunner(redis.asyncio.Redis(port=7601))
        assert await runner.run_in_background(steps(), None) is True
        before = [*ran]
        for _ in range(5):
            await asyncio.sleep(0)
        return before

    other = InCaller() if in_caller else runners.background
    before = use_background(other)
    try:
        assert asyncio.run(main()) == ([1] if in_caller else [])
    finally:
        use_background(before)
    assert ran == [1]


def test_what_the_keeper_calls_in_a_loop() -> None:
    called: list[int] = []

    async def main() -> Any:
        runner = AsyncRunner(redis.asyncio.Redis(port=7601))
        runner.call_soon(called.append, 5)
        assert called == []
        await asyncio.sleep(0)
        return runner

    runner = asyncio.run(main())
    runner.call_soon(called.append, 6)  # Its loop has ended.
    assert called == [5]


def test_who_stands_for_the_callers_of_a_loop() -> None:
    async def main() -> None:
        client = redis.asyncio.Redis(port=7601)
        alone, for_thread = AsyncRunner(client), AsyncRunner(client, "thread")
        assert (alone.in_thread, alone.group) == (False, asyncio.get_running_loop())
        assert (for_thread.in_thread, for_thread.group) == (True, "thread")

    asyncio.run(main())
    assert (ThreadRunner.in_thread, ThreadRunner.group) == (True, None)
    assert isinstance(ThreadRunner.new_event(), ThreadEvent)


def test_a_client_for_threads_is_not_observed_in_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leads to a cluster, or asks sentinels."""
    monkeypatch.setattr(in_tasks, "is_observed", lambda client: True)

    async def main() -> list[bool]:
        clients: list[Any] = [redis.asyncio.Redis(port=7601), redis.Redis(port=7601)]
        return [AsyncRunner(client).is_observed for client in clients]

    assert asyncio.run(main()) == [True, False]


def test_a_wait_of_tasks_ends_in_time() -> None:
    async def main() -> None:
        event = asyncio.Event()
        runner = AsyncRunner(redis.asyncio.Redis(port=7601))
        assert await runner.wait_for_event(event, 0.0) is False
        event.set()
        assert await runner.wait_for_event(event, 1e9) is True
        cancelled: list[bool] = []

        async def hang() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        task = asyncio.ensure_future(hang())
        await asyncio.sleep(0)
        assert await _within(task, 0.0) is None
        await asyncio.wait({task})
        assert cancelled == [True]

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize(("until", "seconds"), [(1002.0, 2.0), (999.0, 0.0)])
def test_how_long_a_task_waits(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, until: float, seconds: float
) -> None:
    waits: list[float] = []

    async def wait(tasks: Any, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(in_tasks.time, "wait", wait)

    async def main() -> None:
        assert await _within(asyncio.sleep(0), until) is None

    asyncio.run(main())
    assert waits == [seconds]


def test_a_task_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def asleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(in_tasks.time, "asleep", asleep)
    asyncio.run(_pause())
    assert slept == [0.1]


async def _pause() -> None:
    await AsyncRunner(redis.asyncio.Redis(port=7601)).pause(0.1)
