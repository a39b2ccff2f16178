"""What the keeper does for a hold, to the second, and what it records of it. Time is faked."""

from __future__ import annotations

import json
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_redis_lock import events
from django_redis_lock.events import Crashed, Lost, Subject
from django_redis_lock.keeper import DeferredRelease, Keeper, SentOnce
from django_redis_lock.locking import causes, records, renewals
from django_redis_lock.locking.causes import cause
from django_redis_lock.locking.hold import Renewal, latest
from django_redis_lock.locking.records import (
    DAY,
    HOUR,
    MAX_EVENTS,
    CrashRecord,
    Event,
    Heartbeat,
    last_heartbeats,
    note_call,
    read_events,
)
from django_redis_lock.locking.renewals import Renewals
from django_redis_lock.protocol import Vanished, fingerprint, process_id
from django_redis_lock.protocol.identity import hostname
from django_redis_lock.protocol.keys import NEWS, events_key, lock_keys, process_key
from django_redis_lock.protocol.owner import HEARTBEAT_EVERY, SILENT_AFTER, Owner
from tests.support.clock import FakeClock, clock
from tests.support.holds import Nowhere, Pending, job, keeper, make, wanted
from tests.support.logs import logged

__all__ = ["clock", "keeper", "make"]

pytestmark = pytest.mark.usefixtures("keeper")

AWAY = redis.ConnectionError("away")
SUBJECT = Subject("report", "report", "nightly", "", "")


@pytest.fixture
def heard() -> Any:
    """The events that are emitted."""
    found: list[Any] = []
    events.subscribe(found.append)
    yield found
    events.unsubscribe(found.append)


# -- when ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lifetime", "options", "due"),
    [
        (30.0, {}, 1000.5),
        (0.9, {}, 1000.3),
        (0.9, {"deadline": 1000.2}, 1000.2),
        (None, {}, 1000.5),
        (30.0, {"warns_after": 0.25}, 1000.25),
        (30.0, {"deadline": 1002.0, "granted": True}, 1000.5),
        (30.0, {"deadline": 1000.5, "granted": True}, 1000.25),
        (None, {"deadline": 1000.5, "granted": True}, 1000.25),
    ],
)
def test_the_first_look(
    make: Any, lifetime: float | None, options: dict[str, Any], due: float
) -> None:
    granted = options.pop("granted", False)
    hold = make(lifetime, **options)
    hold.pending = Pending(lambda wait: None) if granted else None
    renewal = job(hold)
    assert renewal.due == pytest.approx(due)
    assert renewal.deadline_scale == (lifetime or math.inf)


def test_once_its_holder_is_described_a_lock_is_looked_at_less_often(make: Any) -> None:
    for lifetime, due in ((30.0, 1010.5), (None, 1010.5), (1.5, 1001.0)):
        renewal = job(make(lifetime))
        renewal.call(1000.5)
        renewal.answered(-1 if lifetime is None else int(lifetime * 1000), sent_at=1000.5)
        assert renewal.heartbeat is not None
        assert renewal.due == pytest.approx(due)


@pytest.mark.parametrize(
    ("lifetime", "renews", "failed_at", "due"),
    [
        (30.0, True, 1010.0, 1011.0),
        (30.0, True, 1029.5, 1029.75),  # A quarter of a second before the deadline.
        (30.0, True, 1029.8, 1030.8),
        (2.0, True, 1001.8, 1001.9),  # A twentieth of the lifetime.
        (0.6, True, 1000.1, 1000.15),
        (0.06, True, 1000.01, 1000.03),  # Not more often.
        (None, False, 1010.0, 1011.0),
    ],
)
def test_after_a_failure(
    make: Any, lifetime: float | None, renews: bool, failed_at: float, due: float
) -> None:
    renewal = job(make(lifetime, renews_for=math.inf if renews else -math.inf))
    renewal.failed(AWAY, failed_at)
    assert renewal.due == pytest.approx(due)


def test_after_a_failure_a_grant_without_a_lifetime_is_looked_at_before_it_ends(make: Any) -> None:
    renewal = job(make(None, deadline=1002.0))
    renewal.failed(AWAY, 1001.5)
    assert renewal.due == 1002.0


def test_a_failure_to_renew_is_a_warning_and_one_to_look_is_none(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "django_redis_lock.keeper")
    for renews_for, level in ((math.inf, "WARNING"), (-math.inf, "INFO"), (5.0, "INFO")):
        job(make(30, renews_for=renews_for)).failed(AWAY, 1006.0)
        assert caplog.records[-1].levelname == level


