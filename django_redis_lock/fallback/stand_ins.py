"""Locks that can do without Redis, as ``degrading`` explains."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Literal

from redis.exceptions import RedisError

from ..locking import AsyncLock, Lock, for_the_caller
from ..protocol import HolderInfo, Owner
from ..redlock import AsyncRedlock, Redlock
from ..transport import is_outage
from .degrading import Fallback
from .file_lock import LocalLock, pauses

__all__ = [
    "AsyncFallbackLock",
    "AsyncFallbackRedlock",
    "FallbackLock",
    "FallbackRedlock",
]

#: Seconds within which this host's lock was not waited for.
GLANCE = 0.05


class _ForThreads(Fallback, Lock):
    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """As ``Lock.acquire``. When Redis is down, as ``on_redis_down`` says."""
        until = self._until(blocking, blocking_timeout)
        self._drop_old_guard()
        before, guard = self._state(), self._new_guard()
        try:
            while True:
                left = blocking_timeout
                if 0 < until < math.inf:
                    left = max(0.0, until - time.monotonic())
                try:
                    if not super().acquire(sleep, blocking, left, token):
                        return False
                except Exception as error:
                    if not self._goes_on_without(error):
                        raise
                    return self._go_on_without(error, guard, until)
                if guard is None:
                    return True
                hold, began = self.local.hold, time.monotonic()
                if not self._taken(guard, hold.owner(), until, beside=True):
                    self._give_back()
                    return False
                if hold.counts or time.monotonic() < began + GLANCE:
                    self.local.guard = guard
                    return True
                guard.release()  # What Redis gave ended while this host's was waited for.
        except BaseException:
            self._break_off(before, guard)
            raise

    def _go_on_without(self, error: Exception, guard: LocalLock | None, until: float) -> bool:
        hold = self._new_stand_in()
        if guard is not None and not self._taken(guard, hold.owner(), until):
            return False
        self._stand_in(hold, guard, error)
        return True

    def _taken(self, guard: LocalLock, owner: Owner, until: float, *, beside: bool = False) -> bool:
        """Take this host's lock. Nobody signals its release, so it is tried again and again."""
        tries = pauses(until)
        while not guard.try_acquire(owner, beside):
            if beside and guard.is_beside():
                return True  # What its holder had in Redis has ended: Redis has just said so.
            pause = next(tries, None)
            if pause is None:
                return False
            time.sleep(pause)
        return True

    def _give_back(self) -> None:
        try:
            super().release()
        except (RedisError, OSError):
            pass  # It ends by itself.

    def release(self) -> None:
        try:
            if self._leave_stand_in():
                return
            guard = self.local.guard
            try:
                super().release()
            finally:
                self._drop_guard(guard)
        except Exception:
            raise
        except BaseException:
            self._leave_to_keeper()
            raise

    def _change(self, verb: str, seconds: float, replace: bool) -> Literal[True]:
        return self._holds_without(verb) or super()._change(verb, seconds, replace)

    def owned(self) -> bool:
        return self.degraded is not None or super().owned()

    def held(self) -> HolderInfo | None:
        """As ``Lock.held``; also who holds the lock of this host."""
        try:
            return (self._held_here() if self.degraded else super().held()) or self._held_here()
        except Exception as error:
            if self.on_redis_down != "local" or not is_outage(error):
                raise
            return self._held_here(away=True)


class FallbackLock(_ForThreads):
    """``Lock`` that can do without Redis."""


class FallbackRedlock(_ForThreads, Redlock):
    """``Redlock`` that can do without its servers."""


class _ForTasks(Fallback, AsyncLock):
    @for_the_caller
    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
        *,
        sleep: float | None = None,
    ) -> bool:
        """As ``AsyncLock.acquire``. When Redis is down, as ``on_redis_down`` says."""
        until = self._until(blocking, blocking_timeout)
        self._drop_old_guard()
        before, guard = self._state(), self._new_guard()
        try:
            while True:
                left = blocking_timeout
                if 0 < until < math.inf:
                    left = max(0.0, until - time.monotonic())
                try:
                    if not await super().acquire(blocking, left, token, sleep=sleep):
                        return False
                except Exception as error:
                    if not self._goes_on_without(error):
                        raise
                    return await self._go_on_without(error, guard, until)
                if guard is None:
                    return True
                hold, began = self.local.hold, time.monotonic()
                if not await self._taken(guard, hold.owner(), until, beside=True):
                    await self._give_back()
                    return False
                if hold.counts or time.monotonic() < began + GLANCE:
                    self.local.guard = guard
                    return True
                guard.release()
        except BaseException:
            self._break_off(before, guard)
            raise

    async def _go_on_without(self, error: Exception, guard: LocalLock | None, until: float) -> bool:
        hold = self._new_stand_in()
        if guard is not None and not await self._taken(guard, hold.owner(), until):
            return False
        self._stand_in(hold, guard, error)
        return True

    async def _taken(
        self, guard: LocalLock, owner: Owner, until: float, *, beside: bool = False
    ) -> bool:
        tries = pauses(until)
        while not guard.try_acquire(owner, beside):
            if beside and guard.is_beside():
                return True
            pause = next(tries, None)
            if pause is None:
                return False
            await asyncio.sleep(pause)
        return True

    async def _give_back(self) -> None:
        try:
            await super().release()
        except (RedisError, OSError):
            pass  # It ends by itself.

    @for_the_caller
    async def release(self) -> None:
        if self._leave_stand_in():
            return
        guard = self.local.guard
        try:
            await super().release()
        finally:
            self._drop_guard(guard)

    async def _change(self, verb: str, seconds: float, replace: bool) -> Literal[True]:
        return self._holds_without(verb) or await super()._change(verb, seconds, replace)

    @for_the_caller
    async def owned(self) -> bool:
        return self.degraded is not None or await super().owned()

    async def held(self) -> HolderInfo | None:
        try:
            here = self._held_here() if self.degraded else await super().held()
            return here or self._held_here()
        except Exception as error:
            if self.on_redis_down != "local" or not is_outage(error):
                raise
            return self._held_here(away=True)


class AsyncFallbackLock(_ForTasks):
    """``AsyncLock`` that can do without Redis."""


class AsyncFallbackRedlock(_ForTasks, AsyncRedlock):
    """``AsyncRedlock`` that can do without its servers."""
