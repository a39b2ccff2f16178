"""A process ends while its daemon threads are at work: at once, and without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import STARTING, WHOLE_END
from tests.redis_server import RedisServer

PROGRAM = """
import sys, time
import django
django.setup()
from django_redis_lock.cache import RedisCache
cache = RedisCache(sys.argv[1], {})
cache.set("report", "old", 10)
def refresh():
    time.sleep(float(sys.argv[2]))
    return "new"
print(cache.get_or_set("report", refresh, 1, stale=100, background=True))
time.sleep(0.02)
"""


@pytest.mark.sample(3, 2)
@pytest.mark.parametrize("takes", [0.0, 0.02, 600])
def test_the_refresh_is_finished_or_abandoned(redis_server: RedisServer, takes: float) -> None:
    assert ended(PROGRAM, redis_server.url, str(takes)) == (0, "old\n", "")


#: What daemon threads do over and over, each kind in two of them. As the process ends, all stand
#: still, with the mutex that they have.
AT_WORK = """
import asyncio, sys, threading, time
import django
django.setup()
from django_redis_lock.cache import LocMemCache
from django_redis_lock.keeper import keeper
from django_redis_lock.transport import server_of
cache = LocMemCache("tests", {"KEY_FUNCTION": lambda key, prefix, version: f"{version}:{key}"})
def connects():
    server = server_of(cache._lock_client())
    while True:
        yield server.connect().disconnect()
def names(name):
    async def alock():
        return cache.alock(name)
    while True:
        yield asyncio.run(alock())
def holds():
    with cache.lock(threading.current_thread().name):
        yield
        threading.Event().wait()
def keeps():  # As one that was about to give the keeper a job.
    while True:
        with keeper().mutex:
            yield time.sleep(0.05)
        time.sleep(0.001)
KINDS = {
    "connects": [connects], "names a lock": [lambda: names("a")],
    "names locks": [lambda: names(["a", "b"])], "holds": [holds, keeps],
}
def work(kind, begun):
    for _ in kind():
        begun.set()
wanted = KINDS if sys.argv[1] == "each" else sys.argv[1:]
for kind in 2 * [kind for name in wanted for kind in KINDS[name]]:
    begun = threading.Event()
    threading.Thread(target=work, args=(kind, begun), daemon=True).start()
    assert begun.wait(60)
print("ends")
"""


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ["each", "connects", "names a lock", "names locks", "holds"])
def test_threads_that_are_at_work_keep_no_process_from_ending(kind: str) -> None:
    assert ended(AT_WORK, kind) == (0, "ends\n", "")


def ended(program: str, *args: str) -> tuple[int, str, str]:
    """The exit code of a process with this ``program``, and what it has written."""
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=STARTING,
        cwd=Path(__file__).parents[3],
        env={**os.environ, **WHOLE_END},
    )
    return done.returncode, done.stdout, done.stderr
