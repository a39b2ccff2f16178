"""What listens for messages to this process: its dialogue with a server, and its pauses after
errors. No Redis runs here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_redis_lock.contrib import instant_loss
from django_redis_lock.contrib.instant_loss import (
    CHANGES,
    CHECK_AFTER_SECONDS,
    TRACK,
    Listener,
    Subscription,
)
from django_redis_lock.keeper import listeners
from tests.support.connections import Connection

# Quick cells, each of which is another decision.
pytestmark = pytest.mark.sample(1)

REFUSED = NoPermissionError("NOPERM")
ID = ("CLIENT", "ID")
#: What a connection begins with.
BEGIN = [ID, ("SUBSCRIBE", CHANGES), ("SUBSCRIBE", b"channel")]


class Scripted(Connection):
    """Has these replies; None: nothing comes in time."""

    def __init__(self, *replies: Any) -> None:
        super().__init__()
        self.replies = [*replies]
        self.commands: list[tuple[Any, ...]] = []
        self.patience: list[float] = []
        self._sock, self.other_end = socket.socketpair()

    def send_command(self, *words: Any) -> None:
        self.commands.append(words)

    def can_read(self, timeout: float = 0) -> bool:
        self.patience.append(timeout)
        if self.replies and self.replies[0] is None:
            self.replies.pop(0)
            return False
        return True

    @property
    def was_shut(self) -> bool:
        self.other_end.setblocking(False)
        try:
            return self.other_end.recv(1) == b""
        except BlockingIOError:
            return False


class Node:
    """A server with these connections, or errors, one after the other."""

    timeout = 3.0

    def __init__(self, *connections: Any) -> None:
        self.connections = [*connections]
        self.located: list[Any] = []
        self.protocols: list[int] = []
        self.errors: list[BaseException] = []
        self.answers = 0
        self.primary: Any = self

    def locate(self, keys: Any) -> Any:
        self.located.append(keys)
        return self.primary

    def connect(self, protocol: int) -> Any:
        self.protocols.append(protocol)
        connection = self.connections.pop(0)
        if isinstance(connection, Exception):
            raise connection
        return connection

    def on_error(self, error: BaseException) -> None:
        self.errors.append(error)

    def answered(self) -> None:
        self.answers += 1


class Closed(threading.Event):
    """Set after so many pauses."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.pauses = after, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        if len(self.pauses) == self.after:
            self.set()
        return self.is_set()


@pytest.fixture(autouse=True)
def _listeners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(listeners)
    yield
    listeners.clear()
    listeners.update(before)


def make(node: Any, closed_after: int = 1) -> tuple[Any, list[Any]]:
    """A subscription, and what it receives."""
    received: list[Any] = []
    subscription: Any = Subscription(node, b"channel", received.append)
    subscription._closed = Closed(closed_after)
    return subscription, received


OK: tuple[Any, ...] = (7, [b"subscribe", CHANGES, 1], [b"subscribe", b"channel", 2])


def test_it_subscribes_to_changes_and_to_its_channel() -> None:
    node = Node(connection := Scripted(*OK))
    subscription, received = make(node)
    assert subscription._subscribe() is node
    assert (connection.commands, connection.patience) == (BEGIN, [3.0] * 3)
    assert (node.located, node.protocols, node.answers) == ([(b"channel",)], [2], 1)
    assert (received, subscription.subscribed) == ([None], True)
    listener: Any = listeners[node]
    assert (listener._client_id, listener._connection) == (7, connection)


@pytest.mark.parametrize(
    ("replies", "commands"),
    [((REFUSED, OK[2]), [BEGIN[0], BEGIN[2]]), ((7, REFUSED, OK[2]), BEGIN)],
)
def test_without_reports_of_the_server_messages_are_heard(
    replies: tuple[Any, ...], commands: Any
) -> None:
    node: Any = Node(connection := Scripted(*replies))
    listeners[node] = Listener(connection, 5)
    subscription, received = make(node)
    subscription._subscribe()
    assert (connection.commands, received) == (commands, [None])
    assert subscription.subscribed
    assert node not in listeners


@pytest.mark.parametrize("replies", [OK, (REFUSED, OK[2])])
def test_what_is_closed_by_then_leaves_its_successor_alone(replies: Any) -> None:
    node: Any = Node(connection := Scripted(*replies))
    listeners[node] = successor = Listener(connection, 5)
    subscription, received = make(node)
    subscription._closed.set()
    assert subscription._subscribe() is node
    assert (received, subscription.subscribed, node.answers) == ([], False, 0)
    assert listeners[node] is successor


