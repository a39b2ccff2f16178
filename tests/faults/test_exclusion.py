"""Many processes change one number, each by reading and then writing it, while some of them are
killed: no change is lost."""

from __future__ import annotations

import os
import random
import time

import pytest
import redis

from django_redis_lock import Lock
from tests import lanes
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer


def count(link: Link, url: str) -> int:
    """Count up until told to stop; the number of times."""
    with redis.Redis.from_url(url) as client:
        times = 0
        while not client.exists("stop"):
            with Lock(client, "counter", timeout=5, blocking_timeout=PATIENCE) as lock:
                assert lock.fence is not None
                count_up(client, lock.fence)
            times += 1
        return times


def count_up(client: redis.Redis, fence: int) -> None:
    client.rpush("log", f"enter {fence} {os.getpid()}")
    number = int(client.get("number") or 0) + 1
    time.sleep(random.random() * 0.002)
    client.set("number", number)
    client.rpush("log", f"leave {fence} {number}")


def completed(client: redis.Redis) -> list[tuple[int, int]]:
    """Fence and number of each change that was made to its end, in the order of the fences."""
    lines = [line.decode().split() for line in client.lrange("log", 0, -1)]
    return sorted((int(fence), int(value)) for verb, fence, value in lines if verb == "leave")


@pytest.mark.invariant("S1")
def test_nothing_is_lost(client: redis.Redis, redis_server: RedisServer) -> None:
    killed: set[int] = set()
    many, victims, sections = (16, 6, 30) if lanes.everything else (6, 2, 15)
    with processes(count, redis_server.url, count=many) as crew:
        crew.go()
        for victim in random.sample(crew, victims):
            done = client.llen("log")
            until(lambda done=done: client.llen("log") > done + 2 * sections)
            victim.kill()
            killed.add(victim.pid)
        done = client.llen("log")
        until(lambda: client.llen("log") > done + 6 * sections)
        client.set("stop", 1)
        survivors = [worker.result() for worker in crew if worker.pid not in killed]

    changes = completed(client)
    numbers = [number for _, number in changes]
    # A change whose process was killed just before it could say so makes a number be missing.
    assert numbers == sorted(set(numbers))
    assert len(changes) <= int(client.get("number")) <= len(changes) + len(killed)
    assert len(changes) >= sum(survivors)
    assert min(survivors) > 0

    # And nobody has ever been inside beside another.
    inside = None
    for line in client.lrange("log", 0, -1):
        verb, fence, value = line.decode().split()
        if verb == "enter":
            assert inside is None or int(inside) in killed
            inside = value
            last = fence
        else:
            assert fence == last
            inside = None
