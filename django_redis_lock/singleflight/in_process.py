"""Those of one process who are after the same value: one asks Redis, the others wait for it."""

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

__all__ = [
    "DeferredCall",
    "FlightKey",
    "InProcessFlight",
    "LeaderRef",
    "Overtaken",
    "being_computed",
    "board",
    "boarded",
    "computing",
    "land",
    "overtake",
    "token_for",
]


class LeaderRef:
    """Speaks to Redis for all aboard, as long as there is a reference to it."""


class InProcessFlight:
    """Those of this process that are after one value; the first speaks to Redis for all."""

    def __init__(self, landed: Any, speaker: LeaderRef | None = None) -> None:
        self.landed = landed
        self.speaker = weakref.ref(speaker or self)
        self.looking = threading.Lock()  # Of those who come later one at a time looks for a value.
        self.asked = 0  # How often Redis was asked.
        self.found: Any = None  # What Redis keeps, for each to decode; None: look again.
        self.computed = False  # Whether what was found was being computed when Redis was asked.
        self.outage: Exception | None = None  # Why Redis could not be asked.


#: A key of one database, and the event loop of those who are after its value (None: threads).
FlightKey = tuple[Server, bytes, Any]

#: Who is after a value in this process. One step of a dict is atomic, so it needs no mutex.
boarded: dict[FlightKey, InProcessFlight] = {}
#: What the present thread or task is computing.
_computing: ContextVar[tuple[set[tuple[Server, bytes]], ...]] = ContextVar("computing", default=())


class Overtaken(Exception):
    """The call had not begun, and another thread computes the value instead."""


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


def board(place: FlightKey, mine: InProcessFlight) -> InProcessFlight:
    """Those who are after the same value already, or else ``mine``."""
    while True:
        aboard = boarded.setdefault(place, mine)
        if aboard is mine or aboard.speaker() is not None:
            return aboard
        land(place, aboard)  # An exception from a signal handler came just before that.


def land(place: FlightKey, aboard: InProcessFlight) -> None:
    """Let those go who wait behind ``aboard``, if any do."""
    try:
        if boarded.get(place) is aboard:
            del boarded[place]
    finally:
        aboard.landed.set()


after_fork(boarded.clear)
after_fork(_deferred.clear)
