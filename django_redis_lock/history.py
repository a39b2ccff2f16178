"""What is known of holders that are gone, and of processes that hold locks: how locks ended, the
heartbeats of processes, and why a lock was lost. A ``job`` is a ``locking.Renewal``, a ``hold`` a
``locking.Hold``.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from . import events
from .clock import time
from .extension import PartMissing, part
from .keeper import Job, SentOnce, keeper
from .protocol import (
    Call,
    LockKeys,
    Owner,
    Reply,
    Vanished,
    as_bytes,
    encodable,
    fingerprint,
    hostname,
    printable,
    process_id,
    renew_call,
)
from .protocol.holder_scripts import HEARTBEAT, HEARTBEATS, RECORD_EVENT
from .protocol.holders import (
    HEARTBEAT_EVERY,
    MAX_FENCE,
    MAX_PID,
    MAX_UNIX_TIME,
    SILENT_AFTER,
    bounded,
    fields_of,
)
from .protocol.keys import NEWS, events_key, process_key
from .steps import Step, Steps
from .threads import Mutex, free_after_fork, get_logger
from .transport import Answer, Client, Server, is_cluster, run, run_all

logger = get_logger("django_redis_lock.keeper")

#: Milliseconds for which events are kept after the last of them; what is news, and a heartbeat.
HOUR, DAY = 3_600_000, 86_400_000

# -- how locks ended, as Redis keeps it for people ------------------------------------------------
#
# The keeper records how the locks ended that it had described. A holder that dies records nothing.
# Its description outlasts its lock by a day; the script that takes the lock next finds it there,
# and the process that ran the script records it. So does a reader that comes before.

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
    *details: Any,
    at: int | None = None,
    server: Server | None = None,
    **named: Any,
) -> Call:
    """Records what ``event_args`` takes: now, or ``at`` microseconds of the server's clock; among
    the news of all locks of ``server``, too, if it is any."""
    # Each end once: the one who has ended it, or noticed it first, knows more.
    before = {"crashed": "lost", "lost": "reset"}.get(what)
    known = json.dumps({"what": before, "id": owner.id})[:-1] if before else ""
    args = (*event_args(key, what, owner, *details, **named), at or "", known)
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


def ended(job: Any, what: str, note: str = "") -> None:
    """The lock of ``job`` has ended; ``what`` is as in ``Event``."""
    hold = job.hold
    held = time.monotonic() - hold.began
    of_it = (hold.keys.name, what, hold.owner(), note, held, hold.name)
    keeper().add(SentOnce(job.server, note_call(*of_it, server=job.server)))


# -- heartbeats ----------------------------------------------------------------------------------
#
# One key for each process and server has its last heartbeat. And the process listens to a channel
# of the same name, on which RESET publishes which lock was released by force, and to what the
# server reports of changes by other programs: the keeper then renews the lock at once, and so
# learns whether it is lost.

#: A process without described locks still listens for so long: the next one may come soon.
LINGER_SECONDS = 1.0
REPLY_TIMEOUT = 5.0
#: From the loss of a lock to a look at the others.
SUSPECT_SECONDS = 0.1


class Heartbeat(Job):
    """Sends heartbeats, and listens, while this process holds described locks on ``server``."""

    def __init__(self, server: Server) -> None:
        super().__init__(server, _next_beats.get(server, time.monotonic()))
        # A signal handler may come in between.
        self._mutex = free_after_fork(Mutex())
        self._renewals: dict[bytes, Any] = {}
        self._call = Call(HEARTBEAT, (process_key(process_id()),), (DAY,))
        #: When the last one was sent, and the last one that Redis has lost (monotonic).
        self.sent_at = self.forgotten_at = -math.inf
        self._subscription: Any = None

    @classmethod
    def join(cls, renewal: Any) -> Heartbeat:
        """That of the server, which from now on reports changes of this lock."""
        server = renewal.server
        beat = heartbeats.get(server)
        if beat is None:
            beat = heartbeats[server] = cls(server)
        with beat._mutex:
            beat._renewals[renewal.hold.keys.lock] = renewal
            if beat._subscription is None:
                with suppress(PartMissing):  # Else a loss is noticed at the next renewal.
                    listen, channel = part("instant_loss").Subscription, process_key(process_id())
                    beat._subscription = listen(server, channel, beat._received)
                    keeper().start(beat._subscription)
            if beat not in keeper():
                keeper().add(beat)
        return beat

    def leave(self, renewal: Any) -> None:
        key = renewal.hold.keys.lock
        with self._mutex:
            if self._renewals.get(key) is renewal:
                self._renewals.pop(key, None)
            if not self._renewals and self in keeper():
                keeper().reschedule(self, min(self.due, time.monotonic() + LINGER_SECONDS))

    def call(self, now: float) -> Call | None:
        with self._mutex:
            # A caller that was interrupted while it released has not left.
            left = {key: job for key, job in self._renewals.items() if not job.hold.ended}
            self._renewals = left
            if self._renewals:
                return self._call
            keeper().discard(self)
            self.due = _next_beats.get(self.server, now)
            if self._subscription is not None:
                self._subscription.close()
                self._subscription = None
            return None

    def _received(self, key: bytes | None) -> None:
        """``key`` may have changed; None: any of them."""
        with self._mutex:
            jobs = [*self._renewals.values()] if key is None else [self._renewals.get(key)]
        for job in filter(None, jobs):
            keeper().reschedule(job, time.monotonic())

    def suspect_others(self) -> None:
        """A lock is gone, and perhaps others with it. Not all of this is reported: nothing of what
        Redis evicts while it serves the keeper."""
        due = time.monotonic() + SUSPECT_SECONDS
        with self._mutex:
            jobs = [*self._renewals.values()]
        for job in jobs:
            if job.due > due:
                keeper().reschedule(job, due)

    def replied(self, value: Reply, sent_at: float) -> None:
        if not int(value) and self.sent_at > sent_at - DAY / 1000:
            self.forgotten_at = self.sent_at
        self.sent_at = sent_at
        self._beats_at(sent_at + HEARTBEAT_EVERY)

    def failed(self, error: Exception, now: float) -> None:
        logger.info("Could not send a heartbeat: %s", error)
        pause = HEARTBEAT_EVERY if isinstance(error, ResponseError) else HEARTBEAT_EVERY / 4
        if isinstance(error, NoPermissionError):
            pause = math.inf
        self._beats_at(now + pause)

    def _beats_at(self, due: float) -> None:
        _next_beats[self.server] = self.due = due


#: By its server, as long as a lock that it has reported, or the keeper, refers to it; and when the
#: next heartbeat is due, whose ``due`` may be earlier, to stop listening.
heartbeats: WeakValueDictionary[Server, Heartbeat] = WeakValueDictionary()
_next_beats: WeakKeyDictionary[Server, float] = WeakKeyDictionary()


def last_heartbeats(client: Client, processes: Iterable[str]) -> dict[str, float]:
    """Seconds since the last heartbeat of each of ``processes``, in one round trip; those of which
    none is known are left out."""
    known = sorted(set(processes) - {""})
    if not known:
        return {}
    if not is_cluster(client):
        return _ages(
            known,
            run(client, _heartbeats_call(*known), until=time.monotonic() + REPLY_TIMEOUT).value,
        )
    ages: dict[str, float] = {}
    replies = run_all(client, [*map(_heartbeats_call, known)])
    for process, reply in zip(known, replies, strict=True):
        ages.update(_ages([process], reply))
    return ages


def heartbeat_call(owner: Owner) -> Call | None:
    """For the last heartbeat of a holder's process; None if there is no need."""
    if not owner.process or owner.seen is None or owner.seen <= SILENT_AFTER:
        return None
    return _heartbeats_call(owner.process)


