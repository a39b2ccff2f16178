"""How locks ended, as Redis keeps it for people.

The keeper records how the locks ended that it had described. A holder that dies records nothing.
Its description outlasts its lock by a day; the script that takes the lock next finds it there, and
the process that ran the script records it. So does a reader that comes before.
"""

from __future__ import annotations

import json
import os
import threading
from typing import NamedTuple

from .. import events
from ..keeper import SentOnce, keeper
from ..protocol import Call, LockKeys, Owner, Reply, Vanished, encodable, hostname, printable
from ..protocol.holder_scripts import RECORD_EVENT
from ..protocol.keys import NEWS, events_key
from ..protocol.owner import MAX_PID, MAX_UNIX_TIME, bounded, fields_of
from ..threads import get_logger
from ..transport import Server

logger = get_logger("django_redis_lock.keeper")

#: Milliseconds for which events are kept after the last of them; what is news, for a day.
HOUR, DAY = 3_600_000, 86_400_000
#: For a holder to record that its lock was lost.
REPORT_SECONDS = 0.5
#: Events kept of each lock.
MAX_EVENTS = 10
#: What is worth looking for on the next morning.
NEWSWORTHY = ("lost", "reset", "crashed")
#: Kept of each text in an event.
MAX_TEXT_CHARACTERS = 200
#: The fields of an event that are texts.
TEXTS = ("what", "id", "host", "thread", "label", "doing", "note", "lock", "name")


class Event(NamedTuple):
    """Something that happened to a lock.

    Attributes:
        at: Unix time in seconds, by the server's clock.
        what: "released"; "lost", as its holder noticed; "reset", by force; "crashed", when the
            lock ended and its holder said nothing, because it died or was cut off.
        owner: the holder.
        note: why it was lost, or who has reset it.
        held: seconds for which it had been held; None where that is not known.
        lock: the lock's key, if it is news.
        name: that of the lock in its cache, if its key may not show it.
    """

    at: float
    what: str
    owner: Owner
    note: str = ""
    held: float | None = None
    lock: bytes = b""
    name: str = ""


def note_vanished(
    server: Server, keys: LockKeys, vanished: Vanished, subject: events.Subject | None
) -> None:
    """Record that a holder has crashed."""
    event = _crash(vanished)
    if event is not None:
        keeper().add(CrashRecord(server, keys.name, event, subject))


class CrashRecord(SentOnce):
    """Records that a holder has crashed, unless it has recorded itself that it lost the lock. It
    has a moment for that: a waiter learns of the end as early as the holder."""

    def __init__(
        self, server: Server, name: bytes, event: Event, subject: events.Subject | None
    ) -> None:
        at = round(event.at * 1e6)
        of_it = (name, event.what, event.owner, event.note, event.held, event.name)
        super().__init__(server, note_call(*of_it, at=at, server=server))
        self.due += REPORT_SECONDS
        self._known = name, event.owner, subject

    def replied(self, value: Reply, sent_at: float) -> None:
        name, owner, subject = self._known
        if int(value):
            logger.warning(
                "The lock %(lock)s was never released: its holder %(holder)s crashed or was cut "
                "off",
                {"lock": printable(name), "holder": str(owner)},
            )
            if events.listeners and subject is not None:
                # Of a lock on several servers, each has its own figures.
                events.emit(events.Crashed(subject._replace(server=self.server), owner))
        super().replied(value, sent_at)

    def failed(self, error: Exception, now: float) -> None:
        self.replied(1, now)


def _crash(vanished: Vanished) -> Event | None:
    described = fields_of(vanished.fields)
    owner = Owner.from_fields(described, described.get("id", ""))
    if not owner.id:
        return None  # It was released, and rested.
    at = vanished.ended_us / 1e6
    held = None if owner.since is None else max(0.0, at - owner.since)
    return Event(at, "crashed", owner, held=held, name=described.get("name", ""))


def event_args(
    key: bytes,
    what: str,
    owner: Owner,
    note: str = "",
    held: float | None = None,
    name: str = "",
) -> tuple[str | int, ...]:
    """The first arguments of RECORD_EVENT: that ``what`` happened to the lock at ``key``, whose
    ``name`` the key may not show."""
    fields = {"host": owner.host, "thread": owner.thread, "label": owner.label}
    fields |= {"doing": owner.doing, "note": note, "name": name}
    texts = {name: text[:MAX_TEXT_CHARACTERS] for name, text in fields.items() if text}
    event: dict[str, object] = {"what": what, "id": owner.id, "pid": owner.pid, **texts}
    if held is not None:
        event["held"] = round(held, 3)
    if what in NEWSWORTHY:
        event["lock"] = key.decode(errors="surrogateescape")
    return json.dumps(event), MAX_EVENTS, DAY if what in NEWSWORTHY else HOUR


def note_call(
    key: bytes,
    what: str,
    owner: Owner,
    note: str = "",
    held: float | None = None,
    name: str = "",
    at: int | None = None,
    server: Server | None = None,
) -> Call:
    """Records that ``what`` happened to the lock at ``key``: now, or ``at`` microseconds of the
    server's clock; among the news of all locks of ``server``, too, if it is any."""
    # Each end once: the one who has ended it, or noticed it first, knows more.
    before = {"crashed": "lost", "lost": "reset"}.get(what)
    known = json.dumps({"what": before, "id": owner.id})[:-1] if before else ""
    args = (*event_args(key, what, owner, note, held, name), at or "", known)
    news = (server.index_of(NEWS, key),) if server and what in NEWSWORTHY else ()
    return Call(RECORD_EVENT, (events_key(key), *news), args)


def read_events(lines: bytes, vanished: Vanished | None = None) -> tuple[Event, ...]:
    """The recorded events, the latest first; anything else is passed over. ``vanished``: the last
    holder of the free lock, if it did not release."""
    crash = None if vanished is None else _crash(vanished)
    events = [e for e in (crash, *map(_read, lines.splitlines())) if e is not None]
    # A crash is recorded some time after it.
    events.sort(key=lambda event: event.at, reverse=True)
    # A holder that was only stopped or cut off, and went on, has recorded more than its successor.
    went_on = {event.owner.id for event in events if event.what != "crashed"}
    return tuple(e for e in events if e.what != "crashed" or e.owner.id not in went_on)


def _read(line: bytes) -> Event | None:
    at_us, _, event = line.partition(b" ")
    try:
        recorded = json.loads(event)
        texts = {name: str(recorded.get(name, "")) for name in TEXTS}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    at = bounded(at_us, MAX_UNIX_TIME * 1e6)
    pid = bounded(recorded.get("pid", 0), MAX_PID)
    held = None if recorded.get("held") is None else bounded(recorded["held"], MAX_UNIX_TIME)
    if at is None or pid is None or (held is None and recorded.get("held") is not None):
        return None
    where = (texts["host"], int(pid), texts["thread"], texts["label"])
    owner = Owner(texts["id"], *where, doing=texts["doing"])
    lock = texts["lock"].encode(errors="surrogateescape")
    return Event(at / 1e6, texts["what"], owner, texts["note"], held, lock, texts["name"])


def code_here() -> str:
    """Who releases by force, if it is code and not a person."""
    thread = threading.current_thread().name
    return f"reset() in {hostname()}, process {os.getpid()}, thread {encodable(thread)}"
