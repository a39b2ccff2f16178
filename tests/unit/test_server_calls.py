"""What becomes of a connection of our own after each outcome of a call. No Redis runs here."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError

from django_redis_lock.transport import circuit_breaker
from django_redis_lock.transport import server as server_module
from django_redis_lock.transport.address import may_have_run
from django_redis_lock.transport.circuit_breaker import CHECK_SECONDS
from django_redis_lock.transport.registry import renew_pool, server_of
from django_redis_lock.transport.server import Server, readable

READONLY = redis.exceptions.ReadOnlyError("You can't write against a read only replica.")
LOADING = redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory")
WRONG = redis.ResponseError("WRONGTYPE")
SILENT = redis.TimeoutError("silent")
GONE = redis.ConnectionError("gone")
NOAUTH = AuthenticationError("NOAUTH Authentication required.")


class Scripted(redis.Connection):
    """Its replies are those that a test has put into ``script``, one list for each connection."""

    script: list[list[Any]]
    made: list[Scripted]
    patience: list[float]
    closed = was_cut = False

    def connect(self) -> None:
        self.replies = self.script.pop(0) if self.script else []
        self.sent: list[Any] = []
        self.looks: list[float] = []
        if self.replies == ["refuse"]:
            raise redis.ConnectionError("refused")
        self.made.append(self)

    def cut(self) -> None:
        self.was_cut = True

    def disconnect(self, *args: Any) -> None:
        self.closed = True

    def can_read(self, timeout: float = 0) -> bool:
        self.looks.append(timeout)
        return bool(timeout and self.replies and self.replies[0] is not SILENT)

    def send_command(self, *words: Any, **options: Any) -> None:
        self.sent.append(words)

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        self.sent.append([*command])

    def read_response(self, *args: Any, **options: Any) -> Any:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


class Breaker:
    """Notes what it is told."""

    server = "nowhere:1/0"
    failing, connecting = False, 0.0
    first_patience = circuit_breaker.Breaker.first_patience

    def __init__(self) -> None:
        self.told: list[Any] = []

    def answered(self) -> None:
        self.told.append("answered")

    def failed(self, error: Exception, cost: float) -> None:
        self.told.append((type(error), cost))


class Unread:
    """The reply to a call whose caller has not waited for it."""

    def __init__(self, has_come: bool) -> None:
        self._has_come = has_come
        self.asked: list[bool] = []

    def read_reply(self, wait: bool) -> float | None:
        self.asked.append(wait)
        return 1.0 if self._has_come else None


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    class Kind(Scripted):
        script, made = [], []

    return Kind


@pytest.fixture
def server(connections: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server(redis.ConnectionPool(connection_class=connections, socket_timeout=5.0))
    monkeypatch.setattr(made, "breaker", Breaker())
    return made


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(seconds=1000.0)
    clock.monotonic = lambda: clock.seconds
    monkeypatch.setattr(server_module, "time", clock)
    return clock


def told(server: Any) -> list[Any]:
    found: list[Any] = server.breaker.told
    return found


def idle(server: Server, *replies: Any, since: float = 0.0, unread: Any = None) -> Any:
    """An idle connection to the server."""
    connection: Any = server.connect()
    connection.replies = list(replies)
    server.checkin(connection, unread, since)
    return connection


# -- calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("replies", "reply"), [(None, 1), (1, [1]), (3, [1, 2, 3])])
def test_a_connection_is_kept_after_the_last_reply(
    server: Server, connections: Any, replies: int | None, reply: Any
) -> None:
    connections.script.append([1, 2, 3])
    assert server.exchange(b"command", replies) == reply
    [made] = connections.made
    assert made.sent == [[b"command"]]
    assert made.looks == []  # The socket's timeout ends the wait.
    assert not made.closed
    assert not server.must_connect()
    assert told(server) == []


def test_each_reply_is_waited_for_as_long_as_the_caller_wants(
    server: Server, connections: Any, now: Any
) -> None:
    connections.script.append([1, 2, SILENT])
    assert server.exchange(b"command", 2, 1.5) == [1, 2]
    assert connections.made[0].looks == [1.5, 1.5]
    # That of one that was used before leaves time for another, if the caller makes one.
    for in_all, seconds in ((True, r"0\.750"), (False, r"1\.500")):
        server.close()
        connections.script.append([1])
        server.exchange(b"command")
        connections.made[-1].replies = [1, SILENT]
        with pytest.raises(redis.TimeoutError, match=f"within {seconds} s"):
            server.exchange(b"command", 2, 1.5, in_all=in_all)


def test_what_connecting_has_taken_is_not_there_for_the_reply(
    server: Any, connections: Any, now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = connections.connect

    def connect_slowly(self: Any) -> None:
        now.seconds += 0.5
        connect(self)

    monkeypatch.setattr(connections, "connect", connect_slowly)
    monkeypatch.setattr(server_module, "allow", lambda connection, timeout: None)
    for patience, left in ((1.5, 1.0), (0.25, 0.0)):
        server.close()
        connections.script.append([1])
        with suppress(redis.TimeoutError):
            server.exchange(b"command", None, patience, in_all=True)
        assert connections.made[-1].looks == [left]
    assert server.breaker.connecting == 0.5


def test_an_error_about_rights_says_which(server: Server) -> None:
    error = redis.exceptions.NoPermissionError("User x has no permissions to run the 'get' command")
    server.on_error(error)
    assert "may not run GET" in str(error)
    assert not server.is_moving_slots()


def test_an_answer_ends_an_outage(server: Any, connections: Any) -> None:
    server.breaker.failing = True
    connections.script.append([1, 1, WRONG])
    server.exchange(b"command")
    server.answered()
    assert told(server) == ["answered"] * 2
    server.breaker.failing = False
    server.exchange(b"command")
    server.answered()
    assert told(server) == ["answered"] * 2


@pytest.mark.parametrize(
    ("error", "replies", "kept"), [(WRONG, None, True), (WRONG, 2, False), (LOADING, None, False)]
)
def test_after_an_error_a_connection_is_kept_if_nothing_is_to_be_read_on_it(
    server: Server, connections: Any, error: Exception, replies: int | None, kept: bool
) -> None:
    connections.script.append([error])
    with pytest.raises(type(error)):
        server.exchange(b"command", replies, retry_elsewhere=False)
    assert connections.made[0].closed is not kept
    assert server.must_connect() is not kept
    assert told(server) == ["answered"]


@pytest.mark.parametrize(("again", "discovered"), [(True, False), (False, False), (True, True)])
def test_what_a_replica_refuses_is_sent_once_more_on_a_new_connection(
    server: Any, connections: Any, again: bool, discovered: bool
) -> None:
    connections.script += [[READONLY], [READONLY], [7]]
    server.discovered = discovered  # Then others say where the primary is.
    with pytest.raises(redis.exceptions.ReadOnlyError):
        server.exchange(b"command", retry_elsewhere=again)
    assert len(connections.made) == (2 if again and not discovered else 1)
    assert all(each.closed for each in connections.made)
    assert server.generation == int(again)


def test_a_connection_that_has_lost_its_login_is_replaced(server: Any, connections: Any) -> None:
    old = [idle(server, NOAUTH, since=1e9) for _ in range(3)]
    connections.script += [[7]]
    assert server.exchange(b"command") == 7
    assert all(each.closed for each in old)
    server.close()
    connections.script += [[NOAUTH]]
    with pytest.raises(AuthenticationError):
        server.exchange(b"command")


def test_the_silence_of_a_new_connection_is_the_servers(
    server: Any, connections: Any, now: Any
) -> None:
    connections.script += [[SILENT], [SILENT]]
    with pytest.raises(redis.TimeoutError):
        server.exchange(b"command")
    with pytest.raises(redis.TimeoutError):
        server.exchange(b"command", patience=0.5)
    assert told(server) == [(redis.TimeoutError, 5.0), (redis.TimeoutError, 0.5)]
    assert all(each.closed for each in connections.made)


def test_that_of_one_that_was_idle_may_be_its_own(
    server: Any, connections: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a new connection does is what counts."""
    limits: list[float | None] = []
    connect = server._connect
    monkeypatch.setattr(
        server, "_connect", lambda patience: (limits.append(patience), connect(patience))[1]
    )
    monkeypatch.setattr(server_module, "allow", lambda connection, timeout: None)
    others = [idle(server, since=1e9) for _ in range(2)]
    silent = idle(server, SILENT, since=1e9)
    with pytest.raises(redis.TimeoutError):
        server.exchange(b"command")
    assert [each.closed for each in (*others, silent)] == [True] * 3
    assert limits == [CHECK_SECONDS]
    assert connections.made[-1].closed
    assert server.must_connect()
    assert told(server) == []
    server.timeout = 0.5
    idle(server, SILENT, since=1e9)
    connections.script += [["refuse"]]
    with pytest.raises(redis.TimeoutError):
        server.exchange(b"command")
    assert limits == [CHECK_SECONDS, 0.5]
    idle(server, SILENT, since=1e9)
    with pytest.raises(redis.TimeoutError):
        server.exchange(b"command", patience=0.25)  # Nor has this caller the time.
    assert len(limits) == 2


