"""Keys are made where the caller's state is: each asynchronous method uses the key that its twin
for threads uses in Django's thread, where synchronous middleware has run (invariant U1)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from asgiref.local import Local
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import AnonymousUser
from django.core.cache import caches
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection
from django.test import override_settings
from django.utils.functional import SimpleLazyObject, lazy
from django_redis.client import DefaultClient

from django_redis_lock import cached, locked
from django_redis_lock.cache import RedisCache, lock_cache
from django_redis_lock.locking import hold
from django_redis_lock.singleflight import flight
from tests.redis_server import RedisServer

pytestmark = pytest.mark.invariant("U1")

# -- where a project keeps its tenant --------------------------------------------------------------

in_thread = threading.local()
in_context: ContextVar[str] = ContextVar("tenant", default="public")
in_local = Local()

STATES: dict[str, tuple[Callable[[], str], Callable[[str], Any]]] = {
    "threading.local": (
        lambda: getattr(in_thread, "tenant", "public"),
        lambda tenant: setattr(in_thread, "tenant", tenant),
    ),
    "connection": (
        lambda: getattr(connection, "schema_name", "public"),
        lambda tenant: setattr(connection, "schema_name", tenant),
    ),
    "contextvar": (in_context.get, in_context.set),
    "asgiref.Local": (
        lambda: getattr(in_local, "tenant", "public"),
        lambda tenant: setattr(in_local, "tenant", tenant),
    ),
}
state = "threading.local"


def tenant() -> str:
    return STATES[state][0]()


def enter(name: str) -> None:
    STATES[state][1](name)


@contextmanager
def tenants_in(kind: str) -> Iterator[None]:
    global state
    state = kind
    try:
        yield
    finally:
        enter("public")
        state = "threading.local"


# -- what makes its keys of it ---------------------------------------------------------------------


def key_function(key: str, prefix: str, version: Any) -> str:
    return f"{tenant()}:{prefix}:{version}:{key}"


class TenantClient(DefaultClient):
    def make_key(self, key: Any, version: Any = None, prefix: Any = None) -> Any:
        return super().make_key(key, version, prefix or tenant())


class PrefixCache(RedisCache):
    key_prefix: Any = property(lambda self: tenant(), lambda self, value: None)


class VersionCache(RedisCache):
    version: Any = property(lambda self: tenant(), lambda self, value: None)


class FunctionCache(RedisCache):
    """As ``KEY_FUNCTION``, set later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.key_func = key_function


class ClientCache(RedisCache):
    """Its CLIENT_CLASS makes the keys."""


HERE = "tests.integration.cache.test_where_keys_are_made"
OURS = "django_redis_lock.cache"
KEYS: dict[str, dict[str, Any]] = {
    "KEY_FUNCTION": {"KEY_FUNCTION": f"{HERE}.key_function"},
    "lazy KEY_PREFIX": {"KEY_PREFIX": lazy(tenant, str)()},
    "CLIENT_CLASS": {
        "BACKEND": f"{HERE}.ClientCache",
        "OPTIONS": {"CLIENT_CLASS": f"{HERE}.TenantClient"},
    },
    "key_prefix of a subclass": {"BACKEND": f"{HERE}.PrefixCache"},
    "version of a subclass": {"BACKEND": f"{HERE}.VersionCache"},
    "key_func of a subclass": {"BACKEND": f"{HERE}.FunctionCache"},
}
#: In memory, those that are no class of their own: what these classes do, the backends share.
WHERE = [
    *(("redis", kind) for kind in KEYS),
    *(("memory", kind) for kind in ("KEY_FUNCTION", "lazy KEY_PREFIX")),
]


