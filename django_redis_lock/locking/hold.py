"""One acquisition, what the keeper does for its holder, and what a lock object knows of it.

A lifetime is judged here, by ``Hold.lost``: the deadline is on this machine's monotonic clock, and
starts *before* the command that set the lifetime was sent, so it is never later than the server's.
After it the hold is lost, whatever the server says (S5 in ``docs/how_it_works.md``).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import events, history, protocol
from ..clock import time
from ..events import Lost, Subject, group_of
from ..keeper import Job, LateRequest, keeper, release_later
from ..protocol import (
    AcquireRequest,
    Acquisition,
    Call,
    LockKeys,
    PendingLifetime,
    Reply,
    activity,
    encodable,
    fingerprint,
    hostname,
    milliseconds,
    new_token,
    parse_renew,
    printable,
    process_id,
    release_call,
    renew_call,
)
from ..protocol.identity import described
from ..threads import Mutex, after_fork, free_after_fork, get_logger, may_log, this_process
from ..transport import Server

if TYPE_CHECKING:
    from ..protocol import Owner

lost_logger = get_logger("django_redis_lock.lost")
held_logger = get_logger("django_redis_lock.held")
logger = get_logger("django_redis_lock.keeper")

#: The holder of a lock held for so many seconds is described in Redis, which costs a round trip.
DESCRIBE_AFTER = 0.5
#: Between two looks at a held lock that has no lifetime.
CHECK_INTERVAL_SECONDS = 10.0


class Hold:
    """One acquisition, shared by the lock object and the keeper. It is made before the lock is
    acquired, to save time; what that decides (``keys``, ``token``) it has from ``begin`` on.

    Args:
        renews_for: seconds for which it is renewed; -inf for never.
        warns_after: seconds after which a warning that it is still held is logged.

    Attributes:
        attempt: identifies this acquisition among others with the same chosen token.
        deadline: monotonic time until which it counts as held.
        renews_until: monotonic time at which renewal ends; -inf if never renewed.
        warns_at: monotonic time of the warning that it is still held; inf for never.
        limit: the number of places that a release passes on, 1 for a plain lock.
        ended: released, lost or reset; the keeper stops renewing it.
        reason: why it was lost.
        task: the holder's task; None for a thread, or if it is not known.
        shared: whether others may release it: by the same lock object, or by a chosen token.
        degraded: how it is held without Redis, None for a lock in Redis.
        on_end: called at its release, for the lock of this host.
        pending: the reply that confirms a grant, if it is to come.
        request: what it was acquired by, until it ends; see ``release_late``.
        renewed_by: the server that has confirmed the last renewal, and when that was sent.
    """

    ended = _lost = False
    reason = ""
    _confirmed_at = -math.inf
    #: What else is called when it is lost, while the key lives: the ``on_lost`` of callers that
    #: have gone in again (see ``Entry``), what cancels a task. A dict that is replaced and never
    #: changed: the keeper may be reading it.
    also_on_lost: Mapping[weakref.ref[Any], Callable[[], object]] = {}
    task: weakref.ref[Any] | None = None
    shared = False
    degraded: str | None = None
    on_end: Callable[[], object] | None = None
    pending: PendingLifetime | None = None
    request: AcquireRequest | None = None
    renewed_by: tuple[Server | None, float] = None, -math.inf
    #: Shared by all holds: it is held for a few lines only.
    _mutex = free_after_fork(Mutex())

    def __init__(
        self,
        lifetime: float | None,
        renews_for: float = -math.inf,
        warns_after: float = math.inf,
        label: str = "",
        name: str = "",
        on_lost: Callable[[], object] | None = None,
        subject: Subject | None = None,
    ) -> None:
        self.lifetime = lifetime
        self._renews_for = renews_for
        self._warns_after = warns_after
        self.label, self.name = label, name
        self.thread = threading.current_thread().name
        self.activity = activity.get()
        self._thread_id = threading.get_ident()
        self.on_lost = on_lost
        self.subject = subject
        self.process = this_process()

    def begin(self, granted: Acquisition, keys: LockKeys, limit: int = 1) -> None:
        self.keys, self.limit = keys, limit
        self.token, self.fence, self.began, self.deadline, self.attempt, self.pending, *_ = granted
        self.renews_until = self.began + self._renews_for
        self.warns_at = self.began + self._warns_after

    def owner(self) -> Owner:
        name, since, pid = fingerprint(self.token), self.fence / 1e6, self.process.pid
        thread, label, doing = map(encodable, (self.thread, self.label, described(self.activity)))
        where = hostname(), pid, thread
        return protocol.Owner(name, *where, label, since, process_id(), doing=doing)

    def release_later(
        self, server: Server, grant_timeout: float, min_hold: float = 0.0, late: bool = False
    ) -> None:
        """Have the keeper release it, which is over."""
        of_it = (min_hold, self.fence, self.attempt, self.limit)
        call = release_call(self.keys, self.token, new_token(), grant_timeout, *of_it)
        release_later(server, call, self.lifetime, late)

    @property
    def least_fence(self) -> int:
        """The last fence on its server's index is at least this, unless data were lost there."""
        return self.fence

    @property
    def from_parent_process(self) -> bool:
        """Whether this process is a fork of the holder, which may not use or release the lock."""
        return self.process is not this_process()

    @property
    def by_this_thread(self) -> bool:
        return self._thread_id == threading.get_ident()

    @property
    def lost(self) -> bool:
        """Whether it has ended before its release. The keeper notices that as well, and tells."""
        now = time.monotonic()
        if self.ended or now < self.deadline:
            return self._lost
        # The reply that confirms a grant may lie there unread.
        confirmed = None if self.pending is None else self.pending.read_reply(False)
        if confirmed is not None and now < confirmed:
            return False
        return not self.released  # The keeper, or another thread, may have ended it meanwhile.

    @property
    def is_valid(self) -> bool:
        """Whether this process certainly holds the lock now."""
        return not self.ended and not self.from_parent_process and not self.lost

    @property
    def released(self) -> bool:
        """Whether its holder has released it, or tried to."""
        return self.ended and not self._lost

    def note_deadline(self, deadline: float, asked_at: float) -> None:
        """The reply to a command sent at ``asked_at`` has confirmed the lifetime until ``deadline``
        (both monotonic). The server's order of two concurrent commands is unknown, so the shorter
        lifetime counts until the next renewal."""
        with self._mutex:
            if asked_at < self._confirmed_at:
                deadline = min(deadline, self.deadline)
            if not self.ended:
                self.deadline, self._confirmed_at = deadline, time.monotonic()

    def confirm(self, wait: bool = False) -> None:
        pending = self.pending
        until = None if pending is None else pending.read_reply(wait)
        if until is None:
            return
        self.pending = None
        if until == -math.inf:
            self.lose("the grant expired before it could be taken")
        else:
            self.note_deadline(until, self.began)

    def end(self) -> None:
        """Its holder releases it. A second call completes one that was interrupted."""
        self.ended = True
        if self.on_end is not None:
            self.on_end()

    def warn(self) -> None:
        self.warns_at = math.inf
        who = ", ".join(filter(None, (self.thread, self.label, described(self.activity))))
        held_logger.warning(
            "The lock %(lock)s has been held for %(held).1f s (fence %(fence)d, thread %(holder)s)",
            self.log_fields(holder=printable(who, 300)),
        )

    def log_fields(self, **more: object) -> dict[str, Any]:
        held = time.monotonic() - self.began
        return {"lock": printable(self.keys.name), "fence": self.fence, "held": held, **more}

    def lose(self, reason: str, first: Callable[[], object] | None = None) -> bool:
        """End the hold as lost, call ``first``, and tell everyone; False if it had ended."""
        with self._mutex:
            if self.ended or self._lost:
                return False
            self._lost = self.ended = True
            self.reason = reason
        try:
            if first is not None:
                first()
            message = "Lost the lock %(lock)s (fence %(fence)d, held for %(held).3f s): %(reason)s"
            fields = self.log_fields(reason=reason)
            lost_logger.error(message, fields)
            if events.listeners and self.subject is not None:
                events.emit(Lost(self.subject, fields["held"], reason, self.fence))
        finally:
            self.release_late()
            self._tell_holder()
        return True

    def release_late(self) -> None:
        """It is over, and so is what its request may yet take; see ``LateRequest``."""
        request, self.request = self.request, None
        if request is not None and request.unanswered:
            release_late(request)

    def _tell_holder(self) -> None:
        others = (tell for key, tell in self.also_on_lost.items() if key())
        for tell in (self.on_lost, *others):
            if tell is not None:
                try:
                    tell()
                except Exception:
                    log_failed(tell, self.keys.name)


