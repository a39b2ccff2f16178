"""ON_REDIS_DOWN: locks while Redis is away, and what becomes of them when it is back."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.test import override_settings

from django_redis_lock import (
    AsyncLock,
    Lock,
    LockError,
    LockNotAcquired,
    Redlock,
    TooFewReplicas,
    events,
    locked,
)
from django_redis_lock.cache import RedisCache
from django_redis_lock.contrib import fallback
from django_redis_lock.contrib.fallback.file_lock import held_locally, pauses
from django_redis_lock.events import FellBack
from django_redis_lock.protocol.lock_scripts import RELEASE
from django_redis_lock.transport.aio_client import asyncio_client
from tests.faults.proxy import Proxy
from tests.holding import hurry_until, outages
from tests.lock_contract import LockContract
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer, closed_port
from tests.support.backends import Backend, OnRedis, places
from tests.support.background import Background
from tests.support.logs import logged


@pytest.fixture(autouse=True)
def folder(settings: Any, tmp_path: Path) -> str:
    settings.DJANGO_REDIS_LOCK = {"LOCAL_LOCK_FOLDER": str(tmp_path), "BREAKER_PAUSE": 0.5}
    return str(tmp_path)


def cache_of(server: RedisServer | Proxy, **options: Any) -> RedisCache:
    timeouts = {"SOCKET_CONNECT_TIMEOUT": 0.4, "SOCKET_TIMEOUT": 0.4}
    return RedisCache(server.url, {"OPTIONS": timeouts | options})


@pytest.fixture
def cache(own_server: RedisServer) -> RedisCache:
    return cache_of(own_server, LOCK_ON_REDIS_DOWN="local")


def refuse(server: RedisServer) -> None:
    """What is at the key of the lock is somebody else's."""
    server.client().rpush(":lock:1:nightly", "theirs")


# -- while Redis answers -----------------------------------------------------------------------


class OnCache(OnRedis):
    """Locks that a local one would stand in for."""

    def __init__(self, client: redis.Redis, folder: str) -> None:
        super().__init__(client)
        self._options = {"on_redis_down": "local", "local_folder": folder}

    def make_lock(self, name: str | bytes = "contract", **options: Any) -> Any:
        return Lock(self.client, name, **self._options, **options)


@pytest.mark.sample(3)
class TestWhileRedisAnswers(LockContract):
    @pytest.fixture
    def backend(self, client: redis.Redis, folder: str) -> Backend:
        return OnCache(client, folder)


def test_what_an_interrupt_has_left_ends_no_later_lock(client: redis.Redis, folder: str) -> None:
    """The steps of an interrupted ``acquire`` end when its traceback is dropped."""
    options: dict[str, Any] = {"on_redis_down": "local", "local_folder": folder}
    lock = Lock(client, "again", timeout=30, **options)
    request, wait = lock._request(None, None, None, None)
    interrupted = lock._acquire_steps(request, wait)
    next(interrupted)
    lock._abandon(request, KeyboardInterrupt())
    assert lock.acquire(blocking_timeout=PATIENCE)
    interrupted.close()
    assert lock.owned()
    lock.release()


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_thread_does_not_wait_for_its_own_lock_of_this_host(
    own_server: RedisServer, cache: RedisCache, in_loop: bool
) -> None:
    """Nothing else ends that one, neither in the outage nor after it."""

    async def in_a_task() -> None:
        in_this_thread()

    def in_this_thread() -> None:
        with cache.lock("nightly") as lock:
            assert lock.degraded == "local"
            with pytest.raises(LockError, match="wait for itself"):
                cache.lock("nightly").acquire()
            assert not cache.lock("nightly").acquire(blocking_timeout=0.05)
            own_server.start()
            until(lambda: cache.client.get_client().ping())
            with pytest.raises(LockError, match="wait for itself"):
                cache.lock("nightly").acquire()

    own_server.kill()
    Background(partial(asyncio.run, in_a_task()) if in_loop else in_this_thread).result()
    with cache.lock("nightly") as lock:
        assert not lock.degraded


