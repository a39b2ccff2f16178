"""Spans and metrics for OpenTelemetry, by way of ``opentelemetry-api``.

A span ``lock wait GROUP`` for each wait for a lock, whether it got the lock or not, and a span
``compute GROUP`` around each computation of ``get_or_set``, so that what it does (queries,
requests) appears below it. See ``docs/monitoring.md`` for the metrics.
"""

from __future__ import annotations

import time
from typing import Any

from opentelemetry import context, metrics, trace
from opentelemetry.trace import Span, Status, StatusCode

from .. import events
from ..events import Subject
from ..metrics import EXPORTED_BOUNDS
from .instruments import COUNTERS, HISTOGRAMS, Exporter

_NAME = "django_redis_lock"


class OpenTelemetry(Exporter):
    """A listener that makes spans and metrics.

    Args:
        tracer_provider, meter_provider: by default the global ones.
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        self._tracer = trace.get_tracer(_NAME, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
        self.instruments: dict[str, Any] = {}
        for one in COUNTERS:
            self.instruments[one.name] = meter.create_counter(
                f"{_NAME}.{one.name}", unit="1", description=one.description
            )
        for one in HISTOGRAMS:
            self.instruments[one.name] = meter.create_histogram(
                f"{_NAME}.{one.name}",
                unit="s",
                description=one.description,
                explicit_bucket_boundaries_advisory=EXPORTED_BOUNDS,
            )
        #: The open spans of computations, by the ids of their subjects, which live as long.
        self._open: dict[int, tuple[Span, Any]] = {}
        super().__init__([(one, self.instruments[one.name]) for one in (*COUNTERS, *HISTOGRAMS)])

    def __call__(self, event: Any) -> None:
        if isinstance(event, events.Acquired) and event.contended:
            said = {"lock.fence": event.fence, "lock.acquired": True}
            self._record_wait(event.subject, event.waited, said)
        elif isinstance(event, events.TimedOut):
            self._record_wait(event.subject, event.waited, {"lock.acquired": False})
        elif isinstance(event, events.Computing):
            self._open_span(event.subject)
        elif isinstance(event, events.Computed):
            self._close_span(event.subject, event.error)
        super().__call__(event)

    def _add(self, metric: Any, amount: float, labels: dict[str, Any], event: Any) -> None:
        if isinstance(metric, metrics.Counter):
            metric.add(amount, labels)
        else:
            metric.record(amount, {**labels, **_outcome(event)})

    def _record_wait(self, subject: Subject, waited: float, said: dict[str, Any]) -> None:
        ended = time.time_ns()
        began = ended - int(waited * 1e9)
        attributes = {**_attributes("lock", subject), **said}
        name = f"lock wait {self._group(subject.group)}"
        self._tracer.start_span(name, start_time=began, attributes=attributes).end(ended)

    def _open_span(self, subject: Subject) -> None:
        name = f"compute {self._group(subject.group)}"
        span = self._tracer.start_span(name, attributes=_attributes("cache", subject))
        token = context.attach(trace.set_span_in_context(span))
        self._open[id(subject)] = (span, token)

    def _close_span(self, subject: Subject, error: BaseException | None) -> None:
        opened = self._open.pop(id(subject), None)
        if opened is not None:
            span, token = opened
            context.detach(token)
            if error is not None:
                span.record_exception(error)
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            span.end()


def _outcome(event: Any) -> dict[str, bool]:
    """The attribute of a histogram's sample."""
    if isinstance(event, events.Acquired):
        return {"contended": event.contended}
    if isinstance(event, events.Computed):
        return {"failed": event.error is not None}
    return {"lost": isinstance(event, events.Lost)}


def _attributes(kind: str, subject: Subject) -> dict[str, str]:
    said = {f"{kind}.name": subject.name, f"{kind}.group": subject.group}
    return {**said, f"{kind}.label": subject.label} if subject.label else said


def start(tracer_provider: Any = None, meter_provider: Any = None) -> OpenTelemetry:
    """Start the exporter, instead of one started before.

    Args:
        tracer_provider, meter_provider: by default the global ones, even if the project sets them
            later.
    """
    for listener in events.listeners:
        if type(listener).__qualname__ == OpenTelemetry.__qualname__:
            events.unsubscribe(listener)
    exporter = OpenTelemetry(tracer_provider, meter_provider)
    events.subscribe(exporter, reads=True)
    return exporter
