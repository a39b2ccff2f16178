"""Clusters and services of sentinels: which servers are asked for the primaries, when, and what
their replies mean. No Redis runs here, and time stands still."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import redis.asyncio
import redis.cluster
import redis.sentinel
from django.core.exceptions import ImproperlyConfigured
from django_redis.exceptions import ConnectionInterrupted
from redis.connection import Connection, SSLConnection
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    ClusterError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_redis_lock.cache import RedisCache
from django_redis_lock.contrib import topology
from django_redis_lock.contrib.topology import (
    Cluster,
    Node,
    Primary,
    SentinelService,
    _common,
    _meet_primary,
    ask,
)
from django_redis_lock.contrib.topology import client as clients
from django_redis_lock.contrib.topology.client import LazyCluster, _Cluster, _parsed
from django_redis_lock.protocol.keys import FLIGHTS, SLOTS, index_key, slot_of
from django_redis_lock.transport import Server, may_have_run, server_of
from tests.support.clock import FakeClock

# Quick cells, each of which is another decision.
pytestmark = pytest.mark.sample(1)

A, B, C = (("127.0.0.1", port) for port in (7001, 7002, 7003))
SILENT = RedisTimeoutError("frozen")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """That of the topology only."""
    fake = FakeClock()
    monkeypatch.setattr(topology, "time", fake)
    return fake


class Said(dict[Any, Any]):
    """What servers reply, by their host and port; an error is raised.

    Attributes:
        asked: whom, in order, and until when the reply was waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []
        self.until: list[float] = []

    def __call__(self, server: Server, until: float, *command: bytes) -> Any:
        settings = server.address.connection_kwargs
        where = settings["host"], settings["port"]
        self.asked.append(where)
        self.until.append(until)
        reply = self[where]
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    replies = Said()
    monkeypatch.setattr(topology, "ask", replies)
    return replies


def slots(first: int, last: int, *nodes: tuple[str, int]) -> list[Any]:
    return [first, last, *([host.encode(), port, b"id"] for host, port in nodes)]


def make_cluster(*first: tuple[str, int], **settings: Any) -> Any:
    return Cluster(LazyCluster([*(first or (A, B))], {"socket_timeout": 3.0, **settings}))


@pytest.fixture
def cluster(clock: FakeClock, said: Said) -> Any:
    """Of two primaries and a replica, which have not been discovered yet."""
    whole = [slots(0, 8191, A, C), slots(8192, SLOTS - 1, B)]
    said.update({A: whole, B: whole, C: whole})
    return make_cluster()


def where(server: Any) -> tuple[str, int]:
    settings = server.address.connection_kwargs
    return settings["host"], settings["port"]


# -- when the primaries are discovered -------------------------------------------------------------


def test_at_first_and_then_after_errors(cluster: Any, clock: FakeClock, said: Said) -> None:
    assert cluster.must_discover()
    assert where(cluster.locate(())) == A
    clock.now += 1e6
    assert not cluster.must_discover()
    cluster.on_error(SILENT)
    assert cluster.must_discover()
    cluster.locate(())
    assert len(said.asked) == 2
    clock.now += 0.09
    cluster.on_error(SILENT)  # A tenth of a second after the last discovery at the earliest.
    assert not cluster.must_discover()
    clock.now += 0.02
    assert cluster.must_discover()


@pytest.mark.parametrize(
    ("error", "discovers"),
    [
        (SILENT, True),
        (RedisConnectionError("refused"), True),
        (MovedError("4786 127.0.0.1:7002"), True),
        (AskError("4786 127.0.0.1:7002"), True),
        (TryAgainError(), True),
        (ClusterDownError("CLUSTERDOWN"), True),
        (ResponseError("WRONGTYPE"), False),
        (ReadOnlyError("READONLY"), False),
    ],
)
def test_errors_after_which_a_cluster_is_discovered(
    cluster: Any, clock: FakeClock, error: Exception, discovers: bool
) -> None:
    cluster.locate(())
    clock.now += 1
    cluster.on_error(error)
    assert (cluster._trouble, cluster.must_discover()) == (discovers, discovers)


