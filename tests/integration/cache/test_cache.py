"""The backend beside django-redis's own: what is not about locks or flights must not differ."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.core.cache.backends.base import BaseCache
from django.core.exceptions import ImproperlyConfigured
from django_redis.cache import RedisCache as PlainCache
from django_redis.client import DefaultClient
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redis_lock.cache import LocMemCache, RedisCache
from django_redis_lock.cache.connections import flight_ending
from django_redis_lock.conf import SETTING
from tests.redis_server import RedisServer
from tests.support.caches import (
    OPERATIONS,
    Operation,
    attempt,
    done,
    make,
    outcome,
    prepare,
)

READING = ("get", "has_key", "keys")

#: Enough to see whether a client of django-redis's is called as it wants to be.
SOME = ("set for a time", "set_many", "add", "delete", "delete_pattern", "incr", "touch", "clear")
SOME_OPERATIONS = [pytest.param(OPERATIONS[name], id=name) for name in (*SOME, "get_or_set")]


@pytest.mark.parametrize("name", OPERATIONS)
def test_it_does_what_django_redis_does(
    redis_server: RedisServer, client: redis.Redis, name: str
) -> None:
    theirs, ours = (
        outcome(OPERATIONS[name], make(kind, redis_server), client)
        for kind in (PlainCache, RedisCache)
    )
    assert ours == theirs
    assert type(ours.result) is type(theirs.result)


@pytest.mark.sample(3)
@pytest.mark.parametrize("ignore", [True, False], ids=["ignored", "shown"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_without_redis_it_does_what_django_redis_does(
    stopped: RedisServer, name: str, ignore: bool
) -> None:
    options = {"IGNORE_EXCEPTIONS": ignore}
    if name.startswith("get_or_set") and not ignore:
        options["LOCK_VALUES_ON_REDIS_DOWN"] = "raise"  # What cannot be kept can still be computed.
    theirs, ours = (
        attempt(OPERATIONS[name], make(kind, stopped, **options))
        for kind in (PlainCache, RedisCache)
    )
    assert ours == theirs


@pytest.mark.sample(3)
@pytest.mark.parametrize("ignore", [True, False], ids=["ignored", "shown"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith(READING)])
def test_a_refusal_by_redis_is_passed_on_as_django_redis_passes_it_on(
    read_only: RedisServer, name: str, ignore: bool
) -> None:
    url = read_only.url.replace("://", "://reader:@")
    theirs, ours = (
        attempt(OPERATIONS[name], kind(url, {"OPTIONS": {"IGNORE_EXCEPTIONS": ignore}}))
        for kind in (PlainCache, RedisCache)
    )
    if name.startswith("get_or_set"):
        # What cannot be kept can still be computed.
        assert ours is not redis.ResponseError
        return
    assert ours == theirs


@pytest.fixture(scope="module")
def read_only() -> Iterator[RedisServer]:
    """A server with a user ``reader`` who may not write."""
    with RedisServer() as server, server.client() as admin:
        admin.execute_command(
            *("ACL", "SETUSER", "reader", "on", "nopass", "~*", "+@all", "-@write", "-@dangerous")
        )
        yield server


@pytest.mark.parametrize("key", ["a", "new"])
def test_only_if_missing_and_only_if_there_at_once_is_refused(
    redis_server: RedisServer, client: redis.Redis, key: str
) -> None:
    """By Redis before redis-py 8, and by redis-py since: with an error of another class."""
    cache = make(RedisCache, redis_server)
    prepare(cache, client)
    before = cache.get(key)
    with pytest.raises(redis.RedisError):
        cache.set(key, 2, nx=True, xx=True)
    assert cache.get(key) == before


# -- the caller's own client -------------------------------------------------------------------


def on_a_client(cache: Any) -> list[Any]:
    with redis.Redis.from_url(cache.client._server[0]) as own:
        return [
            cache.set("new", 1, client=own),
            cache.add("new", 2, client=own),
            done(cache.set_many({"x": 1, "y": 2}, client=own)),
            cache.delete("x", client=own),
            cache.delete_many(["y", "a"], client=own),
            cache.incr_version("new", client=own),
        ]


def in_a_pipeline(cache: Any) -> list[Any]:
    with redis.Redis.from_url(cache.client._server[0]) as own, own.pipeline() as pipeline:
        done = [
            cache.set("new", 1, client=pipeline),
            cache.set("new", 2, 60, client=pipeline, xx=True),
            cache.set("five", 2, client=pipeline, nx=True),
            cache.set("brief", 2, timeout=0, client=pipeline),
            cache.delete("a", client=pipeline),
            cache.delete("none", client=pipeline),
        ]
        assert not own.exists(cache.make_key("new"))
        cache.delete_many(["five", "x"], client=pipeline)
        return [*done, [bool(answer) for answer in pipeline.execute()]]


@pytest.mark.parametrize("operation", [on_a_client, in_a_pipeline])
def test_the_callers_own_client_or_pipeline_is_used(
    redis_server: RedisServer, client: redis.Redis, operation: Operation
) -> None:
    theirs, ours = (
        outcome(operation, make(kind, redis_server), client) for kind in (PlainCache, RedisCache)
    )
    assert ours == theirs
    assert isinstance(ours.result, list)


@pytest.mark.parametrize("operation", [*SOME_OPERATIONS, in_a_pipeline])
def test_a_server_that_has_forgotten_all_scripts_is_taught_them(
    redis_server: RedisServer, client: redis.Redis, operation: Operation
) -> None:
    """As after a restart or a failover."""

    def forgetful(cache: Any) -> Any:
        client.script_flush()
        return operation(cache)

    theirs, ours = (
        outcome(forgetful, make(kind, redis_server), client) for kind in (PlainCache, RedisCache)
    )
    assert ours == theirs


def test_a_pipeline_sends_each_script_once_in_each_batch(client: redis.Redis) -> None:
    """A pipeline cannot send it again when the server does not know it."""
    with client.pipeline() as pipeline:
        writing = flight_ending(pipeline)
        for _ in range(2):
            client.script_flush()
            for key in (":1:a", ":1:b"):
                writing.set(key, 1)
            assert [args[0] for args, _ in pipeline.command_stack] == ["EVAL", "EVALSHA"]
            assert pipeline.execute(raise_on_error=True)
    assert client.mget(":1:a", ":1:b") == [b"1", b"1"]


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"SERIALIZER": "django_redis.serializers.json.JSONSerializer"},
        {"COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor"},
        {"CLIENT_CLASS": "django_redis.client.HerdClient"},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize(
    "name",
    [*SOME, "incr_version"],
)
def test_with_options_it_does_what_django_redis_does(
    redis_server: RedisServer, client: redis.Redis, options: dict[str, Any], name: str
) -> None:
    theirs, ours = (
        outcome(OPERATIONS[name], make(kind, redis_server, **options), client)
        for kind in (PlainCache, RedisCache)
    )
    assert ours.result == theirs.result
    assert ours.kept.keys() == theirs.kept.keys()


@pytest.mark.parametrize(
    "name",
    [*SOME, "delete_many"],
)
@pytest.mark.filterwarnings("ignore:.* on sharded client")  # Of ours and of django-redis's.
def test_shards_work_as_with_django_redis(
    redis_server: RedisServer, client: redis.Redis, name: str
) -> None:
    options = {"CLIENT_CLASS": "django_redis.client.ShardClient"}
    theirs, ours = (
        outcome(OPERATIONS[name], make(kind, redis_server, **options), client)
        for kind in (PlainCache, RedisCache)
    )
    assert ours == theirs


def test_shards_refuse_a_client_as_django_redis_does(redis_server: RedisServer) -> None:
    cache = make(RedisCache, redis_server, CLIENT_CLASS="django_redis.client.ShardClient")
    cache.set("a", 1)
    for method in (cache.delete_pattern, cache.keys):
        with pytest.raises(NotImplementedError):
            method("*", client=redis_server.client())
    assert cache.delete_pattern("*") == 1


def test_a_herd_cannot_share_computations_and_says_so(redis_server: RedisServer) -> None:
    cache = make(RedisCache, redis_server, CLIENT_CLASS="django_redis.client.HerdClient")
    with pytest.raises(ImproperlyConfigured, match="HerdClient stores values in a format"):
        cache.get_or_set("a", 1)


@pytest.mark.parametrize("kind", [PlainCache, RedisCache])
def test_writes_go_to_another_server_where_that_is_wanted(
    redis_server: RedisServer, stopped: RedisServer, kind: type[PlainCache]
) -> None:
    cache = kind(
        f"{stopped.url},{redis_server.url}",
        {"TIMEOUT": None, "OPTIONS": {"REPLICA_READ_ONLY": False}},
    )
    assert cache.set("a", 1)
    with redis_server.client() as client:
        assert client.get(":1:a") == b"1"


@pytest.mark.parametrize("kind", [PlainCache, RedisCache])
def test_a_callers_client_that_is_down_is_replaced_by_no_other(
    redis_server: RedisServer, client: redis.Redis, kind: type[PlainCache]
) -> None:
    cache = kind(redis_server.url, {"OPTIONS": {"REPLICA_READ_ONLY": False}})
    at_once = Retry(NoBackoff(), 0)
    with redis.Redis(port=1, retry=at_once) as away, pytest.raises(redis.ConnectionError):
        cache.set("a", 1, client=away)
    assert not client.keys()


def test_the_primary_is_written_and_its_replica_read(
    redis_server: RedisServer, own_server: RedisServer
) -> None:
    """The two have different data here, so that each shows what reaches it."""
    cache = RedisCache(f"{redis_server.url},{own_server.url}", {})
    with redis_server.client() as primary, own_server.client() as replica:
        for each in (primary, replica):
            each.mset({":1:both": 1, ":1:long": 2**63 - 1})
        replica.set(":1:replica", 5)
        assert (
            sorted(cache.keys("*")) == sorted(cache.iter_keys("*")) == ["both", "long", "replica"]
        )
        assert cache.get("replica") == 5
        assert cache.get_many(["replica", "none"]) == {"replica": 5}
        assert cache.has_key("replica")
        untouched = {key: replica.get(key) for key in replica.keys()}
        writes: dict[str, Operation] = {
            "set": lambda c: c.set("new", 1),
            "add": lambda c: c.add("newer", 1),
            "set_many": lambda c: c.set_many({"newest": 1}),
            "incr": lambda c: c.incr("both"),
            "touch": lambda c: c.touch("both", 60),
            "delete": lambda c: c.delete("new"),
            "delete_many": lambda c: c.delete_many(["newer"]),
            "delete_pattern": lambda c: c.delete_pattern("newe*"),
        }
        for write in writes.values():
            assert write(cache) in (True, 1, 2, [])
        assert set(primary.keys()) - {b"django_redis_lock:flights"} == {b":1:both", b":1:long"}
        assert (primary.get(":1:both"), primary.ttl(":1:both") > 0) == (b"2", True)
        assert {key: replica.get(key) for key in replica.keys()} == untouched
        assert replica.ttl(":1:both") == -1


def test_a_key_function_is_used_everywhere(redis_server: RedisServer, client: redis.Redis) -> None:
    cache = RedisCache(
        redis_server.url, {"KEY_FUNCTION": lambda key, prefix, version: f"{version}/{key}"}
    )
    cache.set("a", 1)
    cache.get_or_set("b", 2)
    cache.set_many({"c": 3})
    assert {b"1/a", b"1/b", b"1/c"} <= set(client.keys())
    cache.delete("a")
    cache.delete_many(["b", "c"])
    assert not [key for key in client.keys() if key.startswith(b"1/")]


# -- Django's contract where django-redis breaks it ---------------------------------------------


def test_set_many_gives_the_keys_that_could_not_be_set(own_server: RedisServer) -> None:
    cache = make(RedisCache, own_server, IGNORE_EXCEPTIONS=True)
    assert cache.set_many({"a": 1, "b": 2}) == []
    assert cache.set_many({}) == []
    own_server.stop()
    assert cache.set_many({"a": 1, "b": 2}) == ["a", "b"]
    # Where there is nothing to set, no Redis is needed.
    assert make(RedisCache, own_server).set_many({}) == []


def called(cache: Any, method: str, *args: Any) -> Any:
    """The result of ``method``, awaited if it is one for asyncio."""
    if not method.startswith("a"):
        return getattr(cache, method)(*args)

    async def awaited() -> Any:
        return await getattr(cache, method)(*args)

    return asyncio.run(awaited())


VERSIONS = {"incr_version": 3, "decr_version": 1, "aincr_version": 3, "adecr_version": 1}


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", [None, "text"])
@pytest.mark.parametrize("lifetime", [None, 100.9])
@pytest.mark.parametrize("method", VERSIONS)
def test_a_value_keeps_its_lifetime_when_its_version_changes(
    cache: Any, method: str, lifetime: float | None, value: Any
) -> None:
    """None too. (django-redis takes it for missing, and rounds to seconds; Django forgets
    the lifetime.)"""
    version = VERSIONS[method]
    cache.set("nothing", value, lifetime, version=2)
    before = cache.pttl("nothing", version=2)
    assert called(cache, method, "nothing", 1, 2) == version
    assert cache.get("nothing", "missing", version=version) == value
    assert cache.get("nothing", "missing", version=2) == "missing"
    after = cache.pttl("nothing", version=version)
    assert after is None if lifetime is None else before - 60_000 < after <= before


@pytest.mark.parametrize("name", ["expire", "pexpire"])
def test_a_lifetime_that_is_no_number_is_refused_by_redis_py(cache: Any, name: str) -> None:
    cache.set("report", 1)
    with pytest.raises(redis.exceptions.DataError):
        getattr(cache, name)("report", None)
    assert cache.get("report") == 1


# -- signatures --------------------------------------------------------------------------------

SAME_AS_THE_CLIENTS = (
    *("set", "add", "delete", "set_many", "delete_many", "incr_version", "delete_pattern"),
    *("incr", "decr", "touch", "expire", "expire_at", "pexpire", "pexpire_at"),
    *("keys", "iter_keys", "get_many", "has_key", "ttl", "pttl"),
)


def parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(method).parameters.values())


def places(method: Callable[..., Any]) -> list[tuple[str, Any, bool]]:
    """Names, defaults and order of what may be given by position."""
    return [
        (p.name, p.default, p.kind is p.POSITIONAL_OR_KEYWORD)
        for p in parameters(method)
        if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
    ]


@pytest.mark.parametrize("name", SAME_AS_THE_CLIENTS)
def test_arguments_are_django_redis_own(name: str) -> None:
    """django-redis's cache passes everything on, so its client has the signature."""
    assert places(getattr(RedisCache, name)) == places(getattr(DefaultClient, name))


