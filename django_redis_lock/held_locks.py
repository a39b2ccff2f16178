"""The held locks and running computations of all caches, and which caches could not be asked.

Locks belong to databases, and several caches may share one. A lock is listed under the cache whose
key space it is in, by its name there. What is in no cache's key space (a bare ``Lock(redis, "x")``,
another site's, another version's) is listed by its whole key, under the first cache of its
database.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured
from redis.exceptions import RedisError

from .cache import lock_cache, lock_caches
from .events import group_of
from .fallback import held_locally
from .inventory import (
    FLIGHT,
    LOCK,
    MAX_DESCRIBED,
    Inspection,
    Inventory,
    LockInfo,
    Outcome,
    inspect,
    list_flights,
    list_held,
)
from .inventory import release as release_forced
from .protocol import Owner, printable
from .transport import Outage, server_of

logger = logging.getLogger("django_redis_lock.admin")

#: What keeps one cache's locks from being listed without being a mistake of ours.
UNAVAILABLE = (RedisError, OSError, ImproperlyConfigured)
#: Databases asked at the same time: one that is away holds up none of the others.
AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A held lock or a running computation, and where it is listed.

    Attributes:
        alias: the cache.
        name: its name there, or its whole key.
        foreign: whether it is in no cache's key space, so that ``name`` is the whole key.
    """

    alias: str
    name: str
    lock: LockInfo
    foreign: bool = False

    @property
    def group(self) -> str:
        """Under which it is counted in metrics."""
        said = self.lock.group
        # The list was made without regard to this cache, so a group made of its whole key is not
        # one that was said.
        return group_of(self.name) if said == group_of(self.lock.name) else said


class Failure(NamedTuple):
    """A cache that could not be asked, why, and what this process knows of its servers' outage."""

    alias: str
    error: str
    outages: tuple[Outage, ...] = ()


class Truncation(NamedTuple):
    """A database with more than is listed of it."""

    alias: str
    kind: str
    shown: int
    total: int


@dataclass(slots=True)
class HeldLocks:
    """What was found, the longest held first.

    Attributes:
        cuts: databases of which only a part is listed.
        failures: caches that could not be asked; everything else is listed all the same.
        local: what is held on this host, name and holder, by those who do without them.
    """

    found: list[HeldLock] = field(default_factory=list)
    cuts: list[Truncation] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    local: list[tuple[str, Owner]] = field(default_factory=list)


class _Space(NamedTuple):
    """What the keys of one cache begin with: those of its locks, and all of them."""

    alias: str
    locks: bytes
    values: bytes


class _Database(NamedTuple):
    client: Any
    spaces: list[_Space]


def held_locks(
    aliases: Iterable[str] | None = None,
    *,
    kinds: Sequence[str] = (LOCK, FLIGHT),
    search: str = "",
    limit: int = MAX_DESCRIBED,
) -> HeldLocks:
    """The held locks and running computations of the caches ``aliases``, or of all of them.

    Args:
        kinds: LOCK, FLIGHT or both.
        search: only those whose names have this in them; upper and lower case are the same.
        limit: how many of each kind to list of each database, at most.
    """
    wanted = list(lock_caches() if aliases is None else aliases)
    result = HeldLocks()
    databases = list(_databases(result))
    asked = [d for d in databases if any(space.alias in wanted for space in d.spaces)]
    result.failures = [failure for failure in result.failures if failure.alias in wanted]

    def ask(database: _Database) -> list[Inventory] | Exception:
        lists = {LOCK: list_held, FLIGHT: list_flights}
        try:
            return [lists[kind](database.client, b"", limit, search) for kind in kinds]
        except UNAVAILABLE as error:
            return error

    with ThreadPoolExecutor(min(AT_ONCE, max(1, len(asked)))) as threads:
        for database, answer in zip(asked, threads.map(ask, asked), strict=True):
            if isinstance(answer, Exception):
                for space in database.spaces:
                    if space.alias in wanted:
                        result.failures.append(_failure(space.alias, answer))
                continue
            for kind, inventory in zip(kinds, answer, strict=True):
                _add(result, database, wanted, search, kind, inventory)
    result.found.sort(key=lambda holding: holding.lock.held_for or 0.0, reverse=True)
    result.local = _held_here(result.failures, search)
    return result


def look_closely(alias: str, key: bytes, kind: str = LOCK) -> tuple[HeldLock | None, Inspection]:
    """The lock at ``key`` of the cache ``alias``'s database; without a holding where it is free.

    Raises:
        redis.exceptions.RedisError, ImproperlyConfigured: the cache could not be asked.
    """
    database = _database_of(alias)
    found = inspect(database.client, key, kind)
    return (None if found.lock is None else _place(database, found.lock)), found


