"""How a thread waits for a lock: first in memory, behind the other threads of its process; then,
as its process's only one, in Redis, with a blocking pop on the lock's list of grants.

Redis serves blocked clients in the order in which they came and forgets those whose connection is
gone: that is the whole fair queue. So the pop stays open for the entire wait, without a timeout of
its own; whoever times out and asks again has lost its place. To end a wait, LEAVE pushes an element
to a second list that the same pop listens to; what the pop answers then says beyond doubt whether
a grant came first.

A waiter that a signal handler interrupts closes its connection. A grant that arrives in just that
moment is lost with it, and ends with its own short lifetime.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any

from redis.exceptions import NoPermissionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...notices import get_logger
from ...protocol import LAST_TRY_SECONDS, AcquireRequest, Acquisition, printable, wake_key
from ...transport import (
    RawConnection,
    ServerBusy,
    is_outage,
    may_have_run,
    note_sent,
    pack_words,
    receive,
    run,
    send,
    server_of,
)
from .queue import ReceivedGrant, Waiter, join
from .thread_line import PendingReply, ThreadQueue, ThreadWakeEvent

__all__ = ["ThreadWaiter"]

logger = get_logger("django_redis_lock.waiting")

#: Pauses between attempts to reach a server that is away, in seconds.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


class ThreadWaiter(Waiter[ThreadQueue]):
    """One thread's place in a line."""

    turn: ThreadWakeEvent | None
    new_turn = ThreadWakeEvent

    def __init__(self, client: Any, request: AcquireRequest) -> None:
        self._client = client
        self._request = request
        #: What the last blocking pop answered.
        self._reply: list[bytes] | None = None
        #: Whether there was no answer to something that Redis may have carried out.
        self._unheard = False
        self.line = ThreadQueue(server_of(client), request)

    def wait(self) -> Acquisition | None:
        """Wait until the lock is ours, or until the request's deadline. A caller that is
        interrupted before it has noted the outcome must release ``AcquireRequest.may_hold``.

        Raises:
            redis.exceptions.RedisError: the deadline came while the server could not be reached.
        """
        try:
            join(self, self.line)
            try:
                granted = self._wait()
            except Exception:
                self._leave_anywhere()
                raise
            self.line.leave(self)
            return granted
        except Exception:
            raise
        except BaseException:  # It may also have come while an error was handled.
            self._leave_anywhere()
            raise

    def _leave_anywhere(self) -> None:
        """Leave no trace, wherever the wait has stopped. Nothing is asked of Redis here: the keeper
        does that, in its own thread, which no signal interrupts."""
        self._abandon_in(self._reply)
        if self.line.led_by(self):
            self.line.disconnect()  # What is half sent or half read there is of no use.
        self.line.abandon(self)

    def _wait(self) -> Acquisition | None:
        turn = self.turn
        while turn is not None and not turn.wait(self._request.left()):
            if self._request.deadline is not None:
                return None
        # Who finds Redis away at the first question is told so; who waits already, waits on. A
        # server that is busy with somebody's script has answered: that will pass.
        with suppress(ServerBusy):
            if not self.line.registered and (granted := self._ask()):
                return granted if turn is None else granted._replace(contended=True)
        granted = self._wait_through_outages()
        return granted and granted._replace(contended=True)

    def _ask(self) -> Acquisition | None:
        """Take the lock if it is free, else get on the register."""
        sent_at = time.monotonic()
        call, patience = self.line.ask(self._request), self._request.patience()
        reply = run(self._client, call, patience=patience).value
        self._request = self._request.with_margin(sent_at)
        return self.line.asked(self._request, reply, sent_at)

    def _wait_through_outages(self) -> Acquisition | None:
        line, pause, away_since = self.line, FIRST_PAUSE, math.inf
        while True:
            try:
                if not line.registered and (granted := self._ask()):
                    return granted
                pause, away_since = FIRST_PAUSE, math.inf
                return self._wait_in_redis(line.connected())
            except NoPermissionError:
                logger.info("No right to block; polling for %s", printable(line.request.keys.lock))
                line.disconnect()
                return self._poll()
            except Exception as error:
                line.disconnect()
                line.server.on_error(error)
                self._unheard = self._unheard or may_have_run(error)
                away_since = min(away_since, time.monotonic())
                waits_on = time.monotonic() < away_since + self._request.outage_patience
                # At the deadline, one more question: the keeper may have ended the pop just then.
                over = self._request.left() <= 0 and not line.registered
                if not is_outage(error) or over or not waits_on:
                    note_sent(error, self._unheard)
                    raise
                # The lock may be free by then, and the server may not know of us any more.
                line.registered = False
                logger.info("Waiting for %s: %s", printable(line.request.keys.lock), error)
                time.sleep(min(pause, self._request.left()))
                pause = min(pause * 2, LONGEST_PAUSE)

    def _wait_in_redis(self, connection: RawConnection) -> Acquisition | None:
        request, keys = self._request, self._request.keys
        wake = wake_key(keys.lock, request.token)
        while True:
            connection.send_packed_command([pack_words(b"BLPOP", keys.grants, wake, b"0")])
            # The system waits for 24 days at most.
            while not connection.can_read(min(left := request.left(), 3600.0)):
                if left <= 0:
                    return self._last_try(connection, wake)
            granted = self._popped(connection)
            if granted is None and not self.line.registered:
                granted = self._ask()
            if granted is not None:
                return granted

    def _poll(self) -> Acquisition | None:
        """Wait without a blocking pop, which this Redis user may not use."""
        while (left := self._request.left()) > 0:
            time.sleep(min(self._request.sleep, left))
            if granted := self._ask():
                return granted
        return None

    def _popped(self, connection: RawConnection) -> Acquisition | None:
        """What the pop brought: the lock, or nothing (the farewell, or a grant that is over)."""
        # Kept where ``_leave_anywhere`` finds it.
        self._reply = connection.read_response()
        came = self.line.came(self._request, self._reply)
        if came is None:
            return None
        self._request.may_hold.append((came.token, b""))
        try:
            return self._take(connection, came)
        except Exception:
            # Redis may carry it out all the same; then the lock would be nobody's.
            self._abandon(came.token)
            raise

    def _take(self, connection: RawConnection, came: ReceivedGrant) -> Acquisition | None:
        until = self._request.until(time.monotonic())
        if came.believed is not None:
            node = self.line.node or self.line.server
            extension = PendingReply(connection, came.call, node, until)
            self.line.extension = extension
            return came.believed._replace(pending=extension)
        send(connection, came.call)
        taken = receive(connection, came.call)
        return self.line.confirmed(self._request, came, until if taken else -math.inf)

    def _last_try(self, connection: RawConnection, wake: bytes) -> Acquisition | None:
        sent_at = time.monotonic()
        leave = self._request.leave(self.line.farewell(), wake, try_again=True)
        try:
            reply = run(self._client, leave, patience=LAST_TRY_SECONDS).value
        except RedisTimeoutError:
            # It may still be carried out, and what it gets then is nobody's; or it was never sent.
            self._abandon(self._request.token)
            self.line.listed_again()
            self.line.disconnect()
            return None
        won = self.line.won(self._request, reply, sent_at)
        if not connection.can_read(LAST_TRY_SECONDS):
            self.line.disconnect()  # Dead without a word; a grant lost on it runs out by itself.
            return won
        if won is None:
            return self._popped(connection)
        self._reply = connection.read_response()
        return self._keep_one(won, self._reply)
