"""The rule of ``get_or_set``: one computation of a missing value, awaited by everyone else.

The first caller to find nothing leads a *flight*: it computes and stores. The others follow: the
threads of one process (or the tasks of one event loop) behind one of them, in memory, and that one
with a blocking read of the flight's stream, which wakes all followers of all processes at once.
Then each process reads the value once, and each caller decodes a copy of its own.

The leader's flight lives ``flight_timeout`` seconds and is renewed while it computes; if it dies,
the followers find the flight gone and one of them leads the next.

The algorithm is written once, as generators that yield a step (``Run``, ``Compute``,
``WaitForLeader``, ``WaitForEvent``) and are sent its result. ``runners`` executes the steps, for
threads and for asyncio. Knows Redis, not Django.
"""

from .in_process import DeferredCall, FlightKey, InProcessFlight, in_flight
from .many import MultiFlight
from .producer import Producer
from .runners import AsyncRunner, ThreadRunner
from .scripts import DELETE, END_FLIGHT, EXPIRE_AT, LET_GO, LETTING_GO, ON_VALUES, READ, WRITE
from .steps import TOO_LATE, CoordinationError, Run, Steps

__all__ = [
    "DELETE",
    "END_FLIGHT",
    "EXPIRE_AT",
    "LETTING_GO",
    "LET_GO",
    "ON_VALUES",
    "READ",
    "TOO_LATE",
    "WRITE",
    "AsyncRunner",
    "CoordinationError",
    "DeferredCall",
    "FlightKey",
    "InProcessFlight",
    "MultiFlight",
    "Producer",
    "Run",
    "Steps",
    "ThreadRunner",
    "in_flight",
]
