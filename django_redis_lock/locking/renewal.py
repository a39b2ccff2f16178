"""What the keeper does for a holder: renew its lock, name it, and tell it when the lock is lost."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from ..clock import time
from ..events import group_of
from ..keeper import Job, keeper
from ..notices import get_logger
from ..protocol import RENEW, Call, Hold, milliseconds, new_token, printable, release_call
from ..transport import Server
from .heartbeat import Heartbeat
from .history import RecordEvent

logger = get_logger("django_redis_lock.keeper")

#: A lock held longer than this many seconds gets its holder described in Redis. Shorter ones
#: are gone before anybody could look, and the name would cost them a round trip.
DESCRIBE_AFTER = 0.5
#: Seconds between two checks of a held lock that has no lifetime.
CHECK_INTERVAL_SECONDS = 10.0


class Renewal(Job):
    """Keeps one hold alive, says who holds it, and tells the holder when it is lost."""

    #: Those it is one of, as long as the holder's handle knows them.
    kept_by: Callable[[], Any] = object
    #: Set when the handle was collected inside its ``with`` block: how to release the lock.
    collected: tuple[float, float] | None = None

    def __init__(self, server: Server, hold: Hold) -> None:
        self.hold = hold
        #: Whether Redis has the description of the holder.
        self.named = False
        self._naming = False
        self._renewals = 0
        lifetime = hold.lifetime
        self._third = CHECK_INTERVAL_SECONDS if lifetime is None else lifetime / 3
        self.deadline_scale = math.inf if lifetime is None else lifetime
        self._full = math.inf if lifetime is None else hold.began + lifetime
        # "Shortly before": enough for the body to hear of it while the lock still counts.
        self._margin = 0.0 if lifetime is None else min(lifetime / 20, 0.25)
        super().__init__(server, 0.0)
        self._schedule(hold.began)

    def stop(self) -> None:
        """Do nothing more for this hold."""
        keeper().discard(self)
        if self.named:
            Heartbeat.leave(self.server, self.hold)

    def _described(self) -> None:
        """Redis has the description of the holder."""
        if not self.named:
            self.named = True
            Heartbeat.join(self.server, self.hold)

    def _schedule(self, last: float) -> None:
        """Set ``due``, given that the lifetime was last confirmed at ``last``. A lock that is not
        renewed is looked at as often: its holder wants to know if it is reset or deleted."""
        hold = self.hold
        due = min(hold.deadline, last + self._third, hold.warns_at)
        if not self.named or hold.confirm_pending is not None:
            due = min(due, hold.began + DESCRIBE_AFTER)
        self.due = due

    def call(self, now: float) -> Call | None:
        hold = self.hold
        if self.collected is not None:
            self._release(*self.collected)
            return None
        if hold.ended:
            self.stop()
            return None
        hold.confirm()
        if now >= hold.deadline - (self._margin if self._renewing(now) else 0.0):
            self._lose(
                "Redis confirmed no renewal in time"
                if self._renewing(now)
                else "its lifetime ran out before it was released"
            )
            return None
        if now >= hold.warns_at:
            hold.warn()
        if self._renewing(now) and self.kept_by() is None:
            hold.renews_until = -math.inf
            name = printable(hold.keys.lock)
            logger.warning("Lock %s was garbage-collected without release(); renewal stopped", name)
        self._naming = True
        fields = () if self.named else (*hold.owner().fields(), *self._terms())
        wanted = self._wanted(now)
        if wanted and self._renewing(now):
            fields = (*fields, "renewals", str(self._renewals + 1))
        return Call(RENEW, hold.keys, (hold.token, wanted, hold.attempt, *fields))

    def _release(self, grant_timeout: float, min_hold: float) -> None:
        hold = self.hold
        if not hold.ended:
            name = printable(hold.keys.lock)
            logger.warning(
                "Lock %s was garbage-collected inside its with block, and is released", name
            )
            hold.end()
        self.stop()
        how = (grant_timeout, min_hold, hold.fence, hold.attempt)
        call = release_call(hold.keys, hold.token, new_token(), *how)
        keeper().add(DeferredRelease(self.server, call, hold.lifetime))

    def _terms(self) -> tuple[str, ...]:
        """What people want to know of the lock, apart from its holder."""
        hold = self.hold
        lifetime = 0 if hold.lifetime is None else milliseconds(hold.lifetime)
        terms: tuple[str, ...] = ("lifetime", str(lifetime))
        if hold.renews_until > -math.inf:
            terms = (*terms, "renews", "1")
        subject = hold.subject
        if subject is None or subject.group == group_of(subject.name):
            return terms
        return (*terms, "group", subject.group)

    def emit(self, what: str, note: str = "") -> None:
        """Have it noted what has happened to the lock, unless that was over in no time."""
        if not self._naming:
            return
        hold = self.hold
        now = time.monotonic()
        keeper().add(
            RecordEvent(self.server, now, hold.keys, what, hold.owner(), note, now - hold.began)
        )

    def _lose(self, reason: str) -> None:
        self.stop()
        if self.hold.lose(reason):
            self.emit("lost", reason)

    def _renewing(self, now: float) -> bool:
        return self.hold.renews_until > now

    def _wanted(self, now: float) -> int:
        """Milliseconds to renew for; 0 leaves the lifetime as it is, -1 is for ever."""
        hold = self.hold
        # What gave a grant its full lifetime may have been lost on the way.
        pending = hold.confirm_pending is not None
        until = max(hold.renews_until, self._full) if pending else hold.renews_until
        if until <= now:
            return 0
        return -1 if hold.lifetime is None else milliseconds(min(hold.lifetime, until - now))

    def answered(self, value: Any, sent_at: float) -> None:
        left = int(value)
        self._renewals += 1
        if left == -2:
            self._lose("it expired, was reset, or its key was deleted")
            return
        self._described()
        self.hold.confirm_pending = None
        self.hold.held_until(math.inf if left < 0 else sent_at + left / 1000, sent_at)
        self._schedule(sent_at)

    def failed(self, error: Exception, now: float) -> None:
        level = logging.WARNING if self._renewing(now) else logging.INFO
        logger.log(level, "Could not renew the lock %s: %s", printable(self.hold.keys.lock), error)
        self._try_again(now)

    def _try_again(self, now: float) -> None:
        hold = self.hold
        pause = min(max(self._third / 4, 0.02), 1.0)
        # Look once more just before the deadline, to tell the holder in time.
        last_call = hold.deadline - self._margin
        self.due = now + pause if now >= last_call else min(now + pause, last_call)


class Renewals:
    """What the keeper does for one hold, one job for each server, as the handle knows it. When
    no handle knows it any more, because the handle was dropped, or the thread or task has ended
    that acquired by it, the lock cannot be released, and it ends with its lifetime."""

    __slots__ = ("__weakref__", "jobs")

    def __init__(self, *jobs: Renewal) -> None:
        self.jobs = jobs
        for job in jobs:
            job.kept_by = weakref.ref(self)
            keeper().add(job)

    def entered(self, grant_timeout: float, min_hold: float) -> None:
        """The lock was taken by ``with``. An exception from a signal handler may keep the block's
        end from releasing it (it may come at the entry of ``__exit__``); when the handle is
        collected after that, the keeper releases the lock, with these terms."""
        kept_by = weakref.ref(self, partial(_collected, self.jobs, (grant_timeout, min_hold)))
        for job in self.jobs:
            job.kept_by = kept_by

    def discard(self) -> None:
        for job in self.jobs:
            job.kept_by = object  # No need to hear of the end of this.
            job.stop()

    def reschedule(self, due: float) -> None:
        for job in self.jobs:
            keeper().reschedule(job, due)

    def emit(self, what: str) -> None:
        for job in self.jobs:
            job.emit(what)


def _collected(jobs: tuple[Renewal, ...], terms: tuple[float, float], _: object) -> None:
    """May run anywhere, as signal handlers do: the keeper does the rest."""
    for job in jobs:
        if not job.hold.ended:
            job.collected = terms
            keeper().reschedule(job, time.monotonic())


class DeferredRelease(Job):
    """Does what others wait for when the caller cannot: releases what an acquire may have got
    although its answer was lost, or what an interrupted release was to give up; ends a flight whose
    end Redis has not received.

    It asks until it is answered, and once more a second later, because what was sent before may
    still lie unread in the server's buffers.

    Args:
        release: the call that does it.
        lifetime: seconds after which nothing can be left to do, None for never.
    """

    def __init__(self, server: Server, release: Call, lifetime: float | None) -> None:
        now = time.monotonic()
        super().__init__(server, now)
        self._call = release
        self._gives_up_at = math.inf if lifetime is None else now + lifetime
        self._answers = 0

    @property
    def flush_at_exit(self) -> bool:  # type: ignore[override]  # of other jobs: a plain value
        return self._answers == 0

    def call(self, now: float) -> Call | None:
        if self._answers < 2 and now < self._gives_up_at:
            return self._call
        keeper().discard(self)
        return None

    def answered(self, value: Any, sent_at: float) -> None:
        self._answers += 1
        self.due = sent_at + 1.0

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + 0.5