def test_a_discovery_that_fails_is_not_repeated_at_once(
    cluster: Any, clock: FakeClock, said: Said
) -> None:
    said.update({A: SILENT, B: SILENT})
    pauses = []
    for _ in range(6):
        with pytest.raises(RedisConnectionError, match=r"7001: frozen; frozen") as caught:
            cluster.locate(())
        assert not may_have_run(caught.value)
        cluster.on_error(SILENT)
        pauses.append(cluster._discover_at - clock.now)
        clock.now = cluster._discover_at
    assert pauses == [1, 2, 4, 8, 16, 16]
    said[B] = [slots(0, SLOTS - 1, B)]
    assert where(cluster.locate(())) == B
    clock.now += 1
    cluster.on_error(SILENT)
    assert cluster.must_discover()
    said[B] = SILENT
    assert where(cluster.locate(())) == B  # The last known one is used.
    assert cluster._discover_at == clock.now + 1
    # Its nodes are known, and who calls them notices their outages.
    assert not cluster.breaker.failing


@pytest.mark.parametrize(("patience", "seconds"), [(None, 2.0), (0.5, 0.5)])
def test_how_long_a_discovery_may_take(
    cluster: Any, said: Said, patience: float | None, seconds: float
) -> None:
    cluster.locate((), patience)
    assert said.until == [1000.0 + seconds]


def test_no_primary_of_a_slot(cluster: Any, said: Said) -> None:
    said.update({A: [slots(0, 0, A)]})
    with pytest.raises(RedisConnectionError, match="no primary has this slot"):
        cluster.locate((b"report",))


class Recorded:
    """The mutex of a discovery, which one thread after the other may have."""

    def __init__(self, taken: bool = False) -> None:
        self.taken, self.timeouts, self.released = taken, list[float](), 0
        self.on_acquired: Callable[[], object] = lambda: None

    def acquire(self, timeout: float) -> bool:
        self.timeouts.append(timeout)
        self.on_acquired()
        return not self.taken

    def release(self) -> None:
        self.released += 1
        if self.taken:
            raise RuntimeError("another thread has it")


def test_others_wait_for_the_first_discovery(cluster: Any) -> None:
    cluster._discovering = Recorded(taken=True)
    with pytest.raises(RedisConnectionError, match="no answer in time"):
        cluster.locate((), 0.5)
    assert cluster._discovering.timeouts == [0.5]


def test_others_wait_for_a_discovery_only_after_errors(cluster: Any, clock: FakeClock) -> None:
    cluster.locate(())
    cluster._discovering = Recorded(taken=True)
    cluster._discover_at = clock.now
    assert where(cluster.locate((), 0.5)) == A
    cluster.on_error(SILENT)
    clock.now += 1
    assert where(cluster.locate((), 0.5)) == A
    assert cluster._discovering.timeouts == [0, 0.5]


def test_what_another_thread_has_just_discovered_is_enough(
    cluster: Any, clock: FakeClock, said: Said
) -> None:
    cluster._discovering = mutex = Recorded()
    mutex.on_acquired = lambda: (
        cluster._take_in(cluster._node(*A), said[A]) or setattr(cluster, "_discover_at", math.inf)
    )
    assert where(cluster.locate(())) == A
    assert said.asked == []
    assert mutex.released == 1


@pytest.mark.parametrize(
    ("until", "patience"), [(1000.3, 0.3), (1005.0, 1.0), (1000.0, 0.05), (math.inf, 1.0)]
)
def test_how_long_a_node_may_take(clock: FakeClock, until: float, patience: float) -> None:
    exchanged: list[Any] = []
    server: Any = SimpleNamespace(
        exchange=lambda command, patience: exchanged.append((command, patience)) or 5
    )
    assert ask(server, until, b"CLUSTER", b"SLOTS") == 5
    ((command, seconds),) = exchanged
    assert command == b"*2\r\n$7\r\nCLUSTER\r\n$5\r\nSLOTS\r\n"
    assert seconds == pytest.approx(patience)


