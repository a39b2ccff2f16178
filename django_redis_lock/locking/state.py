"""What one thread, or one task, knows through one handle: its token and its hold."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from .hold import Hold

__all__ = ["TaskState", "ThreadState"]


class ThreadState(threading.local):
    """What one thread knows through one handle; the token is where redis-py keeps it."""

    def __init__(self, token: bytes | None = None) -> None:
        self.token = token
        self.hold: Hold | None = None
        self.renewal: Any = None


class TaskState:
    """What each task knows through one handle, where a thread's ``State`` would be.

    A task that ended without releasing leaves its lock to the next one that asks, because in
    ``await asyncio.wait_for(lock.acquire(), 5)`` Python before 3.12 acquires in a task of its own.
    """

    def __init__(self, token: bytes | None) -> None:
        self._initial = token
        self._states: dict[Any, SimpleNamespace] = {}

    def _mine(self) -> SimpleNamespace:
        task = _current_task()
        state = self._states.get(task)
        if state is None:
            state = self._inherited() or SimpleNamespace(
                token=self._initial, hold=None, renewal=None
            )
            self._states[task] = state
        return state

    def _inherited(self) -> SimpleNamespace | None:
        for task, state in list(self._states.items()):
            if task is not None and task.done():
                del self._states[task]
                if state.hold is not None and not state.hold.ended:
                    return state
        return None

    @property
    def token(self) -> bytes | None:
        token: bytes | None = self._mine().token
        return token

    @token.setter
    def token(self, token: bytes | None) -> None:
        self._mine().token = token

    @property
    def hold(self) -> Hold | None:
        hold: Hold | None = self._mine().hold
        return hold

    @hold.setter
    def hold(self, hold: Hold | None) -> None:
        self._mine().hold = hold

    @property
    def renewal(self) -> Any:
        return self._mine().renewal

    @renewal.setter
    def renewal(self, renewal: Any) -> None:
        self._mine().renewal = renewal


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
