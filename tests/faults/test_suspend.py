"""A host that sleeps (a laptop, a paused virtual machine) while Redis and other hosts go on. After
it, CLOCK_BOOTTIME has counted the time and CLOCK_MONOTONIC has not, nor do waits pass.

The cases run in a process of their own, because the clock is chosen when the package is imported.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.lanes import some
from tests.redis_server import RedisServer

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="CLOCK_BOOTTIME is Linux's"),
    pytest.mark.invariant("S5", "P4"),
]

BEGIN = """
import asyncio, json, sys, threading, time, traceback

slept = 0.0
real, BOOTTIME = time.clock_gettime, time.CLOCK_BOOTTIME
time.clock_gettime = lambda clock: real(clock) + (slept if clock == BOOTTIME else 0.0)

def sleep_of_the_host(seconds):
    global slept
    slept += seconds

import django
from django.conf import settings
urls, cases = json.loads(sys.argv[1]), json.loads(sys.argv[2])
caches_of = {
    "default": {"BACKEND": "django_redis_lock.cache.RedisCache", "LOCATION": urls[0]},
    "local": {"BACKEND": "django_redis_lock.cache.LocMemCache", "LOCATION": "suspend"},
}
settings.configure(CACHES=caches_of, INSTALLED_APPS=["django_redis_lock"])
django.setup()

import redis, redis.asyncio
from django.core.cache import caches
from django_redis_lock import AsyncLock, AsyncRedlock, Lock, LockLost, LockNotAcquired, Redlock
from django_redis_lock import MultiLock, clock, keeper

# How soon a wait, and the keeper, notice that the host has slept.
clock.MAX_WAIT_SECONDS = keeper.LOOK_SECONDS = 0.2

client = redis.Redis.from_url(urls[0])
clients = [redis.Redis.from_url(url) for url in urls]
cache, local = caches["default"], caches["local"]

def within(seconds, condition):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "too late"
        time.sleep(0.02)

def is_lost_at_once(lock):
    assert lock.acquire()
    lock.ensure_held()
    sleep_of_the_host(31)
    assert lock.lost
    try:
        lock.ensure_held()
    except LockLost:
        return
    raise AssertionError("it counts as held")

