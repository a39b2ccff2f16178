"""What has happened last to a lock, noted for people who look at it later.

Only the ends of locks held longer than half a second are noted, and by the keeper: it costs
neither acquiring nor releasing anything, and a held lock no memory. Each lock keeps its last
MAX_EVENTS events, for an hour, or for a day after one that is worth looking for.

A holder that dies notes nothing. What it said of itself outlasts its lock by a day; the script that
takes the lock next finds it there, and the process that ran the script records it.
So does a reader that comes before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .. import events
from ..keeper import SentOnce, keeper
from ..notices import get_logger
from ..protocol import (
    MAX_PID,
    MAX_UNIX_TIME,
    RECORD_EVENT,
    Call,
    LockKeys,
    Owner,
    bounded,
    events_key,
    fields_of,
    printable,
)
from ..transport import Server

logger = get_logger("django_redis_lock.keeper")

#: Events kept of each lock.
MAX_EVENTS = 10
#: Milliseconds for which they are kept after the last of them.
HOUR, DAY = 3_600_000, 86_400_000
#: What is worth looking for on the next morning.
NEWS = ("lost", "reset", "crashed")
#: Characters kept of each text in an event.
MAX_TEXT_CHARACTERS = 200
#: The fields of an event that are texts.
TEXTS = ("what", "id", "host", "thread", "label", "doing", "note")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a lock.

    Attributes:
        at: Unix time in seconds, by the server's clock.
        what: "released"; "lost", as its holder noticed; "reset", by force; "crashed", when the
            lock ended and its holder said nothing, because it died or was cut off.
        id: the fingerprint of the holder's token.
        host, pid, thread, label, doing: the holder; empty and 0 where it is not known.
        note: why it was lost, or who has reset it.
        held: seconds for which it had been held; None where that is not known.
    """

    at: float
    what: str
    id: str
    host: str = ""
    pid: int = 0
    thread: str = ""
    label: str = ""
    note: str = ""
    held: float | None = None
    doing: str = ""

    @property
    def owner(self) -> Owner:
        return Owner(self.id, self.host, self.pid, self.thread, self.label, doing=self.doing)


class RecordEvent(SentOnce):
    """Writes an event down. Many a command releases its lock as the last thing it does, so the
    process does this before it ends."""

    def __init__(self, server: Server, key: bytes, what: str, owner: Owner, **more: Any) -> None:
        super().__init__(server, note_call(key, what, owner, **more))
        self._key = key

    def failed(self, error: Exception, now: float) -> None:
        super().failed(error, now)
        logger.info("Could not note an event of %s: %s", printable(self._key), error)


def note_vanished(
    server: Server, keys: LockKeys, found: Any, subject: events.Subject | None
) -> None:
    """Have it noted that a holder has crashed, as a script has ``found``: when the lock's lifetime
    was over, and what the holder had said of itself. ``subject`` is the lock, for those who count
    crashed holders."""
    event = _vanished(found)
    if event is not None:
        logger.warning(
            "The lock %s was never released: its holder %s crashed or was cut off",
            printable(keys.name),
            event.owner,
        )
        more: Any = {"held": event.held, "at": round(event.at * 1e6)}
        keeper().add(RecordEvent(server, keys.name, event.what, event.owner, **more))
        if events.listeners and subject is not None:
            # Of a lock on several servers, each has its own figures.
            events.emit(events.Crashed(subject._replace(server=server), event.owner))


def _vanished(found: Any) -> Event | None:
    ended_us, fields = found
    described = fields_of(fields)
    owner = Owner.from_fields(described, described.get("id", ""))
    if not owner.id:
        return None  # It was released, and rested.
    at = int(ended_us) / 1e6
    held = None if owner.since is None else max(0.0, at - owner.since)
    who = (owner.host, owner.pid, owner.thread, owner.label)
    return Event(at, "crashed", owner.id, *who, held=held, doing=owner.doing)


def note_call(
    key: bytes,
    what: str,
    owner: Owner,
    note: str = "",
    held: float | None = None,
    at: int | None = None,
) -> Call:
    """Notes that ``what`` happened to the lock at ``key``: now, or when the server's clock showed
    ``at`` microseconds."""
    known = {"host": owner.host, "thread": owner.thread, "label": owner.label}
    known |= {"doing": owner.doing, "note": note}
    texts = {name: text[:MAX_TEXT_CHARACTERS] for name, text in known.items() if text}
    event: dict[str, Any] = {"what": what, "id": owner.id, "pid": owner.pid, **texts}
    if held is not None:
        event["held"] = round(held, 3)
    keep = DAY if what in NEWS else HOUR
    return Call(RECORD_EVENT, (events_key(key),), (json.dumps(event), MAX_EVENTS, keep, at or ""))


def read_events(kept: bytes, found: Any = None) -> tuple[Event, ...]:
    """The events that ``note_call`` has written, the latest first; anything else is passed over.

    Args:
        found: the description that a holder has left at the free lock, if there is one.
    """
    left_behind = [] if found is None else [_vanished(found)]
    found_events = [e for e in (*left_behind, *map(_read, kept.splitlines())) if e is not None]
    # Who was only stopped or cut off, and came back, has noted more than who came upon its lock.
    said = {event.id for event in found_events if event.what != "crashed"}
    return tuple(e for e in found_events if e.what != "crashed" or e.id not in said)


def _read(kept: bytes) -> Event | None:
    at_us, _, event = kept.partition(b" ")
    try:
        said = json.loads(event)
        texts = {name: str(said.get(name, "")) for name in TEXTS}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    at = bounded(at_us, MAX_UNIX_TIME * 1e6)
    pid = bounded(said.get("pid", 0), MAX_PID)
    held = None if said.get("held") is None else bounded(said["held"], MAX_UNIX_TIME)
    if at is None or pid is None or (held is None and said.get("held") is not None):
        return None
    return Event(at=at / 1e6, pid=int(pid), held=held, **texts)
