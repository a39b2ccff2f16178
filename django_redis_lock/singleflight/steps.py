"""What the rule of flights asks for, step by step, and what it is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from ..keeper import Job
from ..protocol import Call
from ..transport import Server, is_outage

__all__ = [
    "FOLLOWER_CHECK_SECONDS",
    "FOUND",
    "LEAD",
    "TOO_LATE",
    "Compute",
    "CoordinationError",
    "Pause",
    "Run",
    "RunInBackground",
    "Step",
    "Steps",
    "WaitForEvent",
    "WaitForLeader",
    "retry_during_failover",
    "text",
]

#: Seconds between two looks of a follower at whether its flight still exists.
FOLLOWER_CHECK_SECONDS = 2.0


class Run(NamedTuple):
    """Run scripts, in one round trip; sends their replies. What must be ``done`` is done also if
    who waits for it is cancelled."""

    calls: tuple[Call, ...]
    done: bool = False


class Compute(NamedTuple):
    """Call a function, and await it if it is awaitable; sends what it returns."""

    function: Callable[[], Any]


class WaitForLeader(NamedTuple):
    """Wait until one of the flights with these streams has ended, or until a monotonic time."""

    streams: tuple[bytes, ...]
    until: float


class WaitForEvent(NamedTuple):
    """Wait for an event of this process, or until a monotonic time; sends whether it came."""

    event: Any
    until: float


class Pause(NamedTuple):
    """Do nothing for so many seconds."""

    seconds: float


class RunInBackground(NamedTuple):
    """Do these steps in the background; sends whether there was room for them. If they cannot
    begin at once, the keeper does ``meanwhile``, which they end."""

    steps: Generator[Any, Any, Any]
    meanwhile: Job


Step = Run | Compute | WaitForLeader | WaitForEvent | Pause | RunInBackground
Steps = Generator[Step, Any, Any]


class CoordinationError(Exception):
    """Redis could not be asked who computes; the cause says why. Nothing was computed."""


#: What ``get_or_compute`` gives when another's computation takes longer than the caller waits.
TOO_LATE = object()
#: This caller is to compute the value; it is there.
LEAD, FOUND = object(), object()


def retry_during_failover(server: Server, asking: Callable[[], Steps]) -> Steps:
    """What ``asking`` returns. Where another server takes the place of one that has failed, it is
    asked again until that has happened: who follows a computation wants its value, not an error."""
    until = time.monotonic() + server.FAILOVER_SECONDS
    while True:
        try:
            return (yield from asking())
        except (RedisError, OSError) as error:
            if not is_outage(error) or time.monotonic() >= until:
                raise
        yield Pause(0.1)


def text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
