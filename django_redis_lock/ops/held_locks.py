"""The held locks and running computations of all caches, and the caches that failed.

Several caches may share a database. A lock is listed under the cache whose key prefix it has, by
its name in that cache; where KEY_FUNCTION hides prefixes and names, the cache that makes its key of
the name that its holder has stored. Any other lock (a bare ``Lock(redis, "x")``, or one of another
site or version) is listed by its whole key, under the first cache of its database.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.crypto import salted_hmac
from redis.exceptions import RedisError

from ..cache import lock_cache, lock_caches
from ..events import Outage, group_of
from ..exceptions import LocalLockUnavailable
from ..extension import PartMissing, part
from ..history import Event
from ..protocol import Owner, printable
from ..protocol.keys import is_lock, keys_at
from ..transport import server_of
from ..transport.hints import explained
from .inventory import (
    FLIGHT,
    LOCK,
    MAX_DESCRIBED,
    Inspection,
    Inventory,
    LockInfo,
    Outcome,
    inspect,
    is_name_of,
    latest_news,
    list_held,
    release_each,
)

#: The errors of a cache that is down or wrongly configured.
UNAVAILABLE = (RedisError, ImproperlyConfigured)
#: The most databases that are queried at once, so that one that is down does not delay others.
AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A held lock or a running computation, and its cache.

    Attributes:
        name: its name in the cache, or its whole key, followed by the stored name in brackets if
            there is one that the key does not show.
        foreign: whether it has the prefix of no cache, so that ``name`` is the whole key.
    """

    alias: str
    name: str
    lock: LockInfo
    foreign: bool = False

    @property
    def group(self) -> str:
        group = self.lock.group
        # The group may be derived from the whole key: then derive it from the name.
        return group_of(self.name) if group == group_of(self.lock.name) else group


class Failure(NamedTuple):
    """A cache that failed, and what this process knows of its servers' outages."""

    alias: str
    error: str
    outages: tuple[Outage, ...] = ()


class Truncation(NamedTuple):
    alias: str
    kind: str
    shown: int
    total: int


@dataclass(slots=True)
class HeldLocks:
    """The lists, longest held first.

    Attributes:
        truncations: databases whose list is incomplete.
        in_memory: caches whose locks exclude the threads of one process only; the lists have those
            of this process.
        local: the local locks that are held on this host, name and holder, if a cache has
            failed or is in memory: ``run_locked`` takes such locks then.
    """

    found: list[HeldLock] = field(default_factory=list)
    truncations: list[Truncation] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    in_memory: list[str] = field(default_factory=list)
    local: list[tuple[str, Owner]] = field(default_factory=list)


class _Database(NamedTuple):
    """A database, and for each cache in it the key prefixes of its locks and of its values.
    ``only_locks``: prefixes of keys that no cache can write to."""

    client: Any
    prefixes: dict[str, dict[str, bytes]]
    only_locks: set[bytes]


def held_locks(
    aliases: Iterable[str] | None = None,
    *,
    kinds: Sequence[str] = (LOCK, FLIGHT),
    search: str = "",
    limit: int = MAX_DESCRIBED,
) -> HeldLocks:
    """The held locks and running computations of the caches ``aliases``, or of all of them.

    Args:
        search: only those whose names contain this text; case is ignored.
        limit: the largest number of each kind to list of each database.
    """
    asked, failures = _asked(aliases)
    in_memory = [alias for _, here in asked for alias in here if lock_cache(alias).in_memory]
    result = HeldLocks(failures=failures, in_memory=in_memory)

    def ask(database: _Database, by_name: bool) -> list[Inventory] | Exception:
        try:
            spaces = tuple(database.only_locks)
            client = database.client
            return [list_held(client, b"", limit, search, kind, spaces, by_name) for kind in kinds]
        except UNAVAILABLE as error:
            return error

    # The threads of the pool have other cache objects.
    hiding = [not all(lock_cache(a)._has_plain_keys for a in each.prefixes) for each, _ in asked]
    with ThreadPoolExecutor(min(AT_ONCE, max(1, len(asked)))) as threads:
        answers = threads.map(ask, [database for database, _ in asked], hiding)
        for (database, here), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Exception):
                result.failures += [_failure(alias, answer) for alias in here]
                continue
            for kind, listed in zip(kinds, answer, strict=True):
                held = [_place(database, lock) for lock in listed.locks]
                result.found += [
                    h for h in held if h.alias in here and search.lower() in h.name.lower()
                ]
                if not listed.complete:
                    cut = Truncation(here[0], kind, len(listed.locks), listed.total)
                    result.truncations.append(cut)
    result.found.sort(key=lambda held: held.lock.held_for or 0.0, reverse=True)
    without_redis = [failure.alias for failure in result.failures] + result.in_memory
    result.local = _held_here(without_redis, search)
    return result


