"""A request to several servers at once: on which connections, and who is waited for. No Redis runs
here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import BusyLoadingError, NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_redis_lock.contrib import redlock
from django_redis_lock.contrib.redlock import (
    PARTS,
    RELEASED_TWICE,
    _aask,
    _Connecting,
    _FanOut,
    ask,
    spared,
)
from django_redis_lock.protocol import Call
from django_redis_lock.protocol.holder_scripts import CLOCK
from django_redis_lock.protocol.lock_scripts import RELEASE
from django_redis_lock.transport import Answer, may_have_run, pack, server_of
from django_redis_lock.transport.circuit_breaker import Breaker, CircuitOpen
from tests.processes import PATIENCE, until
from tests.support.connections import Connection

# Quick cells, each of which is another decision.
pytestmark = pytest.mark.sample(1)

CALL = Call(CLOCK, (), ())
URGENT = Call(RELEASE, (), ())


class Node:
    """A server with ``idle`` connections, and one more that it makes.

    Attributes:
        answers: how often it was noted that it answers.
    """

    def __init__(self, *idle: Connection, new: Any = None, checked: bool = False) -> None:
        self.idle, self.new, self.checked = [*idle], new, checked
        self.breaker = Breaker("nowhere", 5.0, limits=lambda: (1, 60.0))
        self.answers = self.renewed = 0
        self.renews = True
        self.patience: list[float] = []

    def checkout_idle(self) -> Connection | None:
        return self.idle.pop() if self.idle else None

    def must_connect(self) -> bool:
        return not self.checked

    def checkout(self, patience: float) -> Connection:
        self.patience.append(patience)
        if isinstance(self.new, Connection):
            return self.new
        raise self.new or AssertionError("no new connection was expected")

    def checkin(self, connection: Connection) -> None:
        self.idle.append(connection)

    def close(self) -> None:
        while self.idle:
            self.idle.pop().disconnect()

    def renew(self, connection: Connection) -> bool:
        self.renewed += 1
        return self.renews

    def answered(self) -> None:
        self.answers += 1

    def fail(self) -> None:
        self.breaker.failed(RedisTimeoutError("frozen"), 5.0)


def send(*nodes: Any, call: Call = CALL, patience: float = PATIENCE) -> dict[int, Any]:
    return ask(nodes, dict.fromkeys(range(len(nodes)), call), patience)


def test_idle_connections_are_used_and_kept() -> None:
    connections = [Connection(number) for number in range(3)]
    nodes = [Node(connection) for connection in connections]
    assert send(*nodes) == {0: 0, 1: 1, 2: 2}
    assert [node.idle for node in nodes] == [[connection] for connection in connections]
    assert [connection.sent for connection in connections] == [[pack(CALL)]] * 3
    assert [node.answers for node in nodes] == [1, 1, 1]
    assert not any(connection.closed for connection in connections)


def test_one_that_the_server_has_closed_is_passed_over() -> None:
    good, closed = Connection(5), Connection(broken=True)
    node = Node(good, closed)
    assert send(node) == {0: 5}
    assert (closed.closed, node.idle) == (True, [good])


@pytest.mark.parametrize("is_new", [False, True])
def test_a_script_that_is_not_known_is_sent_by_its_source(is_new: bool) -> None:
    connection = Connection(NoScriptError("NOSCRIPT"))
    connection.replies.append(5)
    node = Node(new=connection) if is_new else Node(connection)
    assert send(node) == {0: 5}
    assert connection.sent == [pack(CALL), pack(CALL, known=False)]
    assert node.idle == [connection]


def test_an_error_is_the_answer() -> None:
    connection = Connection(error := ResponseError("ERR"))
    node = Node(connection)
    assert send(node) == {0: error}
    assert (connection.closed, node.idle, node.answers) == (False, [connection], 0)


@pytest.mark.parametrize("renews", [True, False])
def test_a_replica_is_asked_once_more_on_a_new_connection(renews: bool) -> None:
    old, new = Connection(error := ReadOnlyError("READONLY")), Connection(5)
    node = Node(old, new=new)
    node.renews = renews
    assert send(node) == {0: 5 if renews else error}
    assert (node.renewed, old.closed) == (1, True)
    assert node.idle == ([new] if renews else [])


@pytest.mark.parametrize(
    ("error", "call", "second", "answer"),
    [
        (RedisConnectionError("closed"), CALL, 5, 5),
        (RedisConnectionError("closed"), CALL, 0, 0),
        (RedisConnectionError("closed"), URGENT, 0, RELEASED_TWICE),  # The first has run.
        (BusyLoadingError("LOADING"), URGENT, 0, 0),
    ],
)
def test_what_breaks_is_sent_once_more_on_a_new_connection(
    error: Exception, call: Call, second: int, answer: int
) -> None:
    old, other, new = Connection(error), Connection(1), Connection(second)
    node = Node(other, old, new=new)
    assert send(node, call=call) == {0: answer}
    assert (old.closed, other.closed, node.idle) == (True, True, [new])
    away = RedisConnectionError("refused")
    assert send(Node(Connection(error), new=away), call=call) == {0: away}


@pytest.mark.parametrize(("checked", "longer"), [(False, 0.0), (True, 0.5)])
def test_without_an_idle_connection_a_thread_connects(
    monkeypatch: pytest.MonkeyPatch, checked: bool, longer: float
) -> None:
    """A connection that must be checked first costs the server's time nothing."""
    asking: list[_FanOut] = []
    collect = _FanOut.collect

    def record(fan_out: _FanOut, patience: float) -> None:
        asking.append(fan_out)
        collect(fan_out, patience)

    monkeypatch.setattr(_FanOut, "collect", record)
    node = Node(new=Connection(5), checked=checked)
    assert send(node) == {0: 5}
    assert (node.patience, node.idle) == ([PATIENCE], [node.new])
    assert node.new.sent == [pack(CALL)]
    assert asking[0]._checking == longer


