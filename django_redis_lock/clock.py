"""``time`` as this package uses it for deadlines: the real one, unless a test has put another
clock in its place (``testing``)."""

from __future__ import annotations

import asyncio
import threading
import time as real
from collections.abc import Callable, Collection
from typing import Any, Protocol


class Clock(Protocol):
    """What tells the time and lets it pass."""

    def monotonic(self) -> float: ...
    def time(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...
    async def asleep(self, seconds: float) -> None: ...
    async def wait(self, tasks: Collection[Any], seconds: float) -> Any:
        """``asyncio.wait(tasks, timeout=seconds)``."""

    def wait_for(
        self, condition: threading.Condition, ready: Callable[[], Any], seconds: float | None
    ) -> bool:
        """``condition.wait_for(ready, seconds)``."""


class RealClock:
    """That of the system."""

    monotonic = staticmethod(real.monotonic)
    time = staticmethod(real.time)
    sleep = staticmethod(real.sleep)
    asleep = staticmethod(asyncio.sleep)

    @staticmethod
    async def wait(tasks: Collection[Any], seconds: float) -> Any:
        return await asyncio.wait(tasks, timeout=seconds)

    @staticmethod
    def wait_for(
        condition: threading.Condition, ready: Callable[[], Any], seconds: float | None
    ) -> bool:
        limit = None if seconds is None else min(seconds, threading.TIMEOUT_MAX)
        return bool(condition.wait_for(ready, limit))


class Time:
    """The clock in use. Each of its functions is an attribute, which costs what a function of the
    module ``time`` costs."""

    def __init__(self, clock: Clock) -> None:
        self.use(clock)

    def use(self, clock: Clock) -> None:
        """Read ``clock`` from now on."""
        self.clock = clock
        self.monotonic = clock.monotonic
        self.time = clock.time
        self.sleep = clock.sleep
        self.asleep = clock.asleep
        self.wait = clock.wait
        self.wait_for = clock.wait_for


time = Time(RealClock())
