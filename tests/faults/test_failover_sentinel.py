"""The primary of a lock fails, and the sentinels put another in its place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
import redis
from django_redis.pool import ConnectionFactory
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.sentinel import Sentinel

from django_redis_lock import AsyncLock, Lock, LockNotOwnedError, TooFewReplicas, events
from django_redis_lock.cache import RedisCache
from django_redis_lock.contrib import topology
from django_redis_lock.events import ServerDown, ServerUp
from django_redis_lock.transport import aio_client, server_of
from tests.faults import failovers
from tests.faults.failovers import Caller, World
from tests.holding import hurry, hurry_until, settle
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.redis_topologies import SentinelServers, ask, cut_off, sentinels
from tests.support.background import Background


@pytest.fixture
def servers() -> Iterator[SentinelServers]:
    """New ones: they start in a tenth of a second, and take ten to recover."""
    with sentinels() as servers:
        yield servers


@pytest.fixture
def sentinel_client(servers: SentinelServers) -> Iterator[redis.Redis]:
    with servers.client() as client:
        yield client


def kill(servers: SentinelServers) -> None:
    servers.primary.kill()
    servers.fail_over()


def freeze(servers: SentinelServers) -> None:
    servers.primary.pause()
    servers.fail_over()


def by_hand(servers: SentinelServers) -> None:
    servers.fail_over()


def die(servers: SentinelServers) -> None:
    """The sentinels notice it themselves, and elect one of them that replaces the primary."""
    before = servers.primary
    before.kill()
    servers.until_replaced(before)


Failure = Callable[[SentinelServers], None]
#: Each with the seconds after which the sentinels, and who waits for a reply, give a server up.
FAILURES: list[Any] = [
    pytest.param(kill, 60.0, 5.0, id="kill"),
    pytest.param(freeze, 60.0, 1.0, id="freeze"),
    pytest.param(by_hand, 60.0, 5.0, id="by_hand"),
    pytest.param(die, 0.5, 5.0, id="die", marks=pytest.mark.sample(0)),
]


@contextmanager
def outages(servers: Iterable[RedisServer] = ()) -> Iterator[list[Any]]:
    """The outages that begin and end in this block, but for those of ``servers`` that run on: if
    the machine stands still, they seem to be away as well."""
    heard: list[Any] = []
    found: list[Any] = []
    events.subscribe(heard.append)
    try:
        yield found
    finally:
        events.unsubscribe(heard.append)  # What another thread just tells may still come.
        running = {f"127.0.0.1:{server.port}/0" for server in servers if server.runs}
        about = [event for event in heard if isinstance(event, (ServerDown, ServerUp))]
        found += [event for event in about if event.server not in running]


#: Those of ``failovers``, and who has more to do with sentinels.
CALLERS = [*failovers.CALLERS]


def caller(function: Caller) -> Caller:
    CALLERS.append(function)
    return function


@caller
def told_at_once(world: World) -> Iterator[None]:
    """Of a forced release: the next renewal is minutes away."""
    told = threading.Event()
    lock = Lock(world.client, "reset", timeout=900, on_lost=told.set, thread_local=False)
    assert lock.acquire()
    hurry()
    settle()
    yield
    until(lambda: ask(world.primary(), "PUBSUB", "CHANNELS", "django_redis_lock:process:*"))
    assert Lock(world.client, "reset").reset()
    assert told.wait(PATIENCE)


@caller
def connections_of_a_loop(world: World) -> Iterator[None]:
    """None to the old primary is kept."""

    async def ports() -> set[int]:
        with suppress(redis.RedisError, OSError):
            async with AsyncLock(world.for_tasks, "ports", timeout=30):
                pass
        of_loop = aio_client.loops[asyncio.get_running_loop()]
        used = {*of_loop.clients, *of_loop.connections}
        return {server.address.connection_kwargs["port"] for server in used}

    before = world.primary().port
    assert before in world.tasks.do(ports)
    yield
    until(lambda: before not in world.tasks.do(ports))


@pytest.mark.parametrize(("fail", "down_after", "timeout"), FAILURES)
def test_callers_go_on(
    fail: Failure, down_after: float, timeout: float, pace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failovers.notice_soon(monkeypatch)
    monkeypatch.setattr(ConnectionFactory, "_pools", {})  # They are kept by the primary's name.
    patience = {"socket_timeout": timeout * pace}
    with (
        sentinels(down_after) as servers,
        servers.client(**patience) as client,
        closing(
            World(
                client,
                sentinel_cache(servers, timeout * pace),
                lambda: AsyncSentinel(servers.addresses, **patience).master_for(servers.name),
                lambda: servers.primary,
            )
        ) as world,
        outages(servers.servers) as found,
    ):
        old = servers.primary.port
        world.old_goes_on = fail is by_hand

        def replace() -> None:
            servers.replicate()
            fail(servers)

        failovers.go_on(world, CALLERS, replace)
    if fail is kill:  # An outage of that server, which ends when it is replaced.
        kinds = [type(event) for event in found]
        assert kinds.count(ServerDown) == kinds.count(ServerUp) > 0
        assert {event.server for event in found} == {f"127.0.0.1:{old}/0"}


def sentinel_cache(servers: SentinelServers, timeout: float) -> RedisCache:
    options = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": servers.addresses,
        "SOCKET_TIMEOUT": timeout,
        "LOCK_FLIGHT_TIMEOUT": 20,  # Longer than a failover takes.
    }
    return RedisCache(f"redis://{servers.name}/0", {"KEY_PREFIX": "site", "OPTIONS": options})


def test_a_dead_sentinel_is_no_outage(servers: SentinelServers, sentinel_client: Any) -> None:
    for sentinel in servers.sentinels[:2]:
        sentinel.kill()
    with outages(servers.servers) as found, Lock(sentinel_client, "failing", timeout=30):
        pass
    assert not found


def test_a_service_of_which_nothing_is_known_has_an_outage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a process that starts while all sentinels are down."""
    client = Sentinel([("127.0.0.1", 1)]).master_for("main")
    service: Any = server_of(client)
    with outages() as found:
        for _ in range(2):
            with Lock(client, "failing", timeout=30, on_redis_down="run"):
                pass
        monkeypatch.setattr(service, "_look", lambda until: None)
        service._discover(0.0)
    assert [type(event) for event in found] == [ServerDown, ServerUp]
    assert {event.server for event in found} == {"the sentinels' service 'main'"}
    assert found[1].fallbacks == 2
    assert caplog.text.count("is skipped, its code runs unlocked") == 1


