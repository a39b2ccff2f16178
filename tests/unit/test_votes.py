"""A lock on several servers: what each reply and each round of replies means, and what is sent
next. No server runs, and time stands still."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import redis
import redis.asyncio
from redis.exceptions import BusyLoadingError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_redis_lock import AsyncRedlock, Redlock, TooFewServers
from django_redis_lock.contrib import redlock
from django_redis_lock.contrib.redlock import base, votes
from django_redis_lock.contrib.redlock.base import FENCE_LEAD_MICROSECONDS, Election
from django_redis_lock.contrib.redlock.votes import (
    VOTE,
    Ballot,
    QuorumAcquisition,
    QuorumHold,
    VotedRenewal,
    drift,
    majority,
    merged,
)
from django_redis_lock.contrib.topology.client import LazyCluster
from django_redis_lock.locking import causes
from django_redis_lock.protocol import EXTEND, Call, Extended, Refused, Taken, fingerprint
from django_redis_lock.protocol.acquisition import LAST_TRY_SECONDS, Clock, Vanished
from django_redis_lock.protocol.holder_scripts import HEARTBEATS, HELD, RESET
from django_redis_lock.protocol.keys import lock_keys, quorum_fence_key
from django_redis_lock.protocol.lock_scripts import RELEASE, RENEW
from django_redis_lock.transport import note_sent, server_of
from tests.events import no_listeners
from tests.support.clock import FakeClock, clock
from tests.unit.test_redlock_decisions import Ask, Pause, Queue

__all__ = ["clock", "no_listeners"]

# Quick cells, each of which is another decision.
pytestmark = [pytest.mark.sample(1), pytest.mark.usefixtures("no_listeners")]

KEYS = lock_keys(b"report")
GONE = [b"", b"", b"", b"", b""]  # RENEW's reply about a lock without a trace.


def replies(text: str) -> dict[int, Any]:
    """Of one server after the other: a grant with the fence 7 (g) or 9 (G), a refusal (r), no
    answer (x), and one that does not answer for now (b)."""
    kinds = {
        "g": Taken(1, 7, 0, 1000.0),
        "G": Taken(1, 9, 0, 1000.0),
        "r": Refused(5000, 0, 1000.0),
        "x": RedisConnectionError("away"),
        "b": BusyLoadingError("LOADING"),
    }
    return {place: kinds[letter] for place, letter in enumerate(text)}


@pytest.mark.parametrize(("servers", "needed"), [(3, 2), (4, 3), (5, 3), (6, 4), (7, 4)])
def test_more_than_half_are_a_majority(servers: int, needed: int) -> None:
    assert majority(servers) == needed


@pytest.mark.parametrize(("lifetime", "seconds"), [(math.inf, 0), (10, 0.102), (100, 1.002)])
def test_a_hundredth_and_two_milliseconds_of_a_lifetime_do_not_count(
    lifetime: float, seconds: float
) -> None:
    assert drift(lifetime) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("ggg", "passes won stored"),
        ("ggr", "passes won stored"),
        ("gGr", "passes won"),
        ("gGG", "passes won stored"),
        ("grr", "passes"),
        ("rgg", "passes"),
        ("xgg", "passes won stored"),
        ("xrg", "passes"),
        ("xxg", "too_few"),
        ("xbg", "passes too_few"),
        ("rxb", "passes too_few"),
        ("xxx", "too_few"),
        ("bbx", "passes too_few"),
        ("ggxxr", "passes"),
        ("gggxx", "passes won stored"),
        ("gggGG", "passes won"),
        ("ggGGG", "passes won stored"),
        ("xxrgg", "passes"),
    ],
)
def test_what_a_round_of_votes_means(clock: FakeClock, text: str, outcome: str) -> None:
    ballot = Ballot(len(text), replies(text), clock.now, 10)
    names = ("passes", "too_few", "won", *(("stored",) if ballot.won else ()))
    assert [name for name in names if getattr(ballot, name)] == sorted(
        outcome.split(), key=names.index
    )
    counts = [letter in "gG" for letter in text]
    assert [vote > 0 for vote in ballot.votes] == counts
    if any(counts):
        assert ballot.fence == (9 if "G" in text else 7)


@pytest.mark.parametrize(("lifetime", "lasts"), [(10, 9.898), (None, math.inf)])
def test_a_round_is_won_within_its_lifetime(
    clock: FakeClock, lifetime: float | None, lasts: float
) -> None:
    ballot = Ballot(3, replies("grg"), clock.now, lifetime)
    assert ballot.deadline == pytest.approx(1000 + lasts)
    assert ballot.votes == (ballot.deadline, -math.inf, ballot.deadline)
    clock.now = min(ballot.deadline - 0.001, 1e12)
    assert ballot.won
    clock.now = ballot.deadline
    assert not ballot.won


def test_the_first_in_order_is_that_which_counts(clock: FakeClock) -> None:
    by_place = replies("rgg")
    assert not Ballot(3, {n: by_place[n] for n in (0, 1, 2)}, clock.now, 10).won
    assert Ballot(3, {n: by_place[n] for n in (1, 2, 0)}, clock.now, 10).won


# -- the hold, and its renewal ---------------------------------------------------------------------


def make_hold(*of_servers: float, lifetime: float | None = 30.0, renews: bool = True) -> QuorumHold:
    """Until when each of three servers holds it."""
    hold = QuorumHold(lifetime, math.inf if renews else -math.inf)
    acquisition = QuorumAcquisition(b"token", 7, 1000.0, sorted(of_servers)[1])
    acquisition.votes = of_servers
    hold.begin(acquisition, KEYS)
    return hold


NEVER = -math.inf


class Said(NamedTuple):
    """That of a server: at which time it came, when it was asked, until when it holds the lock."""

    place: int
    now: float
    asked_at: float
    until: float


@pytest.mark.parametrize(
    ("said", "held", "deadline"),
    [
        ([], [1029, 1028, NEVER], 1028),
        ([Said(2, 1001, 1000.5, 1040)], [1029, 1028, 1040], 1029),
        ([Said(0, 1001, 1000.5, 1040)], [1040, 1028, NEVER], 1028),
        ([Said(0, 1001, 1000.5, NEVER)], [NEVER, 1028, NEVER], NEVER),
        # The second was asked before the first had answered: the shorter lifetime counts.
        ([Said(0, 1001, 1000, 1040), Said(0, 1002, 1000.9, 1050)], [1040, 1028, NEVER], 1028),
        ([Said(0, 1001, 1000, 1050), Said(0, 1002, 1000.9, 1040)], [1040, 1028, NEVER], 1028),
        ([Said(0, 1001, 1000, 1040), Said(1, 1002, 1000.9, 1050)], [1040, 1050, NEVER], 1040),
        ([Said(0, 1001, 1000, 1040), Said(0, 1002, 1001, 1050)], [1050, 1028, NEVER], 1028),
    ],
)
def test_a_hold_counts_as_long_as_a_majority_confirms_it(
    clock: FakeClock, said: list[Said], held: list[float], deadline: float
) -> None:
    hold = make_hold(1029, 1028, NEVER)
    for place, clock.now, asked_at, until in said:
        hold.vote(place, until, asked_at)
    assert hold.votes == held
    assert hold.deadline == deadline


def test_the_deadline_of_what_has_ended_stays(clock: FakeClock) -> None:
    hold = make_hold(1029, 1028, NEVER)
    hold.end()
    hold.vote(2, 1040, 1000.5)
    assert (hold.deadline, hold.votes[2]) == (1028, 1040)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that the keeper is given."""
    jobs: list[Any] = []
    keeping = SimpleNamespace(add=jobs.append, discard=lambda job: None)
    for module in (base, votes):
        monkeypatch.setattr(module, "keeper", lambda: keeping)
    return jobs


