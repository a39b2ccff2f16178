"""The keeper: the one background thread of a process. It renews the locks that the process holds,
and watches those that it waits for.

It starts with the first job and ends a second after the last. It has one connection to each server,
so neither an exhausted pool nor a slow command of the application delays a renewal. All calls that
are due for a server are sent in one batch.

After a fork the child starts with an empty keeper: the parent renews its own locks.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .. import notices
from ..forks import after_fork
from ..notices import get_logger
from ..protocol import Call
from ..transport import OUTAGE, RawConnection, Server, pack

__all__ = ["Job", "Keeper", "keeper"]

logger = get_logger("django_redis_lock.keeper")

#: Seconds without a job after which the thread ends.
IDLE_SECONDS = 1.0
#: The longest and shortest time, in seconds, that the keeper waits for a server's reply. In between
#: it waits a sixth of the shortest lifetime that it renews, so that a server that hangs never costs
#: a lock on another server its renewal.
REPLY_TIMEOUT_SECONDS, MIN_REPLY_TIMEOUT_SECONDS = 1.0, 0.05
UNEXPECTED = "Unexpected error in the keeper thread; it continues"


class Job:
    """Something to do at ``due`` (monotonic seconds) with one script on one server."""

    #: The time scale, in seconds, on which this job must be done: the lifetime of what it renews.
    deadline_scale = math.inf
    #: Whether the process waits for this job before it ends, because others depend on it.
    flush_at_exit = False

    def __init__(self, server: Server, due: float) -> None:
        self.server = server
        self.due = due

    def call(self, now: float) -> Call | None:
        """What to send now; None if there is nothing to ask and only ``due`` has changed."""
        raise NotImplementedError

    def answered(self, value: Any, sent_at: float) -> None:
        """The server's reply to ``call``; must set ``due`` or let the keeper discard the job."""
        raise NotImplementedError

    def failed(self, error: Exception, now: float) -> None:
        """There was no reply; must set ``due``."""
        raise NotImplementedError


@contextmanager
def _alone(job: Job) -> Iterator[None]:
    """Keep an unexpected error of ``job`` from the other jobs; ``job`` is tried again."""
    try:
        yield
    except BaseException:
        logger.exception(UNEXPECTED)
        job.due = time.monotonic() + REPLY_TIMEOUT_SECONDS


