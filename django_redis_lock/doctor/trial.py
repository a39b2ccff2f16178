"""A probe of the locks: a trial of one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from redis.exceptions import RedisError

from ..locking import Lock
from ..protocol import events_key
from .target import Finding, Level, Target

#: Seconds in which the lock must be acquired, and passed on.
TRIAL_TIMEOUT = 5.0


class TrialLock(Lock):
    """A lock that is in no figures, and does not do without Redis."""

    def _server(self) -> None:
        """Where it would be counted."""


def trial(target: Target) -> Iterator[Finding]:
    """Acquire a lock, and pass it to a waiter."""
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
    """They would stay for a day."""
    for key in (*lock.keys[:5], events_key(lock.keys.lock)):
        with suppress(RedisError, OSError):
            lock.redis.delete(key)
