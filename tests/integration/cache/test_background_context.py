"""What the user's code sees of the caller's state, wherever it runs (the table in
``docs/tenants.md``), and that the background computes nothing for the wrong tenant (U1)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from asgiref.local import Local
from asgiref.sync import async_to_sync, sync_to_async
from django.core.cache import caches
from django.db import connection
from django.dispatch import Signal
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from django.urls import get_script_prefix, get_urlconf, set_script_prefix, set_urlconf
from django.utils import timezone, translation

from django_redis_lock import cached, cached_page, locked
from django_redis_lock.protocol.keys import flight_key
from django_redis_lock.signals import lock_lost, value_computed, value_refresh_failed
from django_redis_lock.testing import override
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer

pytestmark = pytest.mark.invariant("U1")

PAGE = Path(__file__).parents[3] / "docs" / "tenants.md"
HERE = "tests.integration.cache.test_background_context"
OURS = "django_redis_lock.cache"

in_thread = threading.local()
in_context: ContextVar[str] = ContextVar("in_context", default="nothing")
in_local = Local()

#: What of the caller's state there is: how it is read, what it is there, and how it is set.
STATE: dict[str, tuple[Callable[[], Any], Any, Callable[[Any], Any]]] = {
    "an attribute of `connection`": (
        lambda: getattr(connection, "schema_name", None),
        "a",
        lambda name: setattr(connection, "schema_name", name),
    ),
    "`threading.local`": (
        lambda: getattr(in_thread, "tenant", None),
        "a",
        lambda name: setattr(in_thread, "tenant", name),
    ),
    "a context variable": (in_context.get, "a", in_context.set),
    "`asgiref.local.Local`": (
        lambda: getattr(in_local, "tenant", None),
        "a",
        lambda name: setattr(in_local, "tenant", name),
    ),
    "the language": (translation.get_language, "de", translation.activate),
    "the time zone": (timezone.get_current_timezone_name, "Asia/Tokyo", timezone.activate),
    "the script prefix": (get_script_prefix, "/shop/", set_script_prefix),
    "the urlconf": (get_urlconf, "shop.urls", set_urlconf),
}


@contextmanager
def entered() -> Iterator[None]:
    """As middleware: what comes with a request, and ends with it."""
    before = {kind: read() for kind, (read, _, _) in STATE.items()}
    for _, there, change in STATE.values():
        change(there)
    try:
        yield
    finally:
        for kind, (_, _, change) in STATE.items():
            change(before[kind])


def seen(*args: Any, **kwargs: Any) -> dict[str, bool]:
    return {kind: read() == there for kind, (read, there, _) in STATE.items()}


def carry() -> Any:
    """A BACKGROUND_CONTEXT."""
    schema, tenant = getattr(connection, "schema_name", None), getattr(in_thread, "tenant", None)

    @contextmanager
    def carried() -> Iterator[None]:
        before = connection.schema_name if hasattr(connection, "schema_name") else None
        connection.schema_name, in_thread.tenant = schema, tenant
        try:
            yield
        finally:
            connection.schema_name, in_thread.tenant = before, None

    return carried()


class Seen:
    """A callable that notes what it sees."""

    def __init__(self) -> None:
        self.found: Any = None
        self.done = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.found = seen()
        self.done.set()
        return "new"

    def result(self) -> Any:
        assert self.done.wait(PATIENCE)
        return self.found


def make_stale(cache: Any, key: str = "report", value: Any = "old") -> None:
    cache.get_or_set(key, value, 60, stale=3600)
    cache.expire(key, 3500)


# -- each place where it runs ----------------------------------------------------------------------


def caller() -> Any:
    return caches["default"].get_or_set("report", seen)


def follower() -> Any:
    """One that takes over from a leader that has died."""
    cache: Any = caches["default"]
    cache._lock_client().set(flight_key(b":1:report"), "another", px=200)
    return cache.get_or_set("report", seen)


def background() -> Any:
    cache, note = caches["default"], Seen()
    make_stale(cache)
    cache.get_or_set("report", note, 60, stale=3600, background=True)
    return note.result()


def background_with_setting() -> Any:
    with override_settings(DJANGO_REDIS_LOCK={"BACKGROUND_CONTEXT": f"{HERE}.carry"}):
        return background()


def plain_function() -> Any:
    return async_to_sync(caches["default"].aget_or_set)("report", seen)


def coroutine_function() -> Any:
    async def compute() -> Any:
        return seen()

    return async_to_sync(caches["default"].aget_or_set)("report", compute)


def on_lost() -> Any:
    note = Seen()
    cache: Any = caches["default"]
    with locked("job", on_lost=note):
        cache.lock("job").reset()
        return note.result()


def on_lost_of_lock() -> Any:
    note, cache = Seen(), caches["default"]
    lock = cache.lock("job", on_lost=note)
    assert lock.acquire()
    cache.lock("job").reset()
    return note.result()


def of_signal(signal: Signal, act: Callable[[], Any]) -> Any:
    note = Seen()
    signal.connect(note)
    try:
        act()
        return note.result()
    finally:
        signal.disconnect(note)


def signals() -> Any:
    return of_signal(value_computed, lambda: caches["default"].get_or_set("report", "new"))


def signals_of_task() -> Any:
    async def act(note: Seen) -> Any:
        await caches["default"].aget_or_set("report", "new")
        while not note.done.is_set():
            await asyncio.sleep(0.01)

    note = Seen()
    value_computed.connect(note)
    try:
        async_to_sync(act)(note)
    finally:
        value_computed.disconnect(note)
    return note.found


def background_signals() -> Any:
    return of_signal(lock_lost, on_lost)


PLACES: dict[str, tuple[Callable[[], Any], ...]] = {
    "the caller": (caller,),
    "a follower that takes over": (follower,),
    "the background": (background,),
    "the background with `BACKGROUND_CONTEXT`": (background_with_setting,),
    "`aget_or_set`, plain function": (plain_function,),
    "`aget_or_set`, coroutine function": (coroutine_function,),
    "`on_lost`": (on_lost, on_lost_of_lock),
    "signals": (signals, signals_of_task),
    "`lock_lost`, `server_down`, `server_up`": (background_signals,),
}


def documented() -> dict[str, dict[str, bool]]:
    """The table in the docs: by place, what is seen there."""
    _, _, rest = PAGE.read_text().partition("| your code runs in |")
    head, _, *rows = rest.split("\n\n")[0].splitlines()
    kinds = [cell.strip() for cell in head.strip(" |").split("|")]
    table = {}
    for row in rows:
        place, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        assert set(cells) <= {"yes", "–"}
        table[place] = dict(zip(kinds, (cell == "yes" for cell in cells), strict=True))
    return table


@pytest.fixture(params=["redis", "memory"])
def config(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[dict[str, Any]]:
    where = {"BACKEND": f"{OURS}.RedisCache", "LOCATION": redis_server.url}
    if request.param == "memory":
        where = {"BACKEND": f"{OURS}.LocMemCache", "LOCATION": request.node.name}
    with override_settings(CACHES={"default": where}):
        yield where


@pytest.mark.parametrize(
    ("place", "run"), [(place, run) for place, runs in PLACES.items() for run in runs]
)
def test_what_is_seen_is_what_the_docs_say(
    config: dict[str, Any], place: str, run: Callable[[], Any]
) -> None:
    with entered():
        assert run() == documented()[place]


def test_the_background_does_not_change_the_callers_state(config: dict[str, Any]) -> None:
    """Some versions of asgiref share the data of a Local with a copied context."""

    def compute() -> str:
        for (_, _, change), other in zip(STATE.values(), others, strict=True):
            change(other)
        done.set()
        return "new"

    others = ["b", "b", "b", "b", "fr", "Europe/Paris", "/other/", "other.urls"]
    done, cache = threading.Event(), caches["default"]
    with entered():
        make_stale(cache)
        cache.get_or_set("report", compute, 60, stale=3600, background=True)
        assert done.wait(PATIENCE)
        assert all(seen().values())


# -- keys of a tenant ------------------------------------------------------------------------------


def tenant() -> str:
    return getattr(in_thread, "tenant", None) or "public"


def key_function(key: str, prefix: str, version: Any) -> str:
    return f"{tenant()}:{version}:{key}"


def failing_key_function(key: str, prefix: str, version: Any) -> str:
    return f"{in_thread.tenant}:{version}:{key}"


@contextmanager
def as_tenant(name: str) -> Iterator[None]:
    in_thread.tenant = name
    try:
        yield
    finally:
        del in_thread.tenant


class Rows:
    """A function that reads the tenant's rows."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, *args: Any) -> str:
        self.calls.append(tenant())
        return f"rows of {tenant()}"


