"""Which connection a task's call uses, and what becomes of it. No Redis runs here: the connections
and servers do as they are told."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.asyncio.connection import SSLConnection
from redis.exceptions import AuthenticationError, NoScriptError

from django_redis_lock.protocol.script import Call, script
from django_redis_lock.transport import aio_client, circuit_breaker
from django_redis_lock.transport.address import may_have_run, note_sent
from django_redis_lock.transport.aio_client import (
    aexchange,
    connected,
    connection_to,
    exchange,
    pool_of,
)
from django_redis_lock.transport.circuit_breaker import CHECK_SECONDS
from django_redis_lock.transport.execute import ASKING, pack, pack_all, pack_words
from django_redis_lock.transport.guarded_connection import AsyncGuardedConnection
from django_redis_lock.transport.registry import server_of
from tests.processes import PATIENCE

READONLY = redis.exceptions.ReadOnlyError("You can't write against a read only replica.")
SILENT = redis.TimeoutError("silent")
GONE = redis.ConnectionError("gone")
NOAUTH = AuthenticationError("NOAUTH Authentication required.")
WRONG = redis.ResponseError("WRONGTYPE")
CALL = Call(script("return redis.call('GET', KEYS[1])"), (b"key",), ())
NEVER = object()


class Breaker:
    failing, connecting = False, 0.0
    first_patience = circuit_breaker.Breaker.first_patience

    def __init__(self) -> None:
        self.told: list[Any] = []

    def admit(self, patience: float | None) -> float | None:
        return 0.75

    def answered(self) -> None:
        self.told.append("answered")

    def failed(self, error: Exception, cost: float, timeout: float) -> None:
        assert 0 <= cost <= PATIENCE
        self.told.append((type(error), timeout))


class Server:
    """Notes what it is told."""

    timeout = 5.0
    generation = 0
    retired = stands_in = is_topology = discovers = discovered = False

    def __init__(self) -> None:
        self.breaker: Any = Breaker()
        self.told: list[Any] = []
        self.tracked: list[Any] = []

    def answered(self) -> None:
        self.told.append("answered")

    def renew(self, connection: Any) -> bool:
        self.told.append(("renew", connection))
        self.generation += 1
        return not self.discovered

    def must_discover(self) -> bool:
        return self.discovers

    def locate(self, keys: Any) -> Any:
        self.told.append(threading.get_ident())
        return self

    def for_tasks(self, settings: Any) -> None:
        self.told.append("for tasks")

    def track(self, connection: Any, generation: int) -> Any:
        self.tracked.append((connection, generation))
        return connection


class Connection:
    """Its calls end as ``outcomes`` say."""

    generation = 0
    in_transfer = closed = retired = is_new = ended = False
    answers = True

    def __init__(self, *outcomes: Any, takes: bool = True) -> None:
        self.outcomes = list(outcomes)
        self.takes = takes
        self.sent: list[Any] = []
        self.limits: list[float] = []

    def takes_calls(self) -> bool:
        return self.takes

    def has_ended(self) -> bool:
        return self.ended

    async def still_answers(self, seconds: float) -> bool:
        self.limits.append(seconds)
        return self.answers

    def request(self, command: bytes, replies: int | None = None) -> asyncio.Future[Any]:
        self.sent.append((command, replies))
        future = asyncio.get_running_loop().create_future()
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        elif outcome is not NEVER:
            future.set_result(outcome)
        return future

    def doubt(self) -> None:
        self.takes = self.answers = False

    def retire(self) -> None:
        self.retired = True

    def disconnect(self) -> None:
        self.closed = True


class World:
    """The servers' new connections, one after the other."""

    def __init__(self) -> None:
        self.new: list[Any] = []
        self.made: list[Any] = []
        self.timeouts: list[Any] = []
        self.server: Any = Server()
        self.client: Any = SimpleNamespace()

    async def connect_to(
        self, pool: Any, timeout: float, reply_timeout: float | None = None
    ) -> Any:
        self.timeouts.append((timeout, reply_timeout))
        await asyncio.sleep(0)
        outcome = self.new.pop(0)
        if outcome is NEVER:
            await asyncio.Event().wait()
        if isinstance(outcome, asyncio.Event):
            await outcome.wait()
            raise GONE
        if isinstance(outcome, Exception):
            raise outcome
        self.made.append(outcome)
        return outcome

    def idle(self, connection: Any, node: Any = None) -> Any:
        """The loop has this connection."""
        aio_client._of_the_running_loop().connections[node or self.server] = connection
        return connection

    @property
    def told(self) -> list[Any]:
        told: list[Any] = self.server.breaker.told
        return told


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    pool = SimpleNamespace(connection_kwargs={"socket_timeout": 5.0})
    monkeypatch.setattr(aio_client, "connect_to", made.connect_to)
    monkeypatch.setattr(aio_client, "server_of", lambda client: made.server)
    monkeypatch.setattr(aio_client, "pool_of", lambda client, node: pool)
    yield made
    aio_client.loops.clear()


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(work(), PATIENCE)

    return asyncio.run(main())