def test_a_reply_to_the_call_before_is_read_first(server: Server, connections: Any) -> None:
    unread = Unread(True)
    connection = idle(server, 7, since=1e9, unread=unread)
    assert server.exchange(b"command", patience=2.0, in_all=True) == 7
    assert unread.asked == [True]
    assert connection.looks == [1.0, 1.0]


def test_an_error_in_between_ends_the_connection(server: Server, connections: Any) -> None:
    connections.script.append([KeyboardInterrupt()])
    connections.script[0][0] = GONE
    with pytest.raises(redis.ConnectionError):
        server.exchange(b"command")
    assert connections.made[0].closed
    assert told(server) == []


# -- new connections -------------------------------------------------------------------------------


def test_a_connection_has_the_timeout_of_the_pool_unless_its_caller_has_less(
    server: Any, connections: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[float] = []
    monkeypatch.setattr(server_module, "allow", lambda connection, timeout: allowed.append(timeout))
    for patience, timeout in ((None, 5.0), (7.0, 5.0), (2.0, 2.0)):
        server.checkout(patience)
        assert connections.made[-1].socket_timeout == timeout
    assert allowed == [5.0]  # From now on, as the next caller may wait for longer.
    assert server.connect(0.5, client_name="keeper").client_name == "keeper"


def test_a_failure_to_connect_is_the_servers_and_nothing_was_sent(
    server: Any, connections: Any, now: Any
) -> None:
    class Slow(connections):
        def connect(self) -> None:
            now.seconds += 2.5
            raise failure

    server.address = server.address._replace(connection_class=Slow)
    for failure, noted in ((GONE, [(redis.ConnectionError, 2.5)]), (NOAUTH, []), (WRONG, [])):
        server.breaker.told.clear()
        with pytest.raises(type(failure)) as raised:
            server.exchange(b"command")
        assert not may_have_run(raised.value)
        assert told(server)[:1] == (noted if failure is not NOAUTH else told(server)[:1])


# -- idle connections ------------------------------------------------------------------------------


@pytest.mark.parametrize(("idle_for", "asks"), [(0.9, False), (1.1, True)])
def test_a_connection_that_was_idle_for_a_while_shows_that_it_still_leads_somewhere(
    server: Any, connections: Any, now: Any, idle_for: float, asks: bool
) -> None:
    connection = idle(server, b"PONG", since=now.seconds - idle_for)
    assert server.checkout(0.5) is connection
    assert connection.sent == [("PING",)] * asks
    assert connection.looks == [0, 0.25] * asks


def test_the_check_of_an_idle_connection_takes_half_of_the_timeout_at_most(
    server: Any, now: Any
) -> None:
    for timeout, patience, limit in ((5.0, None, 0.5), (0.5, None, 0.25), (5.0, 0.75, 0.375)):
        server.timeout = timeout
        connection = idle(server, b"PONG", since=now.seconds - 60)
        assert server.checkout(patience) is connection
        assert connection.looks == [0, limit]


def test_one_that_does_not_answer_is_closed_with_those_idle_for_longer(
    server: Any, connections: Any, now: Any
) -> None:
    old = [idle(server, SILENT, since=now.seconds - 60 + number) for number in range(3)]
    assert server.checkout() not in old
    assert [each.closed for each in old] == [True] * 3
    assert [len(each.sent) for each in old] == [0, 0, 1]


def test_a_caller_without_time_leaves_the_check_to_the_next(server: Any, now: Any) -> None:
    connection = idle(server, b"PONG", since=now.seconds - 60)
    assert server.checkout_idle() is None
    assert not connection.sent
    assert server.checkout() is connection
    server.checkin(connection)
    assert server.checkout_idle() is connection
    assert server.checkout_idle() is None


def test_what_was_checked_in_just_now_is_not_idle(server: Any, now: Any) -> None:
    connection = idle(server)
    assert server.checkout_unchecked() == (connection, now.seconds)
    server.checkin(connection, None, 900.0)
    assert server.checkout_unchecked() == (connection, 900.0)
    assert server.checkout_unchecked() is None


@pytest.mark.parametrize("has_come", [True, False])
def test_a_reply_that_is_still_to_come(server: Any, now: Any, has_come: bool) -> None:
    unread = Unread(has_come)
    connection = idle(server, b"PONG", since=now.seconds, unread=unread)
    found = server.checkout_unchecked()
    assert found == ((connection, now.seconds) if has_come else None)
    assert unread.asked == [False]
    if found:
        server.checkin(connection, unread, now.seconds)
    assert server.checkout_unread() == (connection, unread)
    server.checkin(connection, unread, now.seconds - 60)
    taken = server.checkout()
    assert (taken is connection) is has_come
    assert connection.closed is not has_come
    assert unread.asked[-1] is False
    server.checkin(taken, waited := Unread(True), now.seconds)
    assert server.checkout() is taken
    assert waited.asked == [True]


def test_a_connection_that_the_server_has_closed_is_not_used_for_what_runs_once(
    server: Any, connections: Any, now: Any
) -> None:
    class Ended(connections):
        def can_read(self, timeout: float = 0) -> bool:
            self.looks.append(timeout)
            return True

    server.address = server.address._replace(connection_class=Ended)
    ended = idle(server, 7, since=now.seconds)
    assert server.exchange(b"command", may_run_twice=True) == 7
    assert ended.looks == []
    connections.script += [[8]]
    assert server.exchange(b"command", may_run_twice=False) == 8
    assert ended.looks[0] == 0
    assert ended.closed


def test_the_last_used_ones_may_stay(server: Any) -> None:
    made = [server.connect() for _ in range(4)]
    for connection in made:
        server.checkin(connection)
    server.close(but=1)
    assert [each.closed for each in made] == [True, True, True, False]
    assert server.checkout() is made[3]
    server.checkin(made[3])
    server.close(but=5)
    assert not made[3].closed


# -- a primary that is one no more -----------------------------------------------------------------


def of_address(connections: Any, **settings: Any) -> Server:
    settings = {"host": "redis.example", "port": 1, **settings}
    return Server(redis.ConnectionPool(connection_class=connections, **settings))


def test_all_connections_to_the_address_end_and_no_others(connections: Any) -> None:
    one = of_address(connections)
    same = [of_address(connections, db=3), of_address(connections, socket_timeout=7)]
    others = [of_address(connections, port=2), of_address(connections, host="other.example")]
    used = {server: server.connect() for server in (one, *same, *others)}
    assert one.renew(used[one])
    assert [each.was_cut for each in used.values()] == [True] * 3 + [False] * 2
    assert not others[0].generation
    generation = one.generation
    assert one.renew(used[one])  # That one was made before.
    assert one.generation == generation
    assert one.renew(None)
    assert one.generation > generation
    after: Any = one.connect()
    one.checkin(after)
    assert not after.closed
    one.discovered = True
    assert not one.renew(after)


def test_a_forked_child_knows_none_of_its_parents_connections(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = server.connect()
    everywhere = {weakref.ref(server), weakref.ref(of_address(type(kept)))}
    monkeypatch.setattr(server_module, "_all", everywhere)
    assert server._made
    server_module._forget_connections()
    assert not server._made
    assert not everywhere


def test_a_connection_that_another_thread_makes_at_that_moment_stays(server: Any) -> None:
    before, after = server.connect(), server.connect()
    after.generation = server.generation + 1
    server.end_connections()
    assert [each.was_cut for each in (before, after)] == [True, False]


@pytest.mark.parametrize("known", [True, False])
def test_the_idle_connections_of_pools_end_with_them(connections: Any, known: bool) -> None:
    pool = redis.ConnectionPool(connection_class=connections, host="redis.example", port=3)
    client = redis.Redis(connection_pool=pool)
    if known:
        server = server_of(client)
        ours: Any = server.connect()
        server.checkin(ours)
    theirs: Any = pool.make_connection()
    theirs.connect()
    pool._available_connections.append(theirs)
    renew_pool(pool)
    assert theirs.closed
    assert not known or ours.closed


# -- many at once ----------------------------------------------------------------------------------


@pytest.fixture
def pairs() -> Iterator[list[tuple[Any, socket.socket]]]:
    """Connections with sockets, and the other ends of these."""
    made = [socket.socketpair() for _ in range(3)]

    class Plain:
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock
            self.looks: list[float] = []

        def can_read(self, timeout: float = 0) -> bool:
            self.looks.append(timeout)
            self._sock.settimeout(timeout)
            try:
                return bool(self._sock.recv(1, socket.MSG_PEEK))
            except (BlockingIOError, TimeoutError):
                return False

    yield [(Plain(ours), theirs) for ours, theirs in made]
    for each in made:
        for end in each:
            end.close()


def test_of_several_connections_those_with_a_reply_are_read(pairs: Any) -> None:
    connections = [connection for connection, _ in pairs]
    assert readable(connections, 0.0) == []
    assert readable([], 60.0) == []
    assert readable(connections, 0.01) == []
    for number in (2, 0):
        pairs[number][1].sendall(b"x")
    assert readable(connections, 60.0) == [connections[0], connections[2]]
    assert {look for each in connections for look in each.looks} == {0}


def test_a_single_connection_is_waited_for_by_itself(pairs: Any) -> None:
    [connection] = [connection for connection, _ in pairs[:1]]
    assert readable([connection], 0.01) == []
    assert connection.looks[0] == pytest.approx(0.01, abs=0.01)
    assert connection.looks[0] > 0


def test_the_end_of_a_connection_is_something_to_read(pairs: Any) -> None:
    class Ended:
        def can_read(self, timeout: float = 0) -> bool:
            raise redis.ConnectionError("closed")

    ended: Any = Ended()
    assert readable([ended, pairs[0][0]], 60.0) == [ended]


def test_the_system_tells_which_has_a_reply(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Poll:
        def __init__(self) -> None:
            self.registered: list[Any] = []

        def register(self, sock: Any, what: int) -> None:
            self.registered.append(sock)

        def poll(self, milliseconds: float) -> None:
            assert self.registered == [connection._sock for connection, _ in pairs]
            waits.append(milliseconds)
            pairs[1][1].sendall(b"x")

    monkeypatch.setattr(server_module.select, "poll", Poll)
    connections = [connection for connection, _ in pairs]
    assert readable(connections, 60.0) == [connections[1]]
    assert waits == [pytest.approx(60_000, rel=0.2)]
