"""What executes the steps of flights in threads, and what tasks need as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from copy import copy
from functools import partial
from types import CoroutineType
from typing import Any, NamedTuple, NoReturn, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError

from ..clock import time
from ..keeper import Job, keeper
from ..protocol import Call, Reply
from ..steps import Steps
from ..threads import InCaller, ThreadEvent, ThreadPool, Work, this_process
from ..transport import exchange_with, is_observed, is_plain, pack_words, run_all, server_of
from ..transport.server import readable, value_with_lifetime

R = TypeVar("R")

#: The longest message of a failed computation that other callers get.
MAX_MESSAGE_CHARACTERS = 500

#: Refreshes stale values. Its threads end after five idle seconds.
background: ThreadPool | InCaller = ThreadPool(
    "django_redis_lock", threads=4, max_waiting=64, idle_seconds=5.0
)


def use_background(other: ThreadPool | InCaller) -> ThreadPool | InCaller:
    global background
    before, background = background, other
    return before


class ProducerFailed(Exception):
    """The function that computes raised ``error``, which the runner raises to the caller. (Not
    every exception can pass through a generator: it handles GeneratorExit and StopIteration.)"""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = self.__cause__ = error

    def describe(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"[:MAX_MESSAGE_CHARACTERS]


#: What this thread or task is computing, by server and key, each with what has its token. Runners
#: restore it after each call: an interrupt may keep ``in_process.computing`` from that.
under_computation: ContextVar[tuple[dict[tuple[Any, bytes], Any], ...]] = ContextVar(
    "under_computation", default=()
)


class Computation(NamedTuple):
    """A step, of threads and of tasks: the call of ``function``, whose result is awaited if it is
    awaitable. It raises ProducerFailed if that raises."""

    function: Callable[[], object]


def _refuse(coroutine: CoroutineType[object, object, object]) -> NoReturn:
    coroutine.close()
    raise TypeError(
        "a thread cannot await the coroutine that computes the value: use aget_or_set(), "
        "aget_or_set_many() or acompute()"
    )


class ThreadRunner:
    """Executes the steps of a flight in the calling thread.

    Args:
        client: redis-py client of the primary.
        afterwards: called in the thread of the background after each refresh.
    """

    #: Makes what other callers of this process wait for.
    new_event = ThreadEvent
    #: Stands for the callers that wait for each other in memory, such as the tasks of an event
    #: loop; None for threads.
    group: object = None
    #: Whether a thread waits for the caller: it is the caller, or has asyncio run it.
    in_thread = True

    #: Called with what is to be done in the background; returns what is done there.
    carried: Callable[[Work], Work] = staticmethod(lambda work: work)

    def __init__(self, client: Any, afterwards: Work = lambda: None) -> None:
        self._client = client
        self._process = this_process()
        self._afterwards = afterwards
        #: What ends each thing that the call has begun: called however the call ends. Between two
        #: steps, or within a ``finally``, no generator can see to that.
        self.begun: list[Work] = []
        self.server = server_of(client)

    @property
    def is_observed(self) -> bool:
        return is_observed(self._client) or not is_plain(self._client)

    def do(self, steps: Steps[R]) -> R:
        """What ``steps`` return in the end. The function that computes is called here, and not by
        the generators: for values that need each other, each level adds one frame to the stack."""
        before = under_computation.set(under_computation.get())
        try:
            result = next(steps)
            while True:
                if type(result) is Computation:
                    try:
                        result = result.function()
                        if isinstance(result, CoroutineType):
                            _refuse(result)
                    except BaseException as raised:
                        result = steps.throw(ProducerFailed(raised))
                        continue
                result = steps.send(result)
        except StopIteration as end:
            value: R = end.value
            return value
        except ProducerFailed as failed:
            error = failed.error
        finally:
            under_computation.reset(before)
            steps.close()  # A traceback may keep what was interrupted between two steps.
            for left in self.begun:
                left()
        raise error

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Call ``function`` where the callers run. The keeper uses this."""
        function(*args)

    # -- the steps ---------------------------------------------------------------------------

    def run(self, *calls: Call) -> list[Reply]:
        """Run scripts, in one round trip; returns their replies."""
        if this_process() is not self._process:
            raise RedisConnectionError("A forked child leaves the flight to its parent")
        return run_all(self._client, calls)

    def exchange(self, command: bytes, replies: int) -> Reply:
        """So many ``replies`` to ``command``, which may run twice."""
        if this_process() is not self._process:
            raise RedisConnectionError("A forked child leaves the flight to its parent")
        return exchange_with(self.server, command, replies)

    def evalsha(self, call: Call) -> Reply:
        return self._client.evalsha(*arguments_of(call))

    def read(self, key: bytes) -> Reply:
        """The value at ``key`` and its PTTL, None if there is none."""
        value = exchange_with(self.server, value_with_lifetime(key), 2)
        return None if value[0] is None else value

    def wait_for_event(self, event: Any, until: float) -> bool:
        """Wait for an event of this process, or until a monotonic time; returns whether it came."""
        return bool(event.wait(max(0.0, until - time.monotonic())))

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def has_room(self) -> bool:
        return background.has_room()

    def run_in_background(self, steps: Steps[object], left: Work, renewal: Job) -> bool:
        """Execute ``steps`` of the leader of one flight, which ``left`` ends, in the background;
        returns whether the queue had room. Until they begin, the keeper renews the flight."""
        runner = copy(self)
        runner.begun = [left]
        accepted = False
        try:
            keeper().add(renewal)
            accepted = background.submit(self.carried(partial(runner.do, steps)), self._afterwards)
        finally:
            if not accepted:
                keeper().discard(renewal)
        if accepted:
            self.begun.remove(left)
        return accepted

    def read_streams(self, streams: Sequence[bytes], until: float) -> Reply:
        streams, connection = self.server.in_one_call(streams), None
        try:
            server = self.server.locate(streams)
            connection = server.checkout()
            connection.send_packed_command([reading(streams, until)])
            # Redis checks the timeouts of blocked clients only ten times a second.
            if not readable(connection, until - time.monotonic()):
                return None
            reply = connection.read_response()
            server.answered()
            server.checkin(connection)
            connection = None
            return reply
        finally:
            if connection is not None:
                connection.disconnect()


def arguments_of(call: Call) -> tuple[object, ...]:
    return call.script.sha, len(call.keys), *call.keys, *call.args


def reading(streams: Sequence[bytes], until: float) -> bytes:
    # Not earlier than the caller, who would only ask again; 0 would be forever.
    pause = b"%d" % max(1, math.ceil((until - time.monotonic()) * 1000))
    return pack_words(b"XREAD", b"BLOCK", pause, b"STREAMS", *streams, *(b"0-1" for _ in streams))
