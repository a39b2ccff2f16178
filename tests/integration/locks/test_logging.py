"""The log: what is warned of, what is said only if somebody wants to read it."""

from __future__ import annotations

import asyncio
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches

from django_redis_lock import Lock, LockNotOwnedError, locked
from django_redis_lock.cache import RedisCache
from django_redis_lock.locking.hold import held_logger
from tests.moved_clock import moved_clock
from tests.processes import until
from tests.redis_server import RedisServer
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


@pytest.mark.parametrize("value", [0, -1, "5", True])
def test_a_warning_after_no_time_makes_no_sense(cache: RedisCache, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="warn_after must be a number of seconds"):
        cache.lock("import", warn_after=value)


def test_each_step_is_said_at_the_level_debug(
    cache: RedisCache, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        with cache.lock("import"):
            cache.lock("import").acquire(blocking=False)
        return logged(caplog, "lock", "import")

    assert not lines(), "quiet by default"
    caplog.set_level(logging.DEBUG, "django_redis_lock.lock")
    acquired, missed, released = lines()
    assert acquired.startswith("Acquired :lock:1:import after ")
    assert missed.startswith("Did not get :lock:1:import within ")
    assert released.startswith("Released :lock:1:import")


def test_records_have_fields_for_structured_logs(
    cache: RedisCache, caplog: pytest.LogCaptureFixture
) -> None:
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