def background(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results

def blocked():
    return client.info("clients")["blocked_clients"]

def ends(thread, is_waiting=blocked):
    within(15, is_waiting)
    assert thread.is_alive()
    sleep_of_the_host(61)
    thread.join(15)
    assert not thread.is_alive(), "it waits on"
"""

#: What is held is lost at once; what waits, ends; what can be renewed, is.
CASES = {
    "lock": "is_lost_at_once(Lock(client, 'n', 30))",
    "renewed lock": "is_lost_at_once(Lock(client, 'n', 30, renew=True))",
    "place": "is_lost_at_once(Lock(client, 'n', 30, limit=2))",
    "max_hold": "is_lost_at_once(Lock(client, 'n', 30, renew=True, max_hold=30.5))",
    "several names": "is_lost_at_once(MultiLock(client, ['a', 'b'], 30))",
    "lock of a cache": "is_lost_at_once(cache.lock('n', timeout=30))",
    "lock in memory": """
is_lost_at_once(local.lock('n', timeout=30))
assert local.lock('n').acquire(blocking=False)  # Its server slept as well.
""",
    "redlock": "is_lost_at_once(Redlock(clients, 'n', 30))",
    "async lock": """
async def main():
    lock = AsyncLock(redis.asyncio.Redis.from_url(urls[0]), 'n', 30)
    assert await lock.acquire()
    sleep_of_the_host(31)
    assert lock.lost
asyncio.run(main())
""",
    "async redlock": """
async def main():
    lock = AsyncRedlock([redis.asyncio.Redis.from_url(url) for url in urls], 'n', 30)
    assert await lock.acquire()
    sleep_of_the_host(31)
    assert lock.lost
asyncio.run(main())
""",
    "on_lost": """
told = threading.Event()
lock = Lock(client, 'n', 120, renew=True, on_lost=told.set)
lock.acquire()
time.sleep(0.3)  # The keeper has planned its next renewal.
sleep_of_the_host(121)
assert told.wait(15)
""",
    "renewal": """
lock = Lock(client, 'n', 120, renew=True)
lock.acquire()
time.sleep(0.3)
before = lock.local.hold.deadline
sleep_of_the_host(100)
within(15, lambda: lock.local.hold.deadline > before + 60)
lock.ensure_held()
lock.release()
""",
    "wait": """
Lock(client, 'n', 600).acquire()
thread, results = background(lambda: Lock(client, 'n', 30).acquire(blocking_timeout=60))
ends(thread)
assert results == [False]
""",
    "second wait": """
Lock(client, 'n', 600).acquire()
from django_redis_lock.locking.waiting import queues
first, _ = background(lambda: Lock(client, 'n', 30).acquire(blocking_timeout=60))
within(15, blocked)
second, results = background(lambda: Lock(client, 'n', 30).acquire(blocking_timeout=60))
ends(second, lambda: any(len(queue.waiters) == 2 for queue in list(queues.values())))
first.join(15)
assert results == [False]
""",
    "wait in memory": """
held = local.lock('n', timeout=600)
held.acquire()
thread, results = background(lambda: local.lock('n').acquire(blocking_timeout=60))
ends(thread, lambda: time.sleep(0.3) is None)
assert results == [False]
""",
    "wait of a task": """
Lock(client, 'n', 600).acquire()
async def main():
    lock = AsyncLock(redis.asyncio.Redis.from_url(urls[0]), 'n', 30)
    return await lock.acquire(blocking_timeout=60)
thread, results = background(lambda: asyncio.run(main()))
ends(thread)
assert results == [False]
""",
    "redlock's wait": """
Redlock(clients, 'n', 600).acquire()
thread, results = background(lambda: Redlock(clients, 'n', 30).acquire(blocking_timeout=60))
ends(thread)
assert results == [False]
""",
    "follower": """
stop = threading.Event()
leader, _ = background(lambda: cache.get_or_set('k', lambda: stop.wait(60)))
within(15, lambda: client.keys('*k:flight') or client.keys('*k}:flight'))
terms = {'wait': 60, 'on_wait_timeout': 'default'}
follower, results = background(lambda: cache.get_or_set('k', 'default', **terms))
ends(follower, lambda: time.sleep(0.3) is None)
stop.set()
leader.join(15)
assert results == ['default']
""",
}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RedisServer]]:
    with RedisServer() as first, RedisServer() as second, RedisServer() as third:
        yield [first, second, third]


@pytest.fixture
def urls(servers: list[RedisServer]) -> str:
    for server in servers:
        server.flush()
    return json.dumps([server.url for server in servers])


#: After all that is defined before it, each of the cases.
EACH = """
failed = []
for name, code in cases.items():
    for each in clients:
        each.flushall()
    try:
        exec(code, dict(globals()))
    except BaseException:
        failed.append(f"{name}:\\n{traceback.format_exc()}")
for message in failed:
    print(message, file=sys.stderr)
sys.exit(bool(failed))
"""


def run(names: list[str], urls: str, *before: str) -> None:
    cases = json.dumps({name: CASES[name] for name in names})
    command = [*before, sys.executable, "-c", BEGIN + EACH, urls, cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_after_it(urls: str) -> None:
    run(some(CASES, each=2), urls)


#: On a host that has slept for eleven days before; both clocks begin at different times there.
ELSEWHERE = ("unshare", "--user", "--map-root-user", "--time", "--boottime", "950400")


def test_no_time_is_taken_from_another_clock(urls: str) -> None:
    """Each difference of two times would be eleven days wrong."""
    allowed = shutil.which("unshare") and not os.system(" ".join([*ELSEWHERE, "true 2>/dev/null"]))
    if not allowed:
        pytest.skip("this host has no time namespaces")
    run(["renewal", "wait", "redlock", "follower", "wait of a task"], urls, *ELSEWHERE)
