"""No cache key is the key of a lock: by whatever method, spelling, version, prefix, key function or
alias a visitor's key comes, it neither takes, frees, changes nor reads a lock (invariant S6)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from itertools import product
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.core.cache.backends.base import default_key_func
from django.core.exceptions import ImproperlyConfigured
from django.utils.functional import lazystr
from django_redis.cache import RedisCache as DjangoRedisCache
from django_redis.util import CacheKey

from django_redis_lock.cache import LocMemCache, RedisCache
from tests.lanes import examples
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.invariant("S6"), pytest.mark.on_redis]

REFUSED = "no name for a"


def make(server: RedisServer, **params: Any) -> RedisCache:
    return RedisCache(server.url, params)


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


def made(server: RedisServer, kind: str, location: str, **params: Any) -> RedisCache:
    return make(server, **params) if kind == "redis" else LocMemCache(location, params)


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ["redis", "memory"])
@pytest.mark.parametrize("call", CALLS)
def test_no_method_reaches_the_key_of_a_lock(
    redis_server: RedisServer, kind: str, call: str
) -> None:
    cache = made(redis_server, kind, f"keys-{call}")
    locks = made(redis_server, kind, f"keys-{call}", VERSION="lock")
    lock = cache.lock("nightly", timeout=30)
    for taken in (False, True):
        assert not taken or lock.acquire(blocking=False)
        with pytest.raises(ValueError, match=REFUSED):  # It is not taken, either.
            CALLS[call](cache, CacheKey(lock.name))
        with pytest.raises(ValueError, match=REFUSED):
            CALLS[call](locks, "1:nightly")
        # The key that looks most like it is a value's.
        with contextlib.suppress(Exception):
            CALLS[call](cache, "lock:1:nightly")
    assert lock.owned()
    assert 0 < (lock.ttl() or 0) <= 30
    lock.release()


SPELLINGS: list[tuple[Any, dict[str, Any]]] = [
    ("nightly", {"version": "lock:1"}),
    ("nightly", {"version": "lock:7"}),
    ("1:nightly", {"version": "lock"}),
    ("x", {"version": "lock:"}),
    ("nightly", {"version": lazystr("lock:1")}),
    ("nightly", {"version": type("Text", (str,), {})("lock:1")}),
    (CacheKey(":lock:1:nightly"), {}),
    (CacheKey(":lock:7:nightly"), {}),
    (CacheKey("{:lock:1:nightly}:grants"), {}),
    (CacheKey("{:lock:1:nightly}:owner"), {}),
    (CacheKey("{:lock:1:nightly}:place:2"), {}),
    (CacheKey("django_redis_lock:locks"), {}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("key", "options"), SPELLINGS, ids=str)
@pytest.mark.parametrize("use", ["get", "delete", "ttl", "smembers"])
def test_spellings_of_one_key(cache: RedisCache, use: str, key: Any, options: Any) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        getattr(cache, use)(key, **options)


@pytest.mark.parametrize("use", ["keys", "iter_keys", "delete_pattern"])
@pytest.mark.parametrize("version", ["lock:1", "lock", "lock:*"])
def test_patterns_of_versions_of_locks(cache: RedisCache, use: str, version: Any) -> None:
    with cache.lock("nightly") as lock:
        with pytest.raises(ValueError, match="no name for a version or a prefix of values"):
            list(getattr(cache, use)("*", version=version))
        # As with django-redis, a version is no pattern.
        assert cache.keys("*", version="*") == []
        assert cache.delete_pattern("*", version="*") == 0
        assert lock.owned()


@pytest.mark.parametrize("prefix", ["site:lock", "site:lock:1", ":lock", "site:lock:1:x"])
def test_a_prefix_as_an_argument(cache: RedisCache, prefix: str) -> None:
    with pytest.raises(ValueError, match="no name for a version or a prefix of values"):
        cache.delete("nightly", prefix=prefix)
    with pytest.raises(ValueError, match="no name for a version or a prefix of values"):
        cache.delete_pattern("*", prefix=prefix)
    assert not cache.delete("nightly", prefix="site-lock")


@pytest.mark.parametrize("key", ["lock", "lock:x", "lock:1:x", ":lock:1:x", "{x}:owner", b"x", 5])
def test_keys_that_only_resemble_those_of_locks(cache: RedisCache, key: Any) -> None:
    with cache.lock("x") as lock:
        cache.set(key, 1)
        assert cache.get(key) == cache.get_or_set(key, 2) == 1
        assert lock.owned()


@pytest.mark.parametrize("prefix", ["mutex-", "a.b*", "lock:job:", "lock"])
def test_another_lock_prefix(redis_server: RedisServer, prefix: str) -> None:
    cache = make(redis_server, KEY_PREFIX="a+b", OPTIONS={"LOCK_LOCK_PREFIX": prefix})
    assert cache.lock("x").name == f"a+b:{prefix}1:x"
    for version in (f"{prefix}1", prefix.partition(":")[0] + ":" + prefix.partition(":")[2]):
        with pytest.raises(ValueError, match=REFUSED):
            cache.get("x", version=version)
    cache.set("x", 1, version="looker")  # as with django-redis
    assert cache.get("x", version="looker") == 1


# -- key functions ---------------------------------------------------------------------------------


def sha(key: str, prefix: str, version: Any) -> str:
    return hashlib.sha256(f"{prefix}:{version}:{key}".encode()).hexdigest()


def slug(key: str, prefix: str, version: Any) -> str:
    return f"{prefix}.{version}.{re.sub('[^a-z0-9]', '', key.lower())}"


def long_hashed(key: str, prefix: str, version: Any) -> str:
    return f"{prefix}:{version}:{key if len(key) < 30 else sha(key, prefix, version)}"


def strict(key: str, *where: Any) -> str:
    if "lock" in key:
        raise ValueError(f"{REFUSED} value")
    return default_key_func(key, *where)


#: Those that keep versions apart.
FUNCTIONS: list[Callable[..., str]] = [
    default_key_func,
    sha,
    slug,
    long_hashed,
    strict,
    lambda key, *where: sha(key, *where)[:16],
    lambda key, *where: default_key_func(key, *where).lower(),
    lambda key, *where: default_key_func(key.lower(), *where),
    lambda key, *where: sha(key.strip().lower(), *where),
    lambda key, prefix, version: f"{key}@{version}",
    lambda key, prefix, version: f"{key}:{prefix}:{version}",
    lambda key, prefix, version: f"{key[:12]}:{prefix}#{version}",
    lambda key, prefix, version: f"shop7:{prefix}:{version}:{key}",
    lambda key, prefix, version: f"{prefix}|{version}|{key}",
    lambda key, prefix, version: f"{version}:{key[::-1]}",
]


@pytest.mark.parametrize(
    "function",
    [
        lambda key, *_: key,
        lambda key, prefix, version: f"{prefix}:{key}",
        lambda key, prefix, version: hashlib.sha256(key.encode()).hexdigest(),
        lambda key, prefix, version: f"{key}:{version}",
        lambda key, prefix, version: f"{prefix}{key}{version}",
        lambda key, prefix, version: sha(f"{key}:{version}", "", ""),
        lambda key, prefix, version: f"{prefix}:{version:03d}:{key}",
        lambda key, prefix, version: f"{prefix}:{int(version)}:{key}",
    ],
)
def test_a_key_function_that_does_not_keep_versions_apart(
    redis_server: RedisServer, function: Any
) -> None:
    cache = make(redis_server, KEY_FUNCTION=function)
    for name in ("nightly", "x"):
        with pytest.raises(ImproperlyConfigured, match=r"KEY_FUNCTION .* before the name; or set"):
            cache.lock(name)
    cache.set("nightly:lock", 1)  # As with django-redis.
    assert cache.get("nightly:lock") == 1
    own = make(redis_server, KEY_FUNCTION=function, OPTIONS={"LOCK_LOCK_PREFIX": ""})
    with own.lock("nightly"):
        assert own.has_key("nightly")


def test_a_key_function_whose_own_error_is_not_about_locks(redis_server: RedisServer) -> None:
    def of_a_tenant(key: str, *_: Any) -> str:
        raise LookupError("no tenant")

    with pytest.raises(LookupError, match="no tenant"):
        make(redis_server, KEY_FUNCTION=of_a_tenant).lock("x")


PREFIXES = ["", "a", "a:lock", "a:1", "lock", ":lock", "a:lock:1", "A:Lock", "lock:1"]
VERSIONS: list[Any] = [
    *(None, None, 1, 2, 12, True, 1.0, "1", "", "lock", "lock:", "lock:1", "LOCK:1", "lock1"),
    *(" lock:1", "lo", "1:lock", "a:lock:1", "lock:1:x", "lock:2"),
]
PIECES = ["x", "lock", "lock:", "1", "12", "1:", ":", "a", "a:", "nightly", "@", "#", "kcol", "X "]
#: Those that have a version, and so many other arguments before it.
VERSIONED = {"get": 1, "set": 3, "delete": 0, "touch": 1, "ttl": 0, "incr": 1, "incr_version": 1}
VERSIONED |= {"has_key": 0, "expire": 1, "persist": 0, "smembers": 0, "sadd": 1, "add": 2}


def test_random_keys_never_reach_a_lock(
    settings: Any, redis_server: RedisServer, client: redis.Redis
) -> None:
    """5,000 keys, versions, prefixes, key functions and methods (ten times as many with
    ``--all``) against the locks of nine caches in one database."""
    chance, number = random.Random(7), examples(50_000) // len(FUNCTIONS)
    # An event loop for each call would take longer than all else.
    slow = "a", "on_commit"
    for_threads = [CALLS[name] for name in CALLS if name == "add" or not name.startswith(slow)]
    for function in FUNCTIONS:
        settings.CACHES = {
            f"cache {n}": {
                "BACKEND": "django_redis_lock.cache.RedisCache",
                "LOCATION": redis_server.url,
                "KEY_PREFIX": prefix,
                "KEY_FUNCTION": function,
            }
            for n, prefix in enumerate(PREFIXES)
        } | {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
        all_of_them: list[Any] = [caches[alias] for alias in settings.CACHES if "c" in alias]
        locks: list[Any] = []
        for cache, name, version in product(all_of_them, ("x", "nightly", "1:x"), (None, 2)):
            with contextlib.suppress(ImproperlyConfigured):  # Then it has no locks.
                locks.append(cache.lock(name, version=version))
        held = [lock for lock in locks if lock.acquire(blocking=False)]
        tokens = client.mget([lock.name for lock in held])
        names = {lock.name for lock in locks}
        assert len(names) >= 6
        for _ in range(number):
            cache = chance.choice(all_of_them)
            key = "".join(chance.choices(PIECES, k=chance.randrange(1, 6)))
            version = chance.choice(VERSIONS)
            called = key, version, cache.key_prefix, function
            with contextlib.suppress(ValueError):
                assert cache.client.make_key(key, version=version) not in names, called
            with contextlib.suppress(Exception):
                if version is None:
                    chance.choice(for_threads)(cache, key)
                else:
                    method = chance.choice(list(VERSIONED))
                    others = (1, None, None)[: VERSIONED[method]]
                    getattr(cache, method)(key, *others, version=version)
            if chance.random() < 0.02:
                with contextlib.suppress(ValueError):
                    cache.delete_pattern(chance.choice(["*", "x*", f"{key}*"]), version=version)
            assert client.mget([lock.name for lock in held]) == tokens, called
        assert all(lock.owned() for lock in held)
        assert all(0 < (lock.ttl() or 0) <= 30 for lock in held)
        for lock in held:
            lock.release()
        caches.close_all()


# -- other caches of the project -------------------------------------------------------------------


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
        ({"KEY_PREFIX": "a"}, {"KEY_PREFIX": "a:1"}, "lock:1:x"),
        ({"KEY_PREFIX": "a:lock"}, {"KEY_PREFIX": "a"}, "x"),
        ({"VERSION": "mutex"}, {"OPTIONS": {"LOCK_LOCK_PREFIX": "mutex:"}}, "1:x"),
        ({"KEY_FUNCTION": "tests.key_functions.unchanged"}, {"KEY_PREFIX": "a"}, "a:lock:1:x"),
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
    cache = beside({"KEY_PREFIX": "a:lock"}, other={"LOCATION": f"{redis_server.url}?db=3"})
    cache.set("x", 1)
    assert cache.get("x") == 1


def test_a_name_of_a_lock_reaches_no_value(cache: RedisCache, client: redis.Redis) -> None:
    names = ["x}:grants", "{x}:flight", "x}|flight", "report", "lock:report", "{}", "a b", "\n"]
    values = dict.fromkeys(names, 1)
    cache.set_many(values)
    for name in names:
        with cache.lock(name, timeout=5), cache.lock([f"{name}:flight", "other"], timeout=5):
            pass
        cache.lock(name).reset()
    assert cache.get_many(values) == values


# -- lists of keys -----------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [False, True])
def test_keys_names_no_locks(redis_server: RedisServer, in_memory: bool) -> None:
    cache = LocMemCache("list", {}) if in_memory else make(redis_server)
    cache.set_many({"a": 1, "b": 2})
    with cache.lock("x"), cache.lock("y", limit=3), cache.lock("{z}"):
        for pattern in ("*", "[ablxyz]*"):
            assert sorted(cache.keys(pattern)) == sorted(cache.iter_keys(pattern)) == ["a", "b"]
        assert cache.get_many(cache.keys("*")) == {"a": 1, "b": 2}
        assert cache.keys("lock:*") == []


def test_keys_names_nothing_that_is_kept_beside_values(redis_server: RedisServer) -> None:
    unchanged = "tests.key_functions.unchanged"
    cache = make(redis_server, KEY_FUNCTION=unchanged, REVERSE_KEY_FUNCTION=lambda key: key)
    with make(redis_server).lock("x", limit=2):
        assert cache.get_or_set("a", lambda: list(cache.keys("*"))) == [":lock:1:x"]


def test_without_a_prefix_nothing_is_protected(redis_server: RedisServer) -> None:
    """As with django-redis: see docs/settings.md, and the check W016."""
    options = {"KEY_PREFIX": "site", "OPTIONS": {"LOCK_LOCK_PREFIX": ""}}
    cache, plain = make(redis_server, **options), DjangoRedisCache(redis_server.url, options)
    with cache.lock("x", raise_on_release_error=False) as lock:
        assert lock.name == plain.client.make_key("x")
        assert cache.keys("*") == plain.keys("*") == ["x"]
        cache.set("x", 1)
        assert not lock.owned()
