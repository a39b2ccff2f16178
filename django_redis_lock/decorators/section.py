"""One time that something runs under its lock: taking it, and giving it back."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from asgiref.sync import AsyncToSync, sync_to_async
from redis.exceptions import RedisError

from .. import metrics
from ..contention import Conflict
from ..exceptions import LockError
from ..locking import AsyncLock, BaseLock, Lock, in_background
from ..protocol import HolderInfo, printable
from . import current, transactions
from .options import Defaults, OnLost, Options
from .outages import RetryUntil

__all__ = ["AsyncSection", "Section"]

logger = logging.getLogger("django_redis_lock.locked")


class _Section:
    """What is the same for threads and tasks.

    Args:
        on_lost: instead of the options'.
    """

    def __init__(
        self, options: Options, name: str, use: Defaults | None = None, on_lost: OnLost = None
    ) -> None:
        self.options = options
        self.name = name
        self.use = use or Defaults()
        self.using = options.alias
        self._key = (self.using, name)
        self._on_lost = on_lost or (options.on_lost if callable(options.on_lost) else None)
        self._context = contextvars.copy_context()
        self._taken_up = False
        self._left = False

    def _told(self) -> OnLost:
        """What the keeper calls: in the context of the call, so ``current_lock()`` works there."""
        on_lost = self._on_lost
        if on_lost is None:
            return None

        def told() -> None:
            outcome = self._context.run(on_lost)
            if asyncio.iscoroutine(outcome):
                self._context.run(in_background, outcome)

        return told

    def _refuse_to_wait_for_itself(self) -> None:
        if self.options.blocking and current.waits_for_itself(self._key):
            raise LockError(
                "This very call holds the lock already and would wait for itself; locks of "
                "locked() cannot be entered twice",
                self.name,
            )

    def _enter(self, lock: BaseLock) -> None:
        lock._entered()
        current.push(lock, self._key)
        self._context = contextvars.copy_context()

    def _retry(self) -> RetryUntil:
        wait = self.options.blocking_timeout
        return RetryUntil(math.inf if wait is None else time.monotonic() + wait)

    def _conflict(self, lock: BaseLock, held: HolderInfo | None) -> Conflict:
        given = self.options.retry_after
        usual = metrics.usual_hold(lock.subject) if given is None else None
        return Conflict.of(self.name, held, self.using, given, usual)

    @property
    def _waits_for_transactions(self) -> bool:
        return self.options.release != "now" or self._taken_up


class Section(_Section):
    """For threads."""

    lock: Lock

    def enter(self, waiting: Callable[[Conflict], None] | None = None) -> bool:
        """Take the lock; whether it could be had.

        Args:
            waiting: told who is in the way when the wait begins.
        """
        again = transactions.take_up(self._key)
        if isinstance(again, Lock) and _is_held_here(again) and not again.lost:
            self.lock, self._taken_up = again, True
        else:
            self._refuse_to_wait_for_itself()
            self.lock = self.options.lock(self.name, self.use, self._told())
            if not self._acquire(waiting):
                return False
        self._enter(self.lock)
        return True

    def _acquire(self, waiting: Callable[[Conflict], None] | None) -> bool:
        if not self.options.wait_for_redis:
            return self._ask(waiting, self.options.blocking_timeout)
        retry = self._retry()
        while True:
            left = retry.left()
            try:
                return self._ask(waiting, None if math.isinf(left) else left)
            except (RedisError, OSError) as error:
                time.sleep(retry.pause_after(error))

    def _ask(self, waiting: Callable[[Conflict], None] | None, timeout: float | None) -> bool:
        if waiting is not None and self.options.blocking:
            if self.lock.acquire(blocking=False):
                return True
            waiting(self.conflict())
        return self.lock.acquire(blocking_timeout=timeout)

    def leave(self) -> None:
        """Give the lock back, or have it given back when the transaction ends. What goes wrong with
        that is logged: it must not cost the result of the work."""
        current.pop(self.lock)
        release = functools.partial(_release, self.lock, self.name)
        if not (
            self._waits_for_transactions and transactions.wait_for(self.lock, self._key, release)
        ):
            release()
        self._left = True

    def abandon(self) -> None:
        """It was interrupted by an exception from a signal handler: nothing stays held."""
        lock = getattr(self, "lock", None)
        if lock is not None and not self._left:
            current.pop(lock)
            lock._leave_to_keeper()

    def conflict(self) -> Conflict:
        """Who was in the way."""
        try:
            held = self.lock.held()
        except (RedisError, OSError):  # That it is taken is known; by whom is not.
            held = None
        return self._conflict(self.lock, held)


class AsyncSection(_Section):
    """For tasks."""

    lock: AsyncLock | Lock

    async def enter(self) -> bool:
        """As ``Section.enter``."""
        again = None
        if _has_parent():
            again = await sync_to_async(transactions.take_up)(self._key)
        if isinstance(again, Lock) and _is_held_here(again) and not again.lost:
            self.lock, self._taken_up = again, True
        else:
            self._refuse_to_wait_for_itself()
            self.lock = lock = self.options.alock(self.name, self.use, self._told())
            if not await self._acquire(lock):
                return False
        self._enter(self.lock)
        return True

    async def _acquire(self, lock: AsyncLock) -> bool:
        if not self.options.wait_for_redis:
            return await lock.acquire()
        retry = self._retry()
        while True:
            left = retry.left()
            try:
                return await lock.acquire(blocking_timeout=None if math.isinf(left) else left)
            except (RedisError, OSError) as error:
                await asyncio.sleep(retry.pause_after(error))

    async def leave(self) -> None:
        """As ``Section.leave``."""
        current.pop(self.lock)
        try:
            waits = _has_parent() and await sync_to_async(self._wait_for_transactions)()
        except BaseException:
            await self._release()
            raise
        if not waits:
            await self._release()

    def _wait_for_transactions(self) -> bool:
        """In the thread that called this coroutine by ``async_to_sync``, perhaps in a transaction.
        When that ends, there is no event loop any more: the lock is released by a handle for
        threads that knows what this one knows."""
        if not (self._waits_for_transactions and transactions.open_transactions()):
            return False
        lock = self.lock
        if isinstance(lock, AsyncLock):
            twin = self.options.lock(self.name, self.use, None)
            twin.local = lock.local
            lock = twin
        return transactions.wait_for(lock, self._key, functools.partial(_release, lock, self.name))

    async def _release(self) -> None:
        lock = self.lock
        if isinstance(lock, Lock):
            await sync_to_async(_release)(lock, self.name)
        elif _is_held_here(lock):
            try:
                await lock.release()
            except (RedisError, OSError) as error:
                _not_released(self.name, error)

    async def conflict(self) -> Conflict:
        """As ``Section.conflict``."""
        lock: Any = self.lock
        try:
            held = await lock.held()
        except (RedisError, OSError):
            held = None
        return self._conflict(lock, held)


def _has_parent() -> bool:
    """Whether a synchronous caller, by ``async_to_sync``, waits for this task."""
    if getattr(AsyncToSync.executors, "current", None) is not None:
        return True
    return asyncio.get_running_loop() in getattr(AsyncToSync, "loop_thread_executors", ())


def _is_held_here(lock: BaseLock) -> bool:
    """Not where it was released by hand, nor in a forked child: there it is the parent's."""
    hold = lock.local.hold
    return lock.local.token is not None and not (hold is not None and hold.from_parent_process)


def _release(lock: Lock, name: str) -> None:
    if _is_held_here(lock):
        try:
            lock.release()
        except (RedisError, OSError) as error:
            _not_released(name, error)


def _not_released(name: str, error: Exception) -> None:
    shown = printable(name.encode(errors="replace"))
    if isinstance(error, LockError):
        logger.warning("The lock %s ended before the locked code did: %s", shown, error)
    else:
        logger.error(
            "The locked code has ended, but its lock %s was not released: %s", shown, error
        )
