"""Redis is away: what that costs those who call, and how soon it is noticed that it is back."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis
from redis.backoff import AbstractBackoff, NoBackoff
from redis.retry import Retry

from django_redis_lock import AsyncLock, Lock, MultiLock, Redlock
from django_redis_lock.cache import RedisCache
from django_redis_lock.locking import Renewal, hold
from django_redis_lock.transport.circuit_breaker import Breaker, CircuitOpen
from django_redis_lock.transport.server import server_of
from tests.holding import hurry_until, outages, settle
from tests.processes import PATIENCE, in_threads, until, waiting_in
from tests.redis_server import RedisServer
from tests.support.backends import places
from tests.support.background import Background
from tests.support.tasks import in_tasks

#: Seconds a call waits for a server that does not answer.
TIMEOUT = 0.15
#: Seconds for which calls fail at once, before one of them waits again.
PAUSE = 0.5
CALLS = 100


@pytest.fixture(autouse=True)
def _brief_pauses(settings: Any, monkeypatch: pytest.MonkeyPatch, pace: int) -> None:
    for name in ("TIMEOUT", "PAUSE"):
        monkeypatch.setitem(globals(), name, globals()[name] * pace)
    settings.DJANGO_REDIS_LOCK = {"BREAKER_PAUSE": PAUSE}
    # The keeper's reply would end an outage; it only makes calls of locks that it renews.
    monkeypatch.setattr(hold, "DESCRIBE_AFTER", 1000.0)


@pytest.fixture
def own_client(own_server: RedisServer) -> Iterator[redis.Redis]:
    with own_server.client(retry=Retry(NoBackoff(), 0), socket_timeout=TIMEOUT) as client:
        yield client


def cache_of(server: RedisServer, **options: Any) -> RedisCache:
    timeouts = {"SOCKET_CONNECT_TIMEOUT": TIMEOUT, "SOCKET_TIMEOUT": TIMEOUT}
    return RedisCache(server.url, {"OPTIONS": timeouts | options})


def breaker_of(client: Any) -> Breaker:
    return server_of(client).breaker


def waited_for(calls: int, call: Callable[[], Any]) -> int:
    """How many of ``calls`` calls, one after the other, waited for the server in vain."""
    waited = 0
    for _ in range(calls):
        with pytest.raises(redis.RedisError) as caught:
            call()
        waited += not isinstance(caught.value, CircuitOpen)
    return waited


def hold_back_calls(client: redis.Redis, call: Callable[[], Any]) -> None:
    """Until they fail at once; after each pause one of them waits again."""
    until(lambda: (waited_for(1, call), breaker_of(client).held_back)[1])


def few(began: float) -> int:
    """How many calls since ``began`` may have waited: three, and one more for every pause that has
    passed on a machine that stood still."""
    return 3 + int((time.monotonic() - began) // (PAUSE + TIMEOUT))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_few_calls_wait_for_a_server_that_is_frozen(
    own_server: RedisServer, own_client: redis.Redis, asynchronous: bool
) -> None:
    with in_tasks(own_client) as tasks:
        make = tasks.make_lock if asynchronous else partial(Lock, own_client)
        lock = make("faulty", timeout=30)
        lock.acquire()
        own_server.pause()
        began = time.monotonic()
        waited = waited_for(CALLS, lock.owned)
        assert 1 <= waited <= few(began)
        breaker_of(own_client)._open_until += PATIENCE
        with pytest.raises(CircuitOpen, match="has not answered for"):
            lock.locked()
        breaker_of(own_client)._open_until -= PATIENCE
        address = f"127.0.0.1:{own_server.port}/0"
        (outage,) = (known for known in outages() if known.server == address)
        assert outage.spared >= CALLS - waited
        own_server.resume()
        until(lambda: answers(lock.owned))
        assert address not in [known.server for known in outages()]
        lock.release()


def test_threads_have_their_time_out_where_tasks_were_first(own_server: RedisServer) -> None:
    tasks = redis.asyncio.Redis(port=own_server.port, socket_timeout=TIMEOUT)

    async def main() -> None:
        async with tasks:
            assert not await AsyncLock(tasks, "first").locked()

    asyncio.run(main())
    with redis.Redis(port=own_server.port, socket_timeout=TIMEOUT) as client:
        own_server.pause()
        began = time.monotonic()
        with pytest.raises(redis.TimeoutError):
            Lock(client, "second").locked()
        assert time.monotonic() < began + 4, "five seconds are the default"
        own_server.resume()


def answers(call: Callable[[], Any]) -> bool:
    try:
        call()
    except redis.RedisError:
        return False
    return True


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_refused_connection_does_not_open_the_breaker(
    own_server: RedisServer, own_client: redis.Redis, asynchronous: bool
) -> None:
    """It costs nothing; and a server that is back is used at once."""
    with in_tasks(own_client) as tasks:
        make = tasks.make_lock if asynchronous else partial(Lock, own_client)
        lock = make("faulty", timeout=30)
        own_server.kill()
        for _ in range(CALLS):
            with pytest.raises(redis.ConnectionError) as caught:
                lock.acquire()
            assert not isinstance(caught.value, CircuitOpen)
        assert breaker_of(own_client).failing
        own_server.start()
        assert lock.acquire(blocking=False)
        assert not breaker_of(own_client).failing
        lock.release()


def test_a_waiter_lives_through_it_and_a_renewal_ends_it(
    own_server: RedisServer, own_client: redis.Redis
) -> None:
    """The keeper asks on, whoever else is held back, and what it is answered counts for all."""
    holder = Lock(own_client, "faulty", timeout=60, renew=True)
    holder.acquire()
    waiter = Background(
        lambda: Lock(own_client, "faulty", timeout=30).acquire(blocking_timeout=PATIENCE)
    )
    until(lambda: places("faulty"))
    until(lambda: own_client.info("clients")["blocked_clients"])
    own_server.pause()
    hold_back_calls(own_client, holder.owned)
    own_server.resume()
    hurry_until(lambda: not breaker_of(own_client).failing, Renewal)
    holder.ensure_held()
    assert not waiter.done
    holder.release()
    assert waiter.result() is True


def test_many_renewals_look_together_for_a_server_that_is_lost(own_server: RedisServer) -> None:
    client = own_server.client()
    locks = [Lock(client, f"lock-{number}", timeout=3, renew=True) for number in range(30)]
    for lock in locks:
        assert lock.acquire()
        time.sleep(0.01)  # So that they come due one after the other.
    own_server.stop()
    with socket.create_server(("127.0.0.1", own_server.port)) as door:
        door.settimeout(PATIENCE)
        door.accept()[0].close()
        ends, found = time.monotonic() + 0.6, 0
        while time.monotonic() < ends:
            door.accept()[0].close()
            found += 1
    assert found < 20


@pytest.mark.parametrize(
    ("verb", "limit"),
    [
        *(("release", limit) for limit in (1, 3)),
        *(("extend", limit) for limit in (1, 3)),
        *(("task releases", limit) for limit in (1, 3)),
        ("redlock", 1),
        ("several names", 1),
    ],
)
def test_no_release_and_no_extension_is_held_back(
    own_server: RedisServer, own_client: redis.Redis, verb: str, limit: int
) -> None:
    """Redis is back, nobody has noticed yet, and the next attempt is not due yet."""
    others: list[redis.Redis] = []
    with in_tasks(own_client) as tasks:
        if verb == "redlock":
            address = own_server.url.rpartition("/")[0]
            others = [redis.Redis.from_url(f"{address}/{db}") for db in (1, 2)]
            lock: Any = Redlock([own_client, *others], "faulty", 30)
        elif verb == "several names":
            lock = MultiLock(own_client, ["faulty", "as well"], 30)
        else:
            make = tasks.make_lock if verb == "task releases" else partial(Lock, own_client)
            lock = make("faulty", timeout=30, limit=limit)
        call = partial(lock.extend, 5) if verb == "extend" else lock.release
        lock.acquire()
        call()  # The server knows the script then: there is one reply later, no error before it.
        if verb != "extend":
            lock.acquire()
        settle()  # What is extended, the keeper looks at.
        for client in (own_client, *others):
            hold_back(client)
        with pytest.raises(CircuitOpen):
            Lock(own_client, "another", timeout=30).acquire(blocking=False)
        call()
    assert own_client.exists("faulty") == (verb == "extend")
    assert not breaker_of(own_client).failing


def hold_back(client: redis.Redis) -> None:
    """Let calls be held back as after an outage that is over."""
    for _ in range(2):
        breaker_of(client).failed(redis.TimeoutError("no answer"), cost=5.0)
    breaker_of(client)._open_until += PATIENCE
    assert breaker_of(client).held_back


@pytest.mark.invariant("C3")
class TestGetOrSet:
    @pytest.mark.parametrize("many", [False, True])
    def test_few_calls_wait(self, own_server: RedisServer, many: bool) -> None:
        cache = cache_of(own_server)

        def value(number: int) -> Any:
            if many:
                return cache.get_or_set_many(["report"], lambda _: {"report": number})["report"]
            return cache.get_or_set("report", lambda: number, 60)

        assert value(1) == 1
        own_server.pause()
        waited, beginning = 0, time.monotonic()
        for number in range(CALLS):
            began = time.monotonic()
            assert value(number) == number
            waited += time.monotonic() - began >= TIMEOUT * 0.9
        assert waited <= few(beginning)
        own_server.resume()
        until(lambda: value(2) == 1)

    def test_the_read_that_looks_whether_redis_is_back_is_brief(
        self, own_server: RedisServer
    ) -> None:
        """It does not wait for as long as other reads, here for longer than the test does."""
        cache = RedisCache(own_server.url, {"OPTIONS": {"SOCKET_TIMEOUT": 3 * PATIENCE}})
        assert cache.get_or_set("report", lambda: 1, 60) == 1
        breaker = breaker_of(cache._lock_client())
        for _ in range(2):
            breaker.failed(redis.TimeoutError("no answer"), cost=5.0)
        breaker._open_until = time.monotonic()
        own_server.pause()
        assert in_threads(1, lambda: cache.get_or_set("report", lambda: 2, 60)) == [2]
        own_server.resume()

    @pytest.mark.parametrize("how", ["pause", "kill"])
    def test_the_threads_of_a_process_still_compute_once(
        self, own_server: RedisServer, how: str
    ) -> None:
        cache = cache_of(own_server)
        assert cache.get_or_set("warm", lambda: 1, 60) == 1
        getattr(own_server, how)()
        calls: list[int] = []

        def compute() -> int:
            calls.append(1)
            until(lambda: waiting_in("django_redis_lock.singleflight.runners") == 19)
            return 42

        assert in_threads(20, lambda: cache.get_or_set("report", compute, 60)) == [42] * 20
        assert len(calls) == 1


class Restarting(AbstractBackoff):
    """Of a project's ``retry``: the server is back before the last try."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._asked = 0

    def __deepcopy__(self, memo: object) -> Restarting:
        return self  # Each of redis-py's connections has a copy of a retry.

    def compute(self, failures: int) -> float:
        self._asked += 1
        if failures == self._asked == 4:
            self._server.start()
        return 0.0


