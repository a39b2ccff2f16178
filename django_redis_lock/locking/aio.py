"""The lock for asyncio: ``lock`` with ``await``. See ``BaseLock`` for its arguments.

The keeper is the same background thread that serves ``Lock``: a blocked event loop must not lose
the locks of its tasks, and a task in that loop could not renew them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import time
from ..exceptions import LockLost
from ..protocol import AcquireRequest, Acquisition, Call, LockKeys, Owner, Refused, Reply
from ..protocol.validation import check_time
from ..steps import adrive
from ..transport import Answer, Client, in_background
from ..transport.aio_client import aconnect, arun, check_for_tasks
from . import questions
from .base import BaseLock
from .hold import Hold, log_failed
from .local_state import (
    State,
    Task,
    TaskStates,
    acting_task,
    under_way,
)
from .lock import refusing
from .replicas import REPLY_MARGIN_SECONDS, Confirmed, question_to_replicas
from .waiting.tasks import TaskWaiter

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..protocol.holders import HolderInfo
    from .questions import Query

P = ParamSpec("P")
T = TypeVar("T")


def for_the_caller(
    method: Callable[P, Coroutine[object, None, T]],
) -> Callable[P, Coroutine[object, None, T]]:
    """Let a coroutine method act for the task in which it is called, whichever runs it: in
    ``await asyncio.wait_for(lock.acquire(), 5)`` Python before 3.12 runs it in another task."""

    @functools.wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> Coroutine[object, None, T]:
        return act(acting_task(), *args, **options)

    async def act(caller: Task, *args: P.args, **options: P.kwargs) -> T:
        running = asyncio.current_task()
        before = under_way.set((ref(caller or running), ref(running)) if running else None)
        try:
            return await method(*args, **options)
        finally:
            with suppress(ValueError):  # Thrown away half-way, with its loop: another's context.
                under_way.reset(before)

    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(call)
    else:
        # What asyncio itself marks with; there is no public name for it.
        call._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return call


class AsyncLock(BaseLock):
    """``Lock`` for asyncio: ``redis_client.lock(name, lock_class=AsyncLock)`` of redis.asyncio.

    Each task has its own token: the task in which ``acquire`` was called. ``on_lost`` is
    called in the event loop that acquired.
    """

    asynchronous = True

    if not TYPE_CHECKING:  # Type checkers refuse these.
        __enter__ = __exit__ = refusing(
            "is for coroutines: async with. In a thread: with cache.lock(…), or Lock"
        )
        __await__ = refusing("is awaited as: async with, or await lock.acquire()")

    def _check_kind(self, redis: object, on_lost: object, cancel_on_lost: object) -> None:
        for client in redis if isinstance(redis, tuple) else (redis,):
            check_for_tasks(client)
        if on_lost is not None and not callable(on_lost):
            raise TypeError(f"on_lost must be callable, not {on_lost!r}")

    @property
    def local(self) -> State:
        """What the task that acts knows."""
        return self._states.mine()

    @local.setter
    def local(self, states: State) -> None:
        self._states = states

    def _new_state(self) -> TaskStates:
        return TaskStates(self.id)

    @for_the_caller
    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
        *,
        sleep: float | None = None,
    ) -> bool:
        """As ``Lock.acquire``, with the order of arguments that redis-py's asyncio lock has.
        A cancelled call leaves no lock behind."""
        request, wait = self._request(sleep, blocking, blocking_timeout, token)
        try:
            if self.reentrant and self._enter_again():
                return True
            acquired = await adrive(self._acquire_steps(request, wait))
            if self.reentrant and acquired:
                self._note_entry()
            return acquired
        except BaseException as error:
            self._abandon(request, error)
            raise

    async def _send_acquire(self, request: AcquireRequest) -> Reply:
        call, until = request.acquire_call(request.waiter), request.reply_until()
        return (await arun(self.redis, call, until=until)).value

    async def _wait(self, request: AcquireRequest, refused: Refused | None) -> Acquisition | None:
        return await TaskWaiter(self.redis, request).wait(refused)

    async def _ask_replicas(self, acquired: Acquisition, until: float) -> Confirmed:
        token, keys = acquired.token, self.keys.at_place(acquired.place)
        return await aask_replicas(self.redis, keys, token, self.replicas, until)

    async def _await_confirmation(self, hold: Hold) -> None:
        pending: Any = hold.pending
        if pending is not None:  # The keeper may have had the reply.
            await pending.confirmed()
        hold.confirm()

    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def _for_keeper(self, on_lost: Callable[[], object]) -> Callable[[], object]:
        return _in_loop(asyncio.get_running_loop(), on_lost, self.keys.name)

    @for_the_caller
    async def release(self) -> None:
        """As ``Lock.release``."""
        before = self.local.known()
        try:
            if not (self.reentrant and self._leave_inner()):
                await adrive(self._release_steps())
        except RedisError:
            raise
        except BaseException:
            self._leave_to_keeper(before)
            raise

    @for_the_caller
    async def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """As ``Lock.extend``."""
        seconds = check_time("additional_time", additional_time) or 0.0
        return await adrive(self._change_steps("extend", seconds, replace_ttl))

    @for_the_caller
    async def reacquire(self) -> Literal[True]:
        """As ``Lock.reacquire``."""
        return await adrive(self._change_steps("reacquire", self._lifetime or 1.0, True))

    async def locked(self) -> bool:
        """As ``Lock.locked``."""
        return await self._answer(self._locked_query())

    @for_the_caller
    async def owned(self) -> bool:
        """Whether this lock object (in this task) holds the lock."""
        return await self._answer(self._owned_query())

    async def holder(self) -> Owner | None:
        """As ``Lock.holder``."""
        held = await self._answer(self._held_query())
        return await self._answer(questions.heartbeat(held))

    async def get_owner_id(self) -> str | None:
        """As ``Lock.get_owner_id``."""
        return await self._answer(self._owner_id_query())

    async def ttl(self) -> float | None:
        """As ``Lock.ttl``."""
        return await self._answer(self._ttl_query())

    async def held(self) -> HolderInfo | None:
        """As ``Lock.held``."""
        return await self._answer(self._held_query())

    async def holders(self) -> list[HolderInfo]:
        """As ``Lock.holders``."""
        return await self._answer(self._holders_query())

    async def reset(self) -> bool:
        """As ``Lock.reset``."""
        return await adrive(self._reset_steps())

    async def _answer(self, query: Query[T]) -> T:
        try:
            reply = await self._reply_to(query)
        except Exception as error:
            return query.after(error)
        return query.parse(reply)

    async def _reply_to(self, query: Query[Any]) -> Reply:
        return None if query.call is None else (await self._run(query.call)).value

    async def _run(self, call: Call, until: float | None = None) -> Answer:
        return await arun(self.redis, call, until=until)

    async def __aenter__(self) -> Self:
        if await self.acquire():
            self._entered()
            return self
        raise await self._answer(self._not_acquired_query())

    def _entered(self) -> None:
        super()._entered()
        hold = self.local.hold
        if hold is not None and self.cancel_on_lost and hold not in cancellations:
            cancellation = cancellations[hold] = LossCancellation(self._depth())
            hold.also_on_lost = {**hold.also_on_lost, ref(cancellation): cancellation.request}
            if hold.lost:
                cancellation.request()

    def _depth(self) -> int:
        entry = self.local.entry
        return 0 if entry is None else entry.depth

    def _is_cancelled_by_loss(self, error: BaseException | None) -> bool:
        """The block ends with ``error``: whether this lock has cancelled it."""
        hold = self.local.hold
        cancellation = None if hold is None else cancellations.get(hold)
        if hold is None or cancellation is None or cancellation.depth != self._depth():
            return False  # If any, that of a block around this one.
        del cancellations[hold]
        return cancellation.has_caused(error)

    def _lost_error(self) -> LockLost:
        reason = self.lost_reason
        text = f"The lock was lost, so its task was cancelled{reason and f': {reason}'}"
        return LockLost(text, self._shown, reason=reason)

    async def __aexit__(
        self, exc_type: object, exc_value: BaseException | None, traceback: object
    ) -> None:
        hold = self.local.hold
        if hold is not None and hold.from_parent_process:
            return
        cancelled_by_loss = self._is_cancelled_by_loss(exc_value)
        before = self.local.known()
        try:
            await self.release()
        except BaseException as error:
            if not self._release_failed(before, error, exc_value is not None):
                raise
        if cancelled_by_loss:
            raise self._lost_error() from exc_value


async def aask_replicas(
    client: Client, keys: LockKeys, token: bytes, replicas: int, until: float
) -> Confirmed:
    """As ``ask_replicas``, for tasks."""
    connection = await aconnect(client, keys, REPLY_MARGIN_SECONDS)
    try:
        question = connection.request(question_to_replicas(keys, token, replicas, until), replies=2)
        held, confirmed = await asyncio.wait_for(
            question, until - time.monotonic() + REPLY_MARGIN_SECONDS
        )
        return Confirmed(bool(held), int(confirmed))
    except asyncio.TimeoutError:
        raise RedisTimeoutError("Redis did not say whether replicas have the lock") from None
    finally:
        connection.disconnect()


def _in_loop(
    loop: asyncio.AbstractEventLoop, on_lost: Callable[[], object], name: bytes
) -> Callable[[], object]:
    """``on_lost`` as the keeper's thread can call it; it may be a coroutine function."""
    context = copy_context()

    async def run() -> None:
        try:
            outcome = on_lost()
            if asyncio.iscoroutine(outcome):
                await outcome
        except Exception:
            log_failed(on_lost, name)

    def call() -> None:
        in_background(run())

    return lambda: loop.call_soon_threadsafe(call, context=context)


