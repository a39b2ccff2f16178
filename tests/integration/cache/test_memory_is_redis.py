"""The same calls at random, of a cache on Redis and of one in memory: both return the same, raise
the same, and keep the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis

from django_redis_lock.cache import LocMemCache, RedisCache
from tests.redis_server import RedisServer

KEYS = ("a", "b", "x:1", "br[ack]", "st*r", "back\\slash", "ü", "a\nb", "")
VALUES = (None, 0, -7, True, 1.5, "5", " 7", "", b"bytes", [1], 2**63, -(10**30))
TIMEOUTS = (None, 0, -5, 1000, 2000.5, 0.0004)
PATTERNS = (
    "*",
    "?",
    "a*",
    "[ab]",
    "[^a]",
    "[b-a]",
    "br[[]*",
    "st\\*r",
    "[",
    "[\\d]",
    "a[^]b",
    "\\",
)
DELTAS = (1, -3, 0, 0.5, 2**64)


def a_call(rng: random.Random) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A method, and its arguments."""
    key, value = rng.choice(KEYS), rng.choice(VALUES)
    some = rng.sample(KEYS, rng.randrange(4))
    version = rng.choice(({}, {"version": 1}, {"version": 2}))
    timed = {**version, **rng.choice(({}, {"timeout": rng.choice(TIMEOUTS)}))}
    how = rng.choice(({}, {"nx": True}, {"xx": True}, {"nx": True, "xx": True}))
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "set": ((key, value), {**timed, **how}),
        "add": ((key, value), timed),
        "get_or_set": ((key, value), {**timed, "stale": rng.choice((0, 500, 5000))}),
        "set_many": ((dict.fromkeys(some, value),), timed),
        "touch": ((key,), timed),
        "expire": ((key, rng.choice((0, -1, 900))), version),
        "pexpire_at": ((key, rng.choice((0, 10**13))), version),
        "mark_stale": ((key,), {**version, "stale": 800}),
        "incr": ((key, rng.choice(DELTAS)), version),
        "decr": ((key, 5), version),
        "incr_version": ((key,), version),
        "keys": ((rng.choice(PATTERNS),), version),
        "delete_pattern": ((rng.choice(PATTERNS),), version),
        "get_many": ((some,), version),
        "delete_many": (([*some, *some[:1]],), version),
        **dict.fromkeys(("get", "has_key", "ttl", "persist", "delete"), ((key,), version)),
    }
    name = rng.choice([*calls, *calls, *calls, "clear"])
    return name, *calls.get(name, ((), {}))


def outcome(cache: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        found = getattr(cache, name)(*args, **options)
    except Exception as error:
        cause = error.__cause__
        return type(error), str(error), type(cause), str(cause)
    return sorted(found) if isinstance(found, list) else about(found)


class Seconds(int):
    """A lifetime, some of which passes between two calls."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seconds) and abs(int(self) - int(other)) < 50

    __hash__ = None


def about(found: Any) -> Any:
    return Seconds(found) if isinstance(found, int) and found > 100 else found


def kept(cache: Any) -> dict[bytes, Any]:
    """The values, with their lifetimes; not the streams of computations, nor figures."""
    client: redis.Redis = cache._lock_client()
    keys = client.keys("*")
    found = zip(keys, client.mget(keys) if keys else (), strict=True)
    return {key: (value, about(client.ttl(key))) for key, value in found if value is not None}


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(12))
def test_random_calls_do_the_same_in_memory(
    redis_server: RedisServer, location: str, seed: int
) -> None:
    rng = random.Random(seed)
    options = {"KEY_PREFIX": rng.choice(("", "p", "[x]"))}
    caches = RedisCache(redis_server.url, dict(options)), LocMemCache(location, dict(options))
    for _ in range(100):
        call = a_call(rng)
        on_redis, in_memory = (outcome(cache, *call) for cache in caches)
        assert in_memory == on_redis, call
        assert kept(caches[1]) == kept(caches[0]), call


#: Numbers that Redis does not have: the text "5" is repeated a thousand times by django-redis.
ABSURD: dict[str, Any] = {
    "set": lambda cache, number: cache.set("a", "absurd", number),
    "set, xx": lambda cache, number: cache.set("a", "absurd", number, xx=True),
    "add": lambda cache, number: cache.add("a", "absurd", number),
    "set_many": lambda cache, number: cache.set_many({"a": "absurd", "b": "absurd"}, number),
    "touch": lambda cache, number: cache.touch("a", number),
    "expire": lambda cache, number: cache.expire("b", number),
    "pexpire": lambda cache, number: cache.pexpire("b", number),
    "pexpire_at": lambda cache, number: cache.pexpire_at("a", number),
    "pexpire_at, set": lambda cache, number: cache.pexpire_at("b", number),
}


@pytest.mark.parametrize(
    ("name", "number"),
    # Of the methods that expire, redis-py sends the text 5, which is a number for Redis.
    [(name, n) for name in ABSURD for n in (10**30, "5") if n != "5" or "pire" not in name],
)
def test_what_redis_refuses_is_refused_in_memory(
    redis_server: RedisServer, location: str, name: str, number: Any
) -> None:
    """And the next call gets its own reply."""
    raised = []
    for cache in RedisCache(redis_server.url, {}), LocMemCache(location, {}):
        cache.set("b", 1)
        cache.delete("a")
        with pytest.raises(Exception) as caught:  # noqa: PT011  # compared below
            ABSURD[name](cache, number)
        raised.append(caught.type)
        assert cache.get_many(["a", "b", "c"]) == {"b": 1}
        assert cache.incr("b") == 2
        cache.clear()
    assert raised[0] is raised[1]