def name_of(alias: str, key: bytes, kind: str = LOCK) -> str:
    """What a lock at ``key`` is called in the cache ``alias``, whether it is held or not."""
    try:
        _, prefix, _ = _space(_database_of(alias), key, kind)
    except UNAVAILABLE:
        prefix = b""
    return key[len(prefix) :].decode(errors="backslashreplace")


def release(
    alias: str, key: bytes, owner_id: str, *, fence: int | None, kind: str = LOCK, by: str = ""
) -> Outcome:
    """As ``locking.forced.release``, with the settings of the cache ``alias``."""
    cache: Any = lock_cache(alias)
    client = cache._lock_client()
    grant = cache.conf.GRANT_TIMEOUT
    return release_forced(client, key, owner_id, fence=fence, kind=kind, grant_timeout=grant, by=by)


def _databases(result: HeldLocks) -> Iterator[_Database]:
    """The databases of all caches; those that are not set up as they should be are failures."""
    found: dict[Any, _Database] = {}
    for alias in lock_caches():
        try:
            cache: Any = lock_cache(alias)
            client = cache._lock_client()
            space = _space_of(alias, cache)
            database = found.setdefault(server_of(client).database, _Database(client, []))
        except UNAVAILABLE as error:
            result.failures.append(_failure(alias, error))
        else:
            database.spaces.append(space)
    yield from found.values()


def _database_of(alias: str) -> _Database:
    # Asking for its client first: what is wrong with this very cache is for the caller to see.
    database = server_of(lock_cache(alias)._lock_client()).database
    return next(d for d in _databases(HeldLocks()) if server_of(d.client).database == database)


def _space_of(alias: str, cache: Any) -> _Space:
    return _Space(
        alias,
        cache._encoded_key(cache.conf.LOCK_PREFIX, None),
        cache._encoded_key("", None),
    )


def _space(database: _Database, key: bytes, kind: str) -> tuple[str, bytes, bool]:
    """The alias under which ``key`` is listed, what to leave out of its name, and whether it is in
    no cache's key space. Of two key spaces the narrower one is meant."""
    spaces = [
        (space.locks if kind == LOCK else space.values, space.alias) for space in database.spaces
    ]
    own = [(len(prefix), alias, prefix) for prefix, alias in spaces if key.startswith(prefix)]
    if not own:
        return database.spaces[0].alias, b"", True
    longest = max(own, key=lambda entry: entry[0])
    return longest[1], longest[2], False


def _place(database: _Database, lock: LockInfo) -> HeldLock:
    alias, prefix, foreign = _space(database, lock.key, lock.kind)
    name = lock.key[len(prefix) :].decode(errors="backslashreplace")
    return HeldLock(alias, name, lock, foreign)


def _add(
    result: HeldLocks,
    database: _Database,
    wanted: Sequence[str],
    search: str,
    kind: str,
    inventory: Inventory,
) -> None:
    lowered = search.lower()
    for lock in inventory.locks:
        holding = _place(database, lock)
        if holding.alias in wanted and lowered in holding.name.lower():
            result.found.append(holding)
    if not inventory.complete:
        alias = next(space.alias for space in database.spaces if space.alias in wanted)
        result.cuts.append(Truncation(alias, kind, len(inventory.locks), inventory.total))


def _failure(alias: str, error: Exception) -> Failure:
    outages: tuple[Outage, ...] = ()
    with suppress(*UNAVAILABLE):
        cache: Any = lock_cache(alias)
        known = [node.breaker.known_outage() for node in server_of(cache._lock_client()).nodes()]
        outages = tuple(outage for outage in known if outage is not None)
    return Failure(alias, printable(str(error).encode(), limit=200), outages)


def _held_here(failures: Iterable[Failure], search: str) -> list[tuple[str, Owner]]:
    """What is held on this host instead of, or beside, the locks of caches that are away."""
    folders: set[str | None] = set()
    for failure in failures:
        with suppress(ImproperlyConfigured):  # The cache is listed for that itself.
            folders.add(lock_cache(failure.alias).conf.LOCAL_LOCK_FOLDER)
    try:
        held = [found for folder in folders for found in held_locally(folder)]
    except OSError as error:
        logger.warning("The locks of this host cannot be listed: %s", error)
        return []
    return [(name, owner) for name, owner in held if search.lower() in name.lower()]
