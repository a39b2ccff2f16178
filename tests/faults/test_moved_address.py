"""An address (a DNS name, a Service, a load balancer) moves to a promoted replica, and the former
primary lives on as a replica: connections made before then lead to the wrong server.

Kind: a reply that says so (READONLY, MASTERDOWN) ends every connection that was made before, of
whoever has one; and the call that got it is tried once more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_redis_lock import AsyncLock, Lock, Redlock
from django_redis_lock.cache import RedisCache
from django_redis_lock.history import Heartbeat
from django_redis_lock.keeper import keeper
from django_redis_lock.ops.inventory import list_held
from django_redis_lock.transport import asyncio_client, server_of
from django_redis_lock.transport.aio_client import connection_to
from tests.faults.proxy import Proxy
from tests.holding import hurry, settle
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.redis_topologies import PROMPT
from tests.support.background import Background
from tests.support.values import Producer

pytestmark = pytest.mark.invariant("P2")


class Address:
    """An address behind which one server replaces another."""

    def __init__(self, proxy: Proxy, old: RedisServer, new: RedisServer) -> None:
        self.old, self.new = old, new
        self.url = f"redis://127.0.0.1:{proxy.port}/0"
        self._proxy = proxy
        self.cache = RedisCache(self.url, {"OPTIONS": {"SOCKET_TIMEOUT": 5}})
        self.client: redis.Redis = self.cache._lock_client()

    def move(self) -> None:
        old, new = self.old.asking, self.new.asking
        until(lambda: old.wait(1, 1000))
        until(lambda: new.info("replication")["master_link_status"] == "up")
        until(lambda: _offset(new, "slave_repl_offset") == _offset(old, "master_repl_offset"))
        new.replicaof("NO", "ONE")
        old.replicaof("127.0.0.1", str(self.new.port))
        self._proxy.lead_to(self.new)
        until(lambda: old.info("replication").get("master_link_status") == "up")


def _offset(client: redis.Redis, name: str) -> int:
    return int(client.info("replication")[name])


@pytest.fixture
def address() -> Iterator[Address]:
    with RedisServer(config=PROMPT) as old, RedisServer(config=PROMPT) as new:
        new.asking.replicaof("127.0.0.1", str(old.port))
        until(lambda: new.asking.info("replication")["master_link_status"] == "up")
        with Proxy(old) as proxy:
            yield Address(proxy, old, new)
            for job in keeper().jobs():
                if not isinstance(job, Heartbeat):
                    keeper().discard(job)


#: What each caller does: it runs to its ``yield`` before the address moves, and then to its end.
Caller = Callable[[Address], Iterator[None]]
CALLERS: dict[str, Caller] = {}


def caller(function: Caller) -> Caller:
    CALLERS[function.__name__] = function
    return function


def in_loop(steps: Callable[[Address], Any]) -> Caller:
    """``steps`` is an asynchronous generator, all of which runs in one event loop."""

    def run(address: Address) -> Iterator[None]:
        loop = asyncio.new_event_loop()
        try:
            running = steps(address)
            loop.run_until_complete(anext(running))
            yield
            loop.run_until_complete(anext(running, None))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    CALLERS[steps.__name__] = run
    return run


def take(make: Callable[[], Any]) -> None:
    for _ in range(3):
        with make() as lock:
            lock.ensure_held()


def taking(name: str, key: Any, **options: Any) -> None:
    def steps(address: Address) -> Iterator[None]:
        take(lambda: address.cache.lock(key, blocking_timeout=PATIENCE, **options))
        yield
        take(lambda: address.cache.lock(key, blocking=False, **options))
        expect_nobody_at_the_old(address)

    CALLERS[name] = steps


taking("lock", "name")
taking("place of a limit", "name", limit=3)
taking("several names", ["one", "two"])


def expect_nobody_at_the_old(address: Address) -> None:
    """One reply ends all connections to the former primary."""

    def clients() -> list[Any]:
        """Those of this test: not the one that asks, and no replicas and primaries."""
        listed = address.old.asking.client_list()
        return [c for c in listed if c["flags"][0] in "NPb" and c["cmd"][:6] != "client"]

    until(lambda: not clients())
    assert not server_of(address.client).breaker.failing


@caller
def projects_own_command(address: Address) -> Iterator[None]:
    """A lock has seen that the address has moved: connections of redis-py's pools end, too."""
    of_cache = address.cache.client.get_client()
    settings = of_cache.connection_pool.connection_kwargs
    another = redis.Redis(connection_pool=redis.ConnectionPool(**settings))
    assert server_of(another) is server_of(of_cache)
    of_cache.lpush("work", 1)
    another.lpush("work", 2)
    take(lambda: address.cache.lock("name"))
    yield
    address.old.asking.replicaof("127.0.0.1", "1")  # It hears of nothing more.
    address.new.asking.lpush("work", 3)
    take(lambda: address.cache.lock("name", blocking=False))
    assert of_cache.llen("work") == another.llen("work") == 3