@pytest.fixture
def renewal(
    clock: FakeClock, added: list[Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., VotedRenewal]:
    """Makes what renews a hold at the first server, given as ``make_hold`` is."""
    server = server_of(redis.Redis(port=1))
    monkeypatch.setattr(VotedRenewal, "_note_described", lambda job: added.append("described"))

    def make(*of_servers: float, **options: Any) -> VotedRenewal:
        return VotedRenewal(server, make_hold(*of_servers, **options), 0)

    return make


def is_vote(call: Call | None) -> bool:
    assert call is not None
    assert call.script in (VOTE, RENEW)
    return call.script is VOTE


@pytest.mark.parametrize(
    ("first", "options", "lifetime"),
    [
        (1029, {}, None),
        (1029, {"renews": False}, None),
        (NEVER, {"renews": False}, None),
        (NEVER, {}, 30_000),
        (NEVER, {"lifetime": None}, 0),
    ],
)
def test_a_server_without_the_lock_gets_another_request_for_its_vote(
    renewal: Any, first: float, options: dict[str, Any], lifetime: int | None
) -> None:
    call = renewal(first, 1029, 1028, **options).call(1001.0)
    assert is_vote(call) is (lifetime is not None)
    if lifetime is not None:
        assert call.args == (b"token", lifetime, b"", 7)
        assert call.keys == (*KEYS, quorum_fence_key(b"report"))


def test_after_the_end_nothing_is_sent(renewal: Any) -> None:
    job = renewal(NEVER, 1029, 1028)
    job.hold.end()
    assert job.call(1001.0) is None


REFUSED = [0, 5000, 0]  # VOTE's reply.


def test_a_vote_that_is_lost_or_refused_is_not_requested_at_once(renewal: Any, added: Any) -> None:
    job = renewal(1029, 1029, 1028)
    job.heartbeat = object()
    for sent_at, reply, votes_after in (
        (1001.0, GONE, False),
        (1002.0, GONE, False),  # Nor is the pause longer with each renewal that fails.
        (1010.9, None, False),
        (1011.1, REFUSED, True),
        (1021.0, None, False),
        (1021.2, REFUSED, True),
    ):
        assert is_vote(job.call(sent_at)) is votes_after
        if reply:
            job.answered(reply, sent_at)
            assert job.hold.votes == [NEVER, 1029, 1028]
            assert (job.heartbeat, job.due) == (None, pytest.approx(sent_at + 10))
    assert not job.hold.ended
    assert not added


@pytest.mark.parametrize(("lifetime", "until"), [(30.0, 1035 - 0.302), (None, math.inf)])
def test_a_vote_counts_for_the_whole_lifetime(
    renewal: Any, clock: FakeClock, added: Any, lifetime: float | None, until: float
) -> None:
    job = renewal(NEVER, 1029, 1028, lifetime=lifetime)
    job.call(1005.0)
    job.answered([1, 8, 0], 1005.0)
    assert job.hold.votes[0] == pytest.approx(until)
    assert job.hold.deadline == 1029
    assert not added
    # The next request is a renewal, and its reply is a lifetime.
    assert not is_vote(job.call(1006.0))
    job.answered(20_000, 1006.0)
    assert job.hold.votes[0] == pytest.approx(1026 - 0.202)
    assert added == ["described"]


@pytest.mark.parametrize(("requests", "ended", "releases"), [(1, 0, 0), (1, 1, 1), (0, 1, 0)])
def test_a_vote_that_comes_after_the_release_is_given_back(
    renewal: Any, added: Any, requests: int, ended: int, releases: int
) -> None:
    job = renewal(NEVER if requests else 1029, 1029, 1028)
    assert is_vote(job.call(1005.0)) is bool(requests)
    if ended:
        job.hold.end()
    job.answered([1, 8, 0] if requests else 20_000, 1005.0)
    given_back = [each for each in added if each != "described"]
    assert len(given_back) == releases
    assert ("described" in added) is not bool(requests)
    for each in given_back:
        call = each.call(1005.0)
        assert (call.script, call.args[0], call.args[2]) == (RELEASE, b"token", 2000)


@pytest.mark.parametrize(
    ("sent_at", "reason"),
    [(1005.0, causes.DELETED_OR_NO_DATA), (1027.0, causes.EXPIRED), (1028.0, causes.EXPIRED)],
)
def test_it_is_lost_with_the_last_vote_that_made_a_majority(
    renewal: Any, sent_at: float, reason: str
) -> None:
    job = renewal(1027, 1029, NEVER)
    assert not is_vote(job.call(1005.0))
    job.answered(GONE, sent_at)
    assert (job.hold.lost, job.hold.reason) == (True, reason)


def test_a_vote_that_another_has_does_not_say_why_it_is_lost(renewal: Any) -> None:
    """Its lifetime is over, which the next call notices."""
    job = renewal(NEVER, 1029, 1028)
    assert is_vote(job.call(1001.0))
    job.hold.vote(1, NEVER, 1001.0)
    job.answered(REFUSED, 1001.0)
    assert (job.hold.ended, job.due) == (False, 1011)


@pytest.mark.parametrize(("deadline", "due"), [(1029, 1012), (1002, 1012), (1005, 1005)])
def test_what_has_lost_its_majority_is_looked_at_as_often_as_others(
    renewal: Any, deadline: float, due: float
) -> None:
    job = renewal(1029, deadline, 1001)
    job.heartbeat = object()
    job.schedule(1002.0)
    assert job.due == due


def test_a_server_that_does_not_answer_is_tried_again_soon(renewal: Any) -> None:
    job = renewal(1029, 1029, 1028)
    job.failed(RedisTimeoutError("frozen"), 1005.0)
    assert job.due == 1006


# -- what a majority says --------------------------------------------------------------------------


def held(token: bytes, pttl: int, *fields: bytes) -> list[Any]:
    return [token, pttl, list(fields), 0, 1]


ID = fingerprint(b"one").encode()
OUT = RedisConnectionError("away")


@pytest.mark.parametrize(
    ("script", "of_servers", "outcome"),
    [
        (RELEASE, [1, 1, 1], 1),
        (RELEASE, [1, 1, 0], 1),
        (RELEASE, [1, 0, 0], 0),
        (RELEASE, [1, 0, OUT], 1),  # A server that is down has not refused it.
        (RELEASE, [0, 0, OUT], 0),
        (EXTEND, [1, 1, 0], Extended.DONE),
        (EXTEND, [1, 1, OUT], Extended.DONE),
        (EXTEND, [1, 0, 0], Extended.NOT_OWNED),
        (EXTEND, [1, -1, 0], Extended.NOT_OWNED),
        (EXTEND, [-1, -1, 1], Extended.NO_LIFETIME),
        (
            RENEW,
            [[b"", b"a"], [b'{"what": "reset"}', b""], [b"", b""]],
            [b'{"what": "reset"}', b""],
        ),
        (RENEW, [[b"", b"a"], [b"", b"b"], OUT], [b"", b"a"]),
        # The latest heartbeat.
        (HEARTBEATS, [[100, b"10"], [1000, b"990"], [500, None]], [1000, b"990"]),
        (HELD, [None, None, held(b"one", 5000)], None),
        (HELD, [held(b"one", 5000), held(b"two", 5000), None], None),
        (HELD, [held(b"one", 5000), held(b"two", 4000), held(b"one", 3000)], (b"one", 3000, [])),
        (HELD, [held(b"one", 5000), held(b"one", 9000), held(b"one", -1)], (b"one", 9000, [])),
        (HELD, [held(b"one", -1), held(b"one", 9000), held(b"one", -1)], (b"one", -1, [])),
        (HELD, [held(b"one", 0), held(b"one", 0), OUT], (b"one", 0, [])),
        (HELD, [held(b"one", 5, b"x"), held(b"one", 5, b"y"), OUT], (b"one", 5, [b"x"])),
        (
            HELD,
            [held(b"one", 9, b"id", b"x"), held(b"one", 9, b"id", ID), held(b"one", 9)],
            (b"one", 9, [b"id", ID]),
        ),
    ],
)
def test_the_reply_of_a_majority(script: Any, of_servers: list[Any], outcome: Any) -> None:
    found: Any = merged(Call(script, (), ()), dict(enumerate(of_servers)), 3, "report")
    if script is HELD and found is not None:
        found = (found.token, found.pttl, found.fields)
    assert found == outcome


def test_too_few_replies_name_how_many_came() -> None:
    with pytest.raises(TooFewServers) as caught:
        merged(Call(RELEASE, (), ()), {0: 1, 1: OUT, 2: OUT}, 3, "report")
    assert (caught.value.reached, caught.value.servers) == (1, 3)
    assert caught.value.errors == (OUT, OUT)


# -- an election -----------------------------------------------------------------------------------


class Scripted(Redlock):
    """Its steps are what tests answer. The order of its servers is 0, 1, 2."""

    _ask_servers: Any = Ask
    _wait_at: Any = Queue
    _sleep: Any = Pause
    left: list[tuple[set[int], Call]]

    def _order(self) -> list[int]:
        return [*range(len(self.redis))]

    def _release_later(self, places: Any, release: Call) -> None:
        self.left.append(({*places}, release))

    def _on_contended(self, wait: float | None) -> None:
        self.contended.append(wait != 0)

    contended: list[bool]


def clients(count: int = 3, **options: Any) -> list[redis.Redis]:
    return [redis.Redis(port=7100 + number, **options) for number in range(count)]


@pytest.fixture
def make(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    def make(kind: Any = Scripted, count: int = 3, **options: Any) -> Any:
        lock = kind(clients(count), "report", **{"timeout": 10, **options})
        lock.left, lock.contended = [], []
        return lock

    monkeypatch.setattr(base, "SERVER_TIMEOUT_SECONDS", 0.25)  # Other tests have more patience.
    chance = SimpleNamespace(randbelow=lambda most: most - 50, token_hex=lambda n: "ab" * n)
    monkeypatch.setattr(base, "secrets", chance)
    base._clocks.clear()
    base._fences.clear()
    yield make
    base._clocks.clear()
    base._fences.clear()


def sent(error: Exception, sent: bool) -> Exception:
    note_sent(error, sent)
    return error


def unsent() -> Exception:
    return sent(RedisConnectionError("refused"), False)


def lost() -> Exception:
    return sent(RedisTimeoutError("frozen"), True)


@pytest.mark.parametrize(
    ("clocks", "fences", "floor"),
    [
        ({}, {}, 1),
        ({0: 5_000_000, 1: 7_000_000}, {}, 8_010_000),
        ({0: 5_000_000, 2: 7_000_000}, {0: 8_009_999}, 8_010_000),
        ({0: 5_000_000, 2: 7_000_000}, {0: 8_010_000}, 8_010_001),
        ({0: 5_000_000, 2: 7_000_000}, {1: 8_019_999}, 8_020_000),
        # Servers that have lost their data, and whose clocks were set back: not for ever.
        ({0: 5_000_000, 2: 7_000_000}, {1: 8_020_000}, 8_010_000),
        ({0: 5_000_000, 2: 7_000_000}, {1: 9_000_000}, 8_010_000),
    ],
)
def test_a_round_begins_with_a_fence_that_no_server_has_given(
    make: Any, clock: FakeClock, clocks: dict[int, int], fences: dict[int, int], floor: int
) -> None:
    lock = make()
    for place, microseconds in clocks.items():
        base._clocks[lock._servers[place]] = Clock(microseconds, clock.now - 1)
    for place, fence in fences.items():
        base._fences[lock._servers[place]] = fence
    election = Election(lock, lock._request(None, None, None, None)[0])
    step = next(election.vote())
    assert {call.args[3] for call in step.calls.values()} == {floor}
    assert next(election.vote(12)).calls[0].args[3] == 12
    assert FENCE_LEAD_MICROSECONDS == 10_000


@pytest.mark.parametrize(
    ("wait", "passed", "patience"),
    [
        (None, 0, 0.25),
        (60, 0, 0.25),
        (60, 59.9, 0.1 + LAST_TRY_SECONDS),
        (60, 61, LAST_TRY_SECONDS),
    ],
)
def test_a_round_does_not_outlast_the_wait(
    make: Any, clock: FakeClock, wait: float | None, passed: float, patience: float
) -> None:
    lock = make()
    election = Election(lock, lock._request(None, None, wait, None)[0])
    clock.now += passed
    assert next(election.vote()).patience == pytest.approx(patience)


def grant(fence: int = 5_000_000, *vanished: Any) -> list[Any]:
    return [1, fence, 4_000_000, *vanished]


REFUSAL = [0, 5000, 4_000_000]


class Dialogue:
    """One call of ``acquire``, and what the servers answer."""

    def __init__(self, lock: Any, wait: float | None = None, **changes: Any) -> None:
        self.lock = lock
        request, wait = lock._request(None, None, wait, None)
        self.steps = lock._obtain(request._replace(**changes), wait)
        self.request = request
        self.step: Any = None
        self.result: Any = "none yet"
        self.go_on(lambda: next(self.steps))

    def go_on(self, move: Callable[[], Any]) -> None:
        try:
            self.step = move()
        except StopIteration as end:
            self.step, self.result = None, end.value

    def answer(self, *of_servers: Any) -> None:
        """To a request that was sent to so many servers, in order."""
        assert len(self.step.calls) == len(of_servers)
        answers = dict(zip(self.step.calls, of_servers, strict=True))
        self.go_on(lambda: self.steps.send(answers))

    def send(self, answer: Any) -> None:
        self.go_on(lambda: self.steps.send(answer))

    def expect_votes(self) -> bytes:
        assert [call.script for call in self.step.calls.values()] == [VOTE] * len(self.lock.redis)
        return bytes(self.step.calls[0].args[0])

    def expect_release(self, *places: int) -> None:
        assert [*self.step.calls] == [*places]
        assert {call.script for call in self.step.calls.values()} == {RELEASE}


def test_a_majority_in_one_round(make: Any) -> None:
    call = Dialogue(make())
    token = call.expect_votes()
    assert call.step.calls[0].args[1:3] == (10_000, b"")
    call.answer(grant(), grant(), REFUSAL)
    assert call.result[:6] == (token, 5_000_000, 1000.0, pytest.approx(1009.898), b"", None)
    assert not call.result.contended
    assert call.result.votes == (call.result.deadline, call.result.deadline, -math.inf)
    assert call.request.may_hold == [(token, b"", 1)]
    assert call.lock.left == call.lock.contended == []
    servers = call.lock._servers
    assert [base._fences.get(server) for server in servers] == [5_000_000, 5_000_000, None]
    assert [base._clocks[server].server_us for server in servers] == [4_000_000] * 3


def test_a_fence_that_few_have_stored_is_sent_once_more(make: Any) -> None:
    call = Dialogue(make())
    call.answer(grant(5_000_000), grant(6_000_000), REFUSAL)
    call.expect_votes()
    assert call.step.calls[0].args[3] == 6_000_000
    call.answer(grant(6_000_000), grant(6_000_000), REFUSAL)
    assert call.result.fence == 6_000_000


def test_one_that_loses_while_its_fence_is_stored_waits(make: Any) -> None:
    call = Dialogue(make())
    call.answer(grant(5_000_000), grant(6_000_000), REFUSAL)
    call.answer(grant(6_000_000), REFUSAL, REFUSAL)
    assert call.lock.contended == [True]
    assert isinstance(call.step, Queue)
    assert call.step.place == 1


def test_the_queue_is_that_of_the_first_which_refuses(make: Any, clock: FakeClock) -> None:
    call = Dialogue(make(count=5))
    call.answer(grant(), REFUSAL, grant(), REFUSAL, unsent())
    call.expect_release(2)  # What it has before that it keeps.
    call.answer(1)
    assert (call.step.place, call.step.request.outage_patience) == (1, 0.0)
    # A grant there is taken with the token that the other servers have.
    assert (call.step.request.waiter, call.step.request.chosen) == (b"", True)
    call.send(object())
    call.expect_votes()
    call.answer(grant(), grant(), grant(), lost(), unsent())
    assert call.result.contended
    assert call.lock.contended == [True]


def test_a_wait_that_ends_gives_back_what_it_has(make: Any) -> None:
    call = Dialogue(make(count=5), 5)
    call.answer(grant(), REFUSAL, grant(), REFUSAL, unsent())
    call.expect_release(2)
    call.answer(1)
    assert call.step.place == 1
    call.send(None)
    call.expect_release(0)
    call.answer(1)
    assert call.result is None
    assert (call.request.may_hold, call.lock.left) == ([], [])


def test_what_a_queue_has_granted_is_given_back_too(make: Any) -> None:
    call = Dialogue(make(), 5)
    call.answer(REFUSAL, REFUSAL, unsent())
    assert call.step.place == 0
    call.send(object())
    token = call.expect_votes()
    call.answer(unsent(), REFUSAL, REFUSAL)  # The vote was not sent, but the grant is there.
    ((places, release),) = call.lock.left
    assert (places, release.args[0]) == ({0}, token)
    assert call.step.place == 1


@pytest.mark.parametrize("error", [lost(), unsent()])
def test_without_the_server_of_the_queue_the_others_are_asked(make: Any, error: Any) -> None:
    call = Dialogue(make())
    call.answer(REFUSAL, grant(), grant())
    call.expect_release(1, 2)
    call.answer(1, 1)
    call.go_on(lambda: call.steps.throw(error))
    call.expect_votes()
    call.answer(unsent(), REFUSAL, REFUSAL)
    # What the first has granted in the meantime is released there later.
    assert [places for places, _ in call.lock.left] == [{0}]
    assert call.step.place == 1
    call.send(object())
    call.answer(unsent(), grant(), grant())
    assert call.result.contended


def test_an_error_in_the_queue_that_is_no_outage_is_raised(make: Any) -> None:
    call = Dialogue(make())
    call.answer(REFUSAL, REFUSAL, REFUSAL)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        call.steps.throw(ResponseError("WRONGTYPE"))


@pytest.mark.parametrize(
    ("of_servers", "wait", "contended"),
    [([REFUSAL] * 3, 0, [False]), ([REFUSAL, grant(), unsent()], 0, [False])],
)
def test_a_single_try_does_not_wait(
    make: Any, of_servers: list[Any], wait: float, contended: list[bool]
) -> None:
    call = Dialogue(make(blocking=False))
    call.answer(*of_servers)
    if grant() in of_servers:
        call.expect_release(1)
        call.answer(1)
    assert (call.result, call.lock.contended) == (None, contended)
    assert call.request.may_hold == []


class TestLostReplies:
    """A request that may have been carried out later must not end a later grant."""

    def test_the_token_changes_with_it(self, make: Any) -> None:
        call = Dialogue(make())
        token = call.expect_votes()
        call.answer(REFUSAL, lost(), grant())
        call.expect_release(2)
        call.answer(1)
        ((places, release),) = call.lock.left
        assert places == {1}
        assert (release.script, release.args[0]) == (RELEASE, token)
        assert call.request.may_hold == [(call.step.request.token, b"", 1)]
        assert call.step.request.token != token
        call.send(object())
        later = call.expect_votes()
        assert later != token
        call.answer(REFUSAL, REFUSAL, REFUSAL)
        # It has a reply to each request with that one.
        assert (call.step.request.token, len(call.lock.left)) == (later, 1)
        call.send(object())
        call.answer(grant(), grant(), REFUSAL)
        assert call.result.token == later

    def test_what_came_before_the_queue_is_given_back_with_the_old_one(self, make: Any) -> None:
        call = Dialogue(make())
        token = call.expect_votes()
        call.answer(grant(), REFUSAL, lost())
        call.expect_release(0)
        assert call.step.calls[0].args[0] == token
        call.answer(1)
        assert call.step.request.token != token
        ((places, _),) = call.lock.left
        assert places == {2}

    def test_a_release_without_a_reply_is_repeated(self, make: Any) -> None:
        call = Dialogue(make())
        token = call.expect_votes()
        call.answer(REFUSAL, grant(), grant())
        call.expect_release(1, 2)
        call.answer(1, lost())
        ((places, release),) = call.lock.left
        assert (places, release.args[0]) == ({2}, token)
        assert call.step.request.token != token

    def test_what_was_not_sent_is_not_repeated(self, make: Any) -> None:
        call = Dialogue(make())
        token = call.expect_votes()
        call.answer(REFUSAL, unsent(), REFUSAL)
        assert (call.step.request.token, call.lock.left) == (token, [])

    def test_but_for_a_server_that_had_granted_before(self, make: Any) -> None:
        call = Dialogue(make())
        call.answer(grant(), REFUSAL, REFUSAL)
        call.send(object())
        call.answer(unsent(), grant(), REFUSAL)
        call.expect_release(1)
        call.answer(1)
        assert call.lock.left[0][0] == {0}
        assert call.step.place == 2

    def test_a_chosen_token_gets_another_attempt(self, make: Any, monkeypatch: Any) -> None:
        numbers = iter(range(9))
        chance = SimpleNamespace(token_hex=lambda n: f"{next(numbers):0{2 * n}x}")
        lock = make()
        request, wait = lock._request(None, None, None, "chosen")
        monkeypatch.setattr(base, "secrets", chance)
        call = Dialogue.__new__(Dialogue)
        call.lock, call.request = lock, request
        call.steps = lock._obtain(request, wait)
        call.go_on(lambda: next(call.steps))
        assert call.expect_votes() == b"chosen"
        first = call.step.calls[0].args[2]
        assert first == request.attempt != b""
        call.answer(REFUSAL, lost(), REFUSAL)
        assert (call.step.request.token, call.step.request.attempt) == (b"chosen", b"0" * 16)
        assert lock.left[0][1].args[5] == first
        call.send(object())
        call.answer(grant(), grant(), grant())
        assert call.result[4] == b"0" * 16


class TestTooFew:
    @pytest.mark.parametrize(
        ("of_servers", "wait", "raises"),
        [
            ([unsent(), unsent(), REFUSAL], None, True),
            ([unsent(), unsent(), REFUSAL], 5, True),
            ([unsent(), unsent(), REFUSAL], 0, True),
            # A majority answers; with a deadline, refusals are waited for.
            ([unsent(), BusyLoadingError("LOADING"), REFUSAL], 5, False),
            ([unsent(), BusyLoadingError("LOADING"), REFUSAL], None, True),
            ([unsent(), BusyLoadingError("LOADING"), REFUSAL], 0, True),
        ],
    )
    def test_in_the_first_round(
        self, make: Any, of_servers: list[Any], wait: float | None, raises: bool
    ) -> None:
        lock = make() if wait != 0 else make(blocking=False)
        call = Dialogue(lock, wait or None)
        if raises:
            with pytest.raises(TooFewServers):
                call.answer(*of_servers)
        else:
            call.answer(*of_servers)
            assert call.step.seconds == pytest.approx(0.075)

    def test_one_with_a_fallback_does_not_wait_for_refusals(self, make: Any) -> None:
        call = Dialogue(make(), 5, outage_patience=3.0)
        with pytest.raises(TooFewServers):
            call.answer(unsent(), BusyLoadingError("LOADING"), REFUSAL)

    def test_later_it_waits_longer_and_longer(self, make: Any, clock: FakeClock) -> None:
        """With a random part of as much again, so that callers do not come at the same moments."""
        call = Dialogue(make(), 100)
        call.answer(REFUSAL, REFUSAL, REFUSAL)
        call.send(object())
        pauses = []
        for _ in range(7):
            call.expect_votes()
            call.answer(unsent(), unsent(), REFUSAL)
            pauses.append(round(call.step.seconds, 3))
            call.send(None)
        assert pauses == [0.075, 0.15, 0.3, 0.6, 1.2, 1.5, 1.5]
        clock.now += 99.9
        call.answer(unsent(), unsent(), REFUSAL)
        assert call.step.seconds == pytest.approx(0.1)
        clock.now += 0.1
        call.send(None)
        with pytest.raises(TooFewServers):
            call.answer(unsent(), unsent(), REFUSAL)
        assert call.lock.contended == [True]

    def test_after_it_the_pause_is_short_again(self, make: Any) -> None:
        call = Dialogue(make(), 100)
        call.answer(REFUSAL, REFUSAL, REFUSAL)
        for pauses in (2, 1):
            call.send(object())
            for expected in (0.075, 0.15)[:pauses]:
                call.answer(unsent(), unsent(), REFUSAL)
                assert call.step.seconds == pytest.approx(expected)
                call.send(None)
            call.answer(REFUSAL, REFUSAL, unsent())

    def test_what_few_have_granted_is_given_back(self, make: Any) -> None:
        call = Dialogue(make(), 5)
        call.answer(unsent(), unsent(), grant())
        call.expect_release(2)
        with pytest.raises(TooFewServers) as caught:
            call.answer(1)
        assert (caught.value.reached, len(caught.value.errors)) == (1, 2)


def test_votes_that_come_too_late_are_given_back(make: Any, clock: FakeClock) -> None:
    call = Dialogue(make(), 100)
    clock.now += 9.95
    call.answer(grant(), grant(), grant())
    call.expect_release(0, 1, 2)
    call.answer(1, 1, 1)
    call.expect_votes()
    assert call.lock.contended == []
    call.answer(grant(), grant(), grant())
    assert call.result.contended


def test_who_vanished_is_recorded(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(base, "note_vanished", lambda *of_it: noted.append(of_it))
    lock = make()
    call = Dialogue(lock)
    call.answer(grant(5_000_000, [4_000_000, [b"id", b"abc"]]), grant(), REFUSAL)
    vanished = Vanished(4_000_000, [b"id", b"abc"])
    assert noted == [(lock._servers[0], lock.keys, vanished, lock.subject)]


# -- the arguments, and the other methods ----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 0.25),
        ({"timeout": 30}, 0.25),
        ({"timeout": 0.4}, 0.1),
        ({"timeout": 30, "server_timeout": 2}, 2),
    ],
)
def test_how_long_a_server_may_take(make: Any, options: dict[str, Any], seconds: float) -> None:
    assert make(Redlock, **{"timeout": None, **options}).server_timeout == seconds


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"timeout": 0.01}, None),
        ({"timeout": 0.009}, "timeout must be at least 0.01 seconds"),
        ({"replicas": 1}, "replicas are for a lock on one server"),
        ({"limit": 2}, "limit must be 1"),
        ({"limit": 1}, None),
        ({"redis": "redis://localhost"}, "needs their clients, not 'redis://localhost'"),
        ({"redis": redis.Redis(port=7100)}, "needs their clients, not <redis"),
        ({"redis": [redis.Redis(port=7100 + n) for n in range(2)]}, "at least 3 of them, not 2"),
        ({"redis": [redis.Redis(port=7100)] * 3}, "must be different ones"),
        ({"redis": [LazyCluster([("one", 1)], {})] * 3}, "no cluster, no Sentinel"),
    ],
)
def test_arguments_of_a_lock_on_several_servers(options: dict[str, Any], error: str | None) -> None:
    options = {"timeout": 5, "redis": clients(), "name": "report", **options}
    if error is None:
        Redlock(**options)
    else:
        with pytest.raises((TypeError, ValueError), match=error):
            Redlock(**options)


