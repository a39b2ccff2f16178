"""Which errors pass by themselves: outages, and replies with which a server refuses a call for now.
This is the only list: waits, renewals, deferred releases, fallbacks and the answer 503 depend on
it.
"""

from __future__ import annotations

import errno
import inspect
import os
import signal
import sys
import threading
from traceback import walk_tb
from types import FrameType
from typing import TypeVar

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ClusterError,
    InvalidResponse,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

E = TypeVar("E", bound=BaseException)

#: What an absent or restarting Redis, or one that moves slots, looks like.
OUTAGE: tuple[type[Exception], ...] = (
    RedisConnectionError,
    RedisTimeoutError,
    AskError,  # Slots that have moved, are being moved, or have no owner at this moment.
    ClusterError,
    InvalidResponse,  # Of another program that has its address.
)

#: Another program has its address: a load balancer, or who got it after Redis.
NO_REDIS = "What answers at the address of Redis is no Redis"
LostLogin = AuthenticationError  #: On a connection that had one, nothing has run.
#: The codes, each with what people can do.
PASSING = {
    "READONLY": "this server is a replica: let the address lead to the primary",
    "MASTERDOWN": "this server is a replica without its primary: let the address lead to one",
    "NOREPLICAS": "fewer replicas are connected than min-replicas-to-write: look at the replicas",
    "MISCONF": "its last save to disk failed: look for a full disk and into the server's log",
    "OOM": "maxmemory is reached: raise it, or use a separate server for locks",
    "LOADING": "it reads its data from disk: wait until it has",
    "BUSY": "it runs a long script: wait, or end it with SCRIPT KILL",
    "UNKILLABLE": "it runs a long script that has written: wait, or end the server",
    "CLUSTERDOWN": "slots of the cluster have no primary: look at CLUSTER INFO",
    "TRYAGAIN": "the slot is being moved to another server: wait until it is",
    "UNBLOCKED": "the server became a replica: let the address lead to the primary",
    "max number of clients": "raise maxclients, or look for who has so many connections",
}
#: What proxies and services in front of Redis say while they do not reach it, or let no more calls
#: through. The call may have run.
FROM_PROXIES = (
    *("upstream failure", "no upstream host"),  # Envoy
    *("no server avaliable", "no server connection", "server connection close"),  # Predixy
    *("deliver request fail", "Cluster node disconnected", "Failed to read reply"),
    *("backend conn", "max concurrent connections", "max requests limit", "request limit exceeded"),
)
#: Twemproxy says what the system says.
_SYSTEM = {
    os.strerror(getattr(errno, code))
    for code in (
        *("ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "ETIMEDOUT", "EPIPE"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETUNREACH"),
    )
    if hasattr(errno, code)
}
#: redis-py's classes, whose texts lack the code.
_CLASSES = {
    ReadOnlyError: "READONLY",
    MasterDownError: "MASTERDOWN",
    OutOfMemoryError: "OOM",
    BusyLoadingError: "LOADING",
    TryAgainError: "TRYAGAIN",
    ClusterDownError: "CLUSTERDOWN",  # After MASTERDOWN, which is one of these.
}
#: What a replica says, also while it gets its first copy: its callers look for a primary.
_MISDIRECTED = ("READONLY", "MASTERDOWN", "LOADING")


def interrupt_in(error: BaseException | None) -> BaseException | None:
    """What a signal handler has raised, if that is ``error`` or was turned into it."""
    if threading.current_thread() is not threading.main_thread():
        return None  # No handler runs here.
    while error is not None:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        if any(map(_is_handler, frames)):
            return error
        cause, context = error.__cause__, error.__context__
        if cause is None and context is not None and frames:
            # Not what was being handled when the call began.
            trace = context.__traceback__
            cause = context if trace and trace.tb_frame is frames[-1] else None
        error = cause
    return None


def raise_interrupt(error: BaseException) -> None:
    """Raise what a signal handler has raised, if redis-py or django-redis has turned that into
    ``error``. Asked where an error would be an outage's, or something would be tried again."""
    if (interrupt := interrupt_in(error)) is not None:
        raise interrupt from interrupt.__cause__


