"""Under uWSGI: its workers are forked without Python's hooks from a process that may have used
locks, as a project that fills its cache when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATIENCE
from tests.redis_server import RedisServer

PROGRAM = """
import ctypes, os, sys, threading, time, types

sys.modules["uwsgi"] = types.ModuleType("uwsgi")  # uWSGI makes it, before it runs the project.

import redis
from django_redis_lock import Lock
from django_redis_lock.keeper import keeper
from django_redis_lock.transport import server_of

client = redis.Redis.from_url(sys.argv[1])
parents = Lock(client, "parent's", timeout=30, renew=True)
parents.acquire()
connection = server_of(client).checkout()
server_of(client).checkin(connection)

def switches():
    tasks = [f"/proc/self/task/{t.native_id}/status" for t in threading.enumerate()[1:]]
    try:
        return {task: [line for line in open(task) if "ctxt" in line] for task in tasks}
    except FileNotFoundError:  # One that has not begun, or has ended.
        return time.monotonic()

before = None
while before is None or switches() != before:  # A thread that begins, or wants the global lock,
    before = switches()  # holds mutexes of Python's, which nobody would release in the child.
    time.sleep(0.1)
child = ctypes.PyDLL(None).fork()  # With the global lock held, as uWSGI does it.
if not child:
    status = 1
    try:
        lock = Lock(client, "child's", timeout=30, renew=True, thread_local=False)
        begun = threading.Barrier(8)
        found = []

        def enter():  # The first requests of a worker with threads come at the same time.
            begun.wait()
            found.append(Lock(client, f"{threading.get_ident()}", timeout=30).acquire())

        threads = [threading.Thread(target=enter) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 8, found
        assert lock.acquire()
        assert f" {os.getpid()} ".encode() in lock.local.token, lock.local.token
        assert server_of(client).checkout() is not connection
        first, patience = lock.local.hold.deadline, time.monotonic() + 20
        while lock.local.hold.deadline == first:  # The keeper renews it.
            assert time.monotonic() < patience, "not renewed"
            keeper().hurry()
            time.sleep(0.01)
        lock.release()
        status = 0
    finally:
        sys.stderr.flush()
        if status:
            import traceback
            traceback.print_exc()
        os._exit(status)
assert os.waitpid(child, 0)[1] == 0
parents.release()
"""


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="a fork without Python's hooks leaves it threads to wait for that are not there",
)
def test_a_worker_has_its_own_connections_and_keeper(redis_server: RedisServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, redis_server.url],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
