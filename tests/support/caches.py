"""Each call of the cache, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import redis
from django_redis.cache import RedisCache as PlainCache

from tests.redis_server import RedisServer

Operation = Callable[[Any], Any]


#: A lifetime of which a thousandth is a quarter of an hour.
LONG = 1_000_000


def done(result: Any) -> None:
    """django-redis does not say what came of it; we do, as Django does (see below)."""


#: Each on a cache that holds text "a", the number 5 "five" and, for a minute, "brief".
OPERATIONS: dict[str, Operation] = {
    "set": lambda c: c.set("new", {"x": 1}),
    "set again": lambda c: c.set("a", 2),
    "set for a time": lambda c: c.set("brief", 2, 120),
    "set for a moment": lambda c: c.set("new", 1, timeout=0.5),
    "set for ever": lambda c: c.set("brief", 2, timeout=None),
    "set for 0": lambda c: c.set("a", 2, timeout=0),
    "set for 0, missing": lambda c: c.set("new", 2, timeout=0),
    "set for long": lambda c: c.set("new", 2, LONG),
    "set for less than 0": lambda c: c.set("a", 2, timeout=-5),
    "set for less than 1 ms": lambda c: c.set("a", 2, timeout=0.0004),
    "set of a version": lambda c: c.set("a", 2, version=7),
    "set by position": lambda c: c.set("a", 2, 60, 3, None, False, True),
    "set None": lambda c: c.set("new", None),
    "set True": lambda c: c.set("new", True),
    "set number": lambda c: c.set("new", 2**70),
    "set what cannot be kept": lambda c: c.set("new", lambda: None),
    "set nx": lambda c: c.set("a", 2, nx=True),
    "set nx, missing": lambda c: c.set("new", 2, nx=True),
    "set nx for 0": lambda c: c.set("a", 2, nx=True, timeout=0),
    "set nx for 0, missing": lambda c: c.set("new", 2, nx=True, timeout=0),
    "set xx": lambda c: c.set("a", 2, xx=True),
    "set xx, missing": lambda c: c.set("new", 2, xx=True),
    "set without value": lambda c: c.set("new"),
    "set unknown": lambda c: c.set("new", 1, ttl=3),
    "set a timeout that is none": lambda c: c.set("new", 1, timeout="soon"),
    "set of a huge lifetime": lambda c: c.set("new", 1, timeout=10**18),
    "set of a finished key": lambda c: c.set(c.make_key("new"), 1),
    "set of a number as key": lambda c: c.set(42, 1),
    "add": lambda c: c.add("new", 1),
    "add, there": lambda c: c.add("a", 1),
    "add for a time": lambda c: c.add("new", 1, 60),
    "add for 0": lambda c: c.add("a", 1, timeout=0),
    "add for 0, missing": lambda c: c.add("new", 1, timeout=0),
    "add of a version": lambda c: c.add("a", 1, version=2),
    "delete": lambda c: c.delete("a"),
    "delete, missing": lambda c: c.delete("new"),
    "delete of a version": lambda c: c.delete("a", version=7),
    "delete of a prefix": lambda c: c.delete("a", prefix="other"),
    "delete by position": lambda c: c.delete("a", 1, c.key_prefix),
    "set_many": lambda c: done(c.set_many({"a": 1, "new": 2})),
    "set_many for a time": lambda c: done(c.set_many({"a": 1, "new": 2}, 60)),
    "set_many for long": lambda c: done(c.set_many({"a": 1, "new": 2}, LONG)),
    "set_many for 0": lambda c: done(c.set_many({"a": 1, "new": 2}, timeout=0)),
    "set_many for ever": lambda c: done(c.set_many({"a": 1}, timeout=None)),
    "set_many of a version": lambda c: done(c.set_many({"a": 1}, version=2)),
    "set_many, none": lambda c: done(c.set_many({})),
    "delete_many": lambda c: c.delete_many(["a", "five", "new"]),
    "delete_many, none": lambda c: c.delete_many([]),
    "delete_many of a generator": lambda c: c.delete_many(k for k in ["a"]),
    "delete_many of a version": lambda c: c.delete_many(["a"], version=7),
    "delete_pattern": lambda c: c.delete_pattern("*"),
    "delete_pattern of some": lambda c: c.delete_pattern("[ab]*", itersize=1),
    "delete_pattern of none": lambda c: c.delete_pattern("x*"),
    "delete_pattern of a version": lambda c: c.delete_pattern("*", version=2),
    "delete_pattern of a prefix": lambda c: c.delete_pattern("*", prefix="other"),
    "incr_version": lambda c: c.incr_version("brief"),
    "incr_version for long": lambda c: (c.set("brief", 2, LONG), c.incr_version("brief")),
    "incr_version by": lambda c: c.incr_version("a", 2),
    "incr_version of a version": lambda c: c.incr_version("a", 1, 5),
    "incr_version, missing": lambda c: c.incr_version("new"),
    "decr_version": lambda c: c.decr_version("a"),
    "incr": lambda c: c.incr("five"),
    "incr, missing": lambda c: c.incr("new"),
    "incr by": lambda c: c.incr("five", 7),
    "incr by position": lambda c: c.incr("five", 7, 1, None, True),
    "incr of text": lambda c: c.incr("a"),
    "decr": lambda c: c.decr("five", 3),
    "decr, missing": lambda c: c.decr("new"),
    "incr, new": lambda c: c.incr("new", 3, ignore_key_check=True),
    "incr beyond": lambda c: (c.set("five", 2**63 - 1), c.incr("five")),
    "incr beyond, for long": lambda c: (c.set("five", 2**63 - 1, LONG), c.incr("five")),
    "incr beyond, without an end": lambda c: (c.set("five", 2**63 - 1, None), c.incr("five")),
    "touch": lambda c: c.touch("a", 60),
    "touch for long": lambda c: c.touch("a", LONG),
    "touch for 0": lambda c: c.touch("a", 0),
    "touch for 0, missing": lambda c: c.touch("new", 0),
    "touch for ever": lambda c: c.touch("brief", None),
    "touch for the default": lambda c: c.touch("brief"),
    "touch, missing": lambda c: c.touch("new", 60),
    "get": lambda c: c.get("a"),
    "get, missing": lambda c: c.get("new", "default"),
    "get_many": lambda c: c.get_many(["a", "new"]),
    "get_many of a generator": lambda c: c.get_many(key for key in ("a", "new")),
    "get_or_set": lambda c: c.get_or_set("new", lambda: 5, 60),
    "get_or_set, there": lambda c: c.get_or_set("a", lambda: 5),
    "get_or_set None": lambda c: c.get_or_set("new", None),
    "get_or_set for 0": lambda c: c.get_or_set("new", 5, timeout=0),
    "get_or_set, number as key": lambda c: c.get_or_set(42, 5),
    "has_key": lambda c: c.has_key("a"),
    "keys": lambda c: sorted(c.keys("*")),
    "clear": lambda c: c.clear(),
    "close": lambda c: c.close(),
}


class Outcome(NamedTuple):
    """What an operation did: its result or error, and what it left behind."""

    result: Any
    kept: dict[str, tuple[Any, int | None]]


def make(kind: type[PlainCache], server: RedisServer, **options: Any) -> Any:
    return kind(server.url, {"KEY_PREFIX": "site", "OPTIONS": options})


def attempt(operation: Operation, cache: Any) -> Any:
    """What ``operation`` returns, or the kind of its error: the words tell of the command."""
    try:
        return operation(cache)
    except redis.ResponseError:
        # Within a script some kinds of it cannot be told apart.
        return redis.ResponseError
    except Exception as error:
        return type(error)


def prepare(cache: Any, client: redis.Redis) -> None:
    client.flushdb()
    cache.set("a", "text", None)
    cache.set("five", 5, None)
    cache.set("brief", "text", 60)
    cache.set("a", "of 7", None, version=7)
    client.set("other:1:a", 1)


def outcome(operation: Operation, cache: Any, client: redis.Redis) -> Outcome:
    prepare(cache, client)
    result = attempt(operation, cache)
    kept = {
        key.decode(): (client.get(key), in_ten_seconds(client.pttl(key)))
        for key in client.keys()
        if client.type(key) == b"string"
    }
    return Outcome(result, kept)


def in_ten_seconds(pttl: int) -> int | None:
    """A lifetime, so coarse that the time between two commands does not count."""
    return None if pttl < 0 else round(pttl / 10_000)
