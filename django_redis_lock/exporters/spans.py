"""What becomes a span, for exporters of traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .. import events
from ..clock import time
from ..conf import Conf
from ..events import Subject

Value = str | int | float | bool
Attributes = Mapping[str, Value]


class Tracer(Protocol):
    """Makes the spans of one tool."""

    def record(
        self,
        operation: str,
        subject: Subject,
        began: float,
        ended: float,
        about: Attributes,
        leader: str,
    ) -> None:
        """Make a span of something that has ended.

        Args:
            operation: ``"cache get"``, ``"cache put"``, ``"cache wait"``, ``"lock wait"`` or
                ``"lock acquire"``.
            began, ended: Unix times in seconds.
            leader: the trace to which the span refers, as a ``traceparent``; or empty.
        """

    def begin(self, subject: Subject) -> Any:
        """Begin a span around a computation; returns what ``end`` needs."""

    def end(self, begun: Any, error: BaseException | None) -> None:
        """End it."""


class Spans:
    """A listener that has ``tracer`` make spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        #: The open spans of computations, by the ids of their subjects, which live as long.
        self._open: dict[int, Any] = {}

    def __call__(self, event: Any) -> None:
        if isinstance(event, events.Read):
            ago = time.monotonic() - event.began - event.seconds
            found = event.result != "miss"
            about: Attributes = {"cache.hit": found, "cache.result": event.result}
            self._record("cache get", event.subject, event.seconds, about, event.values, ago)
        elif isinstance(event, events.Stored):
            self._record("cache put", event.subject, event.seconds, {}, event.values)
        elif isinstance(event, events.Shared):
            if not event.stale:
                self._record(
                    *("cache wait", event.subject, event.waited, {}, event.values),
                    leader=event.leader,
                )
        elif isinstance(event, events.Acquired):
            if event.contended or event.waited > _slow(event.subject):
                about = {"lock.acquired": True, "lock.fence": event.fence}
                operation = "lock wait" if event.contended else "lock acquire"
                self._record(operation, event.subject, event.waited, about)
        elif isinstance(event, events.TimedOut):
            self._record("lock wait", event.subject, event.waited, {"lock.acquired": False})
        elif isinstance(event, events.Computing):
            self._open[id(event.subject)] = self._tracer.begin(event.subject)
        elif isinstance(event, events.Computed):
            begun = self._open.pop(id(event.subject), None)
            if begun is not None:
                self._tracer.end(begun, event.error)

    def _record(
        self,
        operation: str,
        subject: Subject,
        seconds: float,
        about: Attributes,
        values: int = 1,
        ago: float = 0.0,
        leader: str = "",
    ) -> None:
        """Record what took ``seconds`` and ended ``ago`` seconds before now."""
        ended = time.time() - ago
        about = {**about, **_server(subject)}
        if values > 1:
            about["cache.values"] = values
        self._tracer.record(operation, subject, ended - seconds, ended, about, leader)


def _slow(subject: Subject) -> float:
    conf: Conf = Conf() if subject.cache is None else subject.cache.conf
    return conf.SLOW_ACQUISITION


def _server(subject: Subject) -> dict[str, Value]:
    """The attributes of OpenTelemetry's conventions for databases; none in memory."""
    if subject.server is None or getattr(subject.cache, "in_memory", False):
        return {}
    settings = subject.server.address.connection_kwargs
    known = {
        "db.namespace": str(settings.get("db") or 0),
        "server.address": settings.get("host") or settings.get("path"),
        "server.port": settings.get("port"),
    }
    return {"db.system.name": "redis", **{name: value for name, value in known.items() if value}}
