"""A clock that tests move, and the keeper that goes by it."""

from __future__ import annotations

import asyncio
import heapq
import math
import threading
import time as real
from collections.abc import Callable, Collection
from typing import Any

from ..clock import Clock
from ..keeper import Keeper, Subscription
from ..transport import Server

#: Seconds of real time in which another thread or task can do what a wait is for, before the wait
#: moves the clock.
GRACE_SECONDS = 0.01
#: How often the keeper is asked in one move; a year of renewals, or a job that is due for ever.
MAX_ROUNDS = 1_000_000
#: An endless wait is one that has lasted for so many times so many seconds, and for nothing.
LONG_WAIT_SECONDS, MAX_LONG_WAITS = 3600.0, 4


class SteppedKeeper(Keeper):
    """Does its jobs in the thread that moves the clock."""

    def _start(self) -> None:
        """It needs no thread."""

    def next_due(self) -> float:
        """The monotonic time of the next job."""
        with self._mutex:
            while self._due and self._due[0][2] not in self._jobs:
                heapq.heappop(self._due)
            return self._due[0][0] if self._due else math.inf

    def do_due(self, now: float) -> None:
        """Do what is due."""
        with self._mutex:
            batch = self._pop_due(now)
        self._serve(batch)
        self._requeue(batch)

    def hurry(self, now: float) -> None:
        super().hurry(now)
        self.do_due(now)

    def subscribe(
        self, server: Server, channel: bytes, received: Callable[[bytes | None], object]
    ) -> Subscription:
        """Its thread would wait for a message, and move the clock by that."""
        return Subscription(server, channel, received)


class VirtualClock(Clock):
    """A clock that stands still unless it is moved. A wait moves it to the wait's end, or to what
    ends the wait; renewals and the like happen as the time for them comes."""

    def __init__(self) -> None:
        self._now = 1_000_000.0
        self._unix_time = real.time() - self._now
        self._moving = threading.RLock()
        self._long_waits = 0
        self.keeper = SteppedKeeper()

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._move_to(self._now + seconds)

    def _move_to(self, end: float) -> None:
        with self._moving:
            for _ in range(MAX_ROUNDS):
                if (due := self.keeper.next_due()) > end:
                    break
                self._now = max(due, self._now)
                self.keeper.do_due(self._now)
            self._now = max(end, self._now)

    def _move_towards(self, end: float) -> None:
        """Until something may have happened, but not beyond ``end``."""
        next_end = min(end, self.keeper.next_due())
        if math.isinf(next_end):
            raise AssertionError(_ENDLESS)
        self._move_to(next_end)

    def _waited(self, seconds: float, came: Any) -> None:
        self._long_waits = self._long_waits + 1 if seconds >= LONG_WAIT_SECONDS and not came else 0
        if self._long_waits >= MAX_LONG_WAITS:
            self._long_waits = 0
            raise AssertionError(_ENDLESS)

    # -- as ``clock.Clock`` ------------------------------------------------------------------

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._unix_time + self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    async def asleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)

    async def wait(self, tasks: Collection[Any], seconds: float) -> Any:
        end = self._now + seconds
        done, pending = await asyncio.wait(tasks, timeout=GRACE_SECONDS)
        while not done and self._now < end:
            self._move_towards(end)
            done, pending = await asyncio.wait(tasks, timeout=0.001)
        self._waited(seconds, done)
        return done, pending

    def wait_for(
        self, condition: threading.Condition, ready: Callable[[], Any], seconds: float | None
    ) -> bool:
        seconds = math.inf if seconds is None else seconds
        end = self._now + seconds
        condition.wait_for(ready, GRACE_SECONDS)
        while not ready() and self._now < end:
            condition.release()  # What the time brings may be for this wait.
            try:
                self._move_towards(end)
            finally:
                condition.acquire()
        self._waited(seconds, ready())
        return bool(ready())


_ENDLESS = "this wait would never end: only the test moves a virtual clock"
