"""What others are told of computations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..locking import events
from ..locking.events import Computed, Computing, RefreshFailed, Shared
from ..locking.server import Server
from .steps import Producer

__all__ = ["tell_refresh_failed", "tell_shared", "told"]


@contextmanager
def told(server: Server, producer: Producer, values: int = 1) -> Iterator[None]:
    """Tell of the computation of ``values`` values inside."""
    if not events.listeners:
        yield
        return
    subject = producer.subject(server)
    events.tell(Computing(subject))
    began = time.monotonic()
    try:
        yield
    except BaseException as failed:
        error = getattr(failed, "error", failed)  # As the producer raised it.
        events.tell(Computed(subject, time.monotonic() - began, error, values))
        raise
    events.tell(Computed(subject, time.monotonic() - began, None, values))


def tell_shared(
    server: Server, producer: Producer, *, stale: bool = False, values: int = 1
) -> None:
    if events.listeners:
        events.tell(Shared(producer.subject(server), stale, values))


def tell_refresh_failed(server: Server, producer: Producer, error: Exception) -> None:
    if events.listeners:
        events.tell(RefreshFailed(producer.subject(server), error))
