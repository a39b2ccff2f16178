"""How a thread waits for a lock: first in memory, behind the other threads of its process; then,
as its process's only one, in Redis, with a blocking pop on the lock's list of grants.

Redis serves blocked clients in the order in which they came and forgets those whose connection is
gone: that is the whole fair queue. So the pop stays open for the entire wait, without a timeout of
its own; whoever times out and asks again has lost its place. To end a wait, LEAVE pushes an element
to a second list that the same pop listens to; what the pop answers then says beyond doubt whether
a grant came first.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from typing import Any

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .grants import FRESH, LOOK_EVERY, Clock, Granted, Request, parse_grant
from .hold import printable
from .keeper import Abandoned, Job, keeper
from .keys import wake_key
from .scripts import Call
from .server import RawConnection, Server, is_outage, receive, run, send, server_of

__all__ = ["Place", "enter", "is_waited_for"]

logger = logging.getLogger("django_redis_lock.waiting")

#: Pauses between attempts to reach a server that is away, in seconds.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
#: Seconds the last try at the deadline may take before the wait ends without it.
LAST_TRY = 0.1


class Extension:
    """A connection with the answer to TAKE_GRANT still to come, for which nobody has waited."""

    def __init__(self, connection: RawConnection, call: Call, request: Request) -> None:
        self._connection = connection
        self._call = call
        self._until = request.until(time.monotonic())
        self._mutex = threading.Lock()
        self._open = True
        self._answer: float | None = None
        send(connection, call)

    def settle(self, wait: bool) -> float | None:
        """See ``Granted.settle``."""
        with self._mutex:
            if self._open and (wait or self._has_come()):
                self._open = False
                try:
                    taken = receive(self._connection, self._call)
                except (RedisError, OSError):
                    self._connection.disconnect()  # Unknown; the keeper's renewal will tell.
                else:
                    self._answer = self._until if taken else -math.inf
            return self._answer

    def _has_come(self) -> bool:
        try:
            return self._connection.can_read(0)
        except (RedisError, OSError):
            return True  # Reading will say what is wrong.


class Line:
    """The threads of this process that wait for one lock on one server, in their order.

    A line is registered in Redis under one waiter id. It closes when its last thread has the lock;
    a thread that comes later starts another line under another id, so that taking the old id off
    the register can never hide the new one.
    """

    def __init__(self, server: Server, request: Request, waiter: bytes) -> None:
        self.server = server
        self.waiter = waiter
        self.request = request
        self.clock: Clock | None = None
        self.places: deque[Place] = deque()
        self.connection: RawConnection | None = None
        self.extension: Extension | None = None
        self.watch = Watch(self)

    @property
    def key(self) -> tuple[Server, bytes]:
        return self.server, self.request.keys.lock

    def heard(self, pttl: int, clock: Clock) -> None:
        """The server has said how long the present holder's lifetime still is."""
        self.clock = clock
        pause = min(LOOK_EVERY, pttl / 1000) if pttl >= 0 else LOOK_EVERY
        keeper().reschedule(self.watch, time.monotonic() + pause)

    def look_now(self) -> None:
        keeper().reschedule(self.watch, time.monotonic())

    def close_if_last(self) -> bool:
        """Close the line if one thread is left in it; says whether it did."""
        with _mutex:
            return len(self.places) == 1 and _lines.pop(self.key, None) is self

    def reopen(self) -> None:
        """The last thread did not get the lock after all."""
        with _mutex:
            _lines.setdefault(self.key, self)
        self.look_now()

    def leave(self, place: Place) -> None:
        with _mutex:
            self.places.remove(place)
            if self.places:
                self.places[0].turn.set()
                return
            if _lines.get(self.key) is self:
                del _lines[self.key]
            connection, self.connection = self.connection, None
        keeper().discard(self.watch)
        if connection is not None:
            self.server.rest(connection, self.extension)

    def connected(self) -> RawConnection:
        """The line's connection for blocking pops, with nothing left to read on it."""
        if self.connection is None:
            self.connection, self.extension = self.server.waiting_connection()
        if self.extension is not None:
            self.extension.settle(True)
            self.extension = None
        return self.connection

    def disconnect(self) -> None:
        connection, self.connection, self.extension = self.connection, None, None
        if connection is not None:
            connection.disconnect()

    def wake(self) -> None:
        """End the blocking pop from another thread, as if its connection had broken."""
        sock: socket.socket | None = getattr(self.connection, "_sock", None)
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # It had.


class Watch(Job):
    """Keeps a line registered, and makes the grant for a holder that has vanished."""

    def __init__(self, line: Line) -> None:
        super().__init__(line.server, time.monotonic() + LOOK_EVERY)
        self._line = line
        self._lying = 0

    def call(self, now: float) -> Call:
        return self._line.request.watch(self._line.waiter)

    def answered(self, value: Any, sent_at: float) -> None:
        pttl, server_us, lying = map(int, value)
        self.due = time.monotonic() + LOOK_EVERY
        self._line.heard(pttl, Clock(server_us, sent_at))
        # A grant lies there although we wait: Redis does not know our blocking pop, its
        # connection has died without a word. Not at the first sight, it may just be on its way.
        self._lying = self._lying + 1 if lying else 0
        if lying:
            self.due = min(self.due, time.monotonic() + 0.2)
        if self._lying > 1:
            self._lying = 0
            self._line.wake()

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + LONGEST_PAUSE / 2


