"""The keeper's calls to the servers: which goes first, on which connection, and how long their
replies may take. A server that hangs or is away delays the calls to no other."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic as awake
from typing import TYPE_CHECKING, TypeVar, cast

from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import real_time, time
from ..protocol import Call, Reply
from ..threads import ThreadPool, get_logger
from ..transport import RawConnection, Server, pack, readable
from ..transport.address import probe_seconds
from ..transport.interrupts import is_name
from ..transport.refusals import OUTAGE, is_misdirected
from . import listeners, over_a_loop

if TYPE_CHECKING:
    from . import Job

logger = get_logger("django_redis_lock.keeper")

#: The longest and shortest time that the keeper waits for a server's next reply. In between it
#: waits a sixth of the shortest lifetime that it renews.
REPLY_TIMEOUT_SECONDS, MIN_REPLY_TIMEOUT_SECONDS = 1.0, 0.05
#: Seconds for which an idle connection is used without a check: a bit longer than from one look at
#: a lock, for which others wait, to the next.
TRUSTED_SECONDS = 2.2
#: So many calls are sent to a server before its replies are read.
BATCH = 256
UNEXPECTED = "Unexpected error in the keeper thread; it continues"


T = TypeVar("T")

#: For what has no time-out of ours: the system's resolver of names. And each of the addresses that
#: a name has gets a whole one.
_resolving = ThreadPool("django_redis_lock resolver", 8, 64, idle_seconds=1.0)


class Resolving:
    """Work, one at a time, that may take longer than the keeper can wait."""

    def __init__(self) -> None:
        self._under_way: futures.Future[object] | None = None

    def result(self, work: Callable[[], T], seconds: float) -> T:
        """What ``work`` returns, or that of a former call, which has ended by now. Raises
        redis-py's TimeoutError after so many ``seconds``; as long as it goes on, at once."""
        result, wait = self._under_way, 0.0
        if result is None:
            result, wait = futures.Future(), seconds
            if not _resolving.submit(partial(_fulfil, result, work)):
                return work()
        self._under_way = result
        if not futures.wait((result,), wait).done:
            raise RedisTimeoutError(f"connecting takes longer than {seconds:.2f} s")
        self._under_way = None
        return cast(T, result.result())


def _fulfil(result: futures.Future[object], work: Callable[[], object]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)


@contextmanager
def isolated(job: Job) -> Iterator[None]:
    """An unexpected error of ``job`` must not affect other jobs."""
    try:
        yield
    except BaseException:
        logger.exception(UNEXPECTED)
        job.due = time.monotonic() + REPLY_TIMEOUT_SECONDS