def raised(work: Awaitable[Any], error: type[Exception]) -> Awaitable[Any]:
    async def main() -> Exception:
        with pytest.raises(error) as caught:
            await work
        return caught.value

    return main()


# -- which connection ------------------------------------------------------------------------------


def test_without_a_connection_there_is_none_to_share(world: World) -> None:
    async def main() -> None:
        assert connection_to(world.server) is None
        assert not aio_client.has_idle_connection(world.server)
        world.idle(Connection(), Server())
        assert connection_to(world.server) is None
        shared = world.idle(Connection())
        assert connection_to(world.server) is shared
        assert not aio_client.has_idle_connection(world.server)
        shared.takes = False
        assert connection_to(world.server) is None
        assert aio_client.has_idle_connection(world.server)
        shared.takes, world.server.generation = True, 1
        assert connection_to(world.server) is None

    run(main)


def test_another_is_used_while_something_large_is_on_its_way(world: World) -> None:
    async def main() -> None:
        of_loop = aio_client._of_the_running_loop()
        large, other = world.idle(Connection(takes=False)), Connection()
        large.in_transfer = True
        assert connection_to(world.server) is None
        of_loop.others[world.server] = other
        other.generation = 7
        assert connection_to(world.server) is None
        other.generation = 0
        assert connection_to(world.server) is other
        assert of_loop.others[world.server] is large
        assert connection_to(world.server) is other
        other.takes = False  # Nothing large is on its way there.
        assert connection_to(world.server) is None
        assert of_loop.connections[world.server] is other

    run(main)


def test_tasks_wait_for_one_new_connection(world: World) -> None:
    async def main() -> None:
        world.new.append(Connection(1, 2))
        calls = [exchange(world.client, world.server, b"one") for _ in range(2)]
        assert await asyncio.gather(*calls) == [1, 2]
        assert len(world.made) == 1
        assert world.timeouts == [(5.0, 5.0)]
        assert world.made[0].generation == 0
        assert connection_to(world.server) is world.made[0]
        assert world.server.told == ["answered"] * 2
        assert not aio_client._of_the_running_loop().connecting

    run(main)


def test_a_new_connection_belongs_to_the_generation_in_which_it_was_begun(world: World) -> None:
    async def main() -> None:
        world.server.generation = 3
        world.new.append(Connection())
        assert (await connected(world.client, world.server, None)).generation == 3

    run(main)


@pytest.mark.parametrize(
    ("in_transfer", "generation", "kept"), [(False, 0, False), (True, 0, True), (True, 1, False)]
)
def test_the_connections_before_a_new_one_are_retired(
    world: World, in_transfer: bool, generation: int, kept: bool
) -> None:
    """Unless something large is on its way there, after which it takes calls again."""

    async def main() -> None:
        of_loop = aio_client._of_the_running_loop()
        before, other, left = world.idle(Connection(takes=False)), Connection(), Server()
        before.in_transfer, before.answers = in_transfer, False
        before.generation = generation
        other.in_transfer = True
        of_loop.others[world.server] = other
        gone = world.idle(Connection(), left)
        left.retired = True
        world.new.append(Connection())
        new = await connected(world.client, world.server, None)
        assert before.retired is not kept
        assert other.retired is kept
        assert of_loop.connections == {world.server: new}
        assert of_loop.others[world.server] is (before if kept else other)
        assert gone.retired

    run(main)