@caller
def projects_commands_alone(address: Address) -> Iterator[None]:
    """Nothing of this package calls. One reply ends the other connections of the pool, too."""
    client = address.cache.client.get_client()
    with client.pipeline() as pipe:
        pipe.watch("work")
        client.lpush("work", 1)
    yield
    address.old.asking.replicaof("127.0.0.1", "1")  # It hears of nothing more.
    assert client.lpush("work", 2) == 2
    with client.pipeline() as pipe:
        pipe.watch("work")
        assert pipe.llen("work") == client.llen("work") == 2


@caller
def fallback(address: Address) -> Iterator[None]:
    options: dict[str, Any] = {"on_redis_down": "run", "blocking_timeout": PATIENCE}
    take(lambda: address.cache.lock("name", **options))
    yield
    with address.cache.lock("name", **options) as lock:
        assert lock.degraded is None


@caller
def member_of_a_redlock(address: Address) -> Iterator[None]:
    with RedisServer() as second, RedisServer() as third:
        clients = [address.client, second.client(), third.client()]
        options: dict[str, Any] = {"timeout": 30, "blocking_timeout": PATIENCE}
        take(lambda: Redlock(clients, "name", server_timeout=PATIENCE, **options))
        yield
        third.kill()  # Now it needs the one that has moved.
        take(lambda: Redlock(clients, "name", server_timeout=PATIENCE, **options))


@caller
def held_lock(address: Address) -> Iterator[None]:
    with address.cache.lock("name", timeout=30, renew=True) as lock:
        hurry()
        settle()
        yield
        hurry()
        assert lock.owned()
        key = lock.keys.lock
        address.new.asking.pexpire(key, 20_000)
        until(lambda: (hurry(), address.new.asking.pttl(key) > 25_000)[1])
        assert lock.extend(5)
        assert not lock.lost
    assert not address.new.asking.exists(key)


@caller
def release(address: Address) -> Iterator[None]:
    lock = address.cache.lock("name", timeout=None)
    lock.acquire()
    yield
    lock.release()
    assert not address.new.asking.exists(lock.keys.lock)


@caller
def deferred_release(address: Address) -> Iterator[None]:
    with address.cache.lock("other", timeout=30):
        hurry()
        settle()  # The keeper is connected.
        lock = address.cache.lock("name", timeout=None)
        lock.acquire()
        yield
        lock._leave_to_keeper()
        until(lambda: not address.new.asking.exists(lock.keys.lock))


@caller
def waiter(address: Address) -> Iterator[None]:
    lock = address.cache.lock("name", timeout=None)
    lock.acquire()
    waiting = Background(lambda: address.cache.lock("name").acquire(blocking_timeout=PATIENCE))
    until(lambda: address.old.asking.info("clients")["blocked_clients"])
    yield
    until(lambda: address.new.asking.info("clients")["blocked_clients"])
    lock.release()
    assert waiting.result()


