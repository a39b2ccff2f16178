"""A lock with several names while processes die or freeze. Lost replies and a Redis that goes away
are the fault table's."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import redis

from django_redis_lock import Lock, MultiLock
from tests import lanes
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer
from tests.support.background import Background
from tests.support.values import blocked

pytestmark = pytest.mark.usefixtures("watched_often")

NAMES = ["a", "b", "c", "d", "e"]


#: A frozen waiter keeps others from the lock for as long.
BRIEF = {"grant_timeout": 0.5}


def wait(link: Link, url: str) -> None:
    with redis.Redis.from_url(url) as client, several(client, "a", "b", **BRIEF) as lock:
        link.say(lock.fences)


def several(client: Any, *names: str, **options: Any) -> MultiLock:
    return MultiLock(client, names, lock_class=Lock, **{"timeout": 60, **options})


def hold(link: Link, url: str, names: list[str], options: dict[str, Any]) -> None:
    with redis.Redis.from_url(url) as client:
        several(client, *names, **options).acquire()
        link.say("holds")
        link.hear()


class TestKilled:
    def test_a_waiter_that_holds_a_part(
        self, client: redis.Redis, redis_server: RedisServer
    ) -> None:
        """That part is free when its lifetime is over."""
        first, second = (Lock(client, name, timeout=60) for name in "ab")
        first.acquire()
        second.acquire()
        with processes(hold, redis_server.url, ["a", "b"], {"timeout": 60}) as (waiter,):
            waiter.go()
            until(lambda: blocked(client))
            first.release()
            until(lambda: client.zcard("{b}:waiters"))
            waiter.kill()
        second.release()
        client.pexpire("a", 300)
        assert several(client, "a", "b").acquire(blocking_timeout=PATIENCE)


def test_a_grant_that_is_given_back_is_the_next_waiters(
    client: redis.Redis, redis_server: RedisServer
) -> None:
    """At once: one that is lost ends after a minute."""
    options = {"timeout": 60, "grant_timeout": 60}
    first, second = (Lock(client, name, **options) for name in "ab")
    second.acquire()
    waiter = Background(several(client, "a", "b", **options).acquire)
    until(lambda: blocked(client) == 1)
    with processes(hold, redis_server.url, ["b", "c"], options) as (other,):
        other.go()
        until(lambda: blocked(client) == 2)
        first.acquire()
        second.release()
        assert other.hear() == "holds"
        first.release()
        until(lambda: client.zcard("{b}:waiters"))
        second.reset()
        assert waiter.result()


class TestFrozen:
    def test_a_waiter(self, client: redis.Redis, redis_server: RedisServer) -> None:
        """Its grant ends, another has the names, and it waits again."""
        first = several(client, "a", "b", **BRIEF)
        first.acquire()
        with processes(wait, redis_server.url) as (frozen,):
            frozen.go()
            until(lambda: blocked(client) == 1)
            second = several(client, "b", "a", thread_local=False, **BRIEF)
            waiter = Background(second.acquire)
            until(lambda: blocked(client) == 2)
            frozen.pause()
            first.release()
            assert waiter.result()
            fences = second.fences
            frozen.resume()
            until(lambda: blocked(client))
            assert not frozen.speaks()
            second.release()
            later = frozen.hear()
            assert all(later[name] > fences[name] for name in "ab")
            assert frozen.result() is None


def work(link: Link, url: str, number: int) -> int:
    """Change random accounts, each by reading and then writing, until told to stop."""
    chance, times = random.Random(number or os.getpid()), 0
    with redis.Redis.from_url(url) as client:
        while not client.exists("stop"):
            names = chance.sample(NAMES, chance.randint(1, 3))
            with several(client, *names, timeout=5, blocking_timeout=PATIENCE) as lock:
                log = [f"{name} {lock.fences[name]} {os.getpid()}" for name in names]
                client.rpush("log", *(f"enter {line}" for line in log))
                time.sleep(chance.random() * 0.002)
                client.rpush("log", *(f"leave {line}" for line in log))
            times += 1
    return times


def test_no_name_has_two_holders(client: redis.Redis, redis_server: RedisServer) -> None:
    """Processes want some of five names at random, and some of them are killed."""
    killed = set()
    many, victims, lines = (8, 3, 40) if lanes.everything else (6, 2, 20)
    with processes(work, redis_server.url, 0, count=many) as crew:
        crew.go()
        for victim in crew[:victims]:
            done = client.llen("log")
            until(lambda done=done: client.llen("log") > done + lines)
            victim.kill()
            killed.add(victim.pid)
        done = client.llen("log")
        until(lambda: client.llen("log") > done + 5 * lines)
        client.set("stop", 1)
        assert all(worker.result() > 0 for worker in crew if worker.pid not in killed)
    inside: dict[bytes, tuple[bytes, int]] = {}
    fences: dict[bytes, int] = {}
    for line in client.lrange("log", 0, -1):
        verb, name, fence, pid = line.split()
        if verb == b"enter":
            assert name not in inside or inside[name][1] in killed
            assert int(fence) > fences.get(name, 0)
            inside[name], fences[name] = (fence, int(pid)), int(fence)
        else:
            assert inside.pop(name)[0] == fence
