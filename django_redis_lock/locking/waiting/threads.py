"""How a thread waits for a lock. See ``steps`` for the rules."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import partial

from redis.exceptions import NoScriptError, RedisError

from ...clock import time
from ...keeper import SentOnce, keeper
from ...protocol import LAST_TRY_SECONDS, AcquireRequest, Acquisition, Call, Refused, Reply
from ...steps import drive
from ...threads import ThreadEvent
from ...transport import Client, RawConnection, Server, pack, run, server_of
from ...transport.server import has_socket, read, readable, shut
from .queue import PopReply, WaitQueue
from .steps import POPPING, MayNotBlock, Waiter


class PendingReply:
    """The answer to TAKE_GRANT, for which its caller does not wait. It is read by whoever has
    claimed it, and by nobody else: the thread that sends the next call on that connection, or one
    that asks for the answer."""

    def __init__(self, connection: RawConnection, call: Call, server: Server, until: float) -> None:
        self._connection = connection
        self._server = server
        self._until = until
        self._pid = os.getpid()
        self._claims = [object()]  # As a list, because to take out the only one is atomic.
        self._read = ThreadEvent()
        self._answer: float | None = None
        # By its source until the server knows it: the next command may follow before the answer.
        self._script = call.script.sha
        connection.send_packed_command([pack(call, known=self._script in server.known_scripts)])
        server.known_scripts.add(self._script)

    def confirmed(self) -> float | None:
        return self.read_reply(True)

    def read_reply(self, wait: bool) -> float | None:
        """See ``PendingLifetime``."""
        if self._pid != os.getpid():
            return None  # The answer is the parent's; to read it would leave the parent without.
        if not self.claim():
            if wait:
                self._read.wait(self._server.timeout)
        elif wait or self._has_come():
            self.receive()
        else:
            self._claims.append(object())
        return self._answer

    def claim(self) -> bool:
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    @property
    def is_read(self) -> bool:
        return self._read.wait(0)

    def receive(self) -> None:
        try:
            taken = read(self._connection)
        except NoScriptError:
            self._server.known_scripts.discard(self._script)
            keeper().hurry()  # A renewal makes up for it.
        except RedisError:
            self._connection.disconnect()
            keeper().hurry()  # Unknown; a renewal tells.
        except BaseException:  # A signal handler's: half of the answer may be left there.
            self._connection.disconnect()
            raise
        else:
            self._server.answered()
            self._answer = self._until if taken else -math.inf
        finally:
            self._read.set()

    def _has_come(self) -> bool:
        return readable(self._connection)


class ThreadQueue(WaitQueue):
    """A queue of threads."""

    connection: RawConnection | None = None
    pending: PendingReply | None = None

    def connect(self, client: Client) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.read_reply(True)
            if not pending.is_read:  # By another thread, which still waits for it.
                self.disconnect()
        if self.connection is None:
            self.node = self.server.locate(self.request.keys)
            self.connection = self.node.checkout()
            if not has_socket(self.connection):
                self.disconnect()
                raise MayNotBlock

    def begin_pop(self, command: bytes) -> None:
        self._connected.send_packed_command([command])

    def pop_ended(self, seconds: float) -> bool:
        return any(map(partial(readable, self._connected), time.parts(min(seconds, 3600.0))))

    def reply(self) -> PopReply:
        reply: PopReply = read(self._connected)
        return reply

    def send_take_grant(self, call: Call, until: float) -> PendingReply:
        self.pending = PendingReply(self._connected, call, self.node or self.server, until)
        return self.pending

    def disconnect(self) -> None:
        connection, self.connection, self.pending = self.connection, None, None
        if connection is not None:
            connection.disconnect()

    def end(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None and self.node is not None:
            self.node.checkin(connection, self.pending)

    def wake(self) -> None:
        shut(self.connection)

    @property
    def _connected(self) -> RawConnection:
        assert self.connection is not None
        return self.connection


class ThreadWaiter(Waiter):
    """A thread that waits."""

    queue: ThreadQueue

    def __init__(self, client: Client, request: AcquireRequest) -> None:
        super().__init__(client, request, ThreadQueue(server_of(client), request))

    def wait(self, refused: Refused | None = None) -> Acquisition | None:
        """Wait until the lock is ours, or until the request's deadline.

        Args:
            refused: the reply to the ACQUIRE with the request's waiter id, if one was sent.

        Raises:
            redis.exceptions.RedisError: the deadline came while the server could not be reached.
        """
        try:
            acquired = drive(self._wait(refused))
            self.queue.leave(self)
            return acquired
        except BaseException:
            try:
                self._abandon()
            except BaseException:  # An interrupt has cut it short.
                self._abandon()
                raise
            raise

    def _abandon(self) -> None:
        """Leave no trace, wherever the wait has stopped. Nothing is sent to Redis here: the keeper
        does that, in its own thread, which no signal interrupts."""
        request, queue = self._request, self.queue
        if queue.is_led_by(self):
            if queue.connection is not None and self._reply is POPPING:
                keeper().add(AbandonedPop(self, request.leave_call(b"", try_again=False)))
                queue.connection = None
            queue.disconnect()
        if self._reply is not POPPING:
            self.release_grant_in(self._reply)
        self._reply = None
        queue.abandon(self)

    def _run(self, call: Call, until: float | None) -> Reply:
        return run(self._client, call, until=until).value

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _new_turn(self) -> ThreadEvent:
        return ThreadEvent()


class AbandonedPop(SentOnce):
    """Ends the blocking pop of a waiter that a signal handler interrupted, and gives back the grant
    that may have come first. One that was just being read is lost, and ends by itself."""

    def __init__(self, waiter: ThreadWaiter, leave: Call) -> None:
        super().__init__(waiter.queue.server, leave)
        self._waiter, self._connection = waiter, waiter.queue._connected

    def replied(self, value: Reply, sent_at: float) -> None:
        with suppress(RedisError):
            if readable(self._connection, LAST_TRY_SECONDS):
                self._waiter.release_grant_in(read(self._connection))
        self._connection.disconnect()
        super().replied(value, sent_at)

    def failed(self, error: Exception, now: float) -> None:
        self._connection.disconnect()
        super().failed(error, now)
