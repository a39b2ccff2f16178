"""The primary of a lock in a cluster fails, or gives its slot away, in the midst of it all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_redis_lock import AsyncLock, Lock, LockNotAcquired, LockNotOwnedError, MultiLock
from tests.integration.topologies.test_cluster_cache import cluster_cache
from tests.processes import PATIENCE, until
from tests.redis_topologies import ClusterServers, cluster, cut_off, slot_of
from tests.support.background import Background

NAME = "failing"


@pytest.fixture(scope="module")
def _failing_servers() -> Iterator[ClusterServers]:
    with cluster(node_timeout=1.0) as servers:
        yield servers


@pytest.fixture
def servers(_failing_servers: ClusterServers) -> ClusterServers:
    _failing_servers.settle()
    _failing_servers.flush()
    return _failing_servers


@pytest.fixture
def cluster_client(servers: ClusterServers) -> Iterator[redis.RedisCluster]:
    with servers.client() as client:
        yield client


def kill(servers: ClusterServers) -> None:
    servers.primary_of(NAME).kill()


def freeze(servers: ClusterServers) -> None:
    servers.primary_of(NAME).pause()


def by_hand(servers: ClusterServers) -> None:
    servers.fail_over(NAME)


def move(servers: ClusterServers) -> None:
    servers.move(slot_of(NAME))


Failure = Callable[[ClusterServers], None]
failures = pytest.mark.parametrize("fail", [kill, freeze, by_hand, move])


def replicated(servers: ClusterServers, key: str = NAME) -> bool:
    with servers.replica_of(NAME).client() as client:
        client.execute_command("READONLY")
        return bool(client.get(key))


def registered(servers: ClusterServers) -> bool:
    """Whether somebody waits at the lock's primary."""
    with servers.primary_of(NAME).client() as client:
        try:
            return bool(client.zcard("{failing}:waiters")) and blocked(servers)
        except redis.exceptions.ClusterDownError:
            return False  # A replica that was just promoted does not serve yet.


def blocked(servers: ClusterServers) -> bool:
    with servers.primary_of(NAME).client() as client:
        return bool(client.info("clients")["blocked_clients"])


def waiting(servers: ClusterServers, client: redis.RedisCluster, limit: int = 1) -> Background:
    """Another, which waits for the lock and gives it back."""

    def wait() -> int | None:
        options: dict[str, Any] = {"timeout": 30, "blocking_timeout": PATIENCE, "limit": limit}
        with Lock(client, NAME, **options) as lock:
            return lock.fence

    waiter = Background(wait)
    until(lambda: registered(servers))
    return waiter


@pytest.mark.sample(2)
@failures
def test_holder_and_waiter_go_on(
    servers: ClusterServers, cluster_client: redis.RedisCluster, fail: Failure
) -> None:
    told = threading.Event()
    holder = Lock(cluster_client, NAME, timeout=30, renew=True, on_lost=told.set)
    assert holder.acquire()
    waiter = waiting(servers, cluster_client)
    until(lambda: replicated(servers))
    before = servers.primary_of(NAME)
    fail(servers)
    until(lambda: servers.primary_of(NAME) is not before)
    until(lambda: registered(servers))
    assert not waiter.done
    assert not holder.lost
    holder.release()
    assert waiter.result() is not None
    assert not told.is_set()


@pytest.mark.sample(2)
@pytest.mark.parametrize("fail", [kill, move])
def test_holders_of_places_and_their_waiter_go_on(
    servers: ClusterServers, cluster_client: redis.RedisCluster, fail: Failure
) -> None:
    """No script names the key of a second place among its keys."""
    options: dict[str, Any] = {"timeout": 30, "renew": True, "limit": 2}
    holders = [Lock(cluster_client, NAME, thread_local=False, **options) for _ in range(2)]
    assert all(holder.acquire() for holder in holders)
    waiter = waiting(servers, cluster_client, limit=2)
    until(lambda: replicated(servers, "{failing}:place:2"))
    before = servers.primary_of(NAME)
    fail(servers)
    until(lambda: servers.primary_of(NAME) is not before)
    until(lambda: registered(servers))
    assert not waiter.done
    assert all(holder.owned() for holder in holders)
    second = holders[1].fence
    holders[1].release()
    assert waiter.result() > second
    assert holders[0].owned()


