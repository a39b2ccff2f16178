"""The keeper's calls to the servers, one turn at a time: without its thread, with servers and
connections that do as they are told, and with the test's own clock."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_redis_lock.keeper import Job, exchange, listeners
from django_redis_lock.keeper.exchange import BATCH, Exchanges, Link, Resolving, isolated
from django_redis_lock.protocol.holder_scripts import CLOCK
from django_redis_lock.protocol.script import Call
from django_redis_lock.transport.address import Address
from tests.processes import PATIENCE

CALL = Call(CLOCK, (), ())
READONLY = redis.exceptions.ReadOnlyError("You can't write against a read only replica.")


class Connection:
    """It gives the replies that a test has put there."""

    generation = 0
    broken = closed = False

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.sent: list[Any] = []
        self.looks: list[float] = []

    def can_read(self, timeout: float = 0) -> bool:
        self.looks.append(timeout)
        return bool(self.replies)

    def read_response(self) -> Any:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def send_command(self, *words: str) -> None:
        if self.broken:
            raise redis.ConnectionError("broken")
        self.sent.append(words)

    def send_packed_command(self, packed: list[bytes]) -> None:
        self.send_command(*map(str, packed))

    def disconnect(self) -> None:
        self.closed = True


class Server:
    """It notes what it is told."""

    retired = is_topology = False
    generation = 0
    discovers = False

    def __init__(self, host: str | None = "127.0.0.1", idle: list[Any] | None = None) -> None:
        self.address = Address(object, {} if host is None else {"host": host})
        self.idle = idle or []
        self.made: list[Connection] = []
        self.given_back: list[Any] = []
        self.told: list[Any] = []
        self.refuses_connections: Exception | None = None

    def connect(self, **options: Any) -> Connection:
        self.told.append(options)
        if self.refuses_connections is not None:
            raise self.refuses_connections
        self.made.append(Connection())
        return self.made[-1]

    def checkout_unchecked(self) -> Any:
        return self.idle.pop() if self.idle else None

    def checkin(self, connection: Connection) -> None:
        self.given_back.append(connection)

    def close(self, but: int = 0) -> None:
        self.told.append(f"close but {but}")

    def answered(self) -> None:
        self.told.append("answered")

    def on_error(self, error: Exception) -> None:
        self.told.append(error)

    def renew(self, connection: Any) -> None:
        self.told.append(("renew", connection))

    def must_discover(self) -> bool:
        return self.discovers

    def locate(self, keys: Any, patience: float) -> Any:
        raise redis.ConnectionError("nobody knows")


class Noted(Job):
    """Notes what becomes of it."""

    def __init__(self, server: Any, due: float = 0.0, call: Call | None = CALL) -> None:
        super().__init__(server, due)
        self.to_send = call
        self.answers: list[Any] = []
        self.errors: list[Exception] = []

    def call(self, now: float) -> Call | None:
        return self.to_send

    def answered(self, value: Any, sent_at: float) -> None:
        self.answers.append((value, sent_at))

    def failed(self, error: Exception, now: float) -> None:
        self.errors.append(error)


class Moment:
    """What time it is, on each clock; and for how long replies were waited for."""

    now = 1000.0
    awake = 50.0
    waits: list[float]


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> Moment:
    at = Moment()
    at.waits = []

    def readable(connections: list[Any], seconds: float) -> list[Any]:
        at.waits.append(seconds)
        return [each for each in connections if each.replies]

    clock = SimpleNamespace(monotonic=lambda: at.now)
    monkeypatch.setattr(exchange, "time", clock)
    monkeypatch.setattr(exchange, "real_time", clock)
    monkeypatch.setattr(exchange, "awake", lambda: at.awake)
    monkeypatch.setattr(exchange, "readable", readable)
    return at


def link_of(exchanges: Exchanges, server: Any) -> Link:
    return exchanges._links[server]


def begun(*jobs: Job, shortest: float = math.inf) -> Exchanges:
    exchanges = Exchanges()
    exchanges.begin(jobs, shortest)
    return exchanges


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shortest", "timeout"), [(math.inf, 1.0), (6.0, 1.0), (3.0, 0.5), (0.6, 0.1), (0.06, 0.05)]
)
def test_a_reply_may_take_a_sixth_of_the_shortest_lifetime(shortest: float, timeout: float) -> None:
    assert begun(shortest=shortest)._timeout == pytest.approx(timeout)


def test_the_keeper_waits_until_the_first_thing_that_may_happen(moment: Moment) -> None:
    job: Any = Noted(Server())
    exchanges = begun(job)
    assert exchanges.pause == 0.0
    for until, waited in ((1100.0, 1.0), (1000.25, 0.25), (999.0, 0.0), (math.inf, 1.0)):
        exchanges.turn(until)
        assert moment.waits.pop() == pytest.approx(waited)
    moment.awake += 0.75
    exchanges.turn(math.inf)
    assert moment.waits == [pytest.approx(0.25)]
    assert exchanges.pause == 0.0
    assert not job.errors
    moment.awake += 0.26
    assert exchanges.turn(math.inf) == [job]
    assert [type(error) for error in job.errors] == [redis.TimeoutError]


def test_it_waits_for_nothing_while_a_job_is_done(moment: Moment) -> None:
    server = Server()
    nothing, something = Noted(server, call=None), Noted(server)
    exchanges = begun(nothing, something)
    assert exchanges.turn(math.inf) == [nothing]
    assert moment.waits == [0.0]


def test_with_nothing_to_do_the_pause_is_endless(moment: Moment) -> None:
    server: Any = Server()
    job = Noted(server)
    exchanges = begun(job)
    exchanges.turn(0.0)
    server.made[0].replies.append(7)
    assert exchanges.turn(0.0) == [job]
    assert job.answers == [(7, 1000.0)]
    assert exchanges.pause == math.inf
    assert exchanges.turn(0.0) == []


def test_after_a_failure_a_server_has_a_pause_and_the_others_have_none(moment: Moment) -> None:
    server: Any = Server()
    server.refuses_connections = redis.ConnectionError("refused")
    job, other = Noted(server), Noted(Server())
    exchanges = begun(job)
    assert exchanges.turn(0.0) == [job]
    assert job.errors == [server.refuses_connections]
    assert server.refuses_connections in server.told
    exchanges.begin([job], math.inf)
    assert exchanges.pause == pytest.approx(0.25)
    exchanges.turn(math.inf)
    assert moment.waits.pop() == pytest.approx(0.25)
    exchanges.begin([other], math.inf)
    assert exchanges.pause == 0.0
    exchanges.turn(math.inf)
    assert other.server.made
    moment.awake += 0.25
    server.refuses_connections = None
    exchanges.turn(0.0)
    assert server.made


def test_an_unexpected_failure_is_logged(moment: Moment, caplog: pytest.LogCaptureFixture) -> None:
    for error, level in ((OSError(), ""), (redis.ResponseError("NOAUTH"), ""), (EOFError(), "E")):
        server: Any = Server()
        server.refuses_connections = error
        begun(Noted(server)).turn(0.0)
        assert "".join(record.levelname[0] for record in caplog.records) == level


def test_a_job_that_fails_in_an_unexpected_way_is_done_again_a_second_later(
    moment: Moment, caplog: pytest.LogCaptureFixture
) -> None:
    job: Any = Noted(Server())
    with isolated(job):
        raise SystemExit
    assert job.due == moment.now + exchange.REPLY_TIMEOUT_SECONDS
    assert caplog.records


# -- one turn --------------------------------------------------------------------------------------


def test_so_many_calls_are_sent_at_once(moment: Moment) -> None:
    server: Any = Server()
    jobs = [Noted(server, due=number) for number in range(BATCH + 1)]
    exchanges = begun(*jobs)
    exchanges.turn(0.0)
    [sent] = server.made[0].sent
    assert len(sent) == BATCH
    assert [("EVALSHA" in each) for each in sent] == [False] + [True] * (BATCH - 1)
    server.made[0].replies.extend([1] * BATCH)
    assert exchanges.turn(0.0) == jobs[:BATCH]
    assert set(server.made[0].looks) == {0}  # Each reply is there already.
    assert server.told.count("answered") == 1
    exchanges.turn(0.0)
    assert link_of(exchanges, server).unanswered[0] is jobs[BATCH]


def test_a_reply_that_is_an_error_concerns_one_job(moment: Moment) -> None:
    server: Any = Server()
    bad, good = Noted(server, 0.0), Noted(server, 1.0)
    exchanges = begun(bad, good)
    exchanges.turn(0.0)
    error = redis.ResponseError("WRONGTYPE")
    server.made[0].replies += [error, 5]
    exchanges.turn(0.0)
    assert (bad.errors, bad.answers, good.errors, good.answers) == ([error], [], [], [(5, 1000.0)])
    assert error in server.told
    assert not server.made[0].closed


def test_the_reply_of_a_replica_ends_the_connection_once_all_have_come(moment: Moment) -> None:
    server: Any = Server()
    jobs = [Noted(server, number) for number in range(3)]
    exchanges = begun(*jobs)
    exchanges.turn(0.0)
    server.made[0].replies += [READONLY, redis.ResponseError("ERR")]
    exchanges.turn(0.0)
    assert not server.made[0].closed
    server.made[0].replies += [1]
    exchanges.turn(0.0)
    assert server.made[0].closed
    assert ("renew", server.made[0]) in server.told
    assert not link_of(exchanges, server).misdirected


def test_a_connection_that_breaks_fails_all_that_was_sent_on_it(moment: Moment) -> None:
    server: Any = Server()
    jobs = [Noted(server, number) for number in range(2)]
    exchanges = begun(*jobs)
    exchanges.turn(0.0)
    error = redis.ConnectionError("gone")
    server.made[0].replies += [1, error]
    assert exchanges.turn(0.0) == jobs
    assert [job.errors for job in jobs] == [[], [error]]
    assert server.made[0].closed
    assert exchanges.pause == math.inf
    assert not link_of(exchanges, server).has_asked


def test_of_a_cluster_the_call_goes_to_the_server_that_has_its_keys(moment: Moment) -> None:
    node: Any = Server()
    topology: Any = Server()
    topology.is_topology = True
    topology.locate = lambda keys, patience: node
    job, nothing = Noted(topology), Noted(topology, call=None)
    exchanges = begun(job, nothing)
    assert exchanges.turn(0.0) == [nothing]
    node.made[0].replies.append(3)
    assert exchanges.turn(0.0) == [job]
    assert job.answers == [(3, 1000.0)]


def test_calls_of_a_cluster_fail_with_their_server_and_are_not_sent_later(moment: Moment) -> None:
    node: Any = Server()
    node.refuses_connections = redis.ConnectionError("refused")
    topology: Any = Server()
    topology.is_topology = True
    topology.locate = lambda keys, patience: node
    jobs = [Noted(topology) for _ in range(BATCH + 1)]
    exchanges = begun(*jobs)
    assert len(exchanges.turn(0.0)) == BATCH + 1
    assert all(len(job.errors) == 1 for job in jobs)
    assert exchanges.pause == math.inf


def test_each_reply_gives_the_next_its_whole_time(moment: Moment) -> None:
    server: Any = Server()
    exchanges = begun(Noted(server, 0.0), Noted(server, 1.0))
    exchanges.turn(0.0)
    moment.awake += 0.75
    server.made[0].replies.append(1)
    exchanges.turn(0.0)
    exchanges.turn(math.inf)
    assert moment.waits[-1] == pytest.approx(1.0)


def test_a_call_whose_server_is_not_known_fails(moment: Moment) -> None:
    topology: Any = Server()
    topology.is_topology = True
    job = Noted(topology)
    exchanges = begun(job)
    assert exchanges.turn(0.0) == [job]
    assert [str(error) for error in job.errors] == ["nobody knows"]


def test_the_connection_to_a_server_that_has_left_is_closed_when_it_is_needed_no_more(
    moment: Moment,
) -> None:
    old: Any = Server()
    job = Noted(old)
    exchanges = begun(job)
    exchanges.turn(0.0)
    old.retired = True
    exchanges.begin([Noted(Server())], math.inf)  # A reply of the old one is still to come.
    assert not old.made[0].closed
    old.made[0].replies.append(1)
    assert job in exchanges.turn(0.0)
    exchanges.begin([Noted(Server())], math.inf)
    assert old.made[0].closed
    assert old not in exchanges._links


def test_at_the_end_everything_is_closed_and_forgotten(moment: Moment) -> None:
    server: Any = Server()
    exchanges = begun(Noted(server), Noted(server, call=None))
    exchanges._check(link_of(exchanges, server))
    assert exchanges._done
    exchanges._locating[server].result(int, 1.0)
    exchanges.end()
    assert server.made[0].closed
    assert "close but 1" in server.told
    assert not (exchanges._links)
    assert not (exchanges._locating)
    assert not (exchanges._done)
    assert exchanges.pause == math.inf


# -- the connection --------------------------------------------------------------------------------


def in_use(server: Any) -> Link:
    """A link just after its call has been sent."""
    link = Link(server)
    link.check()
    if not link.checking:
        link.send([b"call"], 0.25)
    return link


def test_the_keepers_connection_has_no_other_replies_than_those_to_calls(moment: Moment) -> None:
    """RESP3 has others."""
    server: Any = Server()
    link = in_use(server)
    assert server.told == [{"timeout": 0.25, "protocol": 2}]
    assert (link.sent_at, link.heard_at) == (1000.0, 50.0)
    link.rest()
    assert not server.given_back
    assert link.connection is server.made[0]
    assert "answered" in server.told
    link.drop()
    assert server.made[0].closed
    assert server.told.count("close but 0") == 0


@pytest.mark.parametrize(
    ("host", "numeric"),
    [
        (None, True),
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("redis.example", False),
        ("redis-1", False),
    ],
)
def test_what_must_be_resolved_is_connected_to_in_another_thread(
    moment: Moment, host: str | None, numeric: bool
) -> None:
    server: Any = Server(host)
    connected_in: list[int] = []
    connect = server.connect
    server.connect = lambda **options: (
        connected_in.append(threading.get_ident()),
        connect(**options),
    )[1]
    in_use(server)
    assert (connected_in == [threading.get_ident()]) is numeric


@pytest.mark.parametrize(("idle_for", "asks"), [(2.0, False), (2.5, True)])
def test_an_idle_connection_of_the_process_is_used_and_given_back(
    moment: Moment, idle_for: float, asks: bool
) -> None:
    """A server may allow no other; one that was idle for long has to show that it is alive."""
    idle: Any = Connection()
    server: Any = Server(idle=[(idle, moment.now - idle_for)])
    link = in_use(server)
    assert link.checking is link.has_asked is asks
    if asks:
        assert idle.sent == [("PING",)]
        assert idle.looks == [0]
        idle.replies.append(b"PONG")
        moment.now += 1
        link.end_check(silent=False)
        assert not idle.replies
        assert not link.checking
        link.check()
        assert not link.checking  # It was idle for no time.
        link.send([b"call"], 1.0)
    assert not server.made
    moment.now += 1
    link.rest()
    assert server.given_back == [idle]
    assert link._connection is None
    assert link._idle_since == moment.now


def ended(link: Link, connection: Any) -> None:
    connection.replies.append("its end")
    link.check()


def unsendable(link: Link, connection: Any) -> None:
    connection.broken = True
    link.check()


def silent(link: Link, connection: Any) -> None:
    link.check()
    link.end_check(silent=True)


def broken(link: Link, connection: Any) -> None:
    link.check()
    connection.replies.append(redis.ConnectionError("gone"))
    link.end_check(silent=False)


def refusing(link: Link, connection: Any) -> None:
    link.check()
    connection.replies.append(redis.ResponseError("NOPERM"))
    link.end_check(silent=False)


@pytest.mark.parametrize("what", [ended, unsendable, silent, broken, refusing])
def test_an_idle_connection_that_does_not_answer_is_replaced(
    moment: Moment, what: Callable[[Link, Any], None]
) -> None:
    connection: Any = Connection()
    server: Any = Server(idle=[(connection, 0.0)])
    link = Link(server)
    what(link, connection)
    usable = what is refusing  # The user may not use PING, but the server answers.
    assert not link.checking
    assert connection.closed is not usable
    # The other idle ones may have broken for the same reason.
    assert server.told == ([] if usable else ["close but 0"])
    link.send([b"call"], 1.0)
    assert len(server.made) == (0 if usable else 1)


def test_in_the_turn_in_which_a_connection_proves_alive_the_call_is_sent(moment: Moment) -> None:
    connection: Any = Connection()
    server: Any = Server(idle=[(connection, 0.0)])
    exchanges = begun(Noted(server))
    exchanges.turn(math.inf)
    assert moment.waits == [0.5]
    connection.replies.append(b"PONG")
    exchanges.turn(math.inf)
    assert [len(words) for words in connection.sent] == [1, 1]
    assert link_of(exchanges, server).unanswered


def test_one_that_stays_silent_is_replaced_in_the_same_turn(moment: Moment) -> None:
    connection: Any = Connection()
    server: Any = Server(idle=[(connection, 0.0)])
    exchanges = begun(Noted(server))
    exchanges.turn(math.inf)
    moment.awake += 0.51
    assert exchanges.turn(math.inf) == []
    assert connection.closed
    assert server.made[0].sent


def test_connections_that_were_made_before_a_failover_are_replaced(moment: Moment) -> None:
    server: Any = Server()
    link = in_use(server)
    link.rest()
    link.check()
    assert link.connection is server.made[0]
    server.generation += 1
    link.check()
    assert server.made[0].closed
    link.send([b"call"], 1.0)
    assert len(server.made) == 2


def test_a_server_that_reports_changes_knows_the_keepers_own_connection(moment: Moment) -> None:
    """Also where an idle one of the process could be used, unless there can be no other."""
    tracked: list[Any] = []
    idle: Any = Connection()
    server: Any = Server(idle=[(idle, moment.now)])
    listener: Any = SimpleNamespace(track=tracked.append)
    listeners[server] = listener
    link = in_use(server)
    assert tracked == server.made == [link.connection]
    link.drop()
    server.refuses_connections = redis.ConnectionError("max number of clients reached")
    link.send([b"call"], 1.0)
    assert link.connection is idle
    assert len(tracked) == 1


def test_where_no_connection_can_be_opened_that_of_a_loop_is_used(
    moment: Moment, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare: Any = Connection()
    spares = SimpleNamespace(spare_of_a_loop=lambda server: spare)
    monkeypatch.setattr(exchange, "over_a_loop", spares)
    server: Any = Server()
    server.refuses_connections = redis.ConnectionError("max number of clients reached")
    link = Link(server)
    link.check()
    assert link._connection is None  # At first it tries to open one.
    link.send([b"call"], 1.0)
    assert link.connection is spare
    link.rest()
    assert link._connection is None
    assert not server.given_back  # The loop has it all the time.


def test_without_any_connection_the_error_is_that_of_connecting(moment: Moment) -> None:
    server: Any = Server()
    server.refuses_connections = redis.ConnectionError("max number of clients reached")
    with pytest.raises(redis.ConnectionError, match="max number"):
        Link(server).send([b"call"], 1.0)


# -- work that may take long -----------------------------------------------------------------------


def test_work_that_takes_long_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    wait = futures.wait

    def noted(work: Any, seconds: float) -> Any:
        waits.append(seconds)
        return wait(work, seconds)

    monkeypatch.setattr(exchange.futures, "wait", noted)
    go_on, runs = threading.Event(), []

    def work() -> int:
        runs.append(1)
        assert go_on.wait(PATIENCE)
        return len(runs)

    resolving = Resolving()
    for _ in range(2):
        with pytest.raises(redis.TimeoutError, match=r"longer than 0\.01 s"):
            resolving.result(work, 0.01)
    assert waits == [0.01, 0.0]
    go_on.set()
    assert wait([resolving._under_way], PATIENCE).done
    assert resolving.result(work, PATIENCE) == 1
    assert resolving.result(work, PATIENCE) == 2  # The next is done anew.


def test_work_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving = Resolving()
    with pytest.raises(ZeroDivisionError):
        resolving.result(lambda: 1 / 0, PATIENCE)
    assert resolving.result(lambda: 1, PATIENCE) == 1


def test_where_there_is_no_thread_for_it_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange._resolving, "submit", lambda work: False)
    assert Resolving().result(threading.get_ident, PATIENCE) == threading.get_ident()
