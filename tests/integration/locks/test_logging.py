"""The log: what is warned of, what is said only if somebody wants to read it; and that
a handler of the log or an event that blocks loses no lock: it never runs in the keeper's thread."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches

import django_redis_lock
from django_redis_lock import Lock, LockNotOwnedError, events, locked, threads
from django_redis_lock.cache import RedisCache
from django_redis_lock.locking.hold import held_logger
from django_redis_lock.ops.inventory.listing import inspect
from django_redis_lock.protocol.identity import hostname
from django_redis_lock.protocol.keys import process_key
from django_redis_lock.threads import ThreadPool
from tests.holding import crash, hurry, renew, silence
from tests.moved_clock import moved_clock
from tests.processes import PATIENCE, WHOLE_END, until
from tests.redis_server import RedisServer
from tests.support.backends import places
from tests.support.background import Background
from tests.support.logs import logged


@pytest.fixture
def cache() -> RedisCache:
    found: Any = caches["default"]
    return found


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Any:
    """The warnings of locks that are held long."""
    return lambda: [r.getMessage() for r in caplog.records if r.name == held_logger.name]


def test_a_lock_held_for_most_of_its_lifetime(client: redis.Redis, warned: Any) -> None:
    with moved_clock() as pass_time:
        lock = Lock(client, "bare", timeout=100, label="nightly")
        lock.acquire()
        pass_time(70)
        assert not warned()
        pass_time(10.1)
        until(warned)
        lock.release()
    [said] = warned()
    found = re.fullmatch(
        r"The lock bare has been held for ([0-9.]+) s "
        r"\(fence [0-9]+, thread MainThread, nightly\)",
        said,
    )
    assert found
    assert 80 <= float(found[1]) <= 100


@pytest.mark.parametrize(
    ("silent", "beats", "told"),
    [(0, False, ""), (200, True, ""), (200, False, ", silent for 2.. s")],
    ids=["described", "alive", "silent"],
)
def test_a_long_wait_says_for_whom(
    client: redis.Redis, caplog: Any, silent: float, beats: bool, told: str
) -> None:
    holder = Lock(client, "bare", timeout=600, label="nightly")
    holder.acquire()
    hurry()
    until(lambda: client.hget(holder.keys.owner, "label"))
    silence(client, holder.keys.lock, silent)
    crash(holder)
    if beats:
        client.set(process_key("another"), int(time.time() * 1e6))
    with moved_clock() as pass_time:
        waiter = Background(Lock(client, "bare", timeout=60).acquire)
        until(lambda: places("bare"))
        for number, seconds in enumerate((31, 30), start=1):
            pass_time(seconds)
            until(lambda number=number: len(logged(caplog, "waiting")) == number)
        holder.release()
        assert waiter.result()
    for said, seconds in zip(logged(caplog, "waiting"), (3, 6), strict=True):
        whom = rf"{hostname()}:{os.getpid()}{told} \(MainThread; nightly\)"
        assert re.fullmatch(rf"A caller waits for bare since {seconds}. s; held by {whom}", said)


@pytest.mark.parametrize(
    ("options", "settings_", "expected"),
    [
        ({"timeout": 10}, {}, 8),
        ({"timeout": 10}, {"WARN_SHARE": 0.5}, 5),
        ({"timeout": 10}, {"WARN_SHARE": 0}, None),
        ({"timeout": 10, "warn_after": 2}, {"WARN_SHARE": 0.5}, 2),
        ({"timeout": 10, "renew": True, "max_hold": 100}, {}, 80),
        ({}, {}, None),
        ({}, {"WARN_AFTER": 600}, 600),
        ({"timeout": None}, {"WARN_AFTER": 600}, 600),
        ({"warn_after": 7}, {"WARN_AFTER": 600}, 7),
    ],
)
def test_after_how_long_it_is_said(
    cache: RedisCache, settings: Any, options: Any, settings_: Any, expected: float | None
) -> None:
    settings.DJANGO_REDIS_LOCK = settings_
    lock = cache.lock("import", **options)
    with lock:
        hold = lock.local.hold
        found = hold.warns_at - hold.began
    assert found == pytest.approx(float("inf") if expected is None else expected)


def test_what_is_said_cannot_break_out_of_its_line(cache: RedisCache, warned: Any) -> None:
    with cache.lock("a\nFORGED", label="b\nFORGED", warn_after=0.05, timeout=30):
        until(warned)
    [said] = warned()
    assert "\n" not in said
    assert "a\\nFORGED" in said
    assert "b\\nFORGED" in said


def test_records_have_fields_for_structured_logs(
    cache: RedisCache, caplog: pytest.LogCaptureFixture
) -> None:
    with cache.lock("import"):
        assert not cache.lock("import").acquire(blocking=False)
    assert not logged(caplog, "lock", "import"), "quiet by default"
    caplog.set_level(logging.DEBUG, "django_redis_lock.lock")
    with cache.lock("import") as lock:
        assert not cache.lock("import").acquire(blocking=False)
    ours = [record for record in caplog.records if record.name == "django_redis_lock.lock"]
    acquired, missed, released = map(vars, ours)
    caplog.clear()
    assert {r["lock"] for r in (acquired, missed, released)} == {":lock:1:import"}
    assert acquired["fence"] == lock.fence
    assert acquired["waited"] >= 0
    assert missed["waited"] >= 0
    with cache.lock(
        "import", warn_after=0.01, label="nightly", raise_on_release_error=False
    ) as lock:
        until(lambda: logged(caplog, "held", "import"))
        cache.lock("import").reset()
        # Inside the block: a release that comes between the loss and its cause tells of it instead.
        until(lambda: "django_redis_lock.lost" in [record.name for record in caplog.records])
    found = {record.name: vars(record) for record in caplog.records}
    late, lost = found["django_redis_lock.held"], found["django_redis_lock.lost"]
    assert late["lock"] == lost["lock"] == ":lock:1:import"
    assert late["fence"] == lost["fence"] == lock.fence
    assert 0 < late["held"] <= lost["held"]
    assert late["holder"] == "MainThread, nightly"
    assert "reset" in lost["reason"]


def test_records_of_an_outage_have_fields_too(
    own_server: RedisServer, settings: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "django_redis_lock.waiting")
    location = {**settings.CACHES["default"], "LOCATION": own_server.url}
    settings.CACHES = {"default": location}
    settings.DJANGO_REDIS_LOCK = {"LOCAL_LOCK_FOLDER": str(tmp_path)}

    def record(name: str, *, field: str = "lock") -> dict[str, Any]:
        until(lambda: any(r.name == name and hasattr(r, field) for r in caplog.records))
        return next(vars(r) for r in caplog.records if r.name == name and hasattr(r, field))

    with ThreadPoolExecutor() as pool, locked("export"):
        assert caches["default"].lock("import", timeout=60, renew=False).acquire()
        for seconds in (1, 10):
            waiter = caches["default"].lock("import", blocking_timeout=seconds)
            waits = pool.submit(waiter.acquire)
            until(
                lambda waits=waits: (
                    own_server.asking.info("clients")["blocked_clients"] or waits.done()
                )
            )
            if not waits.done():
                break
        own_server.kill()
        waiting = record("django_redis_lock.waiting")
        assert waiting["lock"] == ":lock:1:import"
        assert isinstance(waiting["error"], redis.ConnectionError)
        with suppress(redis.ConnectionError):
            waits.result()
    left = record("django_redis_lock.locked")
    assert left["lock"] == "export"
    assert isinstance(left["error"], redis.ConnectionError)
    with caches["default"].lock("nightly", on_redis_down="local"):
        fell_back = record("django_redis_lock.outage")
    assert fell_back["lock"] == ":lock:1:nightly"
    assert isinstance(fell_back["error"], redis.ConnectionError)
    down = record("django_redis_lock.outage", field="server")
    address = own_server.client().connection_pool.connection_kwargs
    assert down["server"] == f"{address['host']}:{address['port']}/0"
    assert isinstance(down["error"], redis.ConnectionError)


def test_a_wait_that_stops_the_event_loop(
    cache: RedisCache, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with cache.lock("import"):
            assert not cache.lock("import", blocking=False).acquire()
            assert not logged(caplog, "", "import")
            assert not cache.lock("import", blocking_timeout=0.01).acquire()

    asyncio.run(main())
    [said] = logged(caplog, "", "import")
    assert said.startswith("The wait for the lock :lock:1:import stops this event loop: ")
    assert "cache.alock()" in said


def test_tokens_are_not_logged(
    cache: RedisCache, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    lock = cache.lock("import", timeout=0.1)
    lock.acquire()
    token = lock.local.token.decode()
    until(lambda: "Lost the lock" in caplog.text)
    until(lambda: not client.exists(":lock:1:import"))  # Which is a little later.
    with pytest.raises(LockNotOwnedError):
        lock.release()
    assert token not in caplog.text


# -- who listens keeps nobody waiting -----------------------------------------------------------


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


LOGGER = logging.getLogger("django_redis_lock")


@pytest.mark.parametrize(
    ("attach", "detach"),
    [(LOGGER.addHandler, LOGGER.removeHandler), (events.subscribe, events.unsubscribe)],
    ids=["a handler", "a listener"],
)
def test_one_that_blocks_costs_no_lock_its_renewal(
    client: redis.Redis, attach: Any, detach: Any
) -> None:
    blocking = Blocking()
    kept, lost = Lock(client, "kept", 60, renew=True), Lock(client, "lost", 60, renew=True)
    attach(blocking)
    try:
        with kept:
            assert lost.acquire()
            client.delete("lost")
            hurry()
            until(lambda: blocking.threads)
            for _ in range(3):
                renew(client, "kept")
            assert not kept.lost
            blocking.released.set()
    finally:
        blocking.released.set()
        detach(blocking)
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
