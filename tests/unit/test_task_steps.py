"""What tasks do where threads do something else: their connections, their states, and their end
when a lock is lost. No Redis runs here."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.exceptions import NoScriptError

from django_redis_lock import AsyncLock, LockLost
from django_redis_lock.clock import time
from django_redis_lock.keeper import DeferredRelease, Keeper, SentOnce
from django_redis_lock.locking import aio
from django_redis_lock.locking.aio import LossCancellation, aconfirm, cancellations
from django_redis_lock.locking.hold import Hold, latest
from django_redis_lock.locking.local_state import (
    Entry,
    State,
    TaskStates,
    acting_task,
    enter_again,
    is_held_by_caller,
    is_inside,
    note_entry,
    under_way,
)
from django_redis_lock.locking.waiting import queues, tasks
from django_redis_lock.locking.waiting.queue import join
from django_redis_lock.locking.waiting.tasks import (
    PendingAnswer,
    TaskQueue,
    TaskWaiter,
    TaskWakeEvent,
)
from django_redis_lock.protocol.acquisition import (
    LAST_TRY_SECONDS,
    AcquireRequest,
    Acquisition,
    Extended,
)
from django_redis_lock.protocol.holder_scripts import CLOCK
from django_redis_lock.protocol.keys import lock_keys
from django_redis_lock.protocol.lock_scripts import RELEASE
from django_redis_lock.protocol.script import Call
from django_redis_lock.transport import Answer, pack
from tests.processes import PATIENCE

from .test_waiting_steps import LEFT, Nowhere, grant, request

KEYS = lock_keys(b"report")
CALL = Call(CLOCK, (), ())
AWAY = redis.ConnectionError("away")
FENCE = 1_800_000_000_000_000
REFUSED = b"20000 %d" % FENCE


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the keeper is given to do."""
    noted: list[Any] = []
    monkeypatch.setattr(Keeper, "add", lambda keeper, job: noted.append(job))
    monkeypatch.setattr(Keeper, "discard", lambda keeper, job: None)
    monkeypatch.setattr(Keeper, "hurry", lambda keeper: noted.append("hurry"))
    yield noted
    queues.clear()
    latest.clear()


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(work(), PATIENCE)

    return asyncio.run(main())


