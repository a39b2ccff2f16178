"""One lock over several independent servers, for threads and for asyncio.

Each server is asked in a thread, or by a task, of its own, as a plain lock asks its server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...clock import real_time, time
from ...locking import AsyncLock, Lock
from ...protocol import Call, Reply
from ...protocol.lock_scripts import RELEASE
from ...threads import ThreadEvent, ThreadPool
from ...transport import Answer, Client, Server, run, server_of
from ...transport.aio_client import arun
from ...transport.aio_tasks import wait_awake
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

    def _ask_servers(self, calls: Mapping[int, Call], seconds: float) -> dict[int, Reply]:
        return ask(self.redis, calls, seconds)

    def _run(self, call: Call, until: float | None = None) -> Answer:
        sent = time.monotonic(), self._ask_servers(self._calls(call), self.server_timeout)
        return self._merge(call, *sent)


class AsyncRedlock(AsyncLock, Quorum):
    """``Redlock`` for asyncio, over clients of redis.asyncio."""

    async def _ask_servers(self, calls: Mapping[int, Call], seconds: float) -> dict[int, Reply]:
        return await _aask(self.redis, calls, seconds)

    async def _run(self, call: Call, until: float | None = None) -> Answer:
        sent = time.monotonic(), self._ask_servers(self._calls(call), self.server_timeout)
        return self._merge(call, sent[0], await sent[1])


async def _aask(
    clients: Sequence[Client], calls: Mapping[int, Call], seconds: float
) -> dict[int, Reply]:
    servers, until = [server_of(client) for client in clients], time.monotonic() + seconds
    away = spared(servers, calls)
    asking = {
        place: asyncio.ensure_future(arun(clients[place], call, until=until))
        for place, call in calls.items()
        if place not in away
    }
    try:
        await wait_awake(asking.values(), seconds)
    finally:
        for task in asking.values():
            task.cancel()
    if asking:
        await asyncio.wait(asking.values())
    came = {p: _outcome(task, clients[p], calls[p], seconds) for p, task in asking.items()}
    return away | came


def _outcome(task: asyncio.Task[Answer], client: Client, call: Call, seconds: float) -> object:
    if not task.cancelled():  # ``arun`` has told the breaker.
        return task.exception() or _value(call, task.result())
    return _late(client, seconds)


def _late(client: Client, seconds: float) -> Exception:
    error = RedisTimeoutError("Redis did not answer in time")
    server_of(client).breaker.failed(error, seconds, seconds)
    return error


def _value(call: Call, answer: Answer) -> Reply:
    """What it means: a release that was sent twice may find that the first has run."""
    released = call.script is RELEASE and not isinstance(answer.value, Exception)
    return RELEASED_TWICE if released and answer.sent_twice else answer.value


#: A server that hangs keeps a thread as long as its caller waits.
_asking = ThreadPool("django_redis_lock redlock", 64, 1024, idle_seconds=1.0)
#: Of the time to wait. A standstill of this process counts as one part.
PARTS = 10


def ask(clients: Sequence[Client], calls: Mapping[int, Call], seconds: float) -> dict[int, Reply]:
    """The replies to ``calls``, or their errors, by place, which come within so many ``seconds`` in
    all. If the process is stopped, replies may arrive, so that counts for a tenth at most."""
    servers = [server_of(client) for client in clients]
    away = spared(servers, calls)
    outcomes: dict[int, Reply] = {}
    came = ThreadEvent()
    given_up = False

    def one(place: int) -> None:
        outcome: Reply = None
        try:
            if not given_up:
                call, until = calls[place], time.monotonic() + seconds
                outcome = _value(call, run(clients[place], call, until=until))
        except Exception as error:
            outcome = error
        outcomes[place] = outcome
        came.set()

    asked = [place for place in calls if place not in away]
    left, part = seconds, seconds / PARTS
    try:
        for place in asked:
            if not _asking.submit(partial(one, place)):
                one(place)  # There are too many threads.
        while left > 0:
            came = ThreadEvent()
            if len(outcomes) == len(asked):
                break
            began = real_time.monotonic()
            came.wait(min(left, part))
            left -= min(real_time.monotonic() - began, part)
    finally:
        given_up = True
    came_in_time = outcomes.copy()
    late = {p: _late(clients[p], seconds) for p in asked if p not in came_in_time}
    return away | late | came_in_time


def spared(servers: Sequence[Server], calls: Mapping[int, Call]) -> dict[int, Reply]:
    """A minority of servers that get no request because their circuit breaker is open: by place,
    with its error. The keeper releases a lock there."""
    away: dict[int, Reply] = {}
    held_back = [place for place in calls if servers[place].breaker.held_back]
    if 2 * len(held_back) >= len(servers):
        return away
    for place in held_back:
        try:
            servers[place].breaker.admit(None)
        except RedisError as error:
            away[place] = error
    return away