@pytest.mark.parametrize(("answers", "patience", "limit"), [(True, None, 0.5), (False, 0.5, 0.375)])
def test_the_connection_that_was_idle_is_used_if_it_still_answers(
    world: World, answers: bool, patience: float | None, limit: float
) -> None:
    async def main() -> None:
        idle = world.idle(Connection(takes=False))
        idle.answers = answers
        world.new.append(Connection())
        found = await connected(world.client, world.server, patience)
        assert (found is idle) is answers
        assert idle.limits == [pytest.approx(limit)]
        idle.generation = world.server.generation + 1
        world.idle(idle)
        world.new.append(Connection())
        assert await connected(world.client, world.server, None) is not idle
        assert len(idle.limits) == 1

    run(main)


def test_connecting_ends_with_the_callers_patience_and_nothing_was_sent(world: World) -> None:
    async def main() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        world.new.append(NEVER)
        late = await raised(connected(world.client, world.server, 0.02), redis.TimeoutError)
        assert not may_have_run(late)
        for task in aio_client._of_the_running_loop().connecting.values():
            task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        fails = asyncio.Event()
        world.new.append(fails)
        await raised(connected(world.client, world.server, 0.02), redis.TimeoutError)
        [task] = aio_client._of_the_running_loop().connecting.values()
        fails.set()
        await asyncio.wait([task])
        del task
        await asyncio.sleep(0)
        gc.collect()
        assert not complaints  # Nobody waits for it any more.
        world.new.append(GONE)
        refused = await raised(connected(world.client, world.server, None), redis.ConnectionError)
        assert not may_have_run(refused)

    run(main)


# -- a call and its end ----------------------------------------------------------------------------


def shared(world: World, *outcomes: Any) -> Any:
    return world.idle(Connection(*outcomes))


def test_a_call_waits_as_long_as_its_caller_wants(world: World) -> None:
    async def main() -> None:
        connection = shared(world, [1, 2], NEVER)
        assert await exchange(world.client, world.server, b"two", 1.0, (), 2) == [1, 2]
        assert connection.sent == [(b"two", 2)]
        connection.is_new = True
        late = exchange(world.client, world.server, b"one", 0.02)
        await raised(late, redis.TimeoutError)
        assert world.told == [(redis.TimeoutError, 5.0)]
        assert not connection.retired

    run(main)


@pytest.mark.parametrize(("patience", "sent"), [(0.2, 2), (0.1, 1)])
def test_a_silent_connection_that_was_used_before_leaves_time_for_another(
    world: World, patience: float, sent: int
) -> None:
    async def main() -> None:
        world.server.close = lambda: None
        world.server.on_error = lambda error: None
        world.server.refuses = lambda error: False
        silent = shared(world, NEVER)
        world.new.append(Connection(7))
        call = aio_client.arun(world.client, CALL, patience=patience)
        if sent == 2:
            assert (await call).value == 7
            assert silent.retired
        else:
            await raised(call, redis.TimeoutError)
        assert len(silent.sent) == 1
        assert world.told == []

    run(main)


def test_while_a_server_fails_the_breaker_decides(world: World) -> None:
    async def main() -> None:
        world.server.breaker.failing = True
        shared(world, NEVER).is_new = True
        error = await raised(exchange(world.client, world.server, b"one"), redis.TimeoutError)
        assert "0.750 s" in str(error)

    run(main)


@pytest.mark.parametrize(
    ("error", "again", "discovered", "calls"),
    [
        (WRONG, True, False, 1),
        (READONLY, True, False, 2),
        (READONLY, False, False, 1),
        (READONLY, True, True, 1),
    ],
)
def test_what_a_replica_refuses_is_sent_once_more(
    world: World, error: Exception, again: bool, discovered: bool, calls: int
) -> None:
    async def main() -> None:
        world.server.discovered = discovered
        first = shared(world, error)
        world.new.append(Connection(error))
        call = exchange(world.client, world.server, b"one", None, (), None, again)
        await raised(call, type(error))
        assert len(first.sent) + sum(len(each.sent) for each in world.made) == calls
        assert first.retired is (error is READONLY)
        assert world.told == ["answered"] * calls

    run(main)