def test_the_loser_calls_on_lost_and_the_waiter_acquires(
    servers: ClusterServers, cluster_client: redis.RedisCluster
) -> None:
    """The replica has not heard of the acquisition."""
    primary, replica = servers.primary_of(NAME), servers.replica_of(NAME)
    cut_off(primary, [replica])
    told = threading.Event()
    holder = Lock(cluster_client, NAME, timeout=9, renew=True, on_lost=told.set)
    assert holder.acquire()
    fence = holder.fence
    waiter = waiting(servers, cluster_client)
    primary.kill()
    replica.resume()
    later = waiter.result()
    assert told.wait(PATIENCE)
    assert holder.lost
    assert fence is not None
    assert later > fence


@pytest.mark.sample(2, 1)
@failures
def test_locks_can_be_had_again(
    servers: ClusterServers, cluster_client: redis.RedisCluster, fail: Failure
) -> None:
    lock = Lock(cluster_client, NAME, timeout=300, blocking=False)
    with lock:
        pass
    servers.replicate(NAME)
    before = servers.primary_of(NAME)
    fail(servers)

    def cycle() -> bool:
        try:
            # What an acquisition that got no answer has taken is given back in the background, and
            # so is what the end of the block could not release.
            with lock:
                return True
        except (redis.ConnectionError, LockNotAcquired):
            return False

    until(cycle)
    # The node that is asked for it may hear of the new primary a moment later than the client.
    until(lambda: servers.primary_of(NAME) is not before)


@pytest.mark.sample(3)
@failures
def test_tasks_go_on(servers: ClusterServers, fail: Failure) -> None:
    async def main() -> None:
        client = redis.asyncio.RedisCluster.from_url(servers.url)
        holder = AsyncLock(client, NAME, timeout=30, renew=True)
        assert await holder.acquire()
        other = AsyncLock(client, NAME, timeout=30, blocking_timeout=PATIENCE)
        waiter = asyncio.create_task(other.acquire())
        await asyncio.to_thread(until, lambda: registered(servers) and replicated(servers))
        before = servers.primary_of(NAME)
        await asyncio.to_thread(fail, servers)
        await asyncio.to_thread(until, lambda: servers.primary_of(NAME) is not before)
        await asyncio.to_thread(until, lambda: registered(servers))
        await holder.release()
        assert await waiter
        await other.release()

    asyncio.run(main())


@pytest.mark.sample(3)
@failures
@pytest.mark.parametrize("leads", ["thread", "task"])
def test_who_follows_a_computation_has_its_value(
    servers: ClusterServers, fail: Failure, leads: str
) -> None:
    """A thread and the task of a loop follow each other by way of Redis."""
    cache = cluster_cache(servers)
    cache.key_prefix, cache.key_func = "", lambda key, *place: key
    began, go_on, computed = threading.Event(), threading.Event(), []

    def compute() -> str:
        computed.append(1)
        began.set()
        assert go_on.wait(PATIENCE)
        return "computed"

    def get(by: str) -> Any:
        if by == "thread":
            return cache.get_or_set(NAME, compute, 60)
        return asyncio.run(cache.aget_or_set(NAME, compute, 60))

    leader = Background(get, leads)
    assert began.wait(PATIENCE)
    follower = Background(get, "task" if leads == "thread" else "thread")
    until(lambda: blocked(servers))
    before = servers.primary_of(NAME)
    fail(servers)
    until(lambda: servers.primary_of(NAME) is not before)
    go_on.set()
    assert leader.result() == "computed"
    assert follower.result() == "computed"
    # The flight may not have been replicated in time.
    assert len(computed) <= 2


def test_a_lost_name_hides_no_other_that_was_not_released(servers: ClusterServers) -> None:
    lost = "a-0"
    away = next(
        name
        for name in (f"b-{n}" for n in range(100))
        if servers.primary_of(name) is not servers.primary_of(lost)
    )
    with servers.client(socket_timeout=0.5) as client:
        lock = MultiLock(client, [lost, away])
        lock.acquire()
        client.delete(lost)
        frozen = servers.primary_of(away)
        frozen.pause()
        with pytest.raises(LockNotOwnedError):
            lock.release()
        frozen.resume()
        until(lambda: not client.exists(away))
