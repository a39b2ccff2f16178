"""The callers of this process that want one value: one asks Redis, the others wait for it."""

from __future__ import annotations

import weakref
from typing import Any

from ..threads import after_fork
from ..transport import Server
from .runners import Runner


class LeaderRef:
    """Exists as long as the caller that queries Redis for the callers of an ``InProcessFlight``."""


class InProcessFlight:
    """The callers of this process that want one value; the first queries Redis for all of them."""

    def __init__(self, runner: Runner, key: bytes, leader_ref: LeaderRef | None = None) -> None:
        self.flight_id: FlightKey = (runner.server, key, runner.group)
        self.ended = runner.new_event()
        self.leader_ref = weakref.ref(leader_ref or self)
        self.asked = 0  # How many requests the first caller has sent.
        self.found: Any = None  # The encoded value; None: query Redis again.
        self.trace = ""  # Of the computation; see ``events.trace_parent``.
        self.computed = False  # Whether the value was computed, not only read.
        self.outage: Exception | None = None  # Why a request failed.


#: A key of one database, and what stands for its callers: the ``group`` of their runners.
FlightKey = tuple[Server, bytes, Any]

#: The flights of this process. A single operation of a dict is atomic, so it needs no mutex.
in_flight: dict[FlightKey, InProcessFlight] = {}
after_fork(in_flight.clear)


def join(mine: InProcessFlight) -> InProcessFlight:
    """The flight of another caller for the same value, or ``mine``, which then begins."""
    while True:
        shared = in_flight.setdefault(mine.flight_id, mine)
        if shared is mine or shared.leader_ref() is not None:
            return shared
        leave(shared)  # A signal handler's exception kept its caller from that.


def leave(shared: InProcessFlight) -> None:
    """End the flight ``shared`` of this process, and wake its other callers."""
    try:
        if in_flight.get(shared.flight_id) is shared:
            in_flight.pop(shared.flight_id, None)  # The keeper may be doing the same.
    finally:
        shared.ended.set()