class Link:
    """One server: the jobs that wait for it, those whose calls it has been sent, and the connection
    for that."""

    #: When the calls were sent, and, in real monotonic time, since when the connection is idle.
    sent_at = _idle_since = -math.inf

    def __init__(self, server: Server) -> None:
        self.server = server
        #: A heap, the most urgent first; and those whose call is known already.
        self.waiting: list[tuple[float, int, Job]] = []
        self.called: deque[tuple[Job, Call]] = deque()
        self.unanswered: deque[Job] = deque()
        #: Whether the reply to come is one to PING; and whether one to a call came from a replica.
        self.checking = self.misdirected = False
        #: On a clock that stands still with the process's host: when the last reply came, or the
        #: calls were sent, and from when on more may be sent.
        self.heard_at = self.resumes_at = -math.inf
        self._connection: RawConnection | None = None
        self._connecting = Resolving()
        #: None if the connection is the keeper's own.
        self._give_back: Callable[[RawConnection], object] | None = None

    @property
    def connection(self) -> RawConnection:
        assert self._connection is not None
        return self._connection

    @property
    def has_asked(self) -> bool:
        return self.checking or bool(self.unanswered)

    @property
    def has_unsent(self) -> bool:
        return bool(self.waiting or self.called)

    @property
    def pause(self) -> float:
        """The seconds until more can be sent, ``inf`` if nothing is to be sent."""
        if self.has_asked or not self.has_unsent:
            return math.inf
        return max(0.0, self.resumes_at - awake())

    def next(self) -> tuple[Job, Call | None]:
        """The job whose call is to be sent next."""
        return self.called.popleft() if self.called else (heapq.heappop(self.waiting)[2], None)

    def check(self) -> None:
        """Choose an idle connection of the process, if there is one, because the server may allow
        no other. ``checking`` it begins if it was idle for long."""
        if self._connection is not None and self.connection.generation != self.server.generation:
            self.drop()
        if self._connection is None and self.server not in listeners:
            self._borrow()
        if self._connection is not None and self._was_idle():
            self.checking, self.heard_at = self._ping(), awake()
            if not self.checking:
                self.drop()

    def _was_idle(self) -> bool:
        return real_time.monotonic() - self._idle_since > TRUSTED_SECONDS

    def _ping(self) -> bool:
        try:
            if self.connection.can_read(0):  # Nothing but its end.
                return False
            self.connection.send_command("PING")
        except (RedisError, OSError):
            return False
        return True

    def end_check(self, silent: bool) -> None:
        """The reply has come, unless the connection is ``silent``."""
        self.checking = False
        try:
            if not silent:
                self.connection.read_response()
        except ResponseError:
            pass  # This user may not, or the server is busy: it answers.
        except (RedisError, OSError):
            silent = True
        if silent:
            self.drop()
        self._idle_since = real_time.monotonic()

    def send(self, packed: list[bytes], timeout: float) -> None:
        """Send ``packed``. Where the server reports changes, on the keeper's own connection, if it
        can be opened: the server has to know it."""
        server = self.server
        if self._connection is None:
            try:
                # In RESP2 nothing comes but replies.
                connect = partial(server.connect, timeout=timeout, protocol=2)
                named = _has_name(server)
                self._connection = self._connecting.result(connect, timeout) if named else connect()
            except (RedisError, OSError):
                if not self._borrow(of_a_loop=True):
                    raise
        if self._give_back is None and (listener := listeners.get(server)) is not None:
            listener.track(self.connection)
        self.sent_at, self.heard_at = time.monotonic(), awake()
        self.connection.send_packed_command(packed)

    def _borrow(self, of_a_loop: bool = False) -> bool:
        if (idle := self.server.checkout_unchecked()) is not None:
            self._connection, self._idle_since = idle
            self._give_back = self.server.checkin
        elif of_a_loop and (spare := over_a_loop.spare_of_a_loop(self.server)) is not None:
            self._connection, self._give_back = spare, _leave
        return self._connection is not None

    def rest(self) -> None:
        """All has been answered: give a borrowed connection back."""
        connection, self._idle_since = self.connection, real_time.monotonic()
        if self.misdirected:
            self.drop()
            self.server.renew(connection)
        elif self._give_back is not None:
            self._give_back(connection)
            self._connection = self._give_back = None
        self.server.answered()

    def drop(self) -> None:
        """Close the connection."""
        if self._give_back is not None:
            self.server.close()  # The other idle ones may have broken for the same reason.
        if self._connection is not None:
            self._connection.disconnect()
        self._connection = self._give_back = None
        self.checking = self.misdirected = False


def _has_name(server: Server) -> bool:
    host = server.address.connection_kwargs.get("host") or "localhost"
    return host != "localhost" and bool(is_name(host))


def _leave(connection: RawConnection) -> None:
    """The loop has it all the time."""


