"""A hold's clock: until when it counts, and what the keeper decides for it. Time is faked."""

from __future__ import annotations

import logging
import math
import sys
import threading
from typing import Any

import pytest

from django_redis_lock import threads
from django_redis_lock.contrib.several_names.members import MultiHold
from django_redis_lock.locking import causes
from django_redis_lock.locking import hold as hold_module
from django_redis_lock.locking.hold import CHECK_INTERVAL_SECONDS, DESCRIBE_AFTER
from django_redis_lock.locking.local_state import Entry
from django_redis_lock.protocol import printable
from tests.support.background import Background
from tests.support.clock import FakeClock, clock
from tests.support.holds import NOTHING_LEFT, FakeKeeper, Pending, job, keeper, make, wanted

__all__ = ["clock", "keeper", "make"]


class TestCounting:
    def test_a_hold_is_valid_until_its_deadline(self, make: Any, clock: FakeClock) -> None:
        hold = make(30)
        for clock.now, counts in ((1000.0, True), (1029.999, True), (1030.0, False)):
            assert hold.is_valid is counts
            assert hold.lost is not counts

    def test_without_a_lifetime_it_counts_forever(self, make: Any, clock: FakeClock) -> None:
        hold = make(None)
        clock.now += 1e9
        assert hold.is_valid
        assert not hold.lost

    def test_released_it_does_not_count_and_is_not_lost(self, make: Any, clock: FakeClock) -> None:
        hold = make(30)
        hold.end()
        clock.now += 60
        assert not hold.is_valid
        assert not hold.lost

    def test_what_the_server_confirms_counts(self, make: Any, clock: FakeClock) -> None:
        hold = make(30)
        clock.now = 1020
        hold.held_until(1050, asked_at=1019)
        clock.now = 1049
        assert hold.is_valid
        hold.held_until(1049.5, asked_at=1048)
        clock.now = 1049.5
        assert hold.lost

    def test_of_two_answers_whose_questions_overlapped_the_shorter_counts(
        self, make: Any, clock: FakeClock
    ) -> None:
        """Nobody knows which of the two the server carried out last."""
        for first, second in ((1001.0, 1040.0), (1040.0, 1001.0)):
            clock.now = 1000.0
            hold = make(30)
            clock.now = 1000.2
            hold.held_until(first, asked_at=1000.0)
            hold.held_until(second, asked_at=1000.1)
            assert hold.deadline == 1001.0

    def test_what_is_asked_after_that_counts_alone(self, make: Any, clock: FakeClock) -> None:
        hold = make(30)
        clock.now = 1000.2
        hold.held_until(1001.0, asked_at=1000.0)
        clock.now = 1000.4
        hold.held_until(1040.0, asked_at=1000.3)
        assert hold.deadline == 1040.0

    def test_a_forked_child_does_not_hold_it(
        self, make: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hold = make(30)
        monkeypatch.setattr(threads, "_process", threads.Process(-1))
        assert hold.from_parent_process
        assert not hold.is_valid
        assert not hold.lost


class TestGrant:
    """A hold whose full lifetime is not confirmed yet."""

    def test_it_counts_as_long_as_the_grant(self, make: Any, clock: FakeClock) -> None:
        hold = make(30, deadline=1002.0)
        hold.pending = Pending(lambda wait: None)
        clock.now = 1001.9
        assert hold.is_valid
        clock.now = 1002.0
        assert hold.lost

    def test_it_asks_before_it_calls_itself_lost(self, make: Any, clock: FakeClock) -> None:
        hold = make(30, deadline=1002.0)
        hold.pending = Pending(lambda wait: 1030.0)
        clock.now = 1002.0
        assert not hold.lost
        assert hold.pending is None
        clock.now = 1030.0
        assert hold.lost

    def test_a_grant_that_was_over_is_a_lost_lock(self, make: Any) -> None:
        told: list[int] = []
        hold = make(30, deadline=1002.0, on_lost=lambda: told.append(1))
        hold.pending = Pending(lambda wait: -math.inf)
        hold.confirm()
        assert hold.lost
        assert told == [1]

    def test_the_answer_does_not_undo_a_later_change(self, make: Any, clock: FakeClock) -> None:
        """``extend(0.5, replace_ttl=True)`` right after a grant."""
        hold = make(30, deadline=1002.0)
        hold.pending = Pending(lambda wait: 1030.0)
        clock.now = 1000.1
        hold.held_until(1000.55, asked_at=1000.05)
        clock.now = 1000.55
        assert hold.lost

    def test_the_keeper_may_end_the_hold_at_the_same_time(
        self, make: Any, clock: FakeClock
    ) -> None:
        hold = make(30, deadline=1002.0)
        hold.pending = Pending(lambda wait: hold.lose("its lifetime ran out") and None)
        clock.now = 1002.0
        assert hold.lost

    def test_another_thread_may_confirm_at_the_same_time(self, make: Any, clock: FakeClock) -> None:
        hold = make(30, deadline=1002.0)

        def ask(wait: bool) -> float:
            hold.pending = None  # As the keeper does when its own question is answered.
            return 1030.0

        hold.pending = Pending(ask)
        clock.now = 1002.0
        assert not hold.lost


class TestLosing:
    def test_on_lost_is_called_once(
        self, make: Any, clock: FakeClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        told: list[int] = []
        hold = make(30, on_lost=lambda: told.append(1))
        clock.now += 3
        assert hold.lose("its key was deleted", lambda: told.append(0))
        assert not hold.lose("again", lambda: told.append(2))
        assert told == [0, 1]
        assert hold.lost
        assert not hold.is_valid
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        for part in ("report", "fence 7", "3.000 s", "its key was deleted"):
            assert part in record.getMessage()
        assert "token" not in record.getMessage()

    def test_what_was_released_is_not_lost(self, make: Any) -> None:
        told: list[int] = []
        hold = make(30, on_lost=lambda: told.append(1))
        hold.end()
        hold.lose("its key is gone")
        assert not hold.lost
        assert not told

    def test_a_broken_on_lost_is_logged(self, make: Any, caplog: pytest.LogCaptureFixture) -> None:
        def on_lost() -> None:
            raise ZeroDivisionError

        make(30, on_lost=on_lost).lose("test")
        assert "on_lost" in caplog.records[-1].getMessage()
        assert caplog.records[-1].exc_info

    def test_names_in_the_log_take_one_short_line(self) -> None:
        assert printable(b"a\nb\x00\xff") == r"a\nb\x00\xff"
        assert len(printable(b"a" * 1000)) <= 120


@pytest.mark.usefixtures("keeper")
class TestRenewal:
    def test_it_names_the_holder_after_a_while_and_renews_nothing(
        self, make: Any, clock: FakeClock
    ) -> None:
        renewal = job(make(30, label="nightly"))
        assert renewal.due == clock.now + DESCRIBE_AFTER
        call = renewal.call(renewal.due)
        assert call is not None
        assert wanted(call) == 0
        assert "nightly" in call.args

    def test_what_is_not_renewed_is_looked_at_as_often(self, make: Any, keeper: FakeKeeper) -> None:
        """So that its holder hears of it when it is reset."""
        for lifetime, pause in ((30, 10), (None, CHECK_INTERVAL_SECONDS)):
            renewal = job(make(lifetime))
            renewal.call(1000.5)
            renewal.answered(29_500 if lifetime else -1, sent_at=1000.5)
            assert renewal.due == 1000.5 + pause
            assert wanted(renewal.call(1000.5 + pause)) == 0
            renewal.answered(NOTHING_LEFT, sent_at=1000.5 + pause)
            assert renewal.hold.lost

    def test_on_lost_is_called_at_the_deadline_at_the_latest(
        self, make: Any, clock: FakeClock
    ) -> None:
        renewal = job(make(30))
        renewal.call(1025.0)
        renewal.answered(5_000, sent_at=1025.0)
        assert renewal.due == 1030.0
        clock.now = 1030.0
        assert renewal.call(1030.0) is None
        assert renewal.hold.lost

    def test_it_renews_at_a_third_of_the_lifetime(self, make: Any) -> None:
        renewal = job(make(30, renews_for=math.inf))
        renewal.call(1000.5)
        renewal.answered(30_000, sent_at=1000.5)
        assert renewal.due == 1010.5
        assert wanted(renewal.call(1010.5)) == 30_000
        renewal.answered(30_000, sent_at=1010.5)
        assert renewal.hold.deadline == 1040.5

    def test_a_short_lifetime_is_renewed_before_the_holder_is_named(self, make: Any) -> None:
        assert job(make(0.3, renews_for=math.inf)).due == pytest.approx(1000.1)

    def test_it_renews_no_longer_than_it_may(self, make: Any, clock: FakeClock) -> None:
        renewal = job(make(30, renews_for=45))
        renewal.call(1010.0)
        renewal.answered(30_000, sent_at=1010.0)
        assert wanted(renewal.call(1020.0)) == 25_000
        renewal.answered(25_000, sent_at=1020.0)
        assert renewal.hold.deadline == 1045.0
        clock.now = 1045.0
        assert renewal.call(1045.0) is None
        assert renewal.hold.lost

    def test_failures_are_made_up_for_until_shortly_before_the_deadline(
        self, make: Any, keeper: FakeKeeper
    ) -> None:
        renewal, now = job(make(30, renews_for=math.inf)), 1010.0
        attempts = 0
        while not keeper.discarded:
            if renewal.call(now) is not None:
                attempts += 1
                renewal.failed(ConnectionError("away"), now + 0.01)
                assert now < renewal.due <= now + 1.02
                now = renewal.due
        assert attempts >= 19
        assert 1029 < now < 1030
        assert renewal.hold.lost

    def test_one_success_is_enough(self, make: Any) -> None:
        renewal = job(make(30, renews_for=math.inf))
        for now in (1010.0, 1015.0, 1029.0):
            assert renewal.call(now) is not None
            renewal.failed(ConnectionError("away"), now)
        assert renewal.call(1029.5) is not None
        renewal.answered(30_000, sent_at=1029.5)
        assert renewal.hold.deadline == 1059.5
        assert not renewal.hold.lost

    def test_anothers_token_is_a_lost_lock(self, make: Any, keeper: FakeKeeper) -> None:
        renewal = job(make(30, renews_for=math.inf))
        renewal.call(1010.0)
        renewal.answered([b"", b"7", b"mine", b"", b""], sent_at=1010.0)
        assert renewal.hold.lost
        assert renewal.hold.reason == causes.DELETED_OR_NO_DATA
        assert keeper.discarded == [renewal]

    def test_a_process_does_not_end_while_it_tells_of_a_loss(
        self, make: Any, keeper: FakeKeeper
    ) -> None:
        told: list[bool] = []
        hold = make(30, on_lost=lambda: told.append(renewal.flush_at_exit and not keeper.discarded))
        renewal = job(hold)
        renewal.call(1010.0)
        renewal.answered(NOTHING_LEFT, sent_at=1010.0)
        assert told == [True]
        assert keeper.discarded == [renewal]

    def test_what_ended_is_let_go(self, make: Any, keeper: FakeKeeper) -> None:
        renewal = job(make(30, renews_for=math.inf))
        renewal.hold.end()
        assert renewal.call(1010.0) is None
        assert keeper.discarded == [renewal]
        assert not renewal.hold.lost

    def test_the_lock_that_never_expires_is_named_and_left_as_it_is(self, make: Any) -> None:
        renewal = job(make(None))
        assert wanted(renewal.call(1000.5)) == 0
        renewal.answered(-1, sent_at=1000.5)
        assert renewal.hold.deadline == math.inf
        assert not renewal.hold.lost

    @pytest.mark.parametrize("lifetime", [30, None])
    def test_a_grant_that_is_not_confirmed_gets_its_full_lifetime(
        self, make: Any, lifetime: float | None
    ) -> None:
        hold = make(lifetime, deadline=1002.0)
        hold.pending = Pending(lambda wait: None)
        renewal = job(hold)
        assert renewal.due <= 1001
        call = renewal.call(1000.5)
        assert call is not None
        assert wanted(call) == (29_500 if lifetime else -1)
        renewal.answered(29_500 if lifetime else -1, sent_at=1000.5)
        assert hold.pending is None
        assert hold.deadline == (1030.0 if lifetime else math.inf)

    def test_a_grant_that_is_confirmed_needs_no_more(self, make: Any) -> None:
        hold = make(30, deadline=1002.0)
        hold.pending = Pending(lambda wait: 1030.0)
        renewal = job(hold)
        assert wanted(renewal.call(1000.5)) == 0
        assert hold.deadline == 1030.0


class CallerState:
    """What a caller knows through its lock object."""

    token = hold = renewal = entry = None


def test_on_lost_is_called_while_its_caller_leaves_inner_blocks(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold_module.lost_logger, "disabled", True)
    told: list[int] = []
    outer: Any = CallerState()
    outer.hold = hold = make(30, on_lost=lambda: told.append(1))
    entry = Entry(outer, 30.0, 0.0)
    inside = [CallerState() for _ in range(300)]
    for state in inside:
        entry.enter(state, lambda: None)

    def leave_one(*_: object) -> Any:
        """What another thread may do at each line."""
        if inside:
            entry.leave(inside.pop())
        return leave_one

    before = sys.gettrace()
    sys.settrace(leave_one)
    try:
        hold.lose("test")
    finally:
        sys.settrace(before)
    assert told == [1]
    assert len(inside) < 300


def test_on_lost_is_called_even_if_the_log_fails(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    hold = make(30, on_lost=lambda: told.append(1))
    monkeypatch.setattr(hold_module.lost_logger, "error", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hold.lose("test")
    assert told == [1]


def test_on_lost_of_several_names_is_called_once(make: Any) -> None:
    """The caller and the keeper find out at the same time."""

    class Slow(MultiHold):
        other: Background | None = None

        @property
        def ended(self) -> bool:
            if self.other is None:
                self.other = Background(self._lose)
                self.other._thread.join(0.1)
            return False

    told: list[int] = []
    server: Any = None
    hold = Slow([make(30), make(30)], server, 2.0, lambda: told.append(1))
    for each in hold._holds:
        each.fence = 0  # Nothing is to be released.
    hold._lose()
    assert hold.other is not None
    hold.other.result()
    assert told == [1]


def test_threads_agree_that_it_was_lost_once(make: Any) -> None:
    told: list[int] = []
    hold = make(30, on_lost=lambda: told.append(1))
    threads = [threading.Thread(target=hold.lose, args=("test",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == [1]
