"""What the callers of one value send to Redis, and what they make of the replies, step by step. No
Redis runs here, and time stands still."""

from __future__ import annotations

import gc
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import redis
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from django_redis_lock import LockError, events, threads
from django_redis_lock.events import Computed, Computing, RefreshFailed, Shared, Stored
from django_redis_lock.exceptions import ComputationFailed
from django_redis_lock.protocol import Call, fingerprint
from django_redis_lock.protocol.keys import (
    FLIGHTS,
    flight_key,
    flight_keys,
    flight_leader,
    flight_stream,
)
from django_redis_lock.singleflight import in_process, leader, runners
from django_redis_lock.singleflight.flight import (
    FOLLOWER_CHECK_SECONDS,
    TOO_LATE,
    CoordinationError,
    MultiFlight,
    SingleFlight,
)
from django_redis_lock.singleflight.in_process import (
    DeferredCall,
    FlightRenewal,
    InProcessFlight,
    Overtaken,
    Postponed,
    computing,
    in_flight,
    innermost_flight,
    join,
    leave,
    own_flights,
    token_for,
)
from django_redis_lock.singleflight.leader import Leader, Producer, Undecodable
from django_redis_lock.singleflight.refreshing import Refreshing
from django_redis_lock.singleflight.runners import Computation, ProducerFailed, under_computation
from django_redis_lock.singleflight.scripts import (
    END_FLIGHT,
    NOTHING,
    RENEW_FLIGHT,
    STORE,
    TAKE_FLIGHT,
    TAKE_OVER,
    Before,
    Failed,
    Follows,
    Found,
    Leads,
    parse,
)
from django_redis_lock.threads import ThreadEvent
from django_redis_lock.transport import pack_words, server_of
from tests.events import no_listeners
from tests.support.clock import FakeClock, clock

__all__ = ["clock", "no_listeners"]

# Quick cells, each of which is another decision.
pytestmark = [pytest.mark.sample(1), pytest.mark.usefixtures("no_listeners")]

OUT = RedisConnectionError("away")
WRONG = ResponseError("WRONGTYPE")
REFUSED = OutOfMemoryError("OOM")
A, B = b"a", b"b"


class Run(NamedTuple):
    """A step, which a test answers; so are the others."""

    calls: tuple[Call, ...]
    done: bool = False

    @property
    def scripts(self) -> list[Any]:
        return [call.script for call in self.calls]


class Exchange(NamedTuple):
    command: bytes
    replies: int


class Pause(NamedTuple):
    seconds: float


class Follow(NamedTuple):
    streams: tuple[bytes, ...]
    until: float


class Await(NamedTuple):
    event: Any
    until: float


class Read(NamedTuple):
    key: bytes


class Background(NamedTuple):
    steps: Any
    renewal: Any


class Runner:
    """Its steps are what tests answer."""

    group: object = None
    in_thread = True
    new_event = ThreadEvent

    def __init__(self) -> None:
        self.client = redis.Redis(port=7501)
        self.server = server_of(self.client)
        self.soon: list[tuple[Any, ...]] = []

    def run(self, *calls: Call, done: bool = False) -> Run:
        return Run(calls, done)

    def exchange(self, command: bytes, replies: int) -> Exchange:
        return Exchange(command, replies)

    def pause(self, seconds: float) -> Pause:
        return Pause(seconds)

    def wait_for_leader(self, streams: tuple[bytes, ...], until: float) -> Follow:
        return Follow(streams, until)

    def wait_for_event(self, event: Any, until: float) -> Await:
        return Await(event, until)

    def read(self, key: bytes) -> Read:
        return Read(key)

    def run_in_background(self, steps: Any, renewal: Any) -> Background:
        return Background(steps, renewal)

    def call_soon(self, *call: Any) -> None:
        self.soon.append(call)


