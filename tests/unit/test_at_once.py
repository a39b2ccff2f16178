"""What several threads do with one object at the same moment. With the GIL most of these moments
are rare; without it they are not. No Redis runs here.

Each round begins for all threads at once; what holds is counted, and no clock is read.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.core import mail
from django.test import override_settings
from django.test.signals import setting_changed

from django_redis_lock import conf, events, locked, threads
from django_redis_lock.cache.get_or_set import GetOrSet
from django_redis_lock.contrib import exporters, locmem, other_backends
from django_redis_lock.contrib.locmem.memory import Database, client_of, databases
from django_redis_lock.contrib.metrics import figures
from django_redis_lock.contrib.metrics.collecting import Metrics
from django_redis_lock.contrib.testing import MemoryServer, VirtualClock
from django_redis_lock.contrib.topology import Topology
from django_redis_lock.decorators import wrapper
from django_redis_lock.keeper import Job, Keeper
from django_redis_lock.locking.hold import Hold
from django_redis_lock.locking.waiting import queue as waiting
from django_redis_lock.locking.waiting import queues
from django_redis_lock.ops import held_locks
from django_redis_lock.protocol import Acquisition, identity
from django_redis_lock.protocol.acquisition import AcquireRequest
from django_redis_lock.protocol.keys import lock_keys
from django_redis_lock.singleflight import in_process
from django_redis_lock.singleflight.in_process import DeferredCall, InProcessFlight, Overtaken
from django_redis_lock.singleflight.runners import ThreadRunner
from django_redis_lock.templatetags import redis_lock
from django_redis_lock.threads import ThreadPool
from django_redis_lock.transport import Server, server_of
from django_redis_lock.transport.address import Address
from django_redis_lock.transport.circuit_breaker import Breaker
from tests.processes import PATIENCE
from tests.support.background import Background

KEYS = lock_keys(b"report")


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """With a GIL, hand it on as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*works: Callable[[int], object], rounds: int = 200) -> list[list[Any]]:
    """Do each of ``works`` in a thread of its own, with the number of the round. Returns what each
    has returned, by round."""
    here: list[list[None]] = [[] for _ in range(rounds)]
    failed: list[BaseException] = []

    def run(work: Callable[[int], object]) -> list[object]:
        results = []
        try:
            for number, come in enumerate(here):
                come.append(None)
                while len(come) < len(works) and not failed:
                    time.sleep(0)
                results.append(work(number))
        except BaseException as error:
            failed.append(error)
            raise
        return results

    running = [Background(run, work) for work in works]
    return [list(results) for results in zip(*(each.result() for each in running), strict=True)]


