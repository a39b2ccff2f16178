"""``cache.lock()``: its names, its lifetime, what it passes on, and whom it excludes."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import warnings
from typing import Any

import pytest
import redis
from django.core.exceptions import ImproperlyConfigured

from django_redis_lock import Lock, LockError, LockNotOwnedError, TooFewReplicas
from django_redis_lock.cache import RedisCache
from tests.holding import hurry
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer

pytestmark = pytest.mark.on_redis

CACHE = {"KEY_PREFIX": "site"}


def make(server: RedisServer, prefix: str = "site", **options: Any) -> RedisCache:
    return RedisCache(server.url, {"KEY_PREFIX": prefix, "OPTIONS": options})


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "arguments", "key"),
    [
        ({}, ("report",), b":lock:1:report"),
        ({"KEY_PREFIX": "site"}, ("report",), b"site:lock:1:report"),
        ({"KEY_PREFIX": "site", "VERSION": 3}, ("report",), b"site:lock:3:report"),
        ({"KEY_PREFIX": "site"}, ("report", 7), b"site:lock:7:report"),
        ({"OPTIONS": {"LOCK_LOCK_PREFIX": "mutex-"}}, ("report",), b":mutex-1:report"),
        ({"OPTIONS": {"LOCK_LOCK_PREFIX": ""}}, ("report",), b":1:report"),
        (
            {"KEY_FUNCTION": lambda key, prefix, version: f"<{version}.{key}>"},
            ("x",),
            b"<lock:1.x>",
        ),
        ({}, (42,), b":lock:1:42"),
    ],
)
def test_the_key_of_a_lock(
    redis_server: RedisServer,
    client: redis.Redis,
    params: dict[str, Any],
    arguments: tuple[Any, ...],
    key: bytes,
) -> None:
    with RedisCache(redis_server.url, params).lock(*arguments):
        assert client.exists(key)


def test_a_version_that_may_be_meant_as_a_timeout_is_warned_of(cache: RedisCache) -> None:
    async def in_task() -> None:
        cache.alock("report", 10)

    for make_lock in (lambda: cache.lock("report", 10), lambda: asyncio.run(in_task())):
        with pytest.warns(UserWarning, match="timeout=10 if seconds were meant, else version=10"):
            make_lock()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.lock("report", None, 10)
        cache.lock("report", 2, 10)
        cache.lock("report", version=2)


@pytest.fixture
def _patient_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stands still with the machine is not down."""
    monkeypatch.setattr("django_redis_lock.locking.lock.REPLY_MARGIN_SECONDS", PATIENCE)


@pytest.mark.usefixtures("_patient_replicas")
def test_errors_name_the_lock_as_the_caller_did(cache: RedisCache) -> None:
    lock = cache.lock("report")
    errors: list[LockError] = []
    for use in (lock.release, lock.ensure_held, cache.lock("report", blocking=False).__enter__):
        with cache.lock("report"), pytest.raises(LockError) as caught:
            use()
        errors.append(caught.value)
    with pytest.raises(TooFewReplicas) as too_few:
        cache.lock("report", timeout=None, replicas=1, blocking=False).acquire()
    assert {error.lock_name for error in (*errors, too_few.value)} == {"report"}


@pytest.mark.parametrize(
    ("name", "shown"), [("report", "Lock 'report'"), (["b", "a"], "MultiLock 'a, b'")]
)
def test_a_lock_in_a_debugger(cache: RedisCache, name: Any, shown: str) -> None:
    lock = cache.lock(name, timeout=30)
    assert repr(lock) == f"<{shown}: not held here>"
    with lock:
        assert re.fullmatch(rf"<{shown}: held, ttl=[23][0-9.]+, fence={lock.fence}>", repr(lock))
    assert repr(lock) == f"<{shown}: not held here>"
    lock.acquire()
    cache.lock(name).reset()
    until(lambda: repr(lock) == f"<{shown}: lost>")


# -- lifetime ----------------------------------------------------------------------------------


def test_lifetime_and_prefix_are_settings(
    cache: RedisCache, client: redis.Redis, settings: Any
) -> None:
    assert (cache.lock("report").timeout, cache.lock("report").renew) == (30, True)
    assert not cache.lock("report", renew=False).renew
    settings.DJANGO_REDIS_LOCK = {"TIMEOUT": 5, "LOCK_PREFIX": "mutex:"}
    with cache.lock("report") as lock:
        assert lock.timeout == 5
        assert client.exists(b"site:mutex:1:report")


def test_a_given_timeout_is_only_renewed_on_request(cache: RedisCache, client: redis.Redis) -> None:
    assert cache.lock("report", timeout=7, renew=True).renew
    lock = cache.lock("report", timeout=0.3)
    assert (lock.timeout, lock.renew) == (0.3, False)
    lock.acquire()
    until(lambda: not client.exists("site:lock:1:report"))
    with pytest.raises(LockNotOwnedError):
        lock.release()