def page(rows: Rows, options: dict[str, Any]) -> Callable[[], Any]:
    view: Any = cached_page(60, stale=3600, **options)(lambda request: HttpResponse(rows()))

    def ask() -> Any:
        return view(RequestFactory().get("/rows/")).content.decode()

    return ask


def value(rows: Rows, options: dict[str, Any]) -> Callable[[], Any]:
    return lambda: caches["default"].get_or_set("rows", rows, 60, stale=3600, **options)


def by_function(rows: Rows, options: dict[str, Any]) -> Callable[[], Any]:
    def function() -> str:
        return rows()

    options = {"timeout": 60, "stale": 3600, **options}
    decorated: Any = cached(key=lambda: f"rows of {tenant()}", **options)(function)
    asked: Callable[[], Any] = decorated
    return asked


ASKING: dict[str, Callable[[Rows, dict[str, Any]], Callable[[], Any]]] = {
    "get_or_set": value,
    "cached": by_function,
    "cached_page": page,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "background": {"background": True},
    "soft_timeout": {"soft_timeout": 0},
}


def age(cache: Any) -> None:
    """Let the timeout of all that has one pass."""
    client = cache._lock_client()
    for key in client.keys("*"):
        if client.pttl(key) > 3_500_000:
            client.pexpire(key, 3_500_000)


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> Callable[[], list[str]]:
    monkeypatch.setattr("django_redis_lock.cache.background._refused_at", {})
    caplog.set_level(logging.ERROR, "django_redis_lock.flights")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "django_redis_lock.flights"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("way", ASKING)
