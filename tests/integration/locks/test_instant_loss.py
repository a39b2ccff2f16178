"""A holder whose lock is released by force, or whose key another program changes, is told at once,
and not at its next renewal, which is 200 s away here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, Lock, Redlock
from django_redis_lock.cache import reset_all
from django_redis_lock.contrib import instant_loss
from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.ops.inventory import Outcome, list_held, release
from django_redis_lock.protocol.identity import process_id
from django_redis_lock.protocol.keys import process_key
from django_redis_lock.transport import server_of
from tests.faults.proxy import Proxy
from tests.holding import hurry, settle
from tests.processes import PATIENCE, Link, in_threads, processes, until
from tests.redis_server import GivenServer, RedisServer
from tests.redis_topologies import ClusterServers, SentinelServers
from tests.support.logs import logged

NAME = "told"
#: Seconds: far less than a third of the lock's lifetime.
SOON = 30.0


def listeners() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "django_redis_lock subscription"]


def subscribed(client: Any) -> list[bytes]:
    """The channels of the processes that can be told."""
    everywhere = {"target_nodes": "all"} if isinstance(client, redis.RedisCluster) else {}
    return list(client.pubsub_channels("django_redis_lock:process:*", **everywhere))


def listen(client: Any) -> None:
    """Wait until this process can be told of its locks."""
    if not subscribed(client):
        hurry()
    until(lambda: subscribed(client))
    settle()


def by_reset(client: Any) -> None:
    assert Lock(client, NAME).reset()


def by_release(client: Any) -> None:
    """As the admin does, and ``locks release``."""
    (lock,) = list_held(client, b"").locks
    assert release(client, lock.key, lock.owner.id, fence=lock.fence) is Outcome.RELEASED


def by_reset_all(client: Any) -> None:
    assert reset_all(client) == 1


def by_del(client: Any) -> None:
    assert client.delete(NAME)


def by_set(client: Any) -> None:
    assert client.set(NAME, "of another program")


def by_flushdb(client: Any) -> None:
    assert client.flushdb()


def by_flushall(client: Any) -> None:
    assert client.flushall()


class Held:
    """A lock that is held, and whose holder can be told.

    Attributes:
        lost: set by ``on_lost``.
    """

    def __init__(self, client: Any, renew: bool) -> None:
        self.lost = threading.Event()
        self.client = client
        self.lock = Lock(client, NAME, timeout=600, renew=renew, on_lost=self.lost.set)
        assert self.lock.acquire(blocking=False)

    def expect_told(self, end: Callable[[Any], None]) -> None:
        listen(self.client)
        end(self.client)
        assert self.lost.wait(SOON)
        assert self.lock.lost


@contextmanager
def held(client: Any, renew: bool = True) -> Iterator[Held]:
    found = Held(client, renew)
    yield found
    if not found.lock.lost:
        found.lock.release()


# -- each way, on each kind of server ------------------------------------------------------------


@pytest.mark.parametrize(
    "end", [by_reset, by_release, by_reset_all, by_del, by_set, by_flushdb, by_flushall]
)
@pytest.mark.parametrize("renew", [True, False])
def test_a_thread_is_told(own_server: RedisServer, end: Callable[[Any], None], renew: bool) -> None:
    with own_server.client() as client, held(client, renew) as lock:
        lock.expect_told(end)


@pytest.mark.parametrize("end", [by_reset, by_del, by_flushall])
def test_a_task_is_told(own_server: RedisServer, end: Callable[[Any], None]) -> None:
    async def main(client: redis.Redis) -> None:
        lost = asyncio.Event()
        async with redis.asyncio.Redis(port=own_server.port) as aclient:
            lock = AsyncLock(aclient, NAME, timeout=600, renew=True, on_lost=lost.set)
            assert await lock.acquire(blocking=False)
            await asyncio.to_thread(listen, client)
            await asyncio.to_thread(end, client)
            await asyncio.wait_for(lost.wait(), SOON)
            assert lock.lost

    with own_server.client() as client:
        asyncio.run(main(client))


@pytest.mark.parametrize("end", [by_reset, by_release])
def test_a_thread_is_told_behind_sentinel(
    sentinel_servers: SentinelServers, end: Callable[[Any], None]
) -> None:
    with sentinel_servers.client() as client, held(client) as lock:
        lock.expect_told(end)


@pytest.mark.parametrize("end", [by_reset, by_release])
def test_a_thread_is_told_on_a_cluster(
    cluster_servers: ClusterServers, end: Callable[[Any], None]
) -> None:
    """The channel may be at another node than the lock."""
    with cluster_servers.client() as client, held(client) as lock:
        lock.expect_told(end)


def test_the_holder_of_a_lock_on_several_servers_is_told(own_server: RedisServer) -> None:
    address = own_server.url.rpartition("/")[0]
    clients = [redis.Redis.from_url(f"{address}/{db}") for db in range(3)]
    lost = threading.Event()
    lock = Redlock(clients, NAME, 600, renew=True, on_lost=lost.set)
    assert lock.acquire(blocking=False)
    until(lambda: clients[0].client_list(_type="pubsub")[2:])
    assert Redlock(clients, NAME, 600).reset()
    assert lost.wait(SOON)
    assert not any(client.exists(NAME) for client in clients)
    for client in clients:
        client.close()


def test_another_acquisition_with_the_same_token_is_not_renewed(client: redis.Redis) -> None:
    first, second = Lock(client, NAME, timeout=600), Lock(client, NAME, timeout=600)
    assert first.acquire(token="chosen")
    by_del(client)
    assert second.acquire(token="chosen")
    hurry()
    until(lambda: first.lost)
    assert not second.lost
    second.release()


def test_a_lock_in_memory() -> None:
    with client_of(Database("memory")) as client, held(client) as lock:
        until(listeners)
        until(lambda: client.execute_command("PUBLISH", process_key(process_id()), "any"))
        by_reset(client)
        assert lock.lost.wait(SOON)


# -- what other programs do ------------------------------------------------------------------------


def test_a_holder_is_told_of_others_at_the_node_of_its_channel(
    cluster_servers: ClusterServers,
) -> None:
    node = cluster_servers.primary_of(process_key(process_id()))
    name = next(n for n in map("n{}".format, range(1000)) if cluster_servers.primary_of(n) is node)
    with cluster_servers.client() as client:
        lost = threading.Event()
        lock = Lock(client, name, timeout=600, on_lost=lost.set)
        assert lock.acquire(blocking=False)
        listen(client)
        assert client.delete(name)
        assert lost.wait(SOON)


def test_a_lock_that_another_program_has_only_touched_is_not_lost(client: redis.Redis) -> None:
    with held(client) as lock:
        listen(client)
        assert client.pexpire(NAME, 60_000)
        until(lambda: client.pttl(NAME) > 500_000)  # Its holder was told, and looked.
        assert not lock.lost.is_set()
        lock.expect_told(by_del)


# -- what it costs ---------------------------------------------------------------------------------


def hold_many(client: redis.Redis) -> dict[str, threading.Event]:
    """Locks that threads have acquired at the same time; each with what its loss sets."""
    lost = {f"{NAME}-{number}": threading.Event() for number in range(60)}
    names = iter(lost)

    def acquire() -> None:
        name = next(names)
        options = {"renew": True, "thread_local": False, "on_lost": lost[name].set}
        locks.append(lock := Lock(client, name, timeout=600, **options))
        assert lock.acquire()

    in_threads(len(lost), acquire)
    assert len(locks) >= len(lost)
    until(lambda: all(client.exists(f"{{{name}}}:owner") for name in lost))
    until(lambda: subscribed(client))
    settle()
    return lost


#: Kept, as a handle that is collected stops its renewal.
locks: list[Lock] = []


def test_many_locks_have_one_connection(client: redis.Redis) -> None:
    lost = hold_many(client)
    assert len(client.client_list(_type="pubsub")) == 1
    client.delete(*lost)
    assert all(event.wait(SOON) for event in lost.values())


def test_all_holders_of_locks_that_are_evicted_together_are_told() -> None:
    """Also of those that Redis evicts while it serves their keeper, which it does not report."""
    with RedisServer(config={"maxmemory-policy": "allkeys-random"}) as server:
        client = server.client()
        lost = hold_many(client)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 100_000)
        numbers = itertools.count()
        while client.exists(*lost):
            with client.pipeline(transaction=False) as pipeline:
                for number in itertools.islice(numbers, 50):
                    pipeline.set(f"value {number}", bytes(500))
                pipeline.execute(raise_on_error=False)
        client.config_set("maxmemory", 0)
        assert all(event.wait(SOON) for event in lost.values())


# -- what breaks -----------------------------------------------------------------------------------


def test_after_the_server_has_restarted(client: redis.Redis) -> None:
    with RedisServer(persistent=True) as server, server.client() as other, held(other) as lock:
        until(lambda: subscribed(other))
        server.restart()
        lock.expect_told(by_reset)


def test_while_redis_is_away_it_connects_now_and_then(
    own_server: RedisServer, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "django_redis_lock")
    monkeypatch.setattr(instant_loss, "FIRST_PAUSE_SECONDS", 3600.0)
    client = own_server.client()
    with Lock(client, NAME, timeout=600):
        listen(client)
        own_server.asking.config_set("maxclients", 1)  # So that no other connection comes about.
        own_server.asking.client_kill_filter(_type="pubsub")
        until(lambda: logged(caplog, "keeper", "Could not listen"))
        for _ in range(100):
            assert own_server.asking.ping()
        assert len(logged(caplog, "keeper", "Could not listen")) == 1


def test_what_was_missed_is_found_out_at_the_reconnection(client: redis.Redis) -> None:
    """The lock is gone, with all data, and nothing was published."""
    with RedisServer() as server, server.client() as other, held(other) as lock:
        until(lambda: subscribed(other))
        server.restart()
        assert lock.lost.wait(SOON)


def test_it_follows_the_primary(
    client: redis.Redis, own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the old one has not found out that it is none any more."""
    monkeypatch.setattr(instant_loss, "CHECK_AFTER_SECONDS", 0.05)
    with own_server.client() as other:
        primaries = [server_of(client), server_of(other)]
        service: Any = Mock(timeout=5.0, locate=lambda keys: primaries[0])
        listening = instant_loss.Subscription(service, b"channel", Mock())
        listening.start()
        try:
            until(lambda: client.pubsub_channels("channel"))
            del primaries[0]
            until(lambda: other.pubsub_channels("channel"))
            until(lambda: not client.pubsub_channels("channel"))
        finally:
            listening.close()
        until(lambda: not listeners())