# -- its servers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False])
def test_each_slot_has_its_primary(cluster: Any, said: Said, in_order: bool) -> None:
    if not in_order:  # Nothing says that a node must name them in theirs.
        said.update({node: told[::-1] for node, told in said.items()})
    cluster.locate(())
    assert [where(cluster._owners[slot]) for slot in (0, 8191, 8192, SLOTS - 1)] == [A, A, B, B]
    assert len(cluster._owners) == SLOTS
    names = [b"n%d" % number for number in range(8)]
    owners = [A if slot_of(name) < 8192 else B for name in names]
    assert {*owners} == {A, B}
    assert [where(cluster.seen_at([name, b"other"])) for name in names] == owners
    nodes = cluster.nodes()
    assert nodes[0] is cluster
    assert {where(node) for node in nodes[1:]} == {A, B, C}
    primaries = {where(node): slots for node, slots in cluster.primaries().items()}
    assert primaries == {A: [*range(8192)], B: [*range(8192, SLOTS)]}


def test_without_keys_any_slot_will_do(cluster: Any, said: Said) -> None:
    said[A] = [slots(0, 0, B), slots(1, SLOTS - 1, A)]
    assert where(cluster.locate(())) == B


def test_all_primaries_are_looked_up_again(cluster: Any, said: Said) -> None:
    """Slots may have moved without a refusal; and some may have no owner."""
    cluster.locate(())
    said.update({each: [slots(0, 99, B)] for each in (A, B, C)})
    assert {where(node): slots for node, slots in cluster.primaries().items()} == {B: [*range(100)]}


def test_keys_of_one_slot_go_into_one_call(cluster: Any) -> None:
    keys = [b"{a}1", b"{b}1", b"{a}2"]
    assert cluster.in_one_call(keys) == [b"{a}1", b"{a}2"]
    assert cluster.index_of(FLIGHTS, b"{a}1") == index_key(FLIGHTS, slot_of(b"a"))


@pytest.mark.parametrize(
    ("lines", "moving"),
    [
        ((b"7001 master - 0-8191", b"7002 master - 8192-16383"), False),
        ((b"7001 master - 0-8191 [5->-b]", b"7002 master"), True),
        ((b"7001 master", b"7002 master - [5-<-a]"), True),
    ],
)
def test_whether_slots_are_being_moved(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, lines: tuple[bytes, bytes], moving: bool
) -> None:
    cluster.locate(())
    slots_of = topology.ask
    of_nodes = dict(zip((A, B), lines, strict=True))

    def ask(node: Any, until: float, *command: bytes) -> Any:
        if command == (b"CLUSTER", b"SLOTS"):
            return slots_of(node, until, *command)
        assert (command, until) == ((b"CLUSTER", b"NODES"), math.inf)
        return of_nodes[where(node)]

    monkeypatch.setattr(topology, "ask", ask)
    assert cluster.is_moving_slots() is moving


def test_a_refusal_moves_its_slot(cluster: Any) -> None:
    cluster.locate(())
    cluster.on_error(MovedError("5 127.0.0.1:7002"))
    assert [where(cluster._owners[slot]) for slot in (4, 5, 6)] == [A, B, A]
    refusal = AskError("6 127.0.0.1:7003")
    cluster.on_error(refusal)
    assert where(cluster._owners[6]) == A
    assert where(cluster.sent_to(refusal)) == C
    assert str(refusal) == "slot 6 is moved to 127.0.0.1:7003"


def test_a_server_that_has_left_is_forgotten(cluster: Any, said: Said) -> None:
    cluster.locate(())
    old = {where(node): node for node in cluster.nodes()[1:]}
    closed = Connection()
    closed.generation = 0
    old[A].checkin(closed)
    old[A].breaker.failed(SILENT, 5.0)
    ended: list[Connection] = []
    closed.disconnect = lambda *_: ended.append(closed)
    said.update({each: [slots(0, SLOTS - 1, B, C)] for each in (A, B, C)})
    cluster.primaries()
    assert {where(node) for node in cluster.nodes()[1:]} == {B, C}
    assert [old[each].retired for each in (A, B, C)] == [True, False, False]
    assert cluster._node(*B) is old[B]
    assert cluster._node(*A) is not old[A]
    assert ended == [closed]
    assert (old[A].MAX_IDLE_CONNECTIONS, old[B].MAX_IDLE_CONNECTIONS) == (0, 16)
    assert (old[A].breaker.failing, old[A].breaker.silent) == (False, True)


