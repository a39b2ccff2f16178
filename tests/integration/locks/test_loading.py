"""When modules are imported: what each site can reach at its start, an optional subject at its
first use. A process may fork at any moment, and an import that another thread has begun does not
end in the child."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import django_redis_lock
from django_redis_lock.extension import PARTS
from tests.processes import PATIENCE
from tests.redis_server import RedisServer
from tests.redis_topologies import ClusterServers, SentinelServers
from tests.support.sources import nodes, tree

FOLDER = Path(django_redis_lock.__file__).parent

PROGRAM = """
import os, sys, threading, time
import django, redis
django.setup()
from django.core.cache import caches
from django_redis_lock import Redlock
from django_redis_lock.contrib import metrics
from django_redis_lock.keeper import keeper
from django_redis_lock.transport import server_of

found = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        thread = threading.current_thread().name
        if thread.startswith("django_redis_lock"):
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


#: Nothing is imported from ``setup`` on, with what can happen to a site on its ordinary day.
ORDINARY_DAY = """
import os, sys, threading, time
import django
django.setup()
from django.core.cache import caches
from django_redis_lock.exceptions import LockError

loaded = set(sys.modules)
cache = caches["default"]
assert cache.get("x") is None
cache.set("x", 1)
assert cache.get_many(["x"]) == {"x": 1} and cache.incr("x") == 2 and cache.touch("x")
assert cache.get_or_set("value", lambda: 1, 60) == 1
assert cache.get_or_set("stale", lambda: 1, 60, stale=60) == 1
with cache.lock("report", timeout=60, renew=True) as lock:
    assert lock.owned() and lock.ttl() and lock.holder()
    waiter = threading.Thread(target=cache.lock("report", timeout=60).acquire)
    waiter.start()
    time.sleep(0.7)
waiter.join()
lock = cache.lock("lost", timeout=60)
lock.acquire()
cache.client.get_client().delete(lock.keys.lock)
try:
    lock.release()
except LockError:
    pass
cache.client.get_client().execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no")
cache.get("x")
os.kill(int(sys.argv[1]), 9)
try:
    lock.acquire(blocking=False)
except Exception:
    pass
assert cache.get_or_set("other", lambda: 1, 60) == 1
assert not sys.modules.keys() - loaded, sys.modules.keys() - loaded
"""

#: The same on a cluster, and behind sentinels.
SEVERAL_SERVERS = """
import json, sys
import django
from django.conf import settings
settings.CACHES = json.loads(sys.argv[2])
django.setup()
from django.core.cache import caches

loaded = set(sys.modules)
cache = caches["default"]
cache.set("x", 1)
assert cache.get("x") == 1 and cache.get_or_set("value", lambda: 1, 60) == 1
with cache.lock("report", timeout=60, renew=True) as lock:
    assert lock.owned() and lock.holder()
assert not sys.modules.keys() - loaded, sys.modules.keys() - loaded
"""

#: Forks while another thread is in the midst of the import of each subject; the child then uses it.
FORKING = """
import os, signal, sys, threading
import django
django.setup()
from importlib import import_module

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module and not importing.is_set():
            importing.set()
            forked.wait(0.2)  # It is never set, if the fork waits for the import.

sys.meta_path.insert(0, Finder())
tried = []
for subject in sys.argv[2:]:
    face, name, module = subject.split(":")
    module = f"django_redis_lock.{module}"
    if module in sys.modules:
        continue
    importing, forked = threading.Event(), threading.Event()

    def use():
        if face == "part":
            import_module("django_redis_lock.extension").part(name)
        else:
            getattr(import_module(f"django_redis_lock.{face}".rstrip(".")), name)

    user = threading.Thread(target=use)
    user.start()
    assert importing.wait(20), subject
    child = os.fork()
    if not child:
        signal.alarm(20)
        use()
        os._exit(0)
    forked.set()
    user.join()
    assert os.waitpid(child, 0)[1] == 0, f"the child hangs at the import of {subject}"
    tried.append(module)
print(*tried)
"""


def deferred() -> list[str]:
    """Whose it is (``part``, or the package that offers it), its name, and the module."""
    found = [f"part:{name}:{module}" for name, (module, _) in PARTS.items()]
    for path in sorted(FOLDER.rglob("*.py")):
        for call in (each for each in nodes(tree(path)) if isinstance(each, ast.Call)):
            if ast.unparse(call.func) == "on_first_use" and isinstance(call.args[1], ast.Dict):
                parts = path.relative_to(FOLDER).with_suffix("").parts
                face = ".".join(part for part in parts if part != "__init__")
                for key, names in zip(call.args[1].keys, call.args[1].values, strict=True):
                    whole = __import__(f"django_redis_lock.{face}".rstrip("."), fromlist=["_"])
                    named = isinstance(names, ast.Constant)
                    name = ast.literal_eval(names).split()[0] if named else whole.__all__[0]
                    found.append(f"{face}:{name}:{ast.literal_eval(key)}")
    return found


def run(program: str, server: RedisServer, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, str(server.pid), *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        cwd=FOLDER.parent,
        env={**os.environ, "REDIS_URL": server.url},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_threads_of_the_package_import_nothing(own_server: RedisServer) -> None:
    run(PROGRAM, own_server)


def test_what_each_site_can_reach_is_there_after_setup(own_server: RedisServer) -> None:
    run(ORDINARY_DAY, own_server)


def run_with(location: str, options: dict[str, object], server: RedisServer) -> None:
    backend = "django_redis_lock.cache.RedisCache"
    config = {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}
    run(SEVERAL_SERVERS, server, json.dumps({"default": config}))


def test_behind_sentinels_it_is_there_after_setup(sentinel_servers: SentinelServers) -> None:
    options = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": sentinel_servers.addresses,
    }
    location = f"redis://{sentinel_servers.name}/0"
    run_with(location, options, sentinel_servers.nodes[0])


def test_on_a_cluster_it_is_there_after_setup(cluster_servers: ClusterServers) -> None:
    options = {"CLIENT_CLASS": "django_redis_lock.clients.ClusterClient"}
    run_with(cluster_servers.nodes[0].url, options, cluster_servers.nodes[0])


def test_a_child_forked_during_the_import_of_a_subject_can_use_it(own_server: RedisServer) -> None:
    tried = run(FORKING, own_server, *deferred()).split()
    assert len(tried) > 15
