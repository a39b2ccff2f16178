"""The algorithm of ``get_or_set``: one caller computes a missing value, all others wait for it.

The first caller that finds no value leads a *flight*: it computes the value and stores it. The
other callers follow. The threads of one process (or the tasks of one event loop) wait in memory for
one of them, and that one waits with a blocking read of the flight's stream, which wakes the
followers of all processes at once. Then each process reads the value once, and each caller decodes
a separate copy.

A flight lives ``flight_timeout`` seconds, and the leader's keeper renews it during the computation.
If the leader dies, the flight expires, and one of the followers leads the next.

The algorithm is written once, as generators of steps. A step is what a method of a runner returns:
with ``ThreadRunner`` the result, with ``AsyncRunner`` an awaitable. This package does not import
Django.
"""

from .flight import (
    TOO_LATE,
    CoordinationError,
    FlightKey,
    Flights,
    InProcessFlight,
    in_flight,
)
from .leader import Producer
from .many import MultiFlight
from .runners import AsyncRunner, DeferredCall, Runner, Steps, ThreadRunner
from .scripts import DELETE, END_FLIGHT, EXPIRE_AT, LET_GO, LETTING_GO, ON_VALUES, READ, WRITE

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
    "Flights",
    "InProcessFlight",
    "MultiFlight",
    "Producer",
    "Runner",
    "Steps",
    "ThreadRunner",
    "in_flight",
]
