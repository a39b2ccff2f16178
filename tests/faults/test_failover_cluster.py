"""The primary of a lock in a cluster fails, or gives its slot away, in the midst of it all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from django_redis_lock import LockNotOwnedError, MultiLock
from tests.faults import failovers
from tests.faults.failovers import TAG, World
from tests.integration.topologies.test_cluster_cache import cluster_cache
from tests.processes import until
from tests.redis_topologies import ClusterServers, cluster, slot_of

#: In the same slot as the names of ``failovers``.
NAME = TAG.strip("{}")


@pytest.fixture
def servers() -> Iterator[ClusterServers]:
    """New ones: they start more quickly than they recover."""
    with cluster() as servers:
        yield servers


def kill(servers: ClusterServers) -> None:
    servers.primary_of(NAME).kill()
    servers.fail_over(NAME, "TAKEOVER")


def freeze(servers: ClusterServers) -> None:
    servers.primary_of(NAME).pause()
    servers.fail_over(NAME, "TAKEOVER")


def by_hand(servers: ClusterServers) -> None:
    servers.fail_over(NAME)


def move(servers: ClusterServers) -> None:
    servers.move(slot_of(NAME))


def die(servers: ClusterServers) -> None:
    """The others notice it themselves, and elect its replica; until then, the cluster is down."""
    servers.primary_of(NAME).kill()


Failure = Callable[[ClusterServers], None]
#: Each with the seconds after which the others, and who waits for a reply, give a server up.
FAILURES: list[Any] = [
    pytest.param(kill, 60.0, 5.0, id="kill"),
    pytest.param(freeze, 60.0, 1.0, id="freeze"),
    pytest.param(by_hand, 60.0, 5.0, id="by_hand"),
    pytest.param(move, 60.0, 5.0, id="move"),
    pytest.param(die, 1.0, 5.0, id="die", marks=pytest.mark.sample(0)),
]


@pytest.mark.parametrize(("fail", "node_timeout", "timeout"), FAILURES)
def test_callers_go_on(
    fail: Failure, node_timeout: float, timeout: float, pace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failovers.notice_soon(monkeypatch)
    patience = {"socket_timeout": timeout * pace}
    with (
        cluster(node_timeout) as servers,
        servers.client(**patience) as client,
        closing(
            World(
                client,
                cluster_cache(servers, SOCKET_TIMEOUT=timeout * pace),
                lambda: redis.asyncio.RedisCluster.from_url(servers.url, **patience),
                lambda: servers.primary_of(NAME),
            )
        ) as world,
    ):

        def replace() -> None:
            servers.replicate(NAME)
            fail(servers)

        failovers.go_on(world, failovers.CALLERS, replace)


def test_the_loser_calls_on_lost_and_the_waiter_acquires(servers: ClusterServers) -> None:
    def fail_over() -> None:
        servers.fail_over(NAME, "TAKEOVER")

    primary, replica = servers.primary_of(NAME), servers.replica_of(NAME)
    with servers.client() as client:
        failovers.lose(client, NAME, primary, [replica], fail_over)


def test_a_lost_name_hides_no_other_that_was_not_released(
    cluster_servers: ClusterServers, pace: int
) -> None:
    servers = cluster_servers
    lost = "a-0"
    away = next(
        name
        for name in (f"b-{n}" for n in range(100))
        if servers.primary_of(name) is not servers.primary_of(lost)
    )
    with servers.client(socket_timeout=0.5 * pace) as client:
        lock = MultiLock(client, [lost, away])
        lock.acquire()
        client.delete(lost)
        frozen = servers.primary_of(away)
        frozen.pause()
        with pytest.raises(LockNotOwnedError):
            lock.release()
        frozen.resume()
        until(lambda: not client.exists(away))