@pytest.mark.parametrize("error", [RedisConnectionError("refused"), ResponseError("WRONGPASS")])
def test_what_could_not_connect_was_not_sent(error: Exception) -> None:
    node = Node(new=error)
    assert send(node) == {0: error}
    assert not may_have_run(error)


def test_a_call_that_breaks_on_a_new_connection_may_have_run() -> None:
    new = Connection(RedisConnectionError("closed"))
    node = Node(new=new)
    (error,) = send(node).values()
    assert (new.closed, node.idle, may_have_run(error)) == (True, [], True)


def test_too_many_threads_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread, failed: Callable[[RuntimeError], object]) -> None:
        assert thread.daemon
        failed(RuntimeError("can't start new thread"))

    monkeypatch.setattr(redlock, "start", start)
    (error,) = send(Node(new=Connection(5))).values()
    assert isinstance(error, RedisConnectionError)
    assert "another thread: can't start new thread" in str(error)
    assert not may_have_run(error)


def test_a_silent_server_counts_as_away_and_the_others_answer() -> None:
    silent = Connection()
    nodes = [Node(silent), Node(Connection(5)), Node(Connection(5))]
    answers = send(*nodes, patience=0.05)
    assert isinstance(answers.pop(0), RedisTimeoutError)
    assert answers == {1: 5, 2: 5}
    assert silent.closed
    assert [node.breaker.failing for node in nodes] == [True, False, False]
    assert [node.answers for node in nodes] == [0, 1, 1]
    assert nodes[0].breaker.held_back  # That was costly, although the patience was short.


def test_a_server_that_is_slow_to_connect_is_given_up_and_its_connection_kept() -> None:
    go_on, connection = threading.Event(), Connection(5)

    class Slow(Node):
        def checkout(self, patience: float) -> Connection:
            assert go_on.wait(PATIENCE)
            return connection

    node = Slow()
    (error,) = send(node, patience=0.05).values()
    assert isinstance(error, RedisTimeoutError)
    assert not may_have_run(error)
    go_on.set()
    until(lambda: node.idle == [connection])
    assert not connection.sent


