"""Holds whose clock a test moves, and the keeper's jobs for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from django_redis_lock import history
from django_redis_lock.locking import hold as hold_module
from django_redis_lock.locking.hold import Hold, Renewal
from django_redis_lock.protocol import Acquisition
from django_redis_lock.protocol.keys import lock_keys
from django_redis_lock.transport import Server
from tests.support.clock import FakeClock


@pytest.fixture
def make(clock: FakeClock) -> Callable[..., Hold]:
    """Makes holds that begin now."""

    def make(lifetime: float | None = 30.0, **options: Any) -> Hold:
        began = clock.now
        deadline = options.pop("deadline", math.inf if lifetime is None else began + lifetime)
        hold = Hold(lifetime, **options)
        hold.begin(Acquisition(b"token", 7, began, deadline), lock_keys(b"report"))
        return hold

    return make


class Pending:
    """The reply to TAKE_GRANT, as ``read_reply`` gives it."""

    def __init__(self, read_reply: Callable[[bool], float | None]) -> None:
        self.read_reply = read_reply


class FakeKeeper:
    """Where the jobs go that have no more to do."""

    def __init__(self) -> None:
        self.discarded: list[Any] = []
        self.added: list[Any] = []

    def add(self, job: Any) -> None:
        self.added.append(job)

    def discard(self, job: Any) -> None:
        self.discarded.append(job)


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> FakeKeeper:
    fake = FakeKeeper()
    monkeypatch.setattr(hold_module, "keeper", lambda: fake)
    # No heartbeats: there is no server.
    monkeypatch.setattr(history.Heartbeat, "join", lambda job: SimpleNamespace(leave=id))
    return fake


class Nowhere(Server):
    def __init__(self) -> None:
        """It has no address."""


def job(hold: Hold) -> Renewal:
    renewal = Renewal(Nowhere(), hold)
    renewal.schedule(hold.began)
    return renewal


#: The reply to RENEW after FLUSHDB.
NOTHING_LEFT = [b""] * 5


def wanted(call: Any) -> int:
    """The lifetime a renewal asks for, in milliseconds."""
    return int(call.args[1])
