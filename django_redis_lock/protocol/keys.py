"""The only place that builds and reads key names.

A lock named ``K`` lives at the key ``K`` itself, where a plain redis-py lock would be, and has
companion keys beside it. In a cluster all of them must share a slot, so a companion has a hash tag:

=====================  =========================================================================
``report``             ``{report}:fence``: ``K`` has no ``}``, so it can be the tag
``{shop:7}:report``    ``{shop:7}|{shop:7}:report|fence``: ``K`` has a tag
``a}b``                ``{<n>}|a}b|fence``: ``K`` cannot be a tag; the number ``n`` is in its slot
=====================  =========================================================================

A companion can be read in one way only: what follows the first ``}`` tells the forms apart, and in
the second form the part is what follows the last ``|``. So no two keys share a companion. And no
name is a companion: a lock name or a cache key that reads as one (each begins with ``{``), or that
is one of the keys of a whole database, is refused. ``tests/unit/test_keys.py`` proves both.
"""

from __future__ import annotations

import binascii
import re
from functools import lru_cache
from typing import NamedTuple

#: Sorted set of the locks held in one database: key of the lock -> Unix time in ms of its expiry.
#: One for the database and not one for each key prefix, because emptying a cache empties the
#: whole database and must give every site's locks back. On a cluster, see ``index_key``.
INDEX = b"django_redis_lock:locks"
#: The same for computations that have been under way for a while: cache key -> end of its flight.
FLIGHTS = b"django_redis_lock:flights"

#: Hashes with the figures of locks and computations, by period; in one slot of a cluster.
FIGURES = {
    "hour": b"{django_redis_lock:metrics}:hour",
    "day": b"{django_redis_lock:metrics}:day",
}

SLOTS = 16384

#: What every reserved key begins with.
RESERVED = ("{", "django_redis_lock")
#: A companion: the key it belongs to, in the first form or in the second, and its part.
_COMPANION = re.compile(
    rb"\{([^}]*)\}(?::|\|(.*)\|)"
    rb"(grants|waiters|fence|owner|events|flight|leader|wake:[^|]*|done:[^|]*)",
    re.DOTALL,
)
_OF_A_DATABASE = re.compile(
    rb"django_redis_lock:(locks|flights)(:\{\d+\})?|django_redis_lock:process:.*"
    rb"|\{django_redis_lock:metrics\}:(hour|day)",
    re.DOTALL,
)


class LockKeys(NamedTuple):
    """The keys of one lock, in the order in which the scripts expect them."""

    lock: bytes
    grants: bytes
    waiters: bytes
    fence: bytes
    owner: bytes
    held_index: bytes = INDEX


def _hash_tag(key: bytes) -> bytes | None:
    """The part of ``key`` that Redis Cluster hashes, or None when it hashes all of it."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1)
    return key[start + 1 : end] if start >= 0 and end > start + 1 else None


def _slot(hashed: bytes) -> int:
    # Redis Cluster specification: CRC16/XMODEM modulo 16384.
    return binascii.crc_hqx(hashed, 0) % SLOTS


def slot_of(key: bytes) -> int:
    """The slot in which Redis Cluster keeps ``key``."""
    tag = _hash_tag(key)
    return _slot(key if tag is None else tag)


@lru_cache(maxsize=1)
def _numbers() -> list[bytes]:
    """Of each slot the smallest number that is in it: a hash tag for where none is at hand."""
    found: dict[int, bytes] = {}
    number = 0
    while len(found) < SLOTS:  # A tenth of a second, once.
        tag = b"%d" % number
        found.setdefault(_slot(tag), tag)
        number += 1
    return [found[slot] for slot in range(SLOTS)]


def slot_tag(slot: int) -> bytes:
    """A hash tag in ``slot``."""
    return _numbers()[slot]


def index_key(index: bytes, slot: int) -> bytes:
    """On a cluster: what INDEX, or FLIGHTS, is for the keys of one slot. It is kept beside them,
    and so by the same scripts."""
    return index + b":{" + slot_tag(slot) + b"}"


def _before_part(key: bytes) -> bytes:
    if b"}" not in key:
        return b"{" + key + b"}:"
    tag = _hash_tag(key)
    return b"{" + (_numbers()[_slot(key)] if tag is None else tag) + b"}|" + key + b"|"


def key_of_companion(companion: bytes) -> bytes | None:
    """The lock's or cache key beside which ``companion`` is kept; None: that is no companion."""
    found = _COMPANION.fullmatch(companion)
    if found is None:
        return None
    key = found[1] if found[2] is None else found[2]
    return key if companion.startswith(_before_part(key)) else None


def is_of_a_database(key: bytes) -> bool:
    """Whether ``key`` is an index, a heartbeat, or holds figures."""
    return _OF_A_DATABASE.fullmatch(key) is not None


def is_reserved(key: bytes) -> bool:
    """Whether ``key`` is another key's companion, or a key of the whole database."""
    return key_of_companion(key) is not None or is_of_a_database(key)


def refuse_reserved(key: bytes) -> None:
    """
    Raises:
        ValueError: a lock or a cache value at ``key`` would break another lock.
    """
    if is_reserved(key):
        raise ValueError(
            f"{key!r} is no name for a lock or a cache value: django_redis_lock keeps its own data "
            "at keys of this form. Another KEY_PREFIX, which does not begin with '{', will do"
        )


@lru_cache(maxsize=1024)
def _prefix(key: bytes) -> bytes:
    refuse_reserved(key)
    return _before_part(key)


@lru_cache(maxsize=1024)
def lock_keys(key: bytes, on_cluster: bool = False) -> LockKeys:
    """All keys of the lock at ``key``; on a cluster with the index of its slot.

    Raises:
        ValueError: ``key`` is reserved, as for all companions.
    """
    prefix = _prefix(key)
    return LockKeys(
        key,
        prefix + b"grants",
        prefix + b"waiters",
        prefix + b"fence",
        prefix + b"owner",
        index_key(INDEX, slot_of(key)) if on_cluster else INDEX,
    )


def process_key(process: str) -> bytes:
    """Where the last heartbeat of a process is noted; see ``owner.process_id``."""
    return b"django_redis_lock:process:" + process.encode()


def wake_key(key: bytes, waiter: bytes) -> bytes:
    """The list that wakes one waiter out of its blocking pop without giving it the lock."""
    # The token may be any caller's; a "|" in it would be read as the end of the key.
    quoted = waiter.replace(b"%", b"%25").replace(b"|", b"%7C")
    return _prefix(key) + b"wake:" + quoted


def events_key(key: bytes) -> bytes:
    """The list of what has happened last to the lock at ``key``."""
    return _prefix(key) + b"events"


def flight_key(key: bytes) -> bytes:
    """Where the flight (the computation under way) of the cache key ``key`` is noted."""
    return _prefix(key) + b"flight"


def flights_pattern(pattern: bytes) -> bytes:
    """A glob pattern for the flights of all keys that ``pattern`` matches, whatever form they have.
    It matches some others too, also keys that are no flights: see ``key_of_companion``."""
    return b"{*" + pattern + b"[}|]*flight"


def flight_leader(key: bytes) -> bytes:
    """Where it is noted who computes the cache key ``key``."""
    return _prefix(key) + b"leader"


def flight_stream(key: bytes, token: bytes) -> bytes:
    """Where the followers of one flight learn that it has ended."""
    return _prefix(key) + b"done:" + token
