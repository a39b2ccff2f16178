"""What a thread or task knows through a lock object, also of the loss of its lock, and re-entry."""

from __future__ import annotations

import asyncio
import copy
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from redis.exceptions import RedisError

from ..clock import time
from ..exceptions import LockError, LockLost, LockNotOwnedError
from ..extension import OnUse
from ..keeper import keeper
from .hold import Hold, Renewal

if TYPE_CHECKING:
    from ..protocol import Call
    from ..transport import Steps

causes = OnUse("locking.causes")

Task = asyncio.Task[Any] | None

#: The task that called the method under way, and the one that runs it. Weak: a connection that is
#: made in a method keeps a copy of its context.
under_way: ContextVar[tuple[ref[Any], ref[Any]] | None]
under_way = ContextVar("django_redis_lock_under_way", default=None)


def acting_task() -> Task:
    """The task for which this one acts: itself, unless it runs what another has called."""
    try:
        running = asyncio.current_task()
    except RuntimeError:
        return None
    acting = under_way.get()
    return acting[0]() if acting and running and acting[1]() is running else running


class State:
    """What is known through a lock object; the token is where redis-py keeps it."""

    token: bytes | None = None
    hold: Hold | None = None
    renewal: Any = None
    file_lock: Any = None
    entry: Entry | None = None
    #: A weak reference to the task whose state it is.
    task: Any = None


class ThreadState(State, threading.local):
    """What each thread knows."""


class ThreadStateWithToken(ThreadState):
    """Each thread may at first release the lock that another handle has acquired with ``token``."""

    def __init__(self, token: bytes) -> None:
        self.token = token


class TaskStates:
    """What each task knows; see ``for_the_caller``."""

    def __init__(self, token: bytes | None) -> None:
        self._token = token
        self._states: WeakKeyDictionary[asyncio.Task[Any], State] = WeakKeyDictionary()
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
            state.task = ref(task)
        return state


class Entry:
    """A lock that one thread or task holds, and how often it has gone in, with the ``timeout`` and
    ``min_hold`` of the first time.

    Only handles keep an entry. So when all by which the caller went in are garbage-collected
    without ``release()``, it does not go in again: nothing renews that lock any more.
    """

    def __init__(self, state: Any, timeout: float | None, min_hold: float) -> None:
        self.hold: Hold = state.hold
        self.renewal = state.renewal
        self.file_lock = state.file_lock
        self.timeout = timeout
        self.min_hold = min_hold
        #: By the state of the lock object that was used. One that is collected without a release,
        #: after an interrupt, does not count any more.
        self._times: WeakKeyDictionary[Any, int] = WeakKeyDictionary({state: 1})
        self.hold.inner_on_lost = {}

    @property
    def depth(self) -> int:
        return sum(self._times.values())

    def times(self, state: Any) -> int:
        return self._times.get(state, 0)

    def enter(self, state: Any, on_lost: Callable[[], Any] | None) -> bool:
        """Go in once more; False if the lock was lost just now. ``on_lost`` is called in addition
        to that of the acquisition."""
        times = self.times(state)
        if not times and on_lost is not None:
            self.hold.inner_on_lost = {**self.hold.inner_on_lost, ref(state): on_lost}
        if not self.hold.is_valid:
            self._forget_on_lost(state)
            return False
        state.entry = self  # An interrupt may come after each line: now it can be undone.
        self._times[state] = times + 1
        state.token, state.hold, state.renewal = self.hold.token, self.hold, self.renewal
        state.file_lock = self.file_lock
        return True

    def leave(self, state: Any) -> bool:
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
        left.end()
        state.token, state.hold = None, left
        state.renewal = state.file_lock = state.entry = None
        return bool(times)  # Else an interrupt has cut short how it was left before.

    def _forget_on_lost(self, state: Any) -> None:
        kept = self.hold.inner_on_lost.items()
        self.hold.inner_on_lost = {s: tell for s, tell in kept if s() not in (state, None)}


#: By caller and lock. A task is not inside what the task or thread that started it holds.
_entries: WeakValueDictionary[Any, Entry] = WeakValueDictionary()


