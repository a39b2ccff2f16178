"""The lock for asyncio: ``lock`` with ``await``. See ``BaseLock`` for its arguments.

The keeper is the same background thread that serves ``Lock``: a blocked event loop must not lose
the locks of its tasks, and a task in that loop could not renew them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

from redis.exceptions import NoScriptError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import time
from ..exceptions import LockLost
from ..keeper import keeper
from ..protocol import (
    LAST_TRY_SECONDS,
    AcquireRequest,
    Acquisition,
    Call,
    Owner,
    Refused,
    Reply,
    printable,
)
from ..protocol.validation import check_time
from ..steps import adrive
from ..transport import Answer, Client, in_background, pack, server_of
from ..transport.aio_client import aconnect, arun, check_for_tasks
from ..transport.aio_connection import AsyncRawConnection
from .base import REPLY_MARGIN_SECONDS, BaseLock
from .hold import Hold, State, Task, TaskStates, acting_task, log_failed, under_way
from .lock import refusing
from .waiting import PopReply, Waiter, WaitQueue, logger

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..protocol.holders import HolderInfo

#: Seconds the answer about a grant may take before its connection is given up.
ANSWER_TIMEOUT_SECONDS = 5.0

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
        return await adrive(*self._acquire(sleep, blocking, blocking_timeout, token))

    async def _wait(self, request: AcquireRequest, refused: Refused | None) -> Acquisition | None:
        return await TaskWaiter(self.redis, request).wait(refused)

    async def _ask_replicas(self, acquired: Acquisition, until: float) -> Sequence[Reply]:
        keys = self.keys.at_place(acquired.place)
        connection = await aconnect(self.redis, keys, REPLY_MARGIN_SECONDS)
        try:
            question = self._question_to_replicas(keys, acquired.token, until)
            replies: Sequence[Reply] = await asyncio.wait_for(
                connection.request(question, replies=2),
                until - time.monotonic() + REPLY_MARGIN_SECONDS,
            )
            return replies
        except asyncio.TimeoutError:
            raise RedisTimeoutError("Redis did not say whether replicas have the lock") from None
        finally:
            connection.disconnect()

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
        await adrive(*self._release())

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
        return await adrive(self._locked_steps())

    @for_the_caller
    async def owned(self) -> bool:
        """Whether this lock object (in this task) holds the lock."""
        return await adrive(self._owned_steps())

    async def holder(self) -> Owner | None:
        """As ``Lock.holder``."""
        return await adrive(self._holder_steps())

    async def get_owner_id(self) -> str | None:
        """As ``Lock.get_owner_id``."""
        return await adrive(self._owner_id_steps())

    async def ttl(self) -> float | None:
        """As ``Lock.ttl``."""
        return await adrive(self._ttl_steps())

    async def held(self) -> HolderInfo | None:
        """As ``Lock.held``."""
        return await adrive(self._held_steps())

    async def holders(self) -> list[HolderInfo]:
        """As ``Lock.holders``."""
        return await adrive(self._holders_steps())

    async def reset(self) -> bool:
        """As ``Lock.reset``."""
        return await adrive(self._reset_steps())

    async def _run(self, call: Call, until: float | None = None) -> Answer:
        return await arun(self.redis, call, until=until)

    async def __aenter__(self) -> Self:
        if await self.acquire():
            self._entered()
            return self
        raise await adrive(self._not_acquired_steps())

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


# -- how a task waits; see ``waiting`` for the rules -----------------------------------------------
#
# Another task reads the reply to the blocking pop, and is not cancelled: cancelling a read would
# close the connection, and lose the grant that may be on it.


class PendingAnswer:
    """The answer to TAKE_GRANT, read in the background."""

    def __init__(self, connection: AsyncRawConnection, call: Call, until: float) -> None:
        self._until = until
        self._reading = asyncio.ensure_future(self._read(connection, call))

    async def _read(self, connection: AsyncRawConnection, call: Call) -> float | None:
        try:
            taken = await asyncio.wait_for(_answer(connection, call), ANSWER_TIMEOUT_SECONDS)
        except (RedisError, asyncio.TimeoutError):
            connection.disconnect()
            keeper().hurry()  # Unknown; a renewal tells.
            return None
        return self._until if taken else -math.inf

    def read_reply(self, wait: bool) -> float | None:
        """See ``PendingLifetime``. It never waits: the loop that asks is the one that reads."""
        done = self._reading.done() and not self._reading.cancelled()
        return self._reading.result() if done else None

    async def confirmed(self) -> float | None:
        return await asyncio.shield(self._reading)


async def _answer(connection: AsyncRawConnection, call: Call) -> Reply:
    """The reply to ``call``; the script is sent to a server that does not know it."""
    try:
        return await connection.request(pack(call))
    except NoScriptError:
        return await connection.request(pack(call, known=False))


class TaskQueue(WaitQueue):
    """A queue of the tasks of one event loop.

    Attributes:
        reading: reads the reply to the blocking pop.
    """

    connection: AsyncRawConnection | None = None
    pending: PendingAnswer | None = None
    reading: asyncio.Future[Reply] | None = None

    async def connect(self, client: Client) -> None:
        if self.pending is not None:
            await self.pending.confirmed()
            self.pending = None
        if self.connection is None:
            self.node = self.server.seen_at(self.request.keys)
            self.connection = await aconnect(client, self.request.keys, timeout=5.0)

    async def begin_pop(self, command: bytes) -> None:
        assert self.connection is not None
        self.reading = self.connection.request(command)

    async def pop_ended(self, seconds: float) -> bool:
        assert self.reading is not None
        await time.wait({self.reading}, seconds)
        return self.reading.done()

    def reply(self) -> PopReply:
        reading, self.reading = self.reading, None
        assert reading is not None
        reply: PopReply = reading.result()
        return reply

    async def send_take_grant(self, call: Call, until: float) -> PendingAnswer:
        assert self.connection is not None
        self.pending = PendingAnswer(self.connection, call, until)
        return self.pending

    async def disconnect(self) -> None:
        self.drop()

    def drop(self) -> None:
        connection, self.connection, self.pending = self.connection, None, None
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.cancel()
        if connection is not None:
            connection.disconnect()

    def end(self) -> None:
        connection, self.connection = self.connection, None
        pending, self.pending = self.pending, None
        if connection is None:
            return
        if asyncio._get_running_loop() is self.loop:
            in_background(self._close(connection, pending))
        else:  # A coroutine of this loop was closed, and nothing runs in the loop.
            connection.cut()

    @staticmethod
    async def _close(connection: AsyncRawConnection, pending: PendingAnswer | None) -> None:
        if pending is not None:
            await pending.confirmed()
        connection.disconnect()

    def cut_pop(self) -> None:
        connection = self.connection
        if connection is None or self.loop is None:
            return
        if self.loop.is_closed():
            connection.cut()
        else:
            self.loop.call_soon_threadsafe(connection.disconnect)


class TaskWaiter(Waiter):
    queue: TaskQueue

    def __init__(self, client: Client, request: AcquireRequest) -> None:
        queue = TaskQueue(server_of(client), request, asyncio.get_running_loop())
        super().__init__(client, request, queue)

    async def wait(self, refused: Refused | None = None) -> Acquisition | None:
        """As ``ThreadWaiter.wait``; cancelling it leaves no trace and loses no grant."""
        try:
            return await adrive(self._wait(refused))
        except asyncio.CancelledError:
            await self._cancel_pop()
            self.queue.abandon(self)
            raise
        except BaseException as error:
            if self.queue.is_led_by(self):
                self._stop_reading(error)
            self.queue.abandon(self)
            raise
        finally:
            self.queue.leave(self)

    def _stop_reading(self, error: BaseException) -> None:
        """The wait ends with ``error``, and the queue's connection is about to be closed."""
        reading = self.queue.reading
        if reading is None:
            return
        if not isinstance(error, GeneratorExit):
            self.queue.drop()  # The next must not wait behind this pop.
            return
        # Nothing runs in this loop any more, perhaps it is closed.
        self.queue.reading = None
        if reading.done() and not reading.cancelled() and not reading.exception():
            self.release_grant_in(reading.result())

    async def _cancel_pop(self) -> None:
        """The wait is cancelled: pass on the grant that the blocking pop may have returned."""
        queue, connection, reading = self.queue, self.queue.connection, self.queue.reading
        if reading is None or connection is None or not queue.is_led_by(self):
            return
        queue.connection = queue.reading = None
        # On its own, so that a second cancellation does not stop it half-way.
        leaving = self._give_up(connection, reading)
        await asyncio.shield(in_background(leaving))

    async def _give_up(
        self, connection: AsyncRawConnection, reading: asyncio.Future[Reply]
    ) -> None:
        request = self._request
        try:
            leave = request.leave_call(self.queue.id_to_unregister(), try_again=False)
            await self._ask(leave, time.monotonic() + LAST_TRY_SECONDS)
            self._reply = reply = await asyncio.wait_for(reading, ANSWER_TIMEOUT_SECONDS)
            if (grant := self.queue.grant_in(reply)) is not None:
                release = request.release_call(grant.token, place=grant.place)
                await arun(self._client, release)
        except (RedisError, asyncio.TimeoutError) as error:
            fields = {"lock": printable(request.keys.lock), "error": error}
            logger.info("Left the wait for %(lock)s without Redis: %(error)s", fields)
        finally:
            connection.disconnect()

    async def _ask(self, call: Call, until: float | None) -> Reply:
        return (await arun(self._client, call, until=until)).value

    async def _sleep(self, seconds: float) -> None:
        await time.asleep(seconds)

    def _new_turn(self) -> TaskWakeEvent:
        return TaskWakeEvent()


class TaskWakeEvent:
    """``threading.Event`` for tasks; waiting for it loses no cancellation."""

    def __init__(self) -> None:
        self._event: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        if not self._event.done() and not self._event.get_loop().is_closed():
            self._event.set_result(None)

    async def wait(self, seconds: float) -> bool:
        if not self._event.done():
            await time.wait({self._event}, seconds)
        return self._event.done()
