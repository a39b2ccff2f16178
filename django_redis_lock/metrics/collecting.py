"""Counts the events of this process: a short critical section for each event, and memory for a
limited number of groups."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from typing import Any

from .. import events
from ..conf import Conf
from ..events import Subject
from ..threads import after_fork
from ..transport import Server
from . import figures as at
from .figures import OTHER, Distribution, add, new

#: The most groups between two writes; further groups count as OTHER.
MAX_GROUPS = 100
#: The most acquisitions, releases and reads that wait to be counted. Counting many in a row takes
#: a third of the time, because it finds its data in the processor's cache.
MAX_WAITING = 256


#: Whose figures they are: server, site and group.
Owner = tuple[Server, str, str]
#: What was counted for whom.
Figures = dict[Owner, list[int]]


class Collector(ABC):
    """A listener that counts. May be called in any thread, and in signal handlers."""

    def __init__(self) -> None:
        self._reset()
        after_fork(self._reset)

    @abstractmethod
    def _begun(self, server: Server) -> None:
        """There is a new group of ``server``; called with the ``mutex`` held."""

    def _reset(self) -> None:
        # A signal handler may count while it interrupts the counting.
        self.mutex = threading.RLock()
        #: Acquisitions, releases and reads that wait to be counted, and how many may wait.
        self._waiting: deque[Any] = deque()
        self._reads: deque[tuple[Any, str, str, str]] = deque()
        self._enough = 1
        self._figures: Figures = {}
        #: The last taken figures of groups with held locks, for ``usual_hold``.
        self._holders: Figures = {}

    def __call__(self, event: Any) -> None:
        if type(event) in _FREQUENT:
            self._waiting.append(event)
            if len(self._waiting) >= self._enough:
                self._count_waiting()
                self._enough = MAX_WAITING
        elif type(event) in _COUNTS:
            with self.mutex:
                self._count(event)

    def count_read(self, cache: Any, key: str, group: str, result: str, values: int) -> None:
        read = (cache, key, group, result)
        if values == 1:
            self._reads.append(read)
        else:
            self._reads.extend(repeat(read, values))
        if len(self._reads) >= self._enough:
            self._count_waiting()
            self._enough = MAX_WAITING

    def _count_waiting(self) -> None:
        with self.mutex:
            while self._waiting:
                self._count(self._waiting.popleft())
            reads = []
            with suppress(IndexError):  # None are left; a signal handler may have taken some.
                while True:
                    reads.append(self._reads.popleft())
            for (cache, key, group, result), values in Counter(reads).items():
                self._count(events.Read(cache, str(key), group, result, values, 0.0, 0.0))

    def _count(self, event: Any) -> None:
        try:
            self._add(event)
        except Exception:  # Reads are counted outside of ``emit``.
            events.log_failure(self, event)

    def _add(self, event: Any) -> None:
        subject: Subject = event.subject
        if subject.server is None:
            return
        owner = (subject.server, subject.site, subject.group)
        figures = self._figures.get(owner)
        if figures is None:
            conf: Conf = Conf() if subject.cache is None else subject.cache.conf
            if not conf.METRICS:
                return
            figures = self._begin(owner)
        _COUNTS[type(event)](figures, event)

    def _begin(self, owner: Owner) -> list[int]:
        """New figures for ``owner``; for OTHER if there are too many groups."""
        self._begun(owner[0])
        if len(self._figures) >= MAX_GROUPS:
            owner = (*owner[:2], OTHER)
        return self._figures.setdefault(owner, new())

    def take(self, server: Server) -> Figures:
        """The figures for ``server`` since the last call."""
        with self.mutex:
            self._count_waiting()
            self._enough = 1  # Count the next event at once: its server may have no job yet.
            mine = [owner for owner in self._figures if owner[0] is server]
            taken = {owner: self._figures.pop(owner) for owner in mine}
            self._holders.update(
                (o, f) for o, f in taken.items() if any(f[at.HOLDS : at.COMPUTING])
            )
            while len(self._holders) > MAX_GROUPS:
                del self._holders[next(iter(self._holders))]
            return taken

    def usual_hold(self, subject: Subject) -> float | None:
        """None if this process held no lock of that group lately."""
        owner = (subject.server, subject.site, subject.group)
        with self.mutex:
            self._count_waiting()
            counted = (self._figures.get(owner), self._holders.get(owner))
            averages = [
                Distribution.at(figures, at.HOLDS).average for figures in counted if figures
            ]
        return next((average for average in averages if average is not None), None)

    def put_back(self, taken: Figures) -> None:
        with self.mutex:
            self._enough = 1
            for owner, figures in taken.items():
                add(self._figures.get(owner) or self._begin(owner), figures)

    def servers(self) -> set[Server]:
        with self.mutex:
            self._count_waiting()
            return {owner[0] for owner in self._figures}


def observe(figures: list[int], distribution: int, seconds: float) -> None:
    microseconds = int(seconds * 1e6)
    figures[distribution] += microseconds
    figures[distribution + 1] = max(figures[distribution + 1], microseconds)
    figures[distribution + 2 + bisect_left(at.BOUNDS, seconds)] += 1


def _one_more(figure: int) -> Callable[[list[int], Any], None]:
    def count(figures: list[int], event: Any) -> None:
        figures[figure] += 1

    return count


def _acquired(figures: list[int], event: events.Acquired) -> None:
    if event.contended:
        figures[at.CONTENDED] += 1
    observe(figures, at.WAITS, event.waited)


def _released(figures: list[int], event: events.Released) -> None:
    observe(figures, at.HOLDS, event.held)


def _lost(figures: list[int], event: events.Lost) -> None:
    figures[at.LOST] += 1
    observe(figures, at.HOLDS, event.held)


def _computed(figures: list[int], event: events.Computed) -> None:
    if event.error is None:
        figures[at.COMPUTED] += event.values
        if event.without_redis:
            figures[at.WITHOUT_REDIS] += event.values
    else:
        figures[at.FAILED] += 1
    observe(figures, at.COMPUTING, event.seconds)


def _shared(figures: list[int], event: events.Shared) -> None:
    figures[at.STALE if event.stale else at.SHARED] += event.values


def _read(figures: list[int], event: events.Read) -> None:
    figures[_READS[event.result]] += event.values


_READS = {"hit": at.HITS, "stale": at.STALE_HITS, "miss": at.MISSES}

#: Events so frequent that they are counted in batches.
_FREQUENT = frozenset({events.Acquired, events.Released})

_COUNTS: dict[type, Callable[[list[int], Any], None]] = {
    events.Acquired: _acquired,
    events.Rejected: _one_more(at.REJECTED),
    events.TimedOut: _one_more(at.TIMED_OUT),
    events.Released: _released,
    events.Lost: _lost,
    events.Crashed: _one_more(at.CRASHED),
    events.FellBack: _one_more(at.FALLBACKS),
    events.Computed: _computed,
    events.Shared: _shared,
    events.Read: _read,
    events.RefreshFailed: _one_more(at.REFRESH_FAILED),
}