def number_of_waiters(found: Iterable[HeldLock]) -> int:
    """Processes that wait for these locks. The holders of all places of a lock have the same."""
    waiters = {(held.alias, held.lock.lock_key): held.lock.waiters or 0 for held in found}
    return sum(waiters.values())


def look_closely(alias: str, key: bytes, kind: str = LOCK) -> tuple[HeldLock | None, Inspection]:
    """The lock at ``key`` in the database of the cache ``alias``; None if it is free.

    Raises:
        redis.exceptions.RedisError, ImproperlyConfigured: the request failed.
    """
    database = _database_of(alias)
    found = inspect(database.client, key, kind, tuple(database.only_locks))
    holding = None if found.lock is None else _place(database, found.lock)
    return holding, replace(
        found,
        lock=None if holding is None else holding.lock,
        holders=tuple(_place(database, lock).lock for lock in found.holders),
        events=tuple(event._replace(owner=_shown(event.owner)) for event in found.events),
    )


@dataclass(frozen=True, slots=True)
class News:
    """An event of a lock, its cache, and its name there."""

    alias: str
    name: str
    event: Event


def latest_events(aliases: Iterable[str] | None = None) -> tuple[list[News], list[Failure]]:
    """The losses, crashes and forced releases of the last day, of all locks, the latest first; and
    the caches that failed."""
    asked, failures = _asked(aliases)
    news: list[News] = []
    for database, here in asked:
        try:
            found = latest_news(database.client)
        except UNAVAILABLE as error:
            failures += [_failure(alias, error) for alias in here]
            continue
        for event in found:
            alias, prefix, _ = _cache_of(database, event.lock, LOCK)
            if alias in here:
                name = event.lock[len(prefix) :].decode(errors="backslashreplace")
                news.append(News(alias, name, event._replace(owner=_shown(event.owner))))
    return sorted(news, key=lambda each: each.event.at, reverse=True), failures


def is_among_locks(alias: str, key: bytes) -> bool:
    """Whether only locks are stored under such keys: no cache can write there."""
    return key.startswith(tuple(_database_of(alias).only_locks))


def name_of(alias: str, key: bytes, kind: str = LOCK) -> str:
    """The name of the lock at ``key`` in the cache ``alias``, held or free, as the key shows it."""
    if kind == LOCK and is_lock(key):
        key = keys_at(key).name
    try:
        _, prefix, _ = _cache_of(_database_of(alias), key, kind)
    except UNAVAILABLE:
        prefix = b""
    return key[len(prefix) :].decode(errors="backslashreplace")


def former_name(alias: str, key: bytes, events: Iterable[Event]) -> str:
    """The name of the free lock at ``key`` that its holders have stored with these ``events``;
    empty if no cache of the database has such a lock."""
    key = keys_at(key).name if is_lock(key) else key
    caches = [lock_cache(each) for each in _database_of(alias).prefixes]
    names = dict.fromkeys(event.name for event in events if event.name)
    return next((name for name in names for of in caches if is_name_of(of, name, key)), "")


def release(
    alias: str, key: bytes, owner_id: str, *, fence: int | None, kind: str = LOCK, by: str = ""
) -> Outcome:
    """``inventory.release`` with the settings of the cache ``alias``."""
    return _release_each(alias, {key: (owner_id, fence)}, kind, by)[key]


def release_many(chosen: Sequence[HeldLock], by: str = "") -> list[Outcome]:
    """Release these locks and computations, many in one round trip; returns the outcomes."""
    wanted: dict[tuple[str, str], dict[bytes, tuple[str, int | None]]] = {}
    for alias, lock in ((held.alias, held.lock) for held in chosen):
        wanted.setdefault((alias, lock.kind), {})[lock.key] = lock.owner.id, lock.fence
    ended = {
        (alias, kind): _release_each(alias, of_it, kind, by)
        for (alias, kind), of_it in wanted.items()
    }
    return [ended[held.alias, held.lock.kind][held.lock.key] for held in chosen]


def _release_each(
    alias: str, chosen: dict[bytes, tuple[str, int | None]], kind: str, by: str
) -> dict[bytes, Outcome]:
    database, grant_timeout = _database_of(alias), lock_cache(alias).conf.GRANT_TIMEOUT
    return release_each(
        database.client,
        chosen,
        kind=kind,
        grant_timeout=grant_timeout,
        by=by,
        only_locks=tuple(database.only_locks),
        id_of=shown_id,
    )


