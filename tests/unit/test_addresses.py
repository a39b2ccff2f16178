"""Where connections of our own lead, with which settings; and connections of a loop for a thread.
Nothing is connected to Redis here."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import InvalidResponse, ReadOnlyError
from redis.retry import Retry

from django_redis_lock import AsyncLock
from django_redis_lock.contrib.topology import _without_address as without_address
from django_redis_lock.keeper import over_a_loop
from django_redis_lock.transport import address, aio_client, registry
from django_redis_lock.transport.address import (
    KEEPALIVE_OPTIONS,
    Address,
    allow,
    common_settings,
    direct,
    for_threads,
    has_socket,
    introduce,
    may_have_run,
    name_driver,
    note_sent,
    own_settings,
    probe_seconds,
    shut,
    still_answers,
    timeout_of,
    who,
)
from django_redis_lock.transport.execute import pack_words
from django_redis_lock.transport.guarded_connection import FollowingRetry, follow_address
from django_redis_lock.transport.registry import renew_pool, server_of, standing_in
from django_redis_lock.transport.server import Server


@pytest.mark.parametrize(("patience", "seconds"), [(None, 0.5), (5.0, 0.5), (0.6, 0.3)])
def test_how_long_an_idle_connection_has_to_answer(patience: float | None, seconds: float) -> None:
    assert probe_seconds(patience) == seconds


def test_the_settings_of_a_connection_of_our_own() -> None:
    pools = {
        **{"host": "h", "retry_on_timeout": True, "decode_responses": True, "socket_timeout": 9},
        **{"health_check_interval": 30, "maint_notifications_config": object()},
    }
    own = own_settings(Connection, pools, 2.0)
    assert own["retry"]._retries == 0
    assert own["command_packer"].__class__.__name__ == "PythonRespSerializer"
    assert own.items() >= {
        *(("host", "h"), ("socket_timeout", 2.0), ("socket_connect_timeout", 2.0)),
        *(("retry_on_timeout", False), ("health_check_interval", 0), ("decode_responses", False)),
        ("socket_keepalive", True),
    }
    assert own["retry_on_error"] == []
    assert own["socket_keepalive_options"] is KEEPALIVE_OPTIONS
    assert "maint_notifications_config" not in own


@pytest.mark.parametrize(
    ("limit", "timeout", "connects_within"), [(None, 2.0, 2.0), (0.5, 2.0, 0.5), (9.0, 2.0, 2.0)]
)
def test_connecting_takes_no_longer_than_a_reply(
    limit: float | None, timeout: float, connects_within: float
) -> None:
    own = own_settings(Connection, {"socket_connect_timeout": limit}, timeout)
    assert own["socket_connect_timeout"] == connects_within
    options = {"socket_keepalive_options": {1: 2}}
    assert own_settings(AsyncConnection, options, 1.0)["socket_keepalive_options"] == {1: 2}
    unix = own_settings(UnixDomainSocketConnection, {}, 1.0)
    assert "socket_keepalive" not in unix
    assert "command_packer" not in own_settings(AsyncConnection, {}, 1.0)


@pytest.mark.parametrize(
    ("settings", "user"),
    [
        ({"password": "p", "protocol": 3}, "default"),
        ({"protocol": 3}, None),
        ({"password": "p", "protocol": 2}, None),
        ({"password": "p", "protocol": 3, "username": "u"}, "u"),
    ],
)
def test_a_password_alone_has_a_user_where_redis_py_names_one(
    settings: dict[str, Any], user: str | None
) -> None:
    assert own_settings(Connection, settings, 1.0).get("username") == user


def test_words_are_packed_in_the_pools_encoding() -> None:
    packer = own_settings(Connection, {"encoding": "latin-1"}, 1.0)["command_packer"]
    assert b"\xe4" in b"".join(packer.pack("SELECT", "ä", 1))
    plain = own_settings(Connection, {}, 1.0)["command_packer"]
    assert "ä".encode() in b"".join(plain.pack("SELECT", "ä", b"x"))


@pytest.mark.skipif(address.DriverInfo is None, reason="redis-py names itself only")
def test_the_driver_of_a_pool_is_looked_up_once() -> None:
    client = redis.Redis(connection_pool=ConnectionPool())
    follow_address(client)
    assert "driver_info" in client.connection_pool.connection_kwargs


@pytest.mark.skipif(address.DriverInfo is None, reason="redis-py names itself only")
@pytest.mark.parametrize("upstream", ["", "a-library"])
def test_the_name_of_the_driver(upstream: str) -> None:
    settings: dict[str, Any] = {}
    name_driver(Connection, settings, upstream)
    assert ("a-library_v" in settings["driver_info"].formatted_name) is bool(upstream)


def test_without_a_timeout_a_reply_may_take_five_seconds() -> None:
    assert timeout_of({}) == timeout_of({"socket_timeout": None}) == 5.0
    assert timeout_of({"socket_timeout": 0.5}) == 0.5
    assert Server.timeouts({}) == (5.0, 5.0)
    assert Server.timeouts({"socket_connect_timeout": 1.0}) == (5.0, 1.0)
    assert Server.timeouts({"socket_connect_timeout": 9.0, "socket_timeout": 2.0}) == (2.0, 2.0)


def test_what_connections_to_one_server_have_in_common() -> None:
    settings = {
        **{"host": "h", "port": 1, "db": 2, "ssl_ca_certs": "x", "socket_timeout": 3},
        **{"retry": object(), "path": None},
    }
    pool = Address(SSLConnection, settings)
    assert common_settings(pool) == {
        **{"host": "h", "port": 1, "db": 2, "ssl_ca_certs": "x", "path": None}
    }
    bare = without_address(pool)
    assert bare.connection_class is SSLConnection
    assert bare.connection_kwargs == {"db": 2, "ssl_ca_certs": "x", "socket_timeout": 3}
    plain = without_address(Address(AsyncConnection, {"host": "h", "socket_timeout": None}))
    assert plain == Address(Connection, {})
    assert without_address(Address(AsyncSSLConnection, {})).connection_class is SSLConnection


def test_a_thread_reaches_where_tasks_do() -> None:
    assert for_threads(Address(AsyncSSLConnection, {"db": 1, "retry": 2})) == Address(
        SSLConnection, {"db": 1}
    )
    assert for_threads(Address(AsyncConnection, {})).connection_class is Connection

    class Own(Connection):
        pass

    settings = {"db": 1, "retry": 2, "maint_notifications_pool_handler": object()}
    assert for_threads(Address(Own, settings)) == Address(Own, {"db": 1, "retry": 2})


def test_who_connects() -> None:
    provider = object()
    settings = {"db": 1, "username": "u", "password": "p", "credential_provider": provider}
    assert who(settings) == (1, "u", "p", id(provider))
    assert who({}) == (None, None, None, id(None))


def test_whether_a_call_may_have_run() -> None:
    for error, may in ((OSError(), True), (ReadOnlyError("You can't write"), False)):
        assert may_have_run(error) is may
        for sent in (True, False):
            note_sent(error, sent)
            assert may_have_run(error) is sent


def test_what_answers_in_another_language_is_no_redis() -> None:
    def fail() -> None:
        raise InvalidResponse("HTTP")

    connection: Any = SimpleNamespace(connect=fail)
    with pytest.raises(redis.ConnectionError, match="is no Redis: HTTP"):
        introduce(connection)


class Fake:
    """A connection of redis-py's that looks as if it were connected."""

    def __init__(self, *replies: Any, readable: tuple[bool, ...] = (False, True)) -> None:
        self.replies, self.readable = list(replies), list(readable)
        self.done: list[Any] = []

    def can_read(self, timeout: float = 0) -> bool:
        self.done.append(timeout)
        return self.readable.pop(0)

    def send_command(self, *words: str) -> None:
        self.done.append(words)

    def read_response(self) -> Any:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.mark.parametrize(
    ("connection", "answers", "done"),
    [
        (Fake(b"PONG"), True, [0, ("PING",), 0.25]),
        (Fake(redis.ResponseError("NOPERM")), True, [0, ("PING",), 0.25]),
        (Fake(redis.ConnectionError("gone")), False, [0, ("PING",), 0.25]),
        (Fake(readable=(False, False)), False, [0, ("PING",), 0.25]),
        (Fake(readable=(True,)), False, [0]),
    ],
)
def test_whether_the_server_still_answers(connection: Any, answers: bool, done: Any) -> None:
    assert still_answers(connection, 0.25) is answers
    assert connection.done == done


