"""What exporters of metrics and of traces have in common: each is a listener."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from ... import events
from ...clock import time
from ...conf import Conf
from ...events import Subject
from ...extension import part
from ...threads import Mutex, free_after_fork
from ...transport import Server
from ..metrics import OTHER

logger = logging.getLogger("django_redis_lock.metrics")

#: The most groups of an exporter; further groups are "other".
MAX_GROUPS = 100

#: What happens to groups of locks, to groups of values, and to servers.
LOCK, VALUE, SERVER = "lock", "value", "server"


class Instrument(NamedTuple):
    """A counter or histogram.

    Attributes:
        labels: attributes of the event that become labels, besides the group or server, and all
            that each can be.
        amounts: how much an event of each type adds; None: nothing.
        of: LOCK, VALUE or SERVER.
    """

    name: str
    description: str
    amounts: Mapping[type, Callable[[Any], float | None]]
    labels: Mapping[str, Sequence[object]] = {}
    of: str = LOCK

    @property
    def label_names(self) -> tuple[str, ...]:
        return ("server" if self.of == SERVER else "group", *self.labels)


def once(event: object) -> float:
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
        of=VALUE,
    ),
    Instrument(
        "values_computed_without_redis",
        "Values computed without Redis",
        {events.Computed: lambda e: e.values if e.without_redis and not e.error else None},
        of=VALUE,
    ),
    Instrument(
        "computations_saved",
        "Computations saved: the caller got another's result, or the stale value",
        {events.Shared: lambda event: event.values},
        {"stale": (False, True)},
        VALUE,
    ),
    Instrument(
        "reads",
        "Values that get_or_set looked for, by whether it found them",
        {events.Read: lambda event: event.values},
        {"result": ("hit", "stale", "miss")},
        VALUE,
    ),
    Instrument(
        "refreshes_failed",
        "Stale values whose refresh failed",
        {events.RefreshFailed: once},
        of=VALUE,
    ),
    Instrument(
        "outages", "Times a Redis server stopped answering", {events.ServerDown: once}, of=SERVER
    ),
    Instrument(
        "fallbacks", "Locks taken without Redis", {events.FellBack: once}, {"how": ("local", "run")}
    ),
)

#: In seconds.
HISTOGRAMS = (
    Instrument("wait", "How long acquisitions waited", {events.Acquired: lambda e: e.waited}),
    Instrument(
        "hold",
        "How long locks were held",
        {events.Released: lambda e: e.held, events.Lost: lambda e: e.held},
    ),
    Instrument(
        "computation",
        "How long computations took",
        {events.Computed: lambda e: e.seconds},
        of=VALUE,
    ),
)


class Gauge(NamedTuple):
    """What is read from Redis when somebody asks for it; ``amount``: of the locks of a group."""

    name: str
    description: str
    amount: Callable[[Sequence[Any]], float]


GAUGES = (
    Gauge("held_locks", "Locks that are held now", len),
    Gauge(
        "silent_locks",
        "Held locks of whose process nothing has been heard for long",
        lambda held: sum(bool(each.lock.silent) for each in held),
    ),
    Gauge(
        "oldest_lock_seconds",
        "How long the lock that is held longest has been held",
        lambda held: max((each.lock.held_for or 0.0 for each in held), default=0.0),
    ),
)
#: All gauges of one collection have one answer.
GAUGES_LAST_SECONDS = 1.0


class Exporter:
    """Counters exist as 0 from the first event of their group or server on: one that appeared as 1
    would have no increase, and its first event no alert."""

    def __init__(
        self,
        counters: Sequence[tuple[Instrument, Any]],
        histograms: Sequence[tuple[Instrument, Any]],
    ) -> None:
        self._groups: set[str] = set()
        self._mutex = free_after_fork(Mutex())
        self._counters = counters
        self._by_event: dict[type, list[tuple[Instrument, Any]]] = {}
        # What is only begun by them must have its series before it can end badly.
        self._kinds = {events.Contended: LOCK, events.Computing: VALUE}
        for instrument, metric in (*counters, *histograms):
            for event in instrument.amounts:
                self._by_event.setdefault(event, []).append((instrument, metric))
                self._kinds[event] = instrument.of
        self._begun: set[tuple[str, str]] = set()

    def __call__(self, event: Any) -> None:
        kind = self._kinds.get(type(event))
        if kind is None:
            return
        if kind == SERVER:
            of = self._begin(SERVER, event.server)
        else:
            subject = event.subject
            of = self._begin(kind, self._group(subject.group))
            self.begin_server(subject.server)
        for instrument, metric in self._by_event.get(type(event), ()):
            amount = instrument.amounts[type(event)](event)
            if amount is not None:
                labels = {name: getattr(event, name) for name in instrument.labels}
                self._add(metric, amount, {**of, **labels}, event)

    def begin_server(self, server: Server | None) -> None:
        """``server``: None in memory."""
        for node in server.nodes() if server else ():
            self._begin(SERVER, str(node))

    def _begin(self, kind: str, of: str) -> dict[str, Any]:
        """Returns the labels of the group or server ``of``."""
        first = {"server" if kind == SERVER else "group": of}
        if (kind, of) not in self._begun:
            self._begun.add((kind, of))
            for instrument, metric in self._counters:
                if instrument.of == kind:
                    for values in product(*instrument.labels.values()):
                        labels = dict(zip(instrument.labels, values, strict=True))
                        self._add(metric, 0, {**first, **labels}, None)
        return first

    _read_at, _held = -math.inf, dict[str, list[Any]]()

    def gauges(self) -> dict[str, list[Any]]:
        """The held locks of each group; those that this process has had a lock of have an empty
        list, unless a cache does not answer: then it is not known whether they are held."""
        now = time.monotonic()
        if now >= self._read_at + GAUGES_LAST_SECONDS:
            held: dict[str, list[Any]] = {}
            try:
                now_held = part("held_locks").held_locks(kinds=("lock",))
                if not now_held.failures:
                    held = {of: [] for kind, of in self._begun.copy() if kind == LOCK}
                for each in now_held.found:
                    held.setdefault(self._group(each.group), []).append(each)
            except Exception:
                logger.exception("Could not read the held locks")
            self._read_at, self._held = time.monotonic(), held
        return self._held

    def _group(self, group: str) -> str:
        if group not in self._groups:
            with self._mutex:
                if len(self._groups) < MAX_GROUPS:
                    self._groups.add(group)
                return group if group in self._groups else OTHER
        return group

    def _add(self, metric: Any, amount: float, labels: dict[str, Any], event: object) -> None:
        raise NotImplementedError


class Span(NamedTuple):
    """Something that has ended.

    Attributes:
        operation: ``"cache get"``, ``"cache put"``, ``"cache wait"``, ``"lock wait"`` or
            ``"lock acquire"``.
        began, ended: Unix times in seconds.
        leader: the trace to which the span refers, as a ``traceparent``; or empty.
    """

    operation: str
    subject: Subject
    began: float
    ended: float
    about: Mapping[str, Any]
    leader: str


class Spans:
    def __init__(self) -> None:
        #: The open spans of computations, by the ids of their subjects, which live as long.
        self._open: dict[int, Any] = {}

    def record(self, span: Span) -> None:
        raise NotImplementedError

    def begin(self, subject: Subject) -> Any:
        """Begin a span around a computation; returns what ``end`` needs, or None without one."""
        raise NotImplementedError

    def end(self, begun: Any, error: BaseException | None) -> None:
        raise NotImplementedError

    def __call__(self, event: object) -> None:
        if isinstance(event, events.Read):
            found = event.result != "miss"
            about = {"cache.hit": found, "cache.result": event.result}
            self._record(
                *("cache get", event.subject, event.seconds, about, event.values),
                began=event.began,
            )
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
            if (begun := self.begin(event.subject)) is not None:
                self._open[id(event.subject)] = begun
        elif isinstance(event, events.Computed):
            ended = self._open.pop(id(event.subject), None)
            if ended is not None:
                self.end(ended, event.error)

    def _record(
        self,
        operation: str,
        subject: Subject,
        seconds: float,
        about: Mapping[str, Any],
        values: int = 1,
        began: float | None = None,
        leader: str = "",
    ) -> None:
        """Record what took ``seconds`` and ends now, or else ``began`` then (monotonic seconds)."""
        ended = time.time()
        if began is not None:  # If the thread stands still here, it seems to have ended earlier.
            ended -= time.monotonic() - began - seconds
        about = {**about, **_server(subject)}
        if values > 1:
            about["cache.values"] = values
        self.record(Span(operation, subject, ended - seconds, ended, about, leader))


def _slow(subject: Subject) -> float:
    conf: Conf = Conf() if subject.cache is None else subject.cache.conf
    return conf.SLOW_ACQUISITION


def _server(subject: Subject) -> dict[str, Any]:
    """By OpenTelemetry's conventions for databases; none in memory."""
    if subject.server is None or getattr(subject.cache, "in_memory", False):
        return {}
    settings = subject.server.address.connection_kwargs
    known = {
        "db.namespace": str(settings.get("db") or 0),
        "server.address": settings.get("host") or settings.get("path"),
        "server.port": settings.get("port"),
    }
    return {"db.system.name": "redis", **{name: value for name, value in known.items() if value}}


def subscribe_instead(exporter: Callable[[object], None]) -> None:
    """Have ``exporter`` listen, instead of one of its class that was started before."""
    for listener in events.listeners:
        # By name: a reloaded module has another class.
        if type(listener).__qualname__ == type(exporter).__qualname__:
            events.unsubscribe(listener)
    events.subscribe(exporter, reads=True)
