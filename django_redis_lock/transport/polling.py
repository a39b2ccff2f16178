"""How a thread waits for several connections at once."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from ..clock import real_time as time
from .address import RawConnection


def readable(connections: Sequence[RawConnection], seconds: float) -> list[RawConnection]:
    """Those of ``connections`` that have a reply or have ended, after ``seconds`` at most."""
    until = time.monotonic() + seconds
    while connections:
        left = max(0.0, until - time.monotonic())
        first_only = left if len(connections) == 1 else 0
        found = [each for each in connections if _is_readable(each, first_only)]
        if found or not left:
            return found
        _wait_for_any(connections, left)
    return []


def _is_readable(connection: RawConnection, seconds: float) -> bool:
    try:
        return connection.can_read(seconds)
    except (RedisError, OSError):
        return True  # Reading it raises the error.


def _wait_for_any(connections: Sequence[RawConnection], seconds: float) -> None:
    sockets: list[Any] = [getattr(each, "_sock", None) for each in connections]
    if None in sockets or not hasattr(select, "poll"):
        _is_readable(connections[0], min(seconds, 0.01))
        return
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    poll.poll(seconds * 1000)