def test_a_connection_may_be_allowed_more_time() -> None:
    timeouts: list[Any] = []
    connection: Any = SimpleNamespace(
        _sock=SimpleNamespace(settimeout=timeouts.append),
        _parser=SimpleNamespace(on_connect=timeouts.append),
    )
    allow(connection, 2.5)
    assert connection.socket_timeout == 2.5
    assert timeouts == [2.5, connection]
    in_memory: Any = SimpleNamespace(_sock=None)
    allow(in_memory, 2.5)
    assert not hasattr(in_memory, "socket_timeout")
    ours, theirs = socket.socketpair()
    plain = Connection(socket_timeout=0.5)
    plain._sock = ours
    own: Any = direct(plain)
    if isinstance(own, address.DirectConnection):
        assert own._milliseconds == 500
        allow(own, 2.5)
        assert (own._milliseconds, own._input.gettimeout()) == (2500, 2.5)
    own.disconnect()
    theirs.close()


def test_the_calls_on_a_connection_can_be_ended_by_another_thread() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    connection: Any = SimpleNamespace(_sock=ours)
    shut(connection)
    assert theirs.recv(1) == b""
    ours.close()
    for each in (connection, SimpleNamespace(_sock=None), None):
        shut(each)
    assert has_socket(SimpleNamespace(_sock=ours))
    assert has_socket(SimpleNamespace())
    assert not has_socket(SimpleNamespace(_sock=object()))
    assert has_socket(SimpleNamespace(_sock=object(), asyncio_class=object))
    theirs.close()