def _databases() -> tuple[Iterable[_Database], dict[str, Exception]]:
    """Also returns the caches that are wrongly configured, and why."""
    found: dict[object, _Database] = {}
    failed: dict[str, Exception] = {}
    for alias in lock_caches():
        try:
            cache: Any = lock_cache(alias)
            client = cache._lock_client()
            prefixes = {FLIGHT: cache._encoded_key("", None)}
            if not cache._keys.hides_locks():
                prefixes[LOCK] = cache._lock_key("")
            new = _Database(client, {}, set())
            database = found.setdefault(server_of(client).database, new)
        except UNAVAILABLE as error:
            failed[alias] = error
        else:
            database.prefixes[alias] = prefixes
            if cache.conf.LOCK_PREFIX and LOCK in prefixes:
                database.only_locks.add(prefixes[LOCK])
    return found.values(), failed


def _asked(
    aliases: Iterable[str] | None,
) -> tuple[list[tuple[_Database, list[str]]], list[Failure]]:
    """The databases of these caches (None: of all), each with its caches, and those of the caches
    that are wrongly configured."""
    wanted = list(lock_caches() if aliases is None else aliases)
    databases, failed = _databases()
    asked = [(each, [alias for alias in each.prefixes if alias in wanted]) for each in databases]
    failures = [_failure(alias, error) for alias, error in failed.items() if alias in wanted]
    return [(database, here) for database, here in asked if here], failures


def _database_of(alias: str) -> _Database:
    lock_cache(alias)  # Raises if it is no cache for locks.
    databases, failed = _databases()
    if alias in failed:
        raise failed[alias]
    return next(database for database in databases if alias in database.prefixes)


def _cache_of(database: _Database, key: bytes, kind: str) -> tuple[str, bytes, bool]:
    """The cache under which ``key`` is listed, its prefix, and whether no prefix matches."""
    of_it = [(alias, p[kind]) for alias, p in database.prefixes.items() if kind in p]
    found = [(len(prefix), alias) for alias, prefix in of_it if key.startswith(prefix)]
    if not found:
        return next(iter(database.prefixes)), b"", True
    length, alias = max(found, key=lambda entry: entry[0])
    return alias, key[:length], False


def _place(database: _Database, lock: LockInfo) -> HeldLock:
    stored = lock.stored_name
    alias, prefix, foreign = _cache_of(database, lock.lock_key, lock.kind)
    name = lock.lock_key[len(prefix) :].decode(errors="backslashreplace")
    for each in database.prefixes if stored else ():
        if is_name_of(lock_cache(each), stored, lock.lock_key, lock.kind):
            alias, name, foreign = each, stored, False
            break
    else:
        if stored not in name:
            name = f"{name} ({stored})"
    return HeldLock(alias, name, replace(lock, owner=_shown(lock.owner)), foreign)


def _shown(owner: Owner) -> Owner:
    return replace(owner, id=shown_id(owner.id))


def shown_id(id: str) -> str:
    """An owner's id as people see it. The id itself is a hash of the token without a key, which
    would confirm a guessed token, or value."""
    return salted_hmac(_SALT, id, _secret(), algorithm="sha256").hexdigest()[:12] if id else ""


_SALT = "django_redis_lock.held_locks"


def _secret() -> str | bytes:
    try:
        secret: str | bytes = settings.SECRET_KEY
        return secret
    except ImproperlyConfigured:  # Some commands run without one.
        return _OF_THIS_PROCESS


_OF_THIS_PROCESS = secrets.token_bytes(32)


def _failure(alias: str, error: Exception) -> Failure:
    outages: tuple[Outage, ...] = ()
    with suppress(*UNAVAILABLE):
        cache: Any = lock_cache(alias)
        known = [node.breaker.known_outage() for node in server_of(cache._lock_client()).nodes()]
        outages = tuple(filter(None, known))
    return Failure(alias, printable(explained(error), limit=300), outages)


def _held_here(aliases: Iterable[str], search: str) -> list[tuple[str, Owner]]:
    folders: set[str | None] = set()
    for alias in aliases:
        with suppress(ImproperlyConfigured):  # It is one of the failures.
            folders.add(lock_cache(alias).conf.LOCAL_LOCK_FOLDER)
    held: list[tuple[str, Owner]] = []
    for folder in folders:
        with suppress(LocalLockUnavailable, PartMissing):  # The check W015 reports it.
            held += part("fallback").held_locally(folder)
    return [(name, owner) for name, owner in held if search.lower() in name.lower()]
