"""How the command ``locks`` formats durations, holders, and what is wrong with a lock."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any

from ..formatting import DurationFormat
from ..held_locks import HeldLock
from ..inventory import FLIGHT, LockInfo
from ..protocol import printable

#: Short, for tables on a terminal.
COMPACT = DurationFormat(
    (
        "0s",
        "%(seconds)ds",
        "%(minutes)dm %(seconds)ds",
        "%(hours)dh %(minutes)dm",
        "%(days)dd %(hours)dh",
    ),
    tuple(f"%(n)s{unit}" for unit in ("µs", "ms", "s", "m", "h", "d")),
)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return "for ever" if math.isinf(seconds) else COMPACT.duration(seconds)


def clock_time(timestamp: float) -> str:
    """A Unix time as date and time in the local time zone."""
    local = datetime.fromtimestamp(timestamp, timezone.utc).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S %z")


def counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def one_line(text: str, limit: int = 200) -> str:
    """A name that a user has chosen, on one line and without control characters."""
    return printable(text.encode(errors="surrogateescape"), limit=limit)


def holder(lock: LockInfo, *, labelled: bool = True) -> str:
    owner = lock.owner
    if lock.resting:
        return "released, min_hold not over"
    if not owner.host:
        return f"? ({owner.id})"
    label = f" ({owner.label})" if owner.label and labelled else ""
    return one_line(f"{owner.host}:{owner.pid}{label}")


def note(lock: LockInfo) -> str:
    """What is unusual about a lock; empty if nothing is."""
    if lock.broken:
        return f"cannot be read: {', '.join(lock.broken)}"
    if lock.silent:
        return f"silent for {duration(lock.seen)}"
    if math.isinf(lock.ttl):
        return "never expires"
    if lock.kind == FLIGHT:
        return "computation"
    return "not renewed" if lock.renews is False and not lock.resting else ""


def in_trouble(lock: LockInfo) -> bool:
    """Whether the holder is silent, or the lock never expires."""
    return bool(lock.silent) or math.isinf(lock.ttl)


def as_json(holding: HeldLock) -> dict[str, Any]:
    """A lock as JSON; times in seconds, null for infinite or unknown."""
    lock, owner = holding.lock, holding.lock.owner
    return {
        "name": holding.name,
        "cache": holding.alias,
        "key": lock.key.decode(errors="backslashreplace"),
        "in_cache": not holding.foreign,
        "kind": lock.kind,
        "holder": {
            "id": owner.id,
            "host": owner.host or None,
            "pid": owner.pid or None,
            "thread": owner.thread or None,
            "label": owner.label or None,
        },
        "since": owner.since,
        "held_for": lock.held_for,
        "ttl": _finite(lock.ttl),
        "expires": not math.isinf(lock.ttl),
        "lifetime": _finite(lock.lifetime),
        "renews": lock.renews,
        "renewals": lock.renewals,
        "last_heartbeat": lock.seen,
        "silent": lock.silent,
        "resting": lock.resting,
        "fence": lock.fence,
        "waiters": lock.waiters,
        "broken": list(lock.broken),
    }


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else seconds