def test_a_connection_that_has_lost_its_login_is_replaced(world: World) -> None:
    async def main() -> None:
        first = shared(world, NOAUTH)
        first.answers = False
        first.retire = lambda: (setattr(first, "retired", True), setattr(first, "takes", False))
        world.new.append(Connection(7))
        assert await exchange(world.client, world.server, b"one") == 7
        assert first.retired
        aio_client._of_the_running_loop().connections.clear()
        world.new.append(Connection(NOAUTH))
        await raised(exchange(world.client, world.server, b"one"), AuthenticationError)

    run(main)


def test_the_silence_of_a_connection_that_was_used_before_may_be_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        silent = shared(world, SILENT, SILENT, NEVER)
        silent.is_closed = silent.retire

        def closed() -> bool:
            return len(silent.sent) == 0

        silent.takes_calls = closed
        silent.answers = False
        world.new.append(Connection())
        await raised(exchange(world.client, world.server, b"one"), redis.TimeoutError)
        assert len(world.made) == 1  # It shows that the server is up.
        assert world.told == []
        lefts: list[float] = []

        async def distrust(client: Any, node: Any, timeout: float, left: float) -> None:
            lefts.append(left)

        monkeypatch.setattr(aio_client, "_distrust", distrust)
        for patience in (None, PATIENCE):
            shared(world, SILENT)
            call = exchange(world.client, world.server, b"one", patience)
            await raised(call, redis.TimeoutError)
        assert lefts[0] == math.inf
        assert 0 < lefts[1] < PATIENCE

    run(main)


@pytest.mark.parametrize(("timeout", "limit"), [(5.0, CHECK_SECONDS), (0.5, 0.5)])
def test_a_server_that_is_silent_to_a_new_connection_as_well_has_failed(
    world: World, monkeypatch: pytest.MonkeyPatch, timeout: float, limit: float
) -> None:
    limits: list[Any] = []

    async def fail(client: Any, node: Any, patience: float) -> Any:
        limits.append(patience)
        raise GONE

    monkeypatch.setattr(aio_client, "connected", fail)

    async def main() -> None:
        distrust = aio_client._distrust
        await distrust(world.client, world.server, timeout, limit - 0.01)  # There is no time.
        assert not limits
        await distrust(world.client, world.server, timeout, math.inf)
        await distrust(world.client, world.server, timeout, limit)
        assert limits == [limit] * 2
        assert world.told == [(redis.ConnectionError, timeout)] * 2

    run(main)


@pytest.mark.parametrize(
    ("error", "sent", "fails"), [(GONE, True, False), (GONE, False, True), (SILENT, True, True)]
)
def test_which_errors_are_the_servers(
    world: World, error: Exception, sent: bool, fails: bool
) -> None:
    async def main() -> None:
        note_sent(error, sent)
        shared(world, error).is_new = True
        await raised(exchange(world.client, world.server, b"one"), type(error))
        assert world.told == [(type(error), 5.0)] * fails

    run(main)


# -- sent again ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "sent", "again", "failing", "calls"),
    [
        (GONE, True, True, False, 2),
        (GONE, True, False, False, 1),
        (GONE, False, False, False, 2),
        (GONE, True, True, True, 1),
        (SILENT, True, True, False, 2),
    ],
)
def test_a_command_whose_reply_was_lost_is_sent_once_more(
    world: World, error: Exception, sent: bool, again: bool, failing: bool, calls: int
) -> None:
    async def main() -> None:
        note_sent(error, sent)
        connection = shared(world, error, 7)
        connection.is_new = True

        def request(command: bytes, replies: int | None = None) -> Any:
            future = Connection.request(connection, command, replies)
            world.server.breaker.failing = failing
            return future

        connection.request = request
        call = aexchange(world.client, b"one", 3, may_run_twice=again)
        if calls == 2:
            assert await call == 7
        else:
            await raised(call, type(error))
        assert connection.sent == [(b"one", 3)] * calls

    run(main)