def test_threads_and_tasks_wait_and_sleep_in_their_own_ways(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ThreadWaiter", "TaskWaiter"):
        waiter = SimpleNamespace(wait=lambda name=name: name)
        monkeypatch.setattr(base, name, lambda *of_it, waiter=waiter: waiter)
    monkeypatch.setattr(votes.time, "sleep", lambda seconds: "a thread sleeps")
    monkeypatch.setattr(votes.time, "asleep", lambda seconds: "a task sleeps")
    tasks = [redis.asyncio.Redis(port=7100 + number) for number in range(3)]
    of_threads, of_tasks = Redlock(clients(), "report"), AsyncRedlock(tasks, "report")
    assert of_threads._wait_at(0, None) == "ThreadWaiter"
    assert of_tasks._wait_at(0, None) == "TaskWaiter"
    assert (of_threads._sleep(1), of_tasks._sleep(1)) == ("a thread sleeps", "a task sleeps")


@pytest.mark.parametrize(
    ("name", "order"), [("report", [2, 0, 1]), ("nightly", [0, 1, 2]), ("rates", [1, 2, 0])]
)
def test_processes_of_all_versions_wait_in_the_same_order(name: str, order: list[int]) -> None:
    assert Redlock(clients(), name)._order() == order
    assert {*Redlock(clients(), name)._calls(Call(HELD, (), ()))} == {0, 1, 2}
    assert [*Redlock(clients(), name)._calls(Call(HELD, (), ()))] == order[::-1]


def test_the_first_client_encodes_the_name_and_its_server_has_the_metrics() -> None:
    latin, *others = clients()
    latin = redis.Redis(port=7199, encoding="latin-1")
    lock = Redlock([latin, *others], "é")
    assert lock.keys.lock == b"\xe9"
    assert lock._server() is server_of(latin)


@pytest.mark.parametrize(
    ("replace", "of_servers", "held"),
    [
        ("1", [1, 1, 0], [1020 - 0.202, 1020 - 0.202, NEVER]),
        ("1", [1, OUT, 1], [1020 - 0.202, 1008, 1020 - 0.202]),
        ("1", [1, -1, 1], [1020 - 0.202, NEVER, 1020 - 0.202]),
        ("0", [1, 1, OUT], [1029 - 0.202, 1028 - 0.202, 1007]),
    ],
)
def test_what_an_extension_has_changed_on_each_server(
    make: Any, replace: str, of_servers: list[Any], held: list[float]
) -> None:
    lock = make(Redlock)
    lock.local.hold = make_hold(1009, 1008, 1007)
    call = Call(EXTEND, KEYS, (b"token", 20_000, replace, b"", b""))
    answer = lock._merge(call, 1000.0, dict(enumerate(of_servers)))
    assert (answer.value, answer.sent_twice) == (Extended.DONE, False)
    assert lock.local.hold.votes == pytest.approx(held)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_lifetime_begins_when_it_is_requested(
    make: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """And not with the reply."""
    patience: list[float] = []

    def ask(servers: Any, calls: Any, seconds: float) -> dict[int, int]:
        assert len(servers) == len(calls) == 3
        clock.now += 5
        patience.append(seconds)
        return dict.fromkeys(calls, 1)

    async def aask(servers: Any, calls: Any, seconds: float) -> dict[int, int]:
        return ask(servers, calls, seconds)

    monkeypatch.setattr(redlock, "ask", ask)
    monkeypatch.setattr(redlock, "_aask", aask)
    tasks = [redis.asyncio.Redis(port=7100 + number) for number in range(3)]
    lock: Any = AsyncRedlock(tasks, "report", timeout=10) if asynchronous else make(Redlock)
    call = Call(EXTEND, KEYS, (b"token", 20_000, "1", b"", b""))

    async def in_a_task() -> tuple[Any, Any]:
        lock.local.hold = make_hold(1009, 1008, 1007)
        return await lock._run(call), lock.local.hold

    if asynchronous:
        answer, hold = asyncio.run(in_a_task())
    else:
        lock.local.hold = hold = make_hold(1009, 1008, 1007)
        answer = lock._run(call)
    assert answer.value == Extended.DONE
    assert hold.votes == [pytest.approx(1020 - 0.202)] * 3
    assert patience == [0.25]


def test_an_extension_is_renewed_from_then_on(make: Any) -> None:
    lock, due = make(Redlock), []
    lock._prolonged(make_hold(1009, 1008, 1007), 1020.0, 1001.0)  # Of a token from elsewhere.
    lock.local.renewal = SimpleNamespace(reschedule=due.append)
    lock._prolonged(make_hold(1009, 1008, 1007), 1020.0, 1001.0)
    assert due == [1001.0]


def test_a_release_is_repeated_where_there_was_no_reply(make: Any, added: list[Any]) -> None:
    lock = make(Redlock)
    release = lock._release_call(b"token", None)
    answer = lock._merge(release, 1000.0, {0: 1, 1: OUT, 2: 0})
    assert answer.value == 1
    assert [job.server for job in added] == [lock._servers[1]]
    added.clear()
    lock._merge(Call(HELD, KEYS, ()), 1000.0, {0: None, 1: OUT, 2: None})
    assert not added
    lock._hand_over(release)
    assert [job.server for job in added] == [*lock._servers]
    assert [job.call(1000.0) for job in added] == [release] * 3
    assert [job.call(1000.0 + 3601) for job in added] == [None] * 3


ONE = held(b"one", 5000)


@pytest.mark.parametrize(
    ("holders", "resets", "outcome"),
    [
        ([None] * 5, None, False),
        ([ONE] * 5, [1] * 5, True),
        ([ONE, ONE, None, None, None], [1] * 2, False),
        ([ONE, ONE, ONE, OUT, OUT], [1] * 3, True),
        ([ONE, ONE, ONE, OUT, OUT], [1, OUT, 1], TooFewServers),
        ([ONE, ONE, ONE, None, OUT], [1, OUT, 1], True),
        ([OUT, OUT, OUT, None, None], None, TooFewServers),
    ],
)
def test_a_reset_ends_it_on_each_server(
    make: Any, holders: list[Any], resets: list[Any] | None, outcome: Any
) -> None:
    lock = make(count=5)
    steps = lock._reset_steps()
    asked = next(steps)
    assert ([*asked.calls], asked.patience) == ([4, 3, 2, 1, 0], 0.25)
    answers: Any = dict(enumerate(holders))

    def end() -> bool:
        if resets is not None:
            step = steps.send(answers)
            assert {call.script for call in step.calls.values()} == {RESET}
            assert [*step.calls] == [n for n in (4, 3, 2, 1, 0) if holders[n] is ONE]
            ended: Any = dict(zip(step.calls, resets, strict=True))
        else:
            ended = answers
        with pytest.raises(StopIteration) as end:
            steps.send(ended)
        return bool(end.value.value)

    if isinstance(outcome, bool):
        assert end() is outcome
    else:
        with pytest.raises(outcome):
            end()
