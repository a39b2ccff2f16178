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
import socket
import threading
import time
from typing import Any

from redis.exceptions import NoPermissionError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .calls import is_outage, may_have_run, note_sent, receive, run, send
from .grants import LAST_TRY, Granted, Request
from .hold import printable
from .keys import wake_key
from .line import Line, Place, join
from .scripts import Call
from .server import RawConnection, server_of

__all__ = ["ThreadLine", "ThreadPlace"]

logger = logging.getLogger("django_redis_lock.waiting")

#: Pauses between attempts to reach a server that is away, in seconds.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


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


class ThreadLine(Line):
    """A line of threads, with the connection its first one waits on."""

    connection: RawConnection | None = None
    extension: Extension | None = None

    def end(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None and self.node is not None:
            self.node.rest(connection, self.extension)

    def connected(self) -> RawConnection:
        """The connection for blocking pops, with nothing left to read on it."""
        if self.connection is None:
            self.node = self.server.at(self.request.keys)
            self.connection = self.node.borrow()
        if self.extension is not None:
            self.extension.settle(True)
            self.extension = None
        return self.connection

    def disconnect(self) -> None:
        connection, self.connection, self.extension = self.connection, None, None
        if connection is not None:
            connection.disconnect()

    def wake(self) -> None:
        sock: socket.socket | None = getattr(self.connection, "_sock", None)
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # It had broken.


class ThreadPlace(Place[ThreadLine]):
    """One thread's place in a line."""

    turn: threading.Event | None
    new_turn = threading.Event

    def __init__(self, client: Any, request: Request) -> None:
        self._client = client
        self._request = request
        #: Whether there was no answer to something that Redis may have carried out.
        self._unheard = False
        join(self, ThreadLine(server_of(client), request))

    def wait(self) -> Granted | None:
        """Wait until the lock is ours, or until the request's deadline.

        Raises:
            redis.exceptions.RedisError: the deadline came while the server could not be reached.
        """
        try:
            turn = self.turn
            while turn is not None and not turn.wait(self._request.left()):
                if self._request.deadline is not None:
                    return None
            # Who finds Redis away at the first question is told so; who waits already, waits on.
            if not self.line.registered and (granted := self._ask()):
                return granted if turn is None else granted._replace(contended=True)
            granted = self._wait_through_outages()
            return granted and granted._replace(contended=True)
        finally:
            self.line.leave(self)

    def _ask(self) -> Granted | None:
        """Take the lock if it is free, else get on the register."""
        sent_at = time.monotonic()
        call, patience = self.line.ask(self._request), self._request.patience()
        reply = run(self._client, call, patience=patience).value
        self._request = self._request.with_margin(sent_at)
        return self.line.asked(self._request, reply, sent_at)

    def _wait_through_outages(self) -> Granted | None:
        line, pause, away_since = self.line, FIRST_PAUSE, math.inf
        while True:
            try:
                if not line.registered and (granted := self._ask()):
                    return granted
                pause, away_since = FIRST_PAUSE, math.inf
                return self._pop(line.connected())
            except NoPermissionError:
                logger.info("No right to block; polling for %s", printable(line.request.keys.lock))
                line.disconnect()
                return self._poll()
            except Exception as error:
                line.disconnect()
                line.server.heard(error)
                self._unheard = self._unheard or may_have_run(error)
                away_since = min(away_since, time.monotonic())
                waits_on = time.monotonic() < away_since + self._request.endures
                if not is_outage(error) or self._request.left() <= 0 or not waits_on:
                    note_sent(error, self._unheard)
                    raise
                # The lock may be free by then, and the server may not know of us any more.
                line.registered = False
                logger.info("Waiting for %s: %s", printable(line.request.keys.lock), error)
                time.sleep(min(pause, self._request.left()))
                pause = min(pause * 2, LONGEST_PAUSE)
            except BaseException:
                line.disconnect()
                raise

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
            if granted is None and not self.line.registered:
                granted = self._ask()
            if granted is not None:
                return granted

    def _poll(self) -> Granted | None:
        """Wait without a blocking pop, which this Redis user may not use."""
        while (left := self._request.left()) > 0:
            time.sleep(min(self._request.sleep, left))
            if granted := self._ask():
                return granted
        return None

    def _popped(self, connection: RawConnection, reply: Any) -> Granted | None:
        """What the pop brought: the lock, or nothing (the farewell, or a grant that is over)."""
        came = self.line.came(self._request, reply)
        if came is None:
            return None
        try:
            extension = Extension(connection, came.call, self._request)
            if came.believed is not None:
                self.line.extension = extension
                return came.believed._replace(settle=extension.settle)
            until = extension.settle(True)
            if until is None:
                raise RedisTimeoutError("the connection broke while a grant was taken")
        except BaseException:
            # Redis may carry it out all the same; then the lock would be nobody's.
            self._abandon(came.token)
            raise
        return self.line.confirmed(self._request, came, until)

    def _last_try(self, connection: RawConnection, wake: bytes) -> Granted | None:
        sent_at = time.monotonic()
        try:
            taken, number, _ = self._leave(wake, try_again=True)
        except RedisTimeoutError:
            # It may still be carried out; what it gets then is nobody's.
            self._abandon(self._request.token)
            self.line.disconnect()
            return None
        won = self._request.acquired(number, sent_at) if taken else None
        if not connection.can_read(LAST_TRY):
            self.line.disconnect()  # Dead without a word; a grant lost on it runs out by itself.
            return won
        reply = connection.read_response()
        return self._popped(connection, reply) if won is None else self._keep_one(won, reply)

    def _leave(self, wake: bytes, *, try_again: bool) -> Any:
        call = self._request.leave(self.line.farewell(), wake, try_again=try_again)
        return run(self._client, call, patience=LAST_TRY).value

    def _give_up(self, connection: RawConnection, wake: bytes) -> None:
        """The wait ends with an exception (KeyboardInterrupt, say): pass on what came."""
        try:
            self._leave(wake, try_again=False)
            if (grant := self.line.grant_in(connection.read_response())) is not None:
                run(self._client, self._request.give_back(grant[0]))
        except (RedisError, OSError) as error:
            # At worst the grant runs out by itself.
            name = printable(self._request.keys.lock)
            logger.info("Left the wait for %s without Redis: %s", name, error)