class Slow(str):
    """A name during whose look-up another thread goes on."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()

    def startswith(self, *args: Any) -> bool:
        time.sleep(0)
        return super().startswith(*args)


def nowhere() -> Server:
    return Server(redis.ConnectionPool(host="nowhere"))


class Idle(Job):
    """A job that is never due."""

    def __init__(self, server: Any = None) -> None:
        super().__init__(server, math.inf)


# -- names ---------------------------------------------------------------------------------------


def test_each_waiter_has_its_own_id() -> None:
    """Also in threads of one name, as those of a pool. A queue that is unregistered by the id of
    another would hide that one from the holder."""

    def ids(_: int) -> list[bytes]:
        threading.current_thread().name = "worker"
        return [identity.waiter_id() for _ in range(200)]

    made = [each for results in at_once(ids, ids, ids) for ids_of in results for each in ids_of]
    assert len(set(made)) == len(made)


# -- servers -------------------------------------------------------------------------------------


class Somewhere(redis.Connection):
    """Only its pool knows where it leads."""


def test_a_pool_has_one_server() -> None:
    pools = [redis.ConnectionPool(Somewhere) for _ in range(300)]

    def found(number: int) -> Server:
        return server_of(redis.Redis(connection_pool=pools[number]))

    assert all(one is other is third for one, other, third in at_once(found, found, found))


def test_a_connection_serves_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    server, used = nowhere(), Counter[int]()

    class Connection:
        generation, number = 0, itertools.count()

        def disconnect(self) -> None:
            pass

    monkeypatch.setattr(server, "_connect", lambda patience: Connection())

    def use(_: int) -> bool:
        connection: Any = server.checkout()
        used[id(connection)] += 1
        alone = used[id(connection)] == 1
        used[id(connection)] -= 1
        server.checkin(connection)
        return alone

    results = at_once(use, use, lambda _: server.close() is None)
    assert all(map(all, results))


class Cluster(Topology):
    def __init__(self) -> None:
        super().__init__(Address(redis.Connection, {}))

    def _look(self, until: float) -> None:
        pass


def test_nodes_are_added_while_others_are_dropped() -> None:
    """MOVED names one in each thread that gets it, and another thread learns of the rest."""
    cluster = Cluster()
    kept = cluster._node("first", 1)

    def moved(number: int) -> None:
        for port in range(20):
            cluster._node(f"host-{number}", port)

    at_once(moved, lambda _: cluster._keep_only([kept]), lambda _: cluster.nodes(), rounds=60)
    assert kept in cluster.nodes()
    cluster._keep_only([kept])
    assert cluster.nodes() == [cluster, kept]


def test_each_lock_that_is_taken_without_redis_is_counted() -> None:
    breaker = Breaker("nowhere")
    results = at_once(*[lambda _: [breaker.fell_back() for _ in range(20)]] * 3)
    firsts = [first for each in results for here in each for first in here]
    assert breaker.fallbacks == len(firsts) == 3 * 20 * 200
    assert sum(firsts) == 1


# -- locks ---------------------------------------------------------------------------------------


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What the keeper is given to do."""
    given: list[Job] = []
    monkeypatch.setattr(Keeper, "add", lambda self, job: given.append(job))
    return given


class Queue(waiting.WaitQueue):
    def end(self) -> None:
        pass


class Waiter:
    def __init__(self) -> None:
        self.turn: Any = None
        self.queue: Any = None


def request(name: bytes, waiter: bytes = b"") -> AcquireRequest:
    return AcquireRequest(lock_keys(name), b"token", b"", 30.0, 2.0, may_hold=[], waiter=waiter)


def test_waiters_come_and_go_while_others_unregister(jobs: list[Job]) -> None:
    """Each registered for the queue that it did not need."""
    server: Any = nowhere()
    others: list[waiting.WaitQueue] = [Queue(server, request(b"other-%d" % n)) for n in range(300)]
    queues.update((queue.key, queue) for queue in others)

    asked = [request(b"%d" % number) for number in range(20)]
    another = request(b"another", b"id")

    def come_and_go(_: int) -> None:
        for wanted in asked:
            waiter: Any = Waiter()
            waiting.join(waiter, Queue(server, wanted), threads.ThreadEvent)
            waiter.queue.leave(waiter)

    def unregister(_: int) -> None:
        for _ in range(50):
            waiting.unregister(server, another)

    at_once(come_and_go, come_and_go, unregister, rounds=50)
    assert [*queues.values()] == others
    queues.clear()
    assert len(jobs) >= 50 * 50


def test_one_waiter_of_a_process_waits_in_redis(jobs: list[Job]) -> None:
    server: Any = nowhere()
    leading: Counter[str] = Counter()

    def wait(_: int) -> bool:
        waiter: Any = Waiter()
        waiting.join(waiter, Queue(server, request(b"report")), threads.ThreadEvent)
        while waiter.turn is not None and not waiter.turn.wait(PATIENCE):
            pass
        leading["now"] += 1
        alone = leading["now"] == 1 and waiter.queue.is_led_by(waiter)
        leading["now"] -= 1
        waiter.queue.leave(waiter)
        return alone

    assert all(map(all, at_once(wait, wait, wait)))
    assert not queues