@pytest.mark.parametrize("parser", [None, object])
def test_the_settings_of_its_servers(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, parser: Any
) -> None:
    """Early versions of redis-py know the errors of a cluster by a parser."""
    monkeypatch.setattr(topology, "PARSER", parser)
    monkeypatch.setattr(topology, "ASYNC_PARSER", parser)
    node = cluster._node(*A)
    assert isinstance(node, Node)
    assert node.timeout == 3.0
    expected = {} if parser is None else {"parser_class": parser}
    host, port = A
    settings = {"socket_timeout": 3.0, "host": host, "port": port}
    assert node.address.connection_kwargs == {**settings, **expected}
    of_tasks: dict[str, Any] = {}
    node.for_tasks(of_tasks)
    assert of_tasks == expected
    assert node.discovered
    assert not cluster.must_connect()


def test_addresses_are_mapped(cluster: Any, said: Said) -> None:
    def remap(address: tuple[str, int]) -> tuple[str, int]:
        return (address[0], address[1] - 1000)

    mapped = make_cluster(A, address_remap=remap)
    said[A] = [slots(0, SLOTS - 1, ("127.0.0.1", 8002))]
    assert where(mapped.locate(())) == B
    assert where(mapped.sent_to(AskError("6 127.0.0.1:8003"))) == C


@pytest.mark.parametrize("host", [None, b"", b"10.0.0.9", "10.0.0.9"])
def test_a_node_that_does_not_know_its_address(cluster: Any, said: Said, host: Any) -> None:
    said[A] = [[0, SLOTS - 1, [host, 7001, b"id"]]]
    assert where(cluster.locate(())) == ("10.0.0.9" if host else "127.0.0.1", 7001)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, Connection),
        ({"ssl": True}, SSLConnection),
        ({"ssl": False}, Connection),
        ({"connection_class": SSLConnection}, SSLConnection),
        ({"connection_class": Connection}, Connection),
    ],
)
def test_connections_are_encrypted_as_the_clients(settings: dict[str, Any], kind: type) -> None:
    assert _common(LazyCluster([A], settings)).connection_class is kind


def test_clients_of_one_cluster_share_it() -> None:
    def server(**settings: Any) -> Server:
        return server_of(LazyCluster([A, B], settings))

    assert server() is server()
    assert server(username="other") is not server()
    assert server(ssl=True) is not server()
    assert str(server()) == "the cluster of 127.0.0.1:7001"
    assert server().breaker.server == "a cluster"


# -- whom a cluster asks ---------------------------------------------------------------------------


def test_the_next_discovery_begins_with_another_node(cluster: Any, said: Said) -> None:
    for _ in range(3):
        cluster.primaries()
    assert len(said.asked) == 3
    assert said.asked[0] == A
    assert said.asked[1] != A
    assert said.asked[2] != said.asked[1]


def test_those_that_are_away_are_asked_last(cluster: Any, said: Said) -> None:
    said[A] = SILENT
    cluster.primaries()
    assert said.asked == [A, B]
    said.asked.clear()
    cluster.primaries()
    assert said.asked == [C]  # Neither the silent one nor that which was asked before.
    assert [where(node) for node in cluster._known] == [B, C, A]
    cluster._node(*B).breaker.failed(SILENT, 0.0)
    cluster.primaries()
    assert said.asked == [C, B]
    assert [where(node) for node in cluster._known] == [C, A, B]
    cluster._node(*B).breaker.answered()


def test_one_that_answers_again_is_asked_as_others_are(cluster: Any, said: Said) -> None:
    whole, said[A] = said[A], SILENT
    cluster.primaries()
    assert cluster._silent == {cluster._node(*A)}
    said[A] = whole
    said.update({B: SILENT, C: SILENT})
    cluster.primaries()
    assert cluster._silent == {cluster._node(*B), cluster._node(*C)}


