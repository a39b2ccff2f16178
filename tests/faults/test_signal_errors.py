"""A signal handler raises an ``OSError`` (a time limit's ``TimeoutError``) while a call waits for
Redis: it goes to the caller as it was raised. It is no outage, so nothing waits on, falls back or
answers 503, and nothing stays taken."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.core.management import BaseCommand, call_command
from django.http import HttpRequest, HttpResponse
from redis._parsers import _HiredisParser, _RESP2Parser
from redis._parsers.base import _RESPBase

from django_redis_lock import Lock, MultiLock, Redlock, cached_page, locked
from django_redis_lock.cache import RedisCache
from django_redis_lock.contrib.fallback.file_lock import held_locally
from django_redis_lock.transport import server_of
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.backends import places
from tests.support.background import Background

from .proxy import Proxy

NAME = "in time"


class Late(OSError):
    """A project's own."""


KINDS = (TimeoutError, ConnectionResetError, Late, BlockingIOError, InterruptedError)


class Alarm:
    """The handler of a signal, which raises."""

    def __init__(self, kind: type[OSError]) -> None:
        self._kind = kind
        self.raised: OSError | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.raised = self._kind("too slow")
        raise self.raised


@contextmanager
def raised_as_it_was(alarm: Alarm) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        with pytest.raises(OSError, match="too slow") as caught:
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value is alarm.raised


class Site:
    """What calls go through a ``proxy``, and what goes past it."""

    def __init__(self, server: RedisServer, proxy: Proxy, folder: Path, **options: Any) -> None:
        self.proxy = proxy
        self.there = server.client()
        self.folder = str(folder)
        self.client: redis.Redis = proxy.client()
        if options:
            pool = redis.ConnectionPool(port=proxy.port, **options)
            self.client = redis.Redis(connection_pool=pool)
        pools = {"CONNECTION_POOL_KWARGS": options}
        self.url = f"redis://127.0.0.1:{proxy.port}/0"
        self.cache: Any = RedisCache(self.url, {"OPTIONS": pools})
        ignoring = pools | {"IGNORE_EXCEPTIONS": True}
        self.ignoring: Any = RedisCache(self.url, {"OPTIONS": ignoring})
        self.past: Any = RedisCache(server.url, {})
        self.leading, self.led = threading.Event(), threading.Event()

    def lock(self, **options: Any) -> Lock:
        return Lock(self.client, NAME, timeout=60, **options)

    def signal_at(self, mark: bytes, times: int = 1) -> None:
        """Lose the next requests with ``mark``, and send the signal when the first one comes."""
        lost = self.proxy.swallow(mark, times)
        main = threading.main_thread().ident
        assert main is not None

        def send() -> None:
            lost.applied.acquire()
            signal.pthread_kill(main, signal.SIGUSR1)

        Background(send)


Call = Callable[[], Any]


def held(site: Site, call: Callable[[Lock], Any]) -> Call:
    lock = site.lock()
    lock.acquire()
    return lambda: call(lock)


def waiting(site: Site, **options: Any) -> Call:
    holder = Lock(site.there, NAME, timeout=60, thread_local=False)
    holder.acquire()

    def call() -> None:
        try:
            site.lock(**options).acquire(blocking_timeout=5)
        finally:
            holder.release()

    return call


def polling(site: Site) -> Call:
    """A user who may not block."""
    call = waiting(site)
    site.there.acl_setuser(
        "polls", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-blpop"]
    )
    site.client = site.proxy.client(username="polls", password="any")
    asked = site.proxy.delay_reply(0.001, b"BLPOP")
    Background(lambda: (asked.applied.acquire(), site.signal_at(b"EVAL")))
    return call


def redlock(site: Site) -> Call:
    clients = [site.proxy.client(db=number) for number in range(3)]
    return Redlock(clients, NAME, timeout=60).acquire


def storing(site: Site) -> Call:
    def produce() -> str:
        site.signal_at(b"EVAL")
        return "value"

    return lambda: site.cache.get_or_set("key", produce, 60)


def following(site: Site) -> Call:
    def produce() -> str:
        site.leading.set()
        site.led.wait()
        return "value"

    Background(lambda: site.past.get_or_set("key", produce, 60))
    site.leading.wait()

    def call() -> None:
        try:
            site.cache.get_or_set("key", str, 60)
        finally:
            site.led.set()

    return call


def command(site: Site) -> Call:
    @locked(NAME, timeout=60)
    class Command(BaseCommand):
        def handle(self, *args: Any, **options: Any) -> None: ...

    return lambda: call_command(Command())


def view(site: Site, decorate: Callable[[Any], Any]) -> Call:
    request = HttpRequest()
    request.method, request.path = "GET", "/"
    request.META.update(SERVER_NAME="testserver", SERVER_PORT="80")
    return lambda: decorate(lambda request: HttpResponse())(request)


def in_fallback(site: Site) -> Call:
    def call() -> None:
        try:
            site.lock(on_redis_down="local", local_folder=site.folder).acquire()
        finally:
            assert not held_locally(site.folder)

    return call


