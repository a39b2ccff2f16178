"""The circuit breaker's decisions, on a clock that the tests move."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_redis_lock import events
from django_redis_lock.events import ServerDown, ServerUp
from django_redis_lock.transport import circuit_breaker
from django_redis_lock.transport.circuit_breaker import PROBE_TIMEOUT_SECONDS, Breaker, CircuitOpen
from tests.support.logs import logged

ERROR = redis.TimeoutError("no answer")
PAUSE = 2.0


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _on_this_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "time", SimpleNamespace(monotonic=clock))


@pytest.fixture
def breaker() -> Breaker:
    return Breaker("host:6379/0", 5.0)


@pytest.mark.parametrize(
    ("old", "left", "timeout", "connecting", "first"),
    [
        (False, 0.1, 5.0, 0.0, 0.1),
        (False, 0.2, 5.0, 0.0, 0.1),
        (False, 1.9, 5.0, 0.1, 0.95),
        (False, 1.9, 0.5, 0.1, 0.5),
        (False, 1.9, 5.0, 0.5, 1.9),
        (False, 30.0, 5.0, 0.5, 5.0),
        (False, 30.0, 20.0, 0.5, 15.0),
        (False, None, 5.0, 0.0, None),
        (True, None, 5.0, 0.0, 0.5),
        (True, None, 0.4, 0.0, 0.2),
        (True, None, 5.0, 0.5, 1.0),
        (True, 30.0, 5.0, 0.0, 0.5),
        (True, 0.1, 5.0, 0.0, 0.1),
    ],
)
def test_a_connection_that_was_used_before_leaves_time_for_another(
    breaker: Breaker,
    old: bool,
    left: float | None,
    timeout: float,
    connecting: float,
    first: float | None,
) -> None:
    breaker.connecting = connecting
    assert breaker.first_wait(old, left, timeout) == first


def trip(breaker: Breaker) -> None:
    for _ in range(2):
        breaker.failed(ERROR, 5.0)


def test_after_two_slow_failures_in_a_row_calls_fail_at_once(
    breaker: Breaker, clock: Clock
) -> None:
    assert not breaker.failing
    assert breaker.admit(7.0) == 7.0
    breaker.failed(ERROR, 5.0)
    assert breaker.failing
    breaker.answered()
    assert not breaker.failing
    breaker.failed(ERROR, 5.0)
    assert not breaker.held_back
    assert breaker.admit(None) is None
    breaker.failed(ERROR, 5.0)
    assert breaker.held_back
    clock.time += 1
    outage = breaker.known_outage()
    assert outage is not None
    assert (outage.server, outage.seconds) == ("host:6379/0", 6.0)
    with pytest.raises(CircuitOpen, match=r"host:6379/0 has not answered for .*no answer"):
        breaker.admit(None)


@pytest.mark.parametrize(("cost", "timeout"), [(0.001, 5.0), (0.5, 5.0), (0.1, 0.2)])
def test_a_fast_failure_does_not_open_the_breaker(
    clock: Clock, cost: float, timeout: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused connection; a caller with little patience."""
    breaker = Breaker("host", timeout)
    for _ in range(100):
        breaker.failed(ERROR, cost)
    assert breaker.failing
    assert not logged(caplog, "outage", "fail at once")
    assert breaker.admit(None) is None
    for _ in range(2):
        breaker.failed(ERROR, timeout)  # A short time-out counts when it is over.
    assert breaker.held_back


