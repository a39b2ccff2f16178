"""What has happened last to a lock, noted for people who look at it later.

Only the ends of locks held longer than half a second are noted, and by the keeper: it costs
neither acquiring nor releasing anything, and a held lock no memory. Each lock keeps its last MOST
events, for an hour, or for a day after one that is worth looking for. The end of a holder that dies
is noted by nobody.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from .hold import printable
from .inventory_scripts import NOTE
from .keeper import Job, keeper
from .keys import LockKeys, events_key
from .owner import Owner
from .scripts import Call
from .server import Server

__all__ = ["Event", "Note", "note_call", "read_events"]

logger = logging.getLogger("django_redis_lock.keeper")

#: Events kept of each lock.
MOST = 10
#: Milliseconds for which they are kept after the last of them.
HOUR, DAY = 3_600_000, 86_400_000
#: What is worth looking for on the next morning.
NEWS = ("lost", "reset")
#: Characters kept of each text in an event.
LONGEST = 200


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a lock.

    Attributes:
        at: Unix time in seconds, by the server's clock.
        what: "released", "lost" or "reset".
        id: the fingerprint of the holder's token.
        host, pid, thread, label: the holder; empty and 0 where it is not known.
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


class Note(Job):
    """Writes an event down, once: it is not worth a second try."""

    owed = True  # Many a command releases its lock as the last thing it does.

    def __init__(
        self,
        server: Server,
        due: float,
        keys: LockKeys,
        what: str,
        owner: Owner,
        note: str = "",
        held: float | None = None,
    ) -> None:
        super().__init__(server, due)
        self._lock = keys.lock
        self._call = note_call(keys.lock, what, owner, note, held)

    def call(self, now: float) -> Call:
        return self._call

    def answered(self, value: Any, sent_at: float) -> None:
        keeper().discard(self)

    def failed(self, error: Exception, now: float) -> None:
        keeper().discard(self)
        logger.info("Could not note an event of %s: %s", printable(self._lock), error)


def note_call(
    key: bytes, what: str, owner: Owner, note: str = "", held: float | None = None
) -> Call:
    """Notes that ``what`` happened to the lock at ``key``."""
    holder = {"host": owner.host, "thread": owner.thread, "label": owner.label, "note": note}
    texts = {name: text[:LONGEST] for name, text in holder.items() if text}
    event: dict[str, Any] = {"what": what, "id": owner.id, "pid": owner.pid, **texts}
    if held is not None:
        event["held"] = round(held, 3)
    keep = DAY if what in NEWS else HOUR
    return Call(NOTE, (events_key(key),), (json.dumps(event), MOST, keep))


def read_events(kept: bytes) -> tuple[Event, ...]:
    """The events that ``note_call`` has written, the latest first; anything else is passed over."""
    found = (_read(line) for line in kept.splitlines())
    return tuple(event for event in found if event is not None)


def _read(kept: bytes) -> Event | None:
    at, _, event = kept.partition(b" ")
    try:
        said = json.loads(event)
        texts = {n: str(said.get(n, "")) for n in ("what", "id", "host", "thread", "label", "note")}
        held = None if said.get("held") is None else float(said["held"])
        return Event(at=int(at) / 1e6, pid=int(said.get("pid", 0)), held=held, **texts)
    except (ValueError, TypeError, AttributeError, OverflowError):
        return None
