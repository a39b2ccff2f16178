"""Django signals for events of locks and computations.

They are sent with ``send_robust``. Receivers run

* in the thread that acquired, released or computed, before the call returns;
* for events in an event loop, in a separate task, so that no receiver blocks the loop: coroutine
  functions in the loop, others in Django's thread for synchronous code, or, if the loop ends before
  that, in the background thread;
* for ``lock_lost``, ``server_down`` and ``server_up``, in a background thread, one after the other.

The signals of servers have the argument ``server`` (its address) and no sender. All others have the
arguments ``sender`` (the class of the cache backend, or ``Lock`` for a lock made without one),
``name``, ``group`` (the metrics group), ``label`` and ``cache`` (the backend or None), and
those listed with the signal.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections
from django.dispatch import Signal

from . import events, transport
from .events import Subject
from .locking import Lock
from .threads import ThreadPool

__all__ = [
    "lock_acquired",
    "lock_fell_back",
    "lock_lost",
    "lock_rejected",
    "lock_released",
    "lock_timed_out",
    "server_down",
    "server_up",
    "value_computed",
    "value_refresh_failed",
]

logger = logging.getLogger("django_redis_lock.signals")

#: Also: fence (int), waited (seconds), contended (bool: it was not free at first).
lock_acquired = Signal()
#: Also: fence, held (seconds).
lock_released = Signal()
#: A lock ended before its holder released it. Also: fence, held (seconds), reason (str).
lock_lost = Signal()
#: A single attempt (``blocking=False``) found the lock taken.
lock_rejected = Signal()
#: A caller waited for a lock and did not get it. Also: waited (seconds).
lock_timed_out = Signal()
#: A lock was taken without Redis (ON_REDIS_DOWN). Also: how ("local" or "run"), error.
lock_fell_back = Signal()
#: A value was computed. Also: seconds, values (how many, by ``get_or_set_many``), without_redis
#: (bool: Redis was down).
value_computed = Signal()
#: The refresh of a stale value failed; callers still get the old one. Also: error.
value_refresh_failed = Signal()
#: A Redis server does not reply to this process; sent once for each outage. Also: error.
server_down = Signal()
#: The server replies again. Also: seconds (of the outage), spared (calls that failed at once during
#: it), fallbacks (locks taken without it).
server_up = Signal()

_SIGNALS: dict[type, Signal] = {
    events.Acquired: lock_acquired,
    events.Released: lock_released,
    events.Lost: lock_lost,
    events.Rejected: lock_rejected,
    events.TimedOut: lock_timed_out,
    events.Computed: value_computed,
    events.RefreshFailed: value_refresh_failed,
    events.FellBack: lock_fell_back,
    events.ServerDown: server_down,
    events.ServerUp: server_up,
}
#: The signals whose receivers run in a background thread.
_IN_BACKGROUND = (lock_lost, server_down, server_up)

#: The most events that may wait for their receivers.
MAX_WAITING_EVENTS = 10_000
_background = ThreadPool("django_redis_lock signals", 1, MAX_WAITING_EVENTS, idle_seconds=5.0)


def _send(event: Any) -> None:
    signal = _SIGNALS.get(type(event))
    if signal is None or not signal.receivers:
        return
    arguments = event._asdict()
    subject: Subject | None = arguments.pop("subject", None)
    if subject is None:
        arguments.update(sender=None)
    else:
        arguments.update(
            sender=Lock if subject.cache is None else type(subject.cache),
            name=subject.name,
            group=subject.group,
            label=subject.label,
            cache=subject.cache,
        )
    if signal is value_computed and arguments.pop("error") is not None:
        return  # The caller gets the exception.
    if signal in _IN_BACKGROUND:
        if not _background.submit(lambda: signal.send_robust(**arguments), connections.close_all):
            about = event.server if subject is None else subject.group
            logger.error("Too many events at once: receivers are not called for %s", about)
    elif asyncio._get_running_loop() is not None:
        _send_in_the_loop(signal, arguments)
    else:
        signal.send_robust(**arguments)


def _send_in_the_loop(signal: Signal, arguments: dict[str, Any]) -> None:
    if any(is_async for *_, is_async in signal.receivers):
        transport.in_background(signal.asend_robust(**arguments))
        return
    begun = False

    def send() -> None:
        nonlocal begun
        begun = True
        signal.send_robust(**arguments)

    def ended(sending: asyncio.Future[None]) -> None:
        if not begun and (sending.cancelled() or sending.exception()):
            # The loop has ended, often with the call, before it came to this.
            _background.submit(send, connections.close_all)

    transport.in_background(sync_to_async(send)()).add_done_callback(ended)


# A project imports this module to connect a receiver; only then are there events.
events.subscribe(_send)
