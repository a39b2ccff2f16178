"""Parts of the cache backend that need no server."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio
from asgiref.sync import markcoroutinefunction
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import NoScriptError

from django_redis_lock import events
from django_redis_lock.cache import (
    NO_LOCATION,
    LocMemCache,
    RedisCache,
    caches,
    commands,
    context,
    get_or_set,
    lock_caches,
    methods,
    observed,
    reading,
    tasks,
    undecodable,
)
from django_redis_lock.cache.commands import (
    Batch,
    Delete,
    OwnConnections,
    Seen,
    Set,
    _is_over,
    encoding,
)
from django_redis_lock.cache.get_or_set import awaitable
from django_redis_lock.cache.reading import MISSING, _missing_unless_outage
from django_redis_lock.cache.redis_py import FlightEnding
from django_redis_lock.contrib.pages.responses import OwnWrites
from django_redis_lock.events import Read
from django_redis_lock.exceptions import LockNotAcquired
from django_redis_lock.protocol.keys import flight_key
from django_redis_lock.singleflight import DELETE, END_SEEN, WRITE, DeferredCall, computing
from django_redis_lock.singleflight.leader import Leader
from django_redis_lock.steps import adrive, drive
from django_redis_lock.transport import CircuitOpen, asyncio_client


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> Any:
    found: Any = LocMemCache(request.node.name, {"KEY_PREFIX": "site"})
    found.clear()
    return found


# -- keys ------------------------------------------------------------------------------------------

#: The arguments of ``make_key``, and whether they are those of most operations.
MADE: dict[str, tuple[tuple[Any, ...], bool]] = {
    "usual": (("report",), True),
    "of a version": (("report", 2), False),
    "of a prefix": (("report", None, "other"), False),
    "of both": (("report", 2, "other"), False),
    "a number": ((5,), False),
}


@pytest.mark.parametrize("args", MADE)
def test_most_keys_are_made_without_django_redis(
    cache: Any, args: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, usual = MADE[args]
    wanted = type(cache.client).make_key(cache.client, *given)
    longer: list[Any] = []
    unchecked = methods.KeyGuard.unchecked

    def noting(guard: Any, *args: Any) -> str:
        longer.append(args)
        return unchecked(guard, *args)

    monkeypatch.setattr(methods.KeyGuard, "unchecked", noting)
    assert cache.client.make_key(*given) == wanted
    assert bool(longer) is not usual


def test_a_change_of_the_settings_counts_for_what_was_refused_before(
    cache: Any, settings: Any
) -> None:
    with pytest.raises(ValueError, match="no name for a cache value"):
        cache.get("lock:x", version=1)
    assert cache.get("mutex:x", version=1) is None
    settings.DJANGO_REDIS_LOCK = {"LOCK_PREFIX": "mutex:"}
    with pytest.raises(ValueError, match="no name for a cache value"):
        cache.get("mutex:x", version=1)
    assert cache.get("lock:x", version=1) is None


@pytest.mark.parametrize("same", [True, False, None])
def test_only_locks_of_caches_in_the_same_database_are_refused(settings: Any, same: Any) -> None:
    """None: a cache without Redis is in none."""
    django = "django.core.cache.backends.locmem.LocMemCache"
    ours = "django_redis_lock.cache.LocMemCache"
    own = {"BACKEND": ours, "LOCATION": "beside"}
    other = {**own, "LOCATION": "beside" if same else "elsewhere"}
    other["BACKEND"] = django if same is None else ours
    settings.CACHES = {"default": own, "other": {**other, "OPTIONS": {"LOCK_LOCK_PREFIX": "x:"}}}
    assert caches["default"].get("y:1", version=1) is None
    if same:
        with pytest.raises(ValueError, match="no name for a cache value"):
            caches["default"].get("x:1", version=1)
    else:
        assert caches["default"].get("x:1", version=1) is None


def test_the_guard_remembers_few_prefixes(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "MAX_CACHED", 3)
    for number in range(20):
        cache.key_prefix = f"tenant {number}"
        with pytest.raises(ValueError, match="no name for a cache value"):
            cache.get("lock:x")
        assert 0 < len(cache._guard._by_prefix) <= 4


def test_the_settings_are_read_once_for_each_change(
    cache: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    read_settings = methods.KeyGuard._read_settings

    def noting(guard: Any) -> None:
        read.append(guard)
        read_settings(guard)

    monkeypatch.setattr(methods.KeyGuard, "_read_settings", noting)
    for times, change in ((1, {}), (2, {"LOCK_PREFIX": "mutex:"})):
        if change:
            settings.DJANGO_REDIS_LOCK = change
        for key in ("a", "b", "c"):
            cache.client.make_key(key)
        assert len(read) == times


def reversed_key(key: str, key_prefix: str, version: int) -> str:
    return f"{key_prefix}:{version}:{key[::-1]}"


def test_keys_of_a_function_of_the_project_are_made_where_the_value_is_needed(cache: Any) -> None:
    """At once in a thread."""
    own: Any = LocMemCache("own keys", {"KEY_FUNCTION": reversed_key, "KEY_PREFIX": "site"})
    assert own.compute("report", 5) == 5
    assert own.get_or_set_many(["a", "b"], lambda names: dict.fromkeys(names, 1)) == {
        "a": 1,
        "b": 1,
    }
    assert own.mark_stale("report", stale=5)
    assert own.get("report") == 5
    assert set(own.keys("*")) >= {"troper"}


# -- locks -----------------------------------------------------------------------------------------

SETTINGS = {
    "TIMEOUT": 7,
    "GRANT_TIMEOUT": 3,
    "REPLICAS": 2,
    "ON_REDIS_DOWN": "run",
    "LOCAL_LOCK_FOLDER": "/tmp/locks",
}
BY_SETTINGS = {
    "timeout": 7.0,
    "renew": True,
    "grant_timeout": 3.0,
    "replicas": 2,
    "on_redis_down": "run",
    "local_folder": "/tmp/locks",
}
#: The options of a lock, and in what it then differs from one that has the settings.
CHOSEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "timeout": ({"timeout": 5}, {"timeout": 5.0, "renew": False}),
    "no end": ({"timeout": None}, {"timeout": None, "renew": False}),
    "no renewal": ({"renew": False}, {"renew": False}),
    "grant_timeout": ({"grant_timeout": 9}, {"grant_timeout": 9.0}),
    "no replicas": ({"replicas": 0}, {"replicas": 0}),
    "critical": ({"critical": True}, {"on_redis_down": "raise", "local_folder": None}),
    "raise": ({"on_redis_down": "raise"}, {"on_redis_down": "raise", "local_folder": None}),
    "local": ({"on_redis_down": "local"}, {"on_redis_down": "local"}),
}


@pytest.mark.parametrize("options", CHOSEN)
@pytest.mark.parametrize("key", ["a", ["a", "b"]], ids=["one", "several"])
def test_a_lock_has_the_settings_that_its_options_leave_out(
    cache: Any, settings: Any, key: Any, options: str
) -> None:
    settings.DJANGO_REDIS_LOCK = SETTINGS
    chosen, differs = CHOSEN[options]
    lock = cache.lock(key, **chosen)
    for each in (lock, *getattr(lock, "members", ())):
        assert {name: getattr(each, name) for name in BY_SETTINGS} == {**BY_SETTINGS, **differs}
        assert each.cache is cache


def test_a_lock_by_several_servers_needs_no_replicas(settings: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"REPLICAS": 2}
    settings.CACHES = {
        alias: {
            "BACKEND": "django_redis_lock.cache.RedisCache",
            "LOCATION": f"redis://127.0.0.1:1/{number}",
        }
        for number, alias in enumerate(("default", "b", "c"))
    }
    cache: Any = caches["default"]
    assert cache.lock("a", using=["default", "b", "c"]).replicas == 0
    assert cache.lock("a").replicas == 2


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("installed", [True, False])
def test_a_cache_whose_app_is_missing_says_so(
    ready: bool, installed: bool, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not while the apps are loaded."""
    logged: list[str] = []
    monkeypatch.setattr("django_redis_lock.ops.checks.log_not_installed", lambda: logged.append(""))
    monkeypatch.setattr(apps, "ready", ready)
    monkeypatch.setattr(apps, "is_installed", lambda name: installed)
    assert LocMemCache("app", {}).client
    assert bool(logged) is (ready and not installed)


