"""The locks that are held, for people who want to see them.

The list comes from the index, so it costs as much as there are locks held, however many keys the
database has. It is bounded all the same, and says when it shows only a part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .calls import run
from .keys import INDEX, lock_keys
from .owner import Owner, fingerprint
from .scripts import DESCRIBE, LIST, Call

__all__ = ["HeldLock", "Inventory", "list_held"]

#: Entries of the index looked at, at most: they occupy the server for some ten milliseconds.
MOST_ENTRIES = 10_000
#: Locks described, at most, to find the longest held among them: some thirty milliseconds.
MOST_DESCRIBED = 2_000
#: Seconds to wait for each of the two answers.
PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that somebody holds. It does not know the token, so it cannot give it away.

    Attributes:
        key: the lock's key in Redis.
        name: what follows the prefix in its key, for people to read.
        owner: who holds it; its ``id`` tells one acquisition from another.
        ttl: seconds it still lives unless renewed; ``inf`` if it never expires.
        held_for: seconds since it was taken, by the server's clock; None while its holder has not
            said who it is, which it does after half a second.
        fence: the acquisition's fencing token, None where it is not known any more.
        waiters: number of processes that wait for it.
    """

    key: bytes
    name: str
    owner: Owner
    ttl: float
    held_for: float | None
    fence: int | None
    waiters: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """The locks held at one moment, the longest held first.

    Attributes:
        total: how many are held; at least so many where the list is not complete.
        complete: whether ``locks`` has all of them.
    """

    locks: tuple[HeldLock, ...]
    total: int
    complete: bool


def list_held(client: Any, prefix: bytes, limit: int = 500) -> Inventory:
    """The held locks whose keys begin with ``prefix``.

    Args:
        client: a redis-py client.
        prefix: what one site's lock keys begin with; empty for every lock in the database.
        limit: how many to list, at most: the longest held. Where there are more than
            MOST_DESCRIBED, those that would end first by themselves are left out unseen.

    Raises:
        redis.exceptions.RedisError: Redis could not be asked.
    """
    wanted = (prefix, max(limit, MOST_DESCRIBED), MOST_ENTRIES)
    seen, whole, found = run(client, Call(LIST, (INDEX,), wanted), patience=PATIENCE).value
    keys = [_bytes(key) for key in found]
    held = _describe(client, keys, len(prefix))
    locks = held[:limit]
    total = int(seen) - len(keys) + len(held)
    return Inventory(locks, total, complete=bool(whole) and total == len(locks))


def _describe(client: Any, keys: list[bytes], prefix_length: int) -> tuple[HeldLock, ...]:
    """The locks at ``keys`` that are held still, the longest held first."""
    if not keys:
        return ()
    named = tuple(part for key in keys for part in lock_keys(key)[:5])
    now_us, *described = run(client, Call(DESCRIBE, named, ()), patience=PATIENCE).value
    locks = [_held(keys[int(reply[0]) - 1], prefix_length, now_us, reply) for reply in described]
    return tuple(sorted(locks, key=_longest_first))


def _held(key: bytes, prefix_length: int, now_us: int, reply: Any) -> HeldLock:
    _, token, pttl, fence, waiters, fields = reply
    texts = [_bytes(field).decode(errors="replace") for field in fields]
    described = dict(zip(texts[::2], texts[1::2], strict=True))
    owner = Owner.from_fields(described, fingerprint(_bytes(token)))
    digits = _bytes(fence).partition(b" ")[0]
    return HeldLock(
        key=key,
        name=key[prefix_length:].decode(errors="backslashreplace"),
        owner=owner,
        ttl=math.inf if int(pttl) < 0 else int(pttl) / 1000,
        held_for=None if owner.since is None else max(0.0, int(now_us) / 1e6 - owner.since),
        fence=int(digits) if digits.isdigit() else None,
        waiters=int(waiters),
    )


def _longest_first(lock: HeldLock) -> tuple[float, str]:
    return -(lock.held_for or 0.0), lock.name


def _bytes(value: Any) -> bytes:
    """A reply's string, also from a client that decodes its replies."""
    return value if isinstance(value, bytes) else str(value).encode()
