"""The steps that the generators of this package yield; see ``runners``."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from ..clock import time
from ..keeper import Job
from ..protocol import Call
from ..transport import Server, is_outage

#: Seconds after which a follower checks whether its flight still exists.
FOLLOWER_CHECK_SECONDS = 2.0


class Run(NamedTuple):
    """Run scripts, in one round trip; sends their replies. With ``done`` also if the task is
    cancelled."""

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
    """Execute these steps in the background; sends whether the queue had room. Until they begin,
    the keeper does ``renewal``; they end it."""

    steps: Generator[Any, Any, Any]
    renewal: Job


Step = Run | Compute | WaitForLeader | WaitForEvent | Pause | RunInBackground
Steps = Generator[Step, Any, Any]


class CoordinationError(Exception):
    """A request to Redis failed, and nothing was computed; has the error as its cause."""


#: The result of ``get_or_compute`` if another computation takes longer than the caller waits.
TOO_LATE = object()
#: The caller leads; the value is in Redis.
LEAD, FOUND = object(), object()


def retry_during_failover(server: Server, asking: Callable[[], Steps]) -> Steps:
    """What ``asking`` returns; an outage is retried until a failover would be complete, because a
    follower wants the value and not an error."""
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
