"""Greenlets instead of threads: a process whose standard library gevent has patched."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import PATIENCE, WHOLE_END
from tests.redis_server import RedisServer

pytestmark = pytest.mark.skipif(
    find_spec("gevent") is None, reason="gevent has no wheel for this Python"
)

#: The process: it runs one program after the other, and tells what each has printed.
PATCHED = """
from gevent import monkey
monkey.patch_all()
import contextlib, io, json, sys, threading, time, traceback
import gevent, redis
from django_redis_lock import Lock
from django_redis_lock.keeper import keeper
url, requests, replies = sys.argv[1], sys.stdin, sys.stdout
for line in requests:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), redis.Redis.from_url(url) as client:
        try:
            exec(json.loads(line), {**globals()})
        except BaseException:
            said.write(traceback.format_exc())
    print(json.dumps(said.getvalue()), file=replies, flush=True)
"""


@pytest.fixture(scope="module")
def process(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    errors = tmp_path_factory.mktemp("gevent") / "errors"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", PATCHED, redis_server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=Path(__file__).parents[3],
            env={**os.environ, **WHOLE_END, "PYTHONWARNINGS": "ignore"},
        ) as process,
    ):
        try:
            yield process
            process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 0, errors.read_text()
    assert "Traceback" not in errors.read_text(), errors.read_text()


def run(process: subprocess.Popen[str], program: str) -> str:
    """What the program prints."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(program), file=process.stdin, flush=True)
    assert select.select([process.stdout], [], [], PATIENCE)[0], "it hangs"
    said: str = json.loads(process.stdout.readline())
    return said


def test_fifty_greenlets_wait_for_one_lock(process: subprocess.Popen[str]) -> None:
    said = run(
        process,
        """
from django_redis_lock.locking.waiting import queues
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


def test_the_keeper_renews_and_reports_a_loss_and_a_forced_release(
    process: subprocess.Popen[str],
) -> None:
    said = run(
        process,
        """
lost = threading.Event()
lock = Lock(client, "green", timeout=60, renew=True, on_lost=lost.set)
with lock:
    client.pexpire("green", 30_000)
    keeper().hurry()
    while client.pttl("green") < 40_000:
        gevent.sleep(0.01)
    lock.ensure_held()
for end in (lambda: client.delete("green"), Lock(client, "green").reset):
    lost.clear()
    lock.acquire()
    while not client.pubsub_channels("django_redis_lock:process:*"):
        gevent.sleep(0.01)
    end()
    print(lost.wait(10), lock.lost)
""",
    )
    assert said == "True True\nTrue True\n"


def test_a_wait_ends_at_its_deadline_and_leaves_nothing(process: subprocess.Popen[str]) -> None:
    said = run(
        process,
        """
from django_redis_lock.protocol import acquisition
acquisition.LAST_TRY_SECONDS = 5.0  # A server that stands still just then is not down.
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


def test_a_killed_greenlet_lets_go(process: subprocess.Popen[str]) -> None:
    said = run(
        process,
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