class Dialogue:
    """Steps, and what a test answers to them; functions that compute are called at once.

    Attributes:
        step: the one that is to be answered, None at the end.
        result: what the steps return.
    """

    def __init__(self, steps: Any) -> None:
        self.steps = steps
        self.step: Any = None
        self.result: Any = None
        self._go_on(lambda: next(steps))

    def _go_on(self, move: Callable[[], Any]) -> None:
        try:
            self.step = move()
            while type(self.step) is Computation:
                try:
                    value = self.step.function()
                except BaseException as error:
                    self.step = self.steps.throw(ProducerFailed(error))
                else:
                    self.step = self.steps.send(value)
        except StopIteration as end:
            self.step, self.result = None, end.value

    def answer(self, answer: Any) -> Any:
        """A list of replies, or what else the step is for; an error is raised there. Returns the
        next step."""
        if isinstance(answer, BaseException):
            self._go_on(lambda: self.steps.throw(answer))
        else:
            self._go_on(lambda: self.steps.send(answer))
        return self.step


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that the keeper has; what was discarded is preceded by ``not``."""
    jobs: list[Any] = []
    keeping = SimpleNamespace(add=jobs.append, discard=lambda job: jobs.append(("not", job)))
    for module in (in_process, leader, runners):
        monkeypatch.setattr(module, "keeper", lambda: keeping)
    return jobs


@pytest.fixture
def runner(clock: FakeClock, kept: list[Any]) -> Iterator[Runner]:
    runner = Runner()
    runner.server.breaker.answered()
    yield runner
    runner.server.breaker.answered()
    in_flight.clear()


def encode(value: object) -> bytes:
    if isinstance(value, BaseException):
        raise value
    return repr(value).encode()


def decode(value: Any) -> object:
    if value == b"unreadable":
        raise Undecodable
    return value.decode()


def producer(compute: Any = lambda: 5, lifetime: int = 60_000, **options: Any) -> Producer:
    return Producer(compute, encode, decode, lambda value: lifetime, **options)


def make_leader(runner: Runner, *keys: bytes, **options: Any) -> Any:
    names = options.pop("names", None)
    shared = options.pop("shared", None)
    return Leader(runner, 30.0, [*(keys or (A,))], producer(**options), shared, names)


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    """The events of values."""
    found: list[Any] = []
    events.subscribe(found.append, reads=True)
    yield found
    events.unsubscribe(found.append)


# -- who leads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "state"),
    [
        ([1], Leads(NOTHING)),
        ([b"1", b"digest", b"123"], Leads(Before(b"digest", b"123"))),
        ([2, b"value"], Found(b"value")),
        ([3, b"failed"], Failed(b"failed")),
        ([0, b"another", 1500], Follows(b"another", 1001.501)),
        ([0, "another", -1], Follows(b"another", 1000.001)),
    ],
)
def test_what_a_caller_learns(clock: FakeClock, reply: Any, state: Any) -> None:
    assert parse(reply) == state


def take(*keys: bytes) -> list[Any]:
    return [TAKE_FLIGHT] * len(keys)


def test_one_question_for_each_key(runner: Runner) -> None:
    lead = make_leader(runner, A, B, stale=7)
    call = Dialogue(lead.query({B: b"stream"}, {A: "sha"}))
    first, second = call.step.calls
    assert call.step.scripts == take(A, B)
    assert first == Call(TAKE_FLIGHT, (A, flight_key(A)), (lead.token, 30_000, 7, "sha"))
    assert second == Call(TAKE_FLIGHT, (B, flight_key(B), b"stream"), (lead.token, 30_000, 7, ""))
    call.answer([[1], [2, b"value"]])
    assert call.result == [Leads(), Found(b"value")]


@pytest.mark.parametrize(("seconds", "again"), [(15, False), (15.1, True)])
def test_a_reply_so_late_that_its_flight_may_be_over_counts_no_more(
    runner: Runner, clock: FakeClock, seconds: float, again: bool
) -> None:
    call = Dialogue(make_leader(runner).query())
    clock.now += seconds
    call.answer([[1]])
    if again:
        assert call.step.scripts == take(A)
        call.answer([[0, b"another", 1000]])
        assert isinstance(call.result[0], Follows)
    else:
        assert call.result == [Leads()]


def test_a_late_value_is_a_value(runner: Runner, clock: FakeClock) -> None:
    call = Dialogue(make_leader(runner).query())
    clock.now += 20
    call.answer([[2, b"value"]])
    assert call.result == [Found(b"value")]


def ends(step: Any, *keys: bytes, done: bool = False) -> bool:
    """Whether a step ends the flights of ``keys``."""
    return (step.scripts, [call.keys[0] for call in step.calls], step.done) == (
        [END_FLIGHT] * len(keys),
        [*keys],
        done,
    )


class TestErrors:
    """Of the question who leads."""

    def test_an_outage_is_raised_at_once(self, runner: Runner) -> None:
        call = Dialogue(make_leader(runner).query())
        with pytest.raises(RedisConnectionError):
            call.answer(OUT)

    def test_who_has_followed_waits_until_a_failover_is_over(
        self, runner: Runner, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runner.server, "FAILOVER_SECONDS", 10.0)
        call = Dialogue(make_leader(runner).query({A: b"stream"}))
        for clock.now in (1000.0, 1009.9):
            assert call.answer(OUT) == Pause(0.1)
            assert call.answer(None).scripts == take(A)
        clock.now = 1010.0
        with pytest.raises(RedisConnectionError):
            call.answer(OUT)

    @pytest.mark.parametrize("followed", [{}, {A: b"stream"}])
    def test_another_error_is_raised(
        self, runner: Runner, monkeypatch: pytest.MonkeyPatch, followed: Any
    ) -> None:
        monkeypatch.setattr(runner.server, "FAILOVER_SECONDS", 10.0)
        call = Dialogue(make_leader(runner).query(followed))
        with pytest.raises(ResponseError):
            call.answer(WRONG)

    def test_of_several_keys_some_may_have_been_taken(self, runner: Runner) -> None:
        call = Dialogue(make_leader(runner, A, B).query())
        assert ends(call.answer(WRONG), A, B)
        with pytest.raises(ResponseError):
            call.answer([1, 1])

    def test_in_an_outage_they_end_by_themselves(self, runner: Runner) -> None:
        call = Dialogue(make_leader(runner, A, B).query())
        with pytest.raises(RedisConnectionError):
            call.answer(OUT)

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError()])
    def test_who_is_interrupted_may_lead(self, runner: Runner, error: BaseException) -> None:
        for end in ([1], OUT):
            call = Dialogue(make_leader(runner).query())
            assert ends(call.answer(error), A, done=True)
            with pytest.raises(type(error)):
                call.answer(end)


class TestUnseen:
    """A read has just returned no value: plain commands will do."""

    @pytest.fixture
    def call(self, runner: Runner) -> Dialogue:
        return Dialogue(make_leader(runner).query(unseen=True))

    def test_it_leads(self, runner: Runner) -> None:
        lead = make_leader(runner)
        call = Dialogue(lead.query(unseen=True))
        command = pack_words(b"SET", flight_key(A), lead.token, b"PX", b"30000", b"NX")
        assert call.step == Exchange(command + pack_words(b"GET", A), 2)
        call.answer([b"OK", None])
        assert call.result == [Leads()]

    @pytest.mark.parametrize("replies", [[None, None], [None, b"value"]])
    def test_others_lead(self, call: Dialogue, replies: Any) -> None:
        assert call.answer(replies).scripts == take(A)
        call.answer([[0, b"another", 1000]])
        assert isinstance(call.result[0], Follows)

    @pytest.mark.parametrize("error", [None, OUT])
    def test_there_is_a_value_after_all(self, call: Dialogue, error: Any) -> None:
        assert ends(call.answer([b"OK", b"value"]), A)
        assert call.answer(error or [1]).scripts == take(A)

    def test_a_late_reply(self, call: Dialogue, clock: FakeClock) -> None:
        clock.now += 20
        assert call.answer([b"OK", None]).scripts == take(A)

    def test_a_value_of_another_type(self, call: Dialogue) -> None:
        assert ends(call.answer(WRONG), A)
        assert call.answer([1]).scripts == take(A)

    @pytest.mark.parametrize("error", [REFUSED, BusyLoadingError("LOADING")])
    def test_a_refusal(self, call: Dialogue, error: Exception) -> None:
        assert call.answer(error).scripts == take(A)

    def test_an_outage(self, call: Dialogue) -> None:
        with pytest.raises(RedisConnectionError):
            call.answer(OUT)

    def test_an_interrupt(self, call: Dialogue) -> None:
        assert ends(call.answer(KeyboardInterrupt()), A, done=True)
        with pytest.raises(KeyboardInterrupt):
            call.answer([1])

    @pytest.mark.parametrize("why", ["several", "topology", "failing"])
    def test_where_a_script_is_needed(
        self, runner: Runner, monkeypatch: pytest.MonkeyPatch, why: str
    ) -> None:
        monkeypatch.setattr(runner.server, "is_topology", why == "topology")
        if why == "failing":
            runner.server.breaker.failed(OUT, 0.0)
        keys = (A, B) if why == "several" else (A,)
        lead = make_leader(runner, *keys)
        lead.sent_at = 1000.0  # A request before.
        assert Dialogue(lead.query(unseen=True)).step.scripts == take(*keys)


@pytest.mark.parametrize(
    ("leaders", "args"),
    [(None, [(), ()]), ({A: b"other", B: b""}, [(b"other",), (b"",)]), ({B: b"x"}, [(b"x",)])],
)
def test_to_lead_instead(runner: Runner, leaders: Any, args: list[Any]) -> None:
    lead = make_leader(runner, A, B)
    call = Dialogue(lead.take_over(leaders))
    keys = list(leaders or (A, B))
    assert call.step.calls == tuple(
        Call(TAKE_OVER, (key, flight_key(key)), (lead.token, 30_000, *of))
        for key, of in zip(keys, args, strict=True)
    )
    call.answer([[b"digest", b"1", b"t"], None][: len(keys)])
    assert call.result == dict(zip(keys, [Before(b"digest", b"1", b"t"), None], strict=False))


# -- to compute ------------------------------------------------------------------------------------


def test_a_computation_is_renewed_until_its_end(runner: Runner, kept: list[Any]) -> None:
    seen: list[Any] = []
    lead = make_leader(runner, compute=lambda: seen.append([*kept]) or 5)
    lead.begin({A: NOTHING})
    (renewal,) = lead.renewals
    call = Dialogue(lead.lead())
    assert call.result == {A: 5}
    assert lead.encoded == {A: (b"5", 60_000)}
    assert seen == [[renewal]]
    assert kept == [renewal, ("not", renewal)]


@pytest.mark.parametrize(
    ("error", "args"),
    [
        (ValueError("no"), ("ValueError: no", 900)),
        (KeyboardInterrupt(), ("", 0)),
    ],
)
@pytest.mark.parametrize("where", ["compute", "encode"])
def test_a_failure_ends_the_flight(
    runner: Runner, kept: list[Any], error: BaseException, args: Any, where: str
) -> None:
    def compute() -> Any:
        if where == "compute":
            raise error
        return error

    lead = make_leader(runner, compute=compute, error_ttl=900)
    lead.begin({A: NOTHING})
    call = Dialogue(lead.lead())
    assert ends(call.step, A)
    assert call.step.calls[0].args == (lead.token, 10_000, *args)
    assert call.step.calls[0].keys == flight_keys(A, lead.token)
    with pytest.raises(ProducerFailed) as caught:
        call.answer([1])
    assert caught.value.error is error
    assert kept[-1] == ("not", lead.renewals[0])


def test_what_another_thread_computes_instead_ends_here(runner: Runner) -> None:
    def compute() -> Any:
        raise Overtaken

    lead = make_leader(runner, compute=compute, error_ttl=900)
    call = Dialogue(lead.lead())
    assert ends(call.step, A)
    assert call.step.calls[0].args[2:] == ("", 0)
    with pytest.raises(Overtaken):
        call.answer([1])


def test_what_is_postponed_goes_on(runner: Runner) -> None:
    postponed = Postponed()

    def compute() -> Any:
        raise postponed

    lead = make_leader(runner, compute=compute)
    with pytest.raises(ProducerFailed):
        Dialogue(lead.lead())
    assert postponed.leader is lead
    other = Runner()
    call = Dialogue(lead.resume(other, lambda: 6))
    assert call.step.scripts == [STORE]
    assert call.step.calls[0].args[:2] == (lead.token, b"6")
    assert lead._runner is other


@pytest.mark.parametrize("several", [False, True])
def test_what_listeners_hear_of_a_computation(
    runner: Runner, clock: FakeClock, heard: list[Any], several: bool
) -> None:
    def compute(names: Any = None) -> Any:
        clock.now += 2
        return {"n-a": 5} if names else 5

    names = {A: "n-a", B: "n-b"} if several else None
    keys = (A, B) if several else (A,)
    lead = make_leader(runner, *keys, names=names, compute=compute, name="report")
    call = Dialogue(lead.compute())
    assert call.result == {A: 5}
    subject = lead.producer.subject(runner.server)
    assert heard == [Computing(subject), Computed(subject, 2.0, None, len(keys), False)]


@pytest.mark.parametrize(
    ("error", "told", "count"),
    [(ValueError("no"), True, 1), (Overtaken(), False, 0), (Postponed(), False, 0)],
)
def test_what_listeners_hear_of_one_that_fails(
    runner: Runner, heard: list[Any], error: BaseException, told: bool, count: int
) -> None:
    def compute() -> Any:
        raise error

    lead = make_leader(runner, compute=compute)
    with pytest.raises(ProducerFailed):
        Dialogue(lead.compute(OUT))
    assert heard[-1][2:] == (error if told else None, count, True)


def test_its_trace_is_stored(
    runner: Runner, heard: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = make_leader(runner)
    Dialogue(lead.compute())
    assert lead.trace == ""
    monkeypatch.setattr(events, "trace_parent", lambda: "trace")
    Dialogue(lead.compute())
    assert lead.trace == "trace"


def test_without_redis_it_is_logged_once_a_minute(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    leader._logged_at.clear()
    for outage in (None, OUT, OUT):
        assert Dialogue(make_leader(runner).compute(outage)).result == {A: 5}
    assert caplog.text.count("get_or_set computes without it: a (away)") == 1


@pytest.mark.parametrize("values", [5, None, ["n-a"]])
def test_several_values_are_a_dict(runner: Runner, values: Any) -> None:
    lead = make_leader(runner, A, names={A: "n-a"}, compute=lambda names: values)
    with pytest.raises(ProducerFailed, match="default_many must return a dict by key"):
        Dialogue(lead.compute())


@pytest.mark.parametrize(
    ("keys", "text"), [((A,), "a"), ((A, B), "a and 1 more"), ((A, B, b"c"), "a and 2 more")]
)
def test_values_by_their_names(runner: Runner, keys: tuple[bytes, ...], text: str) -> None:
    assert str(make_leader(runner, *keys)) == text


@pytest.mark.parametrize(
    ("cache", "names", "name"),
    [
        (None, None, ""),
        (SimpleNamespace(_has_plain_keys=True), None, ""),
        (SimpleNamespace(_has_plain_keys=False), None, "report"),
        (SimpleNamespace(_has_plain_keys=False), {A: "n-a"}, "n-a"),
    ],
)
def test_a_name_that_the_key_does_not_show(
    runner: Runner, cache: Any, names: Any, name: str
) -> None:
    assert make_leader(runner, names=names, cache=cache, name="report").name_of(A) == name


# -- to store --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lifetime", "before", "did", "trace", "rest"),
    [
        (60_000, NOTHING, "", "", (10_000,)),
        (0, NOTHING, "", "", (10_000,)),
        (-1, NOTHING, "", "", (2_000,)),
        (60_000, Before(b"d", b"1"), "", "", (10_000, b"d", b"1", "")),
        (60_000, NOTHING, "written", "", (10_000, "", "0", "written")),
        (60_000, NOTHING, "", "trace", (10_000, "", "0", "", "trace")),
        (60_000, Before(b"d", b"1"), "deleted", "trace", (10_000, b"d", b"1", "deleted", "trace")),
    ],
)
def test_what_is_stored(
    runner: Runner, lifetime: int, before: Before, did: str, trace: str, rest: Any
) -> None:
    lead = make_leader(runner, lifetime=lifetime)
    lead.begin({A: before})
    lead.encoded = lead.encode({A: 5})
    lead.trace = trace
    if did:
        lead.own_writes[A] = did
    (call,) = Dialogue(lead.store()).step.calls
    assert call == Call(STORE, flight_keys(A, lead.token), (lead.token, b"5", lifetime, *rest))


def test_with_another_leader_its_flight_gets_the_value(runner: Runner) -> None:
    lead = make_leader(runner)
    lead.begin({A: Before(b"", b"0", "other")})
    lead.encoded = lead.encode({A: 5})
    (call,) = Dialogue(lead.store()).step.calls
    assert (call.keys, call.args[0]) == (flight_keys(A, b"other"), b"other")


def stored(runner: Runner, heard: list[Any] | None = None) -> Any:
    lead = make_leader(runner, A, B, b"c")
    lead.begin(dict.fromkeys((A, B, b"c"), NOTHING))
    lead.encoded = lead.encode({A: 5, b"c": 6})
    return lead


def test_what_has_no_value_ends(runner: Runner, clock: FakeClock, heard: list[Any]) -> None:
    lead = stored(runner)
    call = Dialogue(lead.store())
    assert call.step.scripts == [STORE, END_FLIGHT, STORE]
    assert call.step.calls[1].args == (lead.token, 10_000, "", 0)
    clock.now += 2
    call.answer([1, 0, 1])
    assert call.result == [True, False, True]
    assert heard == [Stored(lead.producer.subject(runner.server), 2.0, 2)]
    heard.clear()
    call = Dialogue(lead.store())
    call.answer([0, 0, 0])
    assert (call.result, heard) == ([False] * 3, [])


def test_in_an_outage_the_keeper_stores(runner: Runner, kept: list[Any]) -> None:
    call = Dialogue(stored(runner).store())
    calls = [*call.step.calls]
    call.answer(OUT)
    assert call.result == [None] * 3
    assert [job.call(1000.0) for job in kept] == calls


@pytest.mark.parametrize("error", [REFUSED, WRONG])
def test_what_is_refused_ends(runner: Runner, kept: list[Any], error: Exception) -> None:
    call = Dialogue(stored(runner).store())
    assert ends(call.answer(error), A, B, b"c")
    call.answer([1, 1, 1])
    assert (call.result, kept) == ([None] * 3, [])


@pytest.mark.parametrize(("error", "jobs"), [(OUT, 2), (WRONG, 0), (None, 0)])
def test_an_end_without_a_reply_is_repeated(
    runner: Runner, kept: list[Any], error: Any, jobs: int
) -> None:
    call = Dialogue(make_leader(runner, A, B).fail("message", 900))
    assert [each.args[2:] for each in call.step.calls] == [("message", 900)] * 2
    call.answer(error or [1, 1])
    assert len(kept) == jobs


def test_a_message_without_a_pause_is_left_out(runner: Runner) -> None:
    (call,) = Dialogue(make_leader(runner).fail("message")).step.calls
    assert call.args[2:] == ("", 0)


def test_a_forked_child_ends_nothing(
    runner: Runner, kept: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = make_leader(runner)
    lead.end_later()
    assert len(kept) == 1
    monkeypatch.setattr(threads, "_process", threads.Process(-1))
    lead.end_later()
    assert len(kept) == 1


def test_the_callers_of_a_flight_that_is_over_look_again(runner: Runner) -> None:
    shared = InProcessFlight(runner, A)
    make_leader(runner).lose()
    make_leader(runner, shared=shared).lose()
    assert runner.soon == [(leave, shared)]


# -- the renewal -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout", "due"), [(30.0, 1000.5), (0.9, 1000.3)])
def test_a_flight_is_described_soon(runner: Runner, timeout: float, due: float) -> None:
    lead = Leader(runner, timeout, [A], producer())
    lead.sent_at = 1000.0
    renewal = FlightRenewal(lead, A)
    assert (renewal.due, renewal.deadline_scale) == (pytest.approx(due), timeout)


def fields_of(call: Call | None) -> dict[Any, Any]:
    assert call is not None
    return dict(zip(call.args[4::2], call.args[5::2], strict=True))


def test_a_renewal_names_its_leader_once(runner: Runner, clock: FakeClock, kept: Any) -> None:
    lead = make_leader(
        runner, group="reports", name="report", cache=SimpleNamespace(_has_plain_keys=False)
    )
    renewal = FlightRenewal(lead, A)
    call = renewal.call(1002.5)
    assert call is not None
    assert call.script is RENEW_FLIGHT
    assert call.keys == (flight_key(A), flight_leader(A), runner.server.index_of(FLIGHTS, A))
    assert call.args[:4] == (lead.token, 30_000, A, "2500")
    fields = fields_of(call)
    assert fields["id"] == fingerprint(lead.token)
    assert fields["thread"] == threading.current_thread().name
    assert (fields["lifetime"], fields["renews"]) == ("30000", "1")
    assert (fields["group"], fields["name"]) == ("reports", "report")
    renewal.answered(1, 1003.0)
    assert renewal.due == 1013.0
    again = renewal.call(1013.0)
    assert again is not None
    assert again.args == (lead.token, 30_000, A)
    assert kept == []


def test_what_says_nothing_is_left_out(runner: Runner) -> None:
    lead = make_leader(runner)
    assert not {"group", "name"} & {*fields_of(FlightRenewal(lead, A).call(1000.0))}


def test_a_flight_that_a_write_has_ended(runner: Runner, kept: list[Any]) -> None:
    shared = InProcessFlight(runner, A)
    lead = make_leader(runner, shared=shared)
    renewal = FlightRenewal(lead, A)
    renewal.answered(0, 1001.0)
    assert kept == [("not", renewal)]
    assert runner.soon == [(leave, shared)]
    del lead
    gc.collect()
    renewal.answered(0, 1001.0)
    assert len(runner.soon) == 1


def test_a_flight_whose_leader_is_gone(runner: Runner, kept: list[Any]) -> None:
    renewal = FlightRenewal(make_leader(runner), A)
    gc.collect()
    assert renewal.call(1001.0) is None
    assert kept == [("not", renewal)]


@pytest.mark.parametrize(("timeout", "pause"), [(30.0, 1.0), (6.0, 0.5)])
def test_a_renewal_without_a_reply(runner: Runner, timeout: float, pause: float) -> None:
    lead = Leader(runner, timeout, [A], producer())
    renewal = FlightRenewal(lead, A)
    renewal.failed(OUT, 1001.0)
    assert renewal.due == 1001.0 + pause


# -- the callers of one process --------------------------------------------------------------------


def test_the_first_caller_leads_the_others_of_its_process(runner: Any) -> None:
    class Caller:
        pass

    callers = [Caller(), Caller(), Caller()]
    mine, second, third = (InProcessFlight(runner, A, caller) for caller in callers)
    assert join(mine) is mine
    assert join(second) is mine
    leave(second)  # Which is another's.
    assert in_flight == {(runner.server, A, None): mine}
    assert not mine.ended.wait(0)
    assert second.ended.wait(0)
    callers.pop(0)
    gc.collect()
    assert join(third) is third  # The first is gone without a word.
    assert mine.ended.wait(0)
    leave(third)
    assert in_flight == {}
    assert third.ended.wait(0)


def test_a_flight_without_a_caller_lasts_as_long_as_itself(runner: Any) -> None:
    mine = InProcessFlight(runner, A)
    assert mine.caller_ref() is mine
    assert join(mine) is join(InProcessFlight(runner, A)) is mine


def test_a_deferred_call_may_be_overtaken_until_it_begins() -> None:
    ran: list[int] = []
    deferred = DeferredCall(ran.append, lambda function: function)
    token = token_for(deferred)
    assert in_process.overtake(token)
    with pytest.raises(Overtaken):
        deferred(1)
    deferred(2)  # Another leader's, after that.
    assert ran == [2]
    assert not in_process.overtake(token)
    assert not in_process.overtake(token_for(ran.append))
    wrapped: list[Any] = []
    other = deferred.replaced(lambda function: wrapped.append(function) or function)
    assert wrapped == [ran.append]
    assert other.overtake()
    token = token_for(other)
    del other
    gc.collect()
    assert not in_process.overtake(token)


def test_a_deferred_call_that_raises_stop_iteration() -> None:
    def stop() -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        DeferredCall(stop, lambda function: function)()


def test_a_value_may_not_need_itself(runner: Any) -> None:
    computation = SimpleNamespace(token=b"t", own_writes={})
    other = server_of(redis.Redis(port=7502))
    assert innermost_flight() is None
    with computing(runner.server, [A], computation):
        with pytest.raises(LockError, match="requests the value") as caught:
            in_process.refuse_recursion(runner.server, [B, A])
        assert caught.value.lock_name == "a"
        in_process.refuse_recursion(runner.server, [B])
        in_process.refuse_recursion(other, [A])
        with computing(None, [B], SimpleNamespace(token=b"u", own_writes={})):
            assert innermost_flight() == (A, b"t")
        left = under_computation.get()
    in_process.refuse_recursion(runner.server, [A])
    assert left == ({},)  # What has begun in the block, and outlives it, may request the value.
    assert under_computation.get() == ()


def test_writes_by_the_computation_itself(runner: Any) -> None:
    writes: dict[bytes, str] = {}
    computation = SimpleNamespace(token=b"t", own_writes=writes)
    assert own_flights([A]) == own_flights() == {}
    with computing(runner.server, [A, B], computation):
        assert own_flights([b"c"]) == {}
        assert own_flights([A], "deleted") == {A: b"t"}
        assert writes == {A: "deleted"}
        assert own_flights([A, B]) == {A: b"t", B: b"t"}
        assert own_flights([A], "deleted") == {A: b"t"}
        assert writes == {A: "written", B: "written"}
        assert own_flights(did="deleted") == {A: b"t", B: b"t"}
        assert own_flights([]) == {}


# -- one value, or several -------------------------------------------------------------------------


def single(runner: Any, **options: Any) -> Any:
    return SingleFlight(runner, 30.0, producer(**options), A)


def follows(token: bytes = b"other", pttl: int = 30_000) -> list[Any]:
    return [0, token, pttl]


def test_a_miss_is_computed_and_stored(runner: Any) -> None:
    found = single(runner)
    call = Dialogue(found.get_value(1060.0))
    assert call.step.scripts == take(A)
    (mine,) = in_flight.values()
    assert mine is found._shared
    assert call.answer([[1]]).scripts == [STORE]
    call.answer([1])
    assert call.result == 5
    assert (mine.encoded, mine.computed, mine.requests) == (b"5", True, 2)
    assert in_flight == {}
    assert mine.ended.wait(0)


def test_the_callers_of_the_process_look_again_when_a_write_ends_the_flight(
    runner: Any, kept: list[Any]
) -> None:
    def compute(names: Any = None) -> Any:
        kept[0].answered(0, 1001.0)
        return {} if names else 5

    found = single(runner, compute=compute)
    Dialogue(found.get_value(1060.0)).answer([[1]])
    assert runner.soon == [(leave, found._shared)]
    kept.clear()
    # Nobody waits for several values.
    Dialogue(several(runner, compute).get_values([A, B], 1060.0)).answer([[1], [1]])
    assert len(runner.soon) == 1


@pytest.mark.parametrize(("is_stored", "encoded"), [(1, b"5"), (0, None), (OUT, b"5")])
def test_what_other_callers_of_the_process_get(
    runner: Any, heard: list[Any], monkeypatch: pytest.MonkeyPatch, is_stored: Any, encoded: Any
) -> None:
    """Not what a write has overtaken."""
    monkeypatch.setattr(events, "trace_parent", lambda: "trace")
    found = single(runner)
    call = Dialogue(found.get_value(1060.0))
    call.answer([[1]])
    call.answer(is_stored if isinstance(is_stored, Exception) else [is_stored])
    assert call.result == 5
    shared = found._shared
    assert (shared.encoded, shared.computed) == (encoded, encoded is not None)
    assert shared.trace == ("trace" if encoded else "")


def test_a_value_that_is_there(runner: Any) -> None:
    found = single(runner)
    call = Dialogue(found.get_value(1060.0))
    call.answer([[2, b"value"]])
    assert (call.result, found.were_there) == ("value", 1)
    assert (found._shared.encoded, found._shared.computed) == (b"value", False)


def test_a_value_that_another_caller_computes_is_awaited(
    runner: Any, clock: FakeClock, heard: list[Any]
) -> None:
    found = single(runner)
    call = Dialogue(found.get_value(1060.0))
    step = call.answer([follows()])
    assert step == Follow((flight_stream(A, b"other"),), 1000 + FOLLOWER_CHECK_SECONDS)
    clock.now += 3
    step = call.answer("trace")
    assert step.calls[0].keys == (A, flight_key(A), flight_stream(A, b"other"))
    call.answer([[2, b"value"]])
    assert (call.result, found.were_there) == ("value", 0)
    (event,) = heard
    assert event[1:] == (False, 1, 3.0, "trace")
    assert type(event) is Shared
    assert (found._shared.computed, found._shared.trace) == (True, "trace")


@pytest.mark.parametrize(
    ("pttl", "deadline", "until"),
    [(30_000, 1060.0, 1002.0), (500, 1060.0, 1000.501), (30_000, 1001.0, 1001.0)],
)
def test_how_long_a_follower_waits(runner: Any, pttl: int, deadline: float, until: float) -> None:
    step = Dialogue(single(runner).get_value(deadline)).answer([follows(pttl=pttl)])
    assert step.until == pytest.approx(until)


def test_at_the_deadline_it_is_too_late(runner: Any, clock: FakeClock) -> None:
    call = Dialogue(single(runner).get_value(1001.0))
    clock.now = 1001.0
    call.answer([follows()])
    assert call.result is TOO_LATE


def test_a_failed_computation_fails_its_followers(runner: Any, heard: list[Any]) -> None:
    call = Dialogue(single(runner).get_value(1060.0))
    call.answer([follows()])
    call.answer("")
    with pytest.raises(ComputationFailed, match="no luck"):
        call.answer([[3, b"no luck"]])
    assert heard == []


def test_a_leader_of_this_process_that_has_not_begun_is_overtaken(runner: Any) -> None:
    deferred = DeferredCall(lambda: 5, lambda function: function)
    token = token_for(deferred)
    call = Dialogue(single(runner).get_value(1060.0))
    step = call.answer([follows(token)])
    assert step.scripts == [TAKE_OVER]
    assert step.calls[0].args[2] == token
    assert call.answer([[b"", b"0"]]).scripts == [STORE]
    call.answer([1])
    assert call.result == 5


def test_who_is_late_to_overtake_looks_again(runner: Any) -> None:
    deferred = DeferredCall(lambda: 5, lambda function: function)
    call = Dialogue(single(runner).get_value(1060.0))
    call.answer([follows(token_for(deferred))])
    assert call.answer([None]).scripts == take(A)
    call.answer([[2, b"value"]])
    assert call.result == "value"


def test_a_task_without_a_thread_overtakes_no_caller(runner: Any) -> None:
    runner.in_thread = False
    deferred = DeferredCall(lambda: 5, lambda function: function)
    call = Dialogue(single(runner).get_value(1060.0))
    assert isinstance(call.answer([follows(token_for(deferred))]), Follow)
    assert not in_process.overtake(b"unknown")


def test_one_that_is_overtaken_follows(runner: Any) -> None:
    calls: list[int] = []

    def compute() -> Any:
        calls.append(1)
        raise Overtaken

    call = Dialogue(single(runner, compute=compute).get_value(1060.0))
    step = call.answer([[1]])
    assert ends(step, A)
    step = call.answer([1])
    assert step.scripts == take(A)
    # It does not overtake that one, which has not begun either: they would do so in turns.
    deferred = DeferredCall(compute, lambda function: function)
    assert isinstance(call.answer([follows(token_for(deferred))]), Follow)


def test_what_cannot_be_decoded_is_computed(runner: Any) -> None:
    found = single(runner)
    call = Dialogue(found.get_value(1000.0))  # Also at the end of the wait.
    step = call.answer([[2, b"unreadable"]])
    assert step.scripts == take(A)
    assert step.calls[0].args[3] == hashlib.sha1(b"unreadable").hexdigest()
    assert found._shared.encoded is None
    assert call.answer([[1]]).scripts == [STORE]
    call.answer([1])
    assert (call.result, found.were_there) == (5, 0)


@pytest.mark.parametrize("step", ["query", "follow"])
def test_an_outage_while_it_is_coordinated(runner: Any, step: str) -> None:
    found = single(runner)
    call = Dialogue(found.get_value(1060.0))
    if step == "follow":
        call.answer([follows()])
    with pytest.raises(CoordinationError) as caught:
        call.answer(OUT)
    assert caught.value.__cause__ is OUT
    assert found._shared.outage is OUT
    assert in_flight == {}


class TestWaitsInMemory:
    """For another caller of this process."""

    @pytest.fixture
    def first(self, runner: Any) -> Any:
        first = InProcessFlight(runner, A)
        first.requests = 1
        assert join(first) is first
        return first

    @pytest.fixture
    def found(self, runner: Any) -> Any:
        return single(runner)

    @pytest.fixture
    def call(self, first: Any, found: Any) -> Dialogue:
        call = Dialogue(found.get_value(1060.0))
        assert call.step == Await(first.ended, 1060.0)
        return call

    def test_it_gets_the_value_of_a_later_request(
        self, call: Dialogue, first: Any, found: Any, clock: FakeClock, heard: list[Any]
    ) -> None:
        first.requests, first.encoded = 2, b"value"
        clock.now += 3
        call.answer(True)
        assert (call.result, found.were_there, heard) == ("value", 1, [])

    def test_it_was_computed(
        self, call: Dialogue, first: Any, found: Any, clock: FakeClock, heard: list[Any]
    ) -> None:
        first.requests, first.encoded, first.computed, first.trace = 2, b"value", True, "trace"
        clock.now += 3
        call.answer(True)
        assert (call.result, found.were_there) == ("value", 0)
        ((event),) = heard
        assert event[1:] == (False, 1, 3.0, "trace")

    def test_a_reply_to_an_earlier_request_does_not_count(
        self, call: Dialogue, first: Any, runner: Any
    ) -> None:
        first.encoded = b"old"
        leave(first)
        assert call.answer(True).scripts == take(A)

    @pytest.mark.parametrize("requests", [0, 1])
    def test_after_the_first_each_request_is_later(
        self, first: Any, found: Any, runner: Any, requests: int
    ) -> None:
        first.requests = requests
        call = Dialogue(found.get_value(1060.0))
        leave(first)
        second = InProcessFlight(runner, A)
        second.requests = 1
        assert join(second) is second
        assert call.answer(True) == Await(second.ended, 1060.0)
        second.encoded = b"value"
        call.answer(True)
        assert call.result == "value"

    def test_what_it_cannot_decode_it_requests(self, call: Dialogue, first: Any) -> None:
        first.requests, first.encoded = 2, b"unreadable"
        leave(first)
        assert call.answer(True).scripts == take(A)

    def test_an_outage_is_that_of_all(self, call: Dialogue, first: Any) -> None:
        first.outage = OUT
        leave(first)
        with pytest.raises(CoordinationError) as caught:
            call.answer(True)
        assert caught.value.__cause__ is OUT

    @pytest.mark.parametrize(
        ("stored", "result"),
        [
            ([b"value", 5000], "value"),
            (None, TOO_LATE),
            (OUT, TOO_LATE),
            ([b"unreadable", 5], TOO_LATE),
        ],
    )
    def test_at_its_deadline_it_reads_once_more(
        self, call: Dialogue, stored: Any, result: Any
    ) -> None:
        """The other may have read a value by then."""
        assert call.answer(False) == Read(A)
        call.answer(stored)
        assert call.result is TOO_LATE if result is TOO_LATE else call.result == result

    def test_without_redis_it_is_too_late(self, first: Any, found: Any) -> None:
        call = Dialogue(found.get_value(1060.0, OUT))
        call.answer(False)
        assert call.result is TOO_LATE

    def test_without_redis_it_goes_on(self, first: Any, found: Any) -> None:
        first.outage = OUT
        call = Dialogue(found.get_value(1060.0, OUT))
        leave(first)
        call.answer(True)
        assert call.result == 5


def test_without_redis_the_callers_of_a_process_share_a_computation(runner: Any) -> None:
    found = single(runner)
    call = Dialogue(found.get_value(1060.0, OUT))
    assert call.result == 5
    shared = found._shared
    assert (shared.encoded, shared.computed, shared.requests) == (b"5", True, 1)
    assert in_flight == {}


def test_a_value_that_is_wanted_from_this_caller(runner: Any) -> None:
    found = single(runner)
    call = Dialogue(found.compute_value())
    assert call.step.scripts == [TAKE_OVER]
    assert call.step.calls[0].args[2:] == (b"",)  # Together with another leader.
    step = call.answer([[b"d", b"1", b"other"]])
    assert step.calls[0].args == (b"other", b"5", 60_000, 10_000, b"d", b"1", "")
    call.answer([1])
    assert call.result == 5
    assert Dialogue(single(runner).compute_value(OUT)).result == 5


@pytest.mark.parametrize("replace", [True, False])
def test_computing_in_any_case(runner: Any, replace: bool) -> None:
    found = single(runner)
    call = Dialogue(found.compute_anyway([A], replace=replace))
    assert call.step.calls[0].args[2:] == (() if replace else (b"",))
    call.answer(OUT)  # Also without Redis.
    assert call.result == {A: 5}


def test_computing_in_any_case_where_another_is_faster(runner: Any) -> None:
    def compute() -> Any:
        raise Overtaken

    call = Dialogue(single(runner, compute=compute).compute_anyway([A]))
    assert ends(call.answer([None]), A)
    assert call.answer([1]).scripts == take(A)
    call.answer([[2, b"value"]])
    assert call.result == {A: "value"}


C = b"c"
NAMES: Mapping[bytes, str] = {A: "n-a", B: "n-b", C: "n-c"}


def several(runner: Any, compute: Any = None) -> Any:
    def by_name(names: list[str]) -> dict[str, str]:
        return {name: name.upper() for name in names}

    return MultiFlight(runner, 30.0, producer(compute or by_name), NAMES)


def test_several_values_in_one_round(runner: Any) -> None:
    found = several(runner)
    call = Dialogue(found.get_values([A, B, C], 1060.0))
    assert call.step.scripts == take(A, B, C)
    step = call.answer([[1], [2, b"value"], [1]])
    assert [each.keys[0] for each in step.calls] == [A, C]
    call.answer([1, 1])
    assert call.result == []
    assert found.values == {A: "N-A", B: "value", C: "N-C"}
    assert found.were_there == 1


def test_several_values_of_others(runner: Any, clock: FakeClock, heard: list[Any]) -> None:
    """First it computes those that it leads. What comes then counts as shared, if it was waited
    for."""
    found = several(runner)
    call = Dialogue(found.get_values([A, B, C], 1060.0))
    assert call.answer([[1], follows(b"b"), follows(b"c", 700)]).scripts == [STORE]
    clock.now += 0.1
    step = call.answer([1])
    assert step.streams == (flight_stream(B, b"b"), flight_stream(C, b"c"))
    assert step.until == pytest.approx(1000.701)
    step = call.answer("trace")
    assert [each.keys[0] for each in step.calls] == [B, C]
    heard.clear()
    assert isinstance(call.answer([[2, b"value"], follows(b"c")]), Follow)
    assert [event[1:3] for event in heard if type(event) is Shared] == [(False, 1)]
    heard.clear()
    call.answer("")
    assert call.answer([[1]]).scripts == [STORE]
    assert [event for event in heard if type(event) is Shared] == []
    call.answer([1])
    assert found.values == {A: "N-A", B: "value", C: "N-C"}


def test_several_values_one_of_which_is_late(runner: Any, clock: FakeClock) -> None:
    found = several(runner)
    call = Dialogue(found.get_values([A, B], 1001.0))
    clock.now = 1001.0
    call.answer([[2, b"value"], follows()])
    assert call.result == [B]


def test_several_values_one_of_which_has_failed(runner: Any) -> None:
    found = several(runner)
    call = Dialogue(found.get_values([A, B], 1060.0))
    assert call.answer([[1], [3, b"no luck"]]).scripts == [STORE]  # For which others wait.
    with pytest.raises(ComputationFailed):
        call.answer([1])


def test_several_values_that_need_themselves(runner: Any) -> None:
    with computing(runner.server, [B], SimpleNamespace(token=b"t", own_writes={})):
        with pytest.raises(LockError):
            Dialogue(several(runner).get_values([A, B], 1060.0))
        with pytest.raises(LockError):
            Dialogue(SingleFlight(runner, 30.0, producer(), B).get_value(1060.0))


def test_a_read_that_saw_nothing_saves_a_script_once(runner: Any) -> None:
    found = single(runner)
    found.unseen = True
    call = Dialogue(found.get_value(1060.0))
    assert isinstance(call.step, Exchange)
    assert call.answer([None, None]).scripts == take(A)
    call.answer([follows()])
    assert call.answer("").scripts == take(A)


# -- the refresh of a stale value ------------------------------------------------------------------


def refreshing(runner: Any, **options: Any) -> Any:
    return Refreshing(runner, 30.0, producer(stale=9, **options), A)


def test_a_stale_value_is_computed_again(runner: Any) -> None:
    call = Dialogue(refreshing(runner).refresh("old", None))
    assert call.step.calls[0].args[2] == 9
    step = call.answer([[1, b"d", b"1"]])
    assert step.calls[0].args[4:] == (b"d", b"1", "")
    call.answer([1])
    assert call.result == 5


def test_while_others_refresh_the_old_one_is_returned(runner: Any, heard: list[Any]) -> None:
    call = Dialogue(refreshing(runner).refresh("old", None))
    call.answer([follows()])
    assert call.result == "old"
    ((event),) = heard
    assert (type(event), event[1:3]) == (Shared, (True, 1))


@pytest.mark.parametrize(
    ("answer", "result"), [([[2, b"new"]], "new"), (OUT, "old"), (WRONG, "old")]
)
def test_what_was_refreshed_by_then(runner: Any, answer: Any, result: str) -> None:
    call = Dialogue(refreshing(runner).refresh("old", None))
    call.answer(answer)
    assert call.result == result


@pytest.mark.parametrize("wait", [None, 0.5])
def test_a_refresh_that_fails(runner: Any, heard: list[Any], wait: float | None) -> None:
    error = ValueError("no")

    def compute() -> Any:
        raise error

    call = Dialogue(refreshing(runner, compute=compute).refresh("old", None))
    assert ends(call.answer([[1]]), A)
    call.answer([1])
    assert call.result == "old"
    assert [event[1] for event in heard if type(event) is RefreshFailed] == [error]


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyboardInterrupt(), ProducerFailed), (Overtaken(), None)]
)
def test_a_refresh_that_is_broken_off(runner: Any, error: BaseException, raised: Any) -> None:
    def compute() -> Any:
        raise error

    call = Dialogue(refreshing(runner, compute=compute).refresh("old", None))
    call.answer([[1]])
    if raised is None:
        call.answer([1])
        assert call.result == "old"
    else:
        with pytest.raises(raised):
            call.answer([1])


@pytest.mark.parametrize(
    ("wait", "done", "result"), [(0, True, "old"), (0.5, True, 5), (0.5, False, "old")]
)
def test_a_refresh_in_the_background(runner: Any, wait: float, done: bool, result: Any) -> None:
    call = Dialogue(refreshing(runner).refresh("old", wait))
    step = call.answer([[1]])
    assert isinstance(step, Background)
    assert isinstance(step.renewal, FlightRenewal)
    work = step.steps

    def finish() -> None:
        background = Dialogue(work)
        background.answer([1])
        assert background.step is None

    step = call.answer(True)
    if wait:
        assert step.until == 1000.5
        assert not step.event.wait(0)
        if done:
            finish()
            assert step.event.wait(0)
        call.answer(done)
    assert call.result == result
    if not done or not wait:
        finish()


def test_a_background_that_is_full(runner: Any) -> None:
    call = Dialogue(refreshing(runner).refresh("old", 0.5))
    call.answer([[1]])
    assert ends(call.answer(False), A)
    call.answer([1])
    assert call.result == "old"
