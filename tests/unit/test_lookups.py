"""How names of servers are looked up: by the system, in a thread, for all who want them then."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from django_redis_lock.transport import interrupts
from tests.processes import PATIENCE, until
from tests.support.background import Background

NAME = ("redis.test", 6379, 0)
FOUND = ["10.0.0.1", "10.0.0.2"]


@pytest.fixture(autouse=True)
def _no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_lookups", {})


def test_addresses_may_be_used_for_as_long_as_it_took_to_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, asked = [1000.0], []

    def look_up(*name: Any) -> list[str]:
        asked.append(name)
        now[0] += 3
        return FOUND

    monkeypatch.setattr(interrupts, "_addresses", look_up)
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for at, lookups in ((1000.0, 1), (1005.9, 1), (1006.1, 2)):
        now[0] = at
        assert interrupts._addresses_within(PATIENCE, *NAME) == FOUND
        assert asked == [NAME] * lookups


def test_threads_that_want_a_name_at_the_same_time_share_its_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, asked = threading.Event(), []

    def look_up(*name: Any) -> list[str]:
        asked.append(name)
        assert go_on.wait(PATIENCE)
        return FOUND

    monkeypatch.setattr(interrupts, "_addresses", look_up)
    several = [Background(interrupts._addresses_within, PATIENCE, *NAME) for _ in range(3)]
    until(lambda: asked)
    with pytest.raises(TimeoutError, match=r"redis\.test has no address after 0\.01 s"):
        interrupts._addresses_within(0.01, *NAME)
    go_on.set()
    assert [each.result() for each in several] == [FOUND] * 3
    assert asked == [NAME]


def test_what_the_system_says_is_raised_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def look_up(*name: Any) -> list[str]:
        raise unknown

    monkeypatch.setattr(interrupts, "_addresses", look_up)
    for _ in range(2):
        with pytest.raises(socket.gaierror, match="not known") as raised:
            interrupts._addresses_within(PATIENCE, *NAME)
        assert raised.value is not unknown  # Each has a traceback of its own.


def test_without_a_thread_the_caller_looks_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts._resolvers, "submit", lambda work: False)
    monkeypatch.setattr(interrupts, "_addresses", lambda *name: FOUND)
    assert interrupts._addresses_within(0.0, *NAME) == FOUND


@pytest.mark.parametrize("seconds", [None, PATIENCE])
def test_a_call_without_a_limit_and_the_host_itself_need_no_thread(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    asked: list[threading.Thread] = []
    monkeypatch.setattr(
        interrupts, "_addresses", lambda *name: asked.append(threading.current_thread())
    )
    host = NAME[0] if seconds is None else "localhost"
    interrupts._addresses_within(seconds, host, 6379, 0)
    assert asked == [threading.current_thread()]
    assert not interrupts._lookups