def release_late(request: AcquireRequest) -> None:
    """The call of ``acquire`` has ended without the lock, or with one that is over."""
    for server, release in request.releases_of_unanswered():
        keeper().add(LateRequest(server, release, request.lifetime))


def log_failed(on_lost: object, name: bytes) -> None:
    lost_logger.exception(
        "on_lost failed: %(on_lost)r (lock %(lock)s)",
        {"lock": printable(name), "on_lost": on_lost},
    )


#: What the keeper does for each lock of this process, by server and key; of several with one chosen
#: token, for the one that began last.
renewals: dict[tuple[Server, bytes], Renewal] = {}
after_fork(renewals.clear)
_warned_at: weakref.WeakKeyDictionary[Server, float] = weakref.WeakKeyDictionary()


class Renewal(Job):
    """Keeps a hold alive, describes the holder in Redis, and tells it when the lock is lost."""

    #: Its ``Lifeline``, gone when the handle is. None: it goes on without one.
    kept_by: weakref.ref[Any] | None = None
    #: Set when the handle was collected inside its ``with`` block: how to release the lock.
    collected: tuple[float, float] | None = None
    #: Whether Redis may have the description of the holder.
    may_be_described = False
    #: Once Redis has it: what its process sends then.
    described: history.Heartbeat | None = None

    def __init__(self, server: Server, hold: Hold) -> None:
        super().__init__(server, math.inf)
        self.hold = hold
        self.deadline_scale = hold.lifetime or math.inf

    @property
    def _interval(self) -> float:
        lifetime = self.hold.lifetime
        return CHECK_INTERVAL_SECONDS if lifetime is None else lifetime / 3

    @property
    def _margin(self) -> float:
        """Seconds before the end: enough for the body to hear of it while the lock still counts."""
        return 0.0 if self.hold.lifetime is None else min(self.hold.lifetime / 20, 0.25)

    def ends_at(self) -> float:
        return self.hold.deadline

    @property
    def is_endless(self) -> bool:
        """Whether the hold goes on until the caller that has acquired it releases it."""
        hold = self.hold
        if hold.shared or (self.kept_by is not None and self.kept_by() is None):
            return False
        return hold.lifetime is None or hold.renews_until == math.inf

    def begin(self) -> None:
        self.schedule(self.hold.began)
        renewals[self.server, self.hold.keys.lock] = self
        keeper().add(self)

    def stop(self) -> None:
        keeper().discard(self)
        if renewals.get(key := (self.server, self.hold.keys.lock)) is self:
            renewals.pop(key, None)
        if self.described is not None:
            self.described.leave(self)

    def _note_described(self) -> None:
        if self.described is None:
            self.described = history.Heartbeat.join(self)

    def schedule(self, last: float) -> None:
        """Set ``due``, given when the lifetime was confirmed. A lock that is not renewed is looked
        at as often: its holder wants to know if it is reset or deleted."""
        hold = self.hold
        describes_at = math.inf if self.described else hold.began + DESCRIBE_AFTER
        due = min(hold.deadline, last + self._interval, hold.warns_at, describes_at)
        if hold.pending is not None:  # Perhaps only a renewal outlasts the grant.
            due = min(due, (hold.began + hold.deadline) / 2)
        self.due = due

    def call(self, now: float) -> Call | None:
        hold = self.hold
        if self.collected is not None:
            self._release(*self.collected)
            return None
        if hold.ended:
            self.stop()
            if hold.lost:  # As another has noticed.
                self.tell("lost", hold.reason)
            return None
        hold.confirm()
        renewing = self._renewing(now)
        if now >= hold.deadline - (self._margin if renewing else 0.0):
            unrenewed = "it expired before it was released"
            self._lose("it expired: Redis confirmed no renewal" if renewing else unrenewed)
            return None
        if now >= hold.warns_at:
            hold.warn()
        if renewing and (kept_by := self.kept_by) is not None and kept_by() is None:
            hold.renews_until = -math.inf
            message = "Lock %(lock)s was garbage-collected without release(); renewal stopped"
            logger.warning(message, hold.log_fields())
        self.may_be_described = True
        fields = () if self.described else (*hold.owner().fields(), *self._lock_fields())
        return renew_call(hold.keys, hold.token, hold.attempt, *fields, wanted=self._wanted(now))

    def _release(self, grant_timeout: float, min_hold: float) -> None:
        hold = self.hold
        if not hold.ended:
            message = "Lock %(lock)s was garbage-collected inside its with block: released"
            logger.warning(message, hold.log_fields())
            hold.end()
        self.stop()
        hold.release_later(self.server, grant_timeout, min_hold)

    def _lock_fields(self) -> list[str]:
        hold = self.hold
        lifetime = 0 if hold.lifetime is None else milliseconds(hold.lifetime)
        terms = ["lifetime", str(lifetime), "fence", str(hold.fence)]
        if hold.name:
            terms += ("name", encodable(hold.name))
        if hold.limit != 1:
            terms += ("limit", str(hold.limit))
        if hold.renews_until > -math.inf:
            terms += ("renews", "1")
        subject = hold.subject
        if subject is not None and subject.group != group_of(subject.name):
            terms += ("group", subject.group)
        return terms

    def tell(self, what: str, note: str = "") -> None:
        """Tell ``history`` how the lock has ended, unless it was held for no time."""
        if self.may_be_described:
            history.ended(self, what, note)

    def _lose(self, reason: str) -> None:
        self.flush_at_exit = True  # Until everybody is told.
        # Recorded before that: who is told may end this job, and the process.
        self.hold.lose(reason, lambda: self.tell("lost", reason))
        self.stop()

    def _refused(self, value: Reply, early: bool) -> None:
        self._lose(history.why(self, value, early))

    def _renewing(self, now: float) -> bool:
        return self.hold.renews_until > now

    def _wanted(self, now: float) -> int:
        """Milliseconds to renew for; 0 leaves the lifetime as it is, -1 removes the lifetime."""
        hold = self.hold
        # What gave a grant its full lifetime may have been lost on the way.
        full = -math.inf if hold.pending is None else hold.began + (hold.lifetime or math.inf)
        until = max(hold.renews_until, full)
        if until <= now:
            return 0
        return -1 if hold.lifetime is None else milliseconds(min(hold.lifetime, until - now))

    def replied(self, value: Reply, sent_at: float) -> None:
        until, hold = parse_renew(value, sent_at), self.hold
        if until is None:
            self._refused(value, early=sent_at < hold.deadline)
            return
        self._note_described()
        hold.pending = None
        hold.renewed_by = self.server.seen_at(hold.keys), sent_at
        hold.note_deadline(until, sent_at)
        self.schedule(sent_at)

    def failed(self, error: Exception, now: float) -> None:
        warns = self._renewing(now) and may_log(self.server, _warned_at)  # Once a minute.
        level = logging.WARNING if warns else logging.INFO
        fields = self.hold.log_fields(error=error)
        logger.log(level, "Could not renew the lock %(lock)s: %(error)s", fields)
        self._try_again(now)

    def _try_again(self, now: float) -> None:
        hold = self.hold
        pause = min(max(self._interval / 4, 0.02), 1.0)
        # Look once more just before the deadline, to tell the holder in time.
        last_call = hold.deadline - self._margin
        self.due = now + pause if now >= last_call else min(now + pause, last_call)


