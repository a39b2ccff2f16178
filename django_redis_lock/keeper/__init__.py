"""The keeper: the one background thread of a process. It renews the locks that the process holds,
and watches those for which it waits.

It has one connection to each server, so neither an exhausted pool nor a slow command of the
application delays a renewal. All calls that are due for a server are sent in one batch.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from .. import threads
from ..clock import time
from ..extension import PartMissing, part
from ..protocol import Call, Reply
from ..threads import Mutex, ThreadEvent, after_fork, get_logger
from ..transport import RawConnection, Server, is_outage

if TYPE_CHECKING:
    from .exchange import Exchanges

logger = get_logger("django_redis_lock.keeper")

#: Without a job, the thread ends after this time.
IDLE_SECONDS = 1.0
#: The thread wakes as often while it renews something: while the host sleeps, the time that it
#: waits stands still.
LOOK_SECONDS = 1.0
#: A job that renews nothing becomes as urgent as what ends so many seconds after the job was due.
PATIENCE_SECONDS = 10.0
#: How long a process waits at its end, for its jobs and then for its notices.
FLUSH_SECONDS = 1.0
#: How long the first caller in a process waits for the keeper's thread to start, and, where nothing
#: tells of a fork, to import.
STARTING_SECONDS = 2.0
#: Between two attempts to release what others wait for; if they are refused; and of all attempts:
#: during an outage there are more and more of such jobs.
MAX_PAUSE_SECONDS, REFUSED_PAUSE_SECONDS, MAX_ATTEMPT_SECONDS = 2.0, 30.0, 3600.0


class Listener(Protocol):
    """A connection to which a server reports changes of keys; see ``contrib.instant_loss``."""

    def track(self, link: RawConnection) -> None:
        """``link`` is the keeper's connection to the server."""


class Subscription(Protocol):
    """What listens for messages to this process; see ``contrib.instant_loss``."""

    def start(self) -> None: ...
    def close(self) -> None: ...


#: Those of the servers that report changes.
listeners: WeakKeyDictionary[Server, Listener] = WeakKeyDictionary()


class Job:
    """A script to run on one server at ``due`` (monotonic seconds), usually again and again."""

    #: The lifetime, in seconds, of what it renews.
    deadline_scale = math.inf
    #: Whether the process does this job before it ends, because other processes wait for it.
    flush_at_exit = False
    #: The keeper that has it; see ``use_keeper``.
    added_to: Keeper | None = None

    def __init__(self, server: Server, due: float) -> None:
        self.server = server
        self.due = due

    def ends_at(self) -> float:
        """Monotonic time until which the job can wait: the one with the earliest is done first."""
        return self.due + min(self.deadline_scale, PATIENCE_SECONDS)

    def call(self, now: float) -> Call | None:
        """The call to send now; None if only ``due`` has changed."""
        raise NotImplementedError

    def answered(self, value: Reply, sent_at: float) -> None:
        """Handle the reply to ``call``; must set ``due`` or discard the job."""
        raise NotImplementedError

    def failed(self, error: Exception, now: float) -> None:
        """Handle a call without a reply; must set ``due``."""
        raise NotImplementedError


class SentOnce(Job):
    """Not worth a second try."""

    flush_at_exit = True

    def __init__(self, server: Server, call: Call) -> None:
        super().__init__(server, time.monotonic())
        self._call = call

    def call(self, now: float) -> Call:
        return self._call

    def answered(self, value: Reply, sent_at: float) -> None:
        keeper().discard(self)

    def failed(self, error: Exception, now: float) -> None:
        keeper().discard(self)


class DeferredRelease(Job):
    """Does what others wait for when the caller cannot: releases what an acquire may have got
    although its answer was lost, or what an interrupted release was to give up; ends a flight.

    It asks until it is answered, and once more a second later, because what was sent before may
    still lie unread in the server's buffers, where no lifetime has begun yet; for an hour, or as
    long as the lock would live, in seconds (None: it has no lifetime, and nothing else ends it). It
    bears a refusal that does not pass by itself, as of a permission, as long as the lock lives.
    """

    flush_at_exit = True

    def __init__(self, server: Server, release: Call, lifetime: float | None = 0.0) -> None:
        super().__init__(server, time.monotonic())
        self._call = release
        lasts = math.inf if lifetime is None else lifetime
        self._lives_until = self.due + lasts
        self._gives_up_at = self.due + max(MAX_ATTEMPT_SECONDS, lasts)
        self._answers = 0
        self._pause = 0.5

    def call(self, now: float) -> Call | None:
        if self._answers < 2 and now < self._gives_up_at:
            return self._call
        keeper().discard(self)
        return None

    def answered(self, value: Reply, sent_at: float) -> None:
        self._answers += 1
        self.flush_at_exit = False
        self.due = sent_at + 1.0

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + self._pause
        passes = is_outage(error) or self.server.refuses(error)
        self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS if passes else REFUSED_PAUSE_SECONDS)
        # Else it would be refused forever; and a key of another type is no lock.
        self._answers += not passes and (now >= self._lives_until or "WRONGTYPE" in str(error))


