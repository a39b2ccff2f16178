"""What to compute and how to store it, and the events and log lines about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from .. import events
from ..clock import time
from ..events import Computed, Computing, RefreshFailed, Shared, Subject
from ..notices import get_logger
from ..protocol import printable
from ..transport import Server

logger = get_logger("django_redis_lock.outage")

#: The longest message of a failed computation that other callers get.
MAX_MESSAGE_CHARACTERS = 500
#: Seconds between two lines of the log about values computed without one server.
LOG_PAUSE_SECONDS = 60.0


class Producer(NamedTuple):
    """What to compute and how to store it.

    Attributes:
        compute: returns the value.
        encode: turns the value into what Redis stores.
        decode: turns that into the value.
        lifetime: milliseconds to store it; 0 without end, negative not at all.
        stale: at the end of its lifetime, the milliseconds for which it is stale.
        error_ttl: milliseconds after a failure in which others do not try again; 0 for none.
        name, group, cache: see ``events.Subject``.
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


class ProducerFailed(Exception):
    """The function of a ``Compute`` raised ``error``, which the runner raises to the caller. (Not
    every exception can pass through a generator: it handles GeneratorExit and StopIteration.)"""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error

    def describe(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"[:MAX_MESSAGE_CHARACTERS]


class Overtaken(Exception):
    """The call had not begun, and another thread computes the value instead."""


class _Unlogged:
    """The number of values computed without one server since the last log line. Not exact if
    several threads count at once."""

    def __init__(self) -> None:
        self.logged_at = -math.inf
        self.values = 0


_unlogged: WeakKeyDictionary[Server, _Unlogged] = WeakKeyDictionary()


def log_without_redis(server: Server, key: bytes, error: BaseException, values: int = 1) -> None:
    """Log that ``values`` values, that of ``key`` first, are computed without Redis: the first,
    then one line a minute for each server."""
    unlogged = _unlogged.setdefault(server, _Unlogged())
    unlogged.values += values
    now = time.monotonic()
    if now - unlogged.logged_at >= LOG_PAUSE_SECONDS:
        unlogged.logged_at, number, unlogged.values = now, unlogged.values, 0
        logger.warning(
            "Redis does not answer, get_or_set computes without it: %s, and %d other values since "
            "the last such line (%s)",
            *(printable(key), number - 1, error),
        )


@contextmanager
def computation_events(
    server: Server, producer: Producer, values: int = 1, without_redis: bool = False
) -> Iterator[None]:
    """Emit events about the computation of ``values`` values in the ``with`` block.

    Args:
        without_redis: Redis could not be asked whether another process computes them.
    """
    if not events.listeners:
        yield
        return
    subject = producer.subject(server)
    events.emit(Computing(subject))
    began = time.monotonic()
    try:
        yield
    except BaseException as failed:
        error = getattr(failed, "error", failed)  # As the producer raised it.
        if isinstance(error, Overtaken):
            error, values = None, 0
        seconds = time.monotonic() - began
        events.emit(Computed(subject, seconds, error, values, without_redis))
        raise
    events.emit(Computed(subject, time.monotonic() - began, None, values, without_redis))


def emit_shared(
    server: Server, producer: Producer, *, stale: bool = False, values: int = 1
) -> None:
    if events.listeners:
        events.emit(Shared(producer.subject(server), stale, values))


def emit_refresh_failed(server: Server, producer: Producer, error: Exception) -> None:
    if events.listeners:
        events.emit(RefreshFailed(producer.subject(server), error))