class Exchanges:
    """What is to be sent to each server, and which replies are to come. For the keeper's thread
    only."""

    _timeout = REPLY_TIMEOUT_SECONDS

    def __init__(self) -> None:
        self._links: dict[Server, Link] = {}
        self._locating: defaultdict[Server, Resolving] = defaultdict(Resolving)
        self._sequence = itertools.count()
        self._done: list[Job] = []

    def begin(self, jobs: Iterable[Job], shortest: float) -> None:
        """Do ``jobs``. ``shortest``: the seconds that the shortest lifetime lasts."""
        longest = min(REPLY_TIMEOUT_SECONDS, shortest / 6)
        self._timeout = max(longest, MIN_REPLY_TIMEOUT_SECONDS)
        for job in jobs:
            if job.server.is_topology:
                self._locate(job)
            else:
                waiting = self._link(job.server).waiting
                heapq.heappush(waiting, (job.ends_at(), next(self._sequence), job))

    def _locate(self, job: Job) -> None:
        with isolated(job):
            call = job.call(time.monotonic())
            try:
                if call is not None:
                    locate = partial(job.server.locate, call.keys, self._timeout)
                    if job.server.must_discover():
                        self._locating[job.server].result(locate, self._timeout)
                    node = locate()
                    self._link(node).called.append((job, call))
                    return
            except OUTAGE as error:
                job.failed(error, time.monotonic())
        self._done.append(job)

    def _link(self, server: Server) -> Link:
        link = self._links.get(server)
        if link is None:
            for old, unused in list(self._links.items()):
                if old.retired and not (unused.has_asked or unused.has_unsent):
                    self._links.pop(old).drop()
            link = self._links[server] = Link(server)
        return link

    @property
    def pause(self) -> float:
        """The seconds until there is something to be sent or read; ``inf`` for never."""
        links = self._links.values()
        if self._done or any(link.has_asked for link in links):
            return 0.0
        return min((link.pause for link in links), default=math.inf)

    def turn(self, until: float) -> list[Job]:
        """Send what can be sent, wait for replies until a monotonic time at the latest, and read
        what has come. Returns the jobs that are done."""
        links = list(self._links.values())
        for link in links:
            if not link.pause:
                self._check(link)
        waiting = {link.connection: link for link in links if link.has_asked}
        ends = [self._expires_at(link) - awake() for link in waiting.values()]
        left = min(until - time.monotonic(), *ends, *(link.pause for link in links), math.inf)
        for connection in readable(list(waiting), 0.0 if self._done else max(0.0, left)):
            self._receive(waiting.pop(connection))
        for link in waiting.values():
            if awake() < self._expires_at(link):
                continue
            if link.checking:
                self._end_check(link, silent=True)
            else:
                timeout = f"no answer within {self._timeout:.2f} s"
                self._fail(link, RedisTimeoutError(timeout))
        done, self._done = self._done, []
        return done

    def _expires_at(self, link: Link) -> float:
        limit = probe_seconds(self._timeout) if link.checking else self._timeout
        return link.heard_at + limit

    def _end_check(self, link: Link, silent: bool = False) -> None:
        link.end_check(silent)
        self._send(link)

    def _check(self, link: Link) -> None:
        link.check()
        if not link.checking:
            self._send(link)

    def _send(self, link: Link) -> None:
        packed: list[bytes] = []
        known: set[str] = set()
        while len(packed) < BATCH and (link.called or link.waiting):
            job, call = link.next()
            with isolated(job):
                call = call or job.call(time.monotonic())
                if call is not None:
                    # The first of each script with the source: an EVALSHA of an unknown one would
                    # need a second request.
                    packed.append(pack(call, known=call.script.sha in known))
                    known.add(call.script.sha)
                    link.unanswered.append(job)
                    continue
            self._done.append(job)
        if packed:
            try:
                link.send(packed, self._timeout)
            except Exception as error:
                self._fail(link, error)

    def _receive(self, link: Link) -> None:
        if link.checking:
            self._end_check(link)
            return
        try:
            while link.unanswered and link.connection.can_read(0):
                answer: Reply = None
                try:
                    answer = link.connection.read_response()
                except ResponseError as error:
                    answer = error
                link.heard_at = awake()
                job = link.unanswered.popleft()
                with isolated(job):
                    if isinstance(answer, ResponseError):
                        link.misdirected = link.misdirected or is_misdirected(answer)
                        job.server.on_error(answer)
                        job.failed(answer, time.monotonic())
                    else:
                        job.answered(answer, link.sent_at)
                self._done.append(job)
            if not link.unanswered:
                link.rest()
        except Exception as error:
            self._fail(link, error)

    def _fail(self, link: Link, error: Exception) -> None:
        """What has not been sent waits for the next attempt."""
        if not isinstance(error, (*OUTAGE, ResponseError)):
            logger.error(UNEXPECTED, exc_info=error)
        link.drop()
        now = time.monotonic()
        link.resumes_at = awake() + self._timeout / 4
        failed = [*link.unanswered, *(job for job, _ in link.called)]
        link.unanswered.clear()
        link.called.clear()
        for job in failed:
            with isolated(job):
                job.server.on_error(error)
                job.failed(error, now)
        self._done += failed

    def close(self) -> None:
        """Forget everything, and close the keeper's own connections."""
        for link in self._links.values():
            with suppress(Exception):
                link.drop()
        self._links.clear()
        self._locating.clear()
        self._done.clear()

    def end(self) -> None:
        """The keeper's thread ends: close idle connections to its servers, too."""
        servers = list(self._links)
        self.close()
        for server in servers:
            server.close(but=1)
