"""A server that answers, and refuses writes or all calls for a while.

Kind: what passes by itself ends no wait, no renewal and no release early; views answer 503, a
fallback falls back, a value is computed; and who asked for no wait gets redis-py's error at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import BaseCommand, CommandError, call_command
from django.http import HttpResponse
from django.test import RequestFactory, override_settings

from django_redis_lock import Lock, Redlock, locked
from django_redis_lock.cache import RedisCache
from django_redis_lock.decorators import cached_page
from django_redis_lock.exceptions import TooFewServers
from django_redis_lock.history import Heartbeat
from django_redis_lock.keeper import DeferredRelease, keeper
from tests.faults.proxy import Proxy
from tests.holding import hurry
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.background import Background

pytestmark = pytest.mark.invariant("P3")

# -- the refusals ----------------------------------------------------------------------------------

Refusal = Callable[[RedisServer], AbstractContextManager[None]]


@contextmanager
def too_few_replicas(server: RedisServer) -> Iterator[None]:
    server.asking.config_set("min-replicas-to-write", 1)
    yield
    server.asking.config_set("min-replicas-to-write", 0)


@contextmanager
def no_memory(server: RedisServer) -> Iterator[None]:
    server.asking.config_set("maxmemory", "1kb")
    yield
    server.asking.config_set("maxmemory", 0)


@contextmanager
def failed_save(server: RedisServer) -> Iterator[None]:
    """Its folder is gone, as a disk that is full or was removed."""
    asking, folder = server.asking, server._folder / "gone"
    folder.mkdir()
    asking.config_set("dir", str(folder))
    asking.config_set("save", "3600 1")
    folder.rmdir()
    asking.bgsave()
    until(lambda: asking.info("persistence")["rdb_last_bgsave_status"] == "err")
    yield
    asking.config_set("save", "")


@contextmanager
def replica(server: RedisServer) -> Iterator[None]:
    server.asking.replicaof("127.0.0.1", "1")
    yield
    server.asking.replicaof("NO", "ONE")


@contextmanager
def replica_without_link(server: RedisServer) -> Iterator[None]:
    server.asking.config_set("replica-serve-stale-data", "no")
    with replica(server):
        yield


@contextmanager
def no_connections_left(server: RedisServer) -> Iterator[None]:
    """Those that there are stay: this is for who connects."""
    asking = server.asking
    asking.ping()
    before = asking.config_get("maxclients")["maxclients"]
    others = [c["id"] for c in asking.client_list() if not c["cmd"].startswith("client")]
    for number in others:
        asking.client_kill_filter(_id=number)
    asking.config_set("maxclients", 1)
    yield
    asking.config_set("maxclients", before)


#: Each with what its error says.
REFUSALS: dict[Refusal, str] = {
    too_few_replicas: "NOREPLICAS|Not enough good replicas",
    no_memory: "OOM|maxmemory",
    failed_save: "MISCONF",
    replica: "READONLY|read only replica",
    replica_without_link: "MASTERDOWN|READONLY|Link with MASTER",
    no_connections_left: "max number of clients|closed|broke|reset",
}

# -- the callers -----------------------------------------------------------------------------------

Caller = Callable[[RedisServer, RedisCache], Iterator[None]]
#: Each runs to its first ``yield`` before the server refuses, to the second while it does, and then
#: to its end.
CALLERS: dict[str, Caller] = {}


def caller(function: Caller) -> Caller:
    CALLERS[function.__name__] = function
    return function


def in_loop(steps: Callable[[RedisServer, RedisCache], Any]) -> Caller:
    """``steps`` is an asynchronous generator, all of which runs in one event loop."""

    def run(server: RedisServer, cache: RedisCache) -> Iterator[None]:
        loop = asyncio.new_event_loop()
        running = steps(server, cache)
        try:
            loop.run_until_complete(anext(running))
            yield
            loop.run_until_complete(anext(running))
            yield
            loop.run_until_complete(anext(running, None))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    CALLERS[steps.__name__] = run
    return run


class Attempts(logging.Handler):
    """Counts the attempts of waiters that failed."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("Waiting for"):
            self.errors.append(record.getMessage())


