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
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .. import threads
from ..clock import time
from ..extension import PartMissing, part
from ..protocol import Call
from ..threads import Mutex, after_fork, get_logger
from ..transport import (
    OUTAGE,
    PROBE_SECONDS,
    RawConnection,
    Server,
    is_misdirected,
    is_outage,
    pack,
    still_answers,
)

logger = get_logger("django_redis_lock.keeper")

#: Without a job, the thread ends after this time.
IDLE_SECONDS = 1.0
#: The longest and shortest time that the keeper waits for a server's reply. In between it waits a
#: sixth of the shortest lifetime that it renews, so that a server that hangs never costs a lock on
#: another server its renewal.
REPLY_TIMEOUT_SECONDS, MIN_REPLY_TIMEOUT_SECONDS = 1.0, 0.05
#: Seconds for which its idle connection is used without a check: a bit longer than from one look at
#: a lock, for which others wait, to the next.
TRUSTED_SECONDS = 2.2
#: Between two attempts to release what others wait for, and of all of them: during an outage there
#: are more and more of such jobs.
MAX_PAUSE_SECONDS, MAX_ATTEMPT_SECONDS = 2.0, 3600.0
UNEXPECTED = "Unexpected error in the keeper thread; it continues"


class Job:
    """A script to run on one server at ``due`` (monotonic seconds), usually again and again."""

    #: The lifetime, in seconds, of what it renews.
    deadline_scale = math.inf
    #: Whether the process does this job before it ends, because other processes wait for it.
    flush_at_exit = False
    #: See ``testing``.
    added_by: Any = None

    def __init__(self, server: Server, due: float) -> None:
        self.server = server
        self.due = due

    def call(self, now: float) -> Call | None:
        """The call to send now; None if only ``due`` has changed."""
        raise NotImplementedError

    def answered(self, value: Any, sent_at: float) -> None:
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

    def answered(self, value: Any, sent_at: float) -> None:
        keeper().discard(self)

    def failed(self, error: Exception, now: float) -> None:
        keeper().discard(self)


class DeferredRelease(Job):
    """Does what others wait for when the caller cannot: releases what an acquire may have got
    although its answer was lost, or what an interrupted release was to give up; ends a flight.

    It asks until it is answered, and once more a second later, because what was sent before may
    still lie unread in the server's buffers, where no lifetime has begun yet; for an hour, or as
    long as the lock would live, in seconds (None: it has no lifetime, and nothing else ends it).
    """

    flush_at_exit = True

    def __init__(self, server: Server, release: Call, lifetime: float | None = 0.0) -> None:
        super().__init__(server, time.monotonic())
        self._call = release
        lasts = math.inf if lifetime is None else lifetime
        self._gives_up_at = self.due + max(MAX_ATTEMPT_SECONDS, lasts)
        self._answers = 0
        self._pause = 0.5

    def call(self, now: float) -> Call | None:
        if self._answers < 2 and now < self._gives_up_at:
            return self._call
        keeper().discard(self)
        return None

    def answered(self, value: Any, sent_at: float) -> None:
        self._answers += 1
        self.flush_at_exit = False
        self.due = sent_at + 1.0

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + self._pause
        self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)
        passes = is_outage(error) or self.server.refuses(error)
        self._answers += not passes  # It would be refused for ever.


@contextmanager
def _isolated(job: Job) -> Iterator[None]:
    """An unexpected error of ``job`` must not affect other jobs."""
    try:
        yield
    except BaseException:
        logger.exception(UNEXPECTED)
        job.due = time.monotonic() + REPLY_TIMEOUT_SECONDS


