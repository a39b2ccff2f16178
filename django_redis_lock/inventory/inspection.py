"""One lock, looked at closely: who holds it, who waits for it, and what has happened to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..locking import Event, read_events
from ..protocol import (
    FAR,
    MOST_PID,
    WAITING,
    Call,
    as_bytes,
    bounded,
    events_key,
    is_reserved,
    lock_keys,
)
from ..transport import run
from .listing import LOCK, PATIENCE, LockInfo, look_at

__all__ = ["Inspection", "WaiterInfo", "inspect"]

#: Waiters named, at most. Each is a process, so there are seldom as many.
MOST_WAITERS = 200


@dataclass(frozen=True, slots=True)
class WaiterInfo:
    """A process that waits for a lock.

    Attributes:
        host, pid: where it runs; empty and 0 where its id does not say so.
        thread: the first of its threads that waited; others may wait behind it.
        since: Unix time in seconds at which that was, by its own clock.
        waited: seconds since then, by the server's clock; None where its id does not say.
    """

    host: str = ""
    pid: int = 0
    thread: str = ""
    since: float | None = None
    waited: float | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What there is to know of a lock.

    Attributes:
        lock: as in the list; None if nobody holds it.
        waiters: in the order in which they came, by their own clocks; no more than MOST_WAITERS.
        events: what has happened last, the latest first (``chronicle``).
    """

    lock: LockInfo | None
    waiters: tuple[WaiterInfo, ...]
    events: tuple[Event, ...]


def inspect(client: Any, key: bytes, kind: str = LOCK, prefix: bytes = b"") -> Inspection:
    """Look closely at the lock at ``key``, or at the computation of the cache key ``key``. Of a
    computation neither waiters nor events are known.

    Raises:
        redis.exceptions.RedisError: Redis could not be asked.
    """
    held = look_at(client, key, kind, prefix)
    if kind != LOCK or is_reserved(key):
        return Inspection(held, (), ())
    asking = Call(WAITING, (*lock_keys(key)[:5], events_key(key)), (MOST_WAITERS,))
    now_us, ids, kept, *vanished = run(client, asking, patience=PATIENCE).value
    waiters = [_waiter(as_bytes(id), int(now_us) / 1e6) for id in ids]
    return Inspection(
        held,
        tuple(sorted(waiters, key=lambda waiter: waiter.since or 0.0)),
        read_events(as_bytes(kept), *vanished),
    )


def _waiter(id: bytes, now: float) -> WaiterInfo:
    """The waiter whose name ``grants.waiter_id`` has made."""
    parts = id.decode(errors="replace").split(" ", 4)
    if len(parts) < 5:
        return WaiterInfo()
    _, began, pid, host, thread = parts
    since, process = bounded(began, FAR), bounded(pid, MOST_PID)
    if since is None or process is None:
        return WaiterInfo()
    return WaiterInfo(host, int(process), thread, since, max(0.0, now - since))
