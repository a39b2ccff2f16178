"""What starts with the first event or read hears of each event once."""

from __future__ import annotations

from typing import Any

import pytest

from django_redis_lock import events

EVENT: Any = "event"


@pytest.mark.parametrize("read_first", [False, True])
def test_each_event_is_told_once(monkeypatch: pytest.MonkeyPatch, read_first: bool) -> None:
    """Also the first one, if a read came before it."""
    for name in ("listeners", "read_listeners"):
        monkeypatch.setattr(events, name, ())
    monkeypatch.setattr(events, "count_read", None)
    told: list[Any] = []

    def start() -> events.Listener:
        events.subscribe(told.append)
        return told.append

    events.subscribe_later(start)
    if read_first:
        count: Any = events.count_read
        count(None, "key", "", "hit", 1)
    events.emit(EVENT)
    events.emit(EVENT)
    assert told == [EVENT] * 2
