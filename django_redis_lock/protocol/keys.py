"""The only place that builds and reads key names.

A lock named ``K`` has the key ``K``, like a plain redis-py lock, and companion keys. In a cluster
all of them must be in one slot, so a companion has a hash tag:

=====================  =========================================================================
``report``             ``{report}:owner``: ``K`` has no ``}``, so it can be the tag
``{shop:7}:report``    ``{shop:7}|{shop:7}:report|owner``: ``K`` has a tag
``a}b``                ``{<n>}|a}b|owner``: ``K`` cannot be a tag; the number ``n`` is in its slot
=====================  =========================================================================

Each companion belongs to one key: the character after the first ``}`` distinguishes the forms, and
in the second form the part follows the last ``|``. And no name is a companion: a lock name or a
cache key with the form of one (each begins with ``{``), or of a key of the whole database, is
refused. ``tests/unit/test_keys.py`` proves both.
"""

import binascii
import re
from functools import lru_cache
from typing import NamedTuple

from ..events import MAX_CACHED, MAX_CACHED_LENGTH, remembered

#: Sorted set of the locks held in one database: key of the lock -> Unix time in ms of its expiry.
#: Emptying the database must restore the locks of every site. On a cluster, see ``index_key``.
INDEX = b"django_redis_lock:locks"
#: Its entry for the last fence given to any of these locks; no lock has this name.
LAST_FENCE = b"django_redis_lock:fence"
#: The same as INDEX for computations that have run for a while.
FLIGHTS = b"django_redis_lock:flights"
#: The last losses, crashes and forced releases of all locks, by time.
NEWS = b"django_redis_lock:news"

#: Metrics by period; in one slot of a cluster.
FIGURES = {
    "hour": b"{django_redis_lock:metrics}:hour",
    "day": b"{django_redis_lock:metrics}:day",
}

SLOTS = 16384

#: What every reserved key begins with.
RESERVED = ("{", "django_redis_lock")
_RESERVED = tuple(start.encode() for start in RESERVED)
_COMPANION = (
    rb"(?s)\{([^}]*)\}(?::|\|(.*)\|)"
    rb"(grants|waiters|fence|owner|events|flight|leader"
    rb"|place:[0-9]+|place:[0-9]+:owner|wake:[^|]*|done:[^|]*)"
)
_OF_A_DATABASE = (
    rb"(?s)django_redis_lock:(locks|flights|news)(:\{\d+\})?|django_redis_lock:(fence|process:.*)"
    rb"|\{django_redis_lock:metrics\}:(hour|day)"
)


class LockKeys(NamedTuple):
    """The keys of one lock, in the order in which the scripts expect them. With ``limit=N``, each
    of N places has its own ``lock`` and ``owner``; a plain lock has those of place 1."""

    lock: bytes
    grants: bytes
    waiters: bytes
    owner: bytes
    held_index: bytes = INDEX

    @property
    def own(self) -> tuple[bytes, ...]:
        return self[:-1]

    @property
    def _places(self) -> bytes:
        return self.grants[: -len(b"grants")] + b"place:"

    def at_place(self, number: int) -> "LockKeys":
        if number == 1:
            return self
        is_short = len(self.lock) <= MAX_CACHED_LENGTH
        return (_at_place if is_short else _at_place.__wrapped__)(self, number)

    @property
    def renewed(self) -> "LockKeys":
        """For RENEW, with ``lock`` instead of the keys that it does not read. For the ``Listener``,
        Redis before 7.2 remembers all keys of a script, each with 160 bytes."""
        return self._replace(grants=self.lock, waiters=self.lock)

    @property
    def place(self) -> int:
        places = self._places
        return int(self.lock[len(places) :]) if self.lock.startswith(places) else 1

    @property
    def name(self) -> bytes:
        return self.lock if self.place == 1 else key_of_companion(self.lock) or self.lock


@lru_cache(maxsize=MAX_CACHED)
def _at_place(keys: LockKeys, number: int) -> LockKeys:
    key = keys._places + b"%d" % number
    return keys._replace(lock=key, owner=key + b":owner")


