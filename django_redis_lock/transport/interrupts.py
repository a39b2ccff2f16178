"""What a signal handler raises in the middle of a call to Redis. redis-py takes an ``OSError``, as
the ``TimeoutError`` of a time limit is, for an error of the connection. And large requests in
parts: a slow network may need longer for one than a reply may take, so each part restarts the
time-out.
"""

from __future__ import annotations

import inspect
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from traceback import walk_tb
from types import FrameType
from typing import Any

from redis.connection import AbstractConnection

from ..clock import real_time as time
from .refusals import genuine, suppress

#: Bytes that are sent at once. The system holds back no more before it sends them: otherwise it
#: takes megabytes in no time, and what then passes would count as the server's silence.
PART_BYTES = 65_536

#: The class that is guarded is known when a connection is made.
_Any: Any = object


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


def _is_handler(frame: FrameType) -> bool:
    """Whether it was called as handlers are, with the frame that it has interrupted, or is one that
    is set, which may have deleted its arguments."""
    if _module(frame).startswith(("django_redis_lock.", "redis.")):
        return False
    names, rest, _, values = inspect.getargvalues(frame)
    passed = [values.get(name) for name in (*names, rest or "")]
    passed += [each for some in passed if type(some) is tuple for each in some]
    if frame.f_back is not None and any(each is frame.f_back for each in passed):
        return True
    numbers = range(1, signal.NSIG)
    return any(_code_of(signal.getsignal(number)) is frame.f_code for number in numbers)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _code_of(handler: object) -> object:
    function = getattr(handler, "func", handler)  # Of a ``partial``.
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)


def in_parts(request: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The ``request``, whose own parts may be large, in parts of which none is."""
    for part in request:
        if len(part) <= PART_BYTES:
            yield part
            continue
        for begin in range(0, len(part), PART_BYTES):
            yield memoryview(part)[begin : begin + PART_BYTES]


def show_progress(sock: socket.socket) -> None:
    """Make ``sock`` writable only while the system holds back less than a part."""
    with suppress(AttributeError, OSError):  # The system has no such option, or this is no TCP.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, PART_BYTES)


class Interruptible(_Any):  # type: ignore[misc]  # the class of Any is known later
    """In front of a connection class for threads."""

    def _connect(self) -> socket.socket:
        sock: socket.socket = super()._connect()
        show_progress(sock)
        return sock

    def send_packed_command(
        self, command: bytes | Iterable[bytes], check_health: bool = True
    ) -> None:
        parts = in_parts([command] if isinstance(command, bytes) else command)
        super().send_packed_command(parts, check_health=check_health)

    def disconnect(self, *args: object, **kwargs: object) -> None:
        super().disconnect(*args, **kwargs)
        error = sys.exc_info()[1]
        trace = None if error is None else error.__traceback__
        # redis-py would raise another error, or try again.
        caught = trace is not None and _module(trace.tb_frame).startswith("redis.")
        if error and caught and not genuine(BaseException):
            raise error

    def can_read(self, timeout: float = 0) -> bool:
        # A TimeoutError would end a wait of redis-py's.
        if not (timeout and hasattr(select, "poll") and hasattr(self._sock, "fileno")):
            return bool(super().can_read(timeout))
        until = time.monotonic() + timeout
        while not super().can_read(0):
            if (left := until - time.monotonic()) <= 0:
                return False
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            poll.poll(left * 1000)
        return True


@cache
def interruptible(kind: type, guard: type = Interruptible) -> type[Any]:
    """The connection class ``kind`` with ``guard`` in front of it."""
    if guard is Interruptible and not issubclass(kind, AbstractConnection):
        return kind
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "guards": kind}
    return type(kind.__name__, (guard, kind), members)
