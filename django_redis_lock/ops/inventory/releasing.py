"""Forced release: of one lock or many, if the acquisitions that were shown are still there, and of
all locks of a database or a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

from ...clock import time
from ...history import code_here, event_args
from ...protocol import Call
from ...protocol.holder_scripts import reset_call
from ...protocol.holders import HolderInfo
from ...protocol.keys import INDEX, flight_key, flight_stream, keys_at
from ...protocol.validation import MAX_LIMIT
from ...singleflight import END_FLIGHT
from ...transport import is_cluster, run, run_all
from .listing import (
    FLIGHT,
    LOCK,
    MAX_ENTRIES,
    REPLY_TIMEOUT_SECONDS,
    Inventory,
    LockInfo,
    Prefixes,
    holders_at,
    indexes,
    list_held,
    listed,
)
from .scripts import LIST

if TYPE_CHECKING:
    from ...transport import Client

#: Milliseconds for which the followers of an ended computation can read its end.
STREAM_LIFETIME = 10_000


class Outcome(Enum):
    #: The holder that was shown has lost it; the first waiter has it.
    RELEASED = "released"
    #: It was free.
    FREE = "free"
    #: Another holder has it, and keeps it.
    NOT_OWNER = "changed hands"


def release(
    client: Any,
    key: bytes,
    owner_id: str,
    *,
    fence: int | None = None,
    kind: str = LOCK,
    grant_timeout: float = 2.0,
    by: str = "",
    only_locks: Prefixes = (),
    id_of: Callable[[str], str] = str,
) -> Outcome:
    """End the lock at ``key`` if its holder has the id ``owner_id``; the first waiter gets it at
    once. The holder's process is told at once, too, but is not stopped. Nothing else than a lock
    ends: other data at ``key`` counts as free.

    Args:
        key: of the lock, or the cache key of a computation.
        fence: ``LockInfo.fence``, which distinguishes two acquisitions with one chosen token.
        kind: LOCK, or FLIGHT to end a computation: its result is not stored, and a follower leads.
        grant_timeout: seconds that the first waiter has to take the grant.
        by: the user, for the lock's list of events.
        only_locks: see ``list_held``.
        id_of: returns what users see as an owner's id.

    Raises:
        redis.exceptions.RedisError: the request failed; the lock may have been released.
    """
    options: dict[str, Any] = {"grant_timeout": grant_timeout, "by": by, "only_locks": only_locks}
    return release_each(client, {key: (owner_id, fence)}, kind=kind, id_of=id_of, **options)[key]


#: The most locks that are released in one round trip: a few milliseconds of the server's time.
RELEASED_AT_ONCE = 250


def release_each(
    client: Any,
    chosen: Mapping[bytes, tuple[str, int | None]],
    *,
    kind: str = LOCK,
    id_of: Callable[[str], str] = str,
    only_locks: Prefixes = (),
    **options: Any,
) -> dict[bytes, Outcome]:
    """``release`` for many locks, RELEASED_AT_ONCE at a time.

    Args:
        chosen: by key the owner's id, and the fence.

    Returns:
        the outcomes by key. RELEASED may be, of several, one that its holder has released at the
        same time.
    """
    keys, outcomes = list(chosen), dict.fromkeys(chosen, Outcome.FREE)
    for start in range(0, len(keys), RELEASED_AT_ONCE):
        batch = keys[start : start + RELEASED_AT_ONCE]
        holders, _ = holders_at(client, kind, batch, only_locks)
        held = {}
        for key, (holder, _) in holders.items():
            owner_id, fence = chosen[key]
            outcomes[key] = Outcome.NOT_OWNER
            if id_of(holder.owner.id) == owner_id:
                held[key] = holder, fence
        if kind == FLIGHT:
            outcomes |= {key: _end_flight(client, key, of.token) for key, (of, _) in held.items()}
        else:
            outcomes |= _released(client, held, only_locks, **options)
    return outcomes


def _released(
    client: Any,
    held: Mapping[bytes, tuple[HolderInfo, int | None]],
    only_locks: Prefixes = (),
    grant_timeout: float = 2.0,
    by: str = "",
) -> dict[bytes, Outcome]:
    """End the locks of these holders, in one round trip to each server."""
    resets = []
    for key, (holder, fence) in held.items():
        keys = keys_at(key, is_cluster(client))
        limit = MAX_LIMIT if keys.place > 1 and holder.limit == 1 else holder.limit
        name = holder.described.get("name", "")
        event = event_args(keys.name, "reset", holder.in_the_way, by, holder.held_for, name)
        only = keys.name.startswith(only_locks)
        resets.append(reset_call(keys, holder, grant_timeout, limit, fence, only, event))
    gone = Outcome.RELEASED
    if len(resets) == 1:  # Of a single call it is known whether it was sent twice.
        answer = run(client, resets[0], until=time.monotonic() + REPLY_TIMEOUT_SECONDS)
        ended = [answer.value]
        gone = Outcome.RELEASED if answer.value or answer.sent_twice else Outcome.FREE
    else:
        ended = run_all(client, resets) if resets else []
    outcomes = dict.fromkeys(held, gone)
    # 0 is also the reply to a call that was sent again and had ended the lock the first time.
    if doubtful := [key for key, value in zip(held, ended, strict=True) if not value]:
        still, _ = holders_at(client, LOCK, doubtful, only_locks)
        outcomes |= dict.fromkeys(still, Outcome.NOT_OWNER)
    return outcomes


def reset_all(redis_client: Client, prefix: bytes = b"") -> int:
    """Release all locks of a database which are held when it is called; ``on_lost`` of their
    holders is called. Does not touch locks of other libraries or other keys.

    Args:
        redis_client: a redis-py client.
        prefix: only locks whose keys begin so.

    Returns:
        the number of locks released.

    Raises:
        redis.exceptions.RedisError: a request failed. Some locks may be released.
    """
    released, done = 0, set[bytes]()
    while True:
        keys, whole = listed(redis_client, LIST, indexes(redis_client, INDEX), (prefix, b""))
        left = [key for key in keys if key not in done]
        for start in range(0, len(left), RELEASED_AT_ONCE):
            holders, _ = holders_at(redis_client, LOCK, left[start : start + RELEASED_AT_ONCE], ())
            held = {key: (holder, None) for key, (holder, _) in holders.items()}
            outcomes = _released(redis_client, held, by=code_here())
            released += list(outcomes.values()).count(Outcome.RELEASED)
        done.update(left)
        if whole or not left:
            return released


def _end_flight(client: Client, key: bytes, token: bytes) -> Outcome:
    keys = key, flight_key(key), flight_stream(key, token)
    ended = run(client, Call(END_FLIGHT, keys, (token, STREAM_LIFETIME, "", 0))).value
    return Outcome.RELEASED if ended else Outcome.FREE


# -- of one cache ----------------------------------------------------------------------------------

#: Seconds in which a living holder has described itself, which it does after half a second.
DESCRIBED_WITHIN = 3.0


class OwnLocks:
    """The locks of one cache and its default version. Their keys show whose they are, unless
    KEY_FUNCTION hides it: then these are locks whose holders have stored a name of which the cache
    makes their keys.

    Args:
        cache: a ``RedisCache`` or ``LocMemCache``.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._client, self._prefix = cache._lock_client(), cache._lock_key("")
        self._hidden = cache._keys.hides_locks()

    def held(self, limit: int) -> Inventory:
        """At most ``limit`` of them, the longest held first. Raises as ``release_all``."""
        if not self._hidden:
            return list_held(self._client, self._prefix, limit)
        own, unknown, complete = self._described()
        if unknown and not own:
            raise self._unknown(unknown)
        complete = complete and not unknown and len(own) <= limit
        return Inventory(tuple(map(self._named, own[:limit])), len(own), complete)

    def release_all(self) -> int:
        """Release all; returns how many.

        Raises:
            ImproperlyConfigured: of some held locks it is not known whose they are.
        """
        if not self._hidden:
            return reset_all(self._client, self._prefix)
        own, unknown, _ = self._described()
        chosen = {lock.key: (lock.owner.id, lock.fence) for lock in own}
        outcomes = release_each(self._client, chosen, by=code_here())
        released = list(outcomes.values()).count(Outcome.RELEASED)
        if unknown:
            raise self._unknown(unknown, f"{released} of this cache are released. ")
        return released

    def _described(self) -> tuple[list[LockInfo], int, bool]:
        """Those that are known to be this cache's, of how many others it is not known after
        DESCRIBED_WITHIN seconds, and whether these are all."""
        until = time.monotonic() + DESCRIBED_WITHIN
        while True:
            every = list_held(self._client, b"", MAX_ENTRIES)
            of_it = {lock: self._is_own(lock) for lock in every.locks}
            unknown = list(of_it.values()).count(None)
            if not unknown or time.monotonic() >= until:
                return [lock for lock in of_it if of_it[lock]], unknown, every.complete
            time.sleep(0.1)

    def _is_own(self, lock: LockInfo) -> bool | None:
        """None until its holder describes it."""
        if lock.stored_name:
            return is_name_of(self._cache, lock.stored_name, lock.lock_key)
        if self._prefix and lock.lock_key.startswith(self._prefix):
            return True
        return None if lock.limit is None else False

    def _named(self, lock: LockInfo) -> LockInfo:
        if lock.stored_name:
            return replace(lock, name=lock.stored_name)
        return replace(
            lock, name=lock.name.removeprefix(self._prefix.decode(errors="backslashreplace"))
        )

    def _unknown(self, number: int, done: str = "") -> ImproperlyConfigured:
        return ImproperlyConfigured(
            "KEY_FUNCTION makes keys that do not show which locks are this cache's, and the "
            f"holders of {number} have not stored their names. {done}For all locks of a database "
            "there are django_redis_lock.cache.reset_all(client) and the admin's list, for one "
            "cache.lock(name).reset()"
        )


def is_name_of(cache: Any, name: str, key: bytes, kind: str = LOCK) -> bool:
    """Whether the lock, or value, ``name`` of ``cache``, in its default version, is at ``key``."""
    try:
        made = cache._lock_key(name) if kind == LOCK else cache._encoded_key(name, None)
        return bool(made == key)
    except Exception:  # Its own key function may refuse the names of other caches.
        return False
