"""Metrics for Prometheus in the registry of ``prometheus_client``; ``docs/monitoring.md`` lists
them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ... import events
from ..metrics import EXPORTED_BOUNDS
from .listening import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    SERVER,
    VALUE,
    Exporter,
    Instrument,
    once,
)

_PREFIX = "django_redis_lock_"
_COUNTERS = (
    *COUNTERS,
    Instrument(
        "acquired",
        "Locks acquired, by whether they were waited for",
        {events.Acquired: once},
        {"contended": (False, True)},
    ),
    Instrument(
        "computations_failed",
        "Computations that raised",
        {events.Computed: lambda event: 1 if event.error else None},
        of=VALUE,
    ),
    Instrument(
        "outage_seconds",
        "How long it did not answer",
        {events.ServerUp: lambda event: event.seconds},
        of=SERVER,
    ),
)


class Prometheus(Exporter, Collector):
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        counters = [
            (one, Counter(_PREFIX + one.name, one.description, one.label_names, registry=registry))
            for one in _COUNTERS
        ]
        options: Any = {"registry": registry, "buckets": EXPORTED_BOUNDS}
        histograms = [
            (
                one,
                Histogram(
                    f"{_PREFIX}{one.name}_seconds", one.description, one.label_names, **options
                ),
            )
            for one in HISTOGRAMS
        ]
        super().__init__(counters, histograms)
        registry.register(self)
        self._metrics = [*counters, *histograms]

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering the exporter does not query Redis."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The gauges; each process reports the same values."""
        held = self.gauges()
        for gauge in GAUGES:
            family = GaugeMetricFamily(_PREFIX + gauge.name, gauge.description, labels=["group"])
            for group, locks in held.items():
                family.add_metric([group], gauge.amount(locks))
            yield family

    def _add(self, metric: Any, amount: float, labels: dict[str, Any], event: object) -> None:
        texts = {n: str(v).lower() if isinstance(v, bool) else v for n, v in labels.items()}
        if isinstance(metric, Histogram):
            metric.labels(**texts).observe(amount)
        else:
            metric.labels(**texts).inc(amount)

    def stop(self) -> None:
        """Unsubscribe, and remove the metrics from the registry."""
        events.unsubscribe(self)
        self.registry.unregister(self)
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
