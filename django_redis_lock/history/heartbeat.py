"""The heartbeats of processes that hold described locks, and what they hear of these locks.

One key for the process and each server has its last heartbeat. And the process listens to a channel
of the same name, on which RESET publishes which lock was released by force, and to what the server
reports of changes by other programs: the keeper then renews the lock at once, and so learns whether
it is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from redis.exceptions import NoPermissionError, ResponseError

from ..clock import time
from ..keeper import Job, Subscription, keeper
from ..protocol import Call, LockKeys, Owner, Reply, as_bytes, process_id
from ..protocol.holder_scripts import HEARTBEAT, HEARTBEATS
from ..protocol.keys import process_key
from ..protocol.owner import HEARTBEAT_EVERY, SILENT_AFTER
from ..threads import Mutex, free_after_fork, get_logger
from ..transport import Client, Server, is_cluster, run, run_all

logger = get_logger("django_redis_lock.keeper")

#: Milliseconds for which a heartbeat is kept.
DAY = 86_400_000
#: A process without described locks still listens for so long: the next one may come soon.
LINGER_SECONDS = 1.0
REPLY_TIMEOUT = 5.0
#: From the loss of a lock to a look at the others.
SUSPECT_SECONDS = 0.1


class Held(Protocol):
    """One acquisition; see ``locking.Hold``."""

    keys: LockKeys
    name: str
    token: bytes
    fence: int
    attempt: bytes
    began: float
    ended: bool
    renewed_by: tuple[Server | None, float]

    @property
    def least_fence(self) -> int: ...
    def owner(self) -> Owner: ...


class Renewed(Protocol):
    """The keeper's job for a lock; see ``locking.Renewal``."""

    server: Server
    due: float

    @property
    def hold(self) -> Held: ...


class Heartbeat(Job):
    """Sends heartbeats, and listens, while this process holds described locks on ``server``."""

    def __init__(self, server: Server) -> None:
        super().__init__(server, _next_beats.get(server, time.monotonic()))
        # A signal handler may come in between.
        self._mutex = free_after_fork(Mutex())
        self._renewals: dict[bytes, Any] = {}  # Of ``Renewed`` jobs.
        self._call = Call(HEARTBEAT, (process_key(process_id()),), (DAY,))
        #: When the last one was sent, and the last one that Redis has lost (monotonic).
        self.sent_at = self.forgotten_at = -math.inf
        self._subscription: Subscription | None = None

    @classmethod
    def join(cls, renewal: Renewed) -> Heartbeat:
        """That of the server, which from now on reports changes of this lock."""
        server = renewal.server
        beat = heartbeats.get(server)
        if beat is None:
            beat = heartbeats[server] = cls(server)
        with beat._mutex:
            was_empty = not beat._renewals
            beat._renewals[renewal.hold.keys.lock] = renewal
            if beat._subscription is None:
                channel = process_key(process_id())
                beat._subscription = keeper().subscribe(server, channel, beat._received)
            if beat not in keeper():
                keeper().add(beat)
            elif was_empty:
                keeper().reschedule(beat, _next_beats.get(server, time.monotonic()))
        return beat

    def leave(self, renewal: Renewed) -> None:
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
