"""The primary of a lock fails, and the sentinels put another in its place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis
from django_redis.pool import ConnectionFactory
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.sentinel import Sentinel

from django_redis_lock import AsyncLock, Lock, LockNotOwnedError, MultiLock, TooFewReplicas, events
from django_redis_lock.cache import RedisCache
from django_redis_lock.events import ServerDown, ServerUp
from django_redis_lock.protocol.keys import flight_key
from django_redis_lock.transport import Server, aio_client, server_of
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.redis_topologies import SentinelServers, cut_off, sentinels
from tests.support.backends import places
from tests.support.background import Background


@pytest.fixture
def servers() -> Iterator[SentinelServers]:
    """New ones: they start in a tenth of a second, and take ten to recover."""
    with sentinels(down_after=0.5) as servers:
        yield servers


@pytest.fixture
def sentinel_client(servers: SentinelServers) -> Iterator[redis.Redis]:
    with servers.client() as client:
        yield client


def kill(servers: SentinelServers) -> None:
    servers.primary.kill()


def freeze(servers: SentinelServers) -> None:
    servers.primary.pause()


def by_hand(servers: SentinelServers) -> None:
    servers.fail_over()


Failure = Callable[[SentinelServers], None]
failures = pytest.mark.parametrize("fail", [kill, freeze, by_hand])


@contextmanager
def outages(servers: Iterable[RedisServer] = ()) -> Iterator[list[Any]]:
    """The outages that begin and end in this block, but for those of ``servers`` that run on: if
    the machine stands still, they seem to be away as well."""
    found: list[Any] = []
    events.subscribe(found.append)
    try:
        yield found
    finally:
        events.unsubscribe(found.append)
        running = {f"127.0.0.1:{server.port}/0" for server in servers if server.runs}
        about = [event for event in found if isinstance(event, (ServerDown, ServerUp))]
        found[:] = [event for event in about if event.server not in running]


class Holder:
    """A renewed lock, and whether it was told of its loss."""

    def __init__(self, client: redis.Redis, **options: Any) -> None:
        self.told = threading.Event()
        options = {"timeout": 30, "renew": True} | options
        self.lock = Lock(client, "failing", on_lost=self.told.set, **options)
        assert self.lock.acquire()


@pytest.mark.sample(2)
@pytest.mark.parametrize("fail", [kill, by_hand])
def test_a_forced_release_after_a_failover_is_told_at_once(
    servers: SentinelServers, sentinel_client: redis.Redis, fail: Failure
) -> None:
    holder = Holder(sentinel_client, timeout=90)
    until(lambda: replicated(servers))
    until(lambda: sentinel_client.pubsub_channels("django_redis_lock:process:*"))
    before = servers.primary
    fail(servers)
    until(lambda: servers.primary is not before)
    until(lambda: listens(servers))
    with servers.client() as client:
        assert Lock(client, "failing").reset()
    assert holder.told.wait(15.0)  # And not after 30 s.


def ports_of(found: Iterable[Server]) -> set[int]:
    return {server.address.connection_kwargs["port"] for server in found}


def test_the_outage_of_a_primary_ends_when_it_is_replaced(
    servers: SentinelServers, sentinel_client: redis.Redis
) -> None:
    lock = Lock(sentinel_client, "failing", timeout=30)
    assert not lock.locked()

    def answers() -> bool:
        with suppress(redis.RedisError, OSError):
            return not lock.locked()
        return False

    with outages(servers.servers) as found:
        old = servers.primary
        old.kill()
        until(answers)
    assert [type(event) for event in found] == [ServerDown, ServerUp]
    assert {event.server for event in found} == {f"127.0.0.1:{old.port}/0"}


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


def test_a_server_that_is_no_primary_is_named(servers: SentinelServers) -> None:
    service: Any = server_of(servers.client())
    replica = servers.replicas[0].port
    with pytest.raises(redis.ConnectionError, match=f"^127.0.0.1:{replica}/0 is a replica"):
        service._node("127.0.0.1", replica).connect()


def test_a_connection_to_an_old_primary_is_closed_after_its_call(
    servers: SentinelServers, sentinel_client: redis.Redis
) -> None:
    service = server_of(sentinel_client)
    old = service.locate([b"failing"])
    connection = old.checkout()
    servers.fail_over()
    until(lambda: service.locate([b"failing"]) is not old)
    old.checkin(connection)
    assert old.must_connect()
    assert old.retired


def test_tasks_keep_no_connection_to_an_old_primary(servers: SentinelServers) -> None:
    async def ports() -> set[int]:
        with suppress(redis.RedisError, OSError):
            async with AsyncLock(client, "failing", timeout=30):
                pass
        of_loop = aio_client.loops[asyncio.get_running_loop()]
        return ports_of({*of_loop.clients, *of_loop.connections})

    async def forgotten(port: int) -> None:
        while port in await ports():
            await asyncio.sleep(0.05)

    async def main() -> None:
        old = servers.primary.port
        assert await ports() == {old}
        await asyncio.to_thread(servers.fail_over)
        await asyncio.wait_for(forgotten(old), PATIENCE)

    client = AsyncSentinel(servers.addresses).master_for(servers.name)
    asyncio.run(main())


def listens(servers: SentinelServers) -> bool:
    """Whether a process listens at the primary. It closes its connections when it becomes one."""
    with suppress(redis.ConnectionError), servers.client() as client:
        return bool(client.pubsub_channels("django_redis_lock:process:*"))
    return False


def replicated(servers: SentinelServers, key: str | bytes = "failing") -> bool:
    """Whether every replica has the lock, or what is at ``key``."""
    clients = [replica.client() for replica in servers.replicas]
    try:
        return all(client.exists(key) for client in clients)
    finally:
        for client in clients:
            client.close()


def blocked(servers: SentinelServers) -> bool:
    """Whether somebody waits at the primary. On a busy machine it may be replaced once more."""
    with servers.primary.client() as client:
        return bool(client.info("clients")["blocked_clients"])


def registered(servers: SentinelServers) -> bool:
    with servers.primary.client() as client:
        return bool(client.zcard("{failing}:waiters")) and blocked(servers)


def waiting(client: redis.Redis, limit: int = 1) -> Background:
    """Another, which waits for the lock and gives it back."""

    def wait() -> int | None:
        options: dict[str, Any] = {"timeout": 30, "blocking_timeout": PATIENCE, "limit": limit}
        with Lock(client, "failing", **options) as lock:
            return lock.fence

    waiter = Background(wait)
    until(lambda: client.zcard("{failing}:waiters"))
    return waiter


@pytest.mark.sample(3)
@failures
def test_holder_and_waiter_go_on(
    servers: SentinelServers, sentinel_client: redis.Redis, fail: Failure
) -> None:
    holder = Holder(sentinel_client)
    waiter = waiting(sentinel_client)
    until(lambda: replicated(servers))
    before = servers.primary
    fail(servers)
    until(lambda: servers.primary is not before)
    # It is renewed on the new primary, and the waiter waits there.
    until(lambda: registered(servers))
    assert not waiter.done
    assert not holder.lock.lost
    holder.lock.release()
    fence = waiter.result()
    assert fence is not None
    assert not holder.told.is_set()


def test_several_names_go_on(servers: SentinelServers, sentinel_client: redis.Redis) -> None:
    names = ["failing", "with it"]
    holder = MultiLock(sentinel_client, names, 30, renew=True)
    assert holder.acquire()
    waiter = Background(MultiLock(sentinel_client, names, 30).acquire)
    until(lambda: sentinel_client.zcard("{failing}:waiters"))
    until(lambda: all(replicated(servers, name) for name in names))
    before, fences = servers.primary, holder.fences
    kill(servers)
    until(lambda: servers.primary is not before)
    until(lambda: registered(servers))
    assert not waiter.done
    assert not holder.lost
    assert holder.fences == fences
    holder.release()
    assert waiter.result()


def test_holders_of_places_and_their_waiter_go_on(
    servers: SentinelServers, sentinel_client: redis.Redis
) -> None:
    holders = [Holder(sentinel_client, limit=2) for _ in range(2)]
    waiter = waiting(sentinel_client, limit=2)
    until(lambda: replicated(servers, "{failing}:place:2"))
    before = servers.primary
    servers.primary.kill()
    until(lambda: servers.primary is not before)
    until(lambda: registered(servers))
    assert not waiter.done
    assert not any(holder.lock.lost for holder in holders)
    second = holders[1].lock.fence
    holders[1].lock.release()
    assert waiter.result() > second
    assert holders[0].lock.owned()
    assert not any(holder.told.is_set() for holder in holders)


def test_the_loser_calls_on_lost_and_the_waiter_acquires(
    servers: SentinelServers, sentinel_client: redis.Redis
) -> None:
    """The replicas have not heard of the acquisition."""
    primary, replicas = servers.primary, servers.replicas
    cut_off(primary, replicas)
    holder = Holder(sentinel_client, timeout=9)
    fence = holder.lock.fence
    waiter = waiting(sentinel_client)
    primary.kill()
    for replica in replicas:
        replica.resume()
    later = waiter.result()
    assert holder.told.wait(PATIENCE)
    assert holder.lock.lost
    assert fence is not None
    assert later > fence


@pytest.mark.sample(3, 1)
@failures
def test_locks_can_be_had_again(
    servers: SentinelServers, sentinel_client: redis.Redis, fail: Failure
) -> None:
    # Its release may fail, and then the next try waits for its end.
    lock = Lock(sentinel_client, "failing", timeout=1)
    assert lock.acquire()
    lock.release()
    before = servers.primary
    fail(servers)
    until(lambda: servers.primary is not before)
    until(lambda: acquired_at(servers.primary, lock))


def acquired_at(primary: RedisServer, lock: Lock) -> bool:
    """Whether it could be had, and there: after a failover by hand the old primary goes on."""
    try:
        if not lock.acquire(blocking=False):
            return False
        with primary.client() as client:
            there = client.get("failing") == lock.local.token
        lock.release()
    except (redis.ConnectionError, LockNotOwnedError):
        return False
    return there


@pytest.mark.sample(3, 2)
@failures
def test_tasks_go_on(servers: SentinelServers, fail: Failure) -> None:
    async def main() -> None:
        manager = AsyncSentinel(servers.addresses)
        client = manager.master_for(servers.name)
        holder = AsyncLock(client, "failing", timeout=30, renew=True)
        assert await holder.acquire()
        other = AsyncLock(client, "failing", timeout=30, blocking_timeout=PATIENCE)
        waiter = asyncio.create_task(other.acquire())
        await asyncio.to_thread(until, lambda: places("failing") and replicated(servers))
        before = servers.primary
        await asyncio.to_thread(fail, servers)
        await asyncio.to_thread(until, lambda: servers.primary is not before)
        await asyncio.to_thread(until, lambda: blocked(servers))
        await holder.release()
        assert await waiter
        await other.release()

    asyncio.run(main())


def sentinel_cache(servers: SentinelServers) -> RedisCache:
    options = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": servers.addresses,
        "SOCKET_TIMEOUT": 5,
        "LOCK_FLIGHT_TIMEOUT": 20,  # Longer than a failover takes.
    }
    return RedisCache(f"redis://{servers.name}/0", {"OPTIONS": options})


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize(
    ("fail", "leads"), [(kill, "thread"), (freeze, "task"), (by_hand, "thread")]
)
def test_who_follows_a_computation_has_its_value(
    servers: SentinelServers, fail: Failure, leads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread and the task of a loop follow each other by way of Redis."""
    monkeypatch.setattr(ConnectionFactory, "_pools", {})  # They are kept by the primary's name.
    cache = sentinel_cache(servers)
    began, go_on, computed = threading.Event(), threading.Event(), []

    def compute() -> str:
        computed.append(1)
        began.set()
        assert go_on.wait(PATIENCE)
        return "computed"

    def get(by: str) -> Any:
        if by == "thread":
            return cache.get_or_set("failing", compute, 60)
        return asyncio.run(cache.aget_or_set("failing", compute, 60))

    leader = Background(get, leads)
    assert began.wait(PATIENCE)
    follower = Background(get, "task" if leads == "thread" else "thread")
    until(lambda: blocked(servers) and replicated(servers, flight_key(b":1:failing")))
    before = servers.primary
    fail(servers)
    until(lambda: servers.primary is not before)
    go_on.set()
    assert leader.result() == "computed"
    assert follower.result() == "computed"
    if fail is not by_hand:  # Then the old primary goes on, and takes what nobody will ever read.
        assert len(computed) == 1
        until(lambda: read(cache, "failing") == "computed")