def _key(lock: Any) -> tuple[Any, ...]:
    caller = ref(acting_task() or threading.current_thread())
    return caller, lock.asynchronous, lock._servers, lock.keys.lock


def _entry_of_caller(lock: Any) -> Entry | None:
    entry = _entries.get(_key(lock))
    return entry if entry is not None and entry.hold.is_valid else None


def is_inside(lock: Any) -> bool:
    """Whether the caller holds ``lock``, and goes in again without a wait."""
    return lock.reentrant and _entry_of_caller(lock) is not None


def enter_again(lock: Any) -> bool:
    """Whether the caller holds ``lock`` already, and has gone in once more."""
    entry = _entry_of_caller(lock)
    if entry is None:
        return False
    on_lost = None if lock.on_lost is None else lock._for_keeper(lock.on_lost)
    return entry.enter(lock.local, on_lost)


def is_held_by_caller(lock: Any) -> bool:
    """Whether the caller holds ``lock``, by any lock object, as far as is known."""
    task = acting_task()
    for job in keeper().jobs():
        if isinstance(job, Renewal) and job.hold.keys.lock == lock.keys.lock:
            hold = job.hold
            mine = hold.by_this_thread
            if lock.asynchronous:
                mine = hold.task is not None and hold.task() is task
            if mine and hold.is_valid and job.server in lock._servers:
                return True
    return False


def note_entry(lock: Any) -> None:
    entry = Entry(lock.local, lock.timeout, lock.min_hold)
    lock.local.entry = _entries[_key(lock)] = entry


class Losses:
    """Of every lock object: whether its lock was lost, and why."""

    local: Any
    keys: Any
    _run: Any
    _servers: Any
    _shown: Any

    @property
    def lost(self) -> bool:
        """Whether the acquired lock ended before its release."""
        hold = self.local.hold
        return hold is not None and bool(hold.lost)

    @property
    def lost_reason(self) -> str:
        """Why the lock was lost: released by force and by whom, expired, deleted by another
        program, or Redis lost its data. Empty if it was not lost."""
        hold = self.local.hold
        if hold is None or not hold.lost:
            return ""
        return hold.reason or "its lifetime is over, and Redis confirmed no renewal"

    def ensure_held(self) -> None:
        """Raise an error unless the lock is held; no round trip.

        Raises:
            LockLost: this lock object has acquired it, and does not hold it any more.
            LockError: this lock object (in this thread or task) has not acquired it.
        """
        hold = self.local.hold
        if hold is None:
            raise LockError("The lock has not been acquired", self._shown)
        if not hold.is_valid:
            reason = self.lost_reason
            text = f"The lock is not held any more{reason and f': {reason}'}"
            raise LockLost(f"{text}; stop before doing harm", self._shown, reason=reason)

    def _not_owned(self, verb: str, reason: str) -> NoReturn:
        text = f"Cannot {verb} a lock that's no longer owned{reason and f': {reason}'}"
        raise LockNotOwnedError(text, self._shown, reason=reason)

    def _why_steps(self, call: Call, early: bool | None, hold: Hold | None) -> Steps[str]:
        """Why ``call`` did not find the lock; see ``causes.Question``."""
        if hold is not None and hold.reason:
            return hold.reason
        keys = self.keys if hold is None else hold.keys
        question, reply = causes.Question(self._servers[0], keys, call.args[0], early, hold), None
        with suppress(RedisError, OSError):
            reply = (yield self._run(question.call)).value
        reason: str = question.answer(reply)
        return reason


class Renewals:
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
            job.schedule(self.hold.began)
            keeper().add(job)

    def entered(self, grant_timeout: float, min_hold: float) -> None:
        """The lock was taken by ``with``. A signal handler's exception at the entry of ``__exit__``
        may keep the block's end from releasing it; then the keeper does when the handle is
        collected."""
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

    def emit(self, what: str, note: str = "") -> None:
        for job in self.jobs:
            job.emit(what, note)


def _collected(jobs: tuple[Renewal, ...], terms: tuple[float, float], _: object) -> None:
    """May run anywhere, as signal handlers do: the keeper does the rest."""
    for job in jobs:
        if not job.hold.ended:
            job.collected = terms
            keeper().reschedule(job, time.monotonic())
