"""The panel "Locks" of django-debug-toolbar: the locks that a request took or waited for, and the
values that it computed.

It records the events of the request's context: of its thread or task, of tasks that this starts,
and, until the response, of refreshes in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from debug_toolbar.panels import Panel
from django.template.defaultfilters import pluralize

from ... import events
from ...clock import time
from ...events import Subject
from ...keeper import SentOnce, keeper
from ...protocol import Call
from ...protocol.holder_scripts import HELD
from ...protocol.holders import HolderInfo

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponseBase

    from ...protocol import Reply

__all__ = ["LocksPanel"]

#: Seconds until an unnamed holder is asked for again; holders describe themselves after 0.5 s.
ASK_AGAIN_SECONDS = 0.6
#: The most seconds for which the response waits for the name of a holder.
MAX_DELAY_SECONDS = 0.2

#: A line of the panel, as its template has it; durations are in milliseconds.
Row = dict[str, object]

_panel: ContextVar[LocksPanel | None] = ContextVar("panel", default=None)


class LocksPanel(Panel):  # type: ignore[misc]  # It has no type hints.
    """Add ``"django_redis_lock.debug_toolbar.LocksPanel"`` to DEBUG_TOOLBAR_PANELS."""

    is_async = True
    nav_title = title = "Locks"
    template = "django_redis_lock/debug_toolbar.html"

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._locks: list[Row] = []
        self._computations: list[Row] = []
        self._reads = {"hit": 0, "stale": 0, "miss": 0}
        #: The names of values that were stale.
        self._stale: set[str] = set()
        #: The rows that another event will complete, by the subject, which the entry keeps alive,
        #: and the fence of a held lock.
        self._open: dict[tuple[int, int], tuple[Subject, Row]] = {}
        self._questions: list[_HolderQuestion] = []

    def enable_instrumentation(self) -> None:
        _panel.set(self)
        events.subscribe(self._record, reads=True)

    def disable_instrumentation(self) -> None:
        events.unsubscribe(self._record)
        _panel.set(None)

    def generate_stats(self, request: HttpRequest, response: HttpResponseBase) -> None:
        until = time.monotonic() + MAX_DELAY_SECONDS
        for question in self._questions:
            question.answer_seen.wait(max(0.0, until - time.monotonic()))
            keeper().discard(question)
        for row in self._locks:
            if "fence" in row and row.get("holder_fence") in (0, row["fence"]):
                row.pop("holder")  # It may be the request itself.
        stats = {"locks": self._locks, "computations": self._computations, "reads": self._reads}
        self.record_stats(stats)

    @property
    def nav_subtitle(self) -> str:
        stats = self.get_stats()
        locks = len(stats["locks"])
        computed = sum(row["what"] != "shared" for row in stats["computations"])
        counted = f"{locks} lock{pluralize(locks)}"
        return f"{counted}, {computed} computation{pluralize(computed)}" if computed else counted

    def _record(self, event: object) -> None:
        record = _RECORDED.get(type(event))
        # The keeper notices that a lock is lost, in no request's context.
        if record is not None and (_panel.get() is self or type(event) is events.Lost):
            record(self, event)

    def _end(self, subject: Subject, fence: int = 0) -> Row | None:
        _, row = self._open.pop((id(subject), fence), (None, None))
        return row

    def _lock(self, subject: Subject, what: str) -> Row:
        row = self._end(subject)
        if row is None:
            row = {"name": subject.name, "label": subject.label}
            self._locks.append(row)
        row["what"] = what
        return row

    def _contended(self, event: events.Contended) -> None:
        row = self._lock(event.subject, "waiting")
        # A copy: another thread may work in the request's context.
        held = (other["name"] for (_, fence), (_, other) in [*self._open.items()] if fence)
        row["holds_itself"] = event.subject.name in held
        self._open[id(event.subject), 0] = event.subject, row
        if event.subject.server is not None:
            question = _HolderQuestion(event, row)
            self._questions.append(question)
            keeper().add(question)

    def _acquired(self, event: events.Acquired) -> None:
        row = self._lock(event.subject, "acquired")
        row.update(waited=event.waited * 1000, fence=event.fence)
        self._open[id(event.subject), event.fence] = event.subject, row

    def _timed_out(self, event: events.TimedOut) -> None:
        self._lock(event.subject, "timed_out")["waited"] = event.waited * 1000

    def _rejected(self, event: events.Rejected) -> None:
        self._lock(event.subject, "rejected")

    def _fell_back(self, event: events.FellBack) -> None:
        self._lock(event.subject, "without_redis")

    def _released(self, event: events.Released | events.Lost) -> None:
        row = self._end(event.subject, event.fence)
        if row is not None:
            row["held"] = event.held * 1000
            if isinstance(event, events.Lost):
                row["what"] = "lost"

    def _computing(self, event: events.Computing) -> None:
        stale = event.subject.name in self._stale
        row = {"name": event.subject.name, "what": "computing", "stale": stale}
        self._computations.append(row)
        self._open[id(event.subject), 0] = event.subject, row

    def _computed(self, event: events.Computed) -> None:
        row = self._end(event.subject)
        if row is not None:
            row.update(what="computed", number=event.values, duration=event.seconds * 1000)
            row["without_redis"] = event.without_redis
            row["error"] = "" if event.error is None else type(event.error).__name__

    def _shared(self, event: events.Shared) -> None:
        row = {"name": event.subject.name, "what": "shared", "stale": event.stale}
        self._computations.append({**row, "number": event.values, "duration": event.waited * 1000})

    def _read(self, event: events.Read) -> None:
        self._reads[event.result] += event.values
        if event.result == "stale":
            self._stale.add(event.name)


_RECORDED: dict[type, Callable[[LocksPanel, Any], None]] = {
    events.Contended: LocksPanel._contended,
    events.Acquired: LocksPanel._acquired,
    events.TimedOut: LocksPanel._timed_out,
    events.Rejected: LocksPanel._rejected,
    events.FellBack: LocksPanel._fell_back,
    events.Released: LocksPanel._released,
    events.Lost: LocksPanel._released,
    events.Computing: LocksPanel._computing,
    events.Computed: LocksPanel._computed,
    events.Shared: LocksPanel._shared,
    events.Read: LocksPanel._read,
}


class _HolderQuestion(SentOnce):
    """Asks Redis, on the keeper's connection, who holds the lock of ``row``; once more if the
    holder has not described itself yet and the request still waits. The first answer sets
    ``answer_seen``."""

    flush_at_exit = False

    def __init__(self, event: events.Contended, row: Row) -> None:
        super().__init__(event.subject.server, Call(HELD, event.keys, ()))
        self._row = row
        self.answer_seen = threading.Event()

    def replied(self, value: Reply, sent_at: float) -> None:
        row, first = self._row, not self.answer_seen.is_set()
        held = None if value is None else HolderInfo(value)
        if held is not None and (first or held.owner.host):
            row.update(holder=str(held.in_the_way), holder_fence=held.fence)
        self.answer_seen.set()
        if first and held is not None and not held.owner.host and row["what"] == "waiting":
            self.due = sent_at + ASK_AGAIN_SECONDS
        else:
            super().replied(value, sent_at)

    def failed(self, error: Exception, now: float) -> None:
        self.answer_seen.set()
        super().failed(error, now)
