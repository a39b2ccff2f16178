"""Metrics for Prometheus, by way of ``prometheus_client``.

They are ordinary counters and histograms of that package, so they come out wherever a project
exposes its registry, also in multiprocess mode (``PROMETHEUS_MULTIPROC_DIR``). The label ``group``
has a limited number of values. See ``docs/monitoring.md`` for the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from .. import events
from ..metrics import EXPORTED_BOUNDS
from .labels import Labels

__all__ = ["Prometheus", "start"]

_PREFIX = "django_redis_lock_"


class Prometheus:
    """A listener that counts in ``registry``."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self._label = Labels()
        self._collectors: list[Any] = []
        group = ("group",)
        self.acquired = self._counter(
            "acquired", "Locks acquired, by whether they were waited for", *group, "contended"
        )
        self.rejected = self._counter(
            "rejected", "Single attempts that found the lock taken", *group
        )
        self.timeouts = self._counter("timeouts", "Waits that ended without the lock", *group)
        self.lost = self._counter("lost", "Locks that ended before they were released", *group)
        self.crashed = self._counter(
            "crashed", "Holders that crashed or were cut off, and never released", *group
        )
        self.waits = self._histogram("wait_seconds", "How long acquisitions waited")
        self.holds = self._histogram("hold_seconds", "How long locks were held")
        self.computed = self._counter("values_computed", "Values computed by get_or_set", *group)
        self.without_redis = self._counter(
            "values_computed_without_redis", "Values computed without Redis", *group
        )
        self.failed = self._counter("computations_failed", "Computations that raised", *group)
        self.computations = self._histogram("computation_seconds", "How long computations took")
        self.saved = self._counter(
            "computations_saved",
            "Computations saved: the caller got another's result, or the stale value",
            *group,
            "stale",
        )
        self.refreshes_failed = self._counter(
            "refreshes_failed", "Stale values whose refresh failed", *group
        )
        self.outages = self._counter("outages", "Times a Redis server stopped answering", "server")
        self.outage_seconds = self._counter(
            "outage_seconds", "How long it did not answer", "server"
        )
        self.fallbacks = self._counter("fallbacks", "Locks taken without Redis", *group, "how")
        self._does: dict[type, Callable[[Any, str], None]] = {
            events.Acquired: self._acquired,
            events.Rejected: lambda event, group: self.rejected.labels(group).inc(),
            events.TimedOut: lambda event, group: self.timeouts.labels(group).inc(),
            events.Crashed: lambda event, group: self.crashed.labels(group).inc(),
            events.Released: lambda event, group: self.holds.labels(group).observe(event.held),
            events.Lost: self._lost,
            events.Computed: self._computed,
            events.Shared: self._shared,
            events.RefreshFailed: lambda event, group: self.refreshes_failed.labels(group).inc(),
            events.ServerDown: lambda event, group: self.outages.labels(event.server).inc(),
            events.ServerUp: self._server_up,
            events.FellBack: lambda event, group: self.fallbacks.labels(group, event.how).inc(),
        }

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        counter = Counter(_PREFIX + name, help, labels, registry=self.registry)
        self._collectors.append(counter)
        return counter

    def _histogram(self, name: str, help: str) -> Histogram:
        histogram = Histogram(
            _PREFIX + name, help, ("group",), registry=self.registry, buckets=EXPORTED_BOUNDS
        )
        self._collectors.append(histogram)
        return histogram

    def __call__(self, event: Any) -> None:
        does = self._does.get(type(event))
        if does is not None:
            subject = getattr(event, "subject", None)
            does(event, "" if subject is None else self._label(subject.group))

    def _acquired(self, event: events.Acquired, group: str) -> None:
        self.acquired.labels(group, _truth(event.contended)).inc()
        self.waits.labels(group).observe(event.waited)

    def _lost(self, event: events.Lost, group: str) -> None:
        self.lost.labels(group).inc()
        self.holds.labels(group).observe(event.held)

    def _computed(self, event: events.Computed, group: str) -> None:
        if event.error is None:
            self.computed.labels(group).inc(event.values)
            if event.without_redis:
                self.without_redis.labels(group).inc(event.values)
        else:
            self.failed.labels(group).inc()
        self.computations.labels(group).observe(event.seconds)

    def _shared(self, event: events.Shared, group: str) -> None:
        self.saved.labels(group, _truth(event.stale)).inc(event.values)

    def _server_up(self, event: events.ServerUp, group: str) -> None:
        self.outage_seconds.labels(event.server).inc(event.seconds)

    def stop(self) -> None:
        """Listen no more, and leave the registry."""
        events.unsubscribe(self)
        for collector in self._collectors:
            self.registry.unregister(collector)


def _truth(value: bool) -> str:
    return "true" if value else "false"


def start(registry: CollectorRegistry = REGISTRY) -> Prometheus:
    """Count in ``registry`` from now on. Called again (a module that is reloaded) it begins anew;
    nothing is registered twice."""
    listeners: tuple[Any, ...] = events.listeners
    for listener in listeners:
        # By its name: after a reload its class is another.
        same = type(listener).__qualname__ == Prometheus.__qualname__
        if same and getattr(listener, "registry", None) is registry:
            listener.stop()
    exporter = Prometheus(registry)
    events.subscribe(exporter)
    return exporter
