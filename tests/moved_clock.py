"""The clock by which locks are renewed and lost in this process, put forward by a test. That of the
servers goes on as ever: what lives there ends no sooner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from django_redis_lock import history
from django_redis_lock.clock import Clock, time
from django_redis_lock.contrib.instant_loss import Subscription
from django_redis_lock.contrib.locmem.memory import _databases
from django_redis_lock.history import Heartbeat
from django_redis_lock.keeper import keeper
from tests.holding import settle
from tests.processes import until

__all__ = ["moved_clock"]


class _AheadOfTime(Clock):
    ahead = 0.0

    def monotonic(self) -> float:
        return Clock.monotonic() + self.ahead


@contextmanager
def moved_clock() -> Iterator[Callable[[float], None]]:
    """What lets so many seconds pass at once, and waits until the keeper has done what came due. It
    hears of no changes of its locks: it would look at them at once, and not when it is time to."""
    before, clock = time.clock, _AheadOfTime()

    def move(seconds: float) -> None:
        clock.ahead += seconds
        for database in tuple(_databases):
            database._epoch -= seconds  # Like every server's, its time does not move with ours.

    def pass_time(seconds: float) -> None:
        move(seconds)
        with keeper().mutex:
            for worker in keeper().workers():
                worker.look()
        settle()

    _end_heartbeats()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Subscription, "start", _hears_nothing)
        time.use(clock)
        try:
            yield pass_time
        finally:
            move(-clock.ahead)
            time.use(before)
            until(lambda: not keeper().under_way())
            keeper().hurry()
            _end_heartbeats()
            # The next ones would be late by all the time that has passed; and a lock that is not
            # collected yet refers to one that was sent in what is now the future.
            history._next_beats.clear()
            history.heartbeats.clear()


def _hears_nothing(subscription: Subscription) -> None:
    subscription.subscribed = True


def _end_heartbeats() -> None:
    """Those of tests before, and what they listen with."""

    def are_gone() -> bool:
        beats = [job for job in keeper().jobs() if isinstance(job, Heartbeat)]
        for beat in beats:
            beat._renewals.clear()
            keeper().reschedule(beat, time.monotonic())
        return not beats

    until(are_gone)