# -- the servers of this process -------------------------------------------------------------------


def test_what_stands_in_for_a_server_does_so_in_its_block() -> None:
    client = redis.Redis(port=7)
    before = server_of(client)
    other = Server(ConnectionPool(port=8))
    databases: list[Any] = []

    def make(database: Any) -> Server | None:
        databases.append(database)
        return other if len(databases) == 1 else None

    with standing_in(make):
        assert server_of(client) is other
        assert other.database == before.database == databases[0]
        assert server_of(redis.Redis(port=9)) is not other
    assert server_of(client) is before


def test_a_server_knows_its_pools_as_long_as_they_are_there() -> None:
    first, second = redis.Redis(port=7), redis.Redis(port=7)
    server = server_of(first)
    assert server_of(second) is server
    assert {first.connection_pool, second.connection_pool} <= {pool() for pool in server.pools}
    known = len(server.pools)
    gone = weakref.ref(second.connection_pool)
    second.close()
    del second
    gc.collect()
    assert gone() is None
    assert len(server.pools) < known


@pytest.mark.parametrize("unnoticed", [True, False])
def test_where_a_fork_goes_unnoticed_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, unnoticed: bool
) -> None:
    noticed: list[int] = []
    monkeypatch.setattr(registry, "FORKS_UNNOTICED", unnoticed)
    monkeypatch.setattr(registry, "notice_fork", lambda: noticed.append(1))
    server_of(redis.Redis(port=7))
    assert noticed == [1] * unnoticed


def test_a_forked_child_knows_no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_servers", weakref.WeakValueDictionary())
    monkeypatch.setattr(registry, "_by_pool", weakref.WeakKeyDictionary())
    client = redis.Redis(port=7)
    before = server_of(client)
    registry._forget_servers()
    assert not registry._by_pool
    assert server_of(client) is not before


def test_a_client_of_sentinels_or_a_cluster_is_for_tasks_as_well() -> None:
    sentinel = redis.sentinel.Sentinel([("localhost", 1)])
    assert AsyncLock(sentinel.master_for("service"), "name", 30).name == "name"
    with pytest.raises(TypeError, match="for threads"):
        AsyncLock(redis.Redis(), "name", 30)
    with pytest.raises(RuntimeError, match="no running event loop"):
        aio_client.asyncio_client(sentinel.master_for("service"))


@pytest.mark.parametrize("known", [True, False])
def test_a_pool_whose_server_became_a_replica_is_renewed(known: bool) -> None:
    client = redis.Redis(port=7)
    server = server_of(client) if known else None
    disconnected: list[Any] = []
    pool: Any = client.connection_pool
    pool.disconnect = lambda **options: disconnected.append(options)
    renew_pool(pool)
    assert disconnected == [{"inuse_connections": False}]
    assert server is None or server.generation


# -- retries of redis-py's -------------------------------------------------------------------------


