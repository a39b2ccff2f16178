"""``cancel_on_lost``: a task is cancelled when the lock of its ``async with`` block is lost."""

from __future__ import annotations

import asyncio
import sys


class LossCancellation:
    """Cancels the present task when its lock is lost, as ``asyncio.timeout`` does when the time is
    over: at most once, and not after the block has ended. The block then raises ``LockLost``
    instead of the ``CancelledError``, unless another caller has cancelled the task too."""

    def __init__(self) -> None:
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


def _is_cancelled_already(task: asyncio.Task[object]) -> bool:
    """Before Python 3.11 a task does not count who has cancelled it, so it is not cancelled a
    second time: the first cancellation, which the caller knows of, must remain one."""
    if sys.version_info >= (3, 11):
        return False
    waits_for = getattr(task, "_fut_waiter", None)
    return getattr(task, "_must_cancel", False) or (waits_for and waits_for.cancelled()) or False