class Connection:
    """Its calls end as ``outcomes`` say; ``...``: not yet."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.sent: list[Any] = []
        self.replies: list[asyncio.Future[Any]] = []
        self.done: list[str] = []

    def request(self, command: bytes, replies: int | None = None) -> asyncio.Future[Any]:
        self.sent.append(command)
        self.expected = replies
        future = asyncio.get_running_loop().create_future()
        self.replies.append(future)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        elif outcome is not ...:
            future.set_result(outcome)
        return future

    def disconnect(self) -> None:
        self.done.append("disconnect")

    def cut(self) -> None:
        self.done.append("cut")


# -- the answer about a grant ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcomes", "confirmed", "fails"),
    [
        ([1], 1100.0, False),
        ([0], -math.inf, False),
        ([NoScriptError(), 1], 1100.0, False),
        ([AWAY], None, True),
        ([...], None, True),
    ],
)
def test_the_answer_about_a_grant(
    jobs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    outcomes: Any,
    confirmed: float | None,
    fails: bool,
) -> None:
    monkeypatch.setattr(tasks, "ANSWER_TIMEOUT_SECONDS", 0.01 if outcomes == [...] else PATIENCE)

    async def main() -> None:
        connection: Any = Connection(*outcomes)
        pending = PendingAnswer(connection, CALL, 1100.0)
        assert pending.read_reply(True) is None
        assert await pending.confirmed() == confirmed
        assert pending.read_reply(False) == confirmed
        assert connection.sent == [pack(CALL), pack(CALL, known=False)][: len(outcomes)]
        assert connection.done == ["disconnect"] * fails
        assert jobs == ["hurry"] * fails

    run(main)


def test_an_answer_whose_loop_has_ended_is_not_known() -> None:
    async def main() -> Any:
        connection: Any = Connection(...)
        pending = PendingAnswer(connection, CALL, 1100.0)
        await asyncio.sleep(0)
        return pending

    pending = run(main)
    assert pending.read_reply(True) is None


# -- the queue of a loop ---------------------------------------------------------------------------


def queue_of(wanted: AcquireRequest | None = None) -> tuple[TaskQueue, Any]:
    node = Nowhere()
    return TaskQueue(node, wanted or request(), asyncio.get_running_loop()), node


def test_a_connection_for_pops_is_made_once_and_has_no_answer_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    async def aconnect(client: Any, keys: Any, timeout: float) -> Any:
        made.append((keys, timeout))
        return connection

    monkeypatch.setattr(tasks, "aconnect", aconnect)
    connection: Any = Connection(1, [b"list", b"element"])

    async def main() -> None:
        queue, node = queue_of()
        client: Any = None
        await queue.connect(client)
        assert (queue.node, queue.connection) == (node, connection)
        assert made == [(KEYS, 5.0)]
        pending = await queue.send_take_grant(CALL, 1100.0)
        await queue.connect(client)
        assert len(made) == 1
        assert pending.read_reply(False) == 1100.0
        assert queue.pending is None
        await queue.begin_pop(b"pop")
        assert await queue.pop_ended(PATIENCE)
        late = queue.reading = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(late.set_result, [b"list", b"element"])
        assert await queue.pop_ended(PATIENCE)
        assert queue.reply() == [b"list", b"element"]
        assert queue.reading is None

    run(main)


def test_a_queue_that_ends_closes_its_connection_after_the_answer(jobs: list[Any]) -> None:
    async def main() -> None:
        queue, _ = queue_of()
        connection: Any = Connection(...)
        queue.connection = connection
        await queue.send_take_grant(CALL, 1100.0)
        queue.end()
        assert queue.connection is queue.pending is None
        for _ in range(5):
            await asyncio.sleep(0)
        assert connection.done == []
        connection.replies[0].set_result(1)
        while not connection.done:
            await asyncio.sleep(0)
        queue.end()
        queue.connection = bare = Connection()
        queue.end()
        while not bare.done:
            await asyncio.sleep(0)
        assert (connection.done, bare.done) == (["disconnect"], ["disconnect"])
        queue.connection = cut = Connection()
        await asyncio.to_thread(queue.end)
        assert cut.done == ["cut"]

    run(main)


def test_a_queue_is_woken_from_another_thread() -> None:
    async def main() -> tuple[Any, Any]:
        queue, _ = queue_of()
        queue.wake()  # It waits for nothing.
        connection: Any = Connection()
        queue.connection = connection
        await asyncio.to_thread(queue.wake)
        await asyncio.sleep(0)
        assert connection.done == ["disconnect"]
        return queue, connection

    queue, connection = run(main)
    queue.wake()
    assert connection.done == ["disconnect", "cut"]


def test_what_is_dropped_is_closed(jobs: list[Any]) -> None:
    async def main() -> None:
        queue, _ = queue_of()
        await queue.disconnect()
        connection: Any = Connection(...)
        queue.connection = connection
        await queue.begin_pop(b"pop")
        reading = queue.reading
        await queue.disconnect()
        assert reading is not None
        assert reading.cancelled()
        assert connection.done == ["disconnect"]
        assert queue.connection is queue.reading is queue.pending is None

    run(main)


# -- a task that waits -----------------------------------------------------------------------------


def waiter_of(monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> tuple[Any, Any, list[Any]]:
    """A task's waiter, its connection, and what it calls."""
    calls: list[Any] = []

    async def arun(client: Any, call: Call, *, patience: float | None = None) -> Any:
        calls.append((call, patience))
        return Answer(7, False)

    monkeypatch.setattr(tasks, "server_of", lambda client: Nowhere())
    monkeypatch.setattr(tasks, "arun", arun)
    client: Any = None
    waiter = TaskWaiter(client, request())
    connection: Any = Connection(*outcomes)
    waiter.queue.connection = connection
    join(waiter, waiter.queue, waiter._new_turn)
    return waiter, connection, calls