@pytest.mark.parametrize(("again", "ended", "closes"), [(0, 1, 1), (1, 1, 0), (0, 0, 0)])
def test_what_runs_once_is_not_sent_on_a_connection_that_has_ended(
    world: World, again: int, ended: int, closes: int
) -> None:
    async def main() -> None:
        connection = shared(world, 7)
        connection.ended = bool(ended)
        assert await aexchange(world.client, b"one", may_run_twice=bool(again)) == 7
        assert connection.closed is bool(closes)

    run(main)


def test_a_call_of_a_task(world: World) -> None:
    async def main() -> None:
        connection = shared(world, NoScriptError(), 5, [b"OK", 6], [1, 2], 8)
        answer = await aio_client.arun(world.client, CALL)
        assert (answer.value, answer.sent_twice) == (5, False)
        assert await aio_client._run(world.client, world.server, CALL, None, asking=True) == 6
        assert await aio_client.arun_all(world.client, [CALL, CALL]) == [1, 2]
        assert await aio_client.arun_all(world.client, [CALL]) == [8]
        assert [each for each, _ in connection.sent] == [
            *(pack(CALL), pack(CALL, known=False), ASKING + pack(CALL, known=False)),
            *(pack_all([CALL, CALL]), pack(CALL)),
        ]
        assert [replies for _, replies in connection.sent] == [None, None, 2, 2, None]

    run(main)


def test_a_call_of_a_task_that_failed_is_sent_again(world: World) -> None:
    async def main() -> None:
        world.server.close = lambda: None
        world.server.on_error = lambda error: None
        world.server.refuses = lambda error: "MOVED" in str(error)
        error = redis.ConnectionError("broke")
        shared(world, error, redis.ResponseError("MOVED 1 x:1"), 7)
        answer = await aio_client.arun(world.client, CALL)
        assert (answer.value, answer.sent_twice) == (7, True)

    run(main)


def test_a_value_of_a_task(world: World) -> None:
    async def main() -> None:
        connection = shared(world, [b"value", 50], [None, -2])
        assert await aio_client.aread_value(world.client, b"key") == (b"value", 50)
        assert await aio_client.aread_value(world.client, b"key") is None
        assert [replies for _, replies in connection.sent] == [2, 2]

    run(main)


def test_servers_are_looked_for_in_another_thread(world: World) -> None:
    async def main() -> None:
        here = threading.get_ident()
        await aio_client.located(world.server, (b"key",))
        world.server.discovers = True
        await aio_client.located(world.server, (b"key",))
        assert [each == here for each in world.server.told] == [True, False]

    run(main)


def test_a_connection_for_one_task_alone(world: World) -> None:
    async def main() -> None:
        world.server.generation = 3
        world.new.append(Connection())
        found = await aio_client.aconnect(world.client, (b"key",), 2.0)
        assert world.server.tracked == [(found, 3)]
        assert world.timeouts == [(2.0, None)]

    run(main)


# -- the client of a loop --------------------------------------------------------------------------


def test_a_loop_has_one_client_for_a_server(world: World) -> None:
    async def main() -> None:
        left = Server()
        left.retired = True
        gone = world.idle(Connection(), left)
        pool = redis.Redis(port=1).connection_pool
        made = aio_client._client_of(world.server, pool)
        assert aio_client._client_of(world.server, pool) is made
        assert world.server.told == ["for tasks"]
        assert made.execute_command.func is aio_client._execute
        assert gone.retired

    run(main)


@pytest.mark.parametrize("stands_in", [False, True])
def test_which_pool_leads_to_a_server(monkeypatch: pytest.MonkeyPatch, stands_in: bool) -> None:
    """That of the client, unless another server stands in for its own, or is one of several."""

    async def main() -> None:
        client: Any = redis.asyncio.Redis(port=7)
        for_threads = redis.Redis(port=7)
        own, other = server_of(client), server_of(redis.Redis(port=8))
        for server in (own, other):
            server.address = redis.Redis(port=9).connection_pool
        monkeypatch.setattr(type(own), "stands_in", stands_in)
        assert (pool_of(client, own) is client.connection_pool) is not stands_in
        assert pool_of(client, other).connection_kwargs["port"] == 9
        found = aio_client.asyncio_client(for_threads).connection_pool.connection_kwargs["port"]
        assert found == (9 if stands_in else 7)

    run(main)
    aio_client.loops.clear()


