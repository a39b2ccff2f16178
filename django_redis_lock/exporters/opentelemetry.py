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
from .labels import Labels

__all__ = ["OpenTelemetry", "start"]

_NAME = "django_redis_lock"


class OpenTelemetry:
    """A listener that makes spans and metrics.

    Args:
        tracer_provider, meter_provider: left out, those that OpenTelemetry was set up with.
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        self._tracer = trace.get_tracer(_NAME, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
        self._label = Labels()
        self.instruments: dict[str, Any] = {}

        def histogram(name: str, description: str) -> Any:
            self.instruments[name] = meter.create_histogram(
                f"{_NAME}.{name}",
                unit="s",
                description=description,
                explicit_bucket_boundaries_advisory=EXPORTED_BOUNDS,
            )
            return self.instruments[name]

        def counter(name: str, description: str) -> Any:
            self.instruments[name] = meter.create_counter(
                f"{_NAME}.{name}", unit="1", description=description
            )
            return self.instruments[name]

        self._waits = histogram("wait", "How long acquisitions waited")
        self._holds = histogram("hold", "How long locks were held")
        self._computations = histogram("computation", "How long computations took")
        self._rejected = counter("rejected", "Single attempts that found the lock taken")
        self._timeouts = counter("timeouts", "Waits that ended without the lock")
        self._lost = counter("lost", "Locks that ended before they were released")
        self._crashed = counter(
            "crashed", "Holders that crashed or were cut off, and never released"
        )
        self._computed = counter("values_computed", "Values computed by get_or_set")
        self._without_redis = counter(
            "values_computed_without_redis", "Values computed without Redis"
        )
        self._saved = counter(
            "computations_saved",
            "Computations saved: the caller got another's result, or the stale value",
        )
        self._refreshes_failed = counter("refreshes_failed", "Stale values whose refresh failed")
        self._outages = counter("outages", "Times a Redis server stopped answering")
        self._fallbacks = counter("fallbacks", "Locks taken without Redis")
        #: The spans of computations under way. Their subjects live as long as they do.
        self._open: dict[int, tuple[Span, Any]] = {}
        self._does: dict[type, Any] = {
            events.Acquired: self._on_acquired,
            events.Rejected: self._on_rejected,
            events.TimedOut: self._on_timed_out,
            events.Released: self._on_released,
            events.Lost: self._on_lost,
            events.Crashed: self._on_crashed,
            events.Computing: self._on_computing,
            events.Computed: self._on_computed,
            events.Shared: self._on_shared,
            events.RefreshFailed: self._on_refresh_failed,
            events.ServerDown: self._on_server_down,
            events.FellBack: self._on_fell_back,
        }

    def __call__(self, event: Any) -> None:
        does = self._does.get(type(event))
        if does is not None:
            subject = getattr(event, "subject", None)
            does(event, "" if subject is None else self._label(subject.group))

    def _on_acquired(self, event: events.Acquired, group: str) -> None:
        self._waits.record(event.waited, {"group": group, "contended": event.contended})
        if event.contended:
            said = {"lock.fence": event.fence, "lock.acquired": True}
            self._waited(event.subject, group, event.waited, said)

    def _on_rejected(self, event: events.Rejected, group: str) -> None:
        self._rejected.add(1, {"group": group})

    def _on_timed_out(self, event: events.TimedOut, group: str) -> None:
        self._timeouts.add(1, {"group": group})
        self._waited(event.subject, group, event.waited, {"lock.acquired": False})

    def _waited(self, subject: Subject, group: str, waited: float, said: dict[str, Any]) -> None:
        ended = time.time_ns()
        began = ended - int(waited * 1e9)
        attributes = {**_attributes("lock", subject), **said}
        name = f"lock wait {group}"
        self._tracer.start_span(name, start_time=began, attributes=attributes).end(ended)

    def _on_released(self, event: events.Released, group: str) -> None:
        self._holds.record(event.held, {"group": group, "lost": False})

    def _on_lost(self, event: events.Lost, group: str) -> None:
        self._holds.record(event.held, {"group": group, "lost": True})
        self._lost.add(1, {"group": group})

    def _on_crashed(self, event: events.Crashed, group: str) -> None:
        self._crashed.add(1, {"group": group})

    def _on_computing(self, event: events.Computing, group: str) -> None:
        attributes = _attributes("cache", event.subject)
        span = self._tracer.start_span(f"compute {group}", attributes=attributes)
        token = context.attach(trace.set_span_in_context(span))
        self._open[id(event.subject)] = (span, token)

    def _on_computed(self, event: events.Computed, group: str) -> None:
        opened = self._open.pop(id(event.subject), None)
        if opened is not None:
            span, token = opened
            context.detach(token)
            if event.error is not None:
                span.record_exception(event.error)
                span.set_status(Status(StatusCode.ERROR, type(event.error).__name__))
            span.end()
        failed = event.error is not None
        self._computations.record(event.seconds, {"group": group, "failed": failed})
        if not failed:
            self._computed.add(event.values, {"group": group})
            if event.without_redis:
                self._without_redis.add(event.values, {"group": group})

    def _on_shared(self, event: events.Shared, group: str) -> None:
        self._saved.add(event.values, {"group": group, "stale": event.stale})

    def _on_refresh_failed(self, event: events.RefreshFailed, group: str) -> None:
        self._refreshes_failed.add(1, {"group": group})

    def _on_server_down(self, event: events.ServerDown, group: str) -> None:
        self._outages.add(1, {"server": event.server})

    def _on_fell_back(self, event: events.FellBack, group: str) -> None:
        self._fallbacks.add(1, {"group": group, "how": event.how})


def _attributes(kind: str, subject: Subject) -> dict[str, str]:
    said = {f"{kind}.name": subject.name, f"{kind}.group": subject.group}
    return {**said, f"{kind}.label": subject.label} if subject.label else said


def start(tracer_provider: Any = None, meter_provider: Any = None) -> OpenTelemetry:
    """Make spans and metrics from now on; instead of those started before.

    Args:
        tracer_provider, meter_provider: left out, those that OpenTelemetry was set up with, even if
            that happens later.
    """
    for listener in events.listeners:
        if type(listener).__qualname__ == OpenTelemetry.__qualname__:
            events.unsubscribe(listener)
    exporter = OpenTelemetry(tracer_provider, meter_provider)
    events.subscribe(exporter)
    return exporter
