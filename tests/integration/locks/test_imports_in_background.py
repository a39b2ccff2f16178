"""What the threads of the package import: only while no other thread can fork. A process may fork
at any moment, and an import that another thread has begun does not end in the child."""

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
from django_redis_lock import Lock, Redlock, threads
from django_redis_lock.contrib import metrics
from django_redis_lock.keeper import keeper
from django_redis_lock.transport import server_of

found = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        thread = threading.current_thread().name
        if thread.startswith("django_redis_lock") and not threads._forking._is_owned():
            found.append((step, thread, name))

def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, step
        time.sleep(0.005)

cache = caches["default"]
client = cache.client.get_client()
sys.meta_path.insert(0, Finder())
step = "the first lock"
lock = cache.lock("report", timeout=60, renew=True, on_lost=lambda: 1 / 0)
lock.acquire()
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


FORKING = """
import os, signal, sys, threading
import django
django.setup()
from django.core.cache import caches

importing, forked = threading.Event(), threading.Event()

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "django_redis_lock.locking.records" and not importing.is_set():
            importing.set()
            forked.wait(0.5)  # It is never set, if the fork waits for the import.

sys.meta_path.insert(0, Finder())
lock = caches["default"].lock("report", timeout=0.3)
holder = threading.Thread(target=lock.acquire)
holder.start()
assert importing.wait(20)
child = os.fork()
if not child:
    signal.alarm(20)
    import django_redis_lock.locking.records
    os._exit(0)
forked.set()
holder.join()
assert os.waitpid(child, 0)[1] == 0, "the child hangs at the import"
"""


def run(program: str, server: RedisServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, str(server.pid)],
        check=False,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "REDIS_URL": server.url},
    )
    assert done.returncode == 0, done.stderr


def test_the_threads_of_the_package_import_only_while_nothing_forks(
    own_server: RedisServer,
) -> None:
    run(PROGRAM, own_server)


def test_a_child_forked_during_an_import_of_the_keeper_goes_on(own_server: RedisServer) -> None:
    run(FORKING, own_server)
