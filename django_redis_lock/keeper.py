"""The keeper: what a process does in the background. It renews the locks that the process holds,
and watches those for which it waits.

It has a thread for each server, so one that hangs delays nothing on another. Each has a connection
of its own, so neither an exhausted pool nor a slow command of the application delays a renewal. All
calls that are due for a server are sent in one batch.
"""

from __future__ import annotations

import asyncio
import atexit
import heapq
import itertools
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from . import threads, transport
from .clock import real_time, time
from .protocol import Call, Reply
from .threads import Mutex, after_fork, get_logger
from .transport import RawConnection, Server, is_outage, pack
from .transport.address import PROBE_SECONDS
from .transport.refusals import OUTAGE, is_misdirected
from .transport.server import readable

if TYPE_CHECKING:
    from .transport.aio_connection import AsyncRawConnection

logger = get_logger("django_redis_lock.keeper")

#: Without a job, a thread ends after this time.
IDLE_SECONDS = 1.0
#: A thread wakes as often while it renews something: while the host sleeps, the time that it waits
#: stands still.
LOOK_SECONDS = 1.0
#: A job that renews nothing becomes as urgent as what ends so many seconds after the job was due.
PATIENCE_SECONDS = 10.0
#: The longest and shortest time that a thread waits for the next reply. In between it waits a sixth
#: of the shortest lifetime that it renews.
REPLY_TIMEOUT_SECONDS, MIN_REPLY_TIMEOUT_SECONDS = 1.0, 0.05
#: So many calls are sent before their replies are read.
BATCH = 256
UNEXPECTED = "Unexpected error in the keeper thread; it continues"
#: How long a process waits at its end, for its jobs and then for its notices.
FLUSH_SECONDS = 1.0
#: Between two attempts to release what others wait for; if they are refused; and of all attempts:
#: during an outage there are more and more of such jobs.
MAX_PAUSE_SECONDS, REFUSED_PAUSE_SECONDS, MAX_ATTEMPT_SECONDS = 2.0, 30.0, 3600.0


class Job:
    """A script to run on one server at ``due`` (monotonic seconds), usually again and again."""

    #: The lifetime, in seconds, of what it renews.
    deadline_scale = math.inf
    #: Whether the process does this job before it ends, because other processes wait for it.
    flush_at_exit = False
    #: What does it; None before it was added.
    worker: Worker | None = None

    def __init__(self, server: Server, due: float) -> None:
        self.server = server
        self.due = due

    def ends_at(self) -> float:
        """Monotonic time until which the job can wait: the one with the earliest is done first."""
        return self.due + min(self.deadline_scale, PATIENCE_SECONDS)

    def call(self, now: float) -> Call | None:
        """The call to send now; None if only ``due`` has changed."""
        raise NotImplementedError

    def replied(self, value: Reply, sent_at: float) -> None:
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

    def replied(self, value: Reply, sent_at: float) -> None:
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

    Args:
        late: whether what has taken it may yet be carried out; see ``LateRequest``.
    """

    flush_at_exit = True

    def __init__(
        self, server: Server, release: Call, lifetime: float | None = 0.0, late: bool = False
    ) -> None:
        super().__init__(server, time.monotonic())
        self._call = release
        self._lifetime, self._late = lifetime, late
        lasts = math.inf if lifetime is None else lifetime
        self._lives_until = self.due + lasts
        self._gives_up_at = self.due + max(MAX_ATTEMPT_SECONDS, lasts)
        self._answers = 0
        self._pause = 0.5

    def call(self, now: float) -> Call | None:
        if self._answers < 2 and now < self._gives_up_at:
            return self._call
        keeper().discard(self)
        if self._late:
            keeper().add(LateRequest(self.server, self._call, self._lifetime))
        return None

    def replied(self, value: Reply, sent_at: float) -> None:
        self._answers += 1
        self.flush_at_exit = False
        self.due = sent_at + 1.0

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + self._pause
        passes = is_outage(error) or self.server.refuses(error)
        self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS if passes else REFUSED_PAUSE_SECONDS)
        # Else it would be refused forever; and a key of another type is no lock.
        if not passes and (now >= self._lives_until or "WRONGTYPE" in str(error)):
            self._answers += 1


class LateRequest(Job):
    """Releases what a request takes that Redis carries out when nobody waits for it any more: a
    proxy, or TCP by its own repetition, may deliver it long after its caller has given it up. So it
    releases again and again, at growing pauses, for as long as the lock would live, in seconds
    (None: it has no lifetime), and at least a minute."""

    def __init__(self, server: Server, release: Call, lifetime: float | None) -> None:
        now, self._pause = time.monotonic(), 0.5
        super().__init__(server, now + self._pause)
        self._call = release
        self._ends_at = now + (MAX_ATTEMPT_SECONDS if lifetime is None else max(lifetime, 60.0))

    def call(self, now: float) -> Call | None:
        if now < self._ends_at:
            return self._call
        keeper().discard(self)
        return None

    def replied(self, value: Reply, sent_at: float) -> None:
        self._pause = min(self._pause * 2, 60.0)
        self.due = sent_at + self._pause

    def failed(self, error: Exception, now: float) -> None:
        self.replied(None, now)


@contextmanager
def isolated(job: Job) -> Iterator[None]:
    """An unexpected error of ``job`` must not affect other jobs."""
    try:
        yield
    except BaseException:
        logger.exception(UNEXPECTED)
        job.due = time.monotonic() + REPLY_TIMEOUT_SECONDS


#: Seconds after which an idle connection may have been forgotten: a bit longer than from one look
#: at a lock, for which others wait, to the next.
TRUSTED_SECONDS = 2.2


class Listener(Protocol):
    """A connection to which a server reports changes of keys; see ``contrib.instant_loss``."""

    def track(self, link: RawConnection) -> None:
        """``link`` is the keeper's connection to the server."""


