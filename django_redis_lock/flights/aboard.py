"""Those of one process who are after the same value: one asks Redis, the others wait for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..locking.server import Server

__all__ = ["Aboard", "Place", "being_computed", "boarded", "computing", "land"]


class Aboard:
    """Those of this process that are after one value; the first speaks to Redis for all."""

    def __init__(self, landed: Any) -> None:
        self.landed = landed
        self.looking = threading.Lock()  # Of those who come later one at a time looks for a value.
        self.asked = 0  # How often Redis was asked.
        self.found: Any = None  # What Redis keeps, for each to decode; None: look again.
        self.computed = False  # Whether what was found was being computed when Redis was asked.
        self.outage: Exception | None = None  # Why Redis could not be asked.


#: A key of one database, and the event loop of those who are after its value (None: threads).
Place = tuple[Server, bytes, Any]

#: Who is after a value in this process. One step of a dict is atomic, so it needs no mutex.
boarded: dict[Place, Aboard] = {}
#: What the present thread or task is computing.
_computing: ContextVar[frozenset[tuple[Server, bytes]]] = ContextVar(
    "computing", default=frozenset()
)


def being_computed() -> frozenset[tuple[Server, bytes]]:
    """What the present thread or task is computing."""
    return _computing.get()


@contextmanager
def computing(server: Server, keys: Iterable[bytes]) -> Iterator[None]:
    """Note that the present thread or task computes ``keys``."""
    mark = _computing.set(_computing.get().union((server, key) for key in keys))
    try:
        yield
    finally:
        _computing.reset(mark)


def land(place: Place, aboard: Aboard) -> None:
    boarded.pop(place, None)  # A forked child has none.
    aboard.landed.set()


os.register_at_fork(after_in_child=boarded.clear)
