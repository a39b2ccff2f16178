"""What is done in front of redis-py's connections for threads: what a signal handler raises passes
them (see ``refusals.interrupt_in``); large requests are sent in parts, because a slow network may
need longer for one than a reply may take, so that each part restarts the time-out; and names are
looked up within the time to connect.
"""

from __future__ import annotations

import math
import select
import socket
import sys
from functools import cache
from typing import Any

from redis.connection import AbstractConnection

from ..clock import real_time as time
from ..threads import ThreadEvent, ThreadPool, after_fork
from .refusals import genuine, module_of

#: The class that is guarded is known when a connection is made.
_Any: Any = object


#: The system's resolver of names has no time-out of ours.
_resolvers = ThreadPool("django_redis_lock resolver", 8, 64, idle_seconds=1.0)
_lookups: dict[tuple[str, int, int], _Lookup] = {}
after_fork(_lookups.clear)


class _Lookup:
    """The addresses of a name, for all threads that want them at that time. They may be used for as
    long as it took to get them: otherwise no thread could connect by a slow resolver."""

    def __init__(self, host: str, port: int, family: int) -> None:
        self._wanted = host, port, family
        self._began = time.monotonic()
        self._expires_at = math.inf
        self._outcome: list[str] | BaseException = []
        self._done = ThreadEvent()
        if not _resolvers.submit(self._run):
            self._run()

    def _run(self) -> None:
        try:
            self._outcome = _addresses(*self._wanted)
        except BaseException as error:
            self._outcome = error
        self._expires_at = 2 * time.monotonic() - self._began
        self._done.set()

    def is_over(self) -> bool:
        return time.monotonic() > self._expires_at

    def result(self, seconds: float) -> list[str]:
        if not self._done.wait(seconds):
            raise TimeoutError(f"{self._wanted[0]} has no address after {seconds:.2f} s")
        if isinstance(self._outcome, BaseException):
            raise type(self._outcome)(*self._outcome.args)
        return self._outcome


def _addresses(host: str, port: int, family: int) -> list[str]:
    resolved = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in resolved]


def _addresses_within(seconds: float | None, host: str, port: int, family: int) -> list[str]:
    if seconds is None or host == "localhost":
        return _addresses(host, port, family)
    lookup = _lookups.get((host, port, family))
    if lookup is None or lookup.is_over():
        lookup = _lookups[host, port, family] = _Lookup(host, port, family)
    return lookup.result(seconds)


def is_name(host: object) -> bool:
    """Whether ``host`` is no address."""
    named = isinstance(host, str) and host and ":" not in host
    return bool(named) and not str(host).replace(".", "").isdigit()


class Interruptible(_Any):  # type: ignore[misc]  # the class of Any is known later
    """In front of a connection class for threads."""

    #: The name of the server, while ``host`` is one of its addresses.
    _name = ""

    def _connect(self) -> socket.socket:
        """At one address of a name after the other: redis-py would take what a signal handler
        raises for an error of the first, and go on with the next."""
        host, kind = getattr(self, "host", ""), getattr(self, "guards", type(self))
        if not is_name(host) or not kind._connect.__module__.startswith("redis."):
            return self._connect_here()
        failure = OSError(f"{host} has no address")
        self._name = host
        try:
            wanted = host, self.port, self.socket_type
            for address in _addresses_within(self.socket_connect_timeout, *wanted):
                self.host = address
                try:
                    return self._connect_here()
                except genuine(OSError) as error:
                    failure = error
            raise failure
        finally:
            self.host, self._name = host, ""
            del failure  # Its frames lead back to it.

    def _connect_here(self) -> socket.socket:
        sock: socket.socket = super()._connect()
        return sock

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> socket.socket:
        self.host = self._name or self.host  # The certificate is that of the name.
        wrapped: socket.socket = super()._wrap_socket_with_ssl(sock)
        return wrapped

    def disconnect(self, *args: object, **kwargs: object) -> None:
        super().disconnect(*args, **kwargs)
        error = sys.exc_info()[1]
        trace = None if error is None else error.__traceback__
        # redis-py would raise another error, or try again.
        caught = trace is not None and module_of(trace.tb_frame).startswith("redis.")
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
def interruptible(kind: type[Any], guard: type = Interruptible) -> type[Any]:
    """The connection class ``kind`` with ``guard`` in front of it."""
    if guard is Interruptible and not issubclass(kind, AbstractConnection):
        return kind
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "guards": kind}
    return type(kind.__name__, (guard, kind), members)
