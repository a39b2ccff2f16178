"""Metrics for Prometheus in the registry of ``prometheus_client``; ``docs/monitoring.md`` lists
them."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from ... import events
from ..metrics import EXPORTED_BOUNDS
from . import COUNTERS, HISTOGRAMS, Exporter, Instrument, Labels, once

_PREFIX = "django_redis_lock_"
_COUNTERS = (
    *COUNTERS,
    Instrument(
        "acquired",
        "Locks acquired, by whether they were waited for",
        {events.Acquired: once},
        ("contended",),
    ),
    Instrument(
        "computations_failed",
        "Computations that raised",
        {events.Computed: lambda event: 1 if event.error else None},
    ),
    Instrument(
        "outage_seconds",
        "How long it did not answer",
        {events.ServerUp: lambda event: event.seconds},
        ("server",),
        has_group=False,
    ),
)


class Prometheus(Exporter[Counter | Histogram]):
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self._metrics: list[tuple[Instrument, Counter | Histogram]] = []
        for one in _COUNTERS:
            labels = ("group",) * one.has_group + one.labels
            counter = Counter(_PREFIX + one.name, one.description, labels, registry=registry)
            self._metrics.append((one, counter))
        for one in HISTOGRAMS:
            name = f"{_PREFIX}{one.name}_seconds"
            histogram = Histogram(
                name, one.description, ("group",), registry=registry, buckets=EXPORTED_BOUNDS
            )
            self._metrics.append((one, histogram))
        super().__init__(self._metrics)

    def _add(
        self, metric: Counter | Histogram, amount: float, labels: Labels, event: object
    ) -> None:
        texts = {n: str(v).lower() if isinstance(v, bool) else v for n, v in labels.items()}
        if isinstance(metric, Histogram):
            metric.labels(**texts).observe(amount)
        else:
            metric.labels(**texts).inc(amount)

    def stop(self) -> None:
        """Unsubscribe, and remove the metrics from the registry."""
        events.unsubscribe(self)
        for _, metric in self._metrics:
            self.registry.unregister(metric)


def start(registry: CollectorRegistry = REGISTRY) -> Prometheus:
    """Start the exporter, instead of one started before in ``registry``."""
    listeners: tuple[Any, ...] = events.listeners
    for listener in listeners:
        # By name: a reloaded module has another class.
        same = type(listener).__qualname__ == Prometheus.__qualname__
        if same and getattr(listener, "registry", None) is registry:
            listener.stop()
    exporter = Prometheus(registry)
    events.subscribe(exporter, reads=True)
    return exporter
