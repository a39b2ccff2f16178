"""``time`` as this package uses it for deadlines: the real one, unless a test has put another
clock in its place (``testing``).

Its ``monotonic`` also counts the time for which the host sleeps (a laptop, a paused virtual
machine), which ``time.monotonic`` does not everywhere: Redis goes on, and another may get the lock.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time as real
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from .steps import Step

#: The system lets a wait stand still while the host sleeps. So no wait is longer in one piece.
MAX_WAIT_SECONDS = 2.0


def _monotonic() -> Callable[[], float]:
    names = ("CLOCK_BOOTTIME", *(("CLOCK_MONOTONIC",) if sys.platform == "darwin" else ()))
    for name in names:
        with suppress(AttributeError, OSError):  # Not there, or not in this container.
            clock = partial(real.clock_gettime, getattr(real, name))
            clock()
            return clock
    return real.monotonic


class Clock:
    """What tells the time and lets it pass: the system's clock, and the base of those of tests."""

    clock: Clock

    monotonic = staticmethod(_monotonic())
    time = staticmethod(real.time)
    sleep: Callable[[float], Step[None]] = staticmethod(real.sleep)
    asleep = staticmethod(asyncio.sleep)

    def parts(self, seconds: float) -> Iterator[float]:
        """The pieces of a wait of so many seconds, at least one."""
        until = self.monotonic() + seconds
        while seconds > MAX_WAIT_SECONDS:
            yield MAX_WAIT_SECONDS
            seconds = until - self.monotonic()
        yield max(0.0, seconds)

    async def wait(self, tasks: Collection[Any], seconds: float) -> Any:
        """``asyncio.wait(tasks, timeout=seconds)``."""
        for part in self.parts(seconds):
            done, pending = await asyncio.wait(tasks, timeout=part)
            if not pending:
                break
        return done, pending

    def wait_for(
        self, condition: threading.Condition, ready: Callable[[], object], seconds: float | None
    ) -> bool:
        """``condition.wait_for(ready, seconds)``."""
        if seconds is None:
            return bool(condition.wait_for(ready))
        return any(map(partial(condition.wait_for, ready), self.parts(seconds)))

    def use(self, clock: Clock) -> None:
        """Tell ``clock``'s time from now on. As attributes, its functions cost what those of
        ``time`` cost."""
        self.clock = clock
        for name in ("monotonic", "time", "sleep", "asleep", "wait", "wait_for", "parts"):
            setattr(self, name, getattr(clock, name))


#: The one in use.
time = Clock()
time.use(Clock())
#: The real one, whatever tests do: for what goes on outside of this process.
real_time = Clock()