@contextmanager
def attempts() -> Iterator[Attempts]:
    logger = logging.getLogger("django_redis_lock.waiting")
    handler, level = Attempts(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@caller
def no_wait(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    yield
    for options in ({}, {"limit": 2}):
        with pytest.raises((redis.ResponseError, redis.ConnectionError)):
            cache.lock("name", **options).acquire(blocking=False)
    with pytest.raises((redis.ResponseError, redis.ConnectionError)):
        cache.lock(["one", "two"]).acquire(blocking=False)
    releases = [job for job in keeper().jobs() if isinstance(job, DeferredRelease)]
    assert not releases, "nothing has run, so nothing is to be released"
    yield
    with cache.lock("name", blocking=False):
        pass


def waiting_caller(name: str, make: Callable[[RedisCache], Any]) -> None:
    def newcomer(server: RedisServer, cache: RedisCache) -> Iterator[None]:
        yield
        with attempts() as tried:
            waiting = Background(lambda: make(cache).acquire(blocking_timeout=PATIENCE))
            until(lambda: len(tried.errors) > 2 or waiting.done)
            began, before = time.monotonic(), len(tried.errors)
            until(lambda: len(tried.errors) > before + 1 or waiting.done)
            seconds = time.monotonic() - began
        assert not waiting.done or waiting.result()
        assert (len(tried.errors) - before) / seconds < 20, "it polls without a pause"
        yield
        assert waiting.result()

    CALLERS[name] = newcomer


waiting_caller("newcomer", lambda cache: cache.lock("name"))
waiting_caller("newcomer_for_a_place", lambda cache: cache.lock("name", limit=2))
waiting_caller("newcomer_for_several_names", lambda cache: cache.lock(["one", "two"]))


@caller
def wait_that_ends_meanwhile(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    yield
    began = time.monotonic()
    with pytest.raises((redis.ResponseError, redis.ConnectionError)):
        cache.lock("name").acquire(blocking_timeout=0.3)
    assert time.monotonic() - began >= 0.28  # A round trip before its end.
    yield


@caller
def waiter(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    holder = cache.lock("name", timeout=None, thread_local=False)
    holder.acquire()
    waiting = Background(lambda: cache.lock("name").acquire(blocking_timeout=PATIENCE))
    until(lambda: server.asking.info("clients")["blocked_clients"])
    yield
    hurry()
    yield
    holder.release()
    assert waiting.result()


@caller
def end_of_a_block(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    """The lock never expires: only its release ends it."""
    lock = cache.lock("name", timeout=None)
    lock.acquire()
    places = cache.lock("places", timeout=None, limit=2)
    places.acquire()
    names = cache.lock(["one", "two"], timeout=None)
    names.acquire()
    keys = [cache.lock(name).keys.lock for name in ("name", "places", "one", "two")]
    yield
    for each in (lock, places, names):
        try:
            each.__exit__(None, None, None)
        except (redis.ResponseError, redis.ConnectionError):
            pass
    for _ in range(3):  # It was given up after two refusals.
        attempt_releases()
    yield
    until(lambda: (attempt_releases(), not server.asking.exists(*keys))[1])


def attempt_releases() -> None:
    """Have the keeper try, and wait until it has."""
    hurry(DeferredRelease)
    jobs = [job for job in keeper().jobs() if isinstance(job, DeferredRelease)]
    until(lambda: all(job.due > time.monotonic() + 0.1 or job not in keeper() for job in jobs))


@caller
def section(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    """``locked`` hides no result behind the error of a release."""
    began, go_on = threading.Event(), threading.Event()

    @locked("name", timeout=None)
    def work() -> int:
        began.set()
        assert go_on.wait(PATIENCE)
        return 1

    working = Background(work)
    assert began.wait(PATIENCE)
    yield
    go_on.set()
    assert working.result() == 1
    attempt_releases()
    yield
    key = cache.lock("name").keys.lock
    until(lambda: (attempt_releases(), not server.asking.exists(key))[1])


@caller
def renewal(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    with cache.lock("name", timeout=60, renew=True) as lock:
        hurry()
        key = lock.keys.lock
        yield
        hurry()
        hurry()
        yield
        server.asking.pexpire(key, 30_000)
        until(lambda: (hurry(), server.asking.pttl(key) > 50_000)[1])
        lock.ensure_held()


@caller
def fallback(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    yield
    for how in ("run", "local"):
        for wait in ({"blocking": False}, {"blocking_timeout": PATIENCE}):
            with cache.lock("name", on_redis_down=how, **wait) as lock:
                assert lock.degraded == how
    yield
    with cache.lock("name", on_redis_down="local", blocking=False) as lock:
        assert lock.degraded is None


@caller
def member_of_a_redlock(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    with RedisServer() as second, RedisServer() as third:
        clients = [cache._lock_client(), second.client(), third.client()]

        def make() -> Redlock:
            return Redlock(clients, "name", timeout=None, server_timeout=PATIENCE)

        lock = make()
        lock.acquire()
        yield
        lock.release()
        with make():
            pass
        third.kill()
        with pytest.raises(TooFewServers):
            make().acquire(blocking=False)
        waiting = Background(lambda: make().acquire(blocking_timeout=PATIENCE))
        yield
        assert waiting.result()


@caller
def values(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    yield
    assert cache.get_or_set("key", lambda: 1, 300) == 1
    many = cache.get_or_set_many(["x", "y"], lambda keys: dict.fromkeys(keys, 2), 300)
    assert many == {"x": 2, "y": 2}
    yield
    until(lambda: cache.get_or_set("key", lambda: 1, 300) == cache.get("key") == 1)


@caller
def computation(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    began, go_on = threading.Event(), threading.Event()

    def compute() -> str:
        began.set()
        assert go_on.wait(PATIENCE)
        return "computed"

    leader = Background(lambda: cache.get_or_set("led", compute, 300))
    assert began.wait(PATIENCE)
    other = RedisCache(server.url.replace("127.0.0.1", "localhost"), {})  # As another process.
    follower = Background(lambda: other.get_or_set("led", lambda: "other's", 300, wait=PATIENCE))
    until(lambda: server.asking.info("clients")["blocked_clients"])
    yield
    go_on.set()
    assert leader.result() == "computed"
    yield
    until(lambda: (attempt_releases(), follower.done)[1])
    assert follower.result() in ("computed", "other's")


@caller
def view(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    request = RequestFactory().get("/")
    answer = locked("name")(_view)
    assert answer(request).status_code == 200
    yield
    refused = answer(request)
    assert (refused.status_code, "Retry-After" in refused) == (503, True)
    yield
    assert answer(request).status_code == 200


def _view(request: Any) -> HttpResponse:
    return HttpResponse("made")


@caller
def page(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    made = cached_page(300)(_view)
    yield
    assert made(RequestFactory().get("/page")).content == b"made"
    yield
    assert made(RequestFactory().get("/page")).content == b"made"


@caller
def command(server: RedisServer, cache: RedisCache) -> Iterator[None]:
    class Command(BaseCommand):
        @locked("command")
        def handle(self, *args: Any, **options: Any) -> None:
            self.stdout.write("done")

    yield
    with pytest.raises(CommandError) as caught:
        call_command(Command(stderr=StringIO()))
    assert caught.value.returncode not in (0, 1)
    assert "could not be requested" in str(caught.value)
    yield
    output = StringIO()
    call_command(Command(), stdout=output)
    assert "done" in output.getvalue()


@in_loop
async def tasks(server: RedisServer, cache: RedisCache) -> Any:
    held = cache.alock("held", timeout=None, thread_local=False)
    await held.acquire()
    yield
    with pytest.raises((redis.ResponseError, redis.ConnectionError)):
        await cache.alock("name").acquire(blocking=False)
    with attempts() as tried:
        new = cache.alock("name", thread_local=False)
        newcomer = asyncio.ensure_future(new.acquire(blocking_timeout=PATIENCE))
        while len(tried.errors) < 3 and not newcomer.done():
            await asyncio.sleep(0.01)
    assert await cache.aget_or_set("key", lambda: 1, 300) == 1
    try:
        await held.__aexit__(None, None, None)
    except (redis.ResponseError, redis.ConnectionError):
        pass
    for _ in range(3):
        await asyncio.to_thread(attempt_releases)
    view = locked("view")(_async_view)
    assert (await view(RequestFactory().get("/"))).status_code == 503
    yield
    assert await newcomer
    key = held.keys.lock
    gone = lambda: (attempt_releases(), not server.asking.exists(key))[1]  # noqa: E731  # one of several conditions
    await asyncio.to_thread(until, gone)
    assert await cache.aget_or_set("key", lambda: 1, 300) == 1


async def _async_view(request: Any) -> HttpResponse:
    return _view(request)


# -- the table -------------------------------------------------------------------------------------

#: Who uses connections that there are already meets no refusal of new ones.
_HAVE_ONE = {"end_of_a_block", "section", "waiter", "computation", "tasks", "renewal"}
_TABLE = [
    (refusal, name)
    for refusal in REFUSALS
    for name in CALLERS
    if refusal is not no_connections_left or name not in _HAVE_ONE
    if refusal is not no_memory or name != "member_of_a_redlock"  # It needs none.
]


@pytest.fixture
def cache(own_server: RedisServer, tmp_path: Path) -> Iterator[RedisCache]:
    options = {"SOCKET_TIMEOUT": 5, "LOCK_LOCAL_LOCK_FOLDER": str(tmp_path)}
    settings = {"BACKEND": "django_redis_lock.cache.RedisCache", "OPTIONS": options}
    with override_settings(CACHES={"default": {**settings, "LOCATION": own_server.url}}):
        yield RedisCache(own_server.url, {"OPTIONS": options})
    for job in keeper().jobs():
        if not isinstance(job, Heartbeat):
            keeper().discard(job)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("refusal", "name"), _TABLE, ids=[f"{refusal.__name__}-{name}" for refusal, name in _TABLE]
)
def test_a_refusal_passes(
    own_server: RedisServer, cache: RedisCache, refusal: Refusal, name: str
) -> None:
    steps = CALLERS[name](own_server, cache)
    next(steps)
    with refusal(own_server):
        next(steps)
    assert next(steps, None) is None


@pytest.mark.parametrize("refusal", list(REFUSALS)[:3])
def test_people_read_what_to_do(
    own_server: RedisServer, cache: RedisCache, refusal: Refusal
) -> None:
    holder = Lock(own_server.client(), cache.lock("name").keys.lock, timeout=60)
    holder.acquire()
    with refusal(own_server):
        output = StringIO()
        with pytest.raises(CommandError):
            call_command("locks", "doctor", stdout=output, no_color=True)
        assert "→" in output.getvalue()
        if refusal is not no_memory:  # A release needs none.
            with pytest.raises(CommandError, match=REFUSALS[refusal]) as caught:
                call_command("locks", "release", "name", "--yes", stdout=StringIO())
            assert "look" in str(caught.value)


@pytest.mark.parametrize("reply", ["ERR upstream failure", "UNKILLABLE Sorry", "NOPERM No"])
def test_what_a_proxy_or_a_script_refuses_is_released_later(
    own_server: RedisServer, reply: str
) -> None:
    with Proxy(own_server) as proxy:
        cache = RedisCache(f"redis://127.0.0.1:{proxy.port}/0", {})
        kinds: list[Any] = [{"key": "name"}, {"key": "places", "limit": 2}, {"key": ["a", "b"]}]
        locks = [cache.lock(timeout=None, **kind) for kind in kinds]
        assert all(lock.acquire(blocking=False) for lock in locks)
        with proxy.refusing(reply.encode()):
            for lock in locks:
                with pytest.raises(redis.ResponseError):
                    lock.__exit__(None, None, None)
            for _ in range(3):
                attempt_releases()
        keys = [cache.lock(name).keys.lock for name in ("name", "places", "a", "b")]
        until(lambda: (attempt_releases(), not own_server.asking.exists(*keys))[1])