def test_a_discovery_without_time_for_all_goes_on_with_the_others(
    cluster: Any, clock: FakeClock, said: Said
) -> None:
    cluster.locate(())
    said.update({B: SILENT, C: SILENT})
    order = [where(node) for node in cluster._known]
    said.asked.clear()
    with pytest.raises(RedisConnectionError, match="frozen"):
        cluster._look(clock.now)
    assert said.asked == order[:1]
    assert [where(node) for node in cluster._known] == [*order[1:], order[0]]
    cluster._look(clock.now + 1)
    assert said.asked == order


def test_so_does_the_first_discovery(cluster: Any, clock: FakeClock, said: Said) -> None:
    said[A] = SILENT
    for asked in ([A], [A, B]):
        with suppress(RedisConnectionError):
            cluster._look(clock.now)
        assert said.asked == asked
    assert where(cluster.locate(())) == A


def test_when_no_node_answers_it_begins_again_with_those_of_the_settings(
    cluster: Any, clock: FakeClock, said: Said
) -> None:
    said.update({each: [slots(0, SLOTS - 1, C)] for each in (A, B)})
    cluster.locate(())
    said[C] = SILENT
    with pytest.raises(RedisConnectionError):
        cluster._look(clock.now + 1)
    said.asked.clear()
    cluster._look(clock.now + 1)
    assert said.asked == [A]


@pytest.mark.parametrize("second", [True, False])
def test_a_node_that_has_left_the_cluster_knows_no_slots(
    cluster: Any, said: Said, second: bool
) -> None:
    said[A] = []
    if not second:
        said[B] = []
        with pytest.raises(RedisConnectionError, match="no node has any slots"):
            cluster.locate(())
    else:
        assert where(cluster.locate(())) == A
        assert said.asked == [A, B]


# -- sentinels -------------------------------------------------------------------------------------

ONE, TWO, THREE = (("127.0.0.1", port) for port in (26001, 26002, 26003))


def facts(epoch: int, where: tuple[str, int]) -> dict[bytes, bytes]:
    host, port = where
    return {b"ip": host.encode(), b"port": b"%d" % port, b"config-epoch": b"%d" % epoch}


def flat(found: dict[bytes, bytes]) -> list[bytes]:
    return [word for pair in found.items() for word in pair]


def make_service(*sentinels: tuple[str, int], **options: Any) -> Any:
    manager = redis.sentinel.Sentinel([*(sentinels or (ONE, TWO, THREE))], **options)
    return SentinelService(manager.master_for("main").connection_pool)


@pytest.fixture
def service(clock: FakeClock, said: Said) -> Any:
    said.update(dict.fromkeys((ONE, TWO, THREE), facts(5, A)))
    return make_service()


def test_sentinels_are_asked_each_second(service: Any, clock: FakeClock, said: Said) -> None:
    """At first all of them; then one, as long as it names the known primary."""
    assert where(service.locate(())) == A
    assert said.asked == [ONE, TWO, THREE]
    clock.now += 0.999
    assert not service.must_discover()
    clock.now += 0.001
    for _ in range(2):
        service.locate((b"any",))
    assert said.asked[3:] == [ONE]


@pytest.mark.parametrize("in_resp3", [True, False])
def test_the_latest_epoch_is_right(
    service: Any, clock: FakeClock, said: Said, in_resp3: bool
) -> None:
    service.locate(())
    old = service.locate(())
    clock.now += 1
    said.asked.clear()
    latest = facts(7, B)
    said.update({ONE: facts(6, C), TWO: latest if in_resp3 else flat(latest)})
    assert where(service.locate(())) == B
    assert said.asked == [ONE, TWO, THREE]
    assert [where(node) for node in service.nodes()[1:]] == [B]
    assert old.retired


def test_after_an_error_all_sentinels_are_asked(service: Any, clock: FakeClock, said: Said) -> None:
    service.locate(())
    said.update({TWO: facts(6, B)})
    said.asked.clear()
    service.on_error(SILENT)
    clock.now += 1
    assert where(service.locate(())) == B
    assert said.asked == [ONE, TWO, THREE]