def with_heartbeat(owner: Owner | None, reply: Reply) -> Owner | None:
    """``owner``, last seen at the heartbeat in the ``reply``, if there is one."""
    if owner is None or reply is None:
        return owner
    ages = _ages([owner.process], reply)
    return replace(owner, seen=min(owner.seen or 0.0, ages.get(owner.process, math.inf)))


def _heartbeats_call(*processes: str) -> Call:
    return Call(HEARTBEATS, tuple(map(process_key, processes)), ())


def _ages(processes: Sequence[str], reply: Reply) -> dict[str, float]:
    now_us, *beats = reply
    texts = zip(processes, map(as_bytes, beats), strict=True)
    # Other programs should not write there, but they can.
    known = {process: int(beat) for process, beat in texts if beat.isdigit() and len(beat) < 20}
    return {process: max(0.0, (now_us - beat) / 1e6) for process, beat in known.items()}


# -- why Redis does not have a lock any more, for the log, the event and the exception -----------

EXPIRED = "it expired before it was released"
NO_DATA = "Redis has lost its data: a restart, a failover, FLUSHDB or an eviction"
TAKEN_OVER = "a failover has lost it: %s has taken over from %s, without all of its data"
DELETED = "its key was deleted or replaced by another program, or evicted"
DELETED_OR_NO_DATA = "its key was deleted by another program, or Redis has lost its data"
#: By which the clocks of two servers, or of one and of this host, may differ.
CLOCKS_DIFFER_SECONDS = 0.5
UNKNOWN = "it expired, was released by force, or its key was deleted"


