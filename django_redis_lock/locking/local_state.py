"""What one thread, or one task, knows through one handle: its token and its hold."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from ..protocol import Hold

P = ParamSpec("P")
T = TypeVar("T")


class ThreadState(threading.local):
    """What one thread knows through one handle; the token is where redis-py keeps it."""

    def __init__(self, token: bytes | None = None) -> None:
        self.token = token
        self.hold: Hold | None = None
        self.renewal: Any = None
        self.file_lock: Any = None


class TaskState:
    """What each task knows through one handle; see ``for_the_caller``."""

    def __init__(self, token: bytes | None) -> None:
        self._initial = token
        self._states: WeakKeyDictionary[asyncio.Task[Any], SimpleNamespace] = WeakKeyDictionary()
        self._of_no_task = self._new()

    def _new(self) -> SimpleNamespace:
        return SimpleNamespace(token=self._initial, hold=None, renewal=None, file_lock=None)

    def _mine(self) -> SimpleNamespace:
        task = _acting()
        if task is None:
            return self._of_no_task
        state = self._states.get(task)
        if state is None:
            state = self._states[task] = self._new()
        return state

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
    def file_lock(self) -> Any:
        return self._mine().file_lock

    @file_lock.setter
    def file_lock(self, file_lock: Any) -> None:
        self._mine().file_lock = file_lock

    @property
    def renewal(self) -> Any:
        return self._mine().renewal

    @renewal.setter
    def renewal(self, renewal: Any) -> None:
        self._mine().renewal = renewal


Task = asyncio.Task[Any] | None

#: The task that called the method under way, and the one that runs it.
_under_way: ContextVar[tuple[Task, Task]]
_under_way = ContextVar("django_redis_lock_under_way", default=(None, None))


def for_the_caller(
    method: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let a coroutine method act for the task in which it is called, whichever runs it: in
    ``await asyncio.wait_for(lock.acquire(), 5)`` Python before 3.12 runs it in another task."""

    @functools.wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> Coroutine[Any, Any, T]:
        return act(_acting(), *args, **options)

    async def act(caller: Task, *args: P.args, **options: P.kwargs) -> T:
        running = asyncio.current_task()
        before = _under_way.set((caller or running, running))
        try:
            return await method(*args, **options)
        finally:
            with suppress(ValueError):  # Thrown away half-way, with its loop: another's context.
                _under_way.reset(before)

    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(call)
    else:
        # What asyncio itself marks with; there is no public name for it.
        call._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return call


def _acting() -> Task:
    """For which task this one acts: for itself, unless it runs what another has called."""
    try:
        running = asyncio.current_task()
    except RuntimeError:
        return None
    caller, runner = _under_way.get()
    return caller if runner is running else running
