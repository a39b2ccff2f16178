"""Locks without Redis, for the tests of projects that use them.

``override()`` turns every lock of the process into one in memory; ``MemoryServer`` stands for the
server, with a clock that can be moved and faults that can be switched on::

    with override() as server:
        nightly_report()                      # takes its lock in memory
        server.lose(":1:lock:nightly")        # the holder is told, as by an expired lock
        server.away = True                    # every call raises redis-py's ConnectionError
        server.clock.advance(60)              # a minute later

They pass the same contract as the locks on Redis, but for what a process of its own would notice.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ..fallback import Fallback
from ..locking import AsyncLock, Lock
from ..protocol import AcquireRequest, Acquisition, Call, Hold
from ..redlock import AsyncRedlock, Redlock
from ..transport import Answer
from .memory_server import Clock, MemoryServer, VirtualClock

__all__ = ["Clock", "MemoryLock", "MemoryServer", "VirtualClock", "override"]


class InMemory:
    """What ``Lock`` and ``AsyncLock`` do otherwise when their server is in memory."""

    _memory: MemoryServer
    local: Any
    _won: Any

    @property
    def _now(self) -> Callable[[], float]:
        clock: Clock = self._memory.clock
        return clock

    def _server(self) -> None:
        """Nowhere that figures could be written to."""

    def _keep(self, granted: Acquisition) -> Hold:
        hold: Hold = self._won(granted)
        self._memory.keep(hold)
        return hold

    def _stop_keeping(self) -> None:
        hold = self.local.hold
        if hold is not None:
            hold.end()

    def _leave_to_keeper(self) -> None:
        """Nothing is under way that could be interrupted."""

    def _abandon(self, request: AcquireRequest, error: BaseException) -> None:
        """Nothing can have happened unheard."""


class ThreadsInMemory(InMemory):
    """``InMemory`` for ``Lock``."""

    def _run(self, call: Call) -> Answer:
        return self._memory.run(call)

    def _acquire(self, request: AcquireRequest, wait: float | None) -> Acquisition | None:
        memory, key = self._memory, request.keys.lock
        deadline = math.inf if wait is None else memory.clock() + wait
        memory.reached()
        contended = False
        with memory.changed:
            ticket = memory.join(key)
            try:
                while (granted := memory.take(request, ticket)) is None:
                    if memory.clock() >= deadline:
                        return None
                    memory.clock.wait(memory.changed, memory.seconds_until_change(key, deadline))
                    contended = True
                return granted._replace(contended=contended)
            finally:
                memory.leave(key, ticket)

    def _confirm(self, *args: Any) -> None:
        """There are no replicas that could lack the lock."""


class TasksInMemory(InMemory):
    """``InMemory`` for ``AsyncLock``. It looks again every few milliseconds of real time."""

    async def _run(self, call: Call) -> Answer:
        return self._memory.run(call)

    async def _acquire(self, request: AcquireRequest, wait: float | None) -> Acquisition | None:
        memory, key = self._memory, request.keys.lock
        deadline = math.inf if wait is None else memory.clock() + wait
        memory.reached()
        contended = False
        ticket = memory.join(key)
        try:
            while True:
                with memory.changed:
                    granted = memory.take(request, ticket)
                    if granted is not None or memory.clock() >= deadline:
                        return granted and granted._replace(contended=contended)
                    if isinstance(memory.clock, VirtualClock):
                        pause = memory.seconds_until_change(key, deadline)
                        memory.clock.wait(memory.changed, pause)
                contended = True
                await asyncio.sleep(0.002)
        finally:
            memory.leave(key, ticket)

    async def _confirm(self, *args: Any) -> None:
        """There are no replicas that could lack the lock."""


class MemoryLock(ThreadsInMemory, Lock):
    """``Lock`` on a ``MemoryServer``, which takes the place of the redis-py client."""

    @property
    def _memory(self) -> MemoryServer:  # type: ignore[override]  # only ever read
        server: MemoryServer = self.redis
        return server


@contextmanager
def override(server: MemoryServer | None = None) -> Iterator[MemoryServer]:
    """Keep all locks of this process in memory: those of ``cache.lock()``, of ``locked()``, and
    those made by hand.

    Args:
        server: left out, a new one with a ``VirtualClock``.
    """
    memory = server or MemoryServer(VirtualClock())
    with ExitStack() as stack:
        for lock, changes in (
            (Lock, ThreadsInMemory),
            (Redlock, ThreadsInMemory),
            (AsyncLock, TasksInMemory),
            (AsyncRedlock, TasksInMemory),
        ):
            stack.enter_context(mock.patch.object(lock, "_memory", memory, create=True))
            for source in (InMemory, changes):
                for name, method in vars(source).items():
                    if name.startswith("_") and not name.startswith("__"):
                        stack.enter_context(mock.patch.object(lock, name, method, create=True))
        # So that the locks of this host are not those of other tests that run on it.
        stack.enter_context(mock.patch.object(Fallback, "_asked", return_value=(memory,)))
        yield memory
