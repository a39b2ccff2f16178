"""One lock over several independent servers, for threads and for asyncio.

All requests are sent before any reply is read. Where there is no idle connection to a server, a
thread connects and sends, because connecting may take long. A connection that was used before and
is silent for half of the time may have been forgotten: the request is sent on a new one, too, and
then its reply counts.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...clock import real_time, time
from ...locking import AsyncLock, Lock
from ...protocol import Call, Reply
from ...protocol.lock_scripts import RELEASE
from ...threads import ThreadEvent, start
from ...transport import (
    Answer,
    Client,
    RawConnection,
    Server,
    may_have_run,
    note_sent,
    pack,
    readable,
    server_of,
)
from ...transport.address import probe_seconds
from ...transport.aio_client import arun, has_idle_connection
from ...transport.aio_tasks import wait_awake
from ...transport.execute import admitted
from ...transport.refusals import is_misdirected, redis_errors
from .base import RELEASED_TWICE, Quorum

__all__ = ["AsyncRedlock", "Redlock"]


class Redlock(Lock, Quorum):
    """A lock held on a majority of several independent servers, with the methods of ``Lock`` and
    the arguments of ``Quorum``::

        servers = [redis.Redis(host) for host in ("lock1", "lock2", "lock3")]
        with Redlock(servers, "import", timeout=30, renew=True, blocking_timeout=10) as lock:
            import_prices(fence=lock.fence)

    A minority of servers that are down or hang delays a call by ``server_timeout`` at most, and not
    at all once the circuit breaker knows. ``TooFewServers`` means that no majority can be reached,
    not that the lock is taken. A timeline, with three servers and ``timeout=30``:

    ====  =======================================================================================
    0 s   A acquires on all three; B waits, in the queue of the first.
    5 s   The first server dies. B waits on at the second; A holds two of three.
    9 s   A releases, and B has the second and the third.
    12 s  The second server dies: B holds one of three, and loses the lock 30 s after the last
          renewal that two servers confirmed. ``on_lost`` is called shortly before that.
    ====  =======================================================================================

    Raises:
        TooFewServers: from every method that sends requests to the servers.
    """

    def _ask_servers(self, calls: Mapping[int, Call], patience: float) -> dict[int, Reply]:
        return ask(self._servers, calls, patience)

    def _run(self, call: Call) -> Answer:
        sent = time.monotonic(), self._ask_servers(self._calls(call), self.server_timeout)
        return self._merge(call, *sent)


class AsyncRedlock(AsyncLock, Quorum):
    """``Redlock`` for asyncio, over clients of redis.asyncio."""

    async def _ask_servers(self, calls: Mapping[int, Call], patience: float) -> dict[int, Reply]:
        return await _aask(self.redis, calls, patience)

    async def _run(self, call: Call) -> Answer:
        sent = time.monotonic(), self._ask_servers(self._calls(call), self.server_timeout)
        return self._merge(call, sent[0], await sent[1])


async def _aask(
    clients: Sequence[Client], calls: Mapping[int, Call], patience: float
) -> dict[int, Reply]:
    servers = [server_of(client) for client in clients]
    away = spared(servers, calls)
    asking = {
        place: asyncio.ensure_future(arun(clients[place], call, patience=patience))
        for place, call in calls.items()
        if place not in away
    }
    idle = any(has_idle_connection(servers[place]) for place in asking)
    try:
        await wait_awake(asking.values(), patience + (probe_seconds(patience) if idle else 0.0))
    finally:
        for task in asking.values():
            task.cancel()
    if asking:
        await asyncio.wait(asking.values())
    came = {p: _outcome(task, clients[p], calls[p], patience) for p, task in asking.items()}
    return away | came


def _outcome(task: asyncio.Task[Answer], client: Client, call: Call, patience: float) -> object:
    if not task.cancelled():  # ``arun`` has told the breaker.
        return task.exception() or _value(call, task.result())
    error = RedisTimeoutError("Redis did not answer in time")
    server_of(client).breaker.failed(error, patience, patience)
    return error


def _value(call: Call, answer: Answer) -> Reply:
    """What it means: a release that was sent twice may find that the first has run."""
    released = call.script is RELEASE and not isinstance(answer.value, Exception)
    return RELEASED_TWICE if released and answer.sent_twice else answer.value


#: Of the time to wait. A standstill of this process counts as one part.
PARTS = 10


def ask(servers: Sequence[Server], calls: Mapping[int, Call], patience: float) -> dict[int, Reply]:
    """The replies to ``calls``, or their errors, by place, which come within ``patience`` seconds
    in all. If the process is stopped, replies may arrive, so that counts for a tenth at most."""
    asking = _FanOut(servers, calls, patience)
    asking.answers.update(spared(servers, calls))
    try:
        for place in calls:
            if place not in asking.answers:
                asking.send(place)
        asking.collect(patience)
    finally:
        asking.close()
    for place, answer in asking.answers.items():
        if isinstance(answer, RedisTimeoutError):
            servers[place].breaker.failed(answer, patience, patience)
        elif not isinstance(answer, Exception):
            servers[place].answered()
    return asking.answers


def spared(servers: Sequence[Server], calls: Mapping[int, Call]) -> dict[int, Reply]:
    """A minority of servers that get no request because their circuit breaker is open: by place,
    with its error. The keeper releases a lock there."""
    away: dict[int, Reply] = {}
    held_back = [place for place in calls if servers[place].breaker.held_back]
    if 2 * len(held_back) >= len(servers):
        return away
    for place in held_back:
        try:
            admitted(servers[place].breaker, None)
        except RedisError as error:
            away[place] = error
    return away


class _Connecting:
    """A request that waits for a connection, which another thread makes, and its reply or error.
    Without a mutex: an exception from a signal handler would leave one taken."""

    outcome: Reply = None

    def __init__(self) -> None:
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        """Whether the caller comes first: the one who sends the request, or who gives it up."""
        return self._claimed.acquire(blocking=False)


def _receive(connection: RawConnection, call: Call) -> Reply:
    """The reply to ``call``; the script is sent to a server that does not know it."""
    try:
        return connection.read_response()
    except NoScriptError:
        connection.send_packed_command([pack(call, known=False)])
        return connection.read_response()


class _FanOut:
    def __init__(
        self, servers: Sequence[Server], calls: Mapping[int, Call], patience: float
    ) -> None:
        self._servers = servers
        self._patience = patience
        self._calls = calls
        self._connections: dict[int, RawConnection] = {}
        self._connecting: dict[int, _Connecting] = {}
        self._came = ThreadEvent()
        #: Where the call is sent again, because its connection has broken, or is silent and was
        #: used before.
        self._again: set[int] = set()
        #: Seconds for which idle connections are checked first, which their servers' time does not
        #: pay for.
        self._checking = 0.0
        self.answers: dict[int, Reply] = {}

    def send(self, place: int) -> None:
        server, call = self._servers[place], self._calls[place]
        if server.breaker.failing:
            try:
                admitted(server.breaker, None, call)
            except RedisError as error:
                self.answers[place] = error
                return
        while (connection := server.checkout_idle()) is not None:
            try:
                connection.send_packed_command([pack(call)])
            except redis_errors():
                connection.disconnect()  # The server has closed it; try the next.
            else:
                self._connections[place] = connection
                return
        self._send_on_new(place)

    def _send_on_new(self, place: int) -> None:
        """Send on a checked or new connection, in a thread."""
        if not self._servers[place].must_connect():
            self._checking = probe_seconds(self._patience)
        attempt = self._connecting[place] = _Connecting()
        name = "django_redis_lock connect"
        connect = threading.Thread(target=self._ask, args=(place, attempt), name=name, daemon=True)
        start(connect, partial(self._finish, attempt))

    def _ask(self, place: int, attempt: _Connecting) -> None:
        """Check an idle connection or connect, then send the call unless the caller has stopped
        waiting."""
        server, call = self._servers[place], self._calls[place]
        try:
            connection = server.checkout(self._patience)
        except Exception as error:
            note_sent(error, False)
            self._finish(attempt, error)
            return
        if not attempt.claim():
            server.checkin(connection)  # For the next call.
            return
        try:
            connection.send_packed_command([pack(call)])
            answer = _receive(connection, call)
        except Exception as error:
            connection.disconnect()
            answer = error
        else:
            server.checkin(connection)
        self._finish(attempt, answer)

    def _finish(self, attempt: _Connecting, outcome: Reply) -> None:
        if isinstance(outcome, RuntimeError):  # There are too many threads.
            outcome = RedisConnectionError(f"Could not connect in another thread: {outcome}")
            note_sent(outcome, False)
        attempt.outcome = (outcome,)
        self._came.set()

    def collect(self, patience: float) -> None:
        left, part = patience + self._checking, patience / PARTS
        doubted_at = left - patience / 2
        while self._connections or self._connecting:
            if left <= doubted_at:
                self._send_again()
            began = real_time.monotonic()
            came = self._came = ThreadEvent()
            self._take_outcomes()
            if self._connections:
                waiting = {connection: p for p, connection in self._connections.items()}
                for connection in readable(list(waiting), min(left, part)):
                    self._read(waiting[connection], connection)
            elif self._connecting:
                came.wait(min(left, part))
            self._take_outcomes()
            if not left:
                break
            left = max(0.0, left - min(real_time.monotonic() - began, part))
        for place in (*self._connections, *self._connecting):
            error = self.answers[place] = RedisTimeoutError("Redis did not answer in time")
            unsent = place in self._connecting and self._connecting[place].claim()
            if unsent and place not in self._again:
                note_sent(error, False)

    def _send_again(self) -> None:
        """Send on new connections, too, where one is silent."""
        for place in self._connections.keys() - self._again:
            breaker = self._servers[place].breaker
            if breaker.first_patience(self._patience, math.inf) < self._patience:
                self._again.add(place)
                self._replace_connection(place)

    def _read(self, place: int, connection: RawConnection) -> None:
        try:
            self.answers[place] = connection.read_response()
        except NoScriptError:
            connection.send_packed_command([pack(self._calls[place], known=False)])
            return
        except ResponseError as error:
            if is_misdirected(error):
                self._connections.pop(place).disconnect()
                if self._servers[place].renew(connection):
                    self._send_on_new(place)
                    return
            self.answers[place] = error
        except redis_errors() as error:  # Its end is not that of the server.
            self._connections.pop(place).disconnect()
            if may_have_run(error):
                self._again.add(place)
            self._replace_connection(place)
            return
        if place in self._connections:
            self._servers[place].checkin(self._connections.pop(place))
        if place in self._connecting:  # The later request counts, unless it was not sent.
            if self._connecting[place].claim():
                del self._connecting[place]
            else:
                del self.answers[place]

    def _replace_connection(self, place: int) -> None:
        self._servers[place].close()  # The idle ones may have broken or been forgotten, too.
        self._send_on_new(place)

    def _take_outcomes(self) -> None:
        for place, attempt in self._connecting.copy().items():
            if attempt.outcome is not None:
                del self._connecting[place]
                [outcome] = attempt.outcome
                broken = isinstance(outcome, RedisConnectionError) and may_have_run(outcome)
                if broken and place not in self._again:
                    self._again.add(place)
                    self._replace_connection(place)
                    continue
                if isinstance(outcome, Exception) and not may_have_run(outcome):
                    if place in self._connections:
                        continue  # The first request may still be answered.
                elif place in self._connections:
                    self._connections.pop(place).disconnect()
                answer = Answer(outcome, sent_twice=place in self._again)
                self.answers[place] = _value(self._calls[place], answer)

    def close(self) -> None:
        """A connection on which a reply may still arrive cannot be used again."""
        for attempt in self._connecting.values():
            attempt.claim()
        for connection in self._connections.values():
            connection.disconnect()
