"""What a direct connection makes of what comes, and does not come, through its socket."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis.connection import Connection
from redis.exceptions import BusyLoadingError, NoScriptError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_redis_lock.transport.address import DirectConnection, direct, refuse_to_connect
from tests.processes import PATIENCE

pytest.importorskip("hiredis", reason="without hiredis, redis-py's own parser reads the replies")


@pytest.fixture
def ends() -> Iterator[tuple[Any, socket.socket]]:
    """A direct connection with a short timeout, and the server's end of its socket."""
    ours, theirs = socket.socketpair()
    connection = Connection(socket_timeout=0.05)
    connection._sock = ours
    ours.settimeout(0.05)
    theirs.settimeout(PATIENCE)
    with theirs:
        found = direct(connection)
        yield found, theirs
        found.disconnect()


def test_a_reply_may_come_in_pieces_and_with_the_next(ends: Any) -> None:
    connection, server = ends
    for piece in (b"*2\r\n:1\r\n$3\r\n", b"one\r", b"\n:2\r\n"):
        server.sendall(piece)
    assert connection.read_response() == [1, b"one"]
    assert connection.can_read()
    assert connection.read_response() == 2
    assert not connection.can_read()


@pytest.mark.parametrize("size", [50_000, 2_000_000])
def test_all_of_a_large_request_is_sent(ends: Any, size: int) -> None:
    connection, server = ends
    received = bytearray()

    def receive() -> None:
        while piece := server.recv(size):
            received.extend(piece)

    connection.allow(PATIENCE)
    receiving = threading.Thread(target=receive, daemon=True)
    receiving.start()
    try:
        connection.send_packed_command([b"x" * size, b"y"])
    finally:
        connection.disconnect()
    receiving.join(PATIENCE)
    assert received == b"x" * size + b"y"


def test_what_does_not_fit_is_sent_when_there_is_room(ends: Any) -> None:
    connection, server = ends
    filled = 0
    with suppress(BlockingIOError):
        while True:
            filled += connection._sock.send(b"x" * 5000)

    def make_room(milliseconds: float) -> bool:
        received = 0
        while received < filled:
            received += len(server.recv(filled - received))
        return True

    connection._writable = make_room
    connection.send_packed_command([b"PING\r\n"])
    assert server.recv(100) == b"PING\r\n"


def test_its_calls_take_one_system_call_each(ends: Any) -> None:
    """Python waits, by another call, for a socket with a timeout."""
    connection, server = ends
    assert connection._sock.gettimeout() == 0
    connection.send_command("PING")
    assert server.recv(100) == b"*1\r\n$4\r\nPING\r\n"
    waited: list[float] = []
    connection._readable = waited.append
    assert not connection.can_read(0.25)
    assert waited == [250]


def test_what_was_closed_is_not_waited_for(ends: Any) -> None:
    """The number of its socket may be another file's."""
    connection, _ = ends
    connection.disconnect()
    assert connection._input.fileno() == connection._sock.fileno() == -1
    with pytest.raises(RedisConnectionError, match="was closed"):
        connection.can_read(PATIENCE)
    with pytest.raises(RedisConnectionError, match="was closed"):
        connection.send_packed_command([b"PING\r\n"])
    with pytest.raises(OSError, match="Bad file") as error:
        connection._send_rest(memoryview(b"PING"))  # Another thread has just closed it.
    assert not isinstance(error.value, TimeoutError)


def test_only_the_connection_closes_its_socket(ends: Any) -> None:
    connection, server = ends
    connection._input = None
    gc.collect()
    connection.send_packed_command([b"PING\r\n"])
    assert server.recv(100) == b"PING\r\n"
    connection._input = server  # For the end.


def test_an_error_of_redis_leaves_the_connection_open(ends: Any) -> None:
    connection, server = ends
    server.sendall(b"-NOSCRIPT No matching script.\r\n+OK\r\n")
    with pytest.raises(NoScriptError):
        connection.read_response()
    assert connection.read_response() == b"OK"


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"-LOADING Redis is loading\r\n", BusyLoadingError),
        (b"?what\r\n", RedisConnectionError),
        (b"$5\r\nab", RedisTimeoutError),
        (b"", RedisTimeoutError),
    ],
)
def test_without_a_whole_reply_it_disconnects(ends: Any, sent: bytes, error: type) -> None:
    connection, server = ends
    server.sendall(sent)
    with pytest.raises(error):
        connection.read_response()
    assert server.recv(1) == b""
    with pytest.raises(RedisConnectionError):
        connection.send_packed_command([b"PING\r\n"])


def test_a_server_that_hangs_up_ends_the_wait_and_the_read(ends: Any) -> None:
    connection, server = ends
    server.shutdown(socket.SHUT_RDWR)
    assert connection.can_read(10)
    with pytest.raises(RedisConnectionError):
        connection.read_response()


def test_a_request_to_a_server_that_has_hung_up_breaks(ends: Any) -> None:
    connection, server = ends
    server.close()
    with pytest.raises(RedisConnectionError, match="broke"):
        connection.send_packed_command([b"PING\r\n"])


def test_a_server_that_reads_nothing_does_not_hold_up_a_request_forever(ends: Any) -> None:
    connection, _ = ends
    with pytest.raises(RedisTimeoutError):
        connection.send_packed_command([b"x" * 50_000_000])
    with pytest.raises(RedisConnectionError):
        connection.read_response()


@pytest.fixture
def _periodic_signals() -> Iterator[None]:
    """As a sampling profiler has them, faster than the connection's timeout."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_periodic_signals")
def test_a_signal_that_comes_again_and_again_does_not_prolong_the_wait(
    request: pytest.FixtureRequest,
) -> None:
    connection, _ = request.getfixturevalue("ends")
    with pytest.raises(RedisTimeoutError):
        connection.read_response()


def test_a_read_that_is_interrupted_disconnects(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, server = ends

    class Interrupted:
        def recv_into(self, buffer: bytearray) -> int:
            raise KeyboardInterrupt

        def detach(self) -> None:
            pass

    connection._input.detach()
    monkeypatch.setattr(connection, "_input", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        connection.read_response()
    assert server.recv(1) == b""


def test_a_connection_class_of_the_projects_own_is_used_as_it_is() -> None:
    class Traced(Connection):
        pass

    for connection in (Traced(), Connection()):
        connection._sock = object()  # As gevent has sockets of its own.
        assert direct(connection) is connection
        assert connection._connect is refuse_to_connect
        connection._sock = None
    assert not isinstance(direct(connection), DirectConnection)
