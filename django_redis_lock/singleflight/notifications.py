"""What others are told of computations."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from .. import events
from ..events import Computed, Computing, RefreshFailed, Shared
from ..notices import get_logger
from ..protocol import printable
from ..transport import Server
from .in_process import Overtaken
from .steps import Producer

__all__ = ["note_without_redis", "tell_refresh_failed", "tell_shared", "told"]

logger = get_logger("django_redis_lock.outage")

#: Seconds between two lines of the log about values computed without one server.
LOG_PAUSE_SECONDS = 60.0


class _Unlogged:
    """The values computed without one server since the last line of the log about them. Threads
    may get in each other's way: then a line says one more or less."""

    def __init__(self) -> None:
        self.logged_at = -math.inf
        self.values = 0


_unlogged: WeakKeyDictionary[Server, _Unlogged] = WeakKeyDictionary()


def note_without_redis(server: Server, key: bytes, error: BaseException, values: int = 1) -> None:
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
def told(
    server: Server, producer: Producer, values: int = 1, without_redis: bool = False
) -> Iterator[None]:
    """Tell of the computation of ``values`` values inside; ``without_redis``: nobody else could be
    asked for them."""
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


def tell_shared(
    server: Server, producer: Producer, *, stale: bool = False, values: int = 1
) -> None:
    if events.listeners:
        events.emit(Shared(producer.subject(server), stale, values))


def tell_refresh_failed(server: Server, producer: Producer, error: Exception) -> None:
    if events.listeners:
        events.emit(RefreshFailed(producer.subject(server), error))
