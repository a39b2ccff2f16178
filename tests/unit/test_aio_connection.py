"""What the connection that tasks share makes of what comes, and does not come, through its socket:
with hiredis on the transport, and with redis-py's parser."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio.connection import Connection, ConnectionPool
from redis.exceptions import AuthenticationError, BusyLoadingError, NoScriptError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_redis_lock.transport import aio_connection, aio_tasks
from django_redis_lock.transport.address import HAS_HIREDIS
from django_redis_lock.transport.aio_connection import (
    AsyncRawConnection,
    DirectConnection,
    IndirectConnection,
    connect_to,
)
from tests.processes import PATIENCE

Test = Callable[[AsyncRawConnection, socket.socket], Awaitable[None]]
KINDS = [DirectConnection, IndirectConnection] if HAS_HIREDIS else [IndirectConnection]


@pytest.fixture(params=KINDS)
def over(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a test with a connection and the server's end of its socket."""

    def run(test: Test, timeout: float | None = None) -> None:
        async def main() -> None:
            complaints: list[Any] = []
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: complaints.append(context))
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            redis_py = Connection(socket_timeout=0.01)  # Of no effect once it is connected.
            redis_py._reader, redis_py._writer = await asyncio.open_connection(sock=ours)
            redis_py._parser.on_connect(redis_py)
            connection = request.param(redis_py, timeout)
            with theirs:
                await asyncio.wait_for(test(connection, theirs), PATIENCE)
                connection.disconnect()
                await asyncio.sleep(0)
            assert not complaints

        asyncio.run(main())

    return run


class Refused(Connection):
    """An own class of a project, which cannot connect."""

    attempts = 0

    async def _connect(self) -> None:
        type(self).attempts += 1
        raise RedisConnectionError("refused")


def test_connecting_is_tried_once() -> None:
    """What is tried again, and for how long, the caller decides."""

    async def main() -> None:
        with pytest.raises(RedisConnectionError, match="refused"):
            await connect_to(ConnectionPool(Refused), PATIENCE)

    asyncio.run(main())
    assert Refused.attempts == 1