class Lifeline:
    """What the keeper does for one hold, one job for each server, as the handle knows it. When
    no handle knows it any more, the lock cannot be released, and it ends with its lifetime."""

    __slots__ = ("__weakref__", "hold", "jobs")

    def __init__(self, hold: Hold, *jobs: Renewal) -> None:
        self.hold = hold
        self.jobs = jobs
        for job in jobs:
            job.kept_by = weakref.ref(self)

    def begin(self) -> None:
        for job in self.jobs:
            job.begin()

    def entered(self, grant_timeout: float, min_hold: float) -> None:
        """The lock was taken by ``with``. A signal handler's exception at the entry of ``__exit__``
        may keep the block's end from releasing it; then the keeper does when the handle is
        collected."""
        kept_by = weakref.ref(self, partial(_collected, self.jobs, (grant_timeout, min_hold)))
        for job in self.jobs:
            job.kept_by = kept_by

    def discard(self) -> None:
        for job in self.jobs:
            job.kept_by = None
            job.stop()

    def reschedule(self, due: float) -> None:
        for job in self.jobs:
            keeper().reschedule(job, due)

    def tell(self, what: str, note: str = "") -> None:
        for job in self.jobs:
            job.tell(what, note)


def _collected(jobs: tuple[Renewal, ...], terms: tuple[float, float], _: object) -> None:
    """May run anywhere, as signal handlers do: the keeper does the rest."""
    for job in jobs:
        if not job.hold.ended:
            job.collected = terms
            keeper().reschedule(job, time.monotonic())