def test_a_request_that_was_sent_by_then_may_have_run() -> None:
    sent, go_on = threading.Event(), threading.Event()

    class Frozen(Connection):
        def read_response(self) -> Any:
            sent.set()
            assert go_on.wait(PATIENCE)
            return 5

    node = Node(new=Frozen())
    fan_out = _FanOut([node], {0: CALL}, 0.05)
    fan_out.send(0)
    assert sent.wait(PATIENCE)
    fan_out.collect(0.05)
    fan_out.close()
    assert may_have_run(fan_out.answers[0])
    go_on.set()
    until(lambda: node.idle)


def test_an_interrupt_leaves_no_connection_with_a_reply_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does a thread send afterwards what its caller has given up."""
    go_on = threading.Event()

    class Slow(Node):
        def checkout(self, patience: float) -> Connection:
            assert go_on.wait(PATIENCE)
            return later

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    silent, later = Connection(), Connection(5)
    slow = Slow()
    monkeypatch.setattr(_FanOut, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        send(Node(silent), slow)
    assert silent.closed
    go_on.set()
    until(lambda: slow.idle == [later])
    assert not later.sent


def test_a_standstill_of_this_process_counts_for_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    now = [1000.0]
    silent = Connection()

    def stand_still(connections: Any, seconds: float) -> list[Any]:
        waits.append(round(seconds, 6))
        now[0] += 100
        if len(waits) == 5:
            silent.replies.append(5)
            return [silent]
        return []

    monkeypatch.setattr(redlock, "readable", stand_still)
    monkeypatch.setattr(redlock.real_time, "monotonic", lambda: now[0])
    assert send(Node(silent), patience=1.0) == {0: 5}
    assert waits == [0.1] * 5
    waits.clear()
    silent, waits[:] = Connection(), [1.0] * 5
    assert isinstance(send(Node(silent), patience=1.0)[0], RedisTimeoutError)
    assert waits[5:15] == [0.1] * 10
    assert max(waits[15:]) < 0.001  # What is there by then is read.
    assert PARTS == 10


class Twice(Node):
    """Its connection is silent, so the request is sent on another. ``during`` is called with the
    former when another is made, or, if ``when_sent``, when the request was sent there."""

    def __init__(self, during: Any, new: Any = 5, *, when_sent: bool = False) -> None:
        self.old, made = Connection(), Connection(new)
        super().__init__(self.old)
        self.during, self.when_sent, self.made = during, when_sent, made
        made.read_response = self.read

    def checkout(self, patience: float) -> Connection:
        if not self.when_sent:
            self.during(self.old)
        return self.made

    def read(self) -> Any:
        if self.when_sent:
            self.during(self.old)
        return self.made.replies.pop(0)


def answer(connection: Connection) -> None:
    connection.replies.append(1)
    until(lambda: not connection.replies)


def refuse(connection: Connection) -> None:
    threading.Timer(0.05, connection.replies.append, [1]).start()
    raise RedisConnectionError("refused")


#: What happens, whether the later request is sent before that, and which reply counts.
SENT_AGAIN: dict[str, tuple[Any, bool, int]] = {
    "the first is never answered": (lambda connection: None, False, 5),
    "the first is answered before": (answer, False, 1),
    "the first is answered after": (answer, True, 5),
    "no connection can be made": (refuse, False, 1),
}


@pytest.mark.parametrize("what", SENT_AGAIN)
def test_a_silent_connection_is_not_the_servers_silence(what: str, pace: int) -> None:
    during, when_sent, reply = SENT_AGAIN[what]
    node = Twice(during, when_sent=when_sent)
    assert send(node, patience=1.0 * pace) == {0: reply}
    until(lambda: node.made in node.idle or during is refuse)
    assert bool(node.made.sent) == (reply == 5)
    assert node.old.closed == (what == "the first is never answered")
    assert not node.breaker.failing


def test_a_release_that_was_sent_on_a_silent_connection_may_have_run(pace: int) -> None:
    node = Twice(lambda connection: None, 0)
    assert send(node, patience=0.2 * pace, call=URGENT) == {0: RELEASED_TWICE}


def test_what_may_have_run_on_a_connection_that_broke_is_not_called_unsent() -> None:
    """Its server may have granted the lock, and must be sent a release."""
    go_on = threading.Event()
    node = Twice(lambda connection: go_on.wait(PATIENCE))
    node.old.replies.append(RedisConnectionError("closed by the server"))
    error = send(node, patience=0.2)[0]
    go_on.set()
    assert isinstance(error, RedisTimeoutError)
    assert may_have_run(error)


class Waits:
    """Stands for the events on which a thread waits for threads that connect.

    Attributes:
        seconds: of each wait.
        during: what happens in a wait, by its number.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float] = []
        self.during: dict[int, Callable[[], object]] = {}
        self._now = 1000.0
        monkeypatch.setattr(redlock, "ThreadEvent", lambda: self)
        monkeypatch.setattr(redlock.real_time, "monotonic", self._monotonic)
        monkeypatch.setattr(redlock, "start", lambda *_: None)

    def _monotonic(self) -> float:
        self._now += 1e-6
        return self._now

    def wait(self, seconds: float) -> None:
        self.seconds.append(round(seconds, 3))
        self._now += seconds
        self.during.pop(len(self.seconds), lambda: None)()

    def set(self) -> None: ...


