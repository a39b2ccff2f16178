"""What a guarded connection of a pool does before each call, for threads and for tasks: it is used
only if no reply is left on it. The connection below it is the test's own."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.asyncio.connection import Connection as AsyncConnection
from redis.connection import Connection

from django_redis_lock.transport import guarded_connection
from django_redis_lock.transport.address import PROBE_SECONDS, TRUSTED_SECONDS
from django_redis_lock.transport.guarded_connection import (
    UNREAD,
    AsyncGuardedConnection,
    GuardedConnection,
    guard,
    guarded,
)

pytestmark = pytest.mark.invariant("P1")


class Base:
    """As redis-py's: it introduces itself when it connects, and notes what is done."""

    socket_timeout = 0.25
    interrupted: type[BaseException] | None = None

    def __init__(self) -> None:
        self._sock: object = None
        self.replies: list[Any] = []
        self.done: list[Any] = []

    @property
    def is_connected(self) -> bool:
        return self._sock is not None

    def connect(self) -> None:
        if self._sock is None:
            self.connect_check_health()

    def connect_check_health(self, check_health: bool = True) -> None:
        self._connect()
        self.done.append(("connected", check_health))

    def _connect(self) -> None:
        self._sock = object()

    def disconnect(self, *args: Any, **options: Any) -> None:
        if self.interrupted is not None:
            raise self.interrupted
        self._sock = None
        self.replies.clear()
        self.done.append(("disconnected", options))

    def pack_commands(self, commands: list[Any]) -> list[Any]:
        return commands

    def send_command(self, *args: Any, **options: Any) -> None:
        words = [each if isinstance(each, str) else f"<{each}>" for each in args]
        self.send_packed_command(words, **options)

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        self.done.append(("sent", tuple(command), check_health))

    def check_health(self) -> None:
        self.done.append("health")

    def can_read(self, timeout: float = 0) -> bool:
        self.done.append(("looked", timeout))
        return timeout > 0 and bool(self.replies)

    def read_response(self) -> Any:
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return reply


