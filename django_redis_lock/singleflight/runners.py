"""The steps that the generators of this package yield, and what executes them: in threads, and in
tasks of an event loop."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from ..clock import time
from ..forks import after_fork
from ..keeper import Job, keeper
from ..locking import in_background
from ..notices import ThreadPool
from ..protocol import Call, new_token
from ..transport import (
    Server,
    aconnect,
    adrive,
    arun,
    arun_all,
    cancellable,
    drive,
    is_outage,
    is_pool_exhausted,
    pack_words,
    run_all,
    server_of,
)

#: The longest message of a failed computation that other callers get.
MAX_MESSAGE_CHARACTERS = 500
#: Seconds a follower pauses after its connection broke.
RETRY_PAUSE_SECONDS = 0.05

#: Refreshes stale values. Its threads end after five idle seconds.
background = ThreadPool("django_redis_lock", threads=4, max_waiting=64, idle_seconds=5.0)


class Run(NamedTuple):
    """Run scripts, in one round trip; sends their replies. With ``done`` also if the task is
    cancelled."""

    calls: tuple[Call, ...]
    done: bool = False


class Compute(NamedTuple):
    """Call a function, and await it if it is awaitable; sends what it returns."""

    function: Callable[[], Any]


class WaitForLeader(NamedTuple):
    """Wait until one of the flights with these streams has ended, or until a monotonic time."""

    streams: tuple[bytes, ...]
    until: float


class WaitForEvent(NamedTuple):
    """Wait for an event of this process, or until a monotonic time; sends whether it came."""

    event: Any
    until: float


class Pause(NamedTuple):
    """Do nothing for so many seconds."""

    seconds: float


class RunInBackground(NamedTuple):
    """Execute these steps in the background; sends whether the queue had room. Until they begin,
    the keeper does ``renewal``; they end it."""

    steps: Generator[Any, Any, Any]
    renewal: Job


Step = Run | Compute | WaitForLeader | WaitForEvent | Pause | RunInBackground
Steps = Generator[Step, Any, Any]


class ProducerFailed(Exception):
    """The function of a ``Compute`` raised ``error``, which the runner raises to the caller. (Not
    every exception can pass through a generator: it handles GeneratorExit and StopIteration.)"""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error

    def describe(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"[:MAX_MESSAGE_CHARACTERS]


#: What this thread or task is computing.
_computing: ContextVar[tuple[set[tuple[Server, bytes]], ...]] = ContextVar("computing", default=())


class Overtaken(Exception):
    """The call had not begun, and another thread computes the value instead."""


class DeferredCall:
    """A function that runs in another thread: Django's thread for synchronous code. If that thread
    itself waits for the value, the function would never begin. So a thread that would wait for a
    function that has not begun may ``overtake`` it, and computes the value instead.

    Args:
        defer: turns a function into an awaitable one that runs in that thread.
    """

    def __init__(self, function: Callable[..., Any], defer: Callable[..., Any]) -> None:
        self._function = function
        self._defer = defer
        self._mutex = threading.Lock()
        self._begun = self._overtaken = False

    def __call__(self, *args: Any) -> Any:
        return self._defer(self._begin)(*args)

    def _begin(self, *args: Any) -> Any:
        with self._mutex:
            if self._overtaken:
                self._overtaken = False
                raise Overtaken
            self._begun = True
        return self._function(*args)

    def overtake(self) -> bool:
        """Whether the function has not begun. Then it never will, and its caller follows."""
        with self._mutex:
            self._overtaken = not self._begun
            return self._overtaken


#: Deferred calls of this process by the tokens of their flights.
_deferred: weakref.WeakValueDictionary[bytes, DeferredCall] = weakref.WeakValueDictionary()


def token_for(compute: Callable[..., Any]) -> bytes:
    """A token for the flight of a value that ``compute`` returns."""
    token = new_token()
    if isinstance(compute, DeferredCall):
        _deferred[token] = compute
    return token


def overtake(leader: bytes) -> bool:
    """Overtake the deferred call of the flight with the token ``leader``, if this process has it;
    returns whether that succeeded."""
    call = _deferred.get(leader)
    return call is not None and call.overtake()


def being_computed() -> set[tuple[Server, bytes]]:
    """The keys that this thread or task is computing, or the one that started it."""
    return set().union(*_computing.get())


@contextmanager
def computing(server: Server, keys: Iterable[bytes]) -> Iterator[None]:
    """In this block, ``being_computed`` contains ``keys``."""
    here = {(server, key) for key in keys}
    mark = _computing.set((*_computing.get(), here))
    try:
        yield
    finally:
        here.clear()  # A task started in this block may outlive it, with a copy of the context.
        with suppress(ValueError):  # The garbage collector closes the generator in another context.
            _computing.reset(mark)


after_fork(_deferred.clear)


class ThreadRunner:
    """Executes the steps of a flight in the calling thread.

    Args:
        client: redis-py client of the primary.
        afterwards: called in the background thread after a refresh.
    """

    #: Makes what other callers of this process wait for.
    new_event = threading.Event
    #: Stands for the callers that wait for each other in memory, such as the tasks of an event
    #: loop; None for threads.
    group: Any = None
    #: Whether a thread waits for the caller: it is the caller, or has asyncio run it.
    in_thread = True

    def __init__(self, client: Any, afterwards: Callable[[], Any] = lambda: None) -> None:
        self._client = client
        self._pid = os.getpid()
        self._afterwards = afterwards
        self.server = server_of(client)

    def do(self, steps: Steps) -> Any:
        """Execute ``steps``; returns their result."""
        try:
            return drive(steps, self._do)
        except ProducerFailed as failed:
            error = failed.error
        raise error

    def _do(self, step: Step) -> Any:
        if isinstance(step, Run):
            if os.getpid() != self._pid:
                raise RedisConnectionError("A forked child leaves the flight to its parent")
            return run_all(self._client, step.calls)
        if isinstance(step, Compute):
            try:
                return step.function()
            except BaseException as error:
                raise ProducerFailed(error) from error
        if isinstance(step, WaitForEvent):
            return step.event.wait(max(0.0, step.until - time.monotonic()))
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        if isinstance(step, RunInBackground):
            return self._run_in_background(step)
        return self._wait_for_leader(step)

    def _run_in_background(self, step: RunInBackground) -> bool:
        keeper().add(step.renewal)
        accepted = False
        try:
            accepted = background.submit(partial(self.do, step.steps), self._afterwards)
        finally:
            if not accepted:
                keeper().discard(step.renewal)
        return accepted

    def _wait_for_leader(self, step: WaitForLeader) -> None:
        streams = self.server.in_one_call(step.streams)
        server, connection = self.server, None
        try:
            server = self.server.at(streams)
            connection = server.checkout()
            connection.send_packed_command([_reading(streams, step.until)])
            # Redis checks the timeouts of blocked clients only ten times a second.
            if connection.can_read(max(0.0, step.until - time.monotonic())):
                connection.read_response()
                server.answered()
                server.checkin(connection)
                connection = None
        except (RedisError, OSError) as error:
            self.server.on_error(error)
            if not is_outage(error):
                raise
            time.sleep(_pause(step))
        finally:
            if connection is not None:
                connection.disconnect()


class AsyncRunner:
    """Executes the steps of a flight in the calling task.

    Args:
        client: redis.asyncio client of the primary.
        thread: stands for the thread that waits for the task; None if none does. It may be the one
            that a computation of this loop needs, so that must not be waited for.

    Attributes: as of ``ThreadRunner``.
    """

    new_event = asyncio.Event

    def __init__(self, client: Any, thread: Any = None) -> None:
        self._client = client
        self.server = server_of(client)
        self.in_thread = thread is not None
        self.group = thread if self.in_thread else asyncio.get_running_loop()

    async def do(self, steps: Steps) -> Any:
        """Execute ``steps``; returns their result."""
        try:
            return await adrive(steps, self._do)
        except ProducerFailed as failed:
            error = failed.error
        raise error

    async def _do(self, step: Step) -> Any:
        if isinstance(step, Run):
            if step.done:
                return await asyncio.shield(in_background(self._run(step)))
            return await cancellable(self._run(step))
        if isinstance(step, Compute):
            try:
                value = step.function()
                while inspect.isawaitable(value):  # A plain function may return a coroutine.
                    value = await value
                return value
            except GeneratorExit:  # The coroutine is closed: its loop has ended.
                raise
            except BaseException as error:
                raise ProducerFailed(error) from error
        if isinstance(step, WaitForEvent):
            return await _within(step.event.wait(), step.until)
        if isinstance(step, Pause):
            return await time.asleep(step.seconds)
        if isinstance(step, RunInBackground):
            in_background(self.do(step.steps))
            return True
        return await self._wait_for_leader(step)

    async def _run(self, step: Run) -> list[Any]:
        try:
            return await arun_all(self._client, step.calls)
        except RedisConnectionError as error:
            if len(step.calls) == 1 or not is_pool_exhausted(error):
                raise
            # Single calls have their own connections.
            return [(await arun(self._client, call)).value for call in step.calls]

    async def _wait_for_leader(self, step: WaitForLeader) -> None:
        streams = self.server.in_one_call(step.streams)
        try:
            connection = await aconnect(self._client, streams, timeout=5.0)
            try:
                reading = _reading(streams, step.until)
                await cancellable(connection.send_packed_command([reading]))
                await _within(connection.read_response(), step.until)
            finally:
                await connection.disconnect(nowait=True)
        except (RedisError, OSError) as error:
            self.server.on_error(error)
            if not is_outage(error):
                raise
            await time.asleep(_pause(step))


async def _within(work: Coroutine[Any, Any, Any], until: float) -> bool:
    """Await ``work``, at most until ``until`` (monotonic seconds); whether it was done by then."""
    task = asyncio.ensure_future(work)
    try:
        await time.wait({task}, max(0.0, until - time.monotonic()))
        if task.done():
            task.result()
        return task.done()
    finally:
        task.cancel()


def _reading(streams: Sequence[bytes], until: float) -> bytes:
    pause = b"%d" % max(1, int((until - time.monotonic()) * 1000))
    return pack_words(b"XREAD", b"BLOCK", pause, b"STREAMS", *streams, *(b"0" for _ in streams))


def _pause(step: WaitForLeader) -> float:
    return max(0.0, min(RETRY_PAUSE_SECONDS, step.until - time.monotonic()))