def test_commands_of_a_project_use_the_shared_connection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        connection = shared(world, b"7", b"raw")
        client: Any = redis.asyncio.Redis()
        client.response_callbacks = {"GET": lambda reply, **options: (int(reply), options)}
        found = await aio_client._execute(client, "GET", "key", keys=["key"], more=1)
        assert found == (7, {"more": 1})
        assert await aio_client._execute(client, "OTHER", "key") == b"raw"
        assert connection.sent[0] == (pack_words(b"GET", b"key"), None)
        monkeypatch.setattr(aio_client, "is_observed", lambda client: True)
        client.__class__ = type("Seen", (redis.asyncio.Redis,), {"execute_command": _seen})
        assert await aio_client._execute(client, "GET", "key") == ("seen", "GET", "key")

    run(main)


async def _seen(client: Any, *args: Any) -> Any:
    return ("seen", *args)


def test_what_leads_to_a_server_that_has_left_is_closed(world: World) -> None:
    async def main() -> None:
        of_loop = aio_client._of_the_running_loop()
        assert aio_client._of_the_running_loop() is of_loop
        closed: list[Any] = []

        async def disconnect(**options: Any) -> None:
            closed.append(options)

        old, new = Server(), Server()
        for server in (old, new):
            pool = SimpleNamespace(disconnect=disconnect)
            of_loop.clients[server] = SimpleNamespace(connection_pool=pool)
            of_loop.others[server] = Connection()
        connection = of_loop.others[old]
        old.retired = True
        of_loop.forget_retired()
        await asyncio.sleep(0)
        assert closed == [{"inuse_connections": False}]
        assert list(of_loop.clients) == list(of_loop.others) == [new]
        assert connection.retired

    run(main)


def test_all_is_closed_with_the_loop(world: World) -> None:
    closed: list[int] = []

    async def disconnect() -> None:
        closed.append(1)

    async def main() -> list[Any]:
        of_loop = aio_client._of_the_running_loop()
        connections = [world.idle(Connection()), Connection()]
        of_loop.others[world.server] = connections[1]
        pool = SimpleNamespace(disconnect=disconnect)
        of_loop.clients[world.server] = SimpleNamespace(connection_pool=pool)
        return connections

    connections = run(main)
    assert all(each.closed for each in connections)
    assert closed == [1]
    assert not aio_client.loops


def test_what_was_kept_for_a_loop_without_a_runner_is_forgotten(world: World) -> None:
    loop = asyncio.new_event_loop()

    async def begin() -> None:
        aio_client._of_the_running_loop()

    loop.run_until_complete(begin())
    assert loop in aio_client.loops
    loop.close()

    async def main() -> None:
        aio_client._of_the_running_loop()
        assert list(aio_client.loops) == [asyncio.get_running_loop()]

    run(main)
    with pytest.raises(RuntimeError, match="no event loop is running here"):
        aio_client._of_the_running_loop()


def test_the_pool_of_a_loop_leads_to_the_same_server_with_its_own_settings() -> None:
    theirs = redis.ConnectionPool(
        host="redis.example",
        socket_keepalive=True,
        health_check_interval=7,
        socket_timeout=3,
        max_connections=5,
    )
    made = aio_client._pool_like(theirs)
    settings = made.connection_kwargs
    assert issubclass(made.connection_class, AsyncGuardedConnection)
    assert settings.items() >= {
        *(("host", "redis.example"), ("socket_timeout", 3), ("socket_keepalive", True)),
        ("health_check_interval", 7),
    }
    assert settings["retry"]._retries == 0
    bare = aio_client._pool_like(redis.ConnectionPool()).connection_kwargs
    assert bare["socket_timeout"] == 5.0
    assert "health_check_interval" not in bare
    tls = aio_client._pool_like(redis.ConnectionPool(connection_class=redis.SSLConnection))
    assert issubclass(tls.connection_class, SSLConnection)

    class Own:
        pass

    with pytest.raises(TypeError, match="Own has no twin for asyncio"):
        aio_client._pool_like(redis.ConnectionPool(connection_class=Own))