@pytest.mark.parametrize(("checked", "parts"), [(False, 10), (True, 15)])
def test_how_long_a_connection_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, checked: bool, parts: int
) -> None:
    waits = Waits(monkeypatch)
    assert isinstance(send(Node(checked=checked), patience=1.0)[0], RedisTimeoutError)
    assert waits.seconds[:parts] == [0.1] * parts
    assert sum(waits.seconds[parts:]) < 0.001


def test_a_wait_costs_the_time_that_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a whole part for each of many replies."""
    Waits(monkeypatch)
    monkeypatch.setattr(redlock, "readable", lambda connections, seconds: connections[:1])
    assert send(*[Node(Connection(5)) for _ in range(25)], patience=1.0) == dict.fromkeys(
        range(25), 5
    )


@pytest.mark.parametrize("number", [0, 1, 12])
def test_what_comes_in_the_last_moment_counts(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """And what has come before that is not waited for."""
    waits = Waits(monkeypatch)
    fan_out: Any = _FanOut([Node()], {0: CALL}, 1.0)
    fan_out.send(0)

    def finish() -> None:
        fan_out._finish(fan_out._connecting[0], 5)

    if number:
        waits.during[number] = finish
    else:
        finish()
    fan_out.collect(1.0)
    assert (fan_out.answers, len(waits.seconds)) == ({0: 5}, number)


def test_who_waits_for_a_connection_is_woken() -> None:
    fan_out: Any = _FanOut([Node()], {0: CALL}, 1.0)
    assert not fan_out._came.wait(0)
    fan_out._finish(_Connecting(), 5)
    assert fan_out._came.wait(0)


# -- servers that are known to be away -------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "away", "left_out"),
    [
        (3, [], []),
        (3, [1], [1]),
        (3, [0, 1], []),
        (4, [2], [2]),
        (4, [1, 2], []),
        (5, [0, 4], [0, 4]),
        (5, [0, 1, 4], []),
    ],
)
def test_a_minority_that_is_away_is_spared(
    count: int, away: list[int], left_out: list[int]
) -> None:
    nodes: list[Any] = [Node() for _ in range(count)]
    for place in away:
        nodes[place].fail()
    found = spared(nodes, dict.fromkeys(range(count), CALL))
    assert [*found] == left_out
    assert all(isinstance(error, CircuitOpen) for error in found.values())
    assert not any(may_have_run(error) for error in found.values())


def test_only_those_that_would_be_asked_count(*_: Any) -> None:
    nodes: list[Any] = [Node() for _ in range(3)]
    for node in nodes[:2]:
        node.fail()
    assert [*spared(nodes, {1: CALL, 2: CALL})] == [1]


@pytest.mark.parametrize("call", [CALL, URGENT])
def test_what_is_spared_gets_no_request(call: Call) -> None:
    """Nor a release: the keeper sends that."""
    away = Node(Connection(5))
    away.fail()
    answers = send(away, Node(Connection(5)), Node(Connection(5)), call=call)
    assert isinstance(answers.pop(0), CircuitOpen)
    assert answers == {1: 5, 2: 5}
    assert away.answers == 0


@pytest.mark.parametrize(("call", "is_sent"), [(CALL, False), (URGENT, True)])
def test_of_a_majority_that_is_away_calls_are_refused_unless_they_are_urgent(
    call: Call, is_sent: bool
) -> None:
    nodes = [Node(Connection(5)) for _ in range(3)]
    for node in nodes[:2]:
        node.fail()
    answers = send(*nodes, call=call)
    assert [answer == 5 for answer in answers.values()] == [is_sent, is_sent, True]
    assert [bool(node.answers) for node in nodes] == [is_sent, is_sent, True]


# -- in tasks --------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how many seconds tasks wait; they wait until all are done or nothing happens."""
    found: list[float] = []

    async def wait_awake(tasks: Any, seconds: float) -> None:
        found.append(seconds)
        for _ in range(5):
            await asyncio.sleep(0)

    monkeypatch.setattr(redlock, "wait_awake", wait_awake)
    monkeypatch.setattr(redlock, "has_idle_connection", lambda server: server in idle)
    idle.clear()
    return found