#: Which request the signal comes after (empty: it is said later), and the call.
CALLERS: dict[str, tuple[bytes, Callable[[Site], Call]]] = {
    "acquire": (b"EVAL", lambda site: site.lock().acquire),
    "acquire at once": (b"EVAL", lambda site: lambda: site.lock().acquire(blocking=False)),
    "acquire with a deadline": (
        b"EVAL",
        lambda site: lambda: site.lock().acquire(blocking_timeout=5),
    ),
    "limit": (b"EVAL", lambda site: site.lock(limit=2).acquire),
    "several names": (
        b"EVAL",
        lambda site: MultiLock(site.client, [NAME, "other"], timeout=60).acquire,
    ),
    "redlock": (b"EVAL", redlock),
    "fallback": (b"EVAL", in_fallback),
    "a wait": (b"BLPOP", waiting),
    "a wait for a place": (b"EVAL", lambda site: waiting(site, limit=2)),
    "a wait that polls": (b"", polling),
    "release": (b"EVAL", lambda site: held(site, lambda lock: lock.release())),
    "extend": (b"EVAL", lambda site: held(site, lambda lock: lock.extend(5))),
    "reacquire": (b"EVAL", lambda site: held(site, lambda lock: lock.reacquire())),
    "owned": (b"EVAL", lambda site: held(site, lambda lock: lock.owned())),
    "held": (b"EVAL", lambda site: site.lock().held),
    "reset": (b"EVAL", lambda site: site.lock().reset),
    "get": (b"GET", lambda site: lambda: site.cache.get("key")),
    "get, ignoring errors": (b"GET", lambda site: lambda: site.ignoring.get("key")),
    "get_many": (b"MGET", lambda site: lambda: site.cache.get_many(["a", "b"])),
    "set": (b"SET", lambda site: lambda: site.cache.set("key", 1, 60)),
    "set, ignoring errors": (b"SET", lambda site: lambda: site.ignoring.set("key", 1, 60)),
    "delete": (b"DEL", lambda site: lambda: site.cache.delete("key")),
    "incr": (b"EVAL", lambda site: lambda: site.cache.incr("number")),
    "mark_stale": (
        b"EVAL",
        lambda site: lambda: site.ignoring.mark_stale("key", stale=5),
    ),
    "of the pool": (b"LPUSH", lambda site: lambda: site.cache.client.get_client().lpush("l", 1)),
    "iter_keys": (b"SCAN", lambda site: lambda: list(site.cache.iter_keys("*"))),
    "get_or_set": (b"GET", lambda site: lambda: site.cache.get_or_set("key", str, 60)),
    "get_or_set, leading": (b"EVAL", lambda site: lambda: site.cache.get_or_set("key", str, 60)),
    "get_or_set, storing": (b"", storing),
    "get_or_set, following": (b"XREAD", following),
    "get_or_set, stale": (
        b"GET",
        lambda site: lambda: site.cache.get_or_set("key", str, 60, stale=60),
    ),
    "get_or_set_many": (
        b"MGET",
        lambda site: lambda: site.cache.get_or_set_many(["a"], lambda keys: {"a": 1}, 60),
    ),
    "a locked function": (b"EVAL", lambda site: locked(NAME, timeout=60)(lambda: None)),
    "a locked view": (b"EVAL", lambda site: view(site, locked(NAME, timeout=60))),
    "a locked command": (b"EVAL", command),
    "a page": (b"GET", lambda site: view(site, cached_page(60))),
    "run_locked": (b"EVAL", lambda site: lambda: call_command("run_locked", NAME, "--", "check")),
    "run_locked, waiting": (
        b"EVAL",
        lambda site: lambda: call_command("run_locked", "--wait", "5", NAME, "--", "check"),
    ),
    "locks": (b"EVAL", lambda site: lambda: call_command("locks", "list")),
}


@pytest.fixture(params=["of our own", "redis-py's"])
def site(
    request: pytest.FixtureRequest,
    own_server: RedisServer,
    settings: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Site]:
    options: dict[str, Any] = {}
    if request.param != "of our own":
        options["parser_class"] = _RESP2Parser
    with Proxy(own_server) as proxy:
        site = Site(own_server, proxy, tmp_path, **options)
        cache = {"BACKEND": "django_redis_lock.cache.RedisCache", "LOCATION": site.url}
        settings.CACHES = {"default": cache | {"OPTIONS": {"CONNECTION_POOL_KWARGS": options}}}
        yield site


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caller", CALLERS)
def test_it_is_raised_as_it_was(site: Site, caller: str, kind: type[OSError]) -> None:
    mark, prepare = CALLERS[caller]
    site.cache.set("number", 1, 60)
    caches["default"].get("number")
    call = prepare(site)
    if mark:
        site.signal_at(mark, times=3 if caller == "redlock" else 1)
    with raised_as_it_was(Alarm(kind)):
        call()
    assert not server_of(site.client).breaker.failing
    assert site.cache.get("number") in (1, 2)
    if caller not in ("extend", "reacquire", "owned"):
        key = caches["default"].lock(NAME).keys.lock
        until(lambda: not site.there.exists(NAME, key))
    until(lambda: not places(NAME) and not site.there.exists(f"{{{NAME}}}:waiters"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parser", [_RESP2Parser, _HiredisParser])
def test_it_comes_as_a_wait_looks_whether_there_is_a_reply(
    own_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parser: Any,
    kind: type[OSError],
) -> None:
    """There redis-py turns each ``OSError`` into one of its own."""
    looks = _RESPBase if parser is _RESP2Parser else parser  # Or redis-py takes that for RESP3.
    look = looks.can_read
    alarm = Alarm(kind)

    def looked(self: object, timeout: float = 0) -> bool:
        if threading.current_thread() is threading.main_thread() and not alarm.raised:
            signal.raise_signal(signal.SIGUSR1)
        return bool(look(self, timeout))

    with Proxy(own_server) as proxy:
        site = Site(own_server, proxy, tmp_path, parser_class=parser)
        call = waiting(site)
        monkeypatch.setattr(looks, "can_read", looked)
        with raised_as_it_was(alarm):
            call()
        assert not server_of(site.client).breaker.failing


# -- what tells it -------------------------------------------------------------------------------


def raise_it(*_: object) -> None:
    raise TimeoutError("too slow")


def once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise_it()


def careful(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise_it()


@functools.wraps(careful)
def decorated(*args: Any, **options: Any) -> None:
    careful(*args, **options)
