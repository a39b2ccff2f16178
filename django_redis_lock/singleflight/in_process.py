"""What this process computes. Of its callers that want one value, one asks Redis and the others
wait for it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..exceptions import LockError
from ..protocol import new_token, printable
from ..threads import Mutex, after_fork, free_after_fork, get_logger, may_log
from ..transport import Server
from .runners import ThreadRunner, under_computation

if TYPE_CHECKING:
    from .tasks import AsyncRunner

logger = get_logger("django_redis_lock.flights")

#: Tasks have theirs in a module that is imported when it is used.
Runner: TypeAlias = "ThreadRunner | AsyncRunner"

# -- the callers of one value ----------------------------------------------------------------------


class SharedValue:
    """What a caller has to tell the others that want the same value."""

    requests = 0  #: How many it has sent.
    encoded: object = None  #: The value as Redis stores it; None: query Redis again.
    trace = ""  #: Of the computation; see ``events.trace_parent``.
    computed = False  #: Whether the value was computed, not only read.
    outage: Exception | None = None  #: Why a request failed.


class InProcessFlight(SharedValue):
    """The callers of this process that want one value; the first queries Redis for all of them."""

    def __init__(self, runner: Runner, key: bytes) -> None:
        self.flight_id: FlightKey = (runner.server, key, runner.group)
        self.ended = runner.new_event()
        self.thread = threading.get_ident()

    def left(self) -> None:
        """The call that has made this has ended, however."""
        if in_flight.get(self.flight_id) is self:
            leave(self)


Function = Callable[..., object]
#: A key of one database, and what stands for its callers: the ``group`` of their runners.
FlightKey = tuple[Server, bytes, object]

#: The flights of this process. Each operation of a dict is atomic.
in_flight: dict[FlightKey, InProcessFlight] = {}
after_fork(in_flight.clear)
_leaving = free_after_fork(Mutex())


def join(mine: InProcessFlight) -> InProcessFlight:
    """The flight of another caller for the same value, or ``mine``, which then begins."""
    return in_flight.setdefault(mine.flight_id, mine)


def leave(shared: InProcessFlight) -> None:
    """End the flight ``shared`` of this process, and wake its other callers."""
    try:
        with _leaving:  # Else the keeper, which may do the same, removes the next flight.
            if in_flight.get(shared.flight_id) is shared:
                in_flight.pop(shared.flight_id, None)
    finally:
        shared.ended.set()


# -- what is being computed ------------------------------------------------------------------------


class Computation(Protocol):
    """A computation, as the writes that it makes itself see it."""

    token: bytes
    #: What it has done itself to the values: see STORE.
    own_writes: dict[bytes, str]


class Overtaken(Exception):
    """The call had not begun, and another thread computes the value instead."""


class Postponed(BaseException):
    """Raised by a producer whose value will be complete later, perhaps in another thread: the
    flight goes on for its timeout. See ``contrib.pages``."""

    #: The ``Leader``. None: Redis was down when the computation began, or the flight has ended.
    leader: Any = None


class DeferredCall:
    """A function that runs in another thread: Django's thread for synchronous code. If that thread
    itself waits for the value, the function would never begin. So a thread that would wait for a
    function that has not begun may ``overtake`` it, and computes the value instead.

    Args:
        defer: turns a function into an awaitable one that runs in that thread.
    """

    def __init__(self, function: Function, defer: Callable[[Function], Function]) -> None:
        self._function = function
        self._defer = defer
        self._mutex = Mutex()
        self._begun = self._overtaken = False

    def replaced(self, wrap: Callable[[Function], Function]) -> DeferredCall:
        """Another one, of what ``wrap`` makes of the function."""
        return DeferredCall(wrap(self._function), self._defer)

    def __call__(self, *args: object) -> object:
        return self._defer(self._begin)(*args)

    def _begin(self, *args: object) -> object:
        with self._mutex:
            if self._overtaken:
                self._overtaken = False
                raise Overtaken
            self._begun = True
        try:
            return self._function(*args)
        except StopIteration as error:  # A future refuses it, and its task would wait forever.
            raise RuntimeError("the function raised StopIteration") from error

    def overtake(self) -> bool:
        """Whether the function has not begun. Then it never will, and its caller follows."""
        with self._mutex:
            self._overtaken = not self._begun
            return self._overtaken


#: Deferred calls of this process by the tokens of their flights.
_deferred: weakref.WeakValueDictionary[bytes, DeferredCall] = weakref.WeakValueDictionary()
after_fork(_deferred.clear)


def token_for(compute: Function) -> bytes:
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


#: The threads in which this process computes, by the tokens of the flights.
computes_in: dict[bytes, int] = {}
after_fork(computes_in.clear)


def waits_for_itself(server: Server, key: bytes, thread: int | None) -> bool:
    """Whether a ``thread`` that computes the value, perhaps in a task of its event loop, is the
    calling thread: it would stop the computation by a wait for it."""
    if thread != threading.get_ident():
        return False
    if may_log(server, _logged_at):
        text = "The value %s is requested by the thread that computes it, which cannot wait for it "
        text += "and computes it twice: in a coroutine use aget_or_set() and the like"
        logger.warning(text, printable(key))
    return True


_logged_at: weakref.WeakKeyDictionary[Server, float] = weakref.WeakKeyDictionary()


def refuse_recursion(server: Server, keys: Iterable[bytes]) -> None:
    """Raises LockError if this thread or task, or the one that started it, is computing one of
    these ``keys``: it would wait for itself."""
    for here in under_computation.get():
        for key in keys:
            if (server, key) in here:
                raise LockError("the function that computes this value requests the value", key)


def innermost_flight() -> tuple[bytes, bytes] | None:
    """The key that the caller itself computes, and the token of its flight."""
    for here in reversed(under_computation.get()):
        for (server, key), computation in [*here.items()]:
            if server is not None:
                return key, computation.token
    return None


def own_flights(keys: Iterable[bytes] | None = None, did: str = "written") -> dict[bytes, bytes]:
    """The keys among ``keys`` (None: all) that the caller is part of the computation of, each with
    the token of its flight. A write to them by the caller is older than the computation's result,
    so it must not end the flight, and STORE must expect it: the caller is about to have ``did`` it.
    """
    computations = under_computation.get()
    if not computations:  # As in almost every write.
        return {}
    wanted, own = None if keys is None else set(keys), {}
    for here in computations:
        for (_, key), computation in [*here.items()]:
            if wanted is None or key in wanted:
                own[key] = computation.token
                if computation.own_writes.get(key) != "written":
                    computation.own_writes[key] = did
    return own


class computing:
    """In this block, the caller is part of the ``computation`` of the values at ``keys``."""

    __slots__ = ("_here", "_mark")

    def __init__(
        self, server: Server | None, keys: Iterable[bytes], computation: Computation
    ) -> None:
        self._here = {(server, key): computation for key in keys}

    def __enter__(self) -> None:
        self._mark = under_computation.set((*under_computation.get(), self._here))

    def __exit__(self, *error: object) -> None:
        self._here.clear()  # A task that began in this block may outlive it, with its context.
        try:
            under_computation.reset(self._mark)
        except ValueError:
            pass  # The garbage collector closes the generator in another context.
