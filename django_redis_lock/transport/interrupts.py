"""What a signal handler raises in the middle of a call to Redis. If that derives from ``OSError``
(the ``TimeoutError`` of a time limit), redis-py takes it for an error of the connection.
"""

from __future__ import annotations

import inspect
import select
import signal
import sys
from functools import cache
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

from redis.connection import AbstractConnection

from ..clock import real_time as time
from ..extension import PACKAGE

#: No handlers are here.
_NO_HANDLERS = (f"{PACKAGE}.", "redis.")

#: What is guarded is known when a connection is made.
_Any: Any = object


def interrupt_in(error: BaseException | None) -> BaseException | None:
    """What a signal handler has raised, if that is ``error`` or was turned into it."""
    while error is not None:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        if any(map(_is_handler, frames)):
            return error
        cause = error.__cause__
        if cause is None and (context := error.__context__) is not None:
            # Not what was being handled when the call began.
            trace = context.__traceback__
            cause = context if trace and frames and trace.tb_frame is frames[-1] else None
        error = cause
    return None


def _is_handler(frame: FrameType) -> bool:
    """Whether it was called as handlers are, with the frame that it has interrupted, or is one that
    is set."""
    if _module(frame).startswith(_NO_HANDLERS):
        return False
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    given += [each for some in given if type(some) is tuple for each in some]
    interrupted = frame.f_back
    if interrupted is not None and any(each is interrupted for each in given):
        return True
    # It may have deleted its arguments.
    return any(_code_of(signal.getsignal(n)) is code for n in signal.valid_signals())


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _code_of(handler: Any) -> object:
    handler = getattr(handler, "func", handler)  # Of a ``partial``.
    handler = getattr(handler, "__func__", handler)  # Of a method.
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)


def reraise(interrupt: BaseException) -> NoReturn:
    context = interrupt.__context__
    try:
        raise interrupt
    finally:
        interrupt.__context__ = context


class Interruptible(_Any):  # type: ignore[misc]  # the class of Any is known later
    """In front of a connection class for threads: what a signal handler raises goes to the caller,
    past redis-py, which disconnects before it raises an error of its own, or tries again."""

    def connect(self) -> None:
        try:
            super().connect()
        except Exception as error:
            if (interrupt := interrupt_in(error)) is not None:
                reraise(interrupt)
            raise

    def disconnect(self, *args: object, **kwargs: object) -> None:
        super().disconnect(*args, **kwargs)
        error = sys.exc_info()[1]
        trace = None if error is None else error.__traceback__
        by_redis_py = trace is not None and _module(trace.tb_frame).startswith("redis.")
        if by_redis_py and (interrupt := interrupt_in(error)) is not None:
            reraise(interrupt)

    def can_read(self, timeout: float = 0) -> bool:
        # A TimeoutError that comes while redis-py waits would be the end of that wait.
        if not (timeout and hasattr(select, "poll") and hasattr(self._sock, "fileno")):
            return bool(super().can_read(timeout))
        until = time.monotonic() + timeout
        while not (ready := super().can_read(0)) and (left := until - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            poll.poll(left * 1000)
        return bool(ready)


@cache
def interruptible(kind: type, guard: type = Interruptible) -> type[Any]:
    """The connection class ``kind`` with ``guard`` in front of it."""
    if guard is Interruptible and not issubclass(kind, AbstractConnection):
        return kind
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "guards": kind}
    return type(kind.__name__, (guard, kind), members)
