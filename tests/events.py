"""What listeners are told of one lock or value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from django_redis_lock import events

__all__ = ["RecordedEvents", "no_listeners", "recording_events"]


@pytest.fixture
def no_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    """None but a test's own: metrics would write to servers that are not there."""
    for name in ("listeners", "read_listeners"):
        monkeypatch.setattr(events, name, ())


class RecordedEvents(list[Any]):
    """What is told of ``name``, in order.

    Attributes:
        reads: the reads of ``name``; each call of ``get_or_set`` adds one.
    """

    __hash__ = object.__hash__  # As every listener has one; a list has none.

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.reads: list[events.Read] = []

    def __call__(self, event: Any) -> None:
        subject = getattr(event, "subject", None)
        if subject is not None and subject.name == self.name:
            if isinstance(event, events.Read):
                self.reads.append(event)
            elif not isinstance(event, events.Stored):
                self.append(event)

    @property
    def kinds(self) -> list[type]:
        return [type(event) for event in self]

    def only(self, kind: type) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]


@contextmanager
def recording_events(name: str) -> Iterator[RecordedEvents]:
    heard = RecordedEvents(name)
    events.subscribe(heard, reads=True)
    try:
        yield heard
    finally:
        events.unsubscribe(heard)