class Keeper:
    """The thread and its jobs. All methods may be called from any thread and signal handler."""

    def __init__(self) -> None:
        # The methods enter the mutex and not the condition, because entering a condition is not
        # atomic: an exception from a signal handler could leave the mutex locked forever.
        self._mutex = Mutex()
        self._condition = threading.Condition(self._mutex)
        self._jobs: set[Job] = set()
        self._due: list[tuple[float, int, Job]] = []
        self._sequence = itertools.count()
        #: The jobs that are being done, and when they are to be done again at the latest.
        self._under_way: dict[Job, float] = {}
        self._thread: threading.Thread | None = None
        self._wakes_at = -math.inf
        #: The shortest lifetime of a job, and until when it is not looked up again.
        self._shortest, self._shortest_until = math.inf, -math.inf
        self._loaded: Exchanges | None = None

    @property
    def _exchanges(self) -> Exchanges:
        # Not a ``cached_property``: before Python 3.12 that has a mutex, which a forked child may
        # find locked.
        if self._loaded is None:
            with threads.no_fork():
                exchanges: Exchanges = import_module(f"{__name__}.exchange").Exchanges()
            self._loaded = exchanges
        return self._loaded

    def add(self, job: Job) -> None:
        if sys.is_finalizing():
            return  # The threads stand still, one perhaps with the mutex.
        with self._mutex:
            job.added_to = self
            self._jobs.add(job)
            self._shortest = min(self._shortest, job.deadline_scale)
            self._enqueue(job)
            if self._thread is None:
                self._start()
            elif job.due < self._wakes_at:
                self._condition.notify()

    def discard(self, job: Job) -> None:
        if job.added_to is not self and job.added_to is not None:
            job.added_to.discard(job)
            return
        self._jobs.discard(job)

    def jobs(self) -> list[Job]:
        # Atomic, also in a Python without GIL: ``discard`` does not take the mutex.
        return list(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def reschedule(self, job: Job, due: float) -> None:
        """Do ``job`` at ``due`` (monotonic seconds) instead of when it was planned."""
        if sys.is_finalizing():
            return
        with self._mutex:
            if job in self._under_way:
                self._under_way[job] = min(due, self._under_way[job])
            elif job in self._jobs:
                job.due = due
                self._enqueue(job)
                if due < self._wakes_at:
                    self._condition.notify()

    def hurry(self) -> None:
        for job in self.jobs():
            self.reschedule(job, time.monotonic())

    def subscribe(
        self, server: Server, channel: bytes, received: Callable[[bytes | None], object]
    ) -> Subscription | None:
        """Listen to ``channel``. None without the part for that: then a loss is noticed at the next
        renewal."""
        try:
            subscription: Subscription
            subscription = part("instant_loss").Subscription(server, channel, received)
        except PartMissing:
            return None
        subscription.start()
        return subscription

    def flush(self) -> None:
        """Wait for the jobs with ``flush_at_exit``, a second at most. So a command that is
        interrupted while it waits for a lock leaves the queue."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while any(job.flush_at_exit for job in self.jobs()) and time.monotonic() < deadline:
            time.sleep(0.002)

    def _enqueue(self, job: Job) -> None:
        heapq.heappush(self._due, (job.due, next(self._sequence), job))
        if len(self._due) > 2 * len(self._jobs) + 64:
            # Most entries belong to locks that were released before they came due.
            self._due = [(job.due, next(self._sequence), job) for job in self.jobs()]
            heapq.heapify(self._due)

    def _start(self) -> None:
        started = ThreadEvent()
        thread = threading.Thread(
            None, self._run, "django_redis_lock keeper", (started,), daemon=True
        )
        self._thread = thread

        def failed(error: RuntimeError) -> None:
            if self._thread is thread:
                self._thread = None
            started.set()
            # Figures are written without it as the process ends.
            if any(job.deadline_scale < math.inf or job.flush_at_exit for job in self.jobs()):
                logger.warning(
                    "The keeper thread could not start; locks will not be renewed: %s", error
                )

        try:
            threads.start(thread, failed)
            if self._loaded is None:
                # Else it starts while the caller goes on. What then waits, in the system, when a
                # signal comes may have passed the interpreter on just before, and not hear of it.
                started.wait(STARTING_SECONDS)
        except BaseException:
            self._thread = None  # It may run after all.
            raise

    def _run(self, started: ThreadEvent) -> None:
        threads.this_thread.is_keeper = True
        if threads.FORKS_UNNOTICED:
            # Not in the caller's thread: a signal handler may interrupt that in an import.
            with suppress(Exception):
                _ = self._exchanges
        started.set()
        with self._mutex:
            if self._thread is None:  # A signal handler interrupted the one who started it.
                self._thread = threading.current_thread()
        while True:
            try:
                batch = self._next_batch()
                if batch is None:
                    return
                self._serve(batch)
            except BaseException:
                with suppress(Exception):  # Out of memory.
                    logger.exception("Unexpected error in the keeper thread; it continues")
                if self._loaded is not None:
                    self._loaded.close()
                self._requeue({*self._under_way, *self.jobs()})  # Some may be off the heap.
                time.sleep(0.1)

    def _next_batch(self) -> list[Job] | None:
        """Wait until there is something to do, and return the jobs that are due; None when the
        thread should end."""
        with self._mutex:
            idle_until = time.monotonic() + IDLE_SECONDS
            while self._thread is threading.current_thread():
                now = time.monotonic()
                # Perhaps that of a lock just released: then the next one need not wake this thread.
                earliest = self._due[0][0] if self._due else math.inf
                batch = self._pop_due(now)
                pause = self._loaded.pause if self._loaded is not None else math.inf
                if batch or not pause:
                    self._wakes_at = -math.inf
                    return batch
                self._wakes_at = earliest if self._due else min(earliest, idle_until)
                if self._jobs:
                    idle_until = now + IDLE_SECONDS
                elif now >= idle_until:
                    self._thread = None
                    if self._loaded is not None:
                        self._loaded.end()
                    return None
                self._condition.wait(min(self._wakes_at - now, pause, LOOK_SECONDS))
        return None

    def _pop_due(self, now: float) -> list[Job]:
        batch: dict[Job, None] = {}
        while self._due and (self._due[0][0] <= now or self._due[0][2] not in self._jobs):
            due, _, job = heapq.heappop(self._due)
            if job in self._jobs and job.due == due:
                batch[job] = None
        self._under_way.update(dict.fromkeys(batch, math.inf))
        return list(batch)

    def _requeue(self, batch: Iterable[Job]) -> None:
        with self._mutex:
            for job in batch:
                job.due = min(job.due, self._under_way.pop(job, math.inf))
                if job in self._jobs:
                    self._enqueue(job)

    def _serve(self, batch: Sequence[Job]) -> None:
        exchanges = self._exchanges
        while batch or not exchanges.pause:
            if batch:
                exchanges.begin(batch, self._shortest_lifetime(time.monotonic()))
            with self._mutex:
                next_due = self._due[0][0] if self._due else math.inf
            self._requeue(exchanges.turn(next_due))
            batch = self._newly_due()

    def _shortest_lifetime(self, now: float) -> float:
        """Of all that is renewed: to look at each job for each batch would take the longer, the
        more there are."""
        with self._mutex:
            if now >= self._shortest_until:
                self._shortest = min((job.deadline_scale for job in self.jobs()), default=math.inf)
                self._shortest_until = now + LOOK_SECONDS
            return self._shortest

    def _newly_due(self) -> Sequence[Job]:
        """What has come due while replies were waited for."""
        with self._mutex:
            return self._pop_due(time.monotonic())


_keeper = Keeper()


def keeper() -> Keeper:
    return _keeper


def use_keeper(keeper: Keeper) -> None:
    """The jobs of the one before stay with it."""
    global _keeper
    _keeper = keeper


@after_fork
def _reset() -> None:
    global _keeper
    _keeper = Keeper()


def finish() -> None:
    """Wait for what must be done before the process ends, a second or two at most."""
    _keeper.flush()  # In a forked child, its own.
    threads.flush(FLUSH_SECONDS)


atexit.register(finish)
