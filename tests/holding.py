"""Locks that somebody else holds while a test looks at what the others are told, and servers that
are away."""

from __future__ import annotations

import math
import time as system_time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from django.core.cache import caches

from django_redis_lock import Lock
from django_redis_lock.clock import time
from django_redis_lock.events import Outage
from django_redis_lock.history import Heartbeat
from django_redis_lock.keeper import DeferredRelease, Job, keeper
from django_redis_lock.locking import Renewal, waiting
from django_redis_lock.locking.waiting import QueueWatch
from django_redis_lock.protocol.acquisition import Refused, parse_acquire
from django_redis_lock.protocol.keys import lock_keys, process_key
from django_redis_lock.transport import server
from tests.processes import until

__all__ = [
    "Renewals",
    "crash",
    "deferred_releases",
    "hold",
    "hurry",
    "hurry_until",
    "outages",
    "renew",
    "settle",
    "silence",
    "table_of",
    "until_released",
    "watch_often",
]


@contextmanager
def hold(name: str, **options: Any) -> Iterator[Lock]:
    """Somebody else has the lock."""
    lock = caches["default"].lock(name, **options)
    assert lock.acquire(blocking=False)
    yield lock
    lock.release()


class Renewals:
    """Counts the renewals of what is at ``key`` by the lifetime left: it grows with each."""

    def __init__(self, client: redis.Redis, key: str | bytes) -> None:
        self._client, self._key, self._counted = client, key, 0
        self._left = client.pttl(key)

    def count(self) -> int:
        """Those since the beginning, if this is called often."""
        left = self._client.pttl(self._key)
        self._counted += left > self._left
        self._left = left
        return self._counted


def hurry(*kinds: type[Job]) -> None:
    """Have the keeper of this process do now what it would do within seconds: describe holders,
    renew their locks or find them lost, look at what is waited for; or only jobs of ``kinds``."""
    for job in keeper().jobs():
        if isinstance(job, kinds or (Renewal, QueueWatch)):
            keeper().reschedule(job, time.monotonic())


def hurry_until(condition: Callable[[], Any], *kinds: type[Job]) -> None:
    """As ``hurry``, again and again until ``condition()`` holds; it must come to the end of it in
    between."""
    again = -math.inf

    def holds() -> Any:
        nonlocal again
        if system_time.monotonic() > again:
            again = system_time.monotonic() + 0.1
            hurry(*kinds)
        return condition()

    until(holds)


def renew(client: Any, key: str | bytes, kind: type[Job] = Renewal) -> None:
    """Have the keeper of this process renew what it renews at ``key``, for more than 30 s, now."""
    client.pexpire(key, 30_000)
    hurry_until(lambda: client.pttl(key) > 30_000, kind)


def watch_often(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.2) -> None:
    """Have the keeper of this process look so often at what is waited for: whether its holder has
    vanished, or its blocking pop. It would each two seconds."""
    monkeypatch.setattr(waiting, "WATCH_INTERVAL_SECONDS", seconds)


def deferred_releases() -> list[DeferredRelease]:
    """What the keeper of this process is still to release."""
    return [job for job in keeper().jobs() if isinstance(job, DeferredRelease)]


def until_released() -> None:
    """Have the keeper release now, and once more, as it does, what callers could not."""
    hurry_until(lambda: not deferred_releases(), DeferredRelease)


def settle() -> None:
    """Wait until this process listens for those of its locks that are described, and has looked at
    them since: it does not write the descriptions for a while."""

    def is_quiet() -> bool:
        jobs = keeper().jobs()
        renewals = [job for job in jobs if isinstance(job, Renewal)]
        beats = [job for job in jobs if isinstance(job, Heartbeat)]
        return (
            all(beat._subscription and beat._subscription.subscribed for beat in beats)
            and not keeper().under_way()
            and all(job.due > time.monotonic() for job in (*renewals, *beats))
        )

    until(is_quiet)


def crash(lock: Any) -> None:
    """Leave undone what a process that has crashed leaves undone: nobody renews ``lock`` any more,
    describes its holder, or notices its end. What the keeper has begun of that is over."""
    jobs = lock.local.renewal.jobs

    def is_over() -> bool:
        lock.local.renewal.discard()  # Again: at its end the keeper may have joined the heartbeat.
        return keeper().under_way().isdisjoint(jobs)

    until(is_over)


def silence(client: Any, key: bytes, seconds: float, process: str = "another") -> None:
    """Have the lock at ``key``, whose holder has described itself, look as if it were held by
    another process that has not been heard of for so long."""
    settle()
    client.hset(lock_keys(key).owner, "process", process)
    client.hincrby(lock_keys(key).owner, "seen", int(-seconds * 1e6))
    now, microseconds = client.time()
    client.set(process_key(process), int((now - seconds) * 1e6) + microseconds)


def outages() -> list[Outage]:
    """The servers that do not answer, as far as this process knows."""
    nodes = (node for known in list(server._servers.values()) for node in known.nodes())
    return [outage for node in nodes if (outage := node.breaker.known_outage())]


def table_of(reply: Any) -> Any:
    """The reply to ACQUIRE as its longest form: place (0: refused), fence or PTTL, server time, and
    perhaps how the holder before has vanished."""
    parsed = parse_acquire(reply, 0.0)
    if isinstance(parsed, Refused):
        return [0, parsed.pttl, parsed.server_us]
    vanished = [] if parsed.vanished is None else [parsed.vanished]
    return [parsed.place, parsed.fence, parsed.server_us, *vanished]
