"""Spans and metrics for OpenTelemetry, by way of ``opentelemetry-api``; ``docs/monitoring.md``
lists them."""

from __future__ import annotations

from contextvars import Token
from functools import partial
from typing import Any

from opentelemetry import context, metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ... import events
from ...events import Subject
from ..metrics import EXPORTED_BOUNDS
from .listening import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    Exporter,
    Gauge,
    Spans,
    subscribe_instead,
)
from .listening import Span as Ended

_NAME = "django_redis_lock"
_PROPAGATOR = TraceContextTextMapPropagator()


class OpenTelemetry(Spans, Exporter):
    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer(_NAME, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
        counters = [
            (one, meter.create_counter(f"{_NAME}.{one.name}", "1", one.description))
            for one in COUNTERS
        ]
        bounds = {"explicit_bucket_boundaries_advisory": EXPORTED_BOUNDS}
        histograms = [
            (one, meter.create_histogram(f"{_NAME}.{one.name}", "s", one.description, **bounds))
            for one in HISTOGRAMS
        ]
        self.instruments = {one.name: metric for one, metric in (*counters, *histograms)}
        Spans.__init__(self)
        Exporter.__init__(self, counters, histograms)
        for gauge in GAUGES:
            meter.create_observable_gauge(
                f"{_NAME}.{gauge.name}",
                callbacks=[partial(self._observe, gauge)],
                unit="s" if gauge.name.endswith("seconds") else "1",
                description=gauge.description,
            )

    def _observe(self, gauge: Gauge, options: metrics.CallbackOptions) -> list[metrics.Observation]:
        held = self.gauges().items()
        return [metrics.Observation(gauge.amount(locks), {"group": of}) for of, locks in held]

    def __call__(self, event: object) -> None:
        Spans.__call__(self, event)
        Exporter.__call__(self, event)

    def _add(self, metric: Any, amount: float, labels: dict[str, Any], event: object) -> None:
        if isinstance(metric, metrics.Counter):
            metric.add(amount, labels)
        else:
            metric.record(amount, {**labels, **_outcome(event)})

    def record(self, span: Ended) -> None:
        self._tracer.start_span(
            f"{span.operation} {self._group(span.subject.group)}",
            kind=SpanKind.CLIENT,
            start_time=int(span.began * 1e9),
            links=_links(span.leader),
            attributes={
                **_attributes(span.operation.partition(" ")[0], span.subject),
                **span.about,
            },
        ).end(int(span.ended * 1e9))

    def begin(self, subject: Subject) -> tuple[Span, Token[Context]]:
        name = f"compute {self._group(subject.group)}"
        span = self._tracer.start_span(name, attributes=_attributes("cache", subject))
        return span, context.attach(trace.set_span_in_context(span))

    def end(self, begun: tuple[Span, Token[Context]], error: BaseException | None) -> None:
        span, token = begun
        context.detach(token)
        if error is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        span.end()


def trace_parent() -> str:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


def _links(leader: str) -> list[trace.Link]:
    """A link to the span whose ``traceparent`` is ``leader``, if that is one."""
    found = trace.get_current_span(_PROPAGATOR.extract({"traceparent": leader}, Context()))
    return [trace.Link(found.get_span_context())] if found.get_span_context().is_valid else []


def _outcome(event: object) -> dict[str, bool]:
    if isinstance(event, events.Acquired):
        return {"contended": event.contended}
    if isinstance(event, events.Computed):
        return {"failed": event.error is not None}
    return {"lost": isinstance(event, events.Lost)}


def _attributes(kind: str, subject: Subject) -> dict[str, str]:
    said = {f"{kind}.name": subject.name, f"{kind}.group": subject.group}
    return {**said, f"{kind}.label": subject.label} if subject.label else said


def start(
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> OpenTelemetry:
    """Start the exporter, instead of one started before.

    Args:
        tracer_provider, meter_provider: by default the global ones, even if the project sets them
            later.
    """
    exporter = OpenTelemetry(tracer_provider, meter_provider)
    subscribe_instead(exporter)
    events.trace_parent = trace_parent
    return exporter
