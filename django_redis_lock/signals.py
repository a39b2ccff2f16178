"""Django signals: what happens to locks and computations, told to the project's receivers.

They are sent with ``send_robust`` (what a receiver raises is logged by Django and goes no further),
and only if somebody receives them. Where receivers run:

* in the thread that acquired, released or computed, and before the call returns;
* for what happens in an event loop, in a task of its own, so that no receiver holds the loop up:
  coroutine functions in the loop, others in Django's thread for synchronous code;
* for ``lock_lost``, ``server_down`` and ``server_up``, which anybody may find out, in a background
  thread, one after the other.

Those of servers have the argument ``server`` (its address), and no sender. Each other has the
arguments ``sender`` (the class of the cache backend, or ``Lock`` for a lock that was made without
one), ``name``, ``group`` (under which it is counted), ``label`` and ``cache`` (the backend or
None). Each has those that are said beside it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from django.db import connections
from django.dispatch import Signal

from . import events
from .events import Subject
from .forks import after_fork
from .keeper import Background
from .locking import Lock, in_background

__all__ = [
    "lock_acquired",
    "lock_fell_back",
    "lock_lost",
    "lock_released",
    "lock_timed_out",
    "server_down",
    "server_up",
    "value_computed",
    "value_refresh_failed",
]

logger = logging.getLogger("django_redis_lock.signals")

#: Also: fence (int), waited (seconds), contended (bool: it was not free at once).
lock_acquired = Signal()
#: Also: fence, held (seconds).
lock_released = Signal()
#: A lock ended before its holder released it. Also: fence, held (seconds), reason (str).
lock_lost = Signal()
#: A lock was not to be had. Also: waited (seconds), blocking (bool: False for one try).
lock_timed_out = Signal()
#: A lock was taken without Redis (ON_REDIS_DOWN). Also: how ("local" or "run"), error.
lock_fell_back = Signal()
#: A value was computed. Also: seconds, values (how many, by ``get_or_set_many``), without_redis
#: (bool: Redis was away).
value_computed = Signal()
#: A stale value could not be computed anew, and the old one is served on. Also: error.
value_refresh_failed = Signal()
#: A Redis server does not answer this process, said once for each outage. Also: error.
server_down = Signal()
#: It answers again. Also: seconds (of the outage), spared (calls that failed at once meanwhile),
#: fallbacks (locks taken without it).
server_up = Signal()

_SIGNALS: dict[type, Signal] = {
    events.Acquired: lock_acquired,
    events.Released: lock_released,
    events.Lost: lock_lost,
    events.TimedOut: lock_timed_out,
    events.Computed: value_computed,
    events.RefreshFailed: value_refresh_failed,
    events.FellBack: lock_fell_back,
    events.ServerDown: server_down,
    events.ServerUp: server_up,
}
#: Told when nobody is looking, or in the middle of something.
_BEHIND = (lock_lost, server_down, server_up)

#: How many lost locks may wait for their receivers.
ROOM = 10_000
_behind = Background(threads=1, room=ROOM)


def _send(event: Any) -> None:
    signal = _SIGNALS.get(type(event))
    if signal is None or not signal.receivers:
        return
    news = event._asdict()
    subject: Subject | None = news.pop("subject", None)
    if subject is None:
        news.update(sender=None)
    else:
        news.update(
            sender=Lock if subject.cache is None else type(subject.cache),
            name=subject.name,
            group=subject.group,
            label=subject.label,
            cache=subject.cache,
        )
    if signal is value_computed and news.pop("error") is not None:
        return  # Its caller hears of that.
    if signal in _BEHIND:
        if not _behind.submit(lambda: signal.send_robust(**news), connections.close_all):
            of = event.server if subject is None else subject.group
            logger.error("Too much is lost: no room to tell receivers of %s", of)
    elif asyncio._get_running_loop() is not None:
        in_background(signal.asend_robust(**news))
    else:
        signal.send_robust(**news)


@after_fork
def _begin_anew() -> None:
    global _behind
    _behind = Background(threads=1, room=ROOM)


# Whoever wants to receive a signal imports this module first.
events.listen(_send)