@pytest.mark.parametrize(("popped", "released"), [(LEFT, []), (grant(), [b"T"])])
def test_a_task_that_is_cancelled_passes_its_grant_on(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch, popped: Any, released: list[bytes]
) -> None:
    async def main() -> None:
        waiter, connection, calls = waiter_of(monkeypatch, popped)
        await waiter.queue.begin_pop(b"pop")
        await waiter._cancel_pop()
        (leave, patience), *others = calls
        assert (leave.args[0], patience) == (b"", LAST_TRY_SECONDS)
        assert [call.args[0] for call, _ in others] == released
        assert connection.done == ["disconnect"]
        assert waiter.queue.connection is waiter.queue.reading is None
        assert waiter._reply == popped
        await waiter._cancel_pop()  # There is none any more.
        assert len(calls) == 1 + len(released)

    run(main)


def test_only_the_first_of_a_queue_has_a_pop_to_cancel(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        waiter, connection, calls = waiter_of(monkeypatch, ...)
        await waiter.queue.begin_pop(b"pop")
        waiter.queue.waiters.appendleft(SimpleNamespace(turn=None))
        await waiter._cancel_pop()
        assert not calls
        assert connection.done == []
        waiter.queue.waiters.popleft()
        monkeypatch.setattr(tasks, "ANSWER_TIMEOUT_SECONDS", 0.01)
        await waiter._cancel_pop()  # Its end does not come.
        assert connection.done == ["disconnect"]

    run(main)


@pytest.mark.parametrize(
    ("error", "popped", "released", "done"),
    [
        (ValueError(), ..., 0, ["disconnect"]),
        (GeneratorExit(), grant(), 1, []),
        (GeneratorExit(), LEFT, 0, []),
        (GeneratorExit(), ..., 0, []),
        (GeneratorExit(), AWAY, 0, []),
    ],
)
def test_a_wait_that_ends_with_an_error_reads_no_more(
    jobs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    popped: Any,
    released: int,
    done: list[str],
) -> None:
    async def main() -> None:
        waiter, connection, _ = waiter_of(monkeypatch, popped)
        waiter._stop_reading(error)
        assert connection.done == []
        await waiter.queue.begin_pop(b"pop")
        waiter._stop_reading(error)
        assert waiter.queue.reading is None
        assert connection.done == done
        assert [type(job) for job in jobs] == [DeferredRelease] * released

    run(main)


def test_each_end_of_a_wait_leaves_the_queue(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(outcome: Any) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome
        yield

    async def main() -> None:
        for outcome, expected in ((5, 5), (AWAY, AWAY), (asyncio.CancelledError(), None)):
            waiter, connection, calls = waiter_of(monkeypatch, LEFT if expected is None else ...)
            await waiter.queue.begin_pop(b"pop")
            waiter.queue.registered, waiter.queue._may_be_registered = True, False
            monkeypatch.setattr(waiter, "_wait", lambda refused, outcome=outcome: steps(outcome))
            if isinstance(outcome, int):
                assert await waiter.wait() == expected
            else:
                with pytest.raises(type(outcome)):
                    await waiter.wait()
                assert waiter.queue.reading is None
                assert connection.done == ["disconnect"]
            # Whatever came of the call that was to unregister it.
            assert [type(job) for job in jobs] == [SentOnce] * (outcome != 5)
            jobs.clear()
            assert len(calls) == (expected is None)
            assert not waiter.queue.waiters
            assert waiter.queue.closed

    run(main)


def test_a_task_pauses_between_two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def main() -> None:
        waiter, _, _ = waiter_of(monkeypatch)
        monkeypatch.setattr(time, "asleep", sleep)
        await waiter._sleep(1.5)

    run(main)
    assert slept == [1.5]


def test_the_turn_of_a_task() -> None:
    async def main() -> Any:
        turn = TaskWakeEvent()
        assert not await turn.wait(0)
        asyncio.get_running_loop().call_soon(turn.set)
        assert await turn.wait(PATIENCE)
        turn = TaskWakeEvent()
        turn.set()
        turn.set()
        assert await turn.wait(PATIENCE)
        assert await turn.wait(0)
        return TaskWakeEvent()

    late = run(main)
    late.set()  # Its loop is closed.
    assert not late._event.done()


# -- replicas, and the confirmation of a grant -----------------------------------------------------


@pytest.mark.parametrize("answers", [True, False])
def test_replicas_confirm(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    connection: Any = Connection([1, 2] if answers else ...)
    monkeypatch.setattr(aio, "REPLY_MARGIN_SECONDS", 0.01)

    async def aconnect(client: Any, keys: Any, timeout: float) -> Any:
        assert timeout == 0.01
        return connection

    waits: list[Any] = []
    wait_for = asyncio.wait_for

    def noted(work: Any, timeout: float) -> Any:
        waits.append(timeout)
        return wait_for(work, timeout)

    monkeypatch.setattr(aio, "aconnect", aconnect)
    monkeypatch.setattr(asyncio, "wait_for", noted)

    async def main() -> None:
        client: Any = None
        confirming = aconfirm(client, KEYS, b"T", 2, 0.01)
        if answers:
            confirmed = await confirming
            assert (confirmed.held, confirmed.replicas) == (True, 2)
            assert connection.expected == 2
            assert 0.02 in waits
        else:
            with pytest.raises(redis.TimeoutError):
                await confirming
        assert connection.done == ["disconnect"]

    run(main)


def lock_of(**options: Any) -> AsyncLock:
    return AsyncLock(redis.asyncio.Redis(port=1), "report", 30, **options)


def give(lock: AsyncLock, lifetime: float = 30.0) -> Hold:
    """Let the task that runs hold the lock."""
    renewals = lock._new_renewals()
    now = time.monotonic()
    granted = Acquisition(b"token", FENCE, now, now + lifetime)
    return lock._start_renewal(granted, renewals)


def test_a_grant_is_confirmed_before_a_change() -> None:
    async def main() -> None:
        lock = lock_of()
        hold = give(lock)
        asked: list[str] = []

        async def confirmed() -> None:
            asked.append("confirmed")

        class Pending:
            def read_reply(self, wait: bool) -> float:
                asked.append("read")
                return math.inf

        pending: Any = Pending()
        pending.confirmed = confirmed
        hold.pending = pending
        await lock._confirm_lifetime(hold)
        assert asked == ["confirmed", "read"]
        assert hold.pending is None
        await lock._confirm_lifetime(hold)
        assert lock._loop() is asyncio.get_running_loop()

    run(main)


# -- the task for which a method acts --------------------------------------------------------------


def test_a_method_acts_for_the_task_that_called_it() -> None:
    async def main() -> None:
        async def method() -> Any:
            return acting_task()

        acting = aio.for_the_caller(method)
        assert inspect.iscoroutinefunction(acting) or sys.version_info < (3, 12)
        assert asyncio.iscoroutinefunction(acting)
        here = asyncio.current_task()
        work = acting()
        assert await asyncio.create_task(work) is here
        assert await acting() is here
        assert under_way.get() is None
        assert acting_task() is here
        other = await asyncio.create_task(_called_and_run(acting))
        assert other is not here

    run(main)
    assert acting_task() is None


async def _called_and_run(method: Any) -> Any:
    assert await method() is asyncio.current_task()
    return asyncio.current_task()


def test_a_task_that_a_method_has_started_acts_for_itself() -> None:
    """It has a copy of the context."""

    async def main() -> None:
        async def method() -> Any:
            return await asyncio.create_task(_acting())

        assert await aio.for_the_caller(method)() is not asyncio.current_task()

    run(main)


async def _acting() -> Any:
    assert acting_task() is asyncio.current_task()
    return acting_task()


def test_each_task_has_its_own_state() -> None:
    async def mine(states: TaskStates) -> State:
        state = states.mine()
        assert states.mine() is state
        assert state.token == b"first"
        assert state.task is not None
        assert state.task() is asyncio.current_task()
        return state

    async def main() -> None:
        states = TaskStates(b"first")
        here = await mine(states)
        there = await asyncio.create_task(mine(states))
        assert here is not there
        here.token = None
        assert states.mine().token is None

    run(main)
    outside = TaskStates(b"first")
    assert outside.mine() is outside.mine()
    assert outside.mine().token == b"first"
    assert outside.mine().task is None


# -- inside ----------------------------------------------------------------------------------------


def make_hold(lifetime: float) -> Hold:
    now, hold = time.monotonic(), Hold(lifetime)
    hold.begin(Acquisition(b"token", FENCE, now, now + lifetime), KEYS)
    return hold


def entry_of(hold: Hold) -> tuple[Entry, State]:
    outer = State()
    outer.hold, outer.token = hold, b"token"
    return Entry(outer, 30.0, 0.5), outer


def test_who_goes_in_again_goes_out_as_often() -> None:
    hold = make_hold(30)
    hold.on_end = lambda: None
    entry, outer = entry_of(hold)
    inner = State()
    told: list[str] = []
    assert (entry.depth, entry.times(outer), entry.times(inner)) == (1, 1, 0)
    assert entry.enter(inner, lambda: told.append("inner"))
    assert entry.enter(inner, lambda: told.append("again"))
    assert (entry.depth, entry.times(inner)) == (3, 2)
    assert (inner.entry, inner.hold, inner.token) == (entry, hold, b"token")
    assert [tell() for tell in hold.also_on_lost.values()]
    assert told == ["inner"]
    assert entry.leave(inner)
    assert (entry.times(inner), inner.token) == (1, b"token")
    assert len(hold.also_on_lost) == 1
    assert entry.leave(inner)
    assert entry.times(inner) == 0
    assert inner.token is inner.renewal is inner.entry is None
    left = inner.hold
    assert left is not None
    assert left is not hold
    assert (left.ended, left.on_end, hold.ended) == (True, None, False)
    assert not hold.also_on_lost
    assert not entry.leave(inner)  # An interrupt has cut short how it was left.
    assert not entry.leave(outer)  # There is only the lock to release.
    assert entry.times(outer) == 1
    assert (entry.timeout, entry.min_hold) == (30.0, 0.5)


def test_a_lock_that_was_just_lost_is_not_gone_into() -> None:
    hold = make_hold(30)
    entry, _ = entry_of(hold)
    other = State()
    assert entry.enter(other, lambda: None)
    hold.ended = True
    inner = State()
    assert not entry.enter(inner, lambda: None)
    assert inner.entry is None
    assert [key() for key in hold.also_on_lost] == [other]
    del other
    gc.collect()
    assert not entry.enter(inner, None)
    assert not hold.also_on_lost  # Nor of those who are gone.


def test_a_forked_child_leaves_nothing() -> None:
    hold = make_hold(30)
    entry, _ = entry_of(hold)
    inner = State()
    entry.enter(inner, None)
    hold.process = None
    assert not entry.leave(inner)
    assert entry.times(inner) == 1


def test_a_task_is_inside_what_it_holds_itself() -> None:
    async def main() -> None:
        lock, other = lock_of(reentrant=True), lock_of(reentrant=True)
        assert not is_inside(lock)
        assert not enter_again(lock)
        hold = give(lock)
        note_entry(lock)
        assert lock.local.entry is not None
        assert is_inside(other)
        assert not is_inside(lock_of())
        assert not await asyncio.create_task(_is_inside(other))
        assert enter_again(other)
        assert lock.local.entry.depth == 2
        assert not hold.also_on_lost
        third = lock_of(reentrant=True, on_lost=lambda: None)
        assert enter_again(third)
        assert len(hold.also_on_lost) == 1
        hold.ended = True
        assert not is_inside(other)

    run(main)


async def _is_inside(lock: AsyncLock) -> bool:
    return is_inside(lock)


def test_who_holds_a_lock_by_any_object() -> None:
    async def main() -> None:
        lock, other = lock_of(), lock_of()
        assert not is_held_by_caller(other)
        hold = give(lock)
        assert is_held_by_caller(other)
        assert not await asyncio.create_task(_is_held(other))
        hold.task = None  # It is not known.
        assert not is_held_by_caller(other)
        hold.ended = True
        assert not is_held_by_caller(other)

    run(main)


async def _is_held(lock: AsyncLock) -> bool:
    return is_held_by_caller(lock)


# -- the methods -----------------------------------------------------------------------------------


class Scripted(AsyncLock):
    """Its calls return, or raise, what a test has put there."""

    def __init__(self, *outcomes: Any, **options: Any) -> None:
        self.outcomes = list(outcomes)
        self.calls: list[Any] = []
        super().__init__(redis.asyncio.Redis(port=1), "report", 30, **options)

    async def _send_acquire(self, request: AcquireRequest) -> Any:
        return self._next()

    async def _run(self, call: Call) -> Answer:
        self.calls.append(call)
        return Answer(self._next(), False)

    def _next(self) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def test_a_task_changes_and_releases_its_lock() -> None:
    async def main() -> None:
        lock = Scripted(FENCE, Extended.DONE, Extended.DONE, 1)
        assert await lock.acquire() is True
        assert lock.local.entry is None
        assert await lock.extend(5) is True
        assert await lock.extend(5, replace_ttl=True) is True
        assert lock.local.hold is not None
        assert 4 < lock.local.hold.deadline - time.monotonic() <= 5
        await lock.release()
        changed = [call.args[1:3] for call in lock.calls[:2]]
        assert changed == [(5000, "0"), (5000, "1")]
        assert lock.calls[2].script is RELEASE
        assert lock.local.token is None
        again = Scripted(FENCE, Extended.DONE)
        assert await again.acquire()
        assert await again.reacquire() is True
        assert again.calls[0].args[1:3] == (30_000, "1")
        assert await Scripted(REFUSED).acquire(blocking=False) is False

    run(main)


def test_a_task_goes_in_again_without_a_call() -> None:
    async def main() -> None:
        lock = Scripted(FENCE, 1, REFUSED, reentrant=True)
        assert await lock.acquire()
        assert await lock.acquire() is True
        assert lock.local.entry is not None
        assert lock.local.entry.depth == 2
        await lock.release()
        assert not lock.calls
        await lock.release()
        assert [call.script for call in lock.calls] == [RELEASE]
        assert await lock.acquire(blocking=False) is False
        assert lock.local.entry is None

    run(main)


@pytest.mark.parametrize(
    ("error", "left"), [(asyncio.CancelledError(), True), (AWAY, False), (OSError(), False)]
)
def test_what_a_task_could_not_finish_is_left_to_the_keeper(
    jobs: list[Any], error: BaseException, left: bool
) -> None:
    """A release that Redis did not answer may be tried again."""

    def releases() -> int:
        return [type(job) for job in jobs].count(DeferredRelease)

    async def main() -> None:
        lock = Scripted(FENCE, error)
        assert await lock.acquire()
        with pytest.raises(type(error)):
            await lock.release()
        assert (releases(), lock.local.token is None) == (left, left)
        refused = Scripted(error)
        with pytest.raises(type(error)):
            await refused.acquire()
        assert releases() == left + 1

    run(main)


@pytest.mark.parametrize(
    ("outcome", "body_fails", "raises"),
    [(0, False, True), (0, True, False), (AWAY, False, True), (AWAY, True, False)],
)
def test_a_release_that_fails_hides_no_error_of_the_block(
    jobs: list[Any], outcome: Any, body_fails: bool, raises: bool
) -> None:
    async def main() -> None:
        lock = Scripted(FENCE, outcome, [b"", b"", b"", b"", b""])

        async def block() -> None:
            async with lock:
                if body_fails:
                    raise ZeroDivisionError

        with pytest.raises(redis.RedisError if raises else ZeroDivisionError):
            await block()
        assert lock.local.token is None

    run(main)


def test_in_a_forked_child_the_end_of_a_block_does_nothing() -> None:
    async def main() -> None:
        lock = Scripted(FENCE)
        async with lock:
            hold, renewals = lock.local.hold, lock.local.renewal
            assert hold is not None
            assert renewals is not None
            # Should the block's end be missed, the keeper releases the lock.
            assert all(job.kept_by and job.kept_by.__callback__ for job in renewals.jobs)
            hold.process = None
        assert not lock.calls
        assert lock.local.token is not None

    run(main)


# -- a loss ----------------------------------------------------------------------------------------


def test_a_loss_cancels_the_task_of_the_block_once() -> None:
    async def main() -> None:
        for lose in (1, 2):
            cancellation = LossCancellation(0)
            for _ in range(lose):
                cancellation.request()
            with pytest.raises(asyncio.CancelledError) as error:
                await asyncio.sleep(PATIENCE)
            assert cancellation.has_caused(error.value)
        left = LossCancellation(0)
        assert not left.has_caused(None)
        left.request()
        await asyncio.sleep(0)  # The block has ended.
        await asyncio.sleep(0)
        late = LossCancellation(0)
        late._requested = True
        assert not late.has_caused(ValueError())

    run(main)


@pytest.mark.parametrize(
    ("must_cancel", "waits_for", "cancelled"),
    [
        (True, None, True),
        (False, None, False),
        (False, False, False),
        (False, True, True),
        (None, False, False),
    ],
)
def test_before_python_3_11_a_task_that_is_being_cancelled_shows_it(
    monkeypatch: pytest.MonkeyPatch, must_cancel: Any, waits_for: Any, cancelled: bool
) -> None:
    task: Any = SimpleNamespace()
    if must_cancel is not None:
        task._must_cancel = must_cancel
    if waits_for is not None:
        task._fut_waiter = SimpleNamespace(cancelled=lambda: waits_for)
    assert not aio._is_cancelled_already(task) or sys.version_info < (3, 11)
    monkeypatch.setattr(aio, "sys", SimpleNamespace(version_info=(3, 10)))
    assert aio._is_cancelled_already(task) is cancelled


@pytest.mark.skipif(sys.version_info < (3, 11), reason="such a task does not count who cancels it")
def test_a_cancellation_by_another_remains_one() -> None:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        cancellation = LossCancellation(0)
        cancellation.request()
        task.get_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError) as error:
            await asyncio.sleep(PATIENCE)
        assert not cancellation.has_caused(error.value)
        assert task.cancelling() == 1
        task.uncancel()

    run(main)


@pytest.mark.parametrize("lost", ["in the block", "before it", "not at all"])
def test_a_block_whose_lock_was_lost_ends_with_that(lost: str) -> None:
    async def main() -> None:
        lock = lock_of(cancel_on_lost=True, raise_on_release_error=False)

        async def acquire() -> bool:
            hold = give(lock)
            if lost == "before it":
                hold.lose("it is gone")
            return True

        async def released(call: Any) -> Any:
            return Answer(1, False)

        lock.acquire, lock._run = acquire, released

        async def block() -> None:
            async with lock:
                hold = lock.local.hold
                assert hold is not None
                assert hold in cancellations
                if lost == "in the block":
                    hold.lose("it is gone")
                await asyncio.sleep(0 if lost == "not at all" else PATIENCE)

        if lost == "not at all":
            await block()
        else:
            with pytest.raises(LockLost, match="its task was cancelled: it is gone") as error:
                await block()
            assert isinstance(error.value.__cause__, asyncio.CancelledError)
        assert not any(not hold.ended for hold in cancellations)

    run(main)


def test_without_the_option_a_loss_cancels_nothing() -> None:
    async def main() -> None:
        lock = lock_of()
        hold = give(lock)
        lock._entered()
        assert hold not in cancellations
        assert not lock._is_cancelled_by_loss(None)
        cancelling = lock_of(cancel_on_lost=True)
        cancelling._entered()  # It was taken without Redis.
        hold = give(cancelling)
        cancelling._entered()
        first = cancellations[hold]
        cancelling._entered()
        assert cancellations[hold] is first
        assert len(hold.also_on_lost) == 1
        first.depth = 5
        assert not cancelling._is_cancelled_by_loss(None)  # It is that of a block around this one.
        assert hold in cancellations
        first.depth = 0
        assert not cancelling._is_cancelled_by_loss(None)
        assert hold not in cancellations

    run(main)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_coroutine", [False, True])
def test_on_lost_is_called_in_the_loop(
    fails: bool, is_coroutine: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        called, variable = asyncio.Event(), contextvars.ContextVar("variable", default=0)
        seen: list[Any] = []

        def on_lost() -> None:
            seen.append((threading.get_ident(), variable.get()))
            called.set()
            if fails:
                raise ZeroDivisionError

        async def coroutine() -> None:
            await asyncio.sleep(0)
            on_lost()

        variable.set(1)
        tell = aio._in_loop(
            asyncio.get_running_loop(), coroutine if is_coroutine else on_lost, b"report"
        )
        variable.set(2)
        await asyncio.to_thread(tell)
        await called.wait()
        await asyncio.sleep(0)
        assert seen == [(threading.get_ident(), 1)]
        assert ("on_lost failed" in caplog.text) is fails

    run(main)