class LossCancellation:
    """``cancel_on_lost``: cancels the present task when its lock is lost, as ``asyncio.timeout``
    does when the time is over: at most once, and not after the block has ended. The block then
    raises ``LockLost`` instead of the ``CancelledError``, unless another caller has cancelled the
    task too.

    Args:
        depth: how often the task was inside the lock, by re-entry, when the block began.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        if sys.version_info >= (3, 11):
            self._requests_before = task.cancelling()
        self._requested = self._left = False

    def request(self) -> None:
        """The lock is lost. May be called in any thread."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if not (self._left or self._requested or _is_cancelled_already(self._task)):
            self._requested = True
            self._task.cancel()

    def has_caused(self, error: BaseException | None) -> bool:
        """The block ends with ``error``: whether that is due to the loss alone."""
        self._left = True
        if not self._requested:
            return False
        if sys.version_info >= (3, 11) and self._task.uncancel() > self._requests_before:
            return False
        return isinstance(error, asyncio.CancelledError)


#: By the hold of the block.
cancellations: WeakKeyDictionary[Hold, LossCancellation] = WeakKeyDictionary()


def _is_cancelled_already(task: asyncio.Task[object]) -> bool:
    """Before Python 3.11 a task does not count who has cancelled it, so it is not cancelled a
    second time: the first cancellation, which the caller knows of, must remain one."""
    if sys.version_info >= (3, 11):
        return False
    waits_for = getattr(task, "_fut_waiter", None)
    return getattr(task, "_must_cancel", False) or (waits_for and waits_for.cancelled()) or False