def test_a_connection_that_follows_is_one_of_the_pools() -> None:
    usual = Retry(NoBackoff(), 3)
    client = follow_address(redis.Redis(port=7, retry=usual, retry_on_error=[OSError]))
    settings = client.connection_pool.connection_kwargs
    retry = settings["retry"]
    assert isinstance(retry, FollowingRetry)
    assert retry._retries == 0  # The usual one does the work.
    assert not hasattr(usual, "get_retries") or retry.get_retries() == 3
    assert settings["retry_on_error"] == [OSError, ReadOnlyError]
    assert follow_address(client).connection_pool.connection_kwargs["retry"] is retry
    assert follow_address(object()) is not None
    errors: list[Any] = []
    noting: Any = SimpleNamespace(update_supported_errors=errors.append)
    following = FollowingRetry(noting, client.connection_pool)
    following.update_supported_errors([OSError, ReadOnlyError])
    assert errors == [[OSError]]


@pytest.mark.parametrize("counts", [True, False])
def test_a_call_that_a_replica_has_refused_is_sent_once_more(
    monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    renewed: list[Any] = []
    monkeypatch.setattr("django_redis_lock.transport.guarded_connection.renew_pool", renewed.append)
    options = {"with_failure_count": True} if counts else {}

    class Usual:
        def call_with_retry(self, do: Any, fail: Any, *args: Any, **given: Any) -> Any:
            assert given == options
            return do()

    pool = ConnectionPool()
    usual: Any = Usual()
    retry = FollowingRetry(usual, pool)
    failures: list[Any] = []
    outcomes: list[Any] = [ReadOnlyError("You can't write against a read only replica."), 7]

    def do() -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert retry.call_with_retry(do, lambda *args: failures.append(args), **options) == 7
    assert renewed == [pool]
    assert [len(args) for args in failures] == [2 if counts else 1]
    assert not counts or failures[0][1] == 1
    outcomes += [redis.ResponseError("WRONGTYPE"), 7]
    with pytest.raises(redis.ResponseError):
        retry.call_with_retry(do, lambda *args: failures.append(args), **options)
    assert renewed == [pool]


# -- over a loop -----------------------------------------------------------------------------------


class OfLoop:
    """A connection of a loop, whose calls are answered at once."""

    generation = 0
    closed = refuses = False

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def is_closed(self) -> bool:
        return self.closed

    def request(self, command: bytes) -> Any:
        if self.refuses:
            raise redis.ConnectionError("The connection was closed.")
        self.sent.append(command)
        reply = asyncio.get_running_loop().create_future()
        if b"bad" in command:
            reply.set_exception(redis.ResponseError("bad"))
        else:
            reply.set_result(len(self.sent))
        return reply


def test_a_thread_calls_over_a_loop() -> None:
    async def main() -> None:
        node = Server(ConnectionPool(port=7))
        of_loop = aio_client._of_the_running_loop()
        assert over_a_loop.spare_of_a_loop(node) is None
        shared: Any = OfLoop()
        of_loop.connections[node] = shared
        for change in ({"closed": True}, {"generation": 7}):
            vars(shared).update(change)
            assert over_a_loop.spare_of_a_loop(node) is None
            vars(shared).update(closed=False, generation=0)
        spare: Any = over_a_loop.spare_of_a_loop(node)
        assert spare.generation == 0
        assert not spare.can_read()
        assert not spare.can_read(0.01)

        def call() -> None:
            spare.send_command("PING", 1)
            spare.send_packed_command([b"bad", b"good"])
            assert spare.can_read(30)
            assert spare.can_read()
            assert spare.read_response() == 1
            with pytest.raises(redis.ResponseError, match="bad"):
                spare.read_response()
            assert spare.read_response() == 3
            shared.refuses = True
            spare.send_packed_command([b"lost"])
            with pytest.raises(redis.ConnectionError):
                spare.read_response()

        await asyncio.to_thread(call)
        gets: list[Any] = []
        spare._replies = SimpleNamespace(get=lambda *how: gets.append(how))
        assert not spare.can_read()
        assert not spare.can_read(0.5)
        assert gets == [(False, 0), (True, 0.5)]
        assert shared.sent == [pack_words(b"PING", b"1"), b"bad", b"good"]
        kept.append(spare)
        del of_loop.connections[node]

    kept: list[Any] = []
    asyncio.run(main())
    with pytest.raises(redis.ConnectionError, match="The event loop of the connection"):
        kept[0].send_packed_command([b"late"])


def test_a_loop_that_does_not_run_has_no_spare_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Server(ConnectionPool(port=7))
    loop = asyncio.new_event_loop()
    of_loop: Any = SimpleNamespace(connections={node: OfLoop()})
    monkeypatch.setattr(aio_client, "loops", {loop: of_loop})
    assert over_a_loop.spare_of_a_loop(node) is None
    loop.close()
