"""What the histories of a soak run must not contain.

Events of lock workloads, each with ``lock`` and ``fence``:

``held``      the handle said that it held the lock, at ``at`` and since ``since`` (both certain);
              its acquire had begun at ``asked``; perhaps with the ``limit`` of the lock
``lost``      the holder knew by ``at`` that it no longer held the lock it had since ``since``
``released``  a call that began at ``asked`` with a wrong token ended without an error
``gave-up``   a call that began at ``asked`` waited for its whole ``blocking_timeout``
``wrote``     the ledger has taken the number ``number`` from the holder

Events of the cache workload, each with ``key``:

``computed``  a computation ran from ``began`` until ``at``, for a call that began at ``asked`` and
              at ``took`` sent the request that made it the leader; ``id`` names it
``alone``     the same, but the caller could not ask Redis who else computes
``written``   another value or a deletion was confirmed; sent at ``began``; ``id`` names the value
``writing``   such a write is about to be sent; ``id`` names the value
``read``      ``get_or_set``, called at ``began``, returned the value ``id``

Events of the workload of ``idempotent()``, each with ``request``, its user and key:

``began``     the view ran, as the run ``id``
``ran``       it ran well from ``began`` until ``at``; ``held``: it still had its lock then
``answered``  a client, who had sent the request at ``asked``, got what the run ``id`` returned;
              ``kept``: it could be stored, and was by a holder of the lock
``replayed``  the client got the stored response, that of the run ``id``

Events of the workload of ``unique_task()``, each with ``queue``, the task and its name:

``queued``    the message ``id`` was sent, by a call that began at ``asked``
``skipped``   a call that began at ``asked`` sent none, because of the message ``id``
``popped``    a worker took the message ``id`` from the queue
``started``   and the task began; with ``until="start"`` its name is free by then
``worked``    and it ran from ``began`` until ``at``, and still had its name then

``fault``     something happened from ``began`` until ``at``
``frozen``    ``worker`` was stopped from ``began`` until ``at``
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .history import Event

__all__ = ["BLOCKING_TIMEOUT", "LIFETIME", "check"]


#: Seconds in which a write that was never confirmed may be carried out: its connection was cut, or
#: its process was killed.
UNCONFIRMED = 10.0
#: Seconds that all locks live if they are not renewed.
LIFETIME = 2.0
#: Seconds that all calls wait for a lock.
BLOCKING_TIMEOUT = 3.0
#: Seconds for which a message has its name.
QUEUED = 4.0
#: Seconds without progress that the faults explain.
STALL = 20.0


def check(events: list[Event], *, exclusive: bool = True) -> list[str]:
    """All violations, a sentence each. ``exclusive``: False if locks themselves may be evicted."""
    found = [*check_fences(events, exclusive), *check_ledger(events), *check_cache(events)]
    found += [*check_progress(events), *check_waits(events)]
    found += [*check_requests(events), *check_queue(events)] if exclusive else []
    return [*check_holders(events), *check_releases(events), *found] if exclusive else found


def check_holders(events: Iterable[Event]) -> Iterator[str]:
    """S1: no two holders of one lock at the same time. S7: no more than its limit."""
    events = list(events)
    limits = _limits(events)
    for lock, spans in _holders(events).items():
        if lock in limits:
            yield from _too_many(lock, limits[lock], spans)
            continue
        latest: Holder | None = None
        for span in sorted(spans):
            if latest is not None and span.since < latest.until:
                yield (
                    f"S1: {lock} was held by {latest.process} (fence {latest.fence}) until"
                    f" {latest.until:.6f} and by {span.process} (fence {span.fence}) from"
                    f" {span.since:.6f}"
                )
            if latest is None or span.until > latest.until:
                latest = span


def _limits(events: list[Event]) -> dict[str, int]:
    """Of the locks that several may hold at a time."""
    return {e.values["lock"]: e.values["limit"] for e in events if "limit" in e.values}


def _too_many(lock: str, limit: int, spans: list[Holder]) -> Iterator[str]:
    ends: list[float] = []
    for span in sorted(spans):
        ends = [end for end in ends if end > span.since] + [span.until]
        if len(ends) > limit:
            yield (
                f"S7: {lock} with a limit of {limit} was held by {len(ends)} at {span.since:.6f},"
                f" the last of them {span.process} (fence {span.fence})"
            )


def check_fences(events: Iterable[Event], exclusive: bool = True) -> Iterator[str]:
    """S4: who acquires a lock later has a greater fence.

    Where two may hold a lock at a time, the first of them may be the last to notice that it holds
    it. So only an acquire that began after another one had ended is known to be later.
    """
    events = list(events)
    limits = _limits(events)
    for lock, spans in _holders(events).items():
        one_by_one = exclusive and lock not in limits
        spans.sort()
        greatest = list(itertools.accumulate(spans, lambda a, b: max(a, b, key=_fence)))
        for span in spans:
            before = bisect.bisect_left(spans, (span.since if one_by_one else span.asked,))
            if before and (one := greatest[before - 1]).fence >= span.fence:
                yield (
                    f"S4: {lock} had fence {one.fence} ({one.process}) and later {span.fence}"
                    f" ({span.process})"
                )


class Holder(NamedTuple):
    """When a process held a lock with one fence, and when it had begun to acquire it."""

    since: float
    until: float
    fence: int
    process: str
    asked: float


def _fence(holder: Holder) -> int:
    return holder.fence


def _holders(events: Iterable[Event]) -> dict[str, list[Holder]]:
    """The holders of each lock."""
    spans: dict[tuple[str, int, str], tuple[float, float, float]] = {}
    for event in events:
        if event.kind == "held":
            holder = event.values["lock"], event.values["fence"], event.process
            since, asked = event.values["since"], event.values["asked"]
            since = min(since, spans.get(holder, (since,))[0])
            spans[holder] = since, event.at, asked
    found = defaultdict(list)
    for (lock, fence, process), (since, until, asked) in spans.items():
        found[lock].append(Holder(since, until, fence, process, asked))
    return found


def check_releases(events: Iterable[Event]) -> Iterator[str]:
    """S2: only the holder releases a lock. What a wrong token ended was not over by itself: it
    was lost long before the end of its lifetime."""
    lost, released = defaultdict(list), []
    for event in events:
        if event.kind == "lost":
            lost[event.values["lock"]].append(event)
        elif event.kind == "released":
            released.append(event)
    for thief in released:
        for loser in lost[thief.values["lock"]]:
            since = loser.values["since"]
            if (
                loser.at - since < LIFETIME
                and since < thief.at
                and thief.values["asked"] < loser.at
            ):
                yield (
                    f"S2: {loser.process} lost {thief.values['lock']} after"
                    f" {loser.at - since:.3f} s when {thief.process} released it with a wrong token"
                )


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


def check_progress(events: Iterable[Event]) -> Iterator[str]:
    """L2: no fault keeps a lock for long from those who want it, once it is over. All names are
    wanted all the time."""
    moments: dict[str, list[float]] = defaultdict(list)
    faults: list[tuple[float, float]] = []
    for event in events:
        if event.kind == "held":
            moments[event.values["lock"]].append(event.at)
        elif event.kind == "fault":
            faults.append((event.values["began"], event.at))
    for lock, held in moments.items():
        for one, other in itertools.pairwise(sorted(held)):
            lasted = sum(max(0.0, min(end, other) - max(start, one)) for start, end in faults)
            if other - one - lasted > STALL:
                yield f"L2: {lock} had no holder from {one:.3f} to {other:.3f}"


def check_waits(events: Iterable[Event]) -> Iterator[str]:
    """L5: a call that was refused for its ``blocking_timeout`` waited that long, and not for
    longer than a frozen process, a frozen server and a busy machine explain."""
    for event in events:
        if event.kind == "gave-up":
            waited = event.at - event.values["asked"]
            if not BLOCKING_TIMEOUT - 0.02 <= waited <= BLOCKING_TIMEOUT + STALL:
                yield f"L5: {event.process} waited {waited:.3f} s for {event.values['lock']}"


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


#: From when until when, and what.
Span = tuple[float, float, str]


def _overlaps(spans: Iterable[Span]) -> Iterator[tuple[str, str]]:
    """Two that were there at the same time, for each that was not alone at its beginning."""
    latest: Span | None = None
    for span in sorted(spans):
        if latest is not None and span[0] < latest[1]:
            yield latest[2], span[2]
        if latest is None or span[1] > latest[1]:
            latest = span


def _by(name: str, events: Iterable[Event]) -> dict[str, list[Event]]:
    of: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if name in event.values:
            of[event.values[name]].append(event)
    return of


def check_requests(events: Iterable[Event]) -> Iterator[str]:
    """One run for each request, and no answer that no run has given."""
    for request, mine in _by("request", events).items():
        ran = [event for event in mine if event.kind == "ran"]
        spans = [(e.values["began"], e.at, e.values["id"]) for e in ran if e.values["held"]]
        for one, other in _overlaps(spans):
            yield f"I1: {request} ran as {one} and as {other} at the same time"
        begins = [event for event in mine if event.kind == "began"]
        for answer in mine:
            if answer.kind == "answered" and answer.values["kept"]:
                for run in (run for run in begins if run.at > answer.at):
                    ids = f"{answer.values['id']} and ran again as {run.values['id']}"
                    yield f"I2: {request} was answered by {ids}"
        replays = [event for event in mine if event.kind == "replayed"]
        ends = {event.values["id"]: event.at for event in ran}
        for replay in replays:
            if replay.at < ends.get(replay.values["id"], math.inf):
                yield f"I3: {request} was answered by {replay.values['id']}, which had not run"
        first = next((e for e in mine if e.kind == "answered" and e.values["kept"]), None)
        for replay in replays if first is not None else ():
            if replay.values["asked"] > first.at and replay.values["id"] != first.values["id"]:
                ids = f"{first.values['id']} and later by {replay.values['id']}"
                yield f"I4: {request} was answered by {ids}"


def check_queue(events: Iterable[Event]) -> Iterator[str]:
    """One message with a name at a time, one run until it is done, and nothing skipped without a
    run that begins later."""
    for queue, mine in _by("queue", events).items():
        at = {(event.kind, event.values["id"]): event.at for event in mine}
        waited = [
            (e.at, min(popped, e.values["asked"] + QUEUED), e.values["id"])
            for e in mine
            if e.kind == "queued" and (popped := at.get(("popped", e.values["id"])))
        ]
        worked = [(e.values["began"], e.at, e.values["id"]) for e in mine if e.kind == "worked"]
        for what, spans in (("queued", waited), ("run", worked)):
            for one, other in _overlaps(span for span in spans if span[0] < span[1]):
                yield f"U1: {queue} was {what} as {one} and as {other} at the same time"
        if queue.startswith("start"):  # Until it is done, a change during the run is skipped.
            for skip in (event for event in mine if event.kind == "skipped"):
                started = at.get(("started", skip.values["id"]), math.inf)
                if started < skip.values["asked"]:
                    yield f"U2: {queue} was skipped for {skip.values['id']}, which had started"
