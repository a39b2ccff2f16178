"""Lists of held locks and running computations, and the details of one. The lists come from an
index, so their cost does not depend on the number of keys in the database; they are bounded."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...clock import time
from ...events import group_of
from ...history import Event, last_heartbeats, read_events
from ...protocol import Call, Owner, Script, Vanished, as_bytes
from ...protocol.holders import (
    HEARTBEAT_EVERY,
    MAX_PID,
    MAX_UNIX_TIME,
    SILENT_AFTER,
    HolderInfo,
    bounded,
)
from ...protocol.keys import (
    FLIGHTS,
    INDEX,
    NEWS,
    events_key,
    flight_key,
    flight_leader,
    index_key,
    is_lock,
    is_reserved,
    keys_at,
    slot_tag,
)
from ...transport import is_cluster, run, run_all, server_of
from ...transport.server import run_at
from .scripts import DESCRIBE, DESCRIBE_FLIGHTS, EXISTING, LATEST, LIST, LIST_FLIGHTS, WAITING

if TYPE_CHECKING:
    from ...transport import Client

#: The kinds of entries: locks, and computations of cache values.
LOCK, FLIGHT = "lock", "computation"
#: What keys begin with.
Prefixes = tuple[bytes, ...]

#: The most entries of the index that are read, in all and in one script (about two milliseconds).
MAX_ENTRIES, ENTRIES_PER_SCRIPT = 10_000, 2_000
#: The most locks that are described, in all and in one script (about two milliseconds).
MAX_DESCRIBED, DESCRIBED_PER_SCRIPT = 2_000, 100
#: Seconds to wait for each of the two replies.
REPLY_TIMEOUT_SECONDS = 5.0
#: A keeper checks its lock at each third of the lifetime; without one, every so many seconds.
RENEWALS_PER_LIFETIME, CHECK_EVERY_SECONDS = 3, 10.0
#: Seconds that a check may be late before a holder without heartbeats counts as silent.
MAX_DELAY_SECONDS = 2.0
#: The most waiters that are listed. Each is a process, so there are seldom more.
MAX_WAITERS = 200
#: The most losses, crashes and forced releases that are read.
MAX_NEWS = 1000


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A held lock. It does not contain the token, so it cannot disclose it.

    Attributes:
        key: where the lock's token is in Redis, or the cache key of the computation.
        name: the key without the prefix.
        owner: the holder or leader; its ``id`` identifies one acquisition. Until the holder
            describes itself, its token names host, process and thread.
        ttl: seconds until the lock expires unless renewed; ``inf`` if it never does.
        held_for: seconds since the acquisition, by the server's clock; None until the holder
            describes itself, after half a second.
        fence: the fencing token of the acquisition; None until the holder describes itself, unless
            it chose its token.
        waiters: number of waiting processes; None for a computation.
        lifetime: seconds that each renewal gives; None if unknown, ``inf`` if it never expires.
        renews: whether the holder's keeper renews the lock; None if unknown.
        seen: seconds since the last sign of life of the holder's process: a heartbeat, or a renewal
            of any listed lock; None if there was none.
        heartbeats: whether that process sends heartbeats, as far as is known.
        broken: parts that cannot be read because their keys contain other data: "owner", "waiters",
            "grants" or "leader".
        resting: whether the lock was released and stays taken until its ``min_hold`` is over.
        queued: whether a message in a queue holds it, sent by ``owner``; see ``unique_task``.
        limit: how many may hold the lock at a time, each in a place; None until the holder
            describes itself.
        taken: how many places are taken, as far as they are listed.
        stored_name: its name in its cache, which its holder has stored as the key may not show it.
    """

    key: bytes
    name: str
    owner: Owner
    ttl: float
    held_for: float | None
    fence: int | None
    waiters: int | None
    kind: str = LOCK
    lifetime: float | None = None
    renews: bool | None = None
    seen: float | None = None
    resting: bool = False
    queued: bool = False
    group: str = ""
    broken: tuple[str, ...] = ()
    heartbeats: bool = False
    limit: int | None = None
    place: int = 1
    taken: int = 1
    stored_name: str = ""

    @property
    def lock_key(self) -> bytes:
        """The key of the lock's place 1."""
        return keys_at(self.key).name if self.kind == LOCK else self.key

    @property
    def unannounced(self) -> bool:
        """Whether only the token names the holder: its process has not described it yet, which it
        does after half a second, or has died before that."""
        return bool(self.owner.host) and self.limit is None and self.kind == LOCK

    @property
    def renewal_interval(self) -> float | None:
        """Seconds between two renewals or checks by the holder's keeper; None if unknown."""
        if self.lifetime is None:
            return None
        endless = math.isinf(self.lifetime)
        return CHECK_EVERY_SECONDS if endless else self.lifetime / RENEWALS_PER_LIFETIME

    @property
    def heartbeat_interval(self) -> float | None:
        """Seconds between two signs of life of the holder's process; None if unknown."""
        every = self.renewal_interval
        return min(every, HEARTBEAT_EVERY) if every is not None and self.heartbeats else every

    @property
    def silent(self) -> bool | None:
        """Whether signs of life of the holder's process are overdue: it is stopped, cut off or
        dead. None if unknown, because the holder never described itself."""
        every = self.renewal_interval
        if self.seen is None or every is None:
            return None
        return self.seen > (SILENT_AFTER if self.heartbeats else every + MAX_DELAY_SECONDS)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The locks held at one moment, longest first. ``total`` is a lower bound if the list is not
    ``complete``."""

    locks: tuple[LockInfo, ...]
    total: int
    complete: bool


@dataclass(frozen=True, slots=True)
class WaiterInfo:
    """A process that waits for a lock.

    Attributes:
        thread: the first of its waiting threads.
        since: Unix time in seconds at which the wait began, by the waiter's clock.
        waited: seconds since then, by the server's clock; None if unknown.
    """

    host: str = ""
    pid: int = 0
    thread: str = ""
    since: float | None = None
    waited: float | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """The details of one lock, which is None if it is free.

    Attributes:
        holders: those of all places, ``lock`` among them; if it is None, of the first hundred.
        waiters: in the order of arrival, by the waiters' clocks; at most MAX_WAITERS.
        events: the last events, latest first.
        other: Redis's type of other data at the lock's key, such as "hash", or "string" for one
            that is not known to be a token ("?": not known); else empty.
    """

    lock: LockInfo | None
    waiters: tuple[WaiterInfo, ...]
    events: tuple[Event, ...]
    holders: tuple[LockInfo, ...] = ()
    other: str = ""


def list_held(
    client: Client,
    prefix: bytes,
    limit: int = 500,
    search: str = "",
    kind: str = LOCK,
    only_locks: Prefixes = (),
    by_name: bool = False,
) -> Inventory:
    """The held locks whose keys begin with ``prefix``, which their names do not have. A lock is
    what the index has as one, and what its holder has described; under the prefixes ``only_locks``
    also a string with the form of a token, as plain redis-py sets it.

    Args:
        limit: the largest number to list: the longest held. If there are more than MAX_DESCRIBED,
            those that expire first are not considered.
        search: only locks whose keys contain the longest part of this text in ASCII; case is
            ignored.
        by_name: search the stored names, too.
        kind: FLIGHT for the computations by ``get_or_set`` that have run for half a second or
            longer, instead of locks.

    Raises:
        redis.exceptions.RedisError: the request failed.
    """
    script, index = (LIST, INDEX) if kind == LOCK else (LIST_FLIGHTS, FLIGHTS)
    lowered = max(re.findall("[\0-\x7f]*", search), key=len).lower()  # Lua lowers ASCII only.
    by_name = by_name and lowered != ""
    in_keys = b"" if by_name else lowered.encode()
    keys, whole = listed(client, script, indexes(client, index), (prefix, in_keys))
    described = keys if by_name else keys[: max(limit, MAX_DESCRIBED)]
    held, _ = _describe(client, kind, described, prefix, only_locks)
    if by_name:
        held = tuple(h for h in held if lowered in f"{h.name}\n{h.stored_name}".lower())
        described = keys = [each.key for each in held]
    locks = held[:limit]
    total = len(keys) - len(described) + len(held)
    return Inventory(locks, total, complete=whole and total == len(locks))


def inspect(client: Client, key: bytes, kind: str = LOCK, only_locks: Prefixes = ()) -> Inspection:
    """The details of the lock at ``key``, or of the computation of the cache key ``key``, without
    waiters and events. ``only_locks``: see ``list_held``.

    Raises:
        redis.exceptions.RedisError: the request failed.
    """
    described, others = _describe(client, kind, [key], b"", only_locks)
    held = next(iter(described), None)
    holders: tuple[LockInfo, ...] = () if held is None else (held,)
    if kind != LOCK or not is_lock(key):
        return Inspection(held, (), (), holders)
    keys = keys_at(key)
    # Of a lock with a limit, one place may be free and others taken.
    limit = DESCRIBED_PER_SCRIPT if held is None else held.limit or 1
    if limit > 1:
        places = map(keys_at(keys.name).at_place, range(1, limit + 1))
        holders, _ = _describe(client, kind, [place.lock for place in places], b"", only_locks)
        held = next((each for each in holders if each.key == key), held)
    asking = Call(WAITING, (*keys.own, events_key(keys.name)), (MAX_WAITERS,))
    reply = _answer(client, asking)
    now_us, ids, stored, other, *vanished = reply
    waiters = [_waiter(as_bytes(id), int(now_us) / 1e6) for id in ids]
    return Inspection(
        held,
        tuple(sorted(waiters, key=lambda waiter: waiter.since or 0.0)),
        read_events(as_bytes(stored), *(Vanished(*each) for each in vanished)),
        holders,
        as_bytes(other).decode() or ("string" if others else ""),
    )


def latest_news(client: Client) -> tuple[Event, ...]:
    """The losses, crashes and forced releases of the last day, the latest first. Raises
    redis.exceptions.RedisError if the request failed."""
    lines: list[bytes] = []
    for key in indexes(client, NEWS):
        texts = [as_bytes(text) for text in _answer(client, Call(LATEST, (key,), (MAX_NEWS,)))]
        found = zip(texts[1::2], texts[::2], strict=True)
        lines += (b"%s %s" % (score, event) for score, event in found)
    return read_events(b"\n".join(lines))


def indexes(client: Any, index: bytes) -> list[bytes]:
    """The keys of INDEX, or FLIGHTS: on a cluster there is one for each slot that has entries."""
    server = server_of(client)
    if not server.is_cluster:
        return [index]
    found = []
    for node, slots in server.primaries().items():
        asking = Call(EXISTING, (), (index, *map(slot_tag, slots)))
        found += [index_key(index, slots[int(place) - 1]) for place in run_at(client, node, asking)]
    return found


def listed(
    client: object, script: Script, places: Sequence[bytes], wanted: tuple[bytes, bytes]
) -> tuple[list[bytes], bool]:
    """Also returns whether the indexes at ``places`` were read to the end."""
    keys: dict[bytes, None] = {}  # Each once: an entry can move to the next page between reads.
    starts = dict.fromkeys(places, 0)
    while starts and max(starts.values()) < MAX_ENTRIES:
        asking = [
            Call(script, (place,), (*wanted, start, min(ENTRIES_PER_SCRIPT, MAX_ENTRIES - start)))
            for place, start in starts.items()
        ]
        for (passed, left, found), place in zip(
            _answers(client, asking), list(starts), strict=True
        ):
            keys.update(dict.fromkeys(map(as_bytes, found)))
            starts[place] = int(passed)
            if int(left) <= 0:
                del starts[place]
    return list(keys), not starts


def _answers(client: Any, calls: Sequence[Call]) -> list[Any]:
    if is_cluster(client) and calls:
        return run_all(client, calls)
    return [_answer(client, call) for call in calls]


def _answer(client: Any, call: Call) -> Any:
    return run(client, call, until=time.monotonic() + REPLY_TIMEOUT_SECONDS).value


def holders_at(
    client: object, kind: str, keys: Sequence[bytes], only_locks: Prefixes
) -> tuple[dict[bytes, tuple[HolderInfo, Sequence[object]]], list[bytes]]:
    """The holders of the locks at ``keys`` that are held, each with the parts of it that cannot be
    read and the number of its waiters, and which of the keys have strings that are no locks."""
    keys = [key for key in keys if (is_lock(key) if kind == LOCK else not is_reserved(key))]
    on_cluster = is_cluster(client)
    size = 1 if on_cluster else DESCRIBED_PER_SCRIPT  # Each may be on another node.
    groups = [keys[start : start + size] for start in range(0, len(keys), size)]
    calls = [_description(kind, group, on_cluster, only_locks) for group in groups]
    found: dict[bytes, tuple[HolderInfo, Sequence[object]]] = {}
    others = []
    for group, (now_us, *replies) in zip(groups, _answers(client, calls), strict=True):
        for number, *reply in replies:
            key = group[int(number) - 1]
            holder = HolderInfo((*reply[:3], now_us)) if reply else None
            if holder and (kind == FLIGHT or int(reply[5]) or holder.described):
                found[key] = holder, reply[3:5]
            else:
                others.append(key)
    return found, others


def _describe(
    client: Client, kind: str, keys: Sequence[bytes], prefix: bytes, only_locks: Prefixes
) -> tuple[tuple[LockInfo, ...], list[bytes]]:
    """The locks at ``keys`` that are still held, longest first, and the keys with other strings."""
    holders, others = holders_at(client, kind, keys, only_locks)
    locks = [_held(kind, key, prefix, *found) for key, found in holders.items()]
    known = _with_heartbeats(client, locks)
    taken = Counter(lock.lock_key for lock in known)
    known = [replace(each, taken=taken[each.lock_key]) if each.limit else each for each in known]
    return tuple(sorted(known, key=lambda lock: (-(lock.held_for or 0.0), lock.name))), others


def _with_heartbeats(client: Client, locks: Sequence[LockInfo]) -> list[LockInfo]:
    """All locks of one process get its latest sign of life."""
    beats = last_heartbeats(client, (lock.owner.process for lock in locks))
    latest = dict(beats)
    for lock in locks:
        process = lock.owner.process
        if process and lock.seen is not None:
            latest[process] = min(lock.seen, latest.get(process, math.inf))
    return [
        replace(lock, seen=latest[lock.owner.process], heartbeats=lock.owner.process in beats)
        if lock.owner.process in latest
        else lock
        for lock in locks
    ]


def _description(kind: str, keys: Sequence[bytes], on_cluster: bool, only_locks: Prefixes) -> Call:
    if kind == FLIGHT:
        parts = tuple(part for key in keys for part in (flight_key(key), flight_leader(key)))
        return Call(DESCRIBE_FLIGHTS, parts, ())
    locks = [keys_at(key, on_cluster) for key in keys]
    only = tuple(int(lock.name.startswith(only_locks)) for lock in locks)
    return Call(DESCRIBE, tuple(part for lock in locks for part in lock), only)


def _held(
    kind: str, key: bytes, prefix: bytes, holder: HolderInfo, rest: Sequence[Any]
) -> LockInfo:
    described, seen = holder.described, holder.owner.seen
    broken, *waiters = rest
    keys = keys_at(key) if kind == LOCK else None
    place, shown = (keys.place, keys.name) if keys else (1, key)
    lifetime = _number(described, "lifetime")
    name = shown.removeprefix(prefix).decode(errors="backslashreplace")
    return LockInfo(
        key=key,
        name=name,
        owner=replace(holder.in_the_way, seen=None),  # See ``_with_heartbeats``.
        ttl=holder.ttl,
        held_for=holder.held_for,
        fence=holder.fence or None,
        waiters=int(waiters[0]) if waiters else None,
        kind=kind,
        # Redis stores milliseconds, and 0 for no end.
        lifetime=None if lifetime is None else lifetime / 1000 or math.inf,
        renews="renews" in described if "lifetime" in described else None,
        seen=seen,
        group=described.get("group") or group_of(name),
        resting=holder.resting,
        # A process that runs the task says the lifetime.
        queued="queued" in described and lifetime is None,
        broken=tuple(as_bytes(part).decode() for part in broken),
        limit=int(_number(described, "limit") or 0) or (1 if lifetime is not None else None),
        place=place,
        stored_name=described.get("name", ""),
    )


def _number(fields: Mapping[str, str], name: str) -> float | None:
    return bounded(fields.get(name), MAX_UNIX_TIME * 1e6)


def _waiter(id: bytes, now: float) -> WaiterInfo:
    """The waiter with an id of ``protocol.waiter_id``."""
    parts = id.decode(errors="replace").split(" ", 4)
    if len(parts) < 5:
        return WaiterInfo()
    _, began, pid, host, thread = parts
    since, process = bounded(began, MAX_UNIX_TIME), bounded(pid, MAX_PID)
    if since is None or process is None:
        return WaiterInfo()
    return WaiterInfo(host, int(process), thread, since, max(0.0, now - since))
