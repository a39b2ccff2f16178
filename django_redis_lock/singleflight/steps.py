"""What the rule of flights asks for, step by step, and what it is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from ..events import Subject
from ..keeper import Job
from ..protocol import Call
from ..transport import Server, is_outage

__all__ = [
    "FOUND",
    "LEAD",
    "LOOK_EVERY",
    "TOO_LATE",
    "Compute",
    "CoordinationError",
    "Pause",
    "Producer",
    "ProducerFailed",
    "Run",
    "RunInBackground",
    "Step",
    "Steps",
    "WaitForEvent",
    "WaitForLeader",
    "outlasting",
    "text",
]

#: Seconds between two looks of a follower at whether its flight still exists.
LOOK_EVERY = 2.0
#: How much of a failed computation's message its followers are told, in characters.
LONGEST_MESSAGE = 500


class Producer(NamedTuple):
    """What to compute and how to keep it.

    Attributes:
        compute: gives the value.
        encode: the value as Redis is to keep it.
        decode: the value from what Redis kept.
        lifetime: milliseconds to keep it; 0 without end, negative not at all.
        stale: how many of these it may be served although it is due to be computed anew.
        error_ttl: milliseconds a failure keeps others from trying again; 0 not at all.
        name, group, cache: what others are told of it, see ``events.Subject``.
    """

    compute: Callable[[], Any]
    encode: Callable[[Any], bytes | int]
    decode: Callable[[Any], Any]
    lifetime: int
    stale: int = 0
    error_ttl: int = 0
    name: str = ""
    group: str = ""
    cache: Any = None

    def subject(self, server: Server) -> Subject:
        return Subject.of(self.name, self.group, "", server, self.cache)


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


class ProducerFailed(Exception):
    """A function to ``Compute`` raised ``error``; the caller is given that, as it was raised. (A
    generator could not pass on each exception: GeneratorExit and StopIteration are its own.)"""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error

    def describe(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"[:LONGEST_MESSAGE]


class CoordinationError(Exception):
    """Redis could not be asked who computes; the cause says why. Nothing was computed."""


#: What ``get_or_compute`` gives when another's computation takes longer than the caller waits.
TOO_LATE = object()
#: This caller is to compute the value; it is there.
LEAD, FOUND = object(), object()


def outlasting(server: Server, asking: Callable[[], Steps]) -> Steps:
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