#: On a cache that holds "there" at "report" and on its lock, which is free; in a thread or a task.
RETRIED: dict[str, Callable[[Any, Any], Any]] = {
    "get": lambda cache, lock: cache.get("report"),
    "get_or_set": lambda cache, lock: cache.get_or_set("report", str, 60),
    "acquire": lambda cache, lock: lock.acquire(blocking=False),
    "acquire, waiting": lambda cache, lock: lock.acquire(blocking_timeout=PATIENCE),
    "aget": lambda cache, lock: asyncio.run(cache.aget("report")),
    "aacquire": lambda cache, lock: asyncio.run(
        in_a_task(lambda: cache.alock("report", timeout=30).acquire(blocking=False))
    ),
}


async def in_a_task(call: Callable[[], Any]) -> Any:
    return await call()


@pytest.mark.parametrize("name", RETRIED)
@pytest.mark.skipif(
    int(redis.__version__.split(".")[0]) < 7, reason="redis-py 6 does not retry to connect"
)
def test_a_retry_of_the_projects_own_is_made(name: str) -> None:
    with RedisServer(persistent=True) as server:
        pool = {"retry": Retry(Restarting(server), 4), "retry_on_error": [redis.ConnectionError]}
        cache = RedisCache(server.url, {"OPTIONS": {"CONNECTION_POOL_KWARGS": pool}})
        cache.set("report", "there")
        server.stop()
        assert RETRIED[name](cache, cache.lock("report", timeout=30)) in ("there", True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_its_tries_are_held_back_as_all_calls_are(
    own_server: RedisServer, asynchronous: bool
) -> None:
    """Also where the first try was on a connection that had been closed."""
    client = own_server.client(socket_timeout=TIMEOUT, retry=Retry(NoBackoff(), 6))
    with in_tasks(client) as tasks, own_server.client() as other:
        make = tasks.make_lock if asynchronous else partial(Lock, client)
        assert make("report", timeout=30).acquire()
        other.client_kill_filter(_type="normal", skipme=True)
        own_server.pause()
        with pytest.raises(CircuitOpen):
            make("another", timeout=30).acquire(blocking=False)
        own_server.resume()
