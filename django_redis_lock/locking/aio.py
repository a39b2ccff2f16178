"""The lock for asyncio: ``lock`` with ``await``. See ``BaseLock`` for its arguments.

The keeper is the same background thread that serves ``Lock``: a blocked event loop must not lose
the locks of its tasks, and a task in that loop could not renew them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from redis.exceptions import RedisError

from ..clock import time
from ..exceptions import LockNotAcquired
from ..protocol import AcquireRequest, Acquisition, Call, Hold, HolderInfo, Owner, check_seconds
from ..transport import Answer, afinish, arun, cancellable
from .handle import BaseLock
from .heartbeat import question_about, with_answer
from .local_state import TaskState, for_the_caller
from .replication import aconfirm, patience_of
from .waiting import Refusal, TaskWaiter, in_background

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AsyncLock"]


class AsyncLock(BaseLock):
    """``Lock`` for asyncio: ``redis_client.lock(name, lock_class=AsyncLock)`` of redis.asyncio.

    Each task has a token of its own: the task in which ``acquire`` was called. ``on_lost`` is
    called in the event loop that acquired.
    """

    def _new_state(self) -> Any:
        state = TaskState(self.id)
        if self.thread_local:
            return state
        return SimpleNamespace(token=self.id, hold=None, renewal=None, file_lock=None)

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
        Cancelling it leaves no trace."""
        request, wait = self._request(sleep, blocking, blocking_timeout, token)
        asked_at = self._now()
        try:
            granted = await self._acquire(request, wait)
            if granted is not None and self.replicas:
                await self._confirm(request, wait, asked_at, granted)
        except BaseException as error:
            self._abandon(request, error)
            raise
        if granted is None:
            self._tell_timed_out(asked_at, wait != 0)
            return False
        self._tell_acquired(self._keep(granted), asked_at, granted.contended)
        return True

    async def _acquire(self, request: AcquireRequest, wait: float | None) -> Acquisition | None:
        acquired: Acquisition | None = await afinish(self._obtain(request, wait))
        return acquired

    async def _ask(self, request: AcquireRequest) -> Any:
        call, patience = request.acquire(request.waiter), request.patience()
        return (await cancellable(arun(self.redis, call, patience=patience))).value

    async def _wait(self, request: AcquireRequest, refusal: Refusal | None) -> Acquisition | None:
        return await TaskWaiter(self.redis, request).wait(refusal)

    def _loop(self) -> Any:
        return asyncio.get_running_loop()

    async def _confirm(
        self, request: AcquireRequest, wait: float | None, asked_at: float, granted: Acquisition
    ) -> None:
        """Wait for the replicas.

        Raises:
            TooFewReplicas: the lock does not count, and is to be given back.
        """
        patience = patience_of(request, None if wait is None else asked_at + wait)
        question = (self.keys, granted.token, self.replicas, patience)
        self._judge(await aconfirm(self.redis, *question))

    def _for_keeper(self, on_lost: Callable[[], Any]) -> Callable[[], Any]:
        return _in_loop(asyncio.get_running_loop(), on_lost)

    @for_the_caller
    async def release(self) -> None:
        """As ``Lock.release``."""
        token = self._owned_token("release")
        call, again, hold = self._release(token), self._released_before(), self.local.hold
        before = token, hold, self.local.renewal
        self._stop_keeping()
        try:
            answer = await self._run(call)
        except Exception:
            raise
        except BaseException:
            if self.local.hold is hold:  # Or a task that shares this handle has the lock by now.
                self._leave_to_keeper()
            raise
        released = bool(answer.value or answer.sent_twice or again)
        self._forget(before, released)
        if not released:
            self._tell_gone(hold)
            self._not_owned("release")
        self._tell_released(hold)

    @for_the_caller
    async def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """As ``Lock.extend``."""
        seconds = check_seconds("additional_time", additional_time) or 0.0
        return await self._change("extend", seconds, replace_ttl)

    @for_the_caller
    async def reacquire(self) -> Literal[True]:
        """As ``Lock.reacquire``."""
        return await self._change("reacquire", self.timeout or 1.0, True)

    async def _change(self, verb: str, seconds: float, replace: bool) -> Literal[True]:
        call = self._extend(verb, seconds, replace)
        hold: Hold | None = self.local.hold
        if hold is not None and hold.confirm_pending is not None:
            # The change must not overtake TAKE_GRANT, which has a connection of its own.
            await hold.pending.confirmed()
            hold.confirm()
        at = time.monotonic()
        self._extended((await self._run(call)).value, verb, seconds, replace, at)
        return True

    async def locked(self) -> bool:
        """Whether anybody holds the lock."""
        return await self.held() is not None

    @for_the_caller
    async def owned(self) -> bool:
        """Whether this handle (in this task) holds the lock."""
        if self.local.token is None:
            return False
        return self._is_mine((await self._run(self._held_call())).value)

    async def holder(self) -> Owner | None:
        """As ``Lock.holder``."""
        held = await self.held()
        if held is None:
            return None
        question = question_about(held.owner)
        if question is None:
            return held.owner
        return with_answer(held.owner, (await self._run(question)).value)

    async def get_owner_id(self) -> str | None:
        """As ``Lock.get_owner_id``."""
        held = await self.held()
        return None if held is None else held.token.decode(errors="replace")

    async def ttl(self) -> float | None:
        """As ``Lock.ttl``."""
        held = await self.held()
        return None if held is None else held.ttl

    async def held(self) -> HolderInfo | None:
        """As ``Lock.held``."""
        reply = (await self._run(self._held_call())).value
        return None if reply is None else HolderInfo(reply)

    async def reset(self) -> bool:
        """As ``Lock.reset``."""
        reply = (await self._run(self._held_call())).value
        if reply is not None:
            await self._run(self._reset_call(reply))
        return reply is not None

    async def _run(self, call: Call) -> Answer:
        return await arun(self.redis, call)

    async def __aenter__(self) -> Self:
        if await self.acquire():
            self._entered()
            return self
        raise LockNotAcquired.from_held(self._shown, await self._in_the_way())

    async def _in_the_way(self) -> HolderInfo | None:
        try:
            return await self.held()
        except (RedisError, OSError):
            return None

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        hold = self.local.hold
        if hold is not None and hold.from_parent_process:
            return
        try:
            await self.release()
        except Exception as error:
            if not self._hide_release_error(error, exc_value is not None):
                raise


def _in_loop(loop: asyncio.AbstractEventLoop, on_lost: Callable[[], Any]) -> Callable[[], Any]:
    """``on_lost`` as the keeper's thread can call it; it may be a coroutine function."""

    def call() -> None:
        outcome = on_lost()
        if asyncio.iscoroutine(outcome):
            in_background(outcome)

    return lambda: loop.call_soon_threadsafe(call)
