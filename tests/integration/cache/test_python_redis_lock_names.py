"""``locked_get_or_set`` and ``reset_all``, as python-redis-lock has them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import redis

from django_redis_lock import Lock, LockError
from django_redis_lock.cache import AlreadyAcquired, NotAcquired, RedisCache, reset_all
from tests.processes import PATIENCE, in_threads, until
from tests.redis_server import RedisServer
from tests.support.values import Asking, Producer

pytestmark = pytest.mark.on_redis


def test_the_signature_is_theirs() -> None:
    names = ["self", "key", "value_creator", "version", "expire", "id", "lock_key", "timeout"]
    assert list(inspect.signature(RedisCache.locked_get_or_set).parameters) == names


@pytest.mark.parametrize("value", ["computed", None])
def test_it_computes_once(cache: RedisCache, value: str | None) -> None:
    producer = Producer(value)
    assert in_threads(8, cache.locked_get_or_set, "report", producer) == [value] * 8
    assert cache.locked_get_or_set("report", producer) == value
    assert producer.calls == 1


@pytest.mark.parametrize("expire", [None, 60])
def test_values_with_the_same_lock_are_computed_one_after_another(
    cache: RedisCache, client: redis.Redis, expire: float | None
) -> None:
    producer, other = Producer("a"), Producer("b")
    producer.finish.clear()
    terms: dict[str, Any] = {"lock_key": "both", "expire": expire}
    first = Asking(cache.locked_get_or_set, "a", producer, **terms, id="me")
    assert producer.begun.wait(PATIENCE)
    assert client.get(":lock:1:both") == b"me"
    assert (client.pttl(":lock:1:both") > 31_000) == (expire == 60)
    second = Asking(cache.locked_get_or_set, "b", other, **terms)
    until(lambda: client.info("clients")["blocked_clients"] == 1)
    assert not other.calls
    producer.finish.set()
    assert (first.found(), second.found()) == ("a", "b")
    assert not cache.lock("both").locked()


def test_reset_all_releases_all_locks_of_this_cache(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    mine = RedisCache(redis_server.url, {"KEY_PREFIX": "mine"})
    others = RedisCache(redis_server.url, {"KEY_PREFIX": "others"})
    locks = [mine.lock(f"lock {n}", timeout=60) for n in range(20)]
    theirs = others.lock("lock 0", timeout=60)
    for lock in (*locks, theirs):
        assert lock.acquire()
    client.set("mine:lock:1:data", "data")
    mine.set("data", "data", None)
    assert mine.reset_all() == 20
    assert not any(lock.locked() for lock in locks)
    assert theirs.owned()
    assert (client.get("mine:lock:1:data"), mine.get("data")) == (b"data", "data")
    with pytest.raises(LockError):
        locks[0].release()
    assert mine.reset_all() == 0
    theirs.release()


def test_the_modules_reset_all_releases_all_locks_of_the_database(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    locks = [
        RedisCache(redis_server.url, {"KEY_PREFIX": "mine"}).lock("a", timeout=60),
        RedisCache(redis_server.url, {"KEY_PREFIX": "others"}).lock("b", timeout=None),
        Lock(client, "bare", timeout=60),
    ]
    for lock in locks:
        lock.acquire()
    client.set("lock:theirs", "a lock of another library")
    assert reset_all(client) == 3
    assert not any(lock.locked() for lock in locks)
    assert client.exists("lock:theirs")
    assert reset_all(client) == 0


def test_the_id_of_the_owner_lets_another_release(client: redis.Redis) -> None:
    lock = Lock(client, "a", timeout=60)
    assert lock.get_owner_id() is None
    lock.acquire()
    token = lock.get_owner_id()
    assert token == client.get("a").decode()
    Lock(client, "a", id=token).release()
    assert lock.get_owner_id() is None


def test_their_errors(client: redis.Redis) -> None:
    lock = Lock(client, "a", timeout=60, renew=True)
    with pytest.raises(NotAcquired):
        lock.release()
    lock.acquire()
    with pytest.raises(AlreadyAcquired):
        lock.acquire()
    client.delete("a")
    with pytest.raises(NotAcquired):
        lock.release()
