"""A clock that stands still until a test moves it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_redis_lock.clock import Clock, time


class FakeClock(Clock):
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    before, fake = time.clock, FakeClock()
    time.use(fake)
    yield fake
    time.use(before)