@pytest.mark.parametrize("function", [key_function, failing_key_function])
def test_the_background_refuses_to_compute_without_the_tenant(
    config: dict[str, Any],
    errors: Callable[[], list[str]],
    way: str,
    options: dict[str, Any],
    function: Any,
) -> None:
    if way != "cached":
        config = {**config, "KEY_FUNCTION": function}
    rows = Rows()
    with override_settings(CACHES={"default": config}):
        ask, cache = ASKING[way](rows, options), caches["default"]
        with as_tenant("a"):
            assert ask() == "rows of a"
            age(cache)
            assert ask() == "rows of a"  # The old one.
            until(lambda: bool(errors()))
            # The next caller computes.
            age(cache)
            until(lambda: ask() == "rows of a" and len(rows.calls) > 1)
        assert set(rows.calls) == {"a"}
        assert len(errors()) == 1
        assert "BACKGROUND_CONTEXT" in errors()[0]
        assert not any(b"public" in key for key in cache._lock_client().keys("*"))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("way", ASKING)
def test_the_setting_lets_the_background_compute_for_the_tenant(
    config: dict[str, Any],
    errors: Callable[[], list[str]],
    way: str,
    options: dict[str, Any],
) -> None:
    config, rows = {**config, "KEY_FUNCTION": key_function}, Rows()
    config["OPTIONS"] = {"LOCK_BACKGROUND_CONTEXT": f"{HERE}.carry"}
    with override_settings(CACHES={"default": config}):
        ask, cache = ASKING[way](rows, options), caches["default"]
        with as_tenant("a"):
            assert ask() == "rows of a"
            age(cache)
            assert ask() == "rows of a"
            until(lambda: len(rows.calls) == 2)
        assert rows.calls == ["a", "a"]
        assert not errors()


def test_what_is_encoded_in_the_background_is_the_tenants(config: dict[str, Any]) -> None:
    """A QuerySet queries the database when it is pickled."""

    class Lazy:
        def __reduce__(self) -> Any:
            return str, (f"rows of {tenant()}",)

    cache: Any = caches["default"]
    make_stale(cache)
    with (
        as_tenant("a"),
        override_settings(DJANGO_REDIS_LOCK={"BACKGROUND_CONTEXT": f"{HERE}.carry"}),
    ):
        cache.get_or_set("report", Lazy, 60, stale=3600, background=True)
        until(lambda: cache.get("report") == "rows of a")


# -- tasks -----------------------------------------------------------------------------------------