def read(cache: RedisCache, key: str) -> Any:
    """The value; None while the sentinels still name the server that failed as one to read from."""
    try:
        return cache.get(key)
    except (redis.ConnectionError, redis.TimeoutError):
        return None


class TestReplicas:
    """Who wants the lock to be on a replica, too."""

    def test_it_is_there_when_it_counts(
        self, servers: SentinelServers, sentinel_client: redis.Redis
    ) -> None:
        for number in range(20):
            with Lock(sentinel_client, "failing", timeout=30, replicas=2) as lock:
                assert lock.fence is not None
                assert replicated(servers), number

    def test_a_waiter_waits_for_it_too(
        self, servers: SentinelServers, sentinel_client: redis.Redis
    ) -> None:
        holder = Holder(sentinel_client)

        def wait() -> bool:
            with Lock(sentinel_client, "failing", timeout=30, replicas=2):
                return replicated(servers)

        waiter = Background(wait)
        until(lambda: sentinel_client.zcard("{failing}:waiters"))
        holder.lock.release()
        assert waiter.result() is True

    @pytest.mark.parametrize("wait", [0, 1.5])
    def test_it_is_given_back_when_they_are_too_few(
        self, servers: SentinelServers, sentinel_client: redis.Redis, wait: float
    ) -> None:
        cut_off(servers.primary, servers.replicas[:1])
        until(lambda: sentinel_client.wait(1, 100) == 1)  # The other one had to connect again.
        lock = Lock(sentinel_client, "failing", timeout=30, blocking_timeout=wait, replicas=2)
        with pytest.raises(TooFewReplicas, match="1 of 2 replicas have confirmed") as caught:
            lock.acquire()
        assert (caught.value.confirmed, caught.value.wanted) == (1, 2)
        assert caught.value.lock_name == "failing"
        assert lock.local.token is None
        until(lambda: not lock.locked())
        with Lock(sentinel_client, "failing", timeout=30, replicas=1):
            pass

    def test_tasks_may_want_it_as_well(self, servers: SentinelServers) -> None:
        async def main() -> None:
            client = AsyncSentinel(servers.addresses).master_for(servers.name)
            async with AsyncLock(client, "failing", timeout=30, replicas=2):
                assert await asyncio.to_thread(replicated, servers)
            await asyncio.to_thread(cut_off, servers.primary, servers.replicas)
            lock = AsyncLock(client, "failing", timeout=30, replicas=2)
            with pytest.raises(TooFewReplicas):
                await lock.acquire()
            await asyncio.to_thread(until, lambda: not taken(servers))

        asyncio.run(main())

    @pytest.mark.parametrize("wrong", [-1, True, 1.0, "1", None])
    def test_wrong_numbers(self, wrong: Any) -> None:
        with pytest.raises((TypeError, ValueError), match="whole number of 0 or more"):
            Lock(redis.Redis(), "failing", replicas=wrong)


def taken(servers: SentinelServers) -> bool:
    """Whether the primary has the lock."""
    with servers.primary.client() as client:
        return bool(client.exists("failing"))