@pytest.fixture(params=["redis", "memory"])
def config(
    request: pytest.FixtureRequest, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    # What the keeper writes down of a lock that is held for long is not compared.
    monkeypatch.setattr(hold, "DESCRIBE_AFTER", 1000.0)
    monkeypatch.setattr(flight, "DESCRIBE_AFTER_SECONDS", 1000.0)
    if request.param == "redis":
        return {"BACKEND": f"{OURS}.RedisCache", "LOCATION": redis_server.url}
    return {"BACKEND": f"{OURS}.LocMemCache", "LOCATION": request.node.name}


def configured(config: dict[str, Any], kind: str) -> Any:
    return override_settings(CACHES={"default": {**config, **KEYS[kind]}})


# -- the methods, each for threads and for tasks ---------------------------------------------------


async def compute_async() -> str:
    return "computed"


def of_lock(do: str, *args: Any, **options: Any) -> tuple[Any, Any]:
    def sync(cache: Any) -> Any:
        lock = cache.lock(*args, **options)
        lock.acquire()
        found = names(cache), getattr(lock, do)()
        if do != "release":
            lock.release()
        return *found, lock.name

    async def task(cache: Any) -> Any:
        lock = cache.alock(*args, **options)
        await lock.acquire()
        found = await sync_to_async(names)(cache), await getattr(lock, do)()
        if do != "release":
            await lock.release()
        return *found, lock.name

    return sync, task


def taken(cache: Any) -> Any:
    with cache.lock("job"):
        return cache.lock("job", blocking=False).acquire()


async def ataken(cache: Any) -> Any:
    async with cache.alock("job"):
        return await cache.alock("job", blocking=False).acquire()


def twins(name: str, *args: Any, **options: Any) -> tuple[Any, Any]:
    """A method of Django's, and its asynchronous twin."""

    async def task(cache: Any) -> Any:
        return await getattr(cache, f"a{name}")(*args, **options)

    return lambda cache: getattr(cache, name)(*args, **options), task


@cached("of-{n}", timeout=60)
def for_threads(n: int) -> str:
    return "computed"


@cached("of-{n}", timeout=60)
async def for_tasks(n: int) -> str:
    return "computed"


@cached(key=lambda: f"of {tenant()}", timeout=60)
def by_function() -> str:
    return "computed"


@cached(key=lambda: f"of {tenant()}", timeout=60)
async def aby_function() -> str:
    return "computed"


@locked("job-{n}")
def alone(n: int) -> Any:
    return names(lock_cache("default"))


@locked("job-{n}")
async def aalone(n: int) -> Any:
    return await sync_to_async(names)(lock_cache("default"))


@locked(key=lambda: f"job of {tenant()}")
def alone_by_function() -> Any:
    return names(lock_cache("default"))


@locked(key=lambda: f"job of {tenant()}")
async def aalone_by_function() -> Any:
    return await sync_to_async(names)(lock_cache("default"))


def in_block(key: Any) -> tuple[Any, Any]:
    def sync(cache: Any) -> Any:
        with locked(key=key):
            return names(cache)

    async def task(cache: Any) -> Any:
        async with locked(key=key):
            return await sync_to_async(names)(cache)

    return sync, task


def calls(function: Any, coroutine_function: Any, *args: Any) -> tuple[Any, Any]:
    async def task(cache: Any) -> Any:
        return await coroutine_function(*args)

    return lambda cache: function(*args), task


METHODS: dict[str, tuple[Any, Any]] = {
    "get": twins("get", "report"),
    "get, missing": twins("get", "missing", "default"),
    "get_many": twins("get_many", ["report", "other"]),
    "has_key": twins("has_key", "only-public"),
    "set": twins("set", "report", "new", 60),
    "set with a version": twins("set", "report", "new", 60, version=7),
    "add": twins("add", "only-public", "new", 60),
    "set_many": twins("set_many", {"report": "new", "other": "newer"}, 60),
    "touch": twins("touch", "only-public", 60),
    "delete": twins("delete", "report"),
    "delete_many": twins("delete_many", ["report", "other"]),
    "incr": twins("incr", "number"),
    "decr": twins("decr", "number"),
    "incr_version": twins("incr_version", "only-tenant", version=1),
    "decr_version": twins("decr_version", "only-tenant", version=1),
    "get_or_set": twins("get_or_set", "missing", lambda: "computed", 60),
    "get_or_set, a hit": twins("get_or_set", "report", lambda: "computed", 60),
    "get_or_set with stale": twins("get_or_set", "missing", lambda: "computed", 60, stale=60),
    "get_or_set of a function that reads": twins("get_or_set", "missing", tenant, 60),
    "get_or_set_many": twins(
        "get_or_set_many", ["report", "missing"], lambda keys: dict.fromkeys(keys, "computed"), 60
    ),
    "compute": twins("compute", "report", lambda: "computed", 60),
    "mark_stale": twins("mark_stale", "only-public", stale=30),
    "mark_stale_many": twins("mark_stale_many", ["only-public", "report"], stale=30),
    "lock": of_lock("release", "job"),
    "lock of a version": of_lock("owned", "job", version=3),
    "lock with a limit": of_lock("owned", "job", limit=2),
    "lock of several names": of_lock("owned", ["job", "other"]),
    "lock with a fallback": of_lock("owned", "job", on_redis_down="run"),
    "lock.locked": of_lock("locked", "job"),
    "a lock that is taken": (taken, ataken),
    "cached": calls(for_threads, for_tasks, 1),
    "cached.refresh": calls(for_threads.refresh, for_tasks.refresh, 1),
    "cached.invalidate": calls(for_threads.invalidate, for_tasks.invalidate, 2),
    "cached by a function": calls(by_function, aby_function),
    "locked": calls(alone, aalone, 1),
    "locked by a function": calls(alone_by_function, aalone_by_function),
    "with locked": in_block("job"),
    "with locked by a function": in_block(lambda: f"job of {tenant()}"),
}


def names(cache: Any) -> set[bytes]:
    """The keys that are there. Not those of a computation or a waiter, which have random ends; of
    a lock that is held for half a second: a description, then events; of the database, such as
    figures, which come in between."""
    client = cache._lock_client()
    others = (b":done:", b":reply", b"django_redis_lock:", b"}:owner", b":events")
    return {key for key in client.keys("*") if not any(each in key for each in others)}


def contents(cache: Any) -> dict[bytes, Any]:
    """The values that are there, and whether each ends."""
    client = cache._lock_client()
    found = {}
    for key in names(cache):
        if b"fence" not in key:
            with suppress(redis.ResponseError):  # It is no value.
                found[key] = client.get(key), client.pttl(key) > 0
    return found


def seed(cache: Any) -> None:
    cache._lock_client().flushdb()
    for name in ("public", "a"):
        enter(name)
        cache.set_many({"report": f"of {name}", "other": f"other of {name}", "number": 5})
        cache.set("of-%(int)2", f"of {name}")
    cache.set("only-tenant", "a")
    enter("public")
    cache.set("only-public", "public")


def outcome(method: Callable[[Any], Any]) -> Any:
    try:
        return method(caches["default"])
    except (ValueError, redis.RedisError) as error:
        return type(error)


async def aoutcome(method: Callable[[Any], Any]) -> Any:
    try:
        return await method(caches["default"])
    except (ValueError, redis.RedisError) as error:
        return type(error)


def after_middleware(do: Any, *args: Any) -> Any:
    enter("a")
    try:
        return do(*args)
    finally:
        enter("public")


@pytest.mark.sample(11)
@pytest.mark.parametrize(("config", "kind"), WHERE, indirect=["config"])
def test_tasks_use_the_keys_of_threads(config: dict[str, Any], kind: str) -> None:
    """The event loop runs in this thread, and Django's is another one, as under ASGI."""

    async def request(method: Any) -> Any:
        await sync_to_async(enter)("a")
        try:
            result = await aoutcome(method)
            return result, await sync_to_async(contents)(caches["default"])
        finally:
            await sync_to_async(enter)("public")

    with configured(config, kind):
        different = {}
        for name, (for_thread, for_task) in METHODS.items():
            seed(caches["default"])
            enter("a")
            wanted = outcome(for_thread), contents(caches["default"])
            seed(caches["default"])
            got = asyncio.run(request(for_task))
            if got != wanted:
                different[name] = (got, wanted)
        assert not different


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", STATES)
def test_wherever_the_tenant_is_kept(config: dict[str, Any], kind: str) -> None:
    """A task in a view for which a thread waits, as under WSGI; and one in the event loop of ASGI,
    of what synchronous middleware has set before it."""
    with tenants_in(kind), configured(config, "KEY_FUNCTION"):
        different = {}
        for name in ("get", "get_or_set", "set", "lock", "cached by a function", "locked"):
            for_thread, for_task = METHODS[name]

            async def as_asgi(for_task: Any = for_task) -> Any:
                def middleware() -> Any:
                    return after_middleware(async_to_sync(aoutcome), for_task)

                return await sync_to_async(middleware)()

            results = {}
            for way, run in {
                "thread": lambda do=for_thread: after_middleware(outcome, do),
                "WSGI": lambda do=for_task: after_middleware(async_to_sync(aoutcome), do),
                "ASGI": lambda do=as_asgi: asyncio.run(do()),
            }.items():
                seed(caches["default"])
                results[way] = run(), contents(caches["default"])
            if not results["thread"] == results["WSGI"] == results["ASGI"]:
                different[name] = results
        assert not different


def test_the_key_function_never_runs_in_the_event_loop(config: dict[str, Any]) -> None:
    """It may query the database, which Django refuses there."""
    threads = set()

    def slow_key(key: str, prefix: str, version: int) -> str:
        threads.add(threading.get_ident())
        return f"slow:{version}:{key}"

    async def all_methods() -> int:
        for name, (_, for_task) in METHODS.items():
            if "by a function" not in name:
                await aoutcome(for_task)
        threads.discard(await sync_to_async(threading.get_ident)())
        return threading.get_ident()

    with override_settings(CACHES={"default": {**config, "KEY_FUNCTION": slow_key}}):
        asyncio.run(all_methods())
    assert not threads


def test_a_key_that_needs_the_database(config: dict[str, Any]) -> None:
    """``request.user`` is loaded when it is first used."""

    def load() -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return SimpleNamespace(pk=7, user=AnonymousUser())
        raise SynchronousOnlyOperation

    @cached("of-{request.user.pk}")
    async def report(request: Any) -> int:
        return int(request.user.pk)

    @locked("job-{request.user.pk}")
    async def job(request: Any) -> set[bytes]:
        return await sync_to_async(names)(lock_cache("default"))

    async def both() -> None:
        assert await report(SimpleNamespace(user=SimpleLazyObject(load))) == 7
        found = await job(SimpleNamespace(user=SimpleLazyObject(load)))
        assert any(b"job-7" in key for key in found)

    with override_settings(CACHES={"default": config}):
        asyncio.run(both())


def test_plain_keys_are_made_in_the_event_loop(config: dict[str, Any]) -> None:
    """Django's key function costs no change of threads."""

    async def unhindered() -> Any:
        busy, begun = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def block() -> None:
            loop.call_soon_threadsafe(begun.set)
            busy.wait(30)

        cache: Any = caches["default"]
        await cache.aset("report", "there")  # In Django's thread, where it is a cache in memory.
        blocking = asyncio.create_task(sync_to_async(block)())
        await begun.wait()
        try:
            assert await cache.aget_or_set("report", compute_async) == "there"
            assert await cache.aget_or_set("missing", compute_async) == "computed"
            async with cache.alock("job") as lock:
                assert not blocking.done()
                return lock.name
        finally:
            busy.set()
            await blocking

    with override_settings(CACHES={"default": config}):
        assert asyncio.run(unhindered()) == ":lock:1:job"