# -- while Redis is away -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_lock_of_this_host_is_taken_instead(
    own_server: RedisServer, cache: RedisCache, folder: str, how: str
) -> None:
    getattr(own_server, how)()
    with cache.lock("nightly", label="the report") as lock:
        assert lock.degraded == "local"
        assert lock.fence is None
        assert lock.owned()
        assert lock.locked()
        assert not lock.lost
        lock.ensure_held()
        assert lock.extend(5)
        assert lock.reacquire()
        assert not cache.lock("nightly").acquire(blocking=False)
        assert not cache.lock("nightly").acquire(blocking_timeout=0.05)
        holder = cache.lock("nightly").holder()
        assert holder.pid == os.getpid()
        assert holder.label == "the report"
        with cache.lock("other") as other:
            assert other.degraded == "local"
        ((name, owner),) = held_locally(folder)
        assert (name, owner.pid) == ("nightly", os.getpid())
    until(lambda: not cache.lock("nightly").locked())
    assert lock.degraded is None
    with pytest.raises(LockError):
        lock.release()


@pytest.mark.parametrize(
    ("policy", "fault", "error"),
    [("run", RedisServer.kill, redis.ConnectionError), ("local", refuse, redis.ResponseError)],
)
def test_who_holds_it_is_not_known(
    own_server: RedisServer, policy: str, fault: Any, error: type[Exception]
) -> None:
    cache = cache_of(own_server, LOCK_ON_REDIS_DOWN=policy)
    fault(own_server)
    with pytest.raises(error):
        cache.lock("nightly").holders()


def take(link: Link, url: str, folder: str) -> str | None:
    options = {"LOCK_ON_REDIS_DOWN": "local", "LOCK_LOCAL_LOCK_FOLDER": folder}
    cache = RedisCache(url, {"OPTIONS": options})
    with cache.lock("nightly") as lock:
        link.say(lock.degraded)
        link.hear()
    return lock.degraded