@pytest.mark.parametrize(
    "backend", ["nowhere.Cache", "functools.partial", "functools.reduce", None]
)
def test_a_cache_that_cannot_be_made_cannot_lock(settings: Any, backend: str | None) -> None:
    ours = {"BACKEND": "django_redis_lock.cache.LocMemCache"}
    settings.CACHES = {"default": ours, "other": {} if backend is None else {"BACKEND": backend}}
    assert [*lock_caches()] == ["default"]


# -- servers ---------------------------------------------------------------------------------------


def host_of(client: Any) -> Any:
    return client.connection_pool.connection_kwargs["host"]


def test_locks_are_on_the_primary() -> None:
    cache = RedisCache("redis://primary/0,redis://replica/0", {})
    assert {host_of(cache._lock_client()) for _ in range(5)} == {"primary"}
    assert {host_of(cache.lock("a").redis) for _ in range(5)} == {"primary"}


#: By django-redis's client: whether one server decides about each key, and if values are computed
#: once.
CLIENTS = {
    "default.DefaultClient": (True, True),
    "herd.HerdClient": (True, False),
    "sharded.ShardClient": (False, False),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_which_clients_can_lock(client: str) -> None:
    options = {"OPTIONS": {"CLIENT_CLASS": f"django_redis.client.{client}"}}
    cache = RedisCache("redis://127.0.0.1:1/0", options)
    assert (cache._has_primary, cache.computes_once) == CLIENTS[client]
    if CLIENTS[client][0]:
        assert cache.lock("a").name
    else:
        with pytest.raises(ImproperlyConfigured, match="ShardClient cannot lock"):
            cache.lock("a")


def test_a_cache_that_computes_nothing_once_computes_for_each_caller(settings: Any) -> None:
    herd = {"OPTIONS": {"CLIENT_CLASS": "django_redis.client.HerdClient"}}
    ours = {"BACKEND": "django_redis_lock.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
    plain = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
    settings.CACHES = {"default": ours, "herd": {**ours, **herd}, "plain": plain}
    kinds = {alias: type(caches[alias]).__name__ for alias in caches}
    assert kinds == {"default": "RedisCache", "herd": "PlainCache", "plain": "PlainCache"}
    caches["plain"].set("stored", 1)
    assert ["stored" in caches["plain"], "missing" in caches["plain"]] == [True, False]


def test_a_cache_without_a_location_says_so() -> None:
    with pytest.raises(ImproperlyConfigured, match=NO_LOCATION[:30]):
        _ = RedisCache("", {}).client
    assert LocMemCache("", {}).client


@pytest.mark.parametrize(
    ("encoder", "word", "encoded"),
    [
        (("utf-8", "strict"), "ü", b"\xc3\xbc"),
        (("UTF8", "strict"), "ü", b"\xc3\xbc"),
        (("latin-1", "strict"), "ü", b"\xfc"),
        (("utf-8", "replace"), "\ud800", b"?"),
        (("utf-8", "strict"), 5, b"5"),
        (("utf-8", "strict"), b"x", b"x"),
    ],
)
def test_words_are_encoded_as_redis_py_does(
    encoder: tuple[str, str], word: Any, encoded: bytes
) -> None:
    name, errors = encoder
    theirs: Any = redis.Redis(encoding=name, encoding_errors=errors).get_encoder()
    assert encoding(theirs)(word) == theirs.encode(word) == encoded
    usual = encoder[0] != "latin-1" and encoder[1] == "strict"
    assert (encoding(theirs) == theirs.encode) is not usual


@pytest.mark.parametrize(
    ("time", "over"),
    [(0, True), (-1, True), (1, False), (0.5, False), (None, False), ("0", False)],
)
def test_which_lifetimes_are_over(time: Any, over: bool) -> None:
    assert _is_over(time) is over
    if isinstance(time, (int, float)):
        assert _is_over(timedelta(seconds=time)) is over


def failing(error: BaseException | None) -> Any:
    """As django-redis fails."""
    raise ConnectionInterrupted(connection=None) from error


#: An error on a connection of the pool, and whether it says that the server is away.
ERRORS: dict[str, tuple[BaseException | None, bool]] = {
    "no connection": (redis.ConnectionError("away"), True),
    "no reply": (redis.TimeoutError("silent"), True),
    "a refusal": (redis.ResponseError("BUSY Redis is busy"), False),
    "a wrong type": (redis.ResponseError("WRONGTYPE of the value"), False),
    "no connection left in the pool": (redis.ConnectionError("Too many connections"), False),
    "an error without a cause": (None, False),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_which_errors_of_the_pool_count_as_an_outage(kind: str) -> None:
    error, counts = ERRORS[kind]
    cache = RedisCache(
        f"redis://127.0.0.1:1/{200 + list(ERRORS).index(kind)}", {}
    )  # A breaker of its own.
    breaker: Any = cache._breaker
    for _ in range(3):  # At once: they cost nothing.
        with pytest.raises(ConnectionInterrupted):
            cache._with_breaker(failing, error)
        assert bool(breaker.failing) is counts
    assert cache._with_breaker(lambda: 5) == 5
    assert not breaker.failing


@pytest.mark.parametrize("kind", ERRORS)
def test_after_which_errors_the_query_for_the_leader_reads_the_value(kind: str) -> None:
    """Which may wait: the server is there."""
    with pytest.raises(ConnectionInterrupted) as failed:
        failing(ERRORS[kind][0])
    if kind in ("a refusal", "no connection left in the pool"):
        assert _missing_unless_outage(failed.value) is MISSING
        return
    with pytest.raises(ConnectionInterrupted):
        _missing_unless_outage(failed.value)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("read", ["_read_by_client", "_read_by_tool"])
def test_an_outage_is_counted_by_connections_of_our_own_or_else_by_the_reader(
    cache: Any, read: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Any] = []

    def noting(read: Any, *args: Any) -> Any:
        counted.append(read)
        return read(*args)

    monkeypatch.setattr(cache, "_direct", lambda: object() if direct else None)
    monkeypatch.setattr(cache, "_with_breaker", noting)
    monkeypatch.setattr(cache, "_get_by_tool", lambda *args: 5)
    monkeypatch.setattr(cache.client, "get", lambda *args: 5)
    assert getattr(cache, read)("a", None, None) == 5
    assert bool(counted) is not direct


#: Calls that get a client or None, and the method of django-redis's client that it reaches.
PASSED_ON: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "get": ("get", lambda c, by: c.get("a", client=by)),
    "get_many": ("get_many", lambda c, by: c.get_many(["a"], client=by)),
    "has_key": ("has_key", lambda c, by: c.has_key("a", client=by)),
    "ttl": ("ttl", lambda c, by: c.ttl("a", client=by)),
    "pttl": ("pttl", lambda c, by: c.pttl("a", client=by)),
    "set": ("set", lambda c, by: c.set("a", 1, client=by)),
    "add": ("set", lambda c, by: c.add("a", 1, client=by)),
    "set_many": ("set_many", lambda c, by: c.set_many({"a": 1}, client=by)),
    "delete": ("delete", lambda c, by: c.delete("a", client=by)),
    "delete_many": ("delete_many", lambda c, by: c.delete_many(["a"], client=by)),
    "incr": ("incr", lambda c, by: c.incr("a", client=by)),
    "decr": ("decr", lambda c, by: c.decr("a", client=by)),
    "touch": ("touch", lambda c, by: c.touch("a", client=by)),
    "expire": ("expire", lambda c, by: c.expire("a", 5, client=by)),
    "pexpire": ("pexpire", lambda c, by: c.pexpire("a", 5, client=by)),
    "expire_at": ("expire_at", lambda c, by: c.expire_at("a", 5, client=by)),
    "pexpire_at": ("pexpire_at", lambda c, by: c.pexpire_at("a", 5, client=by)),
}


@pytest.mark.parametrize("method", PASSED_ON)
def test_who_sends_a_command_of_the_cache(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of our own; the client that was given; what ends flights if a tool observes."""
    cache = RedisCache("redis://127.0.0.1:1/222", {})
    reached, call = PASSED_ON[method]
    sent: list[Any] = []

    def noting(*args: Any, **options: Any) -> None:
        sent[:] = [*args, *options.values()]

    monkeypatch.setattr(cache.client, reached, noting)
    call(cache, None)
    assert any(each is cache._own for each in sent)
    theirs = redis.Redis()
    call(cache, theirs)
    by = next(each for each in sent if isinstance(each, (redis.Redis, FlightEnding)))
    reads = method in ("get", "get_many", "has_key", "ttl", "pttl")
    assert (by if reads else by.client) is theirs
    monkeypatch.setattr(cache, "_direct", lambda: None)
    call(cache, None)
    assert any(isinstance(each, FlightEnding) for each in sent) is not reads


def test_while_an_outage_lasts_nothing_is_read_on_connections_of_the_pool() -> None:
    cache = RedisCache("redis://127.0.0.1:1/220", {})
    breaker: Any = cache._breaker
    for _ in range(2):
        breaker.failed(redis.TimeoutError("silent"), 100.0)
    with pytest.raises(ConnectionInterrupted) as refused:
        cache._with_breaker(lambda: pytest.fail("it is sent"))
    assert isinstance(refused.value.__cause__, CircuitOpen)


# -- get_or_set ------------------------------------------------------------------------------------


async def coroutine_function() -> int:
    return 5


class AsyncCallable:
    async def __call__(self) -> int:
        return 5


def marked() -> Any:
    return coroutine_function()


markcoroutinefunction(marked)

#: What gives the value of a task, and whether it is called in Django's thread.
GIVEN: dict[str, tuple[Any, bool]] = {
    "a function": (lambda: 5, True),
    "a class of the project's": (AsyncCallable, True),
    "a partial function": (functools.partial(int, 5), True),
    "a built-in type": (list, False),
    "a coroutine function": (coroutine_function, False),
    "a marked function": (marked, False),
    "an object that is awaited": (AsyncCallable(), False),
    "a value": (5, False),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_what_a_task_calls_in_djangos_thread(kind: str) -> None:
    function, in_thread = GIVEN[kind]
    made = awaitable(function)
    assert isinstance(made, DeferredCall) if in_thread else made is function


def test_the_options_of_a_usual_call_are_made_once_for_each_change_of_the_settings(
    cache: Any, settings: Any
) -> None:
    usual = cache._options(60, {})
    assert cache._options(30, {}) is usual
    assert cache._options(60, {"wait": 5.0}).wait == 5
    assert cache._options(60, {}) is usual
    settings.DJANGO_REDIS_LOCK = {"WAIT": 7, "STALE": 60}
    assert cache._options(60, {}).wait == 7
    assert cache._options(60, {}).stale == 60
    assert cache._options(None, {}).stale == 0  # It never ends.


@pytest.mark.parametrize("hangs", ["", "alone", "replaced"])
def test_a_thread_does_not_wait_without_a_limit_for_its_turn_to_read(
    hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one uses a new mutex, if none has made one."""
    monkeypatch.setattr(reading, "COLD_READ_TIMEOUT_SECONDS", 0.001)
    server: Any = type("Server", (), {})()
    with reading.cold_read(server):
        old = reading._cold_reads[server]
        assert old.locked()
        if hangs:
            if hangs == "replaced":
                reading._cold_reads[server] = other = threading.Lock()
                other.acquire()
            with reading.cold_read(server):
                assert reading._cold_reads.get(server) is None
    assert not old.locked()
    assert (reading._cold_reads.get(server) is old) is not bool(hangs)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The servers that were read in turn."""
    found: list[Any] = []

    @contextmanager
    def noting(server: Any) -> Iterator[None]:
        found.append(server)
        yield

    monkeypatch.setattr(reading, "cold_read", noting)
    return found


@pytest.mark.parametrize("group", [None, 7])
@pytest.mark.parametrize("is_crowd", [True, False])
@pytest.mark.parametrize("must_connect", [True, False])
@pytest.mark.parametrize("needed", [True, False])
def test_only_a_crowd_of_threads_reads_one_after_the_other(
    cache: Any,
    group: Any,
    is_crowd: bool,
    must_connect: bool,
    needed: bool,
    turns: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = SimpleNamespace(must_connect=lambda: must_connect)
    runner: Any = SimpleNamespace(server=server, group=group, read=lambda key: b"stored")
    flights: Any = [(server, b"k", group)] if is_crowd else []
    monkeypatch.setattr(reading, "in_flight", flights)
    read = drive(cache._read(runner, b"k", needed))
    assert read == (b"stored" if needed or is_crowd else None)
    in_turn = group is None and read is not None and (is_crowd or must_connect)
    assert len(turns) == in_turn


@pytest.mark.parametrize("is_crowd", [True, False])
@pytest.mark.parametrize("must_connect", [True, False, None])
def test_who_reads_first_waits_for_its_turn_if_it_must_connect(
    cache: Any,
    is_crowd: bool,
    must_connect: bool | None,
    turns: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None: on connections of the pool."""
    server: Any = SimpleNamespace(must_connect=lambda: must_connect)
    own: Any = None if must_connect is None else SimpleNamespace(client="own")
    path = reading.ReadPath((), lambda key, version, by: (key, version, by), own, True)
    monkeypatch.setattr(reading, "server_of", lambda client: server)
    monkeypatch.setattr(reading, "in_flight", {5: None})
    monkeypatch.setattr(cache, "_read_path", lambda: path)
    monkeypatch.setattr(cache, "_is_in_flight", lambda key, version: is_crowd)
    by = None if must_connect is None else server
    assert cache._read_or_join("a", 3) == ("a", 3, by)
    assert turns == [server] * bool(is_crowd or must_connect)


#: The milliseconds for which Redis keeps a value that may be stale for a second, and if it is.
LEFT = [(-1, False), (0, True), (1, True), (999, True), (1000, True), (1001, False)]


@pytest.mark.parametrize(("left", "stale"), LEFT)
def test_which_values_are_stale(
    cache: Any, left: int, stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored(*args: Any) -> Any:
        return [cache.client.encode("old"), left]
        yield

    monkeypatch.setattr(cache, "_read", stored)
    runner, chosen = cache._thread_runner(), cache._options(60, {"stale": 1.0})
    read = drive(cache._first_read_steps(runner, b"key", "key", None, chosen))
    assert (read.value, read.is_stale, read.unseen) == ("old", stale, False)

    def by_tool(backend: Any, runner: Any, steps: Any, *args: Any) -> Any:
        return (yield from steps), "what the tool returns"

    monkeypatch.setattr(cache, "_is_replaced", lambda method: True)
    monkeypatch.setattr(reading, "_observed", SimpleNamespace(get_in_steps=by_tool))
    read = drive(cache._first_read_steps(runner, b"key", "key", None, chosen))
    assert (read.value, read.is_stale) == ("old" if stale else "what the tool returns", stale)


#: What is done when the wait is over: by the way of a caller.
LATE: dict[str, tuple[Any, Any]] = {
    "compute": (5, {"a": 5}),
    "raise": (LockNotAcquired, LockNotAcquired),
    "default": (5, {}),
}


@pytest.mark.parametrize("on_wait_timeout", LATE)
def test_what_is_done_when_the_wait_for_another_caller_is_over(
    cache: Any, on_wait_timeout: Any
) -> None:
    cache._lock_client().set(flight_key(cache._encoded_key("a", None)), "another's")
    options: Any = {"wait": 0.01, "on_wait_timeout": on_wait_timeout}
    ways: list[Any] = [
        lambda: cache.get_or_set("a", 5, **options),
        lambda: cache.get_or_set_many(["a"], lambda keys: dict.fromkeys(keys, 5), **options),
    ]
    for get, outcome in zip(ways, LATE[on_wait_timeout], strict=True):
        if outcome is LockNotAcquired:
            with pytest.raises(LockNotAcquired, match="still computing"):
                get()
        else:
            assert get() == outcome
        cache.delete("a")
        cache._lock_client().set(flight_key(cache._encoded_key("a", None)), "another's")
    if on_wait_timeout == "default":
        assert cache.get_or_set("a", lambda: 5, **options) is None


def test_compute_takes_over_from_another_who_computes(cache: Any) -> None:
    """Whose result is not stored any more."""
    flight, client = flight_key(cache._encoded_key("a", None)), cache._lock_client()
    client.set(flight, "another's")
    leads = cache.compute("a", lambda: client.get(flight))
    assert leads not in (None, b"another's")
    assert not client.exists(flight)


#: The calls, and the reads that they are counted as: result, key, values.
READS: dict[str, tuple[Callable[[Any], Any], list[tuple[str, str, int]]]] = {
    "hit": (lambda c: c.get_or_set("there", 5), [("hit", "there", 1)]),
    "miss": (lambda c: c.get_or_set("new", 5), [("miss", "new", 1)]),
    "stale": (lambda c: c.get_or_set("old", 5, 60, stale=600), [("stale", "old", 1)]),
    "fresh": (lambda c: c.get_or_set("there", 5, 60, stale=600), [("hit", "there", 1)]),
    "hits": (lambda c: c.get_or_set_many(["there", "old"], dict.fromkeys), [("hit", "there", 2)]),
    "hits and misses": (
        lambda c: c.get_or_set_many(["there", "new", "newer", "there"], dict.fromkeys),
        [("miss", "there", 2), ("hit", "there", 1)],
    ),
    "nothing": (lambda c: c.get_or_set_many([], dict.fromkeys), []),
}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("options", [{}, {"group": "reports"}], ids=["", "group"])
def test_what_reads_are_counted_as(
    cache: Any, what: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, reads = READS[what]
    cache.set("there", 1, 3600)
    cache.set("old", 1, 60)
    cache.get_or_set("first", 1)  # With it, what counts begins to.
    counted: list[Any] = []
    heard: list[Any] = []
    # It is always 100 for what measures reads.
    for module in (get_or_set, reading):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(events, "count_read", lambda *args: counted.append(args))
    events.subscribe(heard.append, reads=True)
    try:
        call(WithOptions(cache, options))
    finally:
        events.unsubscribe(heard.append)
    group = options.get("group", "")
    assert counted == [(cache, key, group, result, values) for result, key, values in reads]
    assert [each for each in heard if isinstance(each, Read)] == [
        Read(cache, key, group, result, values, 100.0, 0.0) for result, key, values in reads
    ]


class WithOptions:
    """A cache whose methods get further options."""

    def __init__(self, cache: Any, options: dict[str, Any]) -> None:
        self._cache, self._options = cache, options

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self._cache, name), **self._options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_of_several_values_those_that_cannot_be_decoded_are_computed_again(
    cache: Any, asynchronous: bool
) -> None:
    cache.set("good", 1)
    cache._lock_client().set(cache.make_key("bad"), b"no pickle")
    wanted: list[Any] = []

    def compute(keys: list[str]) -> dict[str, int]:
        wanted.extend(keys)
        return dict.fromkeys(keys, 5)

    names = ["none", "bad", "good"]
    if asynchronous:
        got = asyncio.run(within(lambda: cache.aget_or_set_many(names, compute)))
    else:
        got = cache.get_or_set_many(names, compute)
    assert got == {"none": 5, "bad": 5, "good": 1}
    assert sorted(wanted) == ["bad", "none"]
    cache._lock_client().set(cache.make_key("bad"), b"no pickle")
    assert undecodable.read_others(cache, [*names, "other"], None) == ({"none": 5, "good": 1}, True)
    assert undecodable.read_others(cache, ["good", "other"], None) == ({"good": 1}, False)


async def within(call: Callable[[], Any]) -> Any:
    return await call()


def ignoring(client: Any) -> Any:
    try:
        return client.get("k")
    except redis.ConnectionError:
        return "default"


def wrapping(client: Any) -> Any:
    try:
        return client.get("k")
    except redis.ConnectionError:
        raise ZeroDivisionError from None


AWAY = redis.ConnectionError("away")
#: How a tool's method reads, if the server is away, and the results of both, or what is raised.
OBSERVED: list[tuple[Callable[[Any], Any], bool, Any]] = [
    (ignoring, False, ((b"stored", -1), b"stored")),
    (ignoring, True, redis.ConnectionError),
    (wrapping, True, redis.ConnectionError),
    (lambda client: fail(), False, ZeroDivisionError),
    (lambda client: fail(), True, ZeroDivisionError),
]


@pytest.mark.parametrize(("method", "away", "outcome"), OBSERVED)
def test_an_outage_is_raised_whatever_the_tool_makes_of_it(
    method: Callable[[Any], Any], away: bool, outcome: Any
) -> None:
    def read(key: str) -> Any:
        if away:
            raise AWAY
        return b"stored", -1

    if isinstance(outcome, type):
        with pytest.raises(outcome):
            observed.observed(method, read)
    else:
        assert observed.observed(method, read) == outcome


@pytest.mark.parametrize("has_plain_keys", [True, False])
def test_where_a_tool_sees_the_read_of_a_task(
    cache: Any, has_plain_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Django's thread if the keys are made there."""
    threads: list[int] = []

    def get(key: str, default: Any, version: Any, client: Any) -> Any:
        threads.append(threading.get_ident())
        return default if client.get(key) is None else "seen"

    def stored() -> Any:
        return [b"stored", -1]
        yield

    monkeypatch.setattr(cache, "get", get, raising=False)
    monkeypatch.setattr(cache, "_has_plain_keys", has_plain_keys)
    steps = observed.get_in_steps(cache, object(), stored(), "k", None, MISSING)
    assert asyncio.run(within(lambda: adrive(steps))) == ([b"stored", -1], "seen")
    assert (threads == [threading.get_ident()]) is has_plain_keys


@pytest.mark.parametrize(
    ("timeout", "how"),
    [(None, ("set", None)), (0.001, ("set", 1)), (60, ("set", 60_000)), (0, "delete")],
)
def test_how_a_task_stores_a_value(cache: Any, timeout: Any, how: Any) -> None:
    done: list[Any] = []

    async def set_(name: str, value: Any, px: int | None = None, **options: Any) -> int:
        done.append(("set", px))
        return 1

    async def delete(*names: str) -> int:
        done.append("delete")
        return 1

    async def send(batch: Any) -> None:
        done.append(batch)

    stub: Any = SimpleNamespace(set=set_, delete=delete, send=send)
    assert asyncio.run(tasks.set(cache, stub, "a", 5, timeout))
    assert done == [how]
    batch = Batch(redis.Redis())
    stub.batch = lambda: batch
    assert asyncio.run(tasks.set_many(cache, stub, {"a": 5}, timeout)) == []
    assert done == [how, batch]
    key = cache.client.make_key("a").encode()
    written = Delete((key,)) if how == "delete" else Set(key, b"5", how[1], b"")
    assert batch.writes == [written]


def test_a_computation_that_changes_how_long_its_value_is_kept_has_written_it(cache: Any) -> None:
    key = cache.client.make_key("a").encode()
    written = OwnWrites()

    async def touch() -> None:
        client = asyncio_client(cache._lock_client())
        with computing(None, [key], written):
            await tasks.call(cache, client, "touch", "a", 60)

    asyncio.run(touch())
    assert written.own_writes == {key: "written"}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_number_is_not_counted_twice(
    known: bool, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not know the script has not run it; one whose reply is lost may have."""
    sent: list[Any] = []
    packed: list[Any] = []

    def exchange(client: Any, command: Any, may_run_twice: bool = True) -> Any:
        sent.append(may_run_twice)
        if len(sent) == 1 and not known:
            raise NoScriptError
        return 5

    async def aexchange(*args: Any, **options: Any) -> Any:
        return exchange(*args, **options)

    def pack(call: Any, known: bool = True) -> bytes:
        packed.append(known)
        return b"EVAL"

    for module, name, double in (
        *((commands, "exchange", exchange), (tasks, "aexchange", aexchange)),
        *((commands, "pack", pack), (tasks, "pack", pack)),
    ):
        monkeypatch.setattr(module, name, double)
    args = "return 1", 1, "a", 5
    if asynchronous:
        of_task = tasks.TaskCommands(redis.asyncio.Redis())
        assert asyncio.run(within(lambda: of_task.eval(*args))) == 5
    else:
        assert OwnConnections(redis.Redis()).eval(*args) == 5
    assert sent == ([False] if known else [False, False])
    assert packed == ([True] if known else [True, False])


def test_a_tool_sees_how_a_task_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    async def evaluate(script: str, number_of_keys: int, *args: Any) -> int:
        sent.append((number_of_keys, args[:2]))
        return 5

    client = redis.asyncio.Redis()
    monkeypatch.setattr(tasks, "is_observed", lambda of: of is client)
    monkeypatch.setattr(client, "eval", evaluate)
    of_task = tasks.TaskCommands(client)
    assert asyncio.run(within(lambda: of_task.eval("return 1", 1, "a", 7))) == 5
    assert sent == [(2, (b"a", flight_key(b"a")))]


@pytest.mark.parametrize("observed", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_tool_sees_what_a_task_writes(
    observed: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    async def evalsha(sha: str, *parts: Any) -> int:
        sent.append("evalsha")
        if not known:
            raise NoScriptError
        return 5

    async def evaluate(*parts: Any) -> int:
        sent.append("eval")
        return 5

    async def arun(of: Any, call: Any) -> Any:
        sent.append("unseen")
        return SimpleNamespace(value=5)

    client = redis.asyncio.Redis()
    monkeypatch.setattr(tasks, "is_observed", lambda of: of is client and observed)
    monkeypatch.setattr(tasks, "arun", arun)
    monkeypatch.setattr(client, "evalsha", evalsha)
    monkeypatch.setattr(client, "eval", evaluate)
    of_task = tasks.TaskCommands(client)
    assert asyncio.run(within(lambda: of_task._run(SET.call({})))) == 5
    assert sent == (["unseen"] if not observed else ["evalsha", *(() if known else ["eval"])])


@pytest.mark.parametrize("made", [5, [5]])
@pytest.mark.parametrize("awaited", [True, False])
def test_what_a_refresh_in_djangos_thread_returns(cache: Any, made: Any, awaited: bool) -> None:
    """A function that is no coroutine function may return an awaitable."""

    async def later() -> Any:
        return made

    refresh = context.Refresh(cache, "a", None, cache._encoded_key("a", None))
    value = refresh._in_djangos_thread(later if awaited else lambda: made)()
    assert (asyncio.run(within(lambda: value)) if awaited else value) == made


def test_a_lock_whose_name_cannot_be_made_leaves_nothing_to_await() -> None:
    class Kind:
        async def acquire(self) -> bool:
            return True

    lock: Any = context._named_later(Kind)()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        lock._make, lock._keys = object(), fail
        with pytest.raises(ZeroDivisionError):
            asyncio.run(within(lock.acquire))
        gc.collect()
    assert not warned
    lock._make = None
    assert asyncio.run(within(lock.acquire))


def fail() -> Any:
    raise ZeroDivisionError


def test_the_log_of_what_cannot_be_decoded_remembers_few_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(undecodable, "MAX_LOGGED_GROUPS", 3)
    for number in range(20):
        undecodable.log("key", f"group {number}", ValueError())
        assert f"group {number}" in undecodable._logged_at
    assert len(undecodable._logged_at) <= 4


def test_no_key_is_left_out_by_set_many(cache: Any) -> None:
    assert cache.set_many({"a": 1, "b": 2}) == []
    assert cache.set_many({}) == []
    assert cache.get_many(["a", "b"]) == {"a": 1, "b": 2}


def test_a_cache_in_memory_takes_no_client(cache: Any) -> None:
    client = redis.Redis()
    calls: list[Callable[[], Any]] = [
        lambda: cache.lock("a", client=client),
        lambda: cache.set("a", 1, client=client),
        lambda: cache.keys("*", client=client),
        lambda: cache.delete_pattern("*", client=client),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="client needs Redis"):
            call()


class OfTenant(LocMemCache):
    @property
    def key_prefix(self) -> str:
        return "tenant"

    @key_prefix.setter
    def key_prefix(self, prefix: str) -> None: ...


class OwnKeys(LocMemCache):
    def make_key(self, key: Any, version: Any = None) -> Any:
        return super().make_key(key, version)


class OfVersion(OfTenant):
    key_prefix: Any = "site"

    @property
    def version(self) -> int:
        return 7

    @version.setter
    def version(self, version: int) -> None: ...


@pytest.mark.parametrize(
    ("kind", "options", "plain"),
    [
        (LocMemCache, {}, True),
        (LocMemCache, {"VERSION": "v2", "KEY_PREFIX": "site"}, True),
        (LocMemCache, {"KEY_FUNCTION": reversed_key}, False),
        (LocMemCache, {"VERSION": 1.5}, False),
        (OfTenant, {}, False),
        (OfVersion, {}, False),
        (OwnKeys, {}, False),
    ],
)
def test_where_every_thread_makes_the_same_keys(kind: Any, options: Any, plain: bool) -> None:
    assert kind("plain keys", options)._has_plain_keys is plain


@pytest.mark.parametrize("misses", [0, 10])
@pytest.mark.parametrize("options", [{}, {"stale": 60}], ids=["plain", "stale"])
@pytest.mark.parametrize("way", ["thread", "task"])
def test_who_has_read_no_value_leads_without_a_script(
    cache: Any, way: str, options: Any, misses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    take = Leader._take_unseen

    def noting(leader: Any) -> Any:
        taken.append(leader)
        return take(leader)

    monkeypatch.setattr(Leader, "_take_unseen", noting)
    cache._misses_in_a_row = misses
    assert (by_thread if way == "thread" else by_task)(cache, **options) == "new"
    assert len(taken) == 1
    assert cache._misses_in_a_row == misses + 1


@pytest.mark.parametrize("observed", [True, False])
def test_the_writes_of_a_task_are_sent_by_the_client_that_a_tool_observes(
    observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = redis.asyncio.Redis()
    monkeypatch.setattr(tasks, "is_observed", lambda of: of is client and observed)
    commands = tasks.TaskCommands(client)
    assert isinstance(commands.batch(), FlightEnding if observed else Batch)
    sent: list[str] = []

    async def execute() -> None:
        sent.append("all")

    batch: Any = SimpleNamespace(execute=execute)
    asyncio.run(commands.send(batch))
    assert sent == ["all"]


class Level(int):
    def __str__(self) -> str:
        return "high"


@pytest.mark.parametrize(("value", "stored"), [(Level(5), 5), (5, 5), (True, None), ("5", None)])
def test_a_number_is_stored_as_what_it_counts(cache: Any, value: Any, stored: Any) -> None:
    encoded = cache.client.encode(value)
    if stored is not None:
        assert (encoded, type(encoded)) == (stored, int)
    assert cache.client.decode(encoded) == value


def test_how_to_read_is_chosen_again_when_a_tool_replaces_the_method(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache._read_path()
    assert cache._read_path() is path
    monkeypatch.setattr(cache, "get", lambda *args, **options: None, raising=False)
    replaced = cache._read_path()
    assert (path.read, replaced.read) == (cache._read_by_client, cache._read_by_tool)
    assert (path.is_direct, replaced.is_direct) == (False, False)
    monkeypatch.undo()
    assert cache._read_path().read == cache._read_by_client


SET, ADD = Set(b"k", b"5", None, b""), Set(b"k", b"5", None, b"NX")
#: A write, whether its flight was there to be ended, and the scripts that are sent.
ENDED: list[tuple[Any, int, list[Any]]] = [
    (SET, 1, [END_SEEN]),
    (SET, 0, [END_SEEN, WRITE]),
    (ADD, 1, [END_SEEN]),
    (ADD, 0, [END_SEEN]),
    (Delete((b"k",)), 1, [END_SEEN]),
    (Delete((b"k",)), 0, [END_SEEN, DELETE]),
]


@pytest.mark.parametrize(("write", "ended", "scripts"), ENDED)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_write_whose_flight_has_just_ended_by_itself_is_repeated(
    write: Any, ended: int, scripts: Any, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader may have stored an older value in between."""
    sent: list[Any] = []

    def run_all(client: Any, calls: Any) -> Any:
        sent.extend(call.script for call in calls)
        return [ended for _ in calls]

    async def arun_all(client: Any, calls: Any) -> Any:
        return run_all(client, calls)

    monkeypatch.setattr(commands, "run_all", run_all)
    monkeypatch.setattr(tasks, "arun_all", arun_all)
    seen = Seen([write], [b"OK"], b"token of the leader", {})
    if asynchronous:
        asyncio.run(tasks.TaskCommands(redis.asyncio.Redis())._end(seen))
    else:
        OwnConnections(redis.Redis())._end(seen)
    assert sent == scripts


#: What is done after a commit, and what becomes of the values a, b and c.
ON_COMMIT: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "delete": ("delete", "a", {}, "-vv"),
    "delete_many": ("delete_many", ["a", "b"], {}, "--v"),
    "mark_stale": ("mark_stale", "a", {"stale": 60}, "svv"),
    "mark_stale_many": ("mark_stale_many", ["a", "b"], {"stale": 60}, "ssv"),
}


@pytest.mark.parametrize("what", ON_COMMIT)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("version", [1, 7])
def test_what_is_done_after_a_commit(
    cache: Any, what: str, asynchronous: bool, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, keys, options, after = ON_COMMIT[what]
    cache.set_many(dict.fromkeys("abc", "old"), 3600, version=version)
    methods: Any = cache.on_commit()
    monkeypatch.setattr(methods, "call", lambda function: function())
    if asynchronous:
        asyncio.run(getattr(methods, f"a{method}")(keys, version, **options))
    else:
        getattr(methods, method)(keys, version, **options)
    left = [cache.pttl(key, version=version) for key in "abc"]
    assert "".join("v" if ms > 3_000_000 else "s" if ms else "-" for ms in left) == after
    if "stale" in method:
        with pytest.raises(ValueError, match="stale"):
            getattr(methods, method)(keys, version, stale=-1)


#: What a task does, in terms of the methods for threads.
BY_TASK: dict[str, Callable[[Any], Any]] = {
    "get": lambda c: [c.get("a"), c.get("none"), c.get("none", 5)],
    "get_many": lambda c: [c.get_many(["a", "b", "none"]), c.get_many([])],
    "has_key": lambda c: [c.has_key("a"), c.has_key("none")],
    "set": lambda c: [c.set("a", 1), c.set("new", "x", 60), c.set("b", 1, 0), c.set("c", 1, -1)],
    "set, for a part of a second": lambda c: c.set("a", 1, 0.5),
    "add": lambda c: [c.add("a", 1), c.add("new", 1), c.add("newer", 1, 0)],
    "set_many": lambda c: c.set_many({}),  # More is a transaction, which no memory has.
    "touch": lambda c: [c.touch("a", 60), c.touch("none", 60), c.touch("b", 0), c.touch("c", None)],
    "delete": lambda c: [c.delete("a"), c.delete("none")],
    "delete_many": lambda c: [c.delete_many(["a", "none"]), c.delete_many([])],
    "incr": lambda c: [c.incr("five"), c.incr("five", 7), c.decr("five", 2)],
    "incr, for a time": lambda c: [c.touch("five", 60), c.incr("five")],
    "incr beyond": lambda c: [c.set("five", 2**63 - 1, 60), c.incr("five", 2)],
    "incr beyond, for ever": lambda c: [c.set("five", 2**63 - 1, None), c.incr("five", 2)],
    "incr_version": lambda c: [c.incr_version("a"), c.get("a"), c.get("a", version=2)],
    "incr_version, for ever": lambda c: [c.set("a", 1, None), c.incr_version("a", 3)],
    "incr of nothing": lambda c: attempt(c.incr, "none"),
    "incr_version of nothing": lambda c: attempt(c.incr_version, "none"),
}


def attempt(method: Any, *args: Any) -> Any:
    try:
        return method(*args)
    except ValueError as error:
        return type(error)


class Awaited:
    """Does by tasks, on the connection of their loop, what a cache's methods do for threads."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            client = asyncio_client(self._cache._lock_client())
            return await tasks.call(self._cache, client, name, *args, **options)

        return lambda *args, **options: asyncio.run(call(*args, **options))


@pytest.mark.parametrize("what", BY_TASK)
@pytest.mark.parametrize("observed", [False, True])
def test_a_task_gets_what_a_thread_gets(
    cache: Any, what: str, observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for by in (cache, Awaited(cache)):
        cache.clear()
        cache.set_many({"a": "text", "b": 2, "c": [3], "five": 5}, 3600)
        if by is not cache:
            monkeypatch.setattr(tasks, "is_observed", lambda client: observed)
        made = BY_TASK[what](by)
        keys = sorted(cache._lock_client().keys("*"))
        left = [-(-cache._lock_client().pttl(key) // 10_000) for key in keys]
        outcomes.append((made, keys, [cache.get(key) for key in "abc"], cache.get("five"), left))
    assert outcomes[1] == outcomes[0]


def test_what_is_stored_of_a_value_and_for_how_long(cache: Any) -> None:
    options = {"stale": 2.0, "error_ttl": 3.0, "group": "reports"}
    producer = cache._producer("report", 5, 60, cache._options(60, options))
    assert producer.compute() == 5
    assert producer[3](5) == 62_000
    assert producer[4:] == (2000, 3000, "report", "reports", cache)
    assert cache._producer("report", list, 60, cache._options(60, {}))[4:7] == (0, 0, "report")


def by_thread(cache: Any, **options: Any) -> Any:
    return cache.get_or_set("report", "new", 60, **options)


def by_task(cache: Any, **options: Any) -> Any:
    async def get() -> Any:
        return await cache.aget_or_set("report", "new", 60, **options)

    return asyncio.run(get())


@pytest.mark.parametrize(
    "wrong", [{"timeout": "60"}, {"timeout": timedelta(1)}, {"wait": -1}, {"stales": 5}]
)
def test_what_is_wrong_is_refused_although_there_is_a_value(cache: Any, wrong: Any) -> None:
    cache.set("report", "there")
    with pytest.raises((TypeError, ValueError)):
        cache.get_or_set("report", "new", **wrong)


@pytest.mark.parametrize("misses", [0, 2, 3, 10])
@pytest.mark.parametrize("options", [{}, {"stale": 60}], ids=["plain", "stale"])
@pytest.mark.parametrize("way", [by_thread, by_task])
def test_a_hit_ends_the_misses_in_a_row(
    cache: Any, way: Callable[..., Any], options: Any, misses: int
) -> None:
    """Read first, or by the query for the leader."""
    cache.set("report", "there", 3600)
    cache._misses_in_a_row = misses
    assert way(cache, **options) == "there"
    assert cache._misses_in_a_row == 0