def test_a_hold_is_lost_once_or_released() -> None:
    told: list[int] = []

    def holds() -> Iterator[Hold]:
        for number in itertools.count():
            hold = Hold(30.0, on_lost=lambda number=number: told.append(number))
            hold.begin(Acquisition(b"token", 7, 0.0, math.inf), KEYS)
            yield hold

    made = list(itertools.islice(holds(), 200))
    results = at_once(*[lambda number: made[number].lose("it was reset")] * 3)
    assert all(sum(lost) == 1 for lost in results)
    assert sorted(told) == list(range(200))


def test_the_keeper_knows_each_job() -> None:
    keeper = Keeper()
    keeper._thread = threading.current_thread()  # It needs none: nothing is due.
    last: list[Job] = []

    def renew(number: int) -> None:
        for _ in range(10):
            job = Idle()
            keeper.add(job)
            assert job in keeper.jobs()
            keeper.discard(job)
        keeper.add(job)
        last.append(job)

    at_once(renew, renew, lambda _: keeper.hurry(), rounds=100)
    assert set(keeper.jobs()) == set(last)
    assert set(last) <= {job for _, _, job in keeper._due}


# -- values --------------------------------------------------------------------------------------


def flight(server: Server) -> InProcessFlight:
    runner = ThreadRunner.__new__(ThreadRunner)
    runner.server, runner.group = server, Slow("threads")
    return InProcessFlight(runner, b"value")


def test_one_caller_of_a_process_queries_redis() -> None:
    server = nowhere()
    results = at_once(*[lambda _: ((mine := flight(server)), in_process.join(mine))] * 3, rounds=1)
    [each] = results
    assert sum(mine is shared for mine, shared in each) == 1
    assert len({shared for _, shared in each}) == 1
    in_process.leave(each[0][1])
    assert not in_process.in_flight


def test_a_flight_that_ends_twice_leaves_the_next_one() -> None:
    """The keeper ends it when a write has come first, its caller when the value is there."""
    server = nowhere()
    ended = [flight(server) for _ in range(200)]
    following = flight(server)
    in_process.join(ended[0])

    left = [threading.Event() for _ in ended]

    def end(number: int) -> bool:
        in_process.leave(ended[number])
        left[number].set()
        return True

    def end_and_begin(number: int) -> bool:
        in_process.leave(ended[number])
        after = (*ended, following)[number + 1]
        began = in_process.join(after) is after
        left[number].wait(PATIENCE)
        return began and in_process.in_flight.get(after.flight_id) is after

    results = at_once(end, end_and_begin, rounds=len(ended))
    in_process.leave(following)
    assert not in_process.in_flight
    assert all(map(all, results))


def test_a_function_begins_or_is_overtaken() -> None:
    begun: list[int] = []

    def deferred(number: int) -> DeferredCall:
        return DeferredCall(lambda: begun.append(number), lambda function: function)

    calls = [deferred(number) for number in range(300)]

    def call(number: int) -> bool:
        try:
            calls[number]()
        except Overtaken:
            return False
        return True

    results = at_once(call, lambda number: calls[number].overtake(), rounds=len(calls))
    assert all(ran is not overtaken for ran, overtaken in results)
    assert len(begun) == sum(ran for ran, _ in results)


# -- what is counted, logged and told ------------------------------------------------------------


def test_each_event_is_counted(jobs: list[Job]) -> None:
    metrics, server = Metrics(), nowhere()
    cache = SimpleNamespace(conf=SimpleNamespace(METRICS=True))
    subject = events.Subject("report", "report", server=server, cache=cache)

    def count(_: int) -> None:
        for _ in range(10):
            metrics.count(events.Acquired(subject, 0.0, True, 1))
            metrics.count(events.Rejected(subject))

    taken: Counter[int] = Counter()

    def take(_: int = 0) -> None:
        for counted in metrics.take(server).values():
            taken.update(dict(enumerate(counted)))

    at_once(count, count, take, rounds=100)
    take()
    assert taken[figures.REJECTED] == taken[figures.CONTENDED] == 2 * 10 * 100


def test_the_same_is_logged_once() -> None:
    logged_at: dict[int, float] = {}
    results = at_once(*[lambda number: threads.may_log(number, logged_at)] * 3)
    assert all(sum(logged) == 1 for logged in results)