def test_a_dead_sentinel_is_asked_last(service: Any, clock: FakeClock, said: Said) -> None:
    said[ONE] = RedisConnectionError("refused")
    for _ in range(2):
        assert where(service.locate(())) == A
        clock.now += 1
    assert said.asked == [ONE, TWO, THREE, TWO]
    assert [where(sentinel) for sentinel in service._sentinels] == [TWO, THREE, ONE]


def test_no_sentinel_answers(service: Any, clock: FakeClock, said: Said) -> None:
    said.update(dict.fromkeys((ONE, TWO, THREE), RedisConnectionError("refused")))
    for _ in range(5):
        with pytest.raises(RedisConnectionError, match=r"service 'main': refused$"):
            service.locate(())
        clock.now = service._discover_at
    # No server is known that could be away, so it is the service; but no caller has waited.
    assert (service.breaker.failing, service.breaker.held_back) == (True, False)
    said[TWO] = facts(5, A)
    assert where(service.locate(())) == A
    assert not service.breaker.failing
    said[TWO] = RedisConnectionError("refused")
    clock.now += 1
    assert where(service.locate(())) == A
    assert not service.breaker.failing


def test_an_outage_of_one_sentinel_concerns_no_caller(service: Any) -> None:
    (first, *_) = service._sentinels
    first.breaker.failed(SILENT, 5.0)
    assert not first.breaker.failing
    assert str(service) == service.breaker.server == "the sentinels' service 'main'"


@pytest.mark.parametrize(
    ("error", "discovers"),
    [
        (ReadOnlyError("READONLY"), True),
        (ResponseError("WRONGTYPE"), False),
        (SILENT, True),
        (MovedError("5 127.0.0.1:7002"), False),
    ],
)
def test_errors_after_which_sentinels_are_asked(
    service: Any, clock: FakeClock, error: Exception, discovers: bool
) -> None:
    service.locate(())
    clock.now += 0.5
    service.on_error(error)
    assert service.must_discover() is discovers
    assert not service.refuses(BusyLoadingError("LOADING"))


def test_a_missing_right_is_named_wherever_it_is(service: Any, cluster: Any) -> None:
    for server in (service, cluster):
        error = NoPermissionError("User x has no permissions to run the 'evalsha' command")
        server.on_error(error)
        assert "locks doctor" in str(error)


def test_a_host_that_is_forced(clock: FakeClock, said: Said) -> None:
    """As redis-py's ``force_master_ip``."""
    service = make_service(ONE)
    service._forced_host = "10.0.0.9"
    said[ONE] = facts(5, A)
    assert where(service.locate(())) == ("10.0.0.9", 7001)


def test_no_server_has_the_address_of_another(clock: FakeClock) -> None:
    """That of the pool, if it has one."""
    manager = redis.sentinel.Sentinel([ONE])
    pool = manager.master_for("main", host="10.0.0.9", port=1, db=3).connection_pool
    service = SentinelService(pool)
    assert not {"host", "port", "path"} & {*service._common.connection_kwargs}
    assert service._common.connection_kwargs["db"] == 3


def test_clients_of_one_service_share_it() -> None:
    def server(name: str = "main", *sentinels: tuple[str, int], **options: Any) -> Server:
        manager = redis.sentinel.Sentinel([*(sentinels or (ONE, TWO))])
        return server_of(manager.master_for(name, **options))

    assert server() is server("main", TWO, ONE)
    assert server("other") is not server()
    assert server("main", ONE) is not server()
    assert server(username="other") is not server()


# -- what is no primary ----------------------------------------------------------------------------


class Introduced:
    """A connection to a server with a role, or an error."""

    host, port = "127.0.0.1", 7001

    def __init__(self, role: Any) -> None:
        self.role, self.closed = role, False
        self.sent: list[str] = []

    def send_command(self, *words: str) -> None:
        self.sent += words

    def read_response(self) -> Any:
        if isinstance(self.role, Exception):
            raise self.role
        return self.role

    def disconnect(self) -> None:
        self.closed = True