def test_a_lock_without_end_is_asked_for_by_name(cache: RedisCache, client: redis.Redis) -> None:
    with cache.lock("report", timeout=None) as lock:
        assert client.pttl("site:lock:1:report") == -1
        assert lock.ttl() == math.inf
        assert not lock.renew


# -- what it passes on -------------------------------------------------------------------------


def test_arguments_by_position_are_django_redis_own(cache: RedisCache, client: redis.Redis) -> None:
    lock = cache.lock("report", 2, 5, 0.3, False, None, client, False)
    assert lock.name == "site:lock:2:report"
    assert (lock.timeout, lock.sleep, lock.blocking, lock.blocking_timeout) == (5, 0.3, False, None)
    assert lock.redis is client
    assert lock.thread_local is False


def test_a_lock_with_a_client_argument_is_on_its_server(
    cache: RedisCache, own_server: RedisServer
) -> None:
    with own_server.client() as elsewhere, cache.lock("report", client=elsewhere):
        assert elsewhere.exists("site:lock:1:report")
        assert cache.lock("report").acquire(blocking=False)


# -- exclusion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["lock:", ""])
def test_it_excludes_a_plain_lock_at_its_key_and_the_other_way_round(
    redis_server: RedisServer, client: redis.Redis, prefix: str
) -> None:
    cache = make(redis_server, LOCK_LOCK_PREFIX=prefix)
    plain = client.lock(f"site:{prefix}1:report", timeout=60, blocking=False)
    ours = cache.lock("report", blocking=False)
    with ours:
        assert not plain.acquire()
    with plain:
        assert not ours.acquire()
    assert ours.acquire()


def test_a_waiter_gets_it_when_a_plain_lock_is_released(
    cache: RedisCache, client: redis.Redis
) -> None:
    """Nobody signals then; the keeper looks."""
    plain = client.lock("site:lock:1:report", timeout=60, thread_local=False)
    plain.acquire()

    def release_when_awaited() -> None:
        until(lambda: client.info("clients")["blocked_clients"] == 1)
        plain.release()
        hurry()

    thread = threading.Thread(target=release_when_awaited)
    thread.start()
    with cache.lock("report", timeout=60) as ours:
        assert ours.owned()
    thread.join()


# -- where it cannot work ----------------------------------------------------------------------


def test_without_redis_a_lock_raises(own_server: RedisServer) -> None:
    cache = make(own_server, IGNORE_EXCEPTIONS=True)
    own_server.stop()
    with pytest.raises(redis.ConnectionError):
        cache.lock("report").acquire()


def test_shards_cannot_lock_and_say_so(redis_server: RedisServer) -> None:
    cache = make(redis_server, CLIENT_CLASS="django_redis.client.ShardClient")
    with pytest.raises(ImproperlyConfigured, match="has no single primary server"):
        cache.lock("report")


def test_a_herd_can_lock(redis_server: RedisServer) -> None:
    cache = make(redis_server, CLIENT_CLASS="django_redis.client.HerdClient")
    with cache.lock("report") as lock:
        assert isinstance(lock, Lock)


def test_locks_of_another_site_or_version_neither_exclude_nor_are_listed(
    redis_server: RedisServer, cache: RedisCache
) -> None:
    other = make(redis_server, "other")
    with cache.lock("a"), cache.lock("b"), cache.lock("a", version=2), other.lock("a"):
        assert not cache.lock("a", version=2).acquire(blocking=False)
        found = cache.held_locks().locks
        assert sorted((lock.name, lock.key) for lock in found) == [
            ("a", b"site:lock:1:a"),
            ("b", b"site:lock:1:b"),
        ]


# -- replicas ----------------------------------------------------------------------------------


def test_who_wants_replicas_says_so_or_has_the_setting(
    redis_server: RedisServer, settings: Any
) -> None:
    assert make(redis_server).lock("report").replicas == 0
    settings.DJANGO_REDIS_LOCK = {"REPLICAS": 1}
    assert make(redis_server).lock("report").replicas == 1
    cache = make(redis_server, LOCK_REPLICAS=2)
    assert cache.lock("report").replicas == 2
    assert cache.lock("report", replicas=0).replicas == 0
    settings.DJANGO_REDIS_LOCK = {"REPLICAS": "1"}
    with pytest.raises(ImproperlyConfigured, match="REPLICAS must be a whole number of 0 or more"):
        make(redis_server).lock("report")


@pytest.mark.usefixtures("_patient_replicas")
def test_without_them_the_lock_does_not_count(redis_server: RedisServer) -> None:
    cache = make(redis_server, LOCK_REPLICAS=1)
    lock = cache.lock("report", timeout=1)
    with pytest.raises(TooFewReplicas, match="0 of 1 replicas have confirmed"):
        lock.acquire(blocking=False)
    until(lambda: not lock.locked())