idle: set[Any] = set()


def ask_in_tasks(monkeypatch: Any, outcomes: list[Any], *, idles: int = 0, away: int = 0) -> Any:
    """What the servers reply: a value, an error, or nothing (None)."""

    async def main() -> Any:
        clients = [redis.asyncio.Redis(port=7300 + n) for n in range(len(outcomes))]
        servers = [server_of(client) for client in clients]
        idle.update(servers[:idles])
        for server in servers:
            server.breaker.answered()
            server.breaker._limits = lambda: (1, 60.0)
        for server in servers[:away]:
            server.breaker.failed(RedisTimeoutError("frozen"), 5.0)
        asked: list[float] = []

        async def arun(client: Any, call: Call, *, patience: float) -> Answer:
            asked.append(patience)
            outcome = outcomes[clients.index(client)]
            if outcome is None:
                await asyncio.Event().wait()
            if isinstance(outcome, Exception):
                raise outcome
            return Answer(outcome, False)

        monkeypatch.setattr(redlock, "arun", arun)
        work = _aask(clients, dict.fromkeys(range(len(clients)), CALL), 0.5)
        answers = await asyncio.wait_for(work, PATIENCE)
        return answers, asked, [server.breaker.failing for server in servers]

    return asyncio.run(main())


@pytest.mark.parametrize(("idles", "seconds"), [(0, 0.5), (1, 0.75)])
def test_tasks_wait_for_all_servers(
    monkeypatch: pytest.MonkeyPatch, waits: list[float], idles: int, seconds: float
) -> None:
    error = RedisConnectionError("refused")
    answers, asked, failing = ask_in_tasks(monkeypatch, [0, error, 5], idles=idles)
    assert answers == {0: 0, 1: error, 2: 5}
    assert (waits, asked, failing) == ([seconds], [0.5] * 3, [False] * 3)


def test_tasks_end_what_gets_no_answer(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    answers, _, failing = ask_in_tasks(monkeypatch, [5, None, 5])
    assert isinstance(answers.pop(1), RedisTimeoutError)
    assert (answers, failing) == ({0: 5, 2: 5}, [False, True, False])


def test_tasks_spare_a_minority(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    answers, asked, _ = ask_in_tasks(monkeypatch, [5, 5, 5], away=1)
    assert isinstance(answers.pop(0), CircuitOpen)
    assert (answers, len(asked)) == ({1: 5, 2: 5}, 2)


def test_tasks_with_no_server_to_ask(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    assert ask_in_tasks(monkeypatch, []) == ({}, [], [])
