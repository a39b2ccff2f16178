"""What the histories of a soak run must not contain.

Events of lock workloads, each with ``lock`` and ``fence``:

``held``      the handle said that it held the lock, at ``at`` and since ``since`` (both certain)
``wrote``     the ledger has taken the number ``number`` from the holder

Events of the cache workload, each with ``key``:

``computed``  a computation ran from ``began`` until ``at``, for a call that began at ``asked`` and
              at ``took`` sent the request that made it the leader; ``id`` names it
``alone``     the same, but the caller could not ask Redis who else computes
``written``   another value or a deletion was confirmed; sent at ``began``; ``id`` names the value
``writing``   such a write is about to be sent; ``id`` names the value
``read``      ``get_or_set``, called at ``began``, returned the value ``id``

``frozen``    ``worker`` was stopped from ``began`` until ``at``
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

from .history import Event

__all__ = ["check", "check_cache", "check_fences", "check_holders", "check_ledger"]


#: Seconds in which a write that was never confirmed may be carried out: its connection was cut, or
#: its process was killed.
UNCONFIRMED = 10.0


def check(events: list[Event], *, exclusive: bool = True) -> list[str]:
    """All violations, a sentence each. ``exclusive``: False if locks themselves may be evicted."""
    found = [*check_fences(events), *check_ledger(events), *check_cache(events)]
    return [*check_holders(events), *found] if exclusive else found


def check_holders(events: Iterable[Event]) -> Iterator[str]:
    """S1: no two holders of one lock at the same time."""
    for lock, spans in _holders(events).items():
        latest: tuple[float, float, int, str] | None = None
        for span in sorted(spans):
            if latest is not None and span[0] < latest[1]:
                yield (
                    f"S1: {lock} was held by {latest[3]} (fence {latest[2]}) until {latest[1]:.6f}"
                    f" and by {span[3]} (fence {span[2]}) from {span[0]:.6f}"
                )
            if latest is None or span[1] > latest[1]:
                latest = span


def check_fences(events: Iterable[Event]) -> Iterator[str]:
    """S4: who holds a lock later has a greater fence."""
    for lock, spans in _holders(events).items():
        for one, other in itertools.pairwise(sorted(spans)):
            if other[2] <= one[2]:
                yield f"S4: {lock} had fence {one[2]} ({one[3]}) and later {other[2]} ({other[3]})"


def _holders(events: Iterable[Event]) -> dict[str, list[tuple[float, float, int, str]]]:
    """For each lock when who held it: from, until, fence, process. One span for each fence."""
    spans: dict[tuple[str, int, str], tuple[float, float]] = {}
    for event in events:
        if event.kind == "held":
            holder = event.values["lock"], event.values["fence"], event.process
            since, _ = spans.get(holder, (event.values["since"], 0.0))
            spans[holder] = min(since, event.values["since"]), event.at
    found = defaultdict(list)
    for (lock, fence, process), (since, until) in spans.items():
        found[lock].append((since, until, fence, process))
    return found


def check_ledger(events: Iterable[Event]) -> Iterator[str]:
    """A counter that takes a write only with the greatest fence it has seen loses none."""
    numbers: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event.kind == "wrote":
            numbers[event.values["lock"]].append((event.values["fence"], event.values["number"]))
    for lock, written in numbers.items():
        for (_, one), (fence, other) in itertools.pairwise(sorted(written)):
            if other <= one:
                yield f"the counter of {lock} went from {one} to {other} with fence {fence}"


def check_cache(events: list[Event]) -> Iterator[str]:
    """C1: one computation of a key at a time. C2: what was written is not overwritten by an older
    computation.

    A computation without Redis is none of C1's: whatever happens to Redis, callers get their values
    (C3). No fault of a server excuses any other, since flights outlast them; only a leader that was
    stopped itself may find another one computing.
    """
    frozen = defaultdict(list)
    by_key: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in ("computed", "alone", "writing", "written", "read"):
            by_key[event.values["key"]].append(event)
        elif event.kind == "frozen":
            frozen[event.values["worker"]].append((event.values["began"], event.at))
    for key, mine in by_key.items():
        written = sorted(
            (e.values["began"], e.at, e.values["id"]) for e in mine if e.kind == "written"
        )
        computed = [e for e in mine if e.kind == "computed"]
        confirmed = {value for _, _, value in written}
        ending = written + [
            (e.at, e.at + UNCONFIRMED, e.values["id"])
            for e in mine
            if e.kind == "writing" and e.values["id"] not in confirmed
        ]
        yield from _computed_twice(key, computed, ending, frozen)
        # A write counts from its end: of two at the same time, either may be the later one.
        origins = {
            e.values["id"]: e.values["began"] for e in mine if e.kind in ("computed", "alone")
        }
        origins |= {value: end for _, end, value in written}
        yield from _stale_reads(key, [e for e in mine if e.kind == "read"], origins, written)


def _computed_twice(
    key: str,
    computed: list[Event],
    written: list[tuple[float, float, str]],
    frozen: dict[str, list[tuple[float, float]]],
) -> Iterator[str]:
    def was_frozen(event: Event) -> bool:
        spans = frozen.get(event.process, ())
        return any(start < event.at and end > event.values["asked"] for start, end in spans)

    computed = sorted(computed, key=lambda event: event.values["began"])
    for number, one in enumerate(computed):
        for other in itertools.islice(computed, number + 1, None):
            if (began := other.values["began"]) >= one.at:
                break
            # A write ends a computation; it may have been carried out at any moment of its call.
            # Redis may have made the leader one as soon as it was asked, before it can begin.
            ended = any(s < began and e > one.values["took"] for s, e, _ in written)
            if not ended and not was_frozen(one) and not was_frozen(other):
                names = f"{one.values['id']} and as {other.values['id']}"
                yield f"C1: {key} was computed as {names} at the same time"


def _stale_reads(
    key: str,
    reads: list[Event],
    origins: dict[str, float],
    written: list[tuple[float, float, str]],
) -> Iterator[str]:
    # Of the writes that began no earlier than each one, the one that was done first.
    first_done = list(itertools.accumulate(reversed(written), lambda a, b: min(a, b, key=_done)))
    first_done.reverse()
    for read in reads:
        value, asked = read.values["id"], read.values["began"]
        origin = origins.get(value)
        if origin is None:
            continue  # Its process was killed before it could say when it began.
        later = bisect.bisect_right(written, origin, key=lambda write: write[0])
        if later < len(written) and _done(first_done[later]) < asked:
            by = first_done[later][2]
            yield f"C2: {key} had the value {value} although {by} was written after it began"


def _done(write: tuple[float, float, str]) -> float:
    return write[1]