# -- what a thread or task knows through a lock object, and re-entry -------------------------------

Task = asyncio.Task[object] | None
TaskRef: TypeAlias = "weakref.ref[asyncio.Task[object]]"

#: The task that called the method under way, and the one that runs it. Weak: a connection that is
#: made in a method keeps a copy of its context.
under_way: ContextVar[tuple[TaskRef, TaskRef] | None]
under_way = ContextVar("django_redis_lock_under_way", default=None)


def acting_task() -> Task:
    """The task for which this one acts: itself, unless it runs what another has called."""
    try:
        running = asyncio.current_task()
    except RuntimeError:
        return None
    acting = under_way.get()
    return acting[0]() if acting and running and acting[1]() is running else running


def is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Known(NamedTuple):
    """What a caller knows through a lock object at one moment, and how often it has gone in."""

    token: bytes | None
    hold: Hold | None
    renewal: Lifeline | None
    entry: Entry | None
    times: int


class State:
    """What is known through a lock object; the token is where redis-py keeps it."""

    token: bytes | None = None
    hold: Hold | None = None
    renewal: Lifeline | None = None
    entry: Entry | None = None
    #: The task whose state it is.
    task: weakref.ref[asyncio.Task[object]] | None = None

    def mine(self) -> State:
        return self

    def known(self) -> Known:
        entry = self.entry
        times = entry.times(self) if entry else 0
        return Known(self.token, self.hold, self.renewal, entry, times)

    def restore(self, known: Known) -> None:
        self.token, self.hold, self.renewal, self.entry, _ = known


