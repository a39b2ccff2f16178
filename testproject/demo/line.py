"""Nine processes stand in line for one lock."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from django.core.cache import cache
from django.core.management.base import CommandError
from django_redis import get_redis_connection

from django_redis_lock import Lock
from testproject.demo.member import Member
from testproject.demo.screen import Screen
from testproject.demo.team import PATIENCE, Team

__all__ = ["Served", "line", "stand_in_line"]

NAME = "demo-line"
LABEL = "The line of the demo"
#: Seconds each one works when it is its turn.
WORK = 0.2
#: How many are at work, and a number that two at once would spoil.
INSIDE, SHARED = "django_redis_lock_demo:inside", "django_redis_lock_demo:shared"


@dataclass(frozen=True)
class Served:
    """How one process fared; the times are Redis's own, in seconds.

    Attributes:
        arrived, entered, left: when it began to wait, had the lock, and was done.
        inside: how many were at work when it entered, itself included.
        fence: the lock's fence.
    """

    number: int
    arrived: float
    entered: float
    left: float
    inside: int
    fence: int

    @property
    def waited(self) -> float:
        return self.entered - self.arrived


@dataclass(frozen=True)
class WaitQueue:
    """All of them, in the order of service, and the shared number at the end."""

    served: list[Served]
    shared: int

    @property
    def arrivals(self) -> list[Served]:
        return sorted(self.served, key=lambda each: each.arrived)

    @property
    def in_order(self) -> bool:
        return self.arrivals == self.served

    @property
    def overlaps(self) -> int:
        """How many entered before the one before them had left."""
        return sum(after.entered < before.left for before, after in pairwise(self.served))

    @property
    def most_inside(self) -> int:
        return max(each.inside for each in self.served)

    @property
    def fences_rise(self) -> bool:
        return all(before.fence < after.fence for before, after in pairwise(self.served))


def stand_in_line(member: Member) -> None:
    """One process's part: wait for the lock when it is told to, and work for a moment."""
    redis = get_redis_connection("default")
    redis.ping()
    member.say("ready")
    member.hear()
    arrived = _server_time(redis)
    with cache.lock(NAME, blocking_timeout=PATIENCE, label=LABEL) as lock:
        entered = _server_time(redis)
        inside = redis.incr(INSIDE)
        member.say("entered")
        # Read, work, write: whoever else is inside meanwhile counts from the same number.
        count = int(redis.get(SHARED) or 0)
        time.sleep(WORK)
        redis.set(SHARED, count + 1, ex=600)
        redis.decr(INSIDE)
        times = {"arrived": arrived, "entered": entered, "left": _server_time(redis)}
        facts = {**times, "inside": inside, "fence": lock.fence}
    member.say("served", **facts)


def line(team: Team, screen: Screen) -> WaitQueue:
    """Let the team line up, one after the other, in front of a lock that is held until all wait."""
    redis = get_redis_connection("default")
    redis.set(INSIDE, 0, ex=600)
    redis.delete(SHARED)
    served: list[Served] = []
    try:
        with screen.bars(team.numbers) as bars:
            team.start_all(stand_in_line)
            team.wait_for_all("ready")
            with cache.lock(NAME, label="The doorkeeper of the demo") as lock:
                for place, number in enumerate(random.sample(team.numbers, len(team.numbers)), 1):
                    team.emit(number, "go")
                    _wait_for_waiters(lock, place)
                    bars.pulse(number, f"came as number {place}")
            for event in team.until_all("served"):
                if event.what == "served":
                    served.append(Served(event.member, **event.facts))
                    bars.finish(event.member, f"done as number {len(served)}")
                else:
                    bars.fill(event.member, "at work", 0.5)
        return WaitQueue(sorted(served, key=lambda each: each.entered), int(redis.get(SHARED)))
    finally:
        redis.delete(INSIDE, SHARED)


def _wait_for_waiters(lock: Lock, number: int) -> None:
    """Until ``number`` processes stand in line: only then does the next one come."""
    deadline = time.monotonic() + PATIENCE
    while _waiters(lock) < number:
        if time.monotonic() > deadline:
            raise CommandError(f"{number} processes were to wait for the lock; not all do.")
        time.sleep(0.01)
    # Whoever is registered opens its blocking pop next, and that is its place in the line.
    time.sleep(0.1)


def _waiters(lock: Lock) -> int:
    held = cache.held_locks().locks
    return next((each.waiters for each in held if each.key == lock.keys.lock), 0)


def _server_time(redis: Any) -> float:
    seconds, microseconds = redis.time()
    return seconds + microseconds / 1e6
