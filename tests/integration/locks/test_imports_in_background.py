"""What the threads of the package import: nothing after a caller has its first lock. A process may
fork at any moment, and an import that another thread has begun does not end in the child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.processes import PATIENCE
from tests.redis_server import RedisServer

PROGRAM = """
import os, sys, threading, time
import django, redis
django.setup()
from django.core.cache import caches
from django_redis_lock import Lock, Redlock
from django_redis_lock.contrib import metrics
from django_redis_lock.keeper import keeper
from django_redis_lock.transport import server_of

found = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if (thread := threading.current_thread().name).startswith("django_redis_lock"):
            found.append((step, thread, name))

def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, step
        time.sleep(0.005)

cache = caches["default"]
client = cache.client.get_client()
step = "the first lock"
lock = cache.lock("report", timeout=60, renew=True, on_lost=lambda: 1 / 0)
lock.acquire()
sys.meta_path.insert(0, Finder())

step = "a description of its holder"
until(lambda: any(type(job).__name__ == "Heartbeat" for job in keeper().jobs()))
step = "a loss, and an on_lost that fails"
cache.lock("report").reset()
until(lambda: lock.lost)
step = "a warning"
with cache.lock("report", timeout=60, warn_after=0.01, label="nightly"):
    time.sleep(0.1)
step = "a wait for one that has crashed"
client.set(cache.lock("report").keys.lock, "a token", px=300)
assert cache.lock("report", timeout=1).acquire(blocking_timeout=10)
step = "a limit"
with cache.lock("seats", timeout=60, limit=2), cache.lock("seats", timeout=60, limit=2):
    keeper().hurry()
    time.sleep(0.3)
step = "a computation in the background"
cache.get_or_set("value", str, 0.01, stale=60, background=True)
time.sleep(0.02)
cache.get_or_set("value", lambda: time.sleep(0.1) or "new", 60, stale=60, background=True)
until(lambda: cache.get("value") == "new")
step = "figures"
metrics.flush()
step = "Redlock"
clients = [redis.Redis.from_url(cache.client._server[0][:-1] + str(n)) for n in range(3)]
with Redlock(clients, "several", timeout=60, renew=True):
    keeper().hurry()
    time.sleep(0.3)
step = "a refusal"
lock = cache.lock("report", timeout=0.5, renew=True)
lock.acquire()
client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
until(lambda: lock.lost)
client.execute_command("ACL", "SETUSER", "default", "+evalsha", "+eval")
step = "an outage"
lock = cache.lock("other", timeout=0.5, renew=True)
lock.acquire()
os.kill(int(sys.argv[1]), 9)
until(lambda: lock.lost)
assert not found, found
"""


def test_nothing_is_imported_by_a_thread_of_the_package(own_server: RedisServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(own_server.pid)],
        check=False,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "REDIS_URL": own_server.url},
    )
    assert done.returncode == 0, done.stderr