def test_a_connection_that_died_without_a_word_is_replaced(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch, pace: int
) -> None:
    monkeypatch.setattr(instant_loss, "CHECK_AFTER_SECONDS", 0.1)
    with (
        Proxy(own_server) as proxy,
        proxy.client(socket_timeout=0.3 * pace) as client,
        held(client) as lock,
    ):
        until(lambda: subscribed(client))
        with proxy.stalled():
            before = set(proxy._pairs)
            until(lambda: set(proxy._pairs) - before)
        lock.expect_told(by_reset)


def test_a_process_that_listens_ends_at_once(redis_server: RedisServer | GivenServer) -> None:
    program = f"""
import sys, time, redis
from django_redis_lock import Lock
client = redis.Redis.from_url(sys.argv[1])
lock = Lock(client, {NAME!r}, timeout=600, renew=True)
lock.acquire()
while not client.pubsub_channels("django_redis_lock:process:*"):
    time.sleep(0.01)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, redis_server.url],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("right", ["-publish", "-subscribe"])
def test_without_the_right_the_next_renewal_tells(own_server: RedisServer, right: str) -> None:
    with own_server.client() as admin:
        rights = ("reset", "on", "nopass", "~*", "&*", "+@all", right)
        admin.execute_command("ACL SETUSER", "app", *rights)
        lost = threading.Event()
        with own_server.client(username="app", password="any") as other:
            lock = Lock(other, NAME, timeout=60, renew=True, on_lost=lost.set)
            assert lock.acquire(blocking=False)
            hurry()
            until(lambda: admin.exists(lock.keys.owner))
            assert Lock(other, NAME).reset()
            hurry()
            until(lost.is_set)
        until(lambda: not listeners())


def hold_in_a_fork(link: Link, url: str) -> None:
    with redis.Redis.from_url(url) as client:
        lock, lost = Lock(client, NAME, timeout=600, renew=True), threading.Event()
        assert lock.acquire(blocking=False)
        until(lambda: subscribed(client))
        child = os.fork()
        if not child:
            # It has no part in its parent's connection, and one of its own.
            own = Lock(client, "child's", timeout=600, renew=True, on_lost=lost.set)
            quiet = not listeners()
            assert own.acquire(blocking=False)
            until(lambda: len(subscribed(client)) == 2)
            link.say(quiet)
            assert lost.wait(SOON)
            os._exit(7 if not lock.lost else 8)
        link.say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        link.say(lock.lost)
        link.hear()
        until(lambda: lock.lost)


def test_a_forked_child_is_told_of_its_locks(redis_server: RedisServer | GivenServer) -> None:
    with (
        redis_server.client() as client,
        processes(hold_in_a_fork, redis_server.url) as (parent,),
    ):
        parent.go()
        assert parent.hear() is True
        assert Lock(client, "child's").reset()
        assert parent.hear() == 7
        assert parent.hear() is False
        by_reset(client)
        parent.say("yours too")
        assert parent.result() is None
