"""What the callers of one process wait for while one of them computes."""

from __future__ import annotations

import math
import threading

from django_redis_lock.singleflight.runners import ThreadEvent
from tests.processes import PATIENCE, until
from tests.support.background import Background


def test_who_comes_later_does_not_wait() -> None:
    event = ThreadEvent()
    event.set()
    assert event.wait(math.inf)


def test_it_wakes_all_who_wait() -> None:
    event = ThreadEvent()
    waiting = [Background(event.wait, seconds) for seconds in (PATIENCE, math.inf, 1e12)]
    until(lambda: len(event._waiters) == 3)
    event.set()
    event.set()
    assert [each.result() for each in waiting] == [True] * 3
    assert not event._waiters


def test_a_wait_that_ends_without_it_says_so() -> None:
    event = ThreadEvent()
    assert event.wait(0) is False
    assert event.wait(0.01) is False
    assert not event._waiters


def test_they_meet_in_whatever_order() -> None:
    for _ in range(200):
        event = ThreadEvent()
        start = threading.Barrier(2)
        setting = Background(lambda start=start, event=event: (start.wait(), event.set()))
        start.wait()
        assert event.wait(PATIENCE)
        setting.result()
