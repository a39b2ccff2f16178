"""Probes of the locks: a trial of one, and problems of those that are held."""

from __future__ import annotations

import inspect
import math
import secrets
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from redis.connection import AbstractConnection as Connection
from redis.exceptions import NoPermissionError, RedisError

from ..held_locks import held_locks
from ..inventory import indexed_locks
from ..locking import Lock
from ..protocol import Call, events_key, lock_keys, printable, script
from ..transport import run_all
from .findings import Finding, Level
from .target import Target

__all__ = ["held", "stuck", "timeouts", "trial"]

#: Seconds a lock may take to pass from one to the other, at most.
PATIENCE = 5.0
#: Locks looked into, at most.
MOST = 500

#: Whether a lock has been passed on to somebody who does not take it.
#:
#: KEYS  lock keys
#: returns {1 if a grant of it lies untaken else 0, PTTL of the lock, PTTL of the grants}
GRANT_OF = script("""
local holder = redis.call('GET', KEYS[1])
local first = redis.call('LINDEX', KEYS[2], 0)
local lying = holder and first and string.sub(first, 1, #holder + 1) == holder .. ':'
return {lying and 1 or 0, redis.call('PTTL', KEYS[1]), redis.call('PTTL', KEYS[2])}
""")


class Trial(Lock):
    """A lock that is in no figures, and does not do without Redis."""

    def _server(self) -> None:
        """Where it would be counted."""


def trial(patient: Target) -> Iterator[Finding]:
    """Take a lock, let somebody wait for it, pass it on, release it."""
    conf = patient.conf
    lock = partial(
        Trial,
        patient.client,
        patient.cache._lock_name(f"doctor-{secrets.token_hex(4)}", None),
        conf.TIMEOUT,
        renew=True,
        label="locks doctor",
        replicas=conf.REPLICAS,
        grant_timeout=conf.GRANT_TIMEOUT,
    )
    first, second = lock(), lock(blocking_timeout=PATIENCE)
    passed_at: list[float] = []
    failures: list[Exception] = []

    def wait() -> None:
        try:
            if second.acquire():
                passed_at.append(time.perf_counter())
                second.release()
        except (RedisError, OSError) as error:
            failures.append(error)

    waiter = threading.Thread(target=wait, name="doctor", daemon=True)
    try:
        first.acquire(blocking_timeout=PATIENCE)
        waiter.start()
        _until_it_waits(first, waiter)
        released = time.perf_counter()
        first.release()
        waiter.join(2 * PATIENCE)
    except (RedisError, OSError) as error:
        failures.append(error)
    finally:
        _forget(patient, first)
    if failures:
        yield Finding("trial", Level.ERROR, f"a lock could not be acquired: {failures[0]}")
    elif not passed_at:
        yield Finding("trial", Level.ERROR, "a released lock did not reach the waiter")
    else:
        took = (passed_at[0] - released) * 1000
        text = f"a lock was taken, passed on in {took:.1f} ms and released"
        yield Finding("trial", Level.OK, text)


def _until_it_waits(lock: Lock, waiter: threading.Thread) -> None:
    deadline = time.monotonic() + PATIENCE
    while waiter.is_alive() and time.monotonic() < deadline:
        if int(lock.redis.zcount(lock.keys.waiters, "-inf", "+inf")):
            return
        time.sleep(0.002)


def _forget(patient: Target, lock: Lock) -> None:
    """The trial's traces would stay for a day."""
    for key in (*lock.keys[:5], events_key(lock.keys.lock)):
        try:
            patient.client.delete(key)
        except (RedisError, OSError):
            pass


def held(patient: Target) -> Iterator[Finding]:
    result = held_locks([patient.alias], kinds=("lock",))
    if result.failures:
        text = f"the held locks cannot be listed: {result.failures[0].error}"
        yield Finding("held locks", Level.WARNING, text)
        return
    locks = result.found
    silent = [h.name for h in locks if h.lock.silent]
    endless = [h.name for h in locks if math.isinf(h.lock.ttl)]
    if silent:
        yield Finding(
            "held locks",
            Level.WARNING,
            f"{_some(silent)}: no heartbeat of the holder",
            "Its process has crashed, is stopped or is cut off from Redis. manage.py locks show "
            "NAME names it.",
        )
    if endless:
        yield Finding(
            "held locks",
            Level.WARNING,
            f"{_some(endless)}: never expires; if its holder crashes, it stays taken forever",
            "Remove timeout=None: the lock then has a lifetime, and is renewed.",
        )
    if not silent and not endless:
        number = len(locks)
        text = f"{number}, none is silent" if number else "none"
        yield Finding("held locks", Level.OK, text)


def stuck(patient: Target) -> Iterator[Finding]:
    """Grants that nobody takes, and that do not run out: neither may be, whatever has happened."""
    try:
        keys = indexed_locks(patient.client, MOST)
    except NoPermissionError:
        return  # Nothing that locks need; what lists them says it.
    calls = [Call(GRANT_OF, lock_keys(key)[:5], ()) for key in keys]
    answers = run_all(patient.client, calls) if calls else []
    longest = 2000 * patient.conf.GRANT_TIMEOUT
    lying = [
        printable(key)
        for key, (untaken, lock_left, list_left) in zip(keys, answers, strict=True)
        if (untaken and not 0 <= int(lock_left) <= longest) or int(list_left) == -1
    ]
    if lying:
        yield Finding(
            "grants",
            Level.WARNING,
            f"{_some(lying)}: passed to a waiter that has not taken it for too long",
            "GRANT_TIMEOUT must be the same on all hosts. manage.py locks reset ends such locks.",
        )
    else:
        yield Finding("grants", Level.OK, "none is stuck")


def timeouts(patient: Target) -> Iterator[Finding]:
    """How long a Redis that does not answer is waited for."""
    lifetime, given = patient.conf.TIMEOUT, _socket_timeout(patient)
    if given is None:
        yield Finding(
            "timeouts",
            Level.NOTE,
            f"lifetime of locks: {lifetime:g} s; cache calls wait forever for a Redis that "
            "does not answer",
            'Set "SOCKET_TIMEOUT" in the cache\'s OPTIONS to a few seconds. Waits for a lock are '
            "not affected by it.",
        )
    elif given >= lifetime:
        yield Finding(
            "timeouts",
            Level.WARNING,
            f"SOCKET_TIMEOUT, {given:g} s, is not shorter than the lifetime of locks, "
            f"{lifetime:g} s: when Redis does not answer, a lock is lost before its holder knows",
            "Set SOCKET_TIMEOUT to at most a third of TIMEOUT.",
            number="W104",
        )
    else:
        text = f"lifetime of locks: {lifetime:g} s; socket timeout: {given:g} s"
        yield Finding("timeouts", Level.OK, text)


def _socket_timeout(patient: Target) -> float | None:
    pool: Any = getattr(patient.client, "connection_pool", None)
    given = patient.options.get("SOCKET_TIMEOUT")
    if pool is not None:
        # What holds where nobody says anything differs between versions of redis-py.
        default = inspect.signature(Connection.__init__).parameters.get("socket_timeout")
        given = pool.connection_kwargs.get("socket_timeout", default and default.default)
    return float(given) if isinstance(given, (int, float)) else None


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