ROLES = pytest.mark.parametrize(
    ("role", "error"),
    [
        ([b"master", 0, []], None),
        (["master", 0, []], None),
        ([b"slave", b"127.0.0.1", 7002], "127.0.0.1:7001.* is a replica"),
        (NoPermissionError("NOPERM"), None),
        (RedisConnectionError("closed"), "closed"),
    ],
)


@ROLES
def test_a_new_connection_leads_to_a_primary(
    monkeypatch: pytest.MonkeyPatch, role: Any, error: str | None
) -> None:
    connection = Introduced(role)
    asked: list[Any] = []
    monkeypatch.setattr(
        Server,
        "connect",
        lambda self, *args, **changes: asked.append((args, changes)) or connection,
    )
    primary = Primary(redis.ConnectionPool(host="127.0.0.1", port=7001))
    if error is None:
        assert primary.connect(0.5, protocol=2) is connection
    else:
        with pytest.raises(RedisConnectionError, match=error):
            primary.connect(0.5, protocol=2)
    assert asked == [((0.5,), {"protocol": 2})]
    assert (connection.sent, connection.closed) == (["ROLE"], error is not None)
    assert primary.discovered


@ROLES
def test_a_new_connection_of_tasks_leads_to_a_primary(role: Any, error: str | None) -> None:
    begun: list[Any] = []

    class InTasks(Introduced):
        async def on_connect(self) -> None:
            begun.append(self)

        async def send_command(self, *words: str) -> None:
            assert begun == [self]
            super().send_command(*words)

        async def read_response(self) -> Any:
            assert self.sent == ["ROLE"]
            return super().read_response()

    settings: dict[str, Any] = {}
    Primary(redis.ConnectionPool(host="127.0.0.1", port=7001)).for_tasks(settings)
    assert settings == {"redis_connect_func": _meet_primary}
    meeting = settings["redis_connect_func"](InTasks(role))
    if error is None:
        asyncio.run(meeting)
    else:
        with pytest.raises(RedisConnectionError, match=error):
            asyncio.run(meeting)


# -- the cache's client of a cluster ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("urls", "nodes", "settings"),
    [
        (["redis://one"], [("one", 6379)], {}),
        (["redis://"], [("localhost", 6379)], {}),
        (["redis://one:1/0"], [("one", 1)], {}),
        (
            ["redis://user:secret@one:1", " redis://two:2", "redis://three:3"],
            [("one", 1), ("two", 2), ("three", 3)],
            {"username": "user", "password": "secret"},
        ),
        (["rediss://one:1"], [("one", 1)], {"ssl": True}),
    ],
)
def test_addresses_of_a_cluster(urls: list[str], nodes: Any, settings: dict[str, Any]) -> None:
    assert _parsed(urls) == (nodes, settings)


@pytest.mark.parametrize(
    ("url", "error"),
    [("unix:///run/redis.sock", "by a socket"), ("redis://one/3", "the database 0 and no other")],
)
def test_addresses_that_are_no_clusters(url: str, error: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=error):
        _parsed([url])


class FakeCluster:
    """A redis-py client without nodes, which counts."""

    made: ClassVar[list[FakeCluster]] = []
    values: ClassVar[list[Any] | Exception] = []
    manager = SimpleNamespace(create_redis_node=object, nodes_cache={})

    def __init__(self, startup_nodes: list[Any], **settings: Any) -> None:
        self.startup_nodes, self.settings, self.ended = startup_nodes, settings, 0
        self.nodes_manager = self.manager
        self.made.append(self)

    def mget_nonatomic(self, keys: list[str]) -> list[Any]:
        if isinstance(self.values, Exception):
            raise self.values
        return self.values

    def scan_iter(self, **_: Any) -> Any:
        if isinstance(self.values, Exception):
            raise self.values
        return iter([b":1:a"])

    def disconnect_connection_pools(self) -> None:
        self.ended += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeCluster]:
    monkeypatch.setattr(clients, "_Cluster", FakeCluster)
    monkeypatch.setattr(clients, "_clusters", {})
    monkeypatch.setattr(FakeCluster, "made", found := [])
    monkeypatch.setattr(FakeCluster, "values", [])
    return found