def test_after_the_pause_one_call_is_let_through(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.time += PAUSE
    assert breaker.admit(None) == PROBE_TIMEOUT_SECONDS
    for _ in range(98):
        with pytest.raises(CircuitOpen):
            breaker.admit(None)
    outage = breaker.known_outage()
    assert outage is not None
    assert outage.spared == 98
    clock.time += PROBE_TIMEOUT_SECONDS
    breaker.failed(ERROR, PROBE_TIMEOUT_SECONDS)  # Another pause begins.
    with pytest.raises(CircuitOpen):
        breaker.admit(None)
    clock.time += PAUSE
    assert breaker.admit(0.05) == 0.05, "who is less patient stays so"
    breaker.failed(ERROR, 0.05)
    assert breaker.held_back, "a hasty one that got no answer is not followed at once"
    clock.time += PROBE_TIMEOUT_SECONDS + PAUSE
    assert breaker.admit(None) == PROBE_TIMEOUT_SECONDS
    breaker.answered()
    assert not breaker.failing
    assert breaker.known_outage() is None
    assert breaker.admit(None) is None


def test_when_it_is_refused_the_next_one_follows_at_once(breaker: Breaker, clock: Clock) -> None:
    """The server hung, and now it restarts."""
    trip(breaker)
    clock.time += PAUSE
    breaker.admit(None)
    breaker.failed(redis.ConnectionError("refused"), 0.001)
    assert not breaker.held_back
    assert breaker.admit(None) == PROBE_TIMEOUT_SECONDS


def test_a_call_that_is_never_held_back_is_brief_while_others_are(breaker: Breaker) -> None:
    assert breaker.admit(None, urgent=True) is None
    assert breaker.admit(7.0, urgent=True) == 7.0
    trip(breaker)
    assert breaker.admit(None, urgent=True) == PROBE_TIMEOUT_SECONDS
    assert breaker.admit(0.25, urgent=True) == 0.25
    breaker.failed(redis.ConnectionError("refused"), 0.001)  # This ends the pause.
    assert breaker.admit(None) == PROBE_TIMEOUT_SECONDS


def test_another_follows_one_that_ended_without_a_word(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.time += PAUSE
    breaker.admit(None)
    clock.time += PROBE_TIMEOUT_SECONDS + PAUSE - 0.5
    assert breaker.held_back
    clock.time += 0.5
    assert breaker.admit(None) == PROBE_TIMEOUT_SECONDS


def test_the_settings_are_read_live(breaker: Breaker, settings: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"BREAKER_FAILURES": 4, "BREAKER_PAUSE": 60}
    trip(breaker)
    assert not breaker.held_back
    trip(breaker)
    with pytest.raises(CircuitOpen, match=r"asked again in 60\.0 s"):
        breaker.admit(None)
    breaker.answered()
    settings.DJANGO_REDIS_LOCK = {"BREAKER_FAILURES": 0}  # None is held back.
    for _ in range(100):
        breaker.failed(ERROR, 5.0)
    assert breaker.admit(None) is None


def test_an_outage_is_emitted_once(
    breaker: Breaker, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []
    events.subscribe(told.append)
    try:
        with caplog.at_level(logging.INFO, "django_redis_lock.outage"):
            for _ in range(5):
                breaker.failed(ERROR, 5.0)
            clock.time += 10
            breaker.fallbacks += 3
            for _ in range(2):
                breaker.answered()
    finally:
        events.unsubscribe(told.append)
    ours = [event for event in told if getattr(event, "server", "") == "host:6379/0"]
    assert ours == [ServerDown("host:6379/0", ERROR), ServerUp("host:6379/0", 15.0, 0, 3)]
    assert len(logged(caplog, "outage", "host:6379/0")) == 3
    assert "answers again after 15.0 s" in caplog.text


def test_the_outage_of_a_server_that_is_no_longer_used_is_over(
    breaker: Breaker, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It has been replaced, and is not asked again."""
    told: list[Any] = []
    breaker.failed(ERROR, 5.0)
    events.subscribe(told.append)
    try:
        breaker.replaced()
        breaker.failed(ERROR, 5.0)  # A call that was still under way.
    finally:
        events.unsubscribe(told.append)
    ours = [event for event in told if getattr(event, "server", "") == "host:6379/0"]
    assert ours == [ServerUp("host:6379/0", 5.0, 0, 0)]
    assert "Redis at host:6379/0 is no longer used after 5.0 s" in caplog.text


def test_a_new_outage_starts_a_new_count(breaker: Breaker) -> None:
    trip(breaker)
    assert [breaker.fell_back() for _ in range(3)] == [True, False, False]
    assert breaker.fallbacks == 3
    breaker.answered()
    breaker.failed(ERROR, 5.0)
    assert breaker.fallbacks == 0
    assert not breaker.held_back
