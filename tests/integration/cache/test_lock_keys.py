"""No cache key can be the key of a lock: by whatever method, spelling, version, key function or
alias a visitor's key comes, it neither takes, frees, changes nor reads a lock (invariant S6)."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.utils.functional import lazystr
from django_redis.cache import RedisCache as DjangoRedisCache
from django_redis.util import CacheKey

from django_redis_lock import Lock
from django_redis_lock.cache import LocMemCache, RedisCache
from tests.redis_server import RedisServer

pytestmark = pytest.mark.invariant("S6")

REFUSED = "no name for a"


def make(server: RedisServer, **params: Any) -> RedisCache:
    return RedisCache(server.url, params)


@pytest.fixture
def cache(redis_server: RedisServer) -> RedisCache:
    return make(redis_server)


def one() -> int:
    return 1


async def aone() -> int:
    return 1


def many(keys: list[str]) -> dict[str, int]:
    return dict.fromkeys(keys, 1)


SOON = datetime(2040, 1, 1, tzinfo=timezone.utc)

#: Every method that takes keys, with the arguments before or around the key ``k``.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "get": lambda c, k: c.get(k),
    "get_many": lambda c, k: c.get_many(["a", k]),
    "has_key": lambda c, k: c.has_key(k),
    "in": lambda c, k: k in c,
    "set": lambda c, k: c.set(k, 1),
    "set nx": lambda c, k: c.set(k, 1, nx=True),
    "set timeout 0": lambda c, k: c.set(k, 1, timeout=0),
    "add": lambda c, k: c.add(k, 1),
    "set_many": lambda c, k: c.set_many({"a": 1, k: 1}),
    "delete": lambda c, k: c.delete(k),
    "delete_many": lambda c, k: c.delete_many(["a", k]),
    "touch": lambda c, k: c.touch(k, 1),
    "touch None": lambda c, k: c.touch(k, None),
    "expire": lambda c, k: c.expire(k, 1),
    "pexpire": lambda c, k: c.pexpire(k, 1),
    "expire_at": lambda c, k: c.expire_at(k, SOON),
    "pexpire_at": lambda c, k: c.pexpire_at(k, SOON),
    "persist": lambda c, k: c.persist(k),
    "ttl": lambda c, k: c.ttl(k),
    "pttl": lambda c, k: c.pttl(k),
    "incr": lambda c, k: c.incr(k),
    "incr ignoring": lambda c, k: c.incr(k, 1, None, None, True),
    "decr": lambda c, k: c.decr(k),
    "incr_version": lambda c, k: c.incr_version(k),
    "decr_version": lambda c, k: c.decr_version(k),
    "get_or_set": lambda c, k: c.get_or_set(k, one),
    "get_or_set stale": lambda c, k: c.get_or_set(k, one, 60, stale=60),
    "get_or_set_many": lambda c, k: c.get_or_set_many(["a", k], many),
    "locked_get_or_set": lambda c, k: c.locked_get_or_set(k, one),
    "compute": lambda c, k: c.compute(k, one),
    "mark_stale": lambda c, k: c.mark_stale(k, stale=5),
    "mark_stale_many": lambda c, k: c.mark_stale_many(["a", k], stale=5),
    "on_commit delete": lambda c, k: c.on_commit().delete(k),
    "on_commit delete_many": lambda c, k: c.on_commit().delete_many(["a", k]),
    "on_commit mark_stale": lambda c, k: c.on_commit().mark_stale(k, stale=5),
    "on_commit adelete": lambda c, k: asyncio.run(c.on_commit().adelete(k)),
    "sadd": lambda c, k: c.sadd(k, 1),
    "scard": lambda c, k: c.scard(k),
    "sdiff": lambda c, k: c.sdiff("a", k),
    "sdiffstore": lambda c, k: c.sdiffstore(k, "a", "b"),
    "sinter": lambda c, k: c.sinter("a", k),
    "sinterstore": lambda c, k: c.sinterstore(k, "a"),
    "sismember": lambda c, k: c.sismember(k, 1),
    "smembers": lambda c, k: c.smembers(k),
    "smove from": lambda c, k: c.smove(k, "a", 1),
    "smove to": lambda c, k: c.smove("a", k, 1),
    "spop": lambda c, k: c.spop(k),
    "srandmember": lambda c, k: c.srandmember(k),
    "srem": lambda c, k: c.srem(k, 1),
    "sscan": lambda c, k: c.sscan(k),
    "sscan_iter": lambda c, k: list(c.sscan_iter(k)),
    "smismember": lambda c, k: c.smismember(k, 1),
    "sunion": lambda c, k: c.sunion("a", k),
    "sunionstore": lambda c, k: c.sunionstore(k, "a"),
    "hset": lambda c, k: c.hset(k, "f", 1),
    "hdel": lambda c, k: c.hdel(k, "f"),
    "hlen": lambda c, k: c.hlen(k),
    "hkeys": lambda c, k: c.hkeys(k),
    "hexists": lambda c, k: c.hexists(k, "f"),
    "zadd": lambda c, k: c.zadd(k, {"m": 1}),
    "zcard": lambda c, k: c.zcard(k),
    "zcount": lambda c, k: c.zcount(k, 0, 1),
    "zincrby": lambda c, k: c.zincrby(k, 1, "m"),
    "zpopmax": lambda c, k: c.zpopmax(k),
    "zpopmin": lambda c, k: c.zpopmin(k),
    "zrange": lambda c, k: c.zrange(k, 0, 1),
    "zrangebyscore": lambda c, k: c.zrangebyscore(k, 0, 1),
    "zrank": lambda c, k: c.zrank(k, "m"),
    "zrem": lambda c, k: c.zrem(k, "m"),
    "zremrangebyscore": lambda c, k: c.zremrangebyscore(k, 0, 1),
    "zrevrange": lambda c, k: c.zrevrange(k, 0, 1),
    "zrevrangebyscore": lambda c, k: c.zrevrangebyscore(k, 1, 0),
    "zscore": lambda c, k: c.zscore(k, "m"),
    "aget": lambda c, k: asyncio.run(c.aget(k)),
    "aget_many": lambda c, k: asyncio.run(c.aget_many([k])),
    "ahas_key": lambda c, k: asyncio.run(c.ahas_key(k)),
    "aset": lambda c, k: asyncio.run(c.aset(k, 1)),
    "aadd": lambda c, k: asyncio.run(c.aadd(k, 1)),
    "aset_many": lambda c, k: asyncio.run(c.aset_many({k: 1})),
    "adelete": lambda c, k: asyncio.run(c.adelete(k)),
    "adelete_many": lambda c, k: asyncio.run(c.adelete_many([k])),
    "atouch": lambda c, k: asyncio.run(c.atouch(k, 1)),
    "aincr": lambda c, k: asyncio.run(c.aincr(k)),
    "adecr": lambda c, k: asyncio.run(c.adecr(k)),
    "aincr_version": lambda c, k: asyncio.run(c.aincr_version(k)),
    "adecr_version": lambda c, k: asyncio.run(c.adecr_version(k)),
    "aget_or_set": lambda c, k: asyncio.run(c.aget_or_set(k, aone)),
    "aget_or_set_many": lambda c, k: asyncio.run(c.aget_or_set_many([k], many)),
    "acompute": lambda c, k: asyncio.run(c.acompute(k, aone)),
    "amark_stale": lambda c, k: asyncio.run(c.amark_stale(k, stale=5)),
    "amark_stale_many": lambda c, k: asyncio.run(c.amark_stale_many([k], stale=5)),
}
#: The public methods that take no key of a value.
OTHERS = {
    *("aclear", "aclose", "alock", "clear", "close", "command_lock", "delete_pattern"),
    *("get_backend_timeout", "held_locks", "iter_keys", "keys", "lock", "make_and_validate_key"),
    *("make_key", "own_pattern", "reset_all", "subject_of", "validate_key"),
}


def reached(cache: Any, *keys: str) -> list[tuple[Any, ...]]:
    """The methods that do not refuse one of these keys, and what they do."""
    found: list[tuple[Any, ...]] = []
    for key in keys:
        for name, call in CALLS.items():
            try:
                found.append((name, key, call(cache, key)))
            except Exception as error:
                if REFUSED not in str(error):
                    found.append((name, key, error))
    return found


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ["redis", "memory"])
@pytest.mark.parametrize("call", CALLS)
def test_no_method_reaches_the_key_of_a_lock(
    redis_server: RedisServer, kind: str, call: str
) -> None:
    cache = make(redis_server) if kind == "redis" else LocMemCache(f"keys-{call}", {})
    lock = cache.lock("nightly", timeout=30)
    with pytest.raises(ValueError, match=REFUSED):  # It is not taken, either.
        CALLS[call](cache, "lock:nightly")
    assert lock.acquire(blocking=False)
    with pytest.raises(ValueError, match=REFUSED):
        CALLS[call](cache, "lock:nightly")
    assert lock.owned()
    assert 0 < (lock.ttl() or 0) <= 30
    lock.release()


SPELLINGS: list[tuple[Any, dict[str, Any]]] = [
    ("lock:nightly", {"version": 1}),
    ("lock:nightly", {"version": 7}),
    ("lock:nightly", {"version": "a:b"}),
    (lazystr("lock:nightly"), {}),
    (type("Text", (str,), {})("lock:nightly"), {}),
    ("nightly", {"version": "1:lock"}),
    ("nightly", {"version": "7:lock"}),
    (CacheKey(":1:lock:nightly"), {}),
    (CacheKey(":7:lock:nightly"), {}),
    (CacheKey("{:1:lock:nightly}:grants"), {}),
    (CacheKey("{:1:lock:nightly}:owner"), {}),
    (CacheKey("{:1:lock:nightly}:place:2"), {}),
    (CacheKey("django_redis_lock:locks"), {}),
    ("lock:{tag}x", {}),
    ("lock:x}:grants", {}),
    ("lock:", {}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("key", "options"), SPELLINGS, ids=str)
@pytest.mark.parametrize("use", ["get", "delete", "ttl", "smembers"])
def test_spellings_of_one_key(cache: RedisCache, use: str, key: Any, options: Any) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        getattr(cache, use)(key, **options)


def test_incr_version_has_two_keys(cache: RedisCache, client: redis.Redis) -> None:
    with cache.lock("nightly", 2) as lock:
        client.set(":1:lock:nightly", b"7")
        with pytest.raises(ValueError, match=REFUSED):
            cache.incr_version(CacheKey(":1:lock:nightly"))
        assert lock.owned()
    assert client.get(":1:lock:nightly") == b"7"


def test_a_prefix_as_an_argument(cache: RedisCache) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        cache.delete("lock:nightly", prefix="site")


@pytest.mark.parametrize(
    "key", ["lock", "lock-x", "door:lock:x", "Lock:x", "block:x", b"lock:x", 5]
)
def test_keys_that_only_resemble_those_of_locks(cache: RedisCache, key: Any) -> None:
    cache.set(key, 1)
    assert cache.get(key) == cache.get_or_set(key, 2) == 1


@pytest.mark.parametrize("prefix", ["mutex-", "a.b*", "lock:job:"])
def test_another_lock_prefix(redis_server: RedisServer, prefix: str) -> None:
    cache = make(redis_server, KEY_PREFIX="a+b", OPTIONS={"LOCK_LOCK_PREFIX": prefix})
    with pytest.raises(ValueError, match=REFUSED):
        cache.get(f"{prefix}x")
    cache.set("lock:x", 1)
    assert cache.get("lock:x") == 1


def sha(key: str, prefix: str, version: Any) -> str:
    return hashlib.sha256(f"{prefix}:{version}:{key}".encode()).hexdigest()


def slug(key: str, prefix: str, version: Any) -> str:
    return f"{prefix}.{version}.{re.sub('[^a-z0-9]', '', key.lower())}"


def long_hashed(key: str, prefix: str, version: Any) -> str:
    return f"{prefix}:{version}:{key if len(key) < 30 else sha(key, prefix, version)}"


@pytest.mark.parametrize(
    ("function", "key", "options"),
    [
        (lambda key, *_: key, "lock:nightly", {}),
        (lambda key, *_: key, "lock:other", {}),
        (lambda key, prefix, version: f"{key}@{version}", "lock:nightly", {}),
        (lambda key, prefix, version: f"{key}@{version}", "lock:nightly", {"version": 2}),
        (sha, "lock:nightly", {}),
        (lambda key, *where: sha(key.lower(), *where), "LOCK:nightly", {}),
        (lambda key, *where: sha(key.strip(), *where), " lock:nightly", {}),
        (slug, "locknightly", {}),
        (slug, "LOCK-nightly", {}),
        (long_hashed, "lock:" + "x" * 50, {}),
        (long_hashed, "lock:x", {}),
    ],
)
def test_key_functions(
    redis_server: RedisServer, client: redis.Redis, function: Any, key: str, options: Any
) -> None:
    cache = make(redis_server, KEY_FUNCTION=function)
    with pytest.raises(ValueError, match=REFUSED):
        cache.set(key, 1, **options)
    cache.set("report", 1)
    assert cache.get("report") == 1
    assert len(client.keys()) == 1


@pytest.fixture
def beside(settings: Any, redis_server: RedisServer) -> Iterator[Callable[..., RedisCache]]:
    """Makes the cache ``default``, with others in the same database."""

    def aliases(own: dict[str, Any], **others: dict[str, Any]) -> Any:
        backend = "django_redis_lock.cache.RedisCache"
        settings.CACHES = {
            alias: {"BACKEND": backend, "LOCATION": redis_server.url, **config}
            for alias, config in {"default": own, **others}.items()
        }
        return caches["default"]

    yield aliases
    caches.close_all()


@pytest.mark.parametrize(
    ("own", "other", "key"),
    [
        ({"KEY_PREFIX": "a"}, {"KEY_PREFIX": "a:1"}, "1:lock:x"),
        ({}, {"OPTIONS": {"LOCK_LOCK_PREFIX": "mutex:"}}, "mutex:x"),
        ({"KEY_FUNCTION": "tests.key_functions.unchanged"}, {"KEY_PREFIX": "a"}, "a:1:lock:x"),
    ],
)
def test_locks_of_another_cache_in_the_database(
    beside: Any, own: dict[str, Any], other: dict[str, Any], key: str
) -> None:
    cache = beside(own, other=other)
    with caches["other"].lock("x") as lock:
        with pytest.raises(ValueError, match=REFUSED):
            cache.delete(key)
        assert lock.owned()


def test_a_cache_in_another_database_reserves_nothing(beside: Any, redis_server: Any) -> None:
    elsewhere = {"LOCATION": f"{redis_server.url}?db=3", "OPTIONS": {"LOCK_LOCK_PREFIX": "mutex:"}}
    cache = beside({}, other=elsewhere)
    cache.set("mutex:x", 1)


def test_a_name_of_a_lock_reaches_no_value(cache: RedisCache, client: redis.Redis) -> None:
    names = ["x}:grants", "{x}:flight", "x}|flight", "report", "lock:report", "{}", "a b", "\n"]
    values = {name: 1 for name in names if not name.startswith("lock:")}
    cache.set_many(values)
    for name in names:
        with cache.lock(name, timeout=5), cache.lock([f"{name}:flight", "other"], timeout=5):
            pass
        cache.lock(name).reset()
    assert cache.get_many(values) == values


# -- lists of keys -----------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"OPTIONS": {"LOCK_LOCK_PREFIX": ""}}], ids=["lock:", ""])
@pytest.mark.parametrize("in_memory", [False, True])
def test_keys_names_no_locks(redis_server: RedisServer, params: Any, in_memory: bool) -> None:
    cache = LocMemCache(f"list {params}", params) if in_memory else make(redis_server, **params)
    cache.set_many({"a": 1, "b": 2})
    with cache.lock("x"), cache.lock("y", limit=3), cache.lock("{z}"):
        for pattern in ("*", "[ablxyz]*"):
            assert sorted(cache.keys(pattern)) == sorted(cache.iter_keys(pattern)) == ["a", "b"]
        assert cache.get_many(cache.keys("*")) == {"a": 1, "b": 2}
        if not params:
            assert cache.keys("lock:*") == []


def test_without_a_prefix_nothing_is_protected(redis_server: RedisServer) -> None:
    """As with django-redis: see docs/settings.md, and the check W016."""
    options = {"KEY_PREFIX": "site", "OPTIONS": {"LOCK_LOCK_PREFIX": ""}}
    cache, plain = make(redis_server, **options), DjangoRedisCache(redis_server.url, options)
    cache.set("lock:x", 1)
    assert plain.get("lock:x") == 1


def test_a_plain_lock_under_the_prefix(cache: RedisCache, client: redis.Redis) -> None:
    with Lock(client, ":1:lock:x") as lock:
        with pytest.raises(ValueError, match=REFUSED):
            cache.delete("lock:x")
        assert lock.owned()