def raise_interrupt_in_redis_py() -> None:
    """The same, as redis-py closes a connection because of an error: it would raise another one
    then, or try again."""
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    if error and trace and module_of(trace.tb_frame).startswith("redis."):
        raise_interrupt(error)


def _is_handler(frame: FrameType) -> bool:
    """Whether it was called as handlers are, with the frame that it has interrupted, or is one that
    is set, which may have deleted its arguments."""
    if module_of(frame).startswith(("django_redis_lock.", "redis.")):
        return False
    names, rest, _, values = inspect.getargvalues(frame)
    passed = [values.get(name) for name in (*names, rest or "")]
    passed += [each for some in passed if type(some) is tuple for each in some]
    if frame.f_back is not None and any(each is frame.f_back for each in passed):
        return True
    numbers = range(1, signal.NSIG)
    return any(_code_of(signal.getsignal(number)) is frame.f_code for number in numbers)


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _code_of(handler: object) -> object:
    function = getattr(handler, "func", handler)  # Of a ``partial``.
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)


def refusal_in(reply: str) -> str:
    """The code of a refusal in a text from Redis; empty if there is none."""
    # Redis 6 reports an error in a script after "Error running script", with a hyphen.
    line = f"-{reply} "
    return next((code for code in PASSING if f"-{code} " in line), "")


def refusal(error: BaseException) -> str:
    """The code of the refusal that ``error`` is; empty for an error that does not pass by itself,
    and for one of the connection."""
    for kind, code in _CLASSES.items():
        if isinstance(error, kind):
            return code
    return refusal_in(str(error))


# -- what is noted on errors -----------------------------------------------------------------------


def note_sent(error: BaseException, sent: bool) -> None:
    error.__dict__["sent_to_redis"] = sent


def may_have_run(error: BaseException) -> bool:
    """Whether Redis may have carried out the call that ended with ``error``. A refusal is about the
    state of the server: the script's first write meets it, so nothing has run."""
    noted = error.__dict__.get("sent_to_redis")
    return not refusal(error) if noted is None else bool(noted)


def note_fault_of_connection(error: BaseException, whether: bool) -> None:
    error.__dict__["fault_of_connection"] = whether


def is_fault_of_connection(error: BaseException) -> bool | None:
    """Whether ``error`` may not be the server's: its connection had been used before, and was
    closed, forgotten by the network, or leads to a server that was replaced. None if nobody has
    noted that."""
    return error.__dict__.get("fault_of_connection")


# -- what they mean --------------------------------------------------------------------------------


def is_misdirected(error: BaseException) -> bool:
    """Whether ``error`` says that the connection leads to a replica."""
    return refusal(error) in _MISDIRECTED


def is_outage(error: BaseException) -> bool:
    """Whether ``error`` may pass by itself, so that a waiter should try again. Raises what a signal
    handler has raised, if ``error`` came of that."""
    if isinstance(error, OUTAGE):
        raise_interrupt(error)
        return True
    return bool(refusal(error)) or is_from_proxy(error)


def is_from_proxy(error: BaseException) -> bool:
    """Whether the reply is not of Redis, which the proxy in front of it does not reach."""
    if not isinstance(error, ResponseError):
        return False
    text = str(error).removeprefix("ERR ")
    return text in _SYSTEM or any(part in text for part in FROM_PROXIES)


def is_refusal(error: BaseException) -> bool:
    """Whether the server has answered, and refuses the call for now: nothing has run, and another
    try costs no more than a round trip."""
    return isinstance(error, NotReady) or bool(refusal(error))


def is_unusable(error: BaseException) -> bool:
    """Whether ``error`` comes from the server, its settings or this user's rights there, and not
    from the data at a key."""
    refused = isinstance(error, ResponseError) and "WRONGTYPE" not in str(error)
    return refused or is_outage(error)


def is_pool_exhausted(error: BaseException) -> bool:
    """Whether ``error`` is about the pool and not about the server."""
    return str(error).startswith(("Too many connections", "No connection available"))


class NotReady(RedisConnectionError):
    """The server refused a call for as long as its caller waited for the reply: it runs a long
    script, or moves the slot."""


def is_busy(error: BaseException) -> bool:
    """Whether ``error`` says that the server runs a long script and refuses all other calls."""
    return refusal(error) == "BUSY"