class Place:
    """One thread's place in a line."""

    def __init__(self, line: Line, client: Any, request: Request) -> None:
        self._line = line
        self._client = client
        self._request = request
        self.turn = threading.Event()

    def heard(self, pttl: int, clock: Clock) -> None:
        """Pass on what the attempt that led here has learnt."""
        if self._line.places[0] is self:
            self._line.heard(pttl, clock)

    def wait(self, deadline: float | None, margin: float) -> Granted | None:
        """Wait until the lock is ours, or until ``deadline`` (monotonic seconds).

        Raises:
            redis.exceptions.RedisError: the deadline came while the server could not be reached.
        """
        self._request = self._request._replace(deadline=deadline, margin=margin)
        try:
            while not self.turn.wait(self._request.left()):
                if deadline is not None:
                    return None
            return self._wait_through_outages()
        finally:
            self._line.leave(self)

    def _wait_through_outages(self) -> Granted | None:
        line, request = self._line, self._request
        pause, again = FIRST_PAUSE, False
        while True:
            try:
                connection = line.connected()
                granted = self._ask_again(connection) if again else None
                pause, again = FIRST_PAUSE, False
                return granted or self._pop(connection)
            except Exception as error:
                line.disconnect()
                if not is_outage(error) or request.left() <= 0:
                    raise
                logger.info("Waiting for %s: %s", printable(request.keys.lock), error)
                time.sleep(min(pause, request.left()))
                pause, again = min(pause * 2, LONGEST_PAUSE), True
            except BaseException:
                line.disconnect()
                raise

    def _ask_again(self, connection: RawConnection) -> Granted | None:
        """After an outage: the lock may be free, and the server may not know of us any more."""
        call = self._request.acquire(self._line.waiter)
        sent_at = time.monotonic()
        send(connection, call)
        taken, number, server_us = receive(connection, call)
        if taken:
            return self._request.acquired(number, sent_at)
        self._line.heard(int(number), Clock(int(server_us), sent_at))
        return None

    def _pop(self, connection: RawConnection) -> Granted | None:
        request = self._request
        wake = wake_key(request.keys.lock, request.token)
        while True:
            connection.send_command("BLPOP", request.keys.grants, wake, 0)
            try:
                while not connection.can_read(left := request.left()):
                    if left <= 0:
                        return self._last_try(connection, wake)
            except Exception:
                raise
            except BaseException:
                self._give_up(connection, wake)
                raise
            granted = self._popped(connection, connection.read_response())
            if granted is not None:
                return granted

    def _popped(self, connection: RawConnection, reply: Any) -> Granted | None:
        """What the pop brought: the lock, or nothing (the farewell, or a grant that is over)."""
        line, request = self._line, self._request
        came_at = time.monotonic()
        source, element = reply
        if source != request.keys.grants:
            return None
        token, fence = parse_grant(element)
        closed = line.close_if_last()
        call = request.take(token, line.waiter if closed else b"")
        extension = Extension(connection, call, request)
        age = line.clock.age(fence) if line.clock else math.inf
        if abs(age) < FRESH and not request.chosen:
            line.extension = extension
            return request.granted(token, fence, age, came_at)._replace(settle=extension.settle)
        until = extension.settle(True)
        if until == -math.inf:
            if closed:
                line.reopen()
            return None
        if until is None:
            raise RedisTimeoutError("the connection broke while a grant was taken")
        return request.taken(token, fence, came_at, until)

    def _last_try(self, connection: RawConnection, wake: bytes) -> Granted | None:
        request = self._request
        sent_at = time.monotonic()
        try:
            taken, number, _ = self._leave(wake, try_again=True)
        except RedisTimeoutError:
            # It may still be carried out; what it gets then is nobody's.
            keeper().add(Abandoned(self._line.server, request))
            self._line.disconnect()
            return None
        popped = self._popped(connection, connection.read_response())
        return request.acquired(number, sent_at) if taken else popped

    def _leave(self, wake: bytes, *, try_again: bool) -> Any:
        waiter = self._line.waiter if self._line.close_if_last() else b""
        call = self._request.leave(waiter, wake, try_again=try_again)
        return run(self._client, call, patience=LAST_TRY).value

    def _give_up(self, connection: RawConnection, wake: bytes) -> None:
        """The wait ends with an exception (KeyboardInterrupt, say): pass on what came."""
        try:
            self._leave(wake, try_again=False)
            source, element = connection.read_response()
            if source == self._request.keys.grants:
                run(self._client, self._request.give_back(parse_grant(element)[0]))
        except (RedisError, OSError) as error:
            # At worst the grant runs out by itself.
            name = printable(self._request.keys.lock)
            logger.info("Left the wait for %s without Redis: %s", name, error)


_lines: dict[tuple[Server, bytes], Line] = {}
_mutex = threading.RLock()


def is_waited_for(client: Any, key: bytes) -> bool:
    """Whether a thread of this process already waits for the lock, so that others come after."""
    return bool(_lines) and (server_of(client), key) in _lines


def enter(client: Any, request: Request, waiter: bytes) -> Place:
    """A place at the end of the line for the lock; the first one is registered as ``waiter``."""
    server = server_of(client)
    with _mutex:
        line = _lines.get((server, request.keys.lock))
        fresh = line is None
        if line is None:
            line = _lines[server, request.keys.lock] = Line(server, request, waiter)
        place = Place(line, client, request)
        line.places.append(place)
        if line.places[0] is place:
            place.turn.set()
    if fresh:
        keeper().add(line.watch)
    return place


def _after_fork_in_child() -> None:
    global _mutex
    _mutex = threading.RLock()
    _lines.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
