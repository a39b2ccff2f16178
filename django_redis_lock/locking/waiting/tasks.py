"""How a task waits for a lock: ``waiting`` with ``await``.

A reply is read by a task of its own, which nobody cancels: cancelling a read would close the
connection, and lose the grant that may be on it.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import Any

from redis.exceptions import NoPermissionError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...notices import get_logger
from ...protocol import LAST_TRY_SECONDS, AcquireRequest, Acquisition, printable, wake_key
from ...transport import (
    AsyncRawConnection,
    ServerBusy,
    arun,
    asend,
    cancellable,
    is_outage,
    may_have_run,
    note_sent,
    pack_words,
    server_of,
)
from .aio_line import ANSWER, TaskExtension, TaskQueue, TaskWakeEvent, in_background
from .queue import Waiter, join
from .threads import FIRST_PAUSE, LONGEST_PAUSE

__all__ = ["TaskWaiter"]

logger = get_logger("django_redis_lock.waiting")


class TaskWaiter(Waiter[TaskQueue]):
    """One task's place in a line."""

    turn: TaskWakeEvent | None
    new_turn = TaskWakeEvent

    def __init__(self, client: Any, request: AcquireRequest) -> None:
        self._client = client
        self._request = request
        #: Whether there was no answer to something that Redis may have carried out.
        self._unheard = False
        join(self, TaskQueue(server_of(client), request, asyncio.get_running_loop()))

    async def wait(self) -> Acquisition | None:
        """As ``ThreadWaiter.wait``; cancelling it leaves no trace and loses no grant."""
        try:
            turn = self.turn
            while turn is not None and not await turn.wait(self._request.left()):
                if self._request.deadline is not None:
                    return None
            with suppress(ServerBusy):
                if not self.line.registered and (granted := await self._ask()):
                    return granted if turn is None else granted._replace(contended=True)
            granted = await self._wait_through_outages()
            return granted and granted._replace(contended=True)
        except BaseException:
            self.line.abandon(self)
            raise
        finally:
            self.line.leave(self)

    async def _ask(self) -> Acquisition | None:
        """Take the lock if it is free, else get on the register."""
        sent_at = time.monotonic()
        call, patience = self.line.ask(self._request), self._request.patience()
        reply = (await cancellable(arun(self._client, call, patience=patience))).value
        self._request = self._request.with_margin(sent_at)
        return self.line.asked(self._request, reply, sent_at)

    async def _wait_through_outages(self) -> Acquisition | None:
        line, pause, away_since = self.line, FIRST_PAUSE, math.inf
        while True:
            try:
                if not line.registered and (granted := await self._ask()):
                    return granted
                pause, away_since = FIRST_PAUSE, math.inf
                return await self._pop(await cancellable(line.connected(self._client)))
            except NoPermissionError:
                logger.info("No right to block; polling for %s", printable(line.request.keys.lock))
                await line.disconnect()
                return await self._poll()
            except Exception as error:
                await line.disconnect()
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
                await asyncio.sleep(min(pause, self._request.left()))
                pause = min(pause * 2, LONGEST_PAUSE)

    async def _pop(self, connection: AsyncRawConnection) -> Acquisition | None:
        request = self._request
        wake = wake_key(request.keys.lock, request.token)
        while True:
            pop = pack_words(b"BLPOP", request.keys.grants, wake, b"0")
            await connection.send_packed_command([pop])
            # Whatever fails, the line's connection is closed here; a reader that is collected with
            # its loop could not do it.
            reading = asyncio.ensure_future(connection.read_response(disconnect_on_error=False))
            try:
                while not (await asyncio.wait({reading}, timeout=(left := request.left())))[0]:
                    if left <= 0:
                        return await self._last_try(connection, reading, wake)
            except asyncio.CancelledError:
                # On its own, so that a second cancellation does not stop it half-way.
                leaving = self._give_up(connection, reading, wake)
                self.line.connection = None
                await asyncio.shield(in_background(leaving))
                raise
            except GeneratorExit:  # Nothing runs in this loop any more, perhaps it is closed.
                if reading.done() and not reading.cancelled() and not reading.exception():
                    self._abandon_in(reading.result())
                raise
            except BaseException:
                reading.cancel()  # Its connection is about to be closed.
                raise
            granted = await self._popped(connection, reading.result())
            if granted is None and not self.line.registered:
                granted = await self._ask()
            if granted is not None:
                return granted

    async def _poll(self) -> Acquisition | None:
        """Wait without a blocking pop, which this Redis user may not use."""
        while (left := self._request.left()) > 0:
            await asyncio.sleep(min(self._request.sleep, left))
            if granted := await self._ask():
                return granted
        return None

    async def _popped(self, connection: AsyncRawConnection, reply: Any) -> Acquisition | None:
        came = self.line.came(self._request, reply)
        if came is None:
            return None
        sent_at = time.monotonic()
        self._request.may_hold.append((came.token, b""))
        try:
            await asend(connection, came.call)
            extension = TaskExtension(connection, came.call, self._request.until(sent_at))
            self.line.extension = extension
            if came.believed is not None:
                return came.believed._replace(pending=extension)
            until = await extension.settled()
            if until is None:
                raise RedisTimeoutError("the connection broke while a grant was taken")
        except Exception:
            # Redis may carry it out all the same; then the lock would be nobody's.
            self._abandon(came.token)
            raise
        return self.line.confirmed(self._request, came, until)

    async def _last_try(
        self, connection: AsyncRawConnection, reading: asyncio.Future[Any], wake: bytes
    ) -> Acquisition | None:
        sent_at = time.monotonic()
        try:
            answer = await self._leave(wake, try_again=True)
        except RedisTimeoutError:
            self._abandon(self._request.token)
            self.line.listed_again()
            reading.cancel()
            await self.line.disconnect()
            return None
        won = self.line.won(self._request, answer, sent_at)
        if not (await asyncio.wait({reading}, timeout=LAST_TRY_SECONDS))[0]:
            reading.cancel()
            await self.line.disconnect()
            return won
        reply = reading.result()
        return await self._popped(connection, reply) if won is None else self._keep_one(won, reply)

    async def _leave(self, wake: bytes, *, try_again: bool) -> Any:
        call = self._request.leave(self.line.farewell(), wake, try_again=try_again)
        return (await cancellable(arun(self._client, call, patience=LAST_TRY_SECONDS))).value

    async def _give_up(
        self, connection: AsyncRawConnection, reading: asyncio.Future[Any], wake: bytes
    ) -> None:
        """The wait is cancelled: pass on what came."""
        try:
            await self._leave(wake, try_again=False)
            reply = await asyncio.wait_for(reading, ANSWER)
            if (grant := self.line.grant_in(reply)) is not None:
                await arun(self._client, self._request.give_back(grant[0]))
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            name = printable(self._request.keys.lock)
            logger.info("Left the wait for %s without Redis: %s", name, error)
        finally:
            await connection.disconnect(nowait=True)
