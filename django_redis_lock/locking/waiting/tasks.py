"""How a task waits for a lock. See ``steps`` for the rules.

Another task reads the reply to the blocking pop, and is not cancelled: cancelling a read would
close the connection, and lose the grant that may be on it.
"""

from __future__ import annotations

import asyncio
import math

from redis.exceptions import NoScriptError, RedisError

from ...clock import time
from ...keeper import keeper
from ...protocol import (
    LAST_TRY_SECONDS,
    AcquireRequest,
    Acquisition,
    Call,
    Refused,
    Reply,
    printable,
)
from ...steps import adrive
from ...threads import get_logger
from ...transport import Client, in_background, pack, server_of
from ...transport.aio_client import aconnect, arun
from ...transport.aio_connection import AsyncRawConnection
from .queue import PopReply, WaitQueue
from .steps import Waiter

logger = get_logger("django_redis_lock.waiting")

#: Seconds the answer about a grant may take before its connection is given up.
ANSWER_TIMEOUT_SECONDS = 5.0


class PendingAnswer:
    """The answer to TAKE_GRANT, read in the background."""

    def __init__(self, connection: AsyncRawConnection, call: Call, until: float) -> None:
        self._until = until
        self._reading = asyncio.ensure_future(self._read(connection, call))

    async def _read(self, connection: AsyncRawConnection, call: Call) -> float | None:
        try:
            taken = await asyncio.wait_for(_answer(connection, call), ANSWER_TIMEOUT_SECONDS)
        except (RedisError, asyncio.TimeoutError):
            connection.disconnect()
            keeper().hurry()  # Unknown; a renewal tells.
            return None
        return self._until if taken else -math.inf

    def read_reply(self, wait: bool) -> float | None:
        """See ``PendingLifetime``. It never waits: the loop that asks is the one that reads."""
        done = self._reading.done() and not self._reading.cancelled()
        return self._reading.result() if done else None

    async def confirmed(self) -> float | None:
        return await asyncio.shield(self._reading)


async def _answer(connection: AsyncRawConnection, call: Call) -> Reply:
    """The reply to ``call``; the script is sent to a server that does not know it."""
    try:
        return await connection.request(pack(call))
    except NoScriptError:
        return await connection.request(pack(call, known=False))


class TaskQueue(WaitQueue):
    """A queue of the tasks of one event loop.

    Attributes:
        reading: reads the reply to the blocking pop.
    """

    connection: AsyncRawConnection | None = None
    pending: PendingAnswer | None = None
    reading: asyncio.Future[Reply] | None = None

    async def connect(self, client: Client) -> None:
        if self.pending is not None:
            await self.pending.confirmed()
            self.pending = None
        if self.connection is None:
            self.node = self.server.seen_at(self.request.keys)
            self.connection = await aconnect(client, self.request.keys, timeout=5.0)

    async def begin_pop(self, command: bytes) -> None:
        assert self.connection is not None
        self.reading = self.connection.request(command)

    async def pop_ended(self, seconds: float) -> bool:
        assert self.reading is not None
        await time.wait({self.reading}, seconds)
        return self.reading.done()

    def reply(self) -> PopReply:
        reading, self.reading = self.reading, None
        assert reading is not None
        reply: PopReply = reading.result()
        return reply

    async def send_take_grant(self, call: Call, until: float) -> PendingAnswer:
        assert self.connection is not None
        self.pending = PendingAnswer(self.connection, call, until)
        return self.pending

    async def disconnect(self) -> None:
        self.drop()

    def drop(self) -> None:
        connection, self.connection, self.pending = self.connection, None, None
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.cancel()
        if connection is not None:
            connection.disconnect()

    def end(self) -> None:
        connection, self.connection = self.connection, None
        pending, self.pending = self.pending, None
        if connection is None:
            return
        if asyncio._get_running_loop() is self.loop:
            in_background(self._close(connection, pending))
        else:  # A coroutine of this loop was closed, and nothing runs in the loop.
            connection.cut()

    @staticmethod
    async def _close(connection: AsyncRawConnection, pending: PendingAnswer | None) -> None:
        if pending is not None:
            await pending.confirmed()
        connection.disconnect()

    def wake(self) -> None:
        connection = self.connection
        if connection is None or self.loop is None:
            return
        if self.loop.is_closed():
            connection.cut()
        else:
            self.loop.call_soon_threadsafe(connection.disconnect)


class TaskWaiter(Waiter):
    """A task that waits."""

    queue: TaskQueue

    def __init__(self, client: Client, request: AcquireRequest) -> None:
        queue = TaskQueue(server_of(client), request, asyncio.get_running_loop())
        super().__init__(client, request, queue)

    async def wait(self, refused: Refused | None = None) -> Acquisition | None:
        """As ``ThreadWaiter.wait``; cancelling it leaves no trace and loses no grant."""
        try:
            return await adrive(self._wait(refused))
        except asyncio.CancelledError:
            await self._cancel_pop()
            self.queue.abandon(self)
            raise
        except BaseException as error:
            if self.queue.is_led_by(self):
                self._stop_reading(error)
            self.queue.abandon(self)
            raise
        finally:
            self.queue.leave(self)

    def _stop_reading(self, error: BaseException) -> None:
        """The wait ends with ``error``, and the queue's connection is about to be closed."""
        reading = self.queue.reading
        if reading is None:
            return
        if not isinstance(error, GeneratorExit):
            self.queue.drop()  # The next must not wait behind this pop.
            return
        # Nothing runs in this loop any more, perhaps it is closed.
        self.queue.reading = None
        if reading.done() and not reading.cancelled() and not reading.exception():
            self.release_grant_in(reading.result())

    async def _cancel_pop(self) -> None:
        """The wait is cancelled: pass on the grant that the blocking pop may have returned."""
        queue, connection, reading = self.queue, self.queue.connection, self.queue.reading
        if reading is None or connection is None or not queue.is_led_by(self):
            return
        queue.connection = queue.reading = None
        # On its own, so that a second cancellation does not stop it half-way.
        leaving = self._give_up(connection, reading)
        await asyncio.shield(in_background(leaving))

    async def _give_up(
        self, connection: AsyncRawConnection, reading: asyncio.Future[Reply]
    ) -> None:
        request = self._request
        try:
            leave = request.leave_call(self.queue.id_to_unregister(), try_again=False)
            await self._run(leave, time.monotonic() + LAST_TRY_SECONDS)
            self._reply = reply = await asyncio.wait_for(reading, ANSWER_TIMEOUT_SECONDS)
            if (grant := self.queue.grant_in(reply)) is not None:
                release = request.release_call(grant.token, place=grant.place)
                await arun(self._client, release)
        except (RedisError, asyncio.TimeoutError) as error:
            fields = {"lock": printable(request.keys.lock), "error": error}
            logger.info("Left the wait for %(lock)s without Redis: %(error)s", fields)
        finally:
            connection.disconnect()

    async def _run(self, call: Call, until: float | None) -> Reply:
        return (await arun(self._client, call, until=until)).value

    async def _sleep(self, seconds: float) -> None:
        await time.asleep(seconds)

    def _new_turn(self) -> TaskWakeEvent:
        return TaskWakeEvent()


class TaskWakeEvent:
    """``threading.Event`` for tasks; waiting for it loses no cancellation."""

    def __init__(self) -> None:
        self._event: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        if not self._event.done() and not self._event.get_loop().is_closed():
            self._event.set_result(None)

    async def wait(self, seconds: float) -> bool:
        if not self._event.done():
            await time.wait({self._event}, seconds)
        return self._event.done()
