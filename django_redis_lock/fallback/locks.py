"""The locks that can do without Redis, for threads and for asyncio. See ``Fallback``."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from ..locking import AsyncLock, Lock, for_the_caller
from ..protocol import HolderInfo
from ..redlock import AsyncRedlock, Redlock
from ..transport import adrive, drive
from .base import Fallback, Pause, Step

__all__ = ["AsyncFallbackLock", "AsyncFallbackRedlock", "FallbackLock", "FallbackRedlock"]


class FallbackLock(Fallback, Lock):
    """``Lock`` that can do without Redis."""

    def _carry_out(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        return getattr(super(), step.method)(**step.options)

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """As ``Lock.acquire``. When Redis is down, as ``on_redis_down`` says."""
        attempt = self._attempt(blocking, blocking_timeout)
        options = {"blocking": blocking, "blocking_timeout": blocking_timeout}
        try:
            steps = self._acquire_or_fall_back(attempt, sleep=sleep, token=token, **options)
            return bool(drive(steps, self._carry_out))
        except BaseException:
            self._break_off(attempt)
            raise

    def release(self) -> None:
        try:
            if self._release_fallback():
                return
            file_lock = self.local.file_lock
            try:
                super().release()
            finally:
                self._release_file(file_lock)
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
        found: HolderInfo | None = drive(self._held_anywhere(), self._carry_out)
        return found


class FallbackRedlock(FallbackLock, Redlock):
    """``Redlock`` that can do without its servers."""


class AsyncFallbackLock(Fallback, AsyncLock):
    """``AsyncLock`` that can do without Redis."""

    async def _carry_out(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        return await getattr(super(), step.method)(**step.options)

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
        attempt = self._attempt(blocking, blocking_timeout)
        options = {"blocking": blocking, "blocking_timeout": blocking_timeout}
        try:
            steps = self._acquire_or_fall_back(attempt, sleep=sleep, token=token, **options)
            return bool(await adrive(steps, self._carry_out))
        except BaseException:
            self._break_off(attempt)
            raise

    @for_the_caller
    async def release(self) -> None:
        if self._release_fallback():
            return
        file_lock = self.local.file_lock
        try:
            await super().release()
        finally:
            self._release_file(file_lock)

    async def _change(self, verb: str, seconds: float, replace: bool) -> Literal[True]:
        return self._holds_without(verb) or await super()._change(verb, seconds, replace)

    @for_the_caller
    async def owned(self) -> bool:
        return self.degraded is not None or await super().owned()

    async def held(self) -> HolderInfo | None:
        found: HolderInfo | None = await adrive(self._held_anywhere(), self._carry_out)
        return found


class AsyncFallbackRedlock(AsyncFallbackLock, AsyncRedlock):
    """``AsyncRedlock`` that can do without its servers."""
