"""What a process does for all described locks (held longer than half a second) that it holds on a
server, however many there are.

It sends a heartbeat every HEARTBEAT_EVERY seconds, so that its death is seen within seconds however
long its locks live: one key for the process, which each lock's description names. And it listens to
a channel of the same name, on which RESET publishes which of the locks has been released by force,
and to what the server reports of changes by other programs: the keeper then renews the lock at
once, and so learns whether it is lost.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoPermissionError, ResponseError

from ..clock import time
from ..forks import free_after_fork
from ..keeper import Job, Subscription, keeper
from ..notices import get_logger
from ..protocol import (
    HEARTBEAT,
    HEARTBEAT_EVERY,
    HEARTBEATS,
    SILENT_AFTER,
    Call,
    Owner,
    as_bytes,
    process_id,
    process_key,
)
from ..transport import Server, is_cluster, run, run_all

if TYPE_CHECKING:
    from .hold import Renewal

logger = get_logger("django_redis_lock.keeper")

#: Milliseconds for which a heartbeat is kept: as long as a dead holder's lock lives, within reason.
DAY = 86_400_000
#: Seconds for which a process without described locks still listens: the next one may come soon.
LINGER_SECONDS = 1.0
#: Seconds to wait for an answer about heartbeats.
REPLY_TIMEOUT = 5.0


class Heartbeat(Job):
    """Says every HEARTBEAT_EVERY seconds that this process is alive, and listens, while it holds
    locks on ``server``."""

    def __init__(self, server: Server) -> None:
        super().__init__(server, time.monotonic())
        # A signal handler may come in between.
        self._mutex = free_after_fork(threading.RLock())
        self._renewals: dict[bytes, Renewal] = {}
        self._call = Call(HEARTBEAT, (process_key(process_id()),), (DAY,))
        #: When the next heartbeat is due; ``due`` may be earlier, to stop listening.
        self._beat_at = self.due
        self._subscription: Subscription | None = None

    @classmethod
    def join(cls, renewal: Renewal) -> None:
        """Send heartbeats to its server, and listen, while its hold lasts."""
        server = renewal.server
        if server.heartbeat is None:
            server.heartbeat = cls(server)
        beat: Heartbeat = server.heartbeat
        with beat._mutex:
            was_empty = not beat._renewals
            beat._renewals[renewal.hold.keys.lock] = renewal
            if beat._subscription is None:
                channel = process_key(process_id())
                beat._subscription = keeper().subscribe(server, channel, beat._received)
            if beat not in keeper():
                keeper().add(beat)
            elif was_empty:
                keeper().reschedule(beat, beat._beat_at)

    @staticmethod
    def leave(renewal: Renewal) -> None:
        """Do so no longer."""
        beat: Heartbeat | None = renewal.server.heartbeat
        key = renewal.hold.keys.lock
        if beat is not None:
            with beat._mutex:
                if beat._renewals.get(key) is renewal:
                    beat._renewals.pop(key, None)
                if not beat._renewals and beat in keeper():
                    keeper().reschedule(beat, min(beat.due, time.monotonic() + LINGER_SECONDS))

    def call(self, now: float) -> Call | None:
        with self._mutex:
            # A caller that was interrupted while it released has not left.
            left = {key: job for key, job in self._renewals.items() if not job.hold.ended}
            self._renewals = left
            if self._renewals:
                return self._call
            keeper().discard(self)
            self.due = self._beat_at
            if self._subscription is not None:
                self._subscription.close()
                self._subscription = None
            return None

    def _received(self, key: bytes | None) -> None:
        """``key`` may not be what it was; None: nor any other."""
        with self._mutex:
            jobs = [*self._renewals.values()] if key is None else [self._renewals.get(key)]
        for job in filter(None, jobs):
            keeper().reschedule(job, time.monotonic())

    def answered(self, value: Any, sent_at: float) -> None:
        self._beat_at = self.due = sent_at + HEARTBEAT_EVERY

    def failed(self, error: Exception, now: float) -> None:
        logger.info("Could not send a heartbeat: %s", error)
        pause = HEARTBEAT_EVERY if isinstance(error, ResponseError) else HEARTBEAT_EVERY / 4
        if isinstance(error, NoPermissionError):
            pause = math.inf
        self._beat_at = self.due = now + pause


def last_heartbeats(client: Any, processes: Iterable[str]) -> dict[str, float]:
    """Seconds since the last heartbeat of each of ``processes``, in one round trip; those of which
    none is known are left out.

    Raises:
        redis.exceptions.RedisError: Redis could not be asked.
    """
    known = sorted(set(processes) - {""})
    if not known:
        return {}
    if not is_cluster(client):
        return _ages(known, run(client, _question(*known), patience=REPLY_TIMEOUT).value)
    found: dict[str, float] = {}
    for process, answer in zip(known, run_all(client, [*map(_question, known)]), strict=True):
        found.update(_ages([process], answer))
    return found


def question_about(owner: Owner) -> Call | None:
    """Asks for the last heartbeat of a holder's process; None if there is no need to ask."""
    if not owner.process or owner.seen is None or owner.seen <= SILENT_AFTER:
        return None
    return _question(owner.process)


def with_answer(owner: Owner, answer: Any) -> Owner:
    """``owner`` with the answer to that question."""
    ages = _ages([owner.process], answer)
    return replace(owner, seen=min(owner.seen or 0.0, ages.get(owner.process, math.inf)))


def _question(*processes: str) -> Call:
    return Call(HEARTBEATS, tuple(map(process_key, processes)), ())


def _ages(processes: Sequence[str], answer: Any) -> dict[str, float]:
    now_us, *beats = answer
    texts = zip(processes, map(as_bytes, beats), strict=True)
    # Other programs should not write there, but they can.
    known = {process: int(beat) for process, beat in texts if beat.isdigit() and len(beat) < 20}
    return {process: max(0.0, (int(now_us) - beat) / 1e6) for process, beat in known.items()}
