"""Connections of our own between two calls. No Redis runs here."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.sentinel
from django.core.cache import caches
from redis.backoff import NoBackoff
from redis.exceptions import AskError, MovedError, ReadOnlyError
from redis.retry import Retry

from django_redis_lock import AsyncLock, Lock
from django_redis_lock.contrib.topology import SentinelService
from django_redis_lock.contrib.topology.client import LazyCluster
from django_redis_lock.transport.guarded_connection import FollowingRetry
from django_redis_lock.transport.registry import server_of
from django_redis_lock.transport.server import Server, readable
from tests.processes import in_threads


class FakeConnection(redis.Connection):
    """Connects to nothing."""

    def connect(self) -> None:
        pass

    closed = was_cut = False

    def cut(self) -> None:
        self.was_cut = True

    def disconnect(self, *args: Any) -> None:
        self.closed = True

    def can_read(self, timeout: float = 0) -> bool:
        return False


def fake_server() -> Server:
    return Server(redis.ConnectionPool(connection_class=FakeConnection))


def test_one_server_has_all_keys() -> None:
    server, refusal = fake_server(), MovedError("1 host:1")
    assert server.locate((b"key",)) is server.sent_to(refusal) is server
    assert server.nodes() == (server,)
    assert server.in_one_call([b"a", b"b"]) == [b"a", b"b"]
    answers = server.must_discover(), server.is_moving_slots(), server.refuses(refusal)
    assert not any(answers)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@db.internal:6380/3", "db.internal:6380/3"),
        ("redis://:secret@[::1]:6380/3", "[::1]:6380/3"),
        ("unix://user:secret@/run/redis.sock", "/run/redis.sock/0"),
    ],
)
def test_an_address_is_shown_without_credentials(url: str, shown: str) -> None:
    assert str(server_of(redis.Redis.from_url(url))) == shown


def test_a_connection_is_used_again() -> None:
    server = fake_server()
    first = server.checkout()
    server.checkin(first)
    assert server.checkout() is first
    assert server.checkout() is not first


def test_what_is_not_kept_is_closed() -> None:
    """One too many, and one that was made before all were ended."""
    server = fake_server()
    server.MAX_IDLE_CONNECTIONS = 2
    made: list[Any] = [server.checkout() for _ in range(3)]
    for connection in made:
        server.checkin(connection)
    assert [connection.closed for connection in made] == [False, False, True]
    old: Any = server.checkout()
    server.end_connections()
    server.checkin(old)
    assert old.closed
    assert server.checkout() not in made


def test_who_waits_on_a_connection_to_a_replica_hears_of_its_end() -> None:
    server = fake_server()
    used: list[Any] = [server.checkout() for _ in range(3)]
    del used[1]  # Nobody has that one any more.
    gc.collect()
    server.renew(used[0])
    after: Any = server.checkout()
    server.renew(used[1])  # It was made before the others were ended.
    assert [connection.was_cut for connection in (*used, after)] == [True, True, False]


def test_no_connection_without_a_socket_is_waited_for_while_another_has_a_reply() -> None:
    """As in memory."""

    class Silent(FakeConnection):
        def can_read(self, timeout: float = 0) -> bool:
            second.has_reply = second.has_reply or timeout > 0
            waits.append(timeout)
            return False

    class Second(FakeConnection):
        has_reply = False

        def can_read(self, timeout: float = 0) -> bool:
            return self.has_reply

    waits: list[float] = []
    silent, second = Silent(), Second()
    assert readable([silent, second], 60) == [second]
    assert max(waits) < 0.1


@pytest.fixture
def _threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_switch_often")
def test_threads_may_borrow_and_close_at_once() -> None:
    server = fake_server()
    borrowed: set[int] = set()

    def work() -> None:
        for turn in range(1000):
            connection = server.checkout()
            assert id(connection) not in borrowed
            borrowed.add(id(connection))
            borrowed.remove(id(connection))
            server.checkin(connection)
            if turn % 3 == 0:
                server.close(but=turn % 2)

    assert in_threads(8, work) == [None] * 8


def test_a_pool_is_not_kept_forever() -> None:
    client = redis.Redis()
    kept = weakref.ref(client.connection_pool)
    server = server_of(client)
    assert server_of(client) is server
    client.close()
    del client
    gc.collect()
    assert kept() is None


class TestDiscovery:
    @pytest.fixture
    def service(self) -> SentinelService:
        sentinel = redis.sentinel.Sentinel([])
        return SentinelService(sentinel.master_for("nowhere").connection_pool)

    def test_one_that_is_interrupted_is_followed_by_others(self, service: Any) -> None:
        """A signal handler raises just when the thread has the mutex."""
        mutex = service._discovering

        class Interrupted:
            release = mutex.release

            def acquire(self, **options: float) -> bool:
                assert mutex.acquire(**options)
                raise KeyboardInterrupt

        service._discovering = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            service.locate((b"key",))
        assert in_threads(1, lambda: mutex.acquire(timeout=0)) == [True]

    def test_one_that_another_thread_does_is_waited_for(self, service: Any) -> None:
        assert in_threads(1, service._discovering.acquire) == [True]
        with pytest.raises(redis.ConnectionError, match="'nowhere': no answer in time"):
            service.locate((b"key",), 0.01)

    def test_the_error_gives_the_cause(self, service: Any) -> None:
        with pytest.raises(redis.ConnectionError, match="'nowhere': there are no sentinels"):
            service.locate((b"key",))

    @pytest.mark.parametrize("kind", [MovedError, AskError])
    def test_a_refusal_is_put_into_words(self, kind: Any) -> None:
        refusal = kind("4786 ::1:7001")
        server_of(LazyCluster([("localhost", 1)], {})).on_error(refusal)
        assert str(refusal) == "slot 4786 is moved to ::1:7001"


class TestAddresses:
    def test_clients_of_one_server_share_it(self) -> None:
        one, two = (redis.Redis.from_url("redis://localhost:1/3") for _ in range(2))
        assert server_of(one) is server_of(two)

    @pytest.mark.parametrize("settings", [{"socket_timeout": 0.25}, {"socket_connect_timeout": 1}])
    def test_each_has_its_own_patience(self, settings: dict[str, float]) -> None:
        """But they lead to one database."""
        patient = redis.Redis(port=1, socket_timeout=30)
        hasty = redis.Redis(port=1, **{"socket_timeout": 30, **settings})
        assert server_of(patient).timeout == 30
        assert server_of(hasty).timeout == settings.get("socket_timeout", 30)
        assert server_of(hasty) is not server_of(patient)
        assert server_of(hasty).database == server_of(patient).database
        assert server_of(redis.Redis(port=2)).database != server_of(patient).database

    def test_one_that_checks_no_certificate_does_not_decide_it_for_others(self) -> None:
        strict, *lax = (
            redis.Redis(ssl=True, ssl_cert_reqs=of) for of in ("required", "none", "none")
        )
        assert server_of(lax[0]) is server_of(lax[1])
        assert server_of(lax[0]) is not server_of(strict)
        assert server_of(lax[0]).database == server_of(strict).database

    @pytest.mark.parametrize(
        "url",
        [
            "redis://localhost:2/3",
            "redis://localhost:1/4",
            "redis://other:1/3",
            "redis://user:secret@localhost:1/3",
            "rediss://localhost:1/3",
            "unix:///tmp/redis.sock?db=3",
        ],
    )
    def test_others_do_not(self, url: str) -> None:
        one = redis.Redis.from_url("redis://localhost:1/3")
        assert server_of(one) is not server_of(redis.Redis.from_url(url))

    def test_a_service_of_sentinels_is_never_taken_for_another(self) -> None:
        """Its address is not in its pool; and a new pool may lie where an old one lay."""
        sentinel = redis.sentinel.Sentinel([("localhost", 1)])
        servers = []
        gc.freeze()  # What other tests have left need not be looked at fifty times.
        for number in range(50):
            client = sentinel.master_for(f"service-{number}")
            servers.append(server_of(client))
            del client
            gc.collect()
        gc.unfreeze()
        assert len({id(server) for server in servers}) == 50

    def test_who_is_no_client(self) -> None:
        with pytest.raises(TypeError, match="needs a redis-py client"):
            server_of(object())

    @pytest.mark.parametrize("kind", [Lock, AsyncLock])
    @pytest.mark.parametrize(
        "client",
        [None, "redis://localhost", redis.Redis().pubsub(), caches["default"]],
        ids=["none", "url", "pubsub", "cache"],
    )
    def test_a_lock_says_at_construction_what_is_no_client(self, kind: Any, client: Any) -> None:
        with pytest.raises(TypeError, match=r"needs a (redis-py )?client .*not|AsyncLock needs"):
            kind(client, "name", timeout=5)


def test_who_speaks_another_protocol_has_another_server() -> None:
    """Behind a proxy without RESP3, one client that begins with HELLO must not break the others."""
    third, second, other = (server_of(redis.Redis(protocol=of)) for of in (3, 2, 2))
    assert third is not second is other
    assert third.database == second.database


def test_a_connection_whose_pool_is_gone_meets_a_replica() -> None:
    retry = FollowingRetry(Retry(NoBackoff(), 0), redis.ConnectionPool())
    gc.collect()
    replies: list[Any] = [ReadOnlyError("You can't write against a read only replica."), b"OK"]
    disconnected = []

    def send() -> bytes:
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return bytes(reply)

    assert retry.call_with_retry(send, disconnected.append) == b"OK"
    assert len(disconnected) == 1