def computed_by_each(name: str) -> None:
    other_backends.PlainCache.log_backend(SimpleNamespace(_alias=name, _cache=object()))


def excluded_in_one_process(name: str) -> None:
    locmem._note_workers(name)


def not_cached(name: str) -> None:
    node: Any = SimpleNamespace(name=name, nodelist=SimpleNamespace(render=lambda context: ""))
    redis_lock.CachedNode._render(node, SimpleNamespace(request=object()))


def of_a_client(*_: object) -> object:
    return SimpleNamespace(of_client="a token", take_out=lambda: None, put_back=lambda: None)


@pytest.mark.parametrize(
    ("warn", "module", "logged"),
    [
        (computed_by_each, other_backends, "_logged"),
        (excluded_in_one_process, locmem, "_noted_in"),
        (not_cached, redis_lock, "_warned"),
    ],
)
def test_a_warning_is_logged_once_in_a_process(
    warn: Callable[[str], None], module: Any, logged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[object] = []
    monkeypatch.setattr(module.logger, "warning", lambda *args: lines.append(args))
    monkeypatch.setattr(redis_lock, "Conditions", of_a_client)
    monkeypatch.delattr(mail, "outbox")  # As in production.
    kind = type(getattr(module, logged))
    for _ in range(50):
        monkeypatch.setattr(module, logged, kind())
        lines.clear()
        at_once(*[lambda _: warn(Slow("default"))] * 3, rounds=1)
        assert len(lines) == 1


def test_each_listener_hears_each_event_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "listeners", ())
    heard: list[int] = []

    def listener(event: Any) -> None:
        heard.append(event)

    def others(_: int) -> None:
        def other(event: object) -> None:
            pass

        events.subscribe(other)
        events.unsubscribe(other)

    at_once(lambda _: events.subscribe(listener), others, others)
    assert events.listeners == (listener,)
    events.emit(1)
    assert heard == [1]


def test_threads_of_one_request_are_shown_in_the_toolbar() -> None:
    """A refresh in the background has its caller's context."""
    panels = pytest.importorskip("django_redis_lock.contrib.debug_toolbar", reason="not installed")
    panel = panels.LocksPanel.__new__(panels.LocksPanel)
    panel._open, panel._locks = {}, []
    for number in range(300):
        panel._open[number, 1] = None, {"name": "another"}

    def come_and_go(number: int) -> None:
        for fence in range(1, 20):
            panel._open[id(come_and_go), fence] = None, {"name": "own"}
            panel._open.pop((id(come_and_go), fence))

    def wait(number: int) -> None:
        subject = events.Subject("report", "report")
        panel._contended(SimpleNamespace(subject=subject, holder=None))

    at_once(come_and_go, wait, rounds=100)
    assert len(panel._locks) == 100
    assert not any(row["holds_itself"] for row in panel._locks)