@caller
def forced_release_is_told_at_once(address: Address) -> Iterator[None]:
    """The subscription is a connection, too."""
    lost = threading.Event()
    lock = address.cache.lock("name", timeout=300, on_lost=lost.set)
    if lock.acquire():
        hurry()
        settle()
        yield
        take(lambda: address.cache.lock("other", blocking=False))  # This meets a READONLY.
        channels = address.new.asking.pubsub_channels
        until(lambda: any(b":process:" in _bytes(name) for name in channels()))
        assert Lock(address.new.client(), lock.keys.lock).reset()
        assert lost.wait(PATIENCE)


def _bytes(name: str | bytes) -> bytes:
    return name if isinstance(name, bytes) else name.encode()


@caller
def each_write_alone(address: Address) -> Iterator[None]:
    """With many connections in the pool, all of which lead to the former primary."""
    cache = address.cache
    pool = address.client.connection_pool
    cache.set("number", 1, 300)
    until(lambda: address.new.asking.exists(cache.make_key("number")))
    yield
    writes: list[Callable[[], Any]] = [
        lambda: cache.incr("number") == 2,
        lambda: cache.set("key", 1),
        lambda: cache.add("added", 1),
        lambda: cache.delete("key"),
        lambda: not cache.set_many({"a": 1}),
        lambda: cache.delete_many(["a"]),
        lambda: cache.touch("added", 100),
        lambda: cache.expire("added", 100),
        lambda: cache.persist("added"),
    ]
    for write in writes:
        old = [_connected_to(pool, address.old) for _ in range(3)]
        del old
        assert write()
    expect_nobody_at_the_old(address)


def _connected_to(pool: Any, server: RedisServer) -> None:
    """Leave a connection in the pool that leads to the former primary, as one that was in use while
    the others were renewed."""
    connection = pool.get_connection() if _NO_NAME else pool.get_connection("GET")
    connection.disconnect()
    port, connection.port = connection.port, server.port
    connection.connect()
    connection.port = port
    pool.release(connection)


_NO_NAME = tuple(map(int, redis.__version__.split(".")[:2])) >= (5, 3)


@caller
def stale_reads_end_with_the_first_write(address: Address) -> Iterator[None]:
    cache = address.cache
    cache.set("key", "old", 300)
    assert cache.get("key") == cache.get_or_set("key", lambda: 0) == "old"
    yield
    address.old.asking.replicaof("127.0.0.1", "1")  # It hears of nothing more.
    cache.set("key", "new", 300)
    assert cache.get("key") == "new"
    assert cache.get_or_set("key", lambda: 0) == "new"
    assert cache.get_many(["key"]) == {"key": "new"}


@caller
def computation(address: Address) -> Iterator[None]:
    cache = address.cache
    cache.get_or_set("warm", lambda: 1, 300)
    slow = Producer()
    slow.finish.clear()
    leader = Background(cache.get_or_set, "led", slow, 300)
    assert slow.begun.wait(PATIENCE)
    other = RedisCache(address.url.replace("127.0.0.1", "localhost"), {})  # As another process.
    follower = Background(lambda: other.get_or_set("led", lambda: "twice", 300, wait=PATIENCE))
    until(lambda: address.old.asking.info("clients")["blocked_clients"])
    yield
    until(lambda: (hurry(*_flight_renewals()), follower.done or _blocked(address.new))[1])
    slow.finish.set()
    assert leader.result() == follower.result() == "computed"
    assert cache.get("led") == "computed"
    assert cache.get_or_set("new", lambda: 1, 300) == 1
    assert cache.get("new") == 1
    assert cache.get_or_set_many(["x", "y"], lambda keys: dict.fromkeys(keys, 2), 300)
    assert cache.get_many(["x", "y"]) == {"x": 2, "y": 2}
    assert cache.mark_stale("x", stale=60)


def _flight_renewals() -> list[type]:
    return [type(job) for job in keeper().jobs() if type(job).__name__ == "FlightRenewal"]


def _blocked(server: RedisServer) -> bool:
    return bool(server.asking.info("clients")["blocked_clients"])


