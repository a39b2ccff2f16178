"""What a thread or task knows through a lock object, and re-entry."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from .hold import Hold, Lifeline

Task = asyncio.Task[object] | None

#: The task that called the method under way, and the one that runs it. Weak: a connection that is
#: made in a method keeps a copy of its context.
under_way: ContextVar[tuple[ref[asyncio.Task[object]], ref[asyncio.Task[object]]] | None]
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
    """Whether an event loop runs in this thread."""
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
    task: ref[asyncio.Task[object]] | None = None

    def mine(self) -> State:
        """What the caller knows."""
        return self

    def known(self) -> Known:
        entry = self.entry
        times = entry.times(self) if entry else 0
        return Known(self.token, self.hold, self.renewal, entry, times)

    def restore(self, known: Known) -> None:
        self.token, self.hold, self.renewal, self.entry, _ = known


class ThreadState(State, threading.local):
    """What each thread knows."""


class ThreadStateWithToken(ThreadState):
    """Each thread may at first release the lock that another handle has acquired with ``token``."""

    def __init__(self, token: bytes) -> None:
        self.token = token


class TaskStates(State):
    """What each task knows; see ``for_the_caller``."""

    def __init__(self, token: bytes | None) -> None:
        self._token = token
        self._states: WeakKeyDictionary[asyncio.Task[object], State] = WeakKeyDictionary()
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

    def __init__(self, state: State, timeout: float | None, min_hold: float) -> None:
        assert state.hold is not None
        self.hold: Hold = state.hold
        self.renewal = state.renewal
        self.timeout = timeout
        self.min_hold = min_hold
        #: By the state of the lock object that was used. One that is collected without a release,
        #: after an interrupt, does not count any more.
        self._times: WeakKeyDictionary[State, int] = WeakKeyDictionary({state: 1})

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
            self.hold.also_on_lost = {**self.hold.also_on_lost, ref(state): on_lost}
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
entries: WeakValueDictionary[tuple[object, ...], Entry] = WeakValueDictionary()