async def arefreshed(compute: Callable[[], Any], ends: bool) -> tuple[Any, Any]:
    """What a request of tenant a gets while the value is stale, and what is stored after it, by
    tenant. With ``ends`` the thread of the request's synchronous code is gone before the refresh.
    """
    cache: Any = caches["default"]

    def prepare() -> None:
        in_thread.tenant = "a"
        make_stale(cache, "rows", "old")

    def stored() -> dict[bytes, Any]:
        client = cache._lock_client()
        return {key: cache.client.decode(client.get(key)) for key in client.keys("*:rows")}

    await sync_to_async(prepare)()
    found = await cache.aget_or_set("rows", compute, 60, stale=3600, background=True)
    if ends:
        await sync_to_async(lambda: vars(in_thread).clear())()
    for _ in range(200):
        if ended.is_set() and not await sync_to_async(cache.keys)("*flight*"):
            break
        await asyncio.sleep(0.01)
    await sync_to_async(lambda: vars(in_thread).clear())()
    return found, await sync_to_async(stored)()


ended = threading.Event()


@pytest.mark.parametrize("ends", [False, True], ids=["during the request", "after it"])
@pytest.mark.parametrize("kind", ["plain function", "coroutine function"])
def test_a_task_in_the_background_computes_for_its_tenant_or_not_at_all(
    config: dict[str, Any], errors: Callable[[], list[str]], kind: str, ends: bool
) -> None:
    def compute() -> str:
        ended.set()
        return f"rows of {tenant()}"

    async def acompute() -> str:
        if ends:  # Its thread ends during the computation.
            await sync_to_async(lambda: vars(in_thread).clear())()
        return await sync_to_async(compute)()

    ended.clear()
    with override_settings(CACHES={"default": {**config, "KEY_FUNCTION": key_function}}):
        way: Any = compute if kind == "plain function" else acompute
        found, stored = asyncio.run(arefreshed(way, ends and kind == "plain function"))
    assert found == "old"
    assert set(stored) == {b"a:1:rows"}
    if kind == "plain function":
        assert stored[b"a:1:rows"] in ("old", "rows of a")
    else:
        assert stored[b"a:1:rows"] == ("old" if ends else "rows of a")
        assert bool(errors()) is ends


def ends_the_request() -> Any:
    """A BACKGROUND_CONTEXT that is called last in the request."""
    vars(in_thread).clear()
    ended.set()
    return nullcontext()


def test_no_task_computes_after_the_request(
    config: dict[str, Any], errors: Callable[[], list[str]]
) -> None:
    async def compute() -> str:
        computed.append(True)
        return "rows"

    computed: list[bool] = []
    config = {**config, "KEY_FUNCTION": key_function}
    config["OPTIONS"] = {"LOCK_BACKGROUND_CONTEXT": f"{HERE}.ends_the_request"}
    ended.clear()
    with override_settings(CACHES={"default": config}):
        found, stored = asyncio.run(arefreshed(compute, False))
    assert (found, stored) == ("old", {b"a:1:rows": "old"})
    assert errors()
    assert not computed


# -- the setting -----------------------------------------------------------------------------------


def enters_badly() -> Any:
    @contextmanager
    def there() -> Iterator[None]:
        raise ConnectionError("no such tenant")
        yield

    return there()


def test_a_context_that_cannot_be_entered_is_a_failed_refresh(config: dict[str, Any]) -> None:
    cache: Any = caches["default"]
    make_stale(cache)

    def act() -> None:
        assert cache.get_or_set("report", "new", 60, stale=3600, background=True) == "old"

    with override_settings(DJANGO_REDIS_LOCK={"BACKGROUND_CONTEXT": f"{HERE}.enters_badly"}):
        of_signal(value_refresh_failed, act)
    assert cache.get("report") == "old"
    assert cache.get_or_set("report", lambda: "new", 60, stale=3600) == "new"


# -- tests of projects -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["thread", "task"])
def test_with_override_the_caller_refreshes(options: dict[str, Any], asynchronous: bool) -> None:
    """Whose database connection has the test's transaction."""
    with override() as server:
        cache: Any = caches["default"]

        def ask(compute: Callable[[], Any]) -> Any:
            terms: dict[str, Any] = {"timeout": 60, "stale": 3600, **options}
            if asynchronous:
                return async_to_sync(cache.aget_or_set)("report", compute, **terms)
            return cache.get_or_set("report", compute, **terms)

        assert ask(lambda: "old") == "old"
        server.clock.advance(61)
        threads = []
        connection.in_test = True

        def compute() -> str:
            threads.append(getattr(connection, "in_test", False))
            return "new"

        ask(compute)
        assert threads == [True]
        assert cache.get("report") == "new"
        assert connection.in_test
        del connection.in_test