def test_who_waits_for_anothers_search_gives_up_in_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searching, found = threading.Event(), threading.Event()

    def ask(*_: Any) -> Any:
        searching.set()
        assert found.wait(PATIENCE)
        raise RedisTimeoutError("frozen")

    monkeypatch.setattr(topology, "ask", ask)
    lock = Lock(Sentinel([("127.0.0.1", 1)]).master_for("searched"), "failing", timeout=30)
    other = Background(lock.acquire)
    assert searching.wait(PATIENCE)
    with pytest.raises(RedisConnectionError, match="service 'searched': no answer"):
        lock.acquire(blocking_timeout=0.1)
    found.set()
    with pytest.raises(RedisConnectionError, match="frozen"):
        other.result()


def replicated(servers: SentinelServers, key: str | bytes = "failing") -> bool:
    """Whether every replica has the lock, or what is at ``key``."""
    clients = [replica.client() for replica in servers.replicas]
    try:
        return all(client.exists(key) for client in clients)
    finally:
        for client in clients:
            client.close()


def test_the_loser_calls_on_lost_and_the_waiter_acquires(
    servers: SentinelServers, sentinel_client: redis.Redis
) -> None:
    primary, replicas = servers.primary, servers.replicas
    failovers.lose(sentinel_client, "failing", primary, replicas, servers.fail_over)


REPLICAS = "django_redis_lock.locking.base"


class TestReplicas:
    """Who wants the lock to be on a replica, too."""

    def test_it_is_there_when_it_counts(
        self, servers: SentinelServers, sentinel_client: redis.Redis
    ) -> None:
        for number in range(20):
            with Lock(sentinel_client, "failing", timeout=30, replicas=2) as lock:
                assert lock.fence is not None
                assert replicated(servers), number

    @pytest.mark.parametrize("wait", [0, 0.7])
    def test_it_is_given_back_when_they_are_too_few(
        self,
        servers: SentinelServers,
        sentinel_client: redis.Redis,
        wait: float,
        pace: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(f"{REPLICAS}.MIN_PATIENCE_SECONDS", 0.6 * pace)
        cut_off(servers.primary, servers.replicas[:1])
        until(lambda: sentinel_client.wait(1, 100) == 1)  # The other one had to connect again.
        patience = wait * pace
        lock = Lock(sentinel_client, "failing", timeout=30, blocking_timeout=patience, replicas=2)
        with pytest.raises(TooFewReplicas, match="1 of 2 replicas have confirmed") as caught:
            lock.acquire()
        assert (caught.value.confirmed, caught.value.wanted) == (1, 2)
        assert caught.value.lock_name == "failing"
        assert lock.local.token is None
        until(lambda: not lock.locked())
        with Lock(sentinel_client, "failing", timeout=30, replicas=1):
            pass

    def test_tasks_may_want_it_as_well(
        self, servers: SentinelServers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def main() -> None:
            client = AsyncSentinel(servers.addresses).master_for(servers.name)
            async with AsyncLock(client, "failing", timeout=30, replicas=2):
                assert await asyncio.to_thread(replicated, servers)
            await asyncio.to_thread(cut_off, servers.primary, servers.replicas)
            monkeypatch.setattr(f"{REPLICAS}.MAX_PATIENCE_SECONDS", 0.2)
            lock = AsyncLock(client, "failing", timeout=30, replicas=2)
            with pytest.raises(TooFewReplicas):
                await lock.acquire()
            await asyncio.to_thread(until, lambda: not taken(servers))

        asyncio.run(main())


def taken(servers: SentinelServers) -> bool:
    """Whether the primary has the lock."""
    with servers.primary.client() as client:
        return bool(client.exists("failing"))


def test_the_reason_of_a_loss_by_a_failover(
    servers: SentinelServers, sentinel_client: redis.Redis
) -> None:
    """The new primary has older data: it knows the holder, and not that the lock was renewed."""
    told = threading.Event()
    lock = Lock(sentinel_client, "moved", 60, renew=True, on_lost=told.set, thread_local=False)
    assert lock.acquire()
    hurry_until(lambda: sentinel_client.exists(lock.keys.owner))
    settle()
    before = servers.primary.port
    servers.fail_over()
    servers.primary.client().delete("moved")
    hurry_until(told.is_set)
    assert lock.lost_reason.startswith("a failover has lost it: ")
    assert f":{before}" in lock.lost_reason
    with pytest.raises(LockNotOwnedError, match="a failover has lost it"):
        lock.release()