class ThreadState(State, threading.local):
    """What each thread knows: at first the ``token`` by which another handle has the lock."""

    def __init__(self, token: bytes | None) -> None:
        if token is not None:
            self.token = token


class TaskStates(State):
    """What each task knows; see ``for_the_caller``."""

    def __init__(self, token: bytes | None) -> None:
        self._token = token
        self._states = weakref.WeakKeyDictionary[asyncio.Task[object], State]()
        self._of_no_task = self._new()

    def _new(self) -> State:
        state = State()
        state.token = self._token
        return state

    def mine(self) -> State:
        task = acting_task()
        if task is None:
            return self._of_no_task
        state = self._states.get(task)
        if state is None:
            state = self._states[task] = self._new()
            state.task = weakref.ref(task)
        return state


class Entry:
    """A lock that one thread or task holds, and how often it has gone in, with the ``timeout`` and
    ``min_hold`` of the first time.

    Only handles keep an entry. So when all by which the caller went in are garbage-collected
    without ``release()``, it does not go in again: nothing renews that lock any more.
    """

    def __init__(self, state: State, timeout: float | None, min_hold: float) -> None:
        assert state.hold is not None
        self.hold: Hold = state.hold
        self.renewal = state.renewal
        self.timeout = timeout
        self.min_hold = min_hold
        #: By the state of the lock object that was used. One that is collected without a release,
        #: after an interrupt, does not count any more.
        self._times = weakref.WeakKeyDictionary({state: 1})

    @property
    def depth(self) -> int:
        return sum(self.times(state) for each in self._times.keyrefs() if (state := each()))

    def times(self, state: State) -> int:
        return self._times.get(state, 0)

    def enter(self, state: State, on_lost: Callable[[], object] | None) -> bool:
        """Go in once more; False if the lock was lost just now. ``on_lost`` is called in addition
        to that of the acquisition."""
        times = self.times(state)
        if not times and on_lost is not None:
            self.hold.also_on_lost = {**self.hold.also_on_lost, weakref.ref(state): on_lost}
        if not self.hold.is_valid:
            self._forget_on_lost(state)
            return False
        state.entry = self  # An interrupt may come after each line: now it can be undone.
        self._times[state] = times + 1
        state.token, state.hold, state.renewal = self.hold.token, self.hold, self.renewal
        return True

    def leave(self, state: State) -> bool:
        """Go out once; False if there is only the lock itself to release."""
        times = self.times(state)
        if self.hold.from_parent_process or (times and self.depth == 1):
            return False
        if times > 1:
            self._times[state] = times - 1
            return True
        self._times.pop(state, None)  # First: an interrupt may come after each line.
        self._forget_on_lost(state)
        left = copy.copy(self.hold)  # What it was stays known to the handle.
        left.ended, left.on_end = True, None
        state.token, state.hold = None, left
        state.renewal = state.entry = None
        return bool(times)  # Else an interrupt has cut short how it was left before.

    def _forget_on_lost(self, state: State) -> None:
        kept = self.hold.also_on_lost.items()
        self.hold.also_on_lost = {s: tell for s, tell in kept if s() not in (state, None)}


#: By caller and lock. A task is not inside what the task or thread that started it holds.
entries: weakref.WeakValueDictionary[tuple[object, ...], Entry] = weakref.WeakValueDictionary()