@caller
def inventory(address: Address) -> Iterator[None]:
    cache = address.cache
    lock = cache.lock("name", timeout=None)
    lock.acquire()
    assert list_held(address.client, cache._lock_key(""), 10).locks
    yield
    address.old.asking.replicaof("127.0.0.1", "1")
    Lock(address.new.client(), "django_redis_lock:test", timeout=30).acquire()
    assert cache.lock("name").reset()
    assert not list_held(address.client, cache._lock_key(""), 10).locks


@in_loop
async def tasks(address: Address) -> Any:
    cache = address.cache
    async with cache.alock("name", blocking_timeout=PATIENCE):
        await cache.aset("number", 1, 300)
    assert await cache.aget_or_set("warm", lambda: 1, 300) == 1
    held = cache.alock("held", timeout=None, thread_local=False)
    await held.acquire()
    waiting = asyncio.ensure_future(cache.alock("held").acquire(blocking_timeout=PATIENCE))
    await asyncio.to_thread(until, lambda: _blocked(address.old))
    yield
    async with cache.alock("name", blocking=False) as lock:
        assert await lock.owned()
    async with cache.alock("name", limit=2, blocking=False):
        pass
    async with cache.alock(["one", "two"], blocking=False):
        pass
    await asyncio.to_thread(until, lambda: _blocked(address.new))
    await held.release()
    assert await waiting
    assert await cache.aincr("number") == 2
    assert await cache.aget("number") == 2
    assert await cache.adelete("number")
    assert await cache.aget_or_set("led", lambda: 1, 300) == 1
    assert await asyncio.to_thread(cache.get, "led") == 1


@in_loop
async def each_call_of_a_task_alone(address: Address) -> Any:
    client = asyncio_client(address.client)
    await AsyncLock(client, "name", timeout=30).acquire()
    yield
    assert await address.cache.aset("first", 1, 300)
    assert await AsyncLock(client, "other", timeout=30).acquire(blocking=False)
    made = address.new.asking.info("stats")["total_connections_received"]
    for _ in range(3):
        assert await address.cache.aset("first", 1, 300)
    assert address.new.asking.info("stats")["total_connections_received"] == made


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CALLERS)
def test_a_caller_follows_its_address(address: Address, name: str) -> None:
    steps = CALLERS[name](address)
    next(steps)
    address.move()
    assert next(steps, None) is None


# -- a connection that has lost its login ----------------------------------------------------------

#: What is done once, by threads and by tasks.
ONCE: dict[str, Callable[[RedisCache], Any]] = {
    "incr": lambda cache: cache.incr("number") == 2,
    "add": lambda cache: cache.add("other", 1),
    "set nx": lambda cache: cache.set("other", 1, nx=True),
    "get_or_set": lambda cache: cache.get_or_set("number", lambda: 0) == 1,
    "aincr": lambda cache: asyncio.run(_warmed(cache, cache.aincr, "number")),
    "aadd": lambda cache: asyncio.run(_warmed(cache, cache.aadd, "other", 1)),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_connection_that_has_lost_its_login_is_replaced(
    name: str, own_server: RedisServer
) -> None:
    """A token has expired, or a proxy has another server behind it: NOAUTH says that nothing has
    run, and a new connection logs in."""
    own_server.asking.config_set("requirepass", "right")
    cache = RedisCache(own_server.url, {"OPTIONS": {"PASSWORD": "right"}})
    cache.set("number", 1)
    log_out(cache)
    assert ONCE[name](cache)


def log_out(cache: RedisCache) -> None:
    for connection, *_ in server_of(cache._lock_client())._idle:
        connection.send_command("RESET")
        assert connection.read_response() == b"RESET"


async def _warmed(cache: RedisCache, call: Callable[..., Any], *args: Any) -> bool:
    assert await cache.aget("number") == 1
    connection = connection_to(server_of(cache._lock_client()))
    assert connection is not None
    assert await connection.request(b"*1\r\n$5\r\nRESET\r\n") == b"RESET"
    return bool(await call(*args))