@pytest.mark.parametrize("own", [True, False])
def test_past_the_layers_of_redis_pys_own_classes_only(
    monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    ours, theirs = socket.socketpair()

    async def connect(self: Any) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._parser.on_connect(self)

    async def main() -> None:
        kind = type("Traced", (Connection,), {}) if own else Connection
        monkeypatch.setattr(Connection, "connect", connect)
        made = await connect_to(ConnectionPool(kind), PATIENCE)
        assert type(made) is (IndirectConnection if own else KINDS[0])
        made.disconnect()
        await asyncio.sleep(0)

    with theirs:
        asyncio.run(main())


def test_work_in_the_background_is_kept_until_it_is_done() -> None:
    async def main() -> None:
        done = [aio_tasks.in_background(asyncio.sleep(0)) for _ in range(3)]
        assert aio_tasks._background >= set(done)
        await asyncio.gather(*done)
        await asyncio.sleep(0)
        assert not aio_tasks._background & set(done)

    asyncio.run(main())


def test_work_ends_when_it_is_cancelled() -> None:
    """And nothing is reported of it."""
    ended: list[str] = []

    async def work(how: str) -> None:
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            ended.append(how)
            if how == "fails":
                raise ZeroDivisionError from None
            raise

    async def main() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        for how in ("is cancelled", "fails"):
            task = asyncio.ensure_future(aio_tasks.cancellable(work(how)))
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended[-1] == how
        del task
        await asyncio.sleep(0)  # The loop refers to it in this turn.
        gc.collect()
        assert not complaints
        assert await aio_tasks.cancellable(asyncio.sleep(0, 7)) == 7

    asyncio.run(main())


async def heard(server: socket.socket) -> bytes:
    """What the server hears next; empty at the end."""
    return await asyncio.get_running_loop().sock_recv(server, 1000)


def test_each_call_gets_its_reply_however_these_come(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        first, second = connection.request(b"first\r\n"), connection.request(b"second\r\n")
        assert connection.is_new
        await asyncio.sleep(0)  # Only the first leaves at once.
        assert await heard(server) == b"first\r\nsecond\r\n"
        for piece in (b"*2\r\n:1\r\n$3\r\n", b"one\r", b"\n:2\r\n"):
            server.sendall(piece)
            await asyncio.sleep(0)
        assert await asyncio.gather(first, second) == [[1, b"one"], 2]
        assert not connection.is_new
        for _ in range(2):
            calls = [connection.request(b"third"), connection.request(b"fourth")]
            await asyncio.sleep(0)
            assert await heard(server) == b"thirdfourth"
            server.sendall(b":3\r\n:4\r\n")
            assert await asyncio.gather(*calls) == [3, 4]

    over(test)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"NOSCRIPT No matching script.", NoScriptError),
        # For redis-py these are errors of the connection.
        (b"NOAUTH Authentication required.", AuthenticationError),
        (b"LOADING Redis is loading the dataset in memory", BusyLoadingError),
    ],
)
def test_an_error_of_redis_is_one_calls_own(over: Any, reply: bytes, error: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        first, second = connection.request(b"first"), connection.request(b"second")
        server.sendall(b"-%b\r\n+OK\r\n" % reply)
        with pytest.raises(error):
            await first
        assert await second == b"OK"
        assert connection.takes_calls()

    over(test)


def test_of_several_replies_the_first_error_is_raised_when_all_have_come(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        several, refused, last = (
            connection.request(b"several", replies=2),
            connection.request(b"refused", replies=3),
            connection.request(b"last"),
        )
        server.sendall(b":1\r\n*0\r\n" + b":1\r\n-ERR one\r\n-ERR two\r\n" + b":3\r\n")
        assert await several == [1, []]
        with pytest.raises(ResponseError, match="one"):
            await refused
        assert await last == 3

    over(test)


def test_the_reply_to_a_task_that_was_cancelled_is_dropped(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        first, second = connection.request(b"first"), connection.request(b"second")
        first.cancel()
        server.sendall(b":1\r\n:2\r\n")
        assert await second == 2
        assert connection.takes_calls()

    over(test)


def test_each_call_has_its_time_and_no_other_ones_late_reply(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        late, second = connection.request(b"late"), connection.request(b"second")
        connection._calls[1].sent_at += 2 * PATIENCE
        with pytest.raises(RedisTimeoutError):
            await late
        server.sendall(b":1\r\n:2\r\n")
        assert await second == 2

    over(test, 0.01)


@pytest.mark.parametrize("left", [0.0, 0.5])
def test_what_has_time_left_is_waited_for(
    over: Any, monkeypatch: pytest.MonkeyPatch, left: float
) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        calls = [connection.request(b"late"), connection.request(b"second")]
        monkeypatch.setattr(aio_connection, "time", SimpleNamespace(monotonic=lambda: 1000.0))
        connection._calls[0].sent_at = 900.0
        connection._calls[1].sent_at = 1000.0 - PATIENCE + left
        connection._expire()
        assert isinstance(calls[0].exception(), RedisTimeoutError)
        assert calls[1].done() is (left == 0)
        timer = connection._timer
        assert bool(timer) is bool(left)
        monkeypatch.undo()
        if timer is not None:
            assert timer.when() <= asyncio.get_running_loop().time() + left
            connection.disconnect()
            await asyncio.sleep(0)
            assert timer.cancelled()
        ended = calls[1].exception()
        assert isinstance(ended, RedisConnectionError if left else RedisTimeoutError)

    over(test, PATIENCE)


@pytest.mark.skipif(not HAS_HIREDIS, reason="redis-py's parser does not tell of parts")
@pytest.mark.parametrize("over", [DirectConnection], indirect=True)
def test_a_reply_of_which_more_and_more_comes_is_not_late(over: Any) -> None:
    """A large value by a slow network: threads wait for so long for each part of it, too."""

    async def test(connection: Any, server: socket.socket) -> None:
        calls = [connection.request(b"large"), connection.request(b"behind")]
        heard = b""
        for part in (b"$4\r\nab", b"c"):
            for call in connection._calls:
                call.sent_at -= 2 * PATIENCE
            server.sendall(part)
            heard += part
            while connection._unread < len(heard):
                await asyncio.sleep(0)
            connection._expire()
            assert not any(call.done() for call in calls)
        connection._moved_at -= 2 * PATIENCE
        connection._expire()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, RedisTimeoutError)

    over(test, PATIENCE)


def test_a_small_request_comes_after_the_parts_of_a_large_one(over: Any) -> None:
    large, small = b"x" * 3_000_000, b"small"

    async def test(connection: Any, server: socket.socket) -> None:
        calls = [connection.request(large)]
        assert connection._parts
        calls += [connection.request(small)]
        loop, received = asyncio.get_running_loop(), bytearray()
        while len(received) < len(large) + len(small):
            received += await loop.sock_recv(server, 1_000_000)
        assert received.endswith(b"x" + small)
        await loop.sock_sendall(server, b"+1\r\n+2\r\n")
        assert await asyncio.gather(*calls) == [b"1", b"2"]

    over(test)


def test_while_something_large_is_on_its_way_it_takes_no_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("hiredis", reason="this is about its parser")
    monkeypatch.setattr(aio_connection, "LARGE", 15)

    async def main() -> None:
        ours, theirs = socket.socketpair()
        redis_py = Connection()
        redis_py._reader, redis_py._writer = await asyncio.open_connection(sock=ours)
        connection = DirectConnection(redis_py, None)
        assert connection._transport.get_write_buffer_limits()[1] == 15
        call = connection.request(b"one")
        connection.data_received(b"$20\r\n" + b"x" * 9)
        assert not connection.in_transfer
        connection.data_received(b"x")
        assert connection.in_transfer
        assert not connection.takes_calls()
        connection.data_received(b"x" * 10 + b"\r\n")
        assert await call == b"x" * 20
        assert connection.takes_calls()
        connection.pause_writing()
        assert not connection.takes_calls()
        connection.resume_writing()
        assert connection.takes_calls()
        monkeypatch.setattr(aio_connection, "select", SimpleNamespace())
        assert not connection.has_ended()  # Nobody can tell.
        connection.disconnect()
        await asyncio.sleep(0)
        theirs.close()

    asyncio.run(main())


def test_tasks_need_a_transport() -> None:
    async def main() -> None:
        with pytest.raises(TypeError, match="has no transport"):
            IndirectConnection(SimpleNamespace(_writer=object()), None)
        cuts: list[int] = []
        in_memory = SimpleNamespace(write=print, _writer=None, cut=lambda: cuts.append(1))
        IndirectConnection(in_memory, None).cut()
        assert cuts == [1]

    asyncio.run(main())


def test_with_redis_pys_parser_nothing_reads_on_after_the_end() -> None:
    """The loop may end at once, and would report a task."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        redis_py = Connection()
        redis_py._reader, redis_py._writer = await asyncio.open_connection(sock=ours)
        redis_py._parser.on_connect(redis_py)
        connection = IndirectConnection(redis_py, None)
        call = connection.request(b"one")
        await asyncio.sleep(0)
        reading: Any = connection._reading
        connection.disconnect()
        await asyncio.wait([reading])
        assert reading.cancelled()
        assert isinstance(call.exception(), RedisConnectionError)
        theirs.close()

    asyncio.run(main())


def test_the_end_of_an_idle_connection_closes_it(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        server.shutdown(socket.SHUT_RDWR)
        while not connection.is_closed():
            await asyncio.sleep(0)

    over(test)


def test_without_a_timeout_a_reply_may_take_forever(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        call = connection.request(b"one")
        await asyncio.sleep(0.05)
        server.sendall(b":1\r\n")
        assert await call == 1

    over(test)


def test_a_connection_on_which_all_time_is_over_is_closed(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        calls = [connection.request(b"one"), connection.request(b"two")]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, RedisTimeoutError)
        assert not connection.takes_calls()
        with pytest.raises(RedisConnectionError):
            connection.request(b"three")
        assert await heard(server) == b"onetwo"
        assert await heard(server) == b""

    over(test, 0.01)


def test_a_reply_that_came_while_the_loop_stood_still_counts(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        call = connection.request(b"one")
        server.sendall(b":1\r\n")
        until = asyncio.get_running_loop().time() + 0.05
        while asyncio.get_running_loop().time() < until:
            pass
        assert await call == 1

    over(test, 0.01)


def test_the_end_of_the_server_reaches_all_that_wait(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        calls = [connection.request(b"one"), connection.request(b"two")]
        await asyncio.sleep(0)  # Only the first leaves at once.
        server.sendall(b":1\r\n")
        server.shutdown(socket.SHUT_RDWR)
        assert await calls[0] == 1
        with pytest.raises(RedisConnectionError, match="closed"):
            await calls[1]
        assert not connection.takes_calls()

    over(test)


def test_what_is_no_reply_ends_the_connection(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        call = connection.request(b"one")
        server.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        with pytest.raises(RedisConnectionError, match="broke: "):
            await call
        assert not connection.takes_calls()

    over(test)


def test_a_connection_that_owes_a_reply_for_long_takes_no_calls(
    over: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        call = connection.request(b"one")
        assert connection.takes_calls()
        monkeypatch.setattr(aio_connection, "TRUSTED_SECONDS", 0.0)
        assert not connection.takes_calls()
        server.sendall(b":1\r\n")
        await call
        monkeypatch.undo()
        assert connection.takes_calls()

    over(test)


def test_a_retired_connection_is_closed_after_its_last_reply(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        call = connection.request(b"one")
        connection.retire()
        assert await heard(server) == b"one"
        server.sendall(b":1\r\n")
        assert await call == 1
        assert await heard(server) == b""
        assert not connection.takes_calls()

    over(test)


def test_an_idle_connection_that_is_retired_is_closed_at_once(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        connection.retire()
        assert await heard(server) == b""
        assert not connection.takes_calls()

    over(test)


def test_a_loop_that_is_thrown_away_while_it_connects_makes_no_noise() -> None:
    """redis-py then looks for a running loop to close the connection in."""

    class Lost(Connection):
        async def connect(self) -> None:
            try:
                await asyncio.Event().wait()
            except GeneratorExit:
                raise RuntimeError("no running event loop") from None

    async def begin() -> Any:
        connecting = connect_to(SimpleNamespace(connection_class=Lost, connection_kwargs={}), 1.0)
        connecting.send(None)
        return connecting

    asyncio.run(begin()).close()


def test_the_end_of_an_idle_connection_is_seen_before_the_loop_hears_of_it(over: Any) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        assert not connection.has_ended()
        server.sendall(b"+PONG\r\n")
        server.close()
        assert connection.has_ended()
        assert not await connection.still_answers()
        call = connection.request(b"one")
        assert not connection.has_ended()  # The end of the call will tell.
        call.cancel()

    over(test)


@pytest.mark.parametrize(
    ("reply", "answers"),
    [(b"+PONG\r\n", True), (b"-NOPERM no permission to run PING\r\n", True), (b"", False)],
)
def test_one_that_was_idle_shows_whether_it_still_leads_to_a_server(
    over: Any, reply: bytes, answers: bool
) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        answering = asyncio.ensure_future(connection.still_answers())
        assert b"PING" in await heard(server)
        server.sendall(reply)
        assert await answering is answers
        assert connection.takes_calls() is answers
        connection.disconnect()
        await asyncio.sleep(0)

    over(test)


def test_one_that_is_not_idle_is_not_tried(over: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        call = connection.request(b"one")
        assert not await connection.still_answers()
        server.sendall(b":1\r\n")
        assert await call == 1
        assert await heard(server) == b"one"
        with monkeypatch.context() as patch:
            patch.setattr(connection, "request", refuse)
            assert not await connection.still_answers()
        connection.disconnect()
        assert not await connection.still_answers()

    def refuse(command: bytes) -> Any:
        raise RedisConnectionError("It has just been closed.")

    over(test)


def test_it_can_be_cut_when_its_loop_no_longer_runs(over: Any) -> None:
    kept: list[tuple[AsyncRawConnection, socket.socket]] = []

    async def test(connection: AsyncRawConnection, server: socket.socket) -> None:
        call = connection.request(b"one")
        assert await heard(server) == b"one"
        await asyncio.to_thread(connection.cut)
        assert await heard(server) == b""
        with pytest.raises(RedisConnectionError):
            await call
        kept.append((connection, server))

    over(test)
    kept[0][0].cut()  # And again, closed.
