"""``clear()`` with ``CLEAR = "prefix"``: what it deletes, and what stays. ``test_clear`` shows that
no lock is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.core.exceptions import ImproperlyConfigured

from django_redis_lock.cache import LocMemCache, RedisCache
from django_redis_lock.protocol.keys import FIGURES, flight_key
from tests.processes import PATIENCE
from tests.redis_server import RedisServer

Make = Callable[..., Any]


@pytest.fixture
def make(backend: str, redis_server: RedisServer, location: str) -> Make:
    """Makes caches in one database, or of one location, that clear by prefix."""

    def make_cache(prefix: str = "site", **settings: Any) -> Any:
        given = {"KEY_PREFIX": prefix, "OPTIONS": {"LOCK_CLEAR": "prefix"}, **settings}
        kind = RedisCache if backend == "redis" else LocMemCache
        return kind(redis_server.url if backend == "redis" else location, given)

    return make_cache


#: Caches whose keys a careless pattern for those of "site" would match; then odd ones.
NEIGHBOURS = ["", "sit", "site2", "my site", "site:blog", "si*", "*", "s?te", "[s]ite", "site\\"]


@pytest.mark.parametrize("prefix", ["site", *NEIGHBOURS])
def test_it_deletes_its_own_keys_and_no_others(make: Make, prefix: str) -> None:
    caches = {name: make(name) for name in ["site", *NEIGHBOURS]}
    for cache in caches.values():
        cache.set_many({"a": 1, "b:c": 2, "d e": 3}, None)
        cache.set("a", 4, version=2)
    caches[prefix].clear()
    left = {name: cache.get_many(["a", "b:c", "d e"]) for name, cache in caches.items()}
    kept = {"a": 1, "b:c": 2, "d e": 3}
    assert left == {name: {} if name == prefix else kept for name in caches}
    assert all(cache.get("a", version=2) == 4 for cache in caches.values())


def test_a_version_has_its_own_keys(make: Make) -> None:
    second = make(VERSION=2)
    second.set("a", 1)
    make().clear()
    assert second.get("a") == 1
    second.clear()
    assert second.get("a") is None


@pytest.mark.parametrize(
    "key_function",
    [
        lambda key, prefix, version: f"{key}|{prefix}*|{version}",
        lambda key, prefix, version: f"{prefix.upper()}[{version}]{key}",
        "django.core.cache.backends.base.default_key_func",
    ],
)
def test_a_key_function_that_puts_something_around_the_key(make: Make, key_function: Any) -> None:
    cache = make(KEY_FUNCTION=key_function)
    other = make("other", KEY_FUNCTION=key_function)
    for each in (cache, other):
        each.set_many({"a": 1, "b": 2})
    cache.clear()
    assert cache.get_many(["a", "b"]) == {}
    assert other.get_many(["a", "b"]) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "key_function",
    [
        lambda key, *_: key,
        lambda key, *_: str(hash(key)),
        lambda key, prefix, version: f"{prefix}:{key}" if len(key) < 200 else str(hash(key)),
    ],
)
def test_keys_that_do_not_show_whose_they_are(make: Make, key_function: Any) -> None:
    cache = make(KEY_FUNCTION=key_function)
    cache.set("a", 1)
    with pytest.raises(ImproperlyConfigured, match='CLEAR is "prefix", and KEY_FUNCTION makes'):
        cache.clear()
    assert cache.get("a") == 1


def test_it_ends_its_computations_and_no_others(make: Make) -> None:
    cache, other = make(), make("other")
    begun, finish = threading.Barrier(3), threading.Event()

    def compute() -> str:
        begun.wait(PATIENCE)
        assert finish.wait(PATIENCE)
        return "older"

    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda c=c: found.append(c.get_or_set("report", compute, None)))
        for c in (cache, other)
    ]
    for thread in threads:
        thread.start()
    begun.wait(PATIENCE)
    asyncio.run(cache.aclear())
    finish.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == ["older"] * 2
    assert (cache.get("report"), other.get("report")) == (None, "older")


@pytest.mark.on_redis
def test_what_other_software_keeps_there_stays(make: Make, client: redis.Redis) -> None:
    cache = make()
    client.rpush("celery", "message")
    client.hset(FIGURES["day"], "a", 1)
    client.set(flight_key(b"other:1:report"), "a leader")
    client.hset("site:1:hash", "field", 1)
    with cache.lock("import") as lock:
        assert cache.clear() is None
        assert lock.owned()
    assert client.exists("celery", FIGURES["day"], flight_key(b"other:1:report")) == 3
    assert not client.exists("site:1:hash")


def test_shards(redis_server: RedisServer, client: redis.Redis) -> None:
    shard = "django_redis.client.ShardClient"
    options = {"CLIENT_CLASS": shard, "LOCK_CLEAR": "prefix"}
    cache = RedisCache([redis_server.url], {"KEY_PREFIX": "si*", "OPTIONS": options})
    cache.set("a", 1)
    client.set("site:1:a", 1)
    cache.clear()
    assert client.keys() == [b"site:1:a"]