#: Those of the servers that report changes.
listeners: WeakKeyDictionary[Server, Listener] = WeakKeyDictionary()


class Link:
    """A connection to ``server``: one of its own, or an idle one of the process, because the server
    may allow no other. For one thread only.

    Attributes:
        misdirected: whether a reply has come from a replica.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.misdirected = False
        self._connection: RawConnection | None = None
        #: How to give back one that is not its own.
        self._give_back: Callable[[RawConnection], object] | None = None
        #: Since when it is idle (monotonic).
        self._idle_since = -math.inf
        #: What the server reported changes to, when calls were last sent.
        self._listener: Listener | None = None

    @property
    def connection(self) -> RawConnection:
        assert self._connection is not None
        return self._connection

    def send(self, packed: list[bytes], timeout: float) -> float:
        """Send ``packed``, which may run twice. Returns the monotonic time just before that. Where
        the server reports changes, its own connection is used, if it can be opened: the server has
        to know it."""
        if self._connection is not None and self.connection.generation != self._server.generation:
            self.drop()
        if self._connection is None and self._server not in listeners:
            self._borrow()
        if self._connection is not None and time.monotonic() - self._idle_since > TRUSTED_SECONDS:
            try:
                sent_at = self._send(packed)
                # Else it was forgotten, or, which the second shows, closed.
                milliseconds = min(PROBE_SECONDS, timeout / 2) * 1000
                if self.connection.poll(milliseconds) and self.connection.can_read(0):
                    return sent_at
            except (RedisError, OSError):
                pass
            self.drop()
        if self._connection is None:
            try:
                # In RESP2 nothing comes but replies.
                self._connection = self._server.connect(timeout=timeout, protocol=2)
            except (RedisError, OSError):
                if not self._borrow() and not self._borrow_of_a_loop():
                    raise
        return self._send(packed)

    def _send(self, packed: list[bytes]) -> float:
        self._listener = listeners.get(self._server)
        if self._listener is not None and self._give_back is None:
            self._listener.track(self.connection)
        sent_at = time.monotonic()
        self.connection.send_packed_command(packed)
        return sent_at

    def read(self, timeout: float) -> Reply:
        """The next reply, within ``timeout`` seconds; an error that is one is returned."""
        if not readable(self.connection, timeout):
            raise RedisTimeoutError(f"no answer within {timeout:.2f} s")
        try:
            return self.connection.read_response()
        except ResponseError as error:
            return error

    def _borrow(self) -> bool:
        if (idle := self._server.checkout_idle(may_owe=False)) is not None:
            self._connection, _, self._idle_since = idle
            self._give_back = self._server.checkin
        return self._connection is not None

    def _borrow_of_a_loop(self) -> bool:
        if (spare := spare_of_a_loop(self._server)) is not None:
            self._connection, self._give_back = spare, _leave
        return self._connection is not None

    def rest(self) -> bool:
        """All has been answered: give a borrowed connection back. Returns True if the server has
        begun to report changes, but has not noted what was just read: it must be read again."""
        server, connection, self._idle_since = self._server, self.connection, time.monotonic()
        if self.misdirected:
            self.drop()
            server.renew(connection)
        elif self._give_back is not None:
            self._give_back(connection)
            self._connection = self._give_back = None
        server.answered()
        return listeners.get(server) is not self._listener

    def drop(self) -> None:
        if self._give_back is not None:
            self._server.close()  # The other idle ones may have broken for the same reason.
        if self._connection is not None:
            self._connection.disconnect()
        self._connection = self._give_back = None
        self.misdirected = False

    def end(self) -> None:
        """The thread ends: close idle connections to its server, too."""
        self.drop()
        self._server.close(but=1)


def _leave(connection: RawConnection) -> None:
    """The loop has it all the time."""


class _OverALoop:
    """The connection that the tasks of ``loop`` share, as a ``RawConnection`` for another
    thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: AsyncRawConnection) -> None:
        self._loop, self._connection = loop, connection
        self.generation = connection.generation
        self._replies: deque[futures.Future[Reply]] = deque()

    def poll(self, milliseconds: float, /) -> bool:
        return self.can_read(milliseconds / 1000)

    def disconnect(self) -> None:
        """It is the loop's."""

    async def _request(self, command: bytes) -> Reply:
        return await self._connection.request(command)

    def send_packed_command(self, commands: list[bytes]) -> None:
        for asking in map(self._request, commands):
            try:
                self._replies.append(asyncio.run_coroutine_threadsafe(asking, self._loop))
            except RuntimeError as error:
                asking.close()
                raise RedisConnectionError(f"The event loop of the connection: {error}") from error

    def can_read(self, timeout: float = 0) -> bool:
        return bool(futures.wait(list(self._replies)[:1], timeout).done)

    def read_response(self) -> Reply:
        try:
            return self._replies.popleft().result()
        except futures.CancelledError as error:
            raise RedisConnectionError("The event loop of the connection has ended") from error


