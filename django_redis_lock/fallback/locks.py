"""The locks that can fall back, for threads and for asyncio. See ``Fallback``."""

from __future__ import annotations

from typing import Any, Literal

from ..clock import time
from ..locking import AsyncLock, Lock, for_the_caller
from ..protocol import HolderInfo
from ..redlock import AsyncRedlock, Redlock
from ..transport import adrive, drive
from .base import Fallback, Pause, Step


class FallbackLock(Fallback, Lock):
    """``Lock`` with a fallback for outages."""

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
        """``Lock.acquire``, or while Redis is down what ``on_redis_down`` says."""
        attempt = self._attempt(blocking, blocking_timeout)
        options = {"blocking": blocking, "blocking_timeout": blocking_timeout}
        try:
            steps = self._acquire_or_fall_back(attempt, sleep=sleep, token=token, **options)
            return bool(drive(steps, self._carry_out))
        except BaseException:
            self._abort(attempt)
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
        return self._is_held_without_redis(verb) or super()._change(verb, seconds, replace)

    def owned(self) -> bool:
        return self.degraded is not None or super().owned()

    def held(self) -> HolderInfo | None:
        """``Lock.held``, or the holder of this host's lock."""
        found: HolderInfo | None = drive(self._held_anywhere(), self._carry_out)
        return found


class FallbackRedlock(FallbackLock, Redlock):
    """``Redlock`` with a fallback for outages."""


class AsyncFallbackLock(Fallback, AsyncLock):
    """``AsyncLock`` with a fallback for outages."""

    async def _carry_out(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return await time.asleep(step.seconds)
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
        """``AsyncLock.acquire``, or while Redis is down what ``on_redis_down`` says."""
        attempt = self._attempt(blocking, blocking_timeout)
        options = {"blocking": blocking, "blocking_timeout": blocking_timeout}
        try:
            steps = self._acquire_or_fall_back(attempt, sleep=sleep, token=token, **options)
            return bool(await adrive(steps, self._carry_out))
        except BaseException:
            self._abort(attempt)
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
        return self._is_held_without_redis(verb) or await super()._change(verb, seconds, replace)

    @for_the_caller
    async def owned(self) -> bool:
        return self.degraded is not None or await super().owned()

    async def held(self) -> HolderInfo | None:
        found: HolderInfo | None = await adrive(self._held_anywhere(), self._carry_out)
        return found


class AsyncFallbackRedlock(AsyncFallbackLock, AsyncRedlock):
    """``AsyncRedlock`` with a fallback for outages."""