def why_steps(
    run: Callable[[Call], Step[Answer]],
    server: Server,
    keys: LockKeys,
    token: bytes,
    early: bool | None,
    hold: Any,
) -> Steps[str]:
    """Ask ``server`` why a lock ended, for a caller who learns that before the keeper. The other
    arguments are those of ``cause``."""
    beats = beats_so_far(server)
    reply = None
    with suppress(RedisError):
        reply = (yield run(renew_call(keys, token, b"" if hold is None else hold.attempt))).value
    return cause(reply, beats, early, hold, token, server) if isinstance(reply, list) else UNKNOWN


def beats_so_far(server: Server) -> tuple[float, float]:
    """When this process sent the last heartbeat, and the last that Redis has lost (monotonic)."""
    beat = None if server.is_cluster else heartbeats.get(server)
    return (-math.inf, -math.inf) if beat is None else (beat.sent_at, beat.forgotten_at)


def cause(
    reply: Reply,
    beats: tuple[float, float],
    early: bool | None,
    hold: Any,
    token: bytes = b"",
    server: Server | None = None,
) -> str:
    """Why a lock ended.

    Args:
        reply: that of RENEW, which was refused: the traces of the end, each empty if there is none.
            What RECORD_EVENT keeps; the last fence on the index; when the description was written
            last, and the time, both in microseconds of the server's clock, and the id in it; what
            HEARTBEAT keeps of the process; the lock's entry on the index, if it is free.
        beats: ``beats_so_far``, of heartbeats that came before RENEW.
        early: whether its lifetime was not over by the holder's clock; None: not known.
        hold: None for a ``token`` from elsewhere.
        server: where the lock was; it may have moved.
    """
    events, last_fence, description, heartbeat, entry = map(as_bytes, reply)
    seen_us, _, rest = description.partition(b" ")
    now_us, _, described_id = rest.partition(b" ")
    id = fingerprint(token if hold is None else hold.token)
    is_described = described_id.decode(errors="replace") == id
    fence = 0 if hold is None else hold.least_fence
    # Of a chosen token there may be events of former holders.
    since = fence / 1e6 if hold and hold.attempt else -math.inf
    for event in read_events(events):
        if event.what == "reset" and event.owner.id == id and event.at >= since:
            return f"released by force{event.note and f' by {event.note}'}"
    if hold is not None and server is not None:
        before, now = hold.renewed_by[0], server.seen_at(hold.keys)
        if before is not None and now is not None and before is not now:
            return TAKEN_OVER % (now.breaker.server, before.breaker.server)
        if is_described and _is_older(seen_us, now_us, hold):
            return NO_DATA
    # A heartbeat that was sent since the acquisition is kept for a day.
    lost_at = beats[1] if heartbeat else beats[0]
    began = math.inf if hold is None else hold.began
    if (bounded(last_fence, MAX_FENCE) or 0) < fence or lost_at >= began:
        return NO_DATA
    if early is not True:
        return EXPIRED if early is False else UNKNOWN
    only_this = heartbeat or entry or is_described
    return DELETED if only_this else DELETED_OR_NO_DATA


def _is_older(seen_us: bytes, now_us: bytes, hold: Any) -> bool:
    """Whether the description was written before the last renewal, which has written it."""
    seen, now = bounded(seen_us, MAX_FENCE), bounded(now_us, MAX_FENCE)
    if seen is None or now is None or hold.renewed_by[0] is None:
        return False
    renewed_at: float = hold.renewed_by[1]
    return (now - seen) / 1e6 > time.monotonic() - renewed_at + CLOCKS_DIFFER_SECONDS


def why(job: Any, reply: Reply, early: bool) -> str:
    """Why the lock is lost: Redis has answered ``reply`` to RENEW; ``early`` if the holder still
    counted on it."""
    if (beat := heartbeats.get(job.server)) is not None:
        beat.suspect_others()
    return cause(reply, beats_so_far(job.server), early, job.hold, server=job.server)
