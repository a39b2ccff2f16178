"""The only place that builds and reads key names.

A lock named ``K`` lives at the key ``K`` itself, where a plain redis-py lock would be, and has
companion keys beside it. In a cluster all of them must share a slot, so a companion carries ``K``
as its hash tag:

=====================  =========================================================
``report``             ``{report}:grants``
``{shop:7}:report``    ``{shop:7}:report::grants``: the name has a tag of its own
``a}b``                ``{<n>}a}b|grants``: ``K`` cannot be a tag; the number has its slot
=====================  =========================================================

What stands before the last word tells the forms apart, so no two locks share a companion: with
one colon in the second form the locks ``a`` and ``{a}`` would.
"""

from __future__ import annotations

import binascii
from functools import lru_cache
from typing import NamedTuple

__all__ = [
    "FIGURES",
    "FLIGHTS",
    "INDEX",
    "SLOTS",
    "LockKeys",
    "companion",
    "events_key",
    "flight_key",
    "flight_leader",
    "flight_stream",
    "flights_pattern",
    "index_key",
    "key_of_flight",
    "lock_keys",
    "process_key",
    "slot_of",
    "slot_tag",
    "wake_key",
]

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


@lru_cache(maxsize=1024)
def _prefix(key: bytes) -> bytes:
    if _hash_tag(key) is not None:
        return key + b"::"
    if b"}" not in key:
        return b"{" + key + b"}:"
    return b"{" + _numbers()[_slot(key)] + b"}" + key + b"|"


def companion(key: bytes, part: str) -> bytes:
    """The key beside ``key`` that holds its ``part``; always in the same cluster slot."""
    return _prefix(key) + part.encode()


@lru_cache(maxsize=1024)
def lock_keys(key: bytes, on_cluster: bool = False) -> LockKeys:
    """All keys of the lock at ``key``; on a cluster with the index of its slot."""
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
    return _prefix(key) + b"wake:" + waiter


def events_key(key: bytes) -> bytes:
    """The list of what has happened last to the lock at ``key``."""
    return _prefix(key) + b"events"


def flight_key(key: bytes) -> bytes:
    """Where the flight (the computation under way) of the cache key ``key`` is noted."""
    return _prefix(key) + b"flight"


def flights_pattern(pattern: bytes) -> bytes:
    """A glob pattern for the flights of all keys that ``pattern`` matches, whatever form they have.
    It matches some others too, also keys that are no flights: see ``key_of_flight``."""
    return b"*" + pattern + b"[}:|]*flight"


def key_of_flight(flight: bytes) -> bytes | None:
    """The cache key whose flight is noted at ``flight``; None: that is another kind of key."""
    for start, end in ((1, b"}:flight"), (0, b"::flight"), (flight.find(b"}") + 1, b"|flight")):
        key = flight[start : -len(end)]
        if flight_key(key) == flight:
            return key
    return None


def flight_leader(key: bytes) -> bytes:
    """Where it is noted who computes the cache key ``key``."""
    return _prefix(key) + b"leader"


def flight_stream(key: bytes, token: bytes) -> bytes:
    """Where the followers of one flight learn that it has ended."""
    return _prefix(key) + b"done:" + token
