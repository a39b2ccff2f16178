"""Whether a holder's process is alive: seen within seconds, however long its locks live, at the
cost of one command every ten seconds for all of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis

from django_redis_lock import AsyncLock, Lock, Redlock
from django_redis_lock.history import heartbeats
from django_redis_lock.keeper import keeper
from django_redis_lock.ops.inventory.listing import LockInfo, list_held
from django_redis_lock.protocol.holders import Owner
from django_redis_lock.protocol.identity import process_id
from django_redis_lock.protocol.keys import lock_keys, process_key
from django_redis_lock.transport.aio_client import asyncio_client
from django_redis_lock.transport.server import server_of
from tests.holding import settle, silence
from tests.processes import Link, processes, until
from tests.redis_server import RedisServer
from tests.redis_topologies import ClusterServers


def listed(client: Any) -> dict[str, LockInfo]:
    return {lock.name: lock for lock in list_held(client, b"").locks}


def hold(client: Any, *names: str, timeout: float | None = 3600) -> list[Lock]:
    """Locks whose holder has described itself, and given a heartbeat."""
    locks = [Lock(client, name, timeout) for name in names]
    for lock in locks:
        assert lock.acquire(blocking=False)
    for lock in locks:
        until(lambda lock=lock: client.hget(lock.keys.owner, "process"))
    settle()
    # The last one may have been a moment ago, in the database of another test.
    until(lambda: heartbeats.get(server_of(client)) in keeper())
    keeper().reschedule(heartbeats.get(server_of(client)), time.monotonic())
    until(lambda: client.exists(process_key(process_id())))
    return locks


def backdate(client: Any, name: str, seconds: float) -> None:
    settle()
    client.hincrby(lock_keys(name.encode()).owner, "seen", int(-seconds * 1e6))


def hold_until_killed(link: Link, url: str) -> None:
    with redis.Redis.from_url(url) as client:
        hold(client, "nightly")
        link.say(process_id())
        link.hear()


def test_a_killed_holder_is_silent_long_before_its_lock_ends(client: redis.Redis) -> None:
    url = "redis://{host}:{port}".format(**client.connection_pool.connection_kwargs)
    with processes(hold_until_killed, url) as (holder,):
        holder.go()
        process = holder.hear()
        assert listed(client)["nightly"].silent is False
        holder.kill()
    # Some time goes by.
    backdate(client, "nightly", 50)
    client.incrby(process_key(process), -50_000_000)
    lock = listed(client)["nightly"]
    assert lock.silent is True
    assert lock.seen == pytest.approx(50, abs=10)
    owner = Lock(client, "nightly", 30).holder()
    assert owner is not None
    assert owner.seen == pytest.approx(50, abs=10)
    assert ", no heartbeat for 5" in str(owner)


def test_all_locks_of_a_process_are_judged_by_the_latest(client: redis.Redis) -> None:
    """The keeper looks at one of them every 20 minutes, at the other every 10 s."""
    _kept = hold(client, "long", "short", "another's")
    backdate(client, "long", 600)
    silence(client, b"another's", 600)
    locks = listed(client)
    assert [locks[name].silent for name in ("long", "short", "another's")] == [False, False, True]
    # Without the heartbeat (CLEAR, eviction) what is known of the other lock counts.
    client.delete(process_key(process_id()))
    assert listed(client)["long"].seen == pytest.approx(0, abs=10)


@pytest.mark.parametrize("kind", ["Lock", "AsyncLock"])
def test_a_holder_that_is_alive_is_said_to_be(kind: str, client: redis.Redis) -> None:
    _kept = hold(client, "long")
    backdate(client, "long", 600)

    async def ask_in_a_task() -> Owner | None:
        return await AsyncLock(asyncio_client(client), "long", 30).holder()

    is_async = kind == "AsyncLock"
    owner = asyncio.run(ask_in_a_task()) if is_async else Lock(client, "long", 30).holder()
    assert owner is not None
    assert owner.seen == pytest.approx(0, abs=10)
    assert "no heartbeat" not in str(owner)


def test_on_several_servers(own_server: RedisServer) -> None:
    """Two of the three have lost the heartbeat."""
    address = own_server.url.rpartition("/")[0]
    clients = [redis.Redis.from_url(f"{address}/{db}") for db in range(3)]
    lock = Redlock(clients, "long", 3600)
    with lock:
        for one in clients:
            until(lambda one=one: one.exists(lock.keys.owner, process_key(process_id())) == 2)
            backdate(one, "long", 600)
        clients[0].delete(process_key(process_id()))
        clients[1].set(process_key(process_id()), "nonsense")
        owner = lock.holder()
        assert owner is not None
        assert owner.seen == pytest.approx(0, abs=10)
    for one in clients:
        one.close()


def test_on_a_cluster(cluster_servers: ClusterServers) -> None:
    with cluster_servers.client() as client:
        _kept = hold(client, "a", "b", "c")
        backdate(client, "a", 600)
        silence(client, b"c", 50)
        locks = listed(client)
        assert [locks[name].silent for name in "abc"] == [False, False, True]
        owner = Lock(client, "a", 30).holder()
        assert owner is not None
        assert owner.seen == pytest.approx(0, abs=10)


def test_a_user_without_the_right_to_it_locks_all_the_same(own_server: RedisServer) -> None:
    with own_server.client() as admin:
        admin.acl_setuser(
            "narrow",
            enabled=True,
            nopass=True,
            categories=["+@all"],
            keys=["narrow*", "{narrow*", "django_redis_lock:locks"],
        )
        with redis.Redis.from_url(own_server.url, username="narrow", password="x") as client:
            lock = Lock(client, "narrow", 30)
            assert lock.acquire(blocking=False)
            until(lambda: admin.hget(lock.keys.owner, "process"))
            until(lambda: (beat := heartbeats.get(server_of(client))) and beat.due > 1e12)
            assert listed(admin)["narrow"].silent is False
            lock.release()
