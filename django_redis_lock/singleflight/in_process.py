"""Callers of one process that want the same value: one asks Redis, the others wait for it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from ..forks import after_fork
from ..protocol import new_token
from ..transport import Server
from .producer import Overtaken

__all__ = [
    "DeferredCall",
    "FlightKey",
    "InProcessFlight",
    "LeaderRef",
    "being_computed",
    "computing",
    "in_flight",
    "join",
    "leave",
    "overtake",
    "token_for",
]


class LeaderRef:
    """The caller that asks Redis for all of a flight, as long as there is a reference to this."""


class InProcessFlight:
    """The callers of this process that want one value; the first asks Redis for all of them."""

    def __init__(self, ended: Any, leader_ref: LeaderRef | None = None) -> None:
        self.ended = ended
        self.leader_ref = weakref.ref(leader_ref or self)
        self.read_lock = (
            threading.Lock()
        )  # Of those who come later one at a time looks for a value.
        self.asked = 0  # How often Redis was asked.
        self.found: Any = None  # What Redis keeps, for each to decode; None: look again.
        self.computed = False  # Whether what was found was being computed when Redis was asked.
        self.outage: Exception | None = None  # Why Redis could not be asked.


#: A key of one database, and what stands for its callers (None: threads; see ``Flights``).
FlightKey = tuple[Server, bytes, Any]

#: The flights of this process. A single operation of a dict is atomic, so it needs no mutex.
in_flight: dict[FlightKey, InProcessFlight] = {}
#: What the present thread or task is computing.
_computing: ContextVar[tuple[set[tuple[Server, bytes]], ...]] = ContextVar("computing", default=())


class DeferredCall:
    """A function for another thread, which runs it when it has time: Django's thread for
    synchronous code. That thread may be waiting for the very value. So as long as the function has
    not begun, a thread that would wait for it may ``overtake`` it and compute the value itself.

    Args:
        defer: makes of a function one that runs in that thread, and is awaited.
    """

    def __init__(self, function: Callable[..., Any], defer: Callable[..., Any]) -> None:
        self._function = function
        self._defer = defer
        self._mutex = threading.Lock()
        self._begun = self._overtaken = False

    def __call__(self, *args: Any) -> Any:
        return self._defer(self._begin)(*args)

    def _begin(self, *args: Any) -> Any:
        with self._mutex:
            if self._overtaken:
                self._overtaken = False
                raise Overtaken
            self._begun = True
        return self._function(*args)

    def overtake(self) -> bool:
        """Whether it has not begun. Then it will not, and its caller follows whoever computes."""
        with self._mutex:
            self._overtaken = not self._begun
            return self._overtaken


#: Calls of this process that compute a value, or are about to, by the tokens of their flights.
_deferred: weakref.WeakValueDictionary[bytes, DeferredCall] = weakref.WeakValueDictionary()


def token_for(compute: Callable[..., Any]) -> bytes:
    """A token for the flight of a value that ``compute`` gives."""
    token = new_token()
    if isinstance(compute, DeferredCall):
        _deferred[token] = compute
    return token


def overtake(leader: bytes) -> bool:
    """Whether the flight with the token ``leader`` is this process's and its function has not begun
    to run, and will not."""
    call = _deferred.get(leader)
    return call is not None and call.overtake()


def being_computed() -> set[tuple[Server, bytes]]:
    """What the present thread or task is computing, or the one that has started it."""
    return set().union(*_computing.get())


@contextmanager
def computing(server: Server, keys: Iterable[bytes]) -> Iterator[None]:
    """Note that the present thread or task computes ``keys``."""
    here = {(server, key) for key in keys}
    mark = _computing.set((*_computing.get(), here))
    try:
        yield
    finally:
        here.clear()  # A task that was started meanwhile may go on, with what is in its context.
        with suppress(ValueError):  # The garbage collector ends it, elsewhere.
            _computing.reset(mark)


def join(flight_id: FlightKey, mine: InProcessFlight) -> InProcessFlight:
    """The flight that is under way for the same value, or else ``mine``, which begins now."""
    while True:
        shared = in_flight.setdefault(flight_id, mine)
        if shared is mine or shared.leader_ref() is not None:
            return shared
        leave(flight_id, shared)  # An exception from a signal handler came just before that.


def leave(flight_id: FlightKey, shared: InProcessFlight) -> None:
    """End the flight ``shared`` of this process: its other callers go on."""
    try:
        if in_flight.get(flight_id) is shared:
            del in_flight[flight_id]
    finally:
        shared.ended.set()


after_fork(in_flight.clear)
after_fork(_deferred.clear)