def test_reads_are_counted_while_counting_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the first of them, in each thread that reads then."""
    monkeypatch.setattr(events, "listeners", ())
    monkeypatch.setattr(events, "count_read", None)
    reads: deque[object] = deque()

    def start() -> Any:
        time.sleep(0)
        events.count_read = lambda *read: reads.append(read)
        return reads.append

    def read(_: int) -> None:
        for _ in range(10):
            GetOrSet._record_read(cache, "report", "", "hit", 0.0)

    cache: Any = SimpleNamespace()
    for _ in range(100):
        reads.clear()
        events.subscribe_later(start)
        at_once(read, read, read, rounds=1)
        assert len(reads) == 3 * 10


def test_what_is_decorated_is_listed_while_more_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "_declared", type(wrapper._declared)())
    kept: list[Any] = []

    def decorate(number: int) -> None:
        kept.extend(locked(f"name-{number}")(lambda: None) for _ in range(20))

    at_once(decorate, decorate, lambda _: [wrapper.declarations() for _ in range(20)], rounds=20)
    assert len(wrapper.declarations()) == len(kept) == 2 * 20 * 20


def test_a_process_has_one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_bytes", lambda size: (time.sleep(0), os.urandom(size))[1])
    with override_settings(SECRET_KEY=""):
        [shown] = at_once(*[lambda _: held_locks.shown_id("id")] * 3, rounds=1)
    assert len(set(shown)) == 1


def test_an_exporter_has_no_more_groups_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "MAX_GROUPS", 9)
    made: list[Any] = [exporters.Exporter([]) for _ in range(50)]

    def group(thread: int, number: int) -> None:
        for group in range(5):
            made[number]._group(Slow(f"{thread}-{group}"))

    at_once(*(partial(group, thread) for thread in range(3)), rounds=len(made))
    assert {len(exporter._groups) for exporter in made} == {9}


def test_a_setting_that_is_overridden_while_it_is_looked_up_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Settings:
        DJANGO_REDIS_LOCK: Any = property(lambda self: self.looked_up())
        now: Any = {"TIMEOUT": 1}  # noqa: RUF012  # replaced, and not changed

        def looked_up(self) -> object:
            before = self.now
            if "TIMEOUT" in before:  # Another thread goes on just now.
                type(self).now = {}
                setting_changed.send(None, setting="DJANGO_REDIS_LOCK", value={}, enter=True)
            return before

    monkeypatch.setattr(conf, "settings", Settings())
    monkeypatch.setattr(conf, "_given", None)
    conf.given()
    assert conf.given() == {}


def test_the_setting_is_there_while_it_is_overridden() -> None:
    def override(_: int) -> None:
        for _ in range(20):
            setting_changed.send(None, setting="DJANGO_REDIS_LOCK", value={}, enter=True)

    at_once(override, *[lambda _: [len(conf.given()) for _ in range(20)]] * 2, rounds=50)


# -- threads -------------------------------------------------------------------------------------


def test_a_pool_whose_threads_could_not_start_works_when_they_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, done = ThreadPool("pool", 8, 10_000, idle_seconds=0.1), threading.Event()

    starting: deque[Callable[[RuntimeError], object]] = deque()

    def fail(_: int = 0) -> None:
        for _ in range(10):
            with suppress(IndexError):
                starting.popleft()(RuntimeError("can't start new thread"))

    def submit(_: int) -> None:
        for _ in range(10):
            pool.submit(int)

    with monkeypatch.context() as patch:
        patch.setattr(threads, "start", lambda thread, failed: starting.append(failed))
        at_once(submit, fail, fail, rounds=300)
        while starting:
            fail()
    assert not pool._threads
    assert pool.submit(done.set)
    assert done.wait(PATIENCE)


# -- in memory -----------------------------------------------------------------------------------


def test_threads_that_wait_move_one_clock() -> None:
    clock = VirtualClock()
    began = clock()
    at_once(*[lambda _: clock.sleep(1.0)] * 3, rounds=10)
    assert clock() >= began + 10


def test_databases_are_made_while_others_are_looked_up() -> None:
    server = MemoryServer()
    others = [f"other-{number}" for number in range(300)]
    databases.update((name, Database("in memory")) for name in others)

    def make(number: int) -> None:
        for place in range(20):
            name = f"{server._prefix}{number}-{place}"
            databases.setdefault(name, Database("in memory"))
        if number % 5 == 4:
            server._forget()

    try:
        at_once(make, lambda _: server._databases(), lambda _: server._databases(), rounds=50)
    finally:
        server._forget()
        for name in others:
            del databases[name]
    assert not server._databases()


def test_a_message_reaches_who_listens_while_connections_come_and_go() -> None:
    database = Database("in memory")
    listener = database.connect()
    listener.send(b"*2\r\n$9\r\nSUBSCRIBE\r\n$4\r\nnews\r\n")

    def connect(_: int) -> None:
        for _ in range(10):
            database.connect()

    def publish(_: int) -> int:
        return int(client_of(database).publish("news", "new"))

    results = at_once(connect, connect, publish, rounds=50)
    assert [reached for *_, reached in results] == [1] * 50