def spare_of_a_loop(node: Server) -> Any:
    """A connection to ``node`` that the tasks of an event loop share, for a thread that can
    open none."""
    # Not imported: it is there if this process has such connections.
    aio_client = sys.modules.get(f"{transport.__name__}.aio_client")
    for loop, of_loop in getattr(aio_client, "loops", {}).copy().items():
        connection = of_loop.connections.get(node)
        usable = connection is not None and connection.generation == node.generation
        if usable and not connection.is_closed() and loop.is_running():
            return _OverALoop(loop, connection)
    return None


class Worker:
    """The jobs on one ``server``, in the order in which they come due, and the thread that does
    them. On a cluster, or behind sentinels, a job moves to the worker of the node that it leads to.
    """

    def __init__(self, keeper: Keeper, server: Server) -> None:
        self.keeper, self.server = keeper, server
        # The methods enter the mutex and not the condition, because entering a condition is not
        # atomic: an exception from a signal handler could leave the mutex locked forever.
        self._condition = threading.Condition(keeper.mutex)
        self._due: list[tuple[float, int, Job]] = []
        self._sequence = itertools.count()
        #: The jobs that are being done, and when they are to be done again at the latest.
        self.under_way: dict[Job, float] = {}
        #: Jobs with their calls, from another worker.
        self._called: list[tuple[Job, Call]] = []
        self._thread: threading.Thread | None = None
        #: When its thread wakes next (monotonic), and, in real time, from when on more may be sent.
        self.wakes_at = self._resumes_at = -math.inf
        #: The shortest lifetime of a job, and until when it is not looked up again.
        self._shortest, self._shortest_until = math.inf, -math.inf
        self._link = Link(server)

    # -- with the keeper's mutex ---------------------------------------------------------------

    def put(self, job: Job) -> None:
        job.worker = self
        self._shortest = min(self._shortest, job.deadline_scale)
        self._enqueue(job)
        self.look(job.due)

    def put_called(self, job: Job, call: Call, due: float) -> None:
        """Send ``call`` at once, and do ``job`` again when it is due, or at ``due``."""
        job.worker = self
        self._shortest = min(self._shortest, job.deadline_scale)
        self.under_way[job] = due
        self._called.append((job, call))
        self.look()

    def reschedule(self, job: Job, due: float) -> None:
        if job in self.under_way:
            self.under_way[job] = min(due, self.under_way[job])
        else:
            job.due = due
            self._enqueue(job)
            self.look(due)

    def look(self, due: float = -math.inf) -> None:
        if self._thread is None:
            self.keeper.start(self)
        elif due < self.wakes_at:
            self._condition.notify()

    def _has(self, entry: tuple[float, int, Job]) -> bool:
        due, _, job = entry
        return job in self.keeper and job.worker is self and job.due == due

    def _enqueue(self, job: Job) -> None:
        heapq.heappush(self._due, (job.due, next(self._sequence), job))
        if len(self._due) > 2 * self.keeper.count() + 64:
            # Most entries belong to locks that were released before they came due.
            self._due = [entry for entry in self._due if self._has(entry)]
            heapq.heapify(self._due)

    def next_due(self) -> float:
        while self._due and not self._has(self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

    def take_due(self, now: float) -> tuple[list[tuple[Job, Call]], list[Job]]:
        """What is to be done now, the most urgent first; more than a batch stays where it is."""
        called, self._called = self._called[:BATCH], self._called[BATCH:]
        due: dict[Job, None] = {}
        while self.next_due() <= now:
            due[heapq.heappop(self._due)[2]] = None
        first = sorted(due, key=lambda job: job.ends_at())
        for job in first[BATCH:]:
            self._enqueue(job)
        self.under_way.update(dict.fromkeys(first[:BATCH], math.inf))
        return called, first[:BATCH]

    # -- the thread ----------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = thread = threading.Thread(
            None, self._run, "django_redis_lock keeper", daemon=True
        )

        def failed(error: RuntimeError) -> None:
            if self._thread is thread:
                self._thread = None
            # Figures are written without it as the process ends.
            jobs = (job for job in self.keeper.jobs() if job.worker is self)
            if any(job.deadline_scale < math.inf or job.flush_at_exit for job in jobs):
                logger.warning(
                    "The keeper thread could not start; locks will not be renewed: %s", error
                )

        try:
            threads.start(thread, failed)
        except BaseException:
            self._thread = None  # It may run after all.
            raise

    def _run(self) -> None:
        threads.this_thread.is_keeper = True
        with self.keeper.mutex:
            if self._thread is None:  # A signal handler interrupted the one who started it.
                self._thread = threading.current_thread()
        while True:
            try:
                batch = self._next_batch()
                if batch is None:
                    return
                self.serve(*batch)
            except BaseException:
                with suppress(Exception):  # Out of memory.
                    logger.exception(UNEXPECTED)
                self._link.drop()
                # Some may be off the heap.
                self._requeue({*self.under_way, *self.keeper.jobs()})
                time.sleep(0.1)

    def _next_batch(self) -> tuple[list[tuple[Job, Call]], list[Job]] | None:
        """Wait until there is something to do, and return it; None when the thread should end."""
        with self.keeper.mutex:
            idle_until = time.monotonic() + IDLE_SECONDS
            while self._thread is threading.current_thread():
                now = time.monotonic()
                # Perhaps that of a lock just released: then the next one need not wake this thread.
                earliest = self._due[0][0] if self._due else math.inf
                resumes_at = now + self._resumes_at - real_time.monotonic()
                if now >= resumes_at:
                    called, due = self.take_due(now)
                    if called or due:
                        self.wakes_at = -math.inf
                        return called, due
                self.wakes_at = max(min(earliest, idle_until), resumes_at)
                if any(map(self._has, self._due)) or self._called:
                    idle_until = now + IDLE_SECONDS
                    self.wakes_at = max(earliest, resumes_at)
                elif now >= idle_until:
                    self._thread = None
                    self.keeper._workers.pop(self.server, None)
                    self._link.end()
                    return None
                self._condition.wait(min(self.wakes_at - now, LOOK_SECONDS))
        return None

    def _requeue(self, jobs: Iterable[Job]) -> None:
        with self.keeper.mutex:
            for job in jobs:
                if job.worker is not self:
                    continue
                job.due = min(job.due, self.under_way.pop(job, math.inf))
                if job in self.keeper:
                    self._enqueue(job)

    def serve(self, called: Sequence[tuple[Job, Call]], due: Sequence[Job]) -> None:
        """Send the calls of jobs, and tell the jobs what was answered."""
        timeout = self._timeout(time.monotonic())
        calls = [*called, *filter(None, (self._call_of(job, timeout) for job in due))]
        if calls:
            self._exchange(calls, timeout)
        self._requeue([*(job for job, _ in called), *due])

    def _timeout(self, now: float) -> float:
        """For the next reply. To look at each job for each batch would take the longer, the more
        there are."""
        if now >= self._shortest_until:
            own = (job.deadline_scale for job in self.keeper.jobs() if job.worker is self)
            with self.keeper.mutex:
                self._shortest = min(own, default=math.inf)
            self._shortest_until = now + LOOK_SECONDS
        longest = min(REPLY_TIMEOUT_SECONDS, self._shortest / 6)
        return max(longest, MIN_REPLY_TIMEOUT_SECONDS)

    def _call_of(self, job: Job, timeout: float) -> tuple[Job, Call] | None:
        """What is to be sent here for ``job``; None if there is nothing, or to another server."""
        with isolated(job):
            call = job.call(time.monotonic())
            if call is None:
                return None
            try:
                node = job.server.locate(call.keys, time.monotonic() + timeout)
            except OUTAGE as error:
                job.failed(error, time.monotonic())
                return None
            if node is self.server:
                return job, call
            with self.keeper.mutex:
                again = self.under_way.pop(job, math.inf)
                self.keeper.worker(node).put_called(job, call, again)
        return None

    def _exchange(self, calls: Sequence[tuple[Job, Call]], timeout: float) -> None:
        link, unanswered = self._link, list(calls)
        try:
            # A script that the server does not know is sent once more, with its source.
            for by_source in (False, True):
                sent_at = link.send(_packed(unanswered, by_source), timeout)
                for job, call in tuple(unanswered):
                    answer = link.read(timeout)
                    if isinstance(answer, NoScriptError) and not by_source:
                        continue
                    unanswered.remove((job, call))
                    with isolated(job):
                        if isinstance(answer, ResponseError):
                            link.misdirected = link.misdirected or is_misdirected(answer)
                            job.server.on_error(answer)
                            job.failed(answer, time.monotonic())
                        else:
                            job.replied(answer, sent_at)
                if not unanswered:
                    break
            if link.rest():
                for job, _ in calls:
                    job.due = min(job.due, sent_at)
        except Exception as error:
            self._fail([job for job, _ in unanswered], error, timeout)

    def _fail(self, jobs: Iterable[Job], error: Exception, timeout: float) -> None:
        if not isinstance(error, (*OUTAGE, ResponseError)):
            logger.error(UNEXPECTED, exc_info=error)
        self._link.drop()
        now = time.monotonic()
        self._resumes_at = real_time.monotonic() + timeout / 4
        for job in jobs:
            with isolated(job):
                job.server.on_error(error)
                job.failed(error, now)