def _hash_tag(key: bytes) -> bytes | None:
    """The part that Redis Cluster hashes; None for all of it."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1)
    return key[start + 1 : end] if start >= 0 and end > start + 1 else None


def _slot(hashed: bytes) -> int:
    # Redis Cluster specification: CRC16/XMODEM modulo 16384.
    return binascii.crc_hqx(hashed, 0) % SLOTS


def slot_of(key: bytes) -> int:
    tag = _hash_tag(key)
    return _slot(key if tag is None else tag)


@lru_cache(maxsize=1)
def _numbers() -> list[bytes]:
    """For each slot the smallest number in it, to be used as a hash tag."""
    found: dict[int, bytes] = {}
    number = 0
    while len(found) < SLOTS:  # A tenth of a second, once.
        tag = b"%d" % number
        found.setdefault(_slot(tag), tag)
        number += 1
    return [found[slot] for slot in range(SLOTS)]


def slot_tag(slot: int) -> bytes:
    return _numbers()[slot]


def index_key(index: bytes, slot: int) -> bytes:
    """The key of INDEX, FLIGHTS or NEWS, for one slot of a cluster, in that slot."""
    return index + b":{" + slot_tag(slot) + b"}"


def _before_part(key: bytes) -> bytes:
    if b"}" not in key:
        return b"{" + key + b"}:"
    tag = _hash_tag(key)
    return b"{" + (_numbers()[_slot(key)] if tag is None else tag) + b"}|" + key + b"|"


def key_of_companion(companion: bytes) -> bytes | None:
    """The key to which ``companion`` belongs; None if it is none."""
    found = re.fullmatch(_COMPANION, companion)
    if found is None:
        return None
    key = found[1] if found[2] is None else found[2]
    return key if companion.startswith(_before_part(key)) else None


def is_of_a_database(key: bytes) -> bool:
    """Whether ``key`` is an index, a heartbeat, or has metrics."""
    return re.fullmatch(_OF_A_DATABASE, key) is not None


def is_reserved(key: bytes) -> bool:
    return key_of_companion(key) is not None or is_of_a_database(key)


def refuse_reserved(key: bytes) -> None:
    """Raises ValueError if a lock or a cache value at ``key`` would break another lock."""
    if key.startswith(_RESERVED) and is_reserved(key):
        raise ValueError(
            f"{key!r} is no name for a lock or a cache value: django_redis_lock stores its own "
            "data at keys of this form. Choose a KEY_PREFIX that does not begin with '{'"
        )


@remembered
def _prefix(key: bytes) -> bytes:
    refuse_reserved(key)
    return _before_part(key)


@remembered
def lock_keys(key: bytes, on_cluster: bool = False) -> LockKeys:
    """All keys of the lock at ``key``; on a cluster with the index of its slot. Raises, as all that
    make companions, ValueError if ``key`` is reserved."""
    prefix = _prefix(key)
    return LockKeys(
        key,
        prefix + b"grants",
        prefix + b"waiters",
        prefix + b"owner",
        index_key(INDEX, slot_of(key)) if on_cluster else INDEX,
    )


def keys_at(key: bytes, on_cluster: bool = False) -> LockKeys:
    """The keys of the lock, or of the place, whose token is at ``key``."""
    lock = key_of_companion(key)
    number = key.rpartition(b"place:")[2]
    if lock is not None and number.isdigit():
        keys = lock_keys(lock, on_cluster).at_place(int(number))
        if keys.lock == key:
            return keys
    return lock_keys(key, on_cluster)


def is_lock(key: bytes) -> bool:
    """Whether a lock's token may be at ``key``."""
    try:
        keys_at(key)
    except ValueError:
        return False
    return True


def process_key(process: str) -> bytes:
    """The key of the last heartbeat of a process (see ``process_id``), and the channel on
    which RESET tells it which lock it has lost."""
    return b"django_redis_lock:process:" + process.encode()


def wake_key(key: bytes, waiter: bytes) -> bytes:
    """The list that ends a waiter's blocking pop without a grant."""
    # A waiter id may contain any text; a "|" in it would be parsed as a separator.
    quoted = waiter.replace(b"%", b"%25").replace(b"|", b"%7C")
    return _prefix(key) + b"wake:" + quoted


def quorum_fence_key(key: bytes) -> bytes:
    """Of the last fence of a lock over several servers, which have to store the same one."""
    return _prefix(key) + b"fence"


def events_key(key: bytes) -> bytes:
    return _prefix(key) + b"events"


def flight_key(key: bytes) -> bytes:
    return _prefix(key) + b"flight"


def flights_pattern(pattern: bytes) -> bytes:
    """A glob pattern for the flights of all keys that ``pattern`` matches. It matches others, too:
    check each with ``key_of_companion``."""
    return b"{*" + pattern + b"[}|]*flight"


def flight_leader(key: bytes) -> bytes:
    return _prefix(key) + b"leader"


def flight_stream(key: bytes, token: bytes) -> bytes:
    return _prefix(key) + b"done:" + token


def flight_keys(key: bytes, token: bytes) -> tuple[bytes, bytes, bytes]:
    """The value's key, its flight, and the stream of the flight with this ``token``."""
    prefix = _prefix(key)
    return key, prefix + b"flight", prefix + b"done:" + token


def printable(name: bytes | str, limit: int = 120) -> str:
    """A key, or a lock's name, for a log line: one line, not too long."""
    text = name if isinstance(name, str) else name.decode(errors="backslashreplace")
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