@pytest.mark.parametrize(
    ("reply", "changed"),
    [
        ([b"message", CHANGES, [b"a", b"b"]], [b"a", b"b"]),
        ([b"message", CHANGES, None], [None]),
        ([b"message", b"channel", b"a"], [b"a"]),
        ([b"subscribe", b"channel", 2], []),
        ([b"pong", b"message", b"a"], []),
        (5, []),
    ],
)
def test_what_it_receives(reply: Any, changed: list[Any]) -> None:
    subscription, received = make(Node())
    subscription._connection = Scripted(reply)
    assert subscription._read() == reply
    assert received == changed


def test_a_silent_connection_is_checked() -> None:
    node = Node()
    subscription, received = make(node)
    message = [b"message", b"channel", b"a"]
    subscription._connection = connection = Scripted(message, None, message, OK[2], None, None)
    with pytest.raises(RedisTimeoutError, match="no answer to SUBSCRIBE"):
        subscription._receive(node)
    assert received == [b"a", b"a"]
    assert connection.commands == [BEGIN[2]] * 2
    check = CHECK_AFTER_SECONDS
    assert connection.patience == [check, check, 3.0, check, check, 3.0]
    assert node.located == [(b"channel",)] * 2


def test_it_goes_where_the_primary_is() -> None:
    node = Node()
    subscription, _ = make(node)
    subscription._connection = connection = Scripted(None)
    node.primary = Node()
    with pytest.raises(RedisConnectionError, match="another primary"):
        subscription._receive(node)
    assert not connection.commands


def test_nothing_is_received_after_its_end() -> None:
    subscription, _ = make(Node())
    subscription._closed.set()
    subscription._receive(Node())


OUT = RedisConnectionError("refused")


def cut() -> Scripted:
    """A connection that subscribes, and then breaks."""
    return Scripted(*OK, RedisConnectionError("cut"))


def test_the_pauses_after_errors() -> None:
    node = Node(*[OUT] * 8, cut(), OUT, ResponseError("NOPERM"), OUT)
    subscription, _ = make(node, 12)
    subscription._run()
    assert subscription._closed.pauses == pytest.approx(
        [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 0.1, 0.2, 60, 5]
    )
    assert [str(error) for error in node.errors] == ["refused"] * 8 + ["cut", "refused", "refused"]


def test_each_connection_is_closed() -> None:
    node = Node(first := cut(), second := Scripted(RedisConnectionError("cut")))
    subscription, received = make(node, 2)
    subscription._run()
    assert (first.closed, second.closed) == (True, True)
    assert (subscription._connection, subscription.subscribed) == (None, False)
    assert received == [None]


def test_an_error_after_its_end_is_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", instant_loss.logger.name)
    node = Node(connection := cut())
    subscription, _ = make(node)
    received = subscription._received

    def close(key: bytes | None) -> None:
        received(key)
        subscription._receive = lambda node: subscription.close() or connection.read_response()

    subscription._received = close
    subscription._run()
    assert connection.was_shut
    assert connection.closed
    assert (subscription._closed.pauses, node.errors, caplog.text) == ([], [], "")


def test_its_thread_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    monkeypatch.setattr(instant_loss.threads, "start", lambda thread, _: started.append(thread))
    subscription = Subscription(Node(), b"channel", print)
    subscription.start()
    assert [thread.daemon for thread in started] == [True]
    subscription.close()
    started[0].run()  # It has nothing to do any more.


def test_the_keepers_connection_is_tracked_once() -> None:
    connection, link = Scripted(), Scripted(b"OK")
    listener = Listener(connection, 7)
    for _ in range(2):
        listener.track(link)
    assert (link.commands, link.replies) == ([(*TRACK, 7)], [])
    assert not connection.was_shut
    # What was read on another is forgotten, and that may lead elsewhere.
    other = Scripted(b"OK")
    listener.track(other)
    assert (other.commands, connection.was_shut) == ([], True)


def test_a_server_that_tracks_nothing_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", instant_loss.logger.name)
    connection, link = Scripted(), Scripted(REFUSED)
    listener = Listener(connection, 7)
    for _ in range(2):
        listener.track(link)
    assert len(link.commands) == 1
    assert "does not report changes of keys: NOPERM" in caplog.text


def test_who_has_no_right_to_subscribe_waits_for_longer() -> None:
    node = Node(Scripted(7, OK[1], REFUSED))
    subscription, received = make(node)
    subscription._run()
    assert (subscription._closed.pauses, node.errors, received) == ([60.0], [], [])
