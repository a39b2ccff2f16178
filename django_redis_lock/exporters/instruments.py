"""The metrics of both exporters, with names and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import events
from ..metrics import OTHER

#: The most groups of an exporter; further groups are "other".
MAX_GROUPS = 100

#: How much an event adds; None: nothing.
Amount = Callable[[Any], float | None]


class Instrument(NamedTuple):
    """A counter or histogram.

    Attributes:
        amounts: for each class of events, how much an event of it adds.
        labels: attributes of the event that become labels.
        has_group: whether the group of the lock or value is also a label.
    """

    name: str
    description: str
    amounts: Mapping[type, Amount]
    labels: tuple[str, ...] = ()
    has_group: bool = True


def once(event: Any) -> float:
    return 1


COUNTERS = (
    Instrument("rejected", "Single attempts that found the lock taken", {events.Rejected: once}),
    Instrument("timeouts", "Waits that ended without the lock", {events.TimedOut: once}),
    Instrument("lost", "Locks that ended before they were released", {events.Lost: once}),
    Instrument(
        "crashed",
        "Holders that crashed or were cut off, and never released",
        {events.Crashed: once},
    ),
    Instrument(
        "values_computed",
        "Values computed by get_or_set",
        {events.Computed: lambda event: None if event.error else event.values},
    ),
    Instrument(
        "values_computed_without_redis",
        "Values computed without Redis",
        {events.Computed: lambda e: e.values if e.without_redis and not e.error else None},
    ),
    Instrument(
        "computations_saved",
        "Computations saved: the caller got another's result, or the stale value",
        {events.Shared: lambda event: event.values},
        ("stale",),
    ),
    Instrument(
        "reads",
        "Values that get_or_set looked for, by whether it found them",
        {events.Read: lambda event: event.values},
        ("result",),
    ),
    Instrument(
        "refreshes_failed", "Stale values whose refresh failed", {events.RefreshFailed: once}
    ),
    Instrument(
        "outages",
        "Times a Redis server stopped answering",
        {events.ServerDown: once},
        ("server",),
        has_group=False,
    ),
    Instrument("fallbacks", "Locks taken without Redis", {events.FellBack: once}, ("how",)),
)

#: In seconds.
HISTOGRAMS = (
    Instrument("wait", "How long acquisitions waited", {events.Acquired: lambda e: e.waited}),
    Instrument(
        "hold",
        "How long locks were held",
        {events.Released: lambda e: e.held, events.Lost: lambda e: e.held},
    ),
    Instrument("computation", "How long computations took", {events.Computed: lambda e: e.seconds}),
)


class Exporter:
    """A listener that adds the amounts of each event to ``metrics``."""

    def __init__(self, metrics: Sequence[tuple[Instrument, Any]]) -> None:
        self._groups: set[str] = set()
        self._by_event: dict[type, list[tuple[Instrument, Any]]] = {}
        for instrument, metric in metrics:
            for event in instrument.amounts:
                self._by_event.setdefault(event, []).append((instrument, metric))

    def __call__(self, event: Any) -> None:
        for instrument, metric in self._by_event.get(type(event), ()):
            amount = instrument.amounts[type(event)](event)
            if amount is not None:
                labels = {name: getattr(event, name) for name in instrument.labels}
                if instrument.has_group:
                    labels["group"] = self._group(event.subject.group)
                self._add(metric, amount, labels, event)

    def _group(self, group: str) -> str:
        if group not in self._groups:
            if len(self._groups) >= MAX_GROUPS:
                return OTHER
            self._groups.add(group)
        return group

    def _add(self, metric: Any, amount: float, labels: dict[str, Any], event: Any) -> None:
        raise NotImplementedError
