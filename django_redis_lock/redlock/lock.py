"""One lock over several independent servers, for threads and for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import time
from ..locking import AsyncLock, Lock, TaskWaiter, ThreadWaiter
from ..protocol import AcquireRequest, Acquisition, Call
from ..transport import Answer, arun, cancellable, server_of, wait_awake
from .base import Quorum
from .fan_out import ask, spared


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

    def _ask_servers(self, calls: Mapping[int, Call], patience: float) -> dict[int, Any]:
        return ask(self.servers, calls, patience)

    def _wait_at(self, place: int, request: AcquireRequest) -> Acquisition | None:
        return ThreadWaiter(self.redis[place], request).wait()

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _run(self, call: Call) -> Answer:
        sent_at = time.monotonic()
        answers = self._ask_servers(self._calls(call), self.server_timeout)
        return Answer(self._merge(call, answers, sent_at), sent_twice=False)


class AsyncRedlock(AsyncLock, Quorum):
    """``Redlock`` for asyncio, over clients of redis.asyncio."""

    async def _ask_servers(self, calls: Mapping[int, Call], patience: float) -> dict[int, Any]:
        return await cancellable(_ask(self.redis, calls, patience))

    async def _wait_at(self, place: int, request: AcquireRequest) -> Acquisition | None:
        return await TaskWaiter(self.redis[place], request).wait()

    async def _sleep(self, seconds: float) -> None:
        await time.asleep(seconds)

    async def _run(self, call: Call) -> Answer:
        sent_at = time.monotonic()
        answers = await self._ask_servers(self._calls(call), self.server_timeout)
        return Answer(self._merge(call, answers, sent_at), sent_twice=False)


async def _ask(
    clients: Sequence[Any], calls: Mapping[int, Call], patience: float
) -> dict[int, Any]:
    """``fan_out.ask`` for asyncio."""
    servers = [server_of(client) for client in clients]
    away = spared(servers, calls)
    asking = {
        place: asyncio.ensure_future(arun(clients[place], call, patience=patience))
        for place, call in calls.items()
        if place not in away
    }
    try:
        await wait_awake(asking.values(), patience)
    finally:
        for task in asking.values():
            task.cancel()
    if asking:
        await asyncio.wait(asking.values())
    answers = {place: _outcome(task, clients[place], patience) for place, task in asking.items()}
    return {**answers, **away}


def _outcome(task: asyncio.Task[Answer], client: Any, patience: float) -> Any:
    error: BaseException | None = RedisTimeoutError("Redis did not answer in time")
    if not task.cancelled():
        error = task.exception()
        if error is None:
            return task.result().value
    if isinstance(error, RedisTimeoutError):
        server_of(client).breaker.failed(error, patience, patience)
    return error
