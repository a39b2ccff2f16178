"""What executes the steps of flights in tasks of an event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, TypeVar

from redis.asyncio import Redis as AsyncRedis

from ..clock import time
from ..keeper import Job
from ..protocol import Call, Reply
from ..steps import Steps
from ..threads import InCaller, Work
from ..transport import in_background, is_observed, server_of
from ..transport.aio_client import aconnect, aexchange, arun_all
from ..transport.aio_connection import cancellable
from ..transport.server import value_with_lifetime
from . import runners
from .runners import Computation, ProducerFailed, arguments_of, reading, under_computation

R = TypeVar("R")


class AsyncRunner:
    """Executes the steps of a flight in the calling task.

    Args:
        client: redis.asyncio client of the primary.
        thread: stands for the thread that waits for the task; None if none does. It may be the one
            that a computation of this loop needs, so that must not be waited for.

    Attributes: as of ``ThreadRunner``.
    """

    new_event = asyncio.Event

    def __init__(self, client: Any, thread: object = None) -> None:
        self._client = client
        self.begun: list[Work] = []
        self.server = server_of(client)
        self.in_thread = thread is not None
        self._loop = asyncio.get_running_loop()
        self.group = thread if self.in_thread else self._loop

    @property
    def is_observed(self) -> bool:
        # In front of a cluster and behind sentinels, the client is one for threads.
        return isinstance(self._client, AsyncRedis) and is_observed(self._client)

    async def do(self, steps: Steps[R]) -> R:
        before = under_computation.set(under_computation.get())
        try:
            step = next(steps)
            while True:
                computes = type(step) is Computation
                try:
                    result = step.function() if computes else await step
                    while computes and inspect.isawaitable(result):
                        result = await result
                except BaseException as raised:
                    # GeneratorExit: the coroutine is closed, as its loop has ended.
                    failed = computes and not isinstance(raised, GeneratorExit)
                    step = steps.throw(ProducerFailed(raised) if failed else raised)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            value: R = end.value
            return value
        except ProducerFailed as failure:
            error = failure.error
        finally:
            with suppress(ValueError):  # The garbage collector closes it in another context.
                under_computation.reset(before)
            for left in self.begun:
                left()
        raise error

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(function, *args)

    # -- the steps, as those of ``ThreadRunner`` ---------------------------------------------

    async def run(self, *calls: Call) -> list[Reply]:
        return await arun_all(self._client, calls)

    async def exchange(self, command: bytes, replies: int) -> Reply:
        return await aexchange(self._client, command, replies)

    async def evalsha(self, call: Call) -> Reply:
        return await cancellable(self._client.evalsha(*arguments_of(call)))

    async def read(self, key: bytes) -> Reply:
        value = await aexchange(self._client, value_with_lifetime(key), 2)
        return None if value[0] is None else value

    async def wait_for_event(self, event: Any, until: float) -> bool:
        return bool(await _within(event.wait(), until))

    async def pause(self, seconds: float) -> None:
        await time.asleep(seconds)

    def has_room(self) -> bool:
        return True

    async def run_in_background(self, steps: Steps[object], left: Work, renewal: Job) -> bool:
        runner = copy(self)
        runner.begun = [left]
        refresh = in_background(runner.do(steps))
        self.begun.remove(left)
        if isinstance(runners.background, InCaller):
            await refresh
        return True

    async def read_streams(self, streams: Sequence[bytes], until: float) -> Reply:
        streams = self.server.in_one_call(streams)
        connection = await aconnect(self._client, streams, timeout=5.0)
        try:
            reply = await _within(connection.request(reading(streams, until)), until)
        finally:
            connection.disconnect()
        if reply is not None:
            (self.server.seen_at(streams) or self.server).answered()
        return reply


async def _within(work: Awaitable[R], until: float) -> R | None:
    """The result of ``work``; None if it is not done by ``until`` (monotonic seconds)."""
    task = asyncio.ensure_future(work)
    try:
        await time.wait({task}, max(0.0, until - time.monotonic()))
        return task.result() if task.done() else None
    finally:
        task.cancel()