class Keeper:
    """The thread and its jobs. All methods may be called from any thread and signal handler."""

    def __init__(self) -> None:
        # Entered itself and not by way of the condition, whose own entering is no single step: an
        # exception from a signal handler in between would leave the mutex locked for good.
        self._mutex = threading.RLock()
        self._condition = threading.Condition(self._mutex)
        self._jobs: set[Job] = set()
        self._due: list[tuple[float, int, Job]] = []
        self._sequence = itertools.count()
        self._thread: threading.Thread | None = None
        self._wakes_at = -math.inf
        self._links: dict[Server, RawConnection] = {}

    def add(self, job: Job) -> None:
        """Carry out ``job`` from now on."""
        with self._mutex:
            self._jobs.add(job)
            self._enqueue(job)
            if self._thread is None:
                self._start()
            elif job.due < self._wakes_at:
                self._condition.notify()

    def discard(self, job: Job) -> None:
        """Drop ``job``; no effect if the keeper does not have it."""
        self._jobs.discard(job)
        if not self._jobs and self._wakes_at > time.monotonic() + IDLE_SECONDS:
            with self._mutex:
                self._condition.notify()  # Let it see that it need not wait for that any more.

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def reschedule(self, job: Job, due: float) -> None:
        """Carry out ``job`` at ``due`` (monotonic seconds) and not when it was planned."""
        with self._mutex:
            if job in self._jobs:
                job.due = due
                self._enqueue(job)
                if due < self._wakes_at:
                    self._condition.notify()

    def finish(self) -> None:
        """The process ends, and this thread with it: wait for the jobs that others depend on, a
        second at most. So a command that is interrupted while it waits for a lock leaves the queue.
        """
        deadline = time.monotonic() + REPLY_TIMEOUT_SECONDS
        while any(job.flush_at_exit for job in tuple(self._jobs)) and time.monotonic() < deadline:
            time.sleep(0.002)

    def _enqueue(self, job: Job) -> None:
        heapq.heappush(self._due, (job.due, next(self._sequence), job))
        if len(self._due) > 2 * len(self._jobs) + 64:
            # Most entries belong to locks released long before they came due.
            jobs = tuple(self._jobs)  # At once: jobs are discarded without the condition's lock.
            self._due = [(job.due, next(self._sequence), job) for job in jobs]
            heapq.heapify(self._due)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="django_redis_lock keeper", daemon=True)
        self._thread = thread
        self._wakes_at = -math.inf
        try:
            thread.start()
        except BaseException as error:
            self._thread = None  # If it runs nevertheless, it ends at once.
            if not isinstance(error, RuntimeError):
                raise
            # The interpreter is going down.
            logger.warning(
                "The keeper thread could not start; locks will not be renewed: %s", error
            )

    def _run(self) -> None:
        notices.enter_keeper()
        batch: Sequence[Job] = ()
        while True:
            try:
                with self._mutex:
                    for job in batch:
                        if job in self._jobs:
                            self._enqueue(job)
                batch = self._next_batch()
                if not batch:
                    return
                self._serve(batch)
            except BaseException:
                batch = tuple(self._jobs)  # Any of them may have been taken off the heap.
                with suppress(Exception):  # Out of memory.
                    logger.exception(UNEXPECTED)
                time.sleep(0.1)

    def _next_batch(self) -> list[Job]:
        """The jobs that are due, as soon as there are any; none when it is time to end."""
        with self._mutex:
            idle_until = time.monotonic() + IDLE_SECONDS
            while self._thread is threading.current_thread():
                now = time.monotonic()
                batch = self._pop_due(now)
                if batch:
                    self._wakes_at = -math.inf
                    return batch
                # Set before the jobs are counted: ``discard`` of the last job reads it.
                self._wakes_at = self._due[0][0] if self._due else idle_until
                if self._jobs:
                    idle_until = now + IDLE_SECONDS
                elif now >= idle_until:
                    self._thread = None
                    self._close_links()
                    return []
                self._condition.wait(min(self._wakes_at - now, 3600.0))
        return []

    def _pop_due(self, now: float) -> list[Job]:
        batch: dict[Job, None] = {}
        while self._due and (self._due[0][0] <= now or self._due[0][2] not in self._jobs):
            due, _, job = heapq.heappop(self._due)
            if job in self._jobs and job.due == due:
                batch[job] = None
        return list(batch)

    def _serve(self, batch: list[Job]) -> None:
        by_server: defaultdict[Server, list[tuple[Job, bytes]]] = defaultdict(list)
        now = time.monotonic()
        shortest = min((job.deadline_scale for job in tuple(self._jobs)), default=1.0)
        patience = max(min(REPLY_TIMEOUT_SECONDS, shortest / 6), MIN_REPLY_TIMEOUT_SECONDS)
        for job in batch:
            with _alone(job):
                call = job.call(now)
                if call is not None:
                    self._sort(job, call, patience, by_server)
        for server, work in by_server.items():
            self._exchange(server, work, patience)

    def _sort(
        self,
        job: Job,
        call: Call,
        patience: float,
        by_server: defaultdict[Server, list[tuple[Job, bytes]]],
    ) -> None:
        """Put ``job`` with the others for the server that has its keys now."""
        try:
            server = job.server.at(call.keys, patience)
        except OUTAGE as error:
            job.failed(error, time.monotonic())
        else:
            # By source: an unknown script would upset the order of the replies.
            by_server[server].append((job, pack(call, known=False)))

    def _exchange(self, server: Server, work: list[tuple[Job, bytes]], patience: float) -> None:
        """Send all of ``work`` in one batch, then read the replies."""
        unanswered = deque(job for job, _ in work)
        try:
            link = self._link(server, patience)
            sent_at = time.monotonic()
            for _, packed in work:
                link.send_packed_command([packed])
            while unanswered:
                if not link.can_read(max(0.0, sent_at + patience - time.monotonic())):
                    raise RedisTimeoutError(f"no answer within {patience:.2f} s")
                try:
                    value = link.read_response()
                except ResponseError as error:
                    job = unanswered.popleft()
                    with _alone(job):
                        job.server.on_error(error)
                        job.failed(error, time.monotonic())
                else:
                    job = unanswered.popleft()
                    with _alone(job):
                        job.answered(value, sent_at)
            server.answered()
        except Exception as error:
            if not isinstance(error, OUTAGE):
                logger.exception(UNEXPECTED)
            self._drop_link(server)
            now = time.monotonic()
            for job in unanswered:
                with _alone(job):
                    job.server.on_error(error)
                    job.failed(error, now)

    def _link(self, server: Server, patience: float) -> RawConnection:
        link = self._links.get(server)
        if link is None:
            link = self._links[server] = server.connect(timeout=patience)
        return link

    def _drop_link(self, server: Server) -> None:
        link = self._links.pop(server, None)
        if link is not None:
            link.disconnect()

    def _close_links(self) -> None:
        for server in list(self._links):
            self._drop_link(server)
            server.close(but=1)


_keeper = Keeper()


def keeper() -> Keeper:
    """This process's keeper."""
    return _keeper


@after_fork
def _begin_anew() -> None:
    global _keeper
    _keeper = Keeper()


def _finish() -> None:
    _keeper.finish()  # Not that of a parent process.
    notices.finish(REPLY_TIMEOUT_SECONDS)


atexit.register(_finish)