def test_processes_exclude_each_other(
    own_server: RedisServer, cache: RedisCache, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_server.kill()

    def wait() -> Any:
        with cache.lock("another"):  # Of this thread, too, but not what it waits for.
            return cache.lock("nightly").acquire()

    def killed_meanwhile(until: float) -> Iterator[float]:
        other.kill()
        yield from pauses(until)

    with processes(take, own_server.url, folder) as (other,):
        other.go()
        assert other.hear() == "local"
        assert not cache.lock("nightly").acquire(blocking=False)
        monkeypatch.setattr(fallback, "pauses", killed_meanwhile)
        assert Background(wait).result() is True


def test_what_was_taken_here_holds_when_redis_is_back(
    own_server: RedisServer, cache: RedisCache
) -> None:
    """For who comes then on this host; hosts that know only Redis do not see it."""
    own_server.kill()
    local = cache.lock("nightly")
    assert local.acquire()
    own_server.start()
    other = cache.lock("nightly")
    assert other.locked()
    assert not other.acquire(blocking=False)
    client = own_server.client()
    assert not client.exists(":lock:1:nightly"), "Redis knows nothing of it"
    elsewhere = Lock(client, ":lock:1:nightly", timeout=5)
    assert elsewhere.acquire(blocking=False), "another host would get it"
    elsewhere.release()

    async def give_up() -> None:
        waiting = asyncio.ensure_future(cache.alock("nightly", timeout=600).acquire())
        while not client.exists(":lock:1:nightly"):
            await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.wait({waiting})

    asyncio.run(give_up())
    until(lambda: not client.exists(":lock:1:nightly"))
    waiter = Background(lambda: other.acquire(blocking_timeout=PATIENCE))
    until(lambda: client.exists(":lock:1:nightly"))
    assert not waiter.done
    assert local.degraded == "local"
    local.release()
    assert waiter.result() is True


def test_what_it_took_in_redis_is_free_if_the_release_is_lost(
    client: redis.Redis, proxy: Proxy
) -> None:
    """Another of this host holds it, and the connection breaks."""
    cache = cache_of(proxy, LOCK_ON_REDIS_DOWN="local")
    local, other = (cache.lock("nightly", timeout=600) for _ in range(2))
    with proxy.away():
        assert local.acquire()
    until(lambda: cache.client.get_client().ping())
    lost = proxy.lose_request(RELEASE, times=2)
    assert not other.acquire(blocking=False)
    until(lambda: not lost.left and not client.exists(other.keys.lock))


def test_who_has_lost_its_lock_while_it_waited_for_that_of_this_host_waits_again(
    own_server: RedisServer, cache: RedisCache, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "NO_WAIT_SECONDS", 0.0)
    own_server.kill()
    local, other, name = cache.lock("nightly"), cache.lock("nightly"), ":lock:1:nightly"
    assert local.acquire()
    own_server.start()
    client = own_server.client()
    waiter = Background(lambda: other.acquire(blocking_timeout=PATIENCE))
    until(lambda: client.exists(name))
    mine = Lock(client, name, timeout=60, thread_local=False)
    client.delete(name)
    assert mine.acquire(blocking=False)
    hurry_until(lambda: logged(caplog, "lost", name))
    local.release()
    until(lambda: places(name))
    mine.release()
    assert waiter.result() is True


@pytest.mark.parametrize("limit", [1, 2])
def test_what_was_taken_here_is_not_reset(
    own_server: RedisServer, cache: RedisCache, limit: int
) -> None:
    own_server.kill()
    with cache.lock("nightly", limit=limit) as held:
        assert held.degraded == "local"
        own_server.start()
        other = cache.lock("nightly", limit=limit)
        assert other.locked()
        assert not other.reset()
        assert held.owned()


def test_what_was_taken_in_redis_holds_when_it_is_gone(
    own_server: RedisServer, cache: RedisCache
) -> None:
    holder = cache.lock("nightly")
    assert holder.acquire()
    assert holder.degraded is None
    own_server.kill()
    assert not cache.lock("nightly").acquire(blocking=False)
    assert cache.lock("nightly").holder().pid == os.getpid()
    with pytest.raises(redis.ConnectionError):
        holder.release()
    assert cache.lock("nightly").acquire(blocking=False)


def test_a_waiter_goes_on_here(
    own_server: RedisServer, cache: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "OUTAGE_PATIENCE_SECONDS", 0.5)
    holder = cache.lock("nightly")
    assert holder.acquire()

    def wait() -> str | None:
        lock = cache.lock("nightly")
        assert lock.acquire(blocking_timeout=PATIENCE)
        return lock.degraded

    waiter = Background(wait)
    until(lambda: own_server.client().info("clients")["blocked_clients"])
    own_server.kill()
    with pytest.raises(redis.ConnectionError):
        holder.release()
    assert waiter.result() == "local"


@pytest.mark.parametrize("use", [Lock.acquire, Lock.locked])
def test_the_log_says_where_this_host_can_have_no_lock(
    client: redis.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture, use: Any
) -> None:
    """While Redis is there, the lock is in Redis."""
    no_folder = tmp_path / "file"
    no_folder.touch()
    options: dict[str, Any] = {"on_redis_down": "local", "local_folder": str(no_folder)}
    for _ in range(3):
        use(Lock(client, "report", 30, blocking=False, **options))
    assert client.exists("report") == (use is Lock.acquire)
    [said] = logged(caplog, "lock")
    assert said.startswith("The lock report is in Redis only, and fails in an outage: ")


def test_what_the_log_keeps_of_an_outage_keeps_no_lock(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A handle that nobody has any more gives its lock up, whatever records are kept."""
    with closed_port() as port:
        client = redis.Redis(port=port)
        lock = Lock(client, "report", timeout=30, on_redis_down="local", local_folder=folder)
        assert lock.acquire()
        assert "is held on this host only" in caplog.text
        kept = weakref.ref(lock)
        del lock
        until(lambda: gc.collect() is None or kept() is None)


def test_a_critical_lock_never_does(own_server: RedisServer, cache: RedisCache) -> None:
    own_server.kill()
    for options in ({"critical": True}, {"on_redis_down": "raise"}):
        with pytest.raises(redis.ConnectionError):
            cache.lock("nightly", **options).acquire()
    with pytest.raises(ValueError, match="a critical lock always needs Redis"):
        cache.lock("nightly", critical=True, on_redis_down="run")
    with pytest.raises(ValueError, match="must be 'raise', 'local' or 'run'"):
        cache.lock("nightly", on_redis_down="wait")
    with pytest.raises(ValueError, match="must be 'raise', 'local' or 'run'"):
        Lock(own_server.client(), "nightly", on_redis_down="wait")


def test_tasks_too(own_server: RedisServer, cache: RedisCache) -> None:
    own_server.kill()

    async def main() -> None:
        async with cache.alock("nightly") as lock:
            assert lock.degraded == "local"
            assert await lock.owned()
            assert not await cache.alock("nightly").acquire(blocking_timeout=0.05)
            assert not cache.lock("nightly").acquire(blocking=False)
        assert not await cache.alock("nightly").locked()

    asyncio.run(main())


def test_the_outage_is_emitted_once(
    own_server: RedisServer, cache: RedisCache, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.kill()
    told: list[Any] = []
    events.subscribe(told.append)
    try:
        for _ in range(5):
            with cache.lock("nightly"):
                pass
    finally:
        events.unsubscribe(told.append)
    assert sum(isinstance(event, FellBack) for event in told) == 5
    assert sum("is held on this host only" in r.getMessage() for r in caplog.records) == 1
    (outage,) = [o for o in outages() if str(own_server.port) in o.server]
    assert outage.fallbacks == 5


def test_locked(own_server: RedisServer) -> None:
    alias = {"BACKEND": "django_redis_lock.cache.RedisCache", "LOCATION": own_server.url}
    with override_settings(CACHES={"default": alias}):

        @locked("nightly", on_redis_down="local")
        def work() -> str:
            with pytest.raises(LockNotAcquired, match="is held by"):
                work()
            return "done"

        @locked("payments", critical=True, on_redis_down=None)
        def pay() -> str:
            return "paid"

        own_server.kill()
        assert [work(), work()] == ["done", "done"]
        with pytest.raises(redis.ConnectionError):
            pay()


def test_several_servers() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(RedisServer()) for _ in range(3)]
        backend = "django_redis_lock.cache.RedisCache"
        aliases = {
            name: {"BACKEND": backend, "LOCATION": server.url}
            for name, server in zip(("default", "b", "c"), servers, strict=True)
        }
        stack.enter_context(override_settings(CACHES=aliases))
        cache: Any = caches["default"]
        options: dict[str, Any] = {"using": ["default", "b", "c"]}
        lock = cache.lock("nightly", **options)
        assert isinstance(lock, Redlock)
        with lock:
            assert not cache.lock("nightly", **options).acquire(blocking=False)

        @locked("nightly", on_redis_down="local", **options)
        def work() -> str:
            with pytest.raises(LockNotAcquired):
                work()
            return "done"

        async def main() -> None:
            async with cache.alock("nightly", **options) as lock:
                assert await lock.owned()

        assert work() == "done"
        asyncio.run(main())
        for server in servers[:2]:
            server.kill()
        with pytest.raises(redis.ConnectionError, match="Only 1 of 3"):
            lock.acquire()
        assert work() == "done"


def test_too_few_replicas_are_no_outage(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who wants more than one server to know of the lock does not get one that none knows of."""
    monkeypatch.setattr("django_redis_lock.locking.base.MAX_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr("django_redis_lock.locking.lock.REPLY_MARGIN_SECONDS", PATIENCE)
    cache = cache_of(own_server, LOCK_ON_REDIS_DOWN="local", SOCKET_TIMEOUT=PATIENCE)
    with pytest.raises(TooFewReplicas):
        cache.lock("nightly", replicas=1, timeout=30).acquire()
    until(lambda: not cache.lock("nightly").locked())


@pytest.mark.parametrize("how", ["run", "local"])
def test_a_cancelled_waiter_leaves_the_lock_of_a_task_that_shares_its_handle(
    client: redis.Redis, folder: str, how: str
) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"on_redis_down": how, "local_folder": folder}
        lock = AsyncLock(asyncio_client(client), "shared", 30, thread_local=False, **options)
        before = Lock(client, "shared", timeout=30)
        before.acquire()
        holder = asyncio.create_task(lock.acquire())
        await asyncio.to_thread(until, lambda: client.info("clients")["blocked_clients"])
        waiter = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
        before.release()
        assert await holder
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        lock.ensure_held()
        assert await lock.owned()
        await lock.release()

    asyncio.run(main())