def make_cache(**options: Any) -> Any:
    options = {"CLIENT_CLASS": "django_redis_lock.clients.ClusterClient", **options}
    return RedisCache("redis://one:1,redis://two:2", {"OPTIONS": options})


def test_a_cluster_connects_at_its_first_use_and_once(made: list[FakeCluster]) -> None:
    one, two = make_cache(), make_cache()
    client = one.client.get_client()
    assert client is two.client.get_client()
    assert not hasattr(client, "connection_pool")
    assert not hasattr(client, "__len__")
    assert client.get_encoder().encode("é") == "é".encode()
    one.client.connection_factory.disconnect(client)
    assert made == []
    for _ in range(2):
        assert client.mget_nonatomic([]) == []
    assert [(n.host, n.port) for n in made[0].startup_nodes] == [("one", 1), ("two", 2)]
    one.client.connection_factory.disconnect(client)
    assert [cluster.ended for cluster in made] == [1]
    assert [*client.nodes_manager.startup_nodes] == ["one:1", "two:2"]


def test_connections_to_all_nodes_are_guarded(
    made: list[FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to those that join later."""
    guarded: list[Any] = []
    monkeypatch.setattr(clients, "guard", lambda node: guarded.append(node) or node)
    known = SimpleNamespace(redis_connection="known")
    manager = SimpleNamespace(
        create_redis_node=lambda *where, **options: (where, options), nodes_cache={"one:1": known}
    )
    monkeypatch.setattr(FakeCluster, "manager", manager)
    make_cache().client.get_client().mget_nonatomic([])
    assert guarded == ["known"]
    assert manager.create_redis_node("two", port=2) == guarded[1] == (("two",), {"port": 2})


def test_the_options_of_a_cluster(made: list[FakeCluster]) -> None:
    options: dict[str, Any] = {"USERNAME": "user", "PASSWORD": "secret", "SOCKET_TIMEOUT": 2}
    options |= {"SOCKET_CONNECT_TIMEOUT": 1, "REDIS_CLIENT_KWARGS": {"read_from_replicas": True}}
    options |= {"CONNECTION_POOL_KWARGS": {"max_connections": 7}}
    make_cache(**options).client.get_client().mget_nonatomic([])
    make_cache().client.get_client().mget_nonatomic([])
    assert [cluster.settings for cluster in made] == [
        {
            "username": "user",
            "password": "secret",
            "socket_timeout": 2,
            "socket_connect_timeout": 1,
            "read_from_replicas": True,
            "max_connections": 7,
        },
        {},
    ]


def test_several_values_of_a_cluster(made: list[FakeCluster]) -> None:
    cache = make_cache()
    assert cache.client.get_many([]) == {}
    assert made == []
    FakeCluster.values = [None, 5, 0]
    assert cache.client.get_many(["a", "b", "c"]) == {"b": 5, "c": 0}
    given: Any = FakeCluster([])
    assert cache.client.get_many(["a", "b", "c"], client=given) == {"b": 5, "c": 0}
    assert [*cache.client.keys("*")] == ["a"]
    FakeCluster.values = RedisConnectionError("away")
    for call in (lambda: cache.client.get_many(["a"]), lambda: cache.client.keys("*")):
        with pytest.raises(ConnectionInterrupted):
            call()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RedisClusterException("no node"), RedisConnectionError),
        (ClusterError("too many errors"), RedisConnectionError),
        (ClusterDownError("CLUSTERDOWN"), ClusterDownError),
        (ResponseError("WRONGTYPE"), ResponseError),
    ],
)
def test_an_outage_of_a_cluster_is_one_of_a_server(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    def execute(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(redis.cluster.RedisCluster, "execute_command", execute)
    with pytest.raises(raised) as caught:
        _Cluster.execute_command(_Cluster.__new__(_Cluster), "GET", "a")
    assert type(caught.value) is raised