def awaited(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(self: Any, *args: Any, **options: Any) -> Any:
        outcome = method(self, *args, **options)
        return await outcome if inspect.isawaitable(outcome) else outcome

    return call


class AsyncBase(Base):
    """The same for tasks."""

    _connect = awaited(Base._connect)
    disconnect = awaited(Base.disconnect)
    send_packed_command = awaited(Base.send_packed_command)
    check_health = awaited(Base.check_health)

    async def connect(self) -> None:
        if self._sock is None:
            await self.connect_check_health()

    async def connect_check_health(self, check_health: bool = True) -> None:
        await self._connect()
        self.done.append(("connected", check_health))

    async def send_command(self, *args: Any, **options: Any) -> None:
        words = [each if isinstance(each, str) else f"<{each}>" for each in args]
        await self.send_packed_command(tuple(words), **options)

    async def read_response(self) -> Any:
        if not self.replies:
            await asyncio.Event().wait()
        return super().read_response()


class Threads(GuardedConnection, Base):
    pass


class Tasks(AsyncGuardedConnection, AsyncBase):
    pass


class Earlier:
    """In front of the base: redis-py before 8, whose ``connect`` calls no such method."""

    def connect(self: Any) -> None:
        self._sock = object()


class EarlierThreads(GuardedConnection, Earlier, Base):
    pass


class EarlierForTasks(Earlier):
    connect = awaited(Earlier.connect)


class EarlierTasks(AsyncGuardedConnection, EarlierForTasks, AsyncBase):
    pass


class Guarded:
    """A guarded connection of one of the two kinds, used by a thread."""

    def __init__(self, kind: type[Any]) -> None:
        self.connection: Any = kind()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.connection, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            outcome = found(*args, **options)
            return asyncio.run(_result(outcome)) if inspect.isawaitable(outcome) else outcome

        return call

    @property
    def events(self) -> list[Any]:
        """What has been done since this was called last."""
        done, self.connection.done = self.connection.done, []
        return done

    def answer(self, *replies: Any) -> None:
        self.connection.replies += replies
        for _ in replies:
            try:
                self.read_response()
            except redis.ResponseError:
                pass


async def _result(work: Any) -> Any:
    return await work


@pytest.fixture(params=[Threads, Tasks])
def one(request: Any) -> Guarded:
    """A connection that is connected."""
    made = Guarded(request.param)
    made.connect()
    assert made.events == [("connected", True)]
    made.connection._answered_at = time.monotonic()
    return made


def how_it_disconnects(one: Guarded) -> Any:
    """A task does not wait for the other end."""
    return ("disconnected", {"nowait": True} if isinstance(one.connection, Tasks) else {})


def is_replaced(one: Guarded) -> bool:
    """Whether it connects again before the next call."""
    before = one._sock
    one.connect()
    assert one._sock is not None
    assert one.connection._is_clean()
    return one._sock is not before


def test_it_stays_while_each_request_has_its_reply(one: Guarded) -> None:
    one.send_command("GET", "key")
    one.answer(b"value")
    one.send_command("INCR", "key")
    one.answer(redis.ResponseError("WRONGTYPE"))
    one.send_packed_command(one.pack_commands([("GET", "a"), ("GET", "b")]))
    one.answer(1, 2)
    one.connection._answered_at = 0.0
    one.send_command("GET", "key")
    one.answer(b"value")
    assert not one.connection._was_idle()
    assert not is_replaced(one)


@pytest.mark.parametrize("replies", [0, 1])
def test_it_is_replaced_while_a_reply_is_to_come(one: Guarded, replies: int) -> None:
    one.send_packed_command(one.pack_commands([("GET", "a"), ("GET", "b")]))
    one.answer(*range(replies))
    assert is_replaced(one)
    assert how_it_disconnects(one) in one.events


def test_a_call_on_it_meets_no_reply_to_another(one: Guarded) -> None:
    one.send_command("GET", "of an interrupted call")
    with pytest.raises(redis.ConnectionError, match=UNREAD):
        one.send_command("GET", "key")
    assert one._sock is None
    assert how_it_disconnects(one) in one.events
    one.send_command("GET", "key")  # It connects by itself.
    one.answer(b"value")
    assert not is_replaced(one)


@pytest.mark.parametrize("name", ["SUBSCRIBE", "PSUBSCRIBE", "UNSUBSCRIBE", "MONITOR"])
def test_after_a_subscription_it_is_replaced(one: Guarded, name: str) -> None:
    """Messages are replies without a request, which stay unread."""
    one.send_command(name, "channel")
    one.send_command("PING")
    one.answer(1, 2, 3)
    assert not one.connection._owes_a_reply()
    assert is_replaced(one)


def test_what_was_packed_counts_for_the_request_that_is_sent_next(one: Guarded) -> None:
    one.pack_commands([("GET", "a"), ("GET", "b")])
    one.connect()  # Those have not been sent.
    one.send_command("GET", "key")
    one.answer(b"value")
    assert not is_replaced(one)


def test_the_health_of_a_connection_is_checked_once(one: Guarded) -> None:
    one.send_packed_command([b"GET"])
    one.answer(1)
    one.send_packed_command([b"GET"], check_health=False)
    assert one.events == ["health", ("sent", (b"GET",), False), ("sent", (b"GET",), False)]


@pytest.mark.parametrize("checks", [True, False])
def test_one_that_has_ended_connects_before_it_sends(
    one: Guarded, checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py 8 has a method for that, which does not check its health."""
    monkeypatch.setattr(guarded_connection, "_CHECKS_WHILE_CONNECTING", checks)
    one.disconnect()
    one.pack_commands([("GET", "a"), ("GET", "b")])
    one.send_packed_command([b"two"], check_health=False)
    assert one.events[1:] == [("connected", not checks), ("sent", (b"two",), False)]
    one.answer(1, 2)
    assert not is_replaced(one)


def test_a_new_socket_owes_nothing(one: Guarded) -> None:
    one.send_command("SUBSCRIBE", "channel")
    one.disconnect()
    assert is_replaced(one)
    one.send_command("GET", "key")
    one.answer(1)
    assert not is_replaced(one)


def test_an_interrupt_while_it_disconnects_leaves_it_unusable(one: Guarded) -> None:
    """It may have been closed, or not."""
    one.connection.interrupted = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        one.disconnect()
    one.connection.interrupted = None
    assert is_replaced(one)


def test_an_interrupt_while_it_connects_leaves_it_unusable(one: Guarded) -> None:
    """Before it has selected its database."""
    one.disconnect()

    class Interrupted(Threads if isinstance(one.connection, Threads) else Tasks):
        def connect_check_health(self, *args: Any, **options: Any) -> Any:
            raise KeyboardInterrupt

    kind, one.connection.__class__ = type(one.connection), Interrupted
    one.connection._sock = object()
    with pytest.raises(KeyboardInterrupt):
        one.connect()
    one.connection.__class__ = kind
    assert not one.connection._is_ready


@pytest.mark.parametrize("kind", [EarlierThreads, EarlierTasks])
def test_one_that_has_connected_is_ready(kind: type) -> None:
    one = Guarded(kind)
    one.connect()
    assert one.connection._is_clean()


def test_a_new_socket_is_not_ready_until_it_has_introduced_itself(one: Guarded) -> None:
    assert one.connection._is_ready
    one._connect()
    assert not one.connection._is_ready
    assert is_replaced(one)


@pytest.mark.parametrize(
    ("idle_for", "reply", "stays", "asks"),
    [
        (TRUSTED_SECONDS - 0.5, None, True, False),
        (TRUSTED_SECONDS + 0.5, b"PONG", True, True),
        (TRUSTED_SECONDS + 0.5, redis.ResponseError("NOPERM"), True, True),
        (TRUSTED_SECONDS + 0.5, redis.ConnectionError("gone"), False, True),
        (TRUSTED_SECONDS + 0.5, None, False, True),
    ],
)
def test_one_that_was_idle_shows_that_it_still_leads_somewhere(
    one: Guarded,
    monkeypatch: pytest.MonkeyPatch,
    idle_for: float,
    reply: Any,
    stays: bool,
    asks: bool,
) -> None:
    """As a firewall may have forgotten it."""
    monkeypatch.setattr(guarded_connection, "PROBE_SECONDS", 0.1)
    one.connection._answered_at = time.monotonic() - idle_for
    if reply is not None:
        one.connection.replies.append(reply)
    assert is_replaced(one) is not stays
    done = one.events
    assert any(each[:2] == ("sent", ("PING",)) for each in done if each[0] == "sent") is asks
    assert all(each[2] is False for each in done if each[0] == "sent" and one.is_connected)
    assert "health" not in done or isinstance(one.connection, Threads)


def test_a_dirty_one_is_not_asked(one: Guarded) -> None:
    one.send_command("GET", "key")
    one.connection._answered_at = 0.0
    one.connection.replies.append(b"value")
    assert one.events
    assert is_replaced(one)
    assert not any(each[0] in ("sent", "looked") for each in one.events)


@pytest.mark.parametrize(
    ("timeout", "limit"), [(0.25, 0.25), (5.0, PROBE_SECONDS), (None, PROBE_SECONDS)]
)
def test_the_check_takes_no_longer_than_a_reply_may(timeout: float | None, limit: float) -> None:
    one = Guarded(Threads)
    one.connect()
    one.connection.socket_timeout = timeout
    one.connection.replies.append(b"PONG")
    assert not is_replaced(one)
    assert [each[1] for each in one.events if each[0] == "looked"] == [0, limit]


def test_numbers_are_sent_as_texts(one: Guarded) -> None:
    one.send_command("SETEX", "key", 5, 0.5, True)
    sent = [each for each in one.events if each[0] == "sent"]
    assert sent == [("sent", ("SETEX", "key", "5", "0.5", "<True>"), False)]
    assert one.pack_commands([("INCRBY", 5)]) == [["INCRBY", "5"]]


@pytest.mark.parametrize("kind", [Connection, AsyncConnection])
def test_the_class_of_a_pool_is_known_by_its_name(kind: type) -> None:
    made = guarded(kind)
    assert (made.__name__, made.__module__, made.guards) == ("Connection", kind.__module__, kind)
    assert made is guarded(kind)
    assert issubclass(made, GuardedConnection) is (kind is Connection)


def test_only_pools_for_threads_are_changed_and_only_once() -> None:
    client = redis.Redis()
    assert guard(client) is client
    made = client.connection_pool.connection_class
    assert issubclass(made, GuardedConnection)
    connection = client.connection_pool.make_connection()
    client.connection_pool._available_connections.append(connection)
    guard(client)
    assert client.connection_pool.connection_class is made
    assert client.connection_pool._available_connections == [connection]
    of_tasks = redis.asyncio.Redis()
    guard(of_tasks)
    assert of_tasks.connection_pool.connection_class is AsyncConnection
    fresh = redis.Redis()
    fresh.connection_pool._available_connections.append(fresh.connection_pool.make_connection())
    guard(fresh)
    assert not fresh.connection_pool._available_connections  # They were not guarded.
    assert guard(object()) is not None
