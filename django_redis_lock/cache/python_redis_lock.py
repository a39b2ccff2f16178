"""The module-level names of python-redis-lock, for projects that switch from it."""

from __future__ import annotations

from typing import Any

from ..exceptions import LockError
from ..inventory import Outcome, list_held, release

#: Raised when a lock object acquires a lock that it already holds without a timeout, and when a
#: lock that is not held is released or extended.
AlreadyAcquired = NotAcquired = LockError


def reset_all(redis_client: Any, prefix: bytes = b"") -> int:
    """Release all locks of a database; ``on_lost`` of their holders is called. Does not touch
    locks of other libraries or other keys.

    Args:
        redis_client: a redis-py client.
        prefix: only locks whose keys begin so.

    Returns:
        the number of locks released.

    Raises:
        redis.exceptions.RedisError: a request failed. Some locks may be released.
    """
    released = 0
    while True:
        inventory = list_held(redis_client, prefix, limit=1000)
        outcomes = [
            release(redis_client, held.key, held.owner.id, fence=held.fence)
            for held in inventory.locks
        ]
        now = outcomes.count(Outcome.RELEASED)
        released += now
        if inventory.complete or not now:
            return released
