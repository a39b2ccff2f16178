"""Greenlets instead of threads: a process whose standard library gevent has patched."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import PATIENCE, WHOLE_END
from tests.redis_server import RedisServer

pytestmark = pytest.mark.skipif(
    find_spec("gevent") is None, reason="gevent has no wheel for this Python"
)

#: What each program begins with.
PATCHED = """
from gevent import monkey
monkey.patch_all()
import sys, threading, time
import gevent, redis
from django_redis_lock import Lock
from django_redis_lock.keeper import keeper
client = redis.Redis.from_url(sys.argv[1])
"""


def run(server: RedisServer, program: str) -> str:
    """What the program prints."""
    done = subprocess.run(
        [sys.executable, "-c", PATCHED + program, server.url],
        check=False,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, **WHOLE_END, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_fifty_greenlets_wait_for_one_lock(redis_server: RedisServer) -> None:
    said = run(
        redis_server,
        """
from django_redis_lock.locking.waiting.queue import queues
holder, order = Lock(client, "green", timeout=30), []
holder.acquire()
lock = Lock(client, "green", timeout=30)
def work(number):
    with lock:
        order.append(number)
        gevent.sleep(0.001)
waiters = [gevent.spawn(work, 0)]
while not client.info("clients")["blocked_clients"]:
    gevent.sleep(0.01)
waiters += [gevent.spawn(work, number) for number in range(1, 50)]
while sum(len(queue.waiters) for queue in queues.values()) < 50:
    gevent.sleep(0.01)
holder.release()
gevent.joinall(waiters, raise_error=True)
assert not client.exists("green")
print(order == list(range(50)))
""",
    )
    assert said == "True\n"


def test_the_keeper_renews_and_reports_a_loss(redis_server: RedisServer) -> None:
    said = run(
        redis_server,
        """
lost = threading.Event()
lock = Lock(client, "green", timeout=60, renew=True, on_lost=lost.set)
with lock:
    client.pexpire("green", 30_000)
    keeper().hurry()
    while client.pttl("green") < 40_000:
        gevent.sleep(0.01)
    lock.ensure_held()
lock.acquire()
client.delete("green")
print(lost.wait(20), lock.lost)
""",
    )
    assert said == "True True\n"


def test_a_forced_release_is_reported_at_once(redis_server: RedisServer) -> None:
    said = run(
        redis_server,
        """
lost = threading.Event()
lock = Lock(client, "green", timeout=60, renew=True, on_lost=lost.set)
lock.acquire()
while not client.pubsub_channels("django_redis_lock:process:*"):
    gevent.sleep(0.01)
Lock(client, "green").reset()
print(lost.wait(10), lock.lost)
""",
    )
    assert said == "True True\n"


def test_a_wait_ends_at_its_deadline_and_leaves_nothing(redis_server: RedisServer) -> None:
    said = run(
        redis_server,
        """
client.set("green", "another's")
lock = Lock(client, "green", timeout=30)
tries = [gevent.spawn(lock.acquire, blocking_timeout=0.2) for _ in range(5)]
gevent.joinall(tries, raise_error=True)
print([each.value for each in tries])
while client.exists("{green}:waiters"):
    gevent.sleep(0.01)
client.delete("green")
print(lock.acquire(blocking=False))
lock.release()
""",
    )
    assert said == f"{[False] * 5}\nTrue\n"


def test_a_killed_greenlet_lets_go(redis_server: RedisServer) -> None:
    said = run(
        redis_server,
        """
holder = Lock(client, "green", timeout=60, grant_timeout=60)
holder.acquire()
lock = Lock(client, "green", timeout=60, grant_timeout=60)
waiter = gevent.spawn(lock.acquire)
while not client.info("clients")["blocked_clients"]:
    gevent.sleep(0.01)
waiter.kill()
while client.exists("{green}:waiters") or client.info("clients")["blocked_clients"]:
    gevent.sleep(0.01)
holder.release()
print(client.exists("green"))
""",
    )
    assert said == "0\n"