def _packed(calls: Iterable[tuple[Job, Call]], by_source: bool) -> list[bytes]:
    """As bytes for the server: each script by its name, or the first of each with its source."""
    packed, known = [], set[str]()
    for _, call in calls:
        packed.append(pack(call, known=not by_source or call.script.sha in known))
        known.add(call.script.sha)
    return packed


class Keeper:
    """The jobs, and the threads that do them. All methods may be called from any thread and signal
    handler."""

    def __init__(self) -> None:
        self.mutex = Mutex()
        self._jobs: set[Job] = set()
        self._workers: dict[Server, Worker] = {}

    def add(self, job: Job) -> None:
        if sys.is_finalizing():
            return  # The threads stand still, one perhaps with the mutex.
        with self.mutex:
            self._jobs.add(job)
            self.worker(job.server).put(job)

    def worker(self, server: Server) -> Worker:
        """What does the jobs on ``server``; the caller has the mutex."""
        worker = self._workers.get(server)
        if worker is None:
            worker = self._workers[server] = Worker(self, server)
        return worker

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def discard(self, job: Job) -> None:
        # Perhaps another's: see ``use_keeper``. Without a worker, ``add`` was interrupted.
        keeper = self if job.worker is None else job.worker.keeper
        keeper._jobs.discard(job)

    def jobs(self) -> list[Job]:
        # Atomic, also in a Python without GIL: ``discard`` does not take the mutex.
        return list(self._jobs)

    def under_way(self) -> set[Job]:
        with self.mutex:
            return {job for worker in self._workers.values() for job in worker.under_way}

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def count(self) -> int:
        return len(self._jobs)

    def reschedule(self, job: Job, due: float) -> None:
        """Do ``job`` at ``due`` (monotonic seconds) instead of when it was planned."""
        if sys.is_finalizing():
            return
        with self.mutex:
            if job in self._jobs and job.worker is not None:
                job.worker.reschedule(job, due)

    def hurry(self) -> None:
        for job in self.jobs():
            self.reschedule(job, time.monotonic())

    def flush(self) -> None:
        """Wait for the jobs with ``flush_at_exit``, a second at most. So a command that is
        interrupted while it waits for a lock leaves the queue."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while any(job.flush_at_exit for job in self.jobs()) and time.monotonic() < deadline:
            time.sleep(0.002)

    def start(self, background: Any) -> None:
        """Start the thread of ``background``, which a test may leave out."""
        background.start()


_keeper = Keeper()


def keeper() -> Keeper:
    return _keeper


def release_later(
    server: Server, release: Call, lifetime: float | None = 0.0, late: bool = False
) -> None:
    """Have the keeper release what the caller cannot; see ``DeferredRelease``."""
    _keeper.add(DeferredRelease(server, release, lifetime, late))


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
