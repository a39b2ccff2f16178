"""Probes: what a server is, whether it can evict locks, and a trial of a lock."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import NoPermissionError, RedisError

from ..locking import Lock
from ..protocol import events_key
from .target import Finding, Level, Target

#: The oldest Redis that is supported.
OLDEST_VERSION = (6, 2)
#: Seconds in which the trial must acquire the lock and pass it on.
TRIAL_TIMEOUT = 5.0


def server(target: Target, client: Any) -> Iterator[Finding]:
    """What a server is, and whether it can evict locks."""
    try:
        info: Mapping[str, Any] = client.info()
    except NoPermissionError:
        yield Finding(
            "server",
            Level.NOTE,
            f'unknown: the user "{target.user}" may not run INFO',
            "Allow +info to check version and eviction.",
        )
        return
    yield _identity(target, info)
    if "maxmemory_policy" in info:
        yield _eviction(info)


def _identity(target: Target, info: Mapping[str, Any]) -> Finding:
    name, version = _name_and_version(info)
    mode = info.get("redis_mode") or info.get("server_mode") or "standalone"
    role = {"master": "primary", "slave": "replica"}.get(info.get("role", ""), info.get("role"))
    text = f"{name} {version}, {mode}, {role}"
    # Valkey reports the Redis version that it is compatible with.
    if _numbers(str(info.get("redis_version", version))) < OLDEST_VERSION:
        wanted = ".".join(map(str, OLDEST_VERSION))
        hint = f"Locks need Redis {wanted} or later, or Valkey."
        return Finding("server", Level.ERROR, text, hint, number="E101")
    if info.get("role") == "slave":
        return Finding(
            "server",
            Level.ERROR,
            f"{text}: a replica cannot take locks",
            "Put the address of the primary first in LOCATION, or use SentinelClient.",
            number="E102",
        )
    if info.get("cluster_enabled") and not target.is_cluster:
        return Finding(
            "server",
            Level.ERROR,
            f"{text}: a single node of a cluster has only some of the locks",
            'Set CLIENT_CLASS to "django_redis_lock.clients.ClusterClient".',
            number="E103",
        )
    return Finding("server", Level.OK, text)


def _name_and_version(info: Mapping[str, Any]) -> tuple[str, str]:
    for name, field in (("Valkey", "valkey_version"), ("Dragonfly", "dragonfly_version")):
        if info.get(field):
            return name, str(info.get(field))
    return "Redis", str(info.get("redis_version", "of an unknown version"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _eviction(info: Mapping[str, Any]) -> Finding:
    """Locks are keys with a lifetime, which every policy but noeviction can evict."""
    policy, limit = info["maxmemory_policy"], int(info.get("maxmemory", 0))
    if policy == "noeviction":
        return Finding("eviction", Level.OK, "noeviction: locks are never evicted")
    if not limit:
        text = f"{policy}, but no maxmemory is set: nothing is evicted"
        return Finding("eviction", Level.OK, text)
    evicted = int(info.get("evicted_keys", 0))
    so_far = f"; {evicted} keys have been evicted so far" if evicted else ""
    return Finding(
        "eviction",
        Level.WARNING,
        f"{policy}: when memory runs out (maxmemory is {limit / 2**20:.0f} MB), locks can be "
        f"evicted like any other key{so_far}",
        "Keep locks on a server with maxmemory-policy noeviction: add a cache alias for it, "
        'and name it in the setting USING: DJANGO_REDIS_LOCK = {"USING": "locks"}.',
        number="W101",
    )


class TrialLock(Lock):
    """A lock that no figures count, without fallback."""

    def _server(self) -> None:
        """No server, so that nothing is counted."""


def trial(target: Target) -> Iterator[Finding]:
    """Acquire a lock and pass it to a waiter."""
    conf = target.conf
    make = partial(
        TrialLock,
        target.client,
        target.cache._lock_name(f"doctor-{secrets.token_hex(4)}", None),
        conf.TIMEOUT,
        renew=True,
        label="locks doctor",
        replicas=conf.REPLICAS,
        grant_timeout=conf.GRANT_TIMEOUT,
        blocking_timeout=TRIAL_TIMEOUT,
    )
    lock = make()
    try:
        with ThreadPoolExecutor(1, "doctor") as threads:
            lock.acquire()
            waiter = threads.submit(_acquire_and_release, make())
            _until_registered(lock, waiter)
            lock.release()
            was_passed_on = waiter.result()
    except (RedisError, OSError) as error:
        yield Finding("trial", Level.ERROR, f"a lock could not be acquired: {error}")
        return
    finally:
        _delete_traces(lock)
    if was_passed_on:
        text = "a lock was acquired, passed to a waiter and released"
        yield Finding("trial", Level.OK, text)
    else:
        yield Finding("trial", Level.ERROR, "a released lock did not reach the waiter")


def _acquire_and_release(lock: Lock) -> bool:
    acquired = lock.acquire()
    if acquired:
        lock.release()
    return acquired


def _until_registered(lock: Lock, waiter: Future[bool]) -> None:
    deadline = time.monotonic() + TRIAL_TIMEOUT
    while not waiter.done() and time.monotonic() < deadline:
        if int(lock.redis.zcount(lock.keys.waiters, "-inf", "+inf")):
            return
        time.sleep(0.002)


def _delete_traces(lock: Lock) -> None:
    """Delete what would stay for a day."""
    for key in (*lock.keys[:5], events_key(lock.keys.lock)):
        with suppress(RedisError, OSError):
            lock.redis.delete(key)
