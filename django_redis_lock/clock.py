"""``time`` as this package uses it for deadlines: the real one, unless a test has put another
clock in its place (``testing``)."""

from __future__ import annotations

import asyncio
import threading
import time as real
from collections.abc import Callable, Collection
from typing import Any


class Clock:
    """What tells the time and lets it pass: the system's clock, and the base of those of tests."""

    monotonic = staticmethod(real.monotonic)
    time = staticmethod(real.time)
    sleep: Callable[[float], None] = staticmethod(real.sleep)
    asleep = staticmethod(asyncio.sleep)

    async def wait(self, tasks: Collection[Any], seconds: float) -> Any:
        """``asyncio.wait(tasks, timeout=seconds)``."""
        return await asyncio.wait(tasks, timeout=seconds)

    def wait_for(
        self, condition: threading.Condition, ready: Callable[[], Any], seconds: float | None
    ) -> bool:
        """``condition.wait_for(ready, seconds)``."""
        limit = None if seconds is None else min(seconds, threading.TIMEOUT_MAX)
        return bool(condition.wait_for(ready, limit))


class Time:
    """The clock in use. Its functions are attributes, to cost what those of ``time`` cost."""

    def __init__(self, clock: Clock) -> None:
        self.use(clock)

    def use(self, clock: Clock) -> None:
        self.clock = clock
        self.monotonic = clock.monotonic
        self.time = clock.time
        self.sleep = clock.sleep
        self.asleep = clock.asleep
        self.wait = clock.wait
        self.wait_for = clock.wait_for


time = Time(Clock())