def test_of_many_locks_one_warns_in_a_minute(
    make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a process with a thousand locks fills the log of an outage."""
    caplog.set_level(logging.DEBUG, "django_redis_lock.keeper")
    locks = [job(make(300, renews_for=math.inf)) for _ in range(3)]
    for lock in locks:
        lock.server = locks[0].server

    def warnings() -> int:
        caplog.clear()
        for lock in locks:
            lock.failed(AWAY, 1006.0)
        assert len(caplog.records) == len(locks)
        return [record.levelname for record in caplog.records].count("WARNING")

    assert [warnings(), warnings()] == [1, 0]
    locks[0].server = Nowhere()
    assert warnings() == 1
    monkeypatch.setattr("django_redis_lock.threads.LOG_PAUSE_SECONDS", 0.0)
    assert warnings() == 3


@pytest.mark.parametrize(("renews", "last"), [(True, 1029.7), (False, 1029.99)])
def test_how_long_it_counts(make: Any, clock: FakeClock, renews: bool, last: float) -> None:
    """A lock that is renewed is lost while there is time left to stop."""
    renewal = job(make(30, renews_for=math.inf if renews else -math.inf))
    assert renewal.call(last) is not None
    assert renewal.call(1030.0 if not renews else 1029.76) is None
    assert renewal.hold.lost
    assert ("confirmed no renewal" in renewal.hold.reason) is renews


def test_a_loss_at_the_deadline_is_an_end_by_time(make: Any) -> None:
    for sent_at, reason in ((1030.0, causes.EXPIRED), (1029.9, causes.DELETED_OR_NO_DATA)):
        renewal = job(make(30))
        renewal.answered([b"", b"7", b"mine", b"", b""], sent_at=sent_at)
        assert renewal.hold.reason == reason


def test_a_hold_was_released_if_it_has_ended_and_was_not_lost(make: Any) -> None:
    hold, lost = make(30), make(30)
    assert not hold.released
    hold.end()
    assert hold.released
    lost.lose("it is gone")
    assert not lost.released


def test_of_two_questions_the_second_of_which_followed_the_first_the_second_counts(
    make: Any, clock: FakeClock
) -> None:
    hold = make(30)
    clock.now = 1000.2
    hold.held_until(1001.0, asked_at=1000.0)
    hold.held_until(1040.0, asked_at=1000.2)
    assert hold.deadline == 1040.0
    hold.end()
    hold.held_until(1050.0, asked_at=1000.3)
    assert hold.deadline == 1040.0


# -- what ------------------------------------------------------------------------------------------


def test_a_lock_that_is_held_for_long_is_warned_of_once(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    renewal = job(make(30, warns_after=5.0, label="nightly"))
    assert renewal.hold.warns_at == 1005.0
    for now in (1004.9, 1005.0, 1006.0):
        renewal.call(now)
        assert len(logged(caplog, "held", "report")) == (now >= 1005.0)
    assert "nightly" in caplog.text


def test_a_lock_whose_handle_is_gone_is_renewed_no_more(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    renewal = job(make(30, renews_for=math.inf))
    handle: Any = Renewals(renewal.hold, renewal)
    assert wanted(renewal.call(1001.0)) == 30_000
    del handle
    assert wanted(renewal.call(1002.0)) == 0
    assert "garbage-collected without release()" in caplog.text
    unrenewed = job(make(30))
    handle = Renewals(unrenewed.hold, unrenewed)
    del handle
    caplog.clear()
    assert unrenewed.call(1001.0) is not None
    assert not caplog.records


def test_a_handle_that_is_collected_inside_its_block_has_the_keeper_release_the_lock(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, keeper: Any
) -> None:
    hurried: list[Any] = []
    keeper.reschedule = lambda job, due: hurried.append((job, due))
    monkeypatch.setattr(renewals, "keeper", lambda: keeper)
    for ended in (False, True):
        hurried.clear()
        keeper.added.clear()
        hold = make(30)
        renewal = job(hold)
        handle: Any = Renewals(hold, renewal)
        handle.entered(2.0, 3.0)
        if ended:
            hold.end()
        del handle
        assert hurried == ([] if ended else [(renewal, 1000.0)])
        if not ended:
            assert renewal.call(1000.0) is None
            assert hold.released
            [release] = keeper.added
            assert isinstance(release, DeferredRelease)
            assert release._call.args[:1] == (b"token",)
            assert release._call.args[2:4] == (2000, 3000)
            assert renewal in keeper.discarded
    assert len(logged(caplog, "keeper", "inside its with block")) == 1


def test_a_handle_that_has_been_left_is_collected_without_further_ado(
    make: Any, monkeypatch: pytest.MonkeyPatch, keeper: Any
) -> None:
    hurried: list[Any] = []
    keeper.reschedule = lambda job, due: hurried.append(job)
    monkeypatch.setattr(renewals, "keeper", lambda: keeper)
    renewal = job(make(30))
    handle: Any = Renewals(renewal.hold, renewal)
    handle.entered(2.0, 3.0)
    handle.discard()
    assert keeper.discarded == [renewal]
    del handle
    assert not hurried


def test_a_lock_that_was_released_meets_no_second_release(
    make: Any, keeper: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The handle was collected while its release was under way."""
    ends: list[int] = []
    hold = make(30)
    hold.on_end = lambda: ends.append(1)
    renewal = job(hold)
    hold.end()
    renewal.collected = (2.0, 0.0)
    assert renewal.call(1000.0) is None
    assert ends == [1]
    assert not caplog.records
    assert [type(each) for each in keeper.added] == [DeferredRelease]


@pytest.mark.parametrize(
    ("options", "limit", "terms"),
    [
        ({}, 1, {"lifetime": "30000", "fence": "7"}),
        ({"name": "shown"}, 1, {"name": "shown"}),
        ({"renews_for": math.inf}, 1, {"renews": "1"}),
        ({}, 3, {"limit": "3"}),
        ({"subject": SUBJECT._replace(group="reports")}, 1, {"group": "reports"}),
        ({"subject": SUBJECT}, 1, {}),
    ],
)
def test_what_a_description_has_of_the_lock(
    make: Any, options: dict[str, Any], limit: int, terms: dict[str, str]
) -> None:
    hold = make(30, **options)
    hold.limit = limit
    fields = job(hold)._lock_fields()
    described = dict(zip(fields[::2], fields[1::2], strict=True))
    assert described == {"lifetime": "30000", "fence": "7", **terms}


def test_its_holder_is_described_until_redis_has_the_description(make: Any) -> None:
    hold = make(None, label="nightly")
    renewal = job(hold)
    call: Any = renewal.call(1000.5)
    assert {"nightly", hostname(), "lifetime", "0"} <= {*call.args}
    owner = hold.owner()
    assert (owner.id, owner.since, owner.process) == (fingerprint(b"token"), 7e-6, process_id())
    renewal.answered(-1, sent_at=1000.5)
    again: Any = renewal.call(1010.5)
    assert "nightly" not in again.args
    before = renewal.heartbeat
    renewal.answered(-1, sent_at=1010.5)
    assert renewal.heartbeat is before


def test_the_end_of_a_lock_that_was_held_for_no_time_is_not_recorded(
    make: Any, clock: FakeClock, keeper: Any
) -> None:
    renewal = job(make(30))
    renewal.emit("released")
    assert not keeper.added
    renewal.call(1000.5)
    clock.now = 1002.5
    renewal.emit("released")
    [record] = keeper.added
    assert isinstance(record, SentOnce)
    assert json.loads(record._call.args[0])["held"] == 2.5


def test_the_loss_of_one_of_several_names_is_recorded_for_the_others(
    make: Any, keeper: Any
) -> None:
    """Their renewals end with the hold that they share."""
    renewal = job(make(30))
    renewal.call(1000.5)
    assert renewal.hold.lose("with another name")
    assert renewal.call(1001.0) is None
    [record] = keeper.added
    assert json.loads(record._call.args[0]).items() >= {"what": "lost"}.items()
    assert keeper.discarded == [renewal]


def test_the_last_one_that_began_keeps_a_lock_alive(make: Any, keeper: Any) -> None:
    first, second = Renewal(Nowhere(), make(30)), Renewal(Nowhere(), make(30))
    second.server = first.server
    key = first.server, first.hold.keys.lock
    first.begin()
    assert latest[key] is first
    assert first.due == 1000.5
    second.begin()
    assert keeper.added == [first, second]
    left: list[Any] = []
    second.heartbeat = SimpleNamespace(leave=left.append)
    first.stop()
    assert latest[key] is second
    second.stop()
    assert key not in latest
    assert left == [second]


def test_a_loss_is_an_event_if_there_is_a_subject(
    make: Any, clock: FakeClock, heard: list[Any]
) -> None:
    make(30).lose("it is gone")
    assert not heard
    clock.now += 2
    make(30, subject=SUBJECT).lose("it is gone")
    assert heard == [Lost(SUBJECT, 0.0, "it is gone", 7)]


# -- why -------------------------------------------------------------------------------------------

TOKEN = fingerprint(b"token")


def told(**traces: bytes) -> list[bytes]:
    """The reply to RENEW of a lock that is not held."""
    names = ("events", "last_fence", "described", "heartbeat", "entry")
    return [traces.get(name, b"9" if name == "last_fence" else b"") for name in names]


def event(what: str, at: float, id: str = TOKEN, note: str = "") -> bytes:
    return b"%d " % (at * 1e6) + json.dumps({"what": what, "id": id, "note": note}).encode()


NEVER = (-math.inf, -math.inf)


@pytest.mark.parametrize(
    ("reply", "beats", "early", "reason"),
    [
        (told(), NEVER, True, causes.DELETED_OR_NO_DATA),
        (told(), NEVER, False, causes.EXPIRED),
        (told(), NEVER, None, causes.UNKNOWN),
        (told(heartbeat=b"1"), NEVER, True, causes.DELETED),
        (told(entry=b"1"), NEVER, True, causes.DELETED),
        (told(described=TOKEN.encode()), NEVER, True, causes.DELETED),
        (told(described=b"another"), NEVER, True, causes.DELETED_OR_NO_DATA),
        (told(last_fence=b"6"), NEVER, True, causes.NO_DATA),
        (told(last_fence=b"7"), NEVER, True, causes.DELETED_OR_NO_DATA),
        (told(last_fence=b""), NEVER, False, causes.NO_DATA),
        (told(), (1000.0, -math.inf), True, causes.NO_DATA),
        (told(), (999.0, -math.inf), True, causes.DELETED_OR_NO_DATA),
        (told(heartbeat=b"1"), (1001.0, 999.0), True, causes.DELETED),
        (told(heartbeat=b"1"), (1001.0, 1000.0), True, causes.NO_DATA),
        (told(events=event("reset", 1.0)), NEVER, True, "released by force"),
        (told(events=event("reset", 1.0, note="ops")), NEVER, None, "released by force by ops"),
        (told(events=event("reset", 1.0, id="x")), NEVER, False, causes.EXPIRED),
        (told(events=event("released", 1.0)), NEVER, False, causes.EXPIRED),
    ],
)
def test_why_a_lock_ended(
    make: Any, reply: Any, beats: tuple[float, float], early: bool | None, reason: str
) -> None:
    assert cause(reply, beats, early, make(30)) == reason


def test_of_a_chosen_token_only_events_since_the_acquisition_count(make: Any) -> None:
    hold = make(30)
    hold.attempt, hold.fence = b"attempt", 5_000_000
    fresh = {"last_fence": b"9999999"}
    for at, reason in ((4.999999, causes.EXPIRED), (5.0, "released by force")):
        assert cause(told(events=event("reset", at), **fresh), NEVER, False, hold) == reason


def test_why_is_asked_about_the_acquisition(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Nowhere()
    beat: Any = SimpleNamespace(sent_at=5.0, forgotten_at=3.0)
    monkeypatch.setattr(causes, "heartbeats", {server: beat})
    lock: Any = SimpleNamespace(keys=lock_keys(b"other"), _servers=(server,))
    assert causes.beats_so_far(server) == (5.0, 3.0)
    assert causes.beats_so_far(Nowhere()) == NEVER
    hold = make(30)
    hold.attempt = b"attempt"
    call, parse = causes.question(lock, b"token", True, hold)
    assert call.keys == hold.keys.renewed
    assert call.args[:3] == (b"token", 0, b"attempt")
    assert parse(told(heartbeat=b"1")) == causes.DELETED
    assert parse(5) == causes.UNKNOWN
    call, _ = causes.question(lock, b"token", None, None)
    assert call.keys == lock.keys.renewed
    assert call.args[:3] == (b"token", 0, b"")
    server.is_cluster = True
    assert causes.beats_so_far(server) == NEVER


def test_of_a_token_from_elsewhere_little_is_known() -> None:
    reset = told(events=event("reset", 1.0), last_fence=b"")
    assert cause(reset, NEVER, None, None, b"token") == "released by force"
    assert cause(told(last_fence=b""), (math.inf, 0), None, None, b"token") == causes.NO_DATA
    assert cause(told(last_fence=b""), (1e9, 1e9), None, None, b"token") == causes.UNKNOWN


# -- heartbeats ------------------------------------------------------------------------------------


@pytest.fixture
def beat(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> Any:
    """The heartbeat on a server, and a keeper that notes its jobs."""
    monkeypatch.undo()  # ``keeper`` has replaced ``join``.
    jobs: dict[Any, float | None] = {}

    class Noting:
        def __init__(self) -> None:
            self.subscribed: list[Any] = []

        def add(self, job: Any) -> None:
            jobs[job] = None

        def discard(self, job: Any) -> None:
            jobs.pop(job, None)

        def reschedule(self, job: Any, due: float) -> None:
            jobs[job] = due

        def __contains__(self, job: Any) -> bool:
            return job in jobs

        def subscribe(self, server: Any, channel: bytes, received: Any) -> Any:
            closed: list[int] = []
            self.subscribed.append(closed)
            return SimpleNamespace(close=lambda: closed.append(1), received=received)

    noting = Noting()
    monkeypatch.setattr(records, "keeper", lambda: noting)
    return SimpleNamespace(server=Nowhere(), jobs=jobs, keeper=noting)


def of_lock(beat: Any, make: Any, name: bytes = b"report") -> Renewal:
    hold = make(30)
    hold.keys = lock_keys(name)
    return Renewal(beat.server, hold)


def test_a_process_sends_one_heartbeat_for_all_locks_of_a_server(
    beat: Any, make: Any, clock: FakeClock
) -> None:
    one, two = of_lock(beat, make), of_lock(beat, make, b"other")
    heartbeat = Heartbeat.join(one)
    assert Heartbeat.join(two) is heartbeat
    assert list(beat.jobs.items()) == [(heartbeat, None)]
    assert len(beat.keeper.subscribed) == 1
    assert heartbeat.due == 1000.0
    assert heartbeat.call(1000.0) is heartbeat._call
    heartbeat.answered(1, sent_at=1000.25)
    assert heartbeat.due == 1000.25 + HEARTBEAT_EVERY
    assert heartbeat.sent_at == 1000.25


def test_it_goes_on_for_a_moment_after_the_last_lock(
    beat: Any, make: Any, clock: FakeClock
) -> None:
    """The next one may come soon."""
    one, two = of_lock(beat, make), of_lock(beat, make, b"other")
    heartbeat = Heartbeat.join(one)
    Heartbeat.join(two)
    heartbeat.answered(1, sent_at=1000.0)
    heartbeat.leave(two)
    assert beat.jobs[heartbeat] is None
    again = of_lock(beat, make)
    Heartbeat.join(again)
    heartbeat.leave(one)  # Another has its key by now.
    assert heartbeat.call(1000.5) is not None
    heartbeat.leave(again)
    assert beat.jobs[heartbeat] == 1000.0 + records.LINGER_SECONDS
    third = of_lock(beat, make)
    Heartbeat.join(third)
    assert beat.jobs[heartbeat] == 1010.0  # As it was.
    third.hold.end()  # An interrupt has kept it from leaving.
    heartbeat.due = 1001.0  # The keeper looks, as it was told to.
    assert heartbeat.call(1001.0) is None
    assert heartbeat not in beat.jobs
    assert beat.keeper.subscribed == [[1]]
    assert heartbeat.due == 1010.0
    assert heartbeat._subscription is None
    Heartbeat.join(of_lock(beat, make))
    assert heartbeat in beat.jobs
    assert len(beat.keeper.subscribed) == 2


def test_the_next_heartbeat_is_due_after_the_last_of_any_lock(
    beat: Any, make: Any, clock: FakeClock
) -> None:
    heartbeat = Heartbeat.join(of_lock(beat, make))
    heartbeat.answered(1, sent_at=1000.0)
    clock.now = 1003.0
    assert Heartbeat(beat.server).due == 1010.0
    assert Heartbeat(Nowhere()).due == 1003.0


def test_a_message_is_a_reason_to_look(beat: Any, make: Any, clock: FakeClock) -> None:
    one, two = of_lock(beat, make), of_lock(beat, make, b"other")
    heartbeat = Heartbeat.join(one)
    Heartbeat.join(two)
    for key, looked_at in ((b"other", [two]), (b"unknown", []), (None, [one, two])):
        beat.jobs.clear()
        heartbeat._received(key)
        assert beat.jobs == dict.fromkeys(looked_at, clock.now)


def test_a_heartbeat_that_redis_has_lost_is_noted(beat: Any, make: Any) -> None:
    heartbeat = Heartbeat.join(of_lock(beat, make))
    heartbeat.answered(0, sent_at=1000.0)  # The first one.
    assert heartbeat.forgotten_at == -math.inf
    heartbeat.answered(1, sent_at=1010.0)
    assert heartbeat.forgotten_at == -math.inf
    heartbeat.answered(0, sent_at=1020.0)
    assert heartbeat.forgotten_at == 1010.0
    heartbeat.answered(0, sent_at=1020.0 + DAY / 1000)  # Its lifetime was over.
    assert heartbeat.forgotten_at == 1010.0
    heartbeat.answered(0, sent_at=1019.0 + DAY / 500)  # Nearly.
    assert heartbeat.forgotten_at == 1020.0 + DAY / 1000


@pytest.mark.parametrize(
    ("error", "pause"),
    [
        (AWAY, HEARTBEAT_EVERY / 4),
        (redis.ResponseError("OOM"), HEARTBEAT_EVERY),
        (redis.exceptions.NoPermissionError("NOPERM"), math.inf),
    ],
)
def test_after_a_heartbeat_that_failed(
    beat: Any, make: Any, error: Exception, pause: float
) -> None:
    heartbeat = Heartbeat.join(of_lock(beat, make))
    heartbeat.failed(error, 1000.0)
    assert heartbeat.due == 1000.0 + pause


@pytest.mark.parametrize(
    ("process", "seen", "asks"),
    [
        ("p", SILENT_AFTER + 0.1, True),
        ("p", SILENT_AFTER, False),
        ("p", None, False),
        ("", SILENT_AFTER + 1, False),
    ],
)
def test_whose_heartbeat_is_asked_for(process: str, seen: float | None, asks: bool) -> None:
    assert bool(records.heartbeat_call(Owner("id", process=process, seen=seen))) is asks


def test_the_age_of_a_heartbeat() -> None:
    owner = Owner("id", process="p", seen=60.0)
    reply = [100_000_000, b"70000000"]
    for known, answer, seen in ((owner, reply, 30.0), (owner, None, 60.0), (owner, [0, b""], 60.0)):
        found = records.with_heartbeat(known, answer)
        assert found is not None
        assert found.seen == seen
    later = records.with_heartbeat(owner, [100_000_000, b"100000001"])
    assert later is not None
    assert later.seen == 0.0
    assert records.with_heartbeat(None, reply) is None
    just_seen = records.with_heartbeat(Owner("id", process="p"), reply)
    assert just_seen is not None
    assert just_seen.seen == 0.0
    ages = records._ages(["a", "b", "c"], [100_000_000, b"x", b"9" * 20, b"9" * 19])
    assert ages == {"c": 0.0}


@pytest.mark.parametrize("cluster", [True, False])
def test_the_heartbeats_of_several_processes(
    monkeypatch: pytest.MonkeyPatch, cluster: bool
) -> None:
    """On a cluster each is a call of its own, in one round trip."""
    now, beats = 100_000_000, {"a": b"70000000", "b": b"", "c": b"40000000"}
    client: Any = SimpleNamespace(nodes_manager=None) if cluster else object()

    def run(client: Any, call: Any, patience: float | None = None) -> Any:
        assert call.keys == tuple(map(process_key, "abc"))
        return SimpleNamespace(value=[now, *beats.values()])

    def run_all(client: Any, calls: Any) -> Any:
        assert [call.keys for call in calls] == [(process_key(name),) for name in "abc"]
        return [[now, beat] for beat in beats.values()]

    monkeypatch.setattr(records, "run_all" if cluster else "run", run_all if cluster else run)
    assert last_heartbeats(client, ["c", "", "b", "a", "c"]) == {"a": 30.0, "c": 60.0}
    assert last_heartbeats(client, ["", ""]) == {}


# -- what is recorded ------------------------------------------------------------------------------

OWNER = Owner("id", "host", 42, "main", "x" * 300, doing="GET /")


@pytest.mark.parametrize(
    ("what", "kept_for", "known"),
    [
        ("released", HOUR, ""),
        ("lost", DAY, '{"what": "reset", "id": "id"'),
        ("crashed", DAY, '{"what": "lost", "id": "id"'),
        ("reset", DAY, ""),
    ],
)
def test_what_is_recorded_of_an_end(what: str, kept_for: int, known: str) -> None:
    server: Any = SimpleNamespace(index_of=lambda index, key: index + key)
    call = note_call(b"key", what, OWNER, "why", 1.23456, "name", server=server)
    text, most, lifetime, at, before = call.args
    assert (most, lifetime, at, before) == (MAX_EVENTS, kept_for, "", known)
    news = kept_for == DAY
    assert call.keys == (events_key(b"key"), *([NEWS + b"key"] if news else []))
    assert json.loads(str(text)) == {
        **{"what": what, "id": "id", "pid": 42, "host": "host", "thread": "main"},
        **{"label": "x" * 200, "doing": "GET /", "note": "why", "name": "name", "held": 1.235},
        **({"lock": "key"} if news else {}),
    }
    bare = note_call(b"key", what, Owner("id"), at=5)
    assert bare.keys == (events_key(b"key"),)
    assert bare.args[3] == 5
    assert json.loads(str(bare.args[0])).keys() <= {"what", "id", "pid", "lock"}


def test_events_are_read_in_their_order() -> None:
    lines = [
        *(event("released", 3.0, "a"), event("crashed", 2.0, "a"), event("crashed", 4.0, "b")),
        *(b"no time {}", b"5 no json", b"5 []", b"-1 {}", b'5 {"pid": -1}', b'5 {"held": -1}'),
        *(b"%d {}" % 10**30, b'5 {"pid": %d}' % 10**30, b'5 {"held": "x"}', b"", b"5"),
    ]
    found = read_events(b"\n".join(lines))
    # The holder "a" went on.
    assert [(each.what, each.at, each.owner.id) for each in found] == [
        ("crashed", 4.0, "b"),
        ("released", 3.0, "a"),
    ]
    assert found[0].owner.pid == 0
    [one] = read_events(
        b'1000000 {"what": "lost", "pid": 7, "held": 2.5, "lock": "k", "name": "n"}'
    )
    assert (one.owner.pid, one.held, one.lock, one.name) == (7, 2.5, b"k", "n")


def vanished(**fields: Any) -> Vanished:
    flat = [str(each).encode() for item in fields.items() for each in item]
    return Vanished(9_000_000, flat)


def test_a_holder_that_has_vanished_is_an_event() -> None:
    [crash] = read_events(b"", vanished(id="a", fence=4_000_000, host="h", name="shown"))
    assert (crash.at, crash.what, crash.owner.id, crash.held) == (9.0, "crashed", "a", 5.0)
    assert crash.name == "shown"
    [ahead] = read_events(b"", vanished(id="a", since=10))
    assert ahead.held == 0.0
    [unknown] = read_events(b"", vanished(id="a"))
    assert unknown.held is None
    assert read_events(b"", vanished(host="h")) == ()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_crash_is_told_by_the_one_who_records_it(
    clock: FakeClock,
    heard: list[Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_first: bool,
) -> None:
    """Not if its holder has recorded a loss."""
    server: Any = Nowhere()
    done: list[Any] = []
    monkeypatch.setattr(Keeper, "discard", lambda keeper, job: done.append(job))
    crash = Event(9.0, "crashed", Owner("a", "h"), held=5.0)
    for subject in (SUBJECT, None):
        record = CrashRecord(server, b"report", crash, subject)
        assert record.due == 1000.0 + records.REPORT_SECONDS
        assert record._call.args[3] == 9_000_000
        record.answered(int(is_first), 1000.5)
    failed = CrashRecord(server, b"report", crash, None)
    failed.failed(AWAY, 1000.5)
    assert len(done) == 3
    assert len(logged(caplog, "keeper", "never released")) == (3 if is_first else 1)
    assert [type(each) for each in heard] == ([Crashed] if is_first else [])


def test_what_vanished_without_a_name_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Any] = []
    monkeypatch.setattr(records, "keeper", lambda: SimpleNamespace(add=added.append))
    server: Any = Nowhere()
    records.note_vanished(server, lock_keys(b"report"), vanished(host="h"), None)
    assert not added
    records.note_vanished(server, lock_keys(b"report"), vanished(id="a"), None)
    assert [type(each) for each in added] == [CrashRecord]
