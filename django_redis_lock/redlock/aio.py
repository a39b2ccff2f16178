"""One lock over several independent servers, for asyncio: ``lock`` with ``await``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import TimeoutError as RedisTimeoutError

from ..locking import AsyncLock, TaskWaiter
from ..protocol import AcquireRequest, Acquisition, Call
from ..transport import Answer, adrive, arun, cancellable, server_of, wait_awake
from .base import Ask, Queue, Quorum, Step
from .fan_out import spared

__all__ = ["AsyncRedlock"]


class AsyncRedlock(AsyncLock, Quorum):
    """``Redlock`` for asyncio, over clients of redis.asyncio."""

    async def _acquire(self, request: AcquireRequest, wait: float | None) -> Acquisition | None:
        granted: Acquisition | None = await adrive(self._elect(request, wait), self._do)
        return granted

    async def reset(self) -> bool:
        return bool(await adrive(self._reset(), self._do))

    async def _do(self, step: Step) -> Any:
        if isinstance(step, Ask):
            return await cancellable(_ask(self.redis, step.calls, step.patience))
        if isinstance(step, Queue):
            return await TaskWaiter(self.redis[step.place], step.request).wait()
        return await asyncio.sleep(step.seconds)

    async def _run(self, call: Call) -> Answer:
        sent_at = time.monotonic()
        calls = self._calls(call)
        answers = await cancellable(_ask(self.redis, calls, self.server_timeout))
        return Answer(self._merge(call, answers, sent_at), sent_twice=False)


async def _ask(
    clients: Sequence[Any], calls: Mapping[int, Call], patience: float
) -> dict[int, Any]:
    """As ``fan_out.ask``."""
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
