"""Nothing that belongs to users runs in the keeper's thread: a log handler that blocks loses no
lock."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

import django_redis_lock
from django_redis_lock import Lock, events, threads
from django_redis_lock.ops.inventory.listing import inspect
from django_redis_lock.threads import ThreadPool
from tests.holding import hurry, renew
from tests.processes import PATIENCE, WHOLE_END, until

FOLDER = Path(django_redis_lock.__file__).parent


class Blocking(logging.Handler):
    """A handler, and a listener, that hangs until it is released; notes in which threads."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.threads: list[str] = []

    def emit(self, record: Any) -> None:
        self.threads.append(threading.current_thread().name)
        assert self.released.wait(PATIENCE)

    def __call__(self, event: Any) -> None:
        if isinstance(event, events.Lost):
            self.emit(event)


@contextmanager
def handling(blocking: Blocking) -> Iterator[None]:
    logging.getLogger("django_redis_lock").addHandler(blocking)
    try:
        yield
    finally:
        blocking.released.set()
        logging.getLogger("django_redis_lock").removeHandler(blocking)


@contextmanager
def listening(blocking: Blocking) -> Iterator[None]:
    events.subscribe(blocking)
    try:
        yield
    finally:
        blocking.released.set()
        events.unsubscribe(blocking)


@pytest.mark.parametrize("attached", [handling, listening])
def test_one_that_blocks_costs_no_lock_its_renewal(client: redis.Redis, attached: Any) -> None:
    blocking = Blocking()
    kept, lost = Lock(client, "kept", 60, renew=True), Lock(client, "lost", 60, renew=True)
    with attached(blocking), kept:
        assert lost.acquire()
        client.delete("lost")
        hurry()
        until(lambda: blocking.threads)
        for _ in range(3):
            renew(client, "kept")
        assert not kept.lost
        blocking.released.set()
    assert "django_redis_lock keeper" not in blocking.threads
    assert lost.lost


PROGRAM = """
import logging, sys, threading, redis
from django_redis_lock import Lock, keeper
logging.disable()
from django_redis_lock import events
keeper.FLUSH_SECONDS = float(sys.argv[3])
begun = threading.Event()
def listener(event):
    if isinstance(event, events.Lost):
        begun.set()
        threading.Event().wait(float(sys.argv[2]))
        print("Lost", event.subject.name, flush=True)
events.subscribe(listener)
client = redis.Redis.from_url(sys.argv[1])
lock = Lock(client, "a", 60, renew=True)
lock.acquire()
client.delete("a")
keeper.keeper().hurry()
assert begun.wait(30)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(("takes", "within", "said"), [(0.2, PATIENCE, "Lost a\n"), (600, 1.0, "")])
def test_the_last_notices_are_delivered_before_the_process_ends(
    client: redis.Redis, takes: float, within: float, said: str
) -> None:
    settings = client.connection_pool.connection_kwargs
    url = f"redis://{settings['host']}:{settings['port']}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, str(takes), str(within)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=FOLDER.parent,
        env={**os.environ, **WHOLE_END},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def in_a_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked process."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as answer:
        return json.loads(answer.read())


def test_a_child_delivers_its_own_and_not_its_parents() -> None:
    blocking, delivered = Blocking(), []
    for number in range(2):
        threads.run_later(lambda number=number: (blocking.emit(None), delivered.append(number)))
    until(lambda: blocking.threads)

    def child() -> list[int]:
        threads.run_later(lambda: delivered.append(7))
        threads.flush(PATIENCE)
        return delivered

    assert in_a_child(child) == [7]
    blocking.released.set()
    until(lambda: delivered == [0, 1])


def test_too_many_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "_notices", ThreadPool("test", 1, 2, idle_seconds=1))
    blocking, delivered = Blocking(), []

    def first() -> None:
        blocking.emit(None)
        raise SystemExit  # It ends nothing.

    threads.run_later(first)
    until(lambda: blocking.threads)
    for number in range(5):
        threads.run_later(lambda number=number: delivered.append(number))
    blocking.released.set()
    threads.flush(PATIENCE)
    assert delivered == [0, 1]
    assert "3 notices were dropped" in caplog.text


# -- texts that are no text ----------------------------------------------------------------------

NO_TEXT = os.fsdecode(b"import \xff.csv")


def test_a_label_that_cannot_be_encoded(client: redis.Redis) -> None:
    """Of a file name, as ``os.listdir`` gives it."""
    lock = Lock(client, "a", 60, renew=True, label=NO_TEXT)
    with lock:
        for _ in range(3):
            renew(client, "a")
        assert not lock.lost
        owner = lock.holder()
        assert owner is not None
        assert owner.label == "import \\udcff.csv"
    until(lambda: inspect(client, b"a").events)
    assert inspect(client, b"a").events[0].owner.label == "import \\udcff.csv"