class Keeper:
    """The thread and its jobs. All methods may be called from any thread and signal handler."""

    def __init__(self) -> None:
        # The methods enter the mutex and not the condition, because entering a condition is not
        # atomic: an exception from a signal handler could leave the mutex locked for ever.
        self._mutex = Mutex()
        self._condition = threading.Condition(self._mutex)
        self._jobs: set[Job] = set()
        self._due: list[tuple[float, int, Job]] = []
        self._sequence = itertools.count()
        #: The jobs that are being done, and when they are to be done again at the latest.
        self._under_way: dict[Job, float] = {}
        self._thread: threading.Thread | None = None
        self._wakes_at = -math.inf
        self._links: dict[Server, RawConnection] = {}
        #: When each was last answered on, in monotonic seconds.
        self._answered_at: dict[Server, float] = {}

    def add(self, job: Job) -> None:
        with self._mutex:
            self._jobs.add(job)
            self._enqueue(job)
            if self._thread is None:
                self._start()
            elif job.due < self._wakes_at:
                self._condition.notify()

    def discard(self, job: Job) -> None:
        self._jobs.discard(job)
        if not self._jobs and self._wakes_at > time.monotonic() + IDLE_SECONDS:
            with self._mutex:
                self._condition.notify()  # It waits for a job that is gone.

    def jobs(self) -> list[Job]:
        # Atomic, also in a Python without GIL: ``discard`` does not take the mutex.
        return list(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def reschedule(self, job: Job, due: float) -> None:
        """Do ``job`` at ``due`` (monotonic seconds) instead of when it was planned."""
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
    ) -> Any:
        """Listen to ``channel``; see ``contrib.instant_loss``. None without that part: then a loss
        is noticed at the next renewal."""
        try:
            subscription = part("instant_loss").Subscription(server, channel, received)
        except PartMissing:
            return None
        subscription.start()
        return subscription

    def flush(self) -> None:
        """Wait for the jobs with ``flush_at_exit``, a second at most. So a command that is
        interrupted while it waits for a lock leaves the queue."""
        deadline = time.monotonic() + REPLY_TIMEOUT_SECONDS
        while any(job.flush_at_exit for job in self.jobs()) and time.monotonic() < deadline:
            time.sleep(0.002)

    def _enqueue(self, job: Job) -> None:
        heapq.heappush(self._due, (job.due, next(self._sequence), job))
        if len(self._due) > 2 * len(self._jobs) + 64:
            # Most entries belong to locks that were released before they came due.
            self._due = [(job.due, next(self._sequence), job) for job in self.jobs()]
            heapq.heapify(self._due)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="django_redis_lock keeper", daemon=True)
        self._thread = thread
        self._wakes_at = -math.inf
        try:
            thread.start()
        except BaseException as error:
            self._thread = None  # If it runs after all, it ends at once.
            if not isinstance(error, RuntimeError):
                raise
            # Figures are written without it as the process ends.
            if any(job.deadline_scale < math.inf or job.flush_at_exit for job in self.jobs()):
                logger.warning(
                    "The keeper thread could not start; locks will not be renewed: %s", error
                )

    def _run(self) -> None:
        threads.this_thread.is_keeper = True
        batch: Sequence[Job] = ()
        while True:
            try:
                self._requeue(batch)
                batch = self._next_batch()
                if not batch:
                    return
                self._serve(batch)
            except BaseException:
                batch = self.jobs()  # Some may be off the heap.
                with suppress(Exception):  # Out of memory.
                    logger.exception(UNEXPECTED)
                time.sleep(0.1)

    def _next_batch(self) -> list[Job]:
        """Wait for jobs that are due; empty when the thread should end."""
        with self._mutex:
            idle_until = time.monotonic() + IDLE_SECONDS
            while self._thread is threading.current_thread():
                now = time.monotonic()
                # Perhaps that of a lock just released: then the next one need not wake this thread.
                earliest = self._due[0][0] if self._due else math.inf
                batch = self._pop_due(now)
                if batch:
                    self._wakes_at = -math.inf
                    return batch
                # Set before the jobs are counted: ``discard`` of the last job reads it.
                self._wakes_at = earliest if self._due else min(earliest, idle_until)
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
        self._under_way.update(dict.fromkeys(batch, math.inf))
        return list(batch)

    def _requeue(self, batch: Sequence[Job]) -> None:
        with self._mutex:
            for job in batch:
                job.due = min(job.due, self._under_way.pop(job, math.inf))
                if job in self._jobs:
                    self._enqueue(job)

    def _serve(self, batch: list[Job]) -> None:
        by_server: defaultdict[Server, list[tuple[Job, bytes]]] = defaultdict(list)
        known: set[tuple[Server, str]] = set()
        now = time.monotonic()
        shortest = min((job.deadline_scale for job in self.jobs()), default=1.0)
        reply_timeout = max(min(REPLY_TIMEOUT_SECONDS, shortest / 6), MIN_REPLY_TIMEOUT_SECONDS)
        for job in batch:
            with _isolated(job):
                call = job.call(now)
                if call is None:
                    continue
                try:
                    server = job.server.at(call.keys, reply_timeout)
                except OUTAGE as error:
                    job.failed(error, time.monotonic())
                    continue
                # The first of each script with the source: an EVALSHA of an unknown one would need
                # a second request.
                script = server, call.script.sha
                by_server[server].append((job, pack(call, known=script in known)))
                known.add(script)
        for server, work in by_server.items():
            self._exchange(server, work, reply_timeout)

    def _exchange(self, server: Server, work: list[tuple[Job, bytes]], timeout: float) -> None:
        unanswered, misdirected = deque(job for job, _ in work), False
        try:
            link = self._link(server, timeout)
            sent_at = time.monotonic()
            for _, packed in work:
                link.send_packed_command([packed])
            while unanswered:
                if not link.can_read(max(0.0, sent_at + timeout - time.monotonic())):
                    raise RedisTimeoutError(f"no answer within {timeout:.2f} s")
                try:
                    value = link.read_response()
                except ResponseError as error:
                    job, misdirected = unanswered.popleft(), misdirected or is_misdirected(error)
                    with _isolated(job):
                        job.server.on_error(error)
                        job.failed(error, time.monotonic())
                else:
                    job = unanswered.popleft()
                    with _isolated(job):
                        job.answered(value, sent_at)
            self._answered_at[server] = time.monotonic()
            server.answered()
            if misdirected:
                self._drop_link(server)
                server.renew(link)
        except Exception as error:
            if not isinstance(error, (*OUTAGE, ResponseError)):
                logger.exception(UNEXPECTED)
            self._drop_link(server)
            now = time.monotonic()
            for job in unanswered:
                with _isolated(job):
                    job.server.on_error(error)
                    job.failed(error, now)

    def _link(self, server: Server, reply_timeout: float) -> RawConnection:
        link = self._links.get(server)
        was_idle = time.monotonic() - self._answered_at.get(server, math.inf) > TRUSTED_SECONDS
        limit = min(PROBE_SECONDS, reply_timeout / 2)
        if link is not None and (
            link.generation != server.generation or (was_idle and not still_answers(link, limit))
        ):
            self._drop_link(server)
            link = None
        if link is None:
            for old in [each for each in self._links if each.retired]:
                self._drop_link(old)
            # In RESP2 nothing comes but replies.
            link = self._links[server] = server.connect(timeout=reply_timeout, protocol=2)
        if server.listener is not None:
            server.listener.track(link)
        return link

    def _drop_link(self, server: Server) -> None:
        link = self._links.pop(server, None)
        self._answered_at.pop(server, None)
        if link is not None:
            link.disconnect()

    def _close_links(self) -> None:
        for server in list(self._links):
            self._drop_link(server)
            server.close(but=1)


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
    threads.flush(REPLY_TIMEOUT_SECONDS)


atexit.register(finish)