@pytest.mark.parametrize(
    "name", [n for n in (*SAME_AS_THE_CLIENTS, "clear", "get_or_set") if hasattr(BaseCache, n)]
)
def test_arguments_are_djangos_own(name: str) -> None:
    wanted = [p.name for p in parameters(getattr(BaseCache, name))]
    assert [p.name for p in parameters(getattr(RedisCache, name))][: len(wanted)] == wanted


def test_what_get_or_set_adds_is_given_by_name() -> None:
    django = parameters(BaseCache.get_or_set)
    extras = parameters(RedisCache.get_or_set)[len(django) :]
    wanted = [(p.name, SETTING if p.name == "timeout" else p.default, True) for p in django]
    assert places(RedisCache.get_or_set) == wanted
    assert extras
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in extras)


def test_arguments_of_lock_are_django_redis_own() -> None:
    ours, theirs = parameters(RedisCache.lock), parameters(DefaultClient.lock)
    assert [p.name for p in ours[:-1]] == [p.name for p in theirs]
    # The timeout left out is the setting's, not none.
    assert [(p.name, p.default) for p in ours[:-1] if p.name != "timeout"] == [
        (p.name, p.default) for p in theirs if p.name != "timeout"
    ]


@pytest.mark.parametrize("where", ["redis", "memory", "pool"])
def test_no_keys_are_no_error(redis_server: RedisServer, where: str) -> None:
    """An exhausted iterator is not empty to ``bool``, on which django-redis relies."""
    options = {"OPTIONS": {"CLOSE_CONNECTION": True}} if where == "pool" else {}
    kind: Any = LocMemCache if where == "memory" else RedisCache
    cache: Any = kind(redis_server.url, options)
    for keys in ((), {}.keys(), iter(()), filter(None, [""]), None):
        assert cache.get_many(keys) == {}
    for method in (cache.delete_many, cache.get_many):
        assert not method(iter(()))
    for amethod in (cache.adelete_many, cache.aget_many):
        assert not asyncio.run(amethod(iter(())))
