"""Connections of an event loop, on each of which the calls of several tasks may be on their way.

Redis answers in the order of the calls. So a task that no longer waits, because it was cancelled or
its time is over, leaves its reply to be dropped, and the connection stays: what is sent next,
such as the end of a flight that the task may lead by then, cannot overtake its call. But nobody
should wait behind much that nobody wants, and Redis should not have to keep it: when nobody waits
for what is to come, and that is large, late or many replies, the connection is closed.

redis-py connects, with its credentials and options; then the connection takes the transport over.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import socket
from collections import deque
from collections.abc import Awaitable, Collection
from contextlib import suppress
from typing import Any, TypeVar

from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import real_time, time
from ..protocol import Reply
from .address import (
    HAS_HIREDIS,
    INCOMPLETE,
    PROBE_SECONDS,
    TRUSTED_SECONDS,
    Pool,
    connecting,
    own_settings,
    reader_for,
    unguarded,
)
from .refusals import LostLogin
from .server import reset_when_closed

T = TypeVar("T")

PING = b"*1\r\n$4\r\nPING\r\n"
#: Seconds after its time in which a loop that stood still reads a reply that has come.
READ_FIRST_SECONDS = 0.01

#: Until a request or a reply of so many bytes is complete, calls go to another connection.
LARGE = 65_536
#: So do they while so many replies are to come for which nobody waits.
MOST_GIVEN_UP = 8


async def connect_to(
    pool: Pool, timeout: float, reply_timeout: float | None = None
) -> AsyncRawConnection:
    """A new connection to where those of ``pool`` lead, made within ``timeout`` seconds, on which a
    reply may take ``reply_timeout`` seconds, None without end."""
    connection_class = unguarded(pool.connection_class)
    settings = own_settings(connection_class, pool.connection_kwargs, timeout)
    connection = connection_class(**settings | {"retry": Retry(NoBackoff(), 0)})
    loop = asyncio.get_running_loop()
    with connecting():
        try:
            await connection.connect()
        except RuntimeError:
            if asyncio._get_running_loop() is loop:
                raise
            raise GeneratorExit from None  # The loop was thrown away; redis-py cannot close in it.
    if HAS_HIREDIS and type(connection) in (Connection, SSLConnection, UnixDomainSocketConnection):
        return DirectConnection(connection, reply_timeout)
    if not hasattr(connection, "write") and not hasattr(connection._writer, "write"):
        raise TypeError(
            f"tasks cannot use {type(connection).__name__}, which has no transport: without "
            "Redis, use django_redis_lock.cache.LocMemCache or django_redis_lock.testing"
        )
    connection.socket_timeout = None  # ``AsyncRawConnection`` watches the time.
    return AsyncRawConnection(connection, reply_timeout)


class _Call:
    """A call whose replies are to come."""

    __slots__ = ("missing", "replies", "reply", "sent_at")

    def __init__(self, reply: asyncio.Future[Reply], replies: int | None) -> None:
        self.reply = reply
        self.missing = replies or 1
        self.replies: list[Reply] | None = None if replies is None else []
        self.sent_at = real_time.monotonic()

    def add(self, reply: Reply) -> bool:
        """The next ``reply`` has come; returns whether it was the last."""
        self.missing -= 1
        if self.replies is not None:
            self.replies.append(reply)
            if self.missing:
                return False
            errors = [each for each in self.replies if isinstance(each, RedisError)]
            reply = errors[0] if errors else self.replies
        self.finish(reply)
        return True

    def finish(self, reply: Reply) -> None:
        if self.reply.done():  # Its task does not wait for it any more.
            return
        if isinstance(reply, RedisError):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)


class AsyncRawConnection:
    """A connection of the running loop. It never connects again. It reads with redis-py's parser.

    Args:
        connection: redis-py's, connected.
        timeout: seconds without any part of a reply, None without end.
    """

    generation = 0  #: See ``Server.renew``.
    _moved_at = 0.0  #: When a part of a reply came.

    def __init__(self, connection: Any, timeout: float | None) -> None:
        self._connection = connection
        self._writer = connection._writer  # None in memory.
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._calls: deque[_Call] = deque()
        self._given_up = 0  # Those of the calls for whose replies nobody waits any more.
        self._answered_at = self._connected_at = time.monotonic()
        self._retired = self._in_doubt = False
        self._reading: asyncio.Future[None] | None = None
        self.in_transfer = False  #: Whether something large is on its way.

    @property
    def is_new(self) -> bool:
        """Whether no call has been answered on it."""
        return self._answered_at == self._connected_at

    def is_old(self) -> bool:
        """Whether it was idle for so long that the network may have forgotten it."""
        return time.monotonic() - self._answered_at >= TRUSTED_SECONDS

    def is_sound(self) -> bool:
        """Whether it is open and in no doubt; something large may be on its way."""
        return not (self._retired or self._in_doubt or self.is_closed())

    def takes_calls(self) -> bool:
        """Whether it is sound, with neither much on its way, nor a call unanswered for long."""
        if self.in_transfer or self._given_up >= MOST_GIVEN_UP or not self.is_sound():
            return False
        if not self._calls:
            return True
        return real_time.monotonic() - self._calls[0].sent_at < TRUSTED_SECONDS

    def doubt(self) -> None:
        """It is silent, perhaps by its own fault: the next calls go to another connection."""
        self._in_doubt = True

    async def still_answers(self) -> bool:
        """Whether the server answers on it; asked only if it was idle."""
        if self.has_ended():
            return False
        if not self.is_old():
            return True
        reply = self.request(PING)
        await wait_awake({reply}, min(PROBE_SECONDS, (self._timeout or math.inf) / 2))
        if not reply.done():
            self.give_up(reply)
            return False
        error = reply.exception()  # ResponseError: this user may not, or the server is busy.
        return error is None or isinstance(error, ResponseError)

    def request(self, command: bytes, replies: int | None = None) -> asyncio.Future[Reply]:
        """Send ``command``; its reply, or a list of so many. Of these, the first error is raised
        when all have come.

        Raises:
            redis.exceptions.ConnectionError: the connection was closed.
        """
        if self.is_closed():
            raise RedisConnectionError("The connection was closed.")
        call = _Call(self._loop.create_future(), replies)
        self._calls.append(call)
        self._send(command)
        if self._timer is None and self._timeout is not None:
            self._timer = self._loop.call_later(self._timeout, self._due)
        return call.reply

    def give_up(self, reply: asyncio.Future[Reply]) -> None:
        """Nobody waits for ``reply`` any more, if it has not come: it is dropped when it comes."""
        if reply.cancel() or reply.cancelled():
            self._given_up += 1
            self._close_if_useless()

    def retire(self) -> None:
        """Close it when nobody waits for a reply any more."""
        self._retired = True
        self._close_if_useless()

    def _close_if_useless(self) -> None:
        """Close it if nobody waits for a reply, and no further call is sent on it."""
        is_left = self._given_up or self._retired
        if is_left and len(self._calls) <= self._given_up and not self.takes_calls():
            self.disconnect()

    def disconnect(self) -> None:
        """Close it; those that wait for a reply get an error."""
        if self._reading is not None:
            self._reading.cancel()
        if self._calls and self._writer is not None:
            reset_when_closed(self._writer.get_extra_info("socket"))
        self._fail(None)
        self._close()

    def _close(self) -> None:
        (getattr(self._connection, "cut", None) or self._connection._close)()

    def cut(self) -> None:
        """Close it, from any thread. Its loop may no longer run; Python would close it when it
        collects the loop, but until then a grant could be sent to it."""
        if hasattr(self._connection, "cut"):
            self._connection.cut()
            return
        with suppress(AttributeError, OSError):  # It had been closed.
            theirs = self._writer.get_extra_info("socket").fileno()
            with socket.socket(fileno=os.dup(theirs)) as ours:
                ours.shutdown(socket.SHUT_RDWR)

    def _send(self, command: bytes) -> None:
        (getattr(self._connection, "write", None) or self._writer.write)(command)
        # With its loop's other tasks it may have been cancelled before it began.
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            while self._calls:
                try:
                    reply = await self._connection.read_response(disconnect_on_error=False)
                except (ResponseError, BusyLoadingError, LostLogin) as refusal:
                    reply = refusal
                self._on_reply(reply)
                self._close_if_useless()
        except Exception as error:  # redis-py's, or its parser's: not what Redis would send.
            self._fail(error)
            self._close()
        finally:
            self._reading = None

    def is_closed(self) -> bool:
        if self._writer is None:
            return not self._connection.is_connected
        return bool(self._writer.is_closing() or self._connection._reader.at_eof())

    def has_ended(self) -> bool:
        """Whether the server has closed it while no call was on its way, although the loop has not
        yet heard of that."""
        if self._calls or self._writer is None or not hasattr(select, "poll"):
            return False
        poll = select.poll()
        poll.register(self._writer.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _on_reply(self, reply: Reply) -> None:
        self._answered_at = time.monotonic()
        if self._calls[0].add(reply) and self._calls.popleft().reply.cancelled():
            self._given_up -= 1

    def _due(self) -> None:
        self._timer = self._loop.call_later(READ_FIRST_SECONDS, self._expire)

    def _expire(self) -> None:
        """Give up the calls whose time is over, and the connection if that is all of them."""
        assert self._timeout is not None
        self._timer, now = None, real_time.monotonic()
        for call in self._calls:
            left = max(call.sent_at, self._moved_at) + self._timeout - now
            if left > 0:
                self._timer = self._loop.call_later(left, self._due)
                return
            call.finish(RedisTimeoutError("Redis did not answer in time"))
        if self._calls:
            self.disconnect()

    def _fail(self, error: BaseException | None) -> None:
        """It is closed, because of ``error`` or by the server."""
        if self._timer is not None:
            self._timer.cancel()
        calls, self._calls = self._calls, deque()
        why = f"The connection to Redis broke: {error}" if error else "Redis closed the connection"
        for call in calls:
            call.finish(RedisConnectionError(why))


class DirectConnection(AsyncRawConnection, asyncio.Protocol):
    """It takes the transport over from redis-py, and reads with hiredis."""

    _is_full = False  #: Whether the transport has enough to write for now.

    def __init__(self, connection: Any, timeout: float | None) -> None:
        super().__init__(connection, timeout)
        self._parser = reader_for(connection)
        self._unsent: list[bytes] = []
        self._unread = 0  # Bytes of the next reply.
        self._transport = self._writer.transport
        self._transport.set_protocol(self)
        self._transport.set_write_buffer_limits(LARGE)
        connection._writer = connection._reader = None  # It would close them at its end.

    def is_closed(self) -> bool:
        return bool(self._transport.is_closing())

    def _send(self, command: bytes) -> None:
        if len(self._calls) == 1:
            self._transport.write(command)
        else:  # With what other tasks send in this turn of the loop.
            if not self._unsent:
                self._loop.call_soon(self._flush)
            self._unsent.append(command)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed(data)
            self._unread += len(data)
            while (reply := self._parser.gets()) is not INCOMPLETE:
                self._unread = 0
                self._on_reply(reply)
            if self._unread:
                self._moved_at = real_time.monotonic()
            self.in_transfer = self._is_full or self._unread >= LARGE
            self._close_if_useless()
        except Exception as error:  # Not what Redis would send.
            self._fail(error)
            self.disconnect()

    def pause_writing(self) -> None:
        self._is_full = self.in_transfer = True

    def resume_writing(self) -> None:
        self._is_full = self.in_transfer = False

    def eof_received(self) -> None:
        self.disconnect()  # Else the transport would first send what is left of large requests.

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error)

    def disconnect(self) -> None:
        if self._calls:
            reset_when_closed(self._transport.get_extra_info("socket"))
        self._transport.abort()


# -- how tasks wait for others, and are kept until they are done -----------------------------------

#: Parts of the time to wait; a standstill of the loop counts as one.
WAIT_PARTS = 10


async def wait_awake(tasks: Collection[asyncio.Future[T]], seconds: float) -> None:
    """Wait for ``tasks``, at most for ``seconds`` in which the loop ran. While it stands still,
    replies may come; the servers must not be taken to be down because of that."""
    pending = set(tasks)
    for _ in range(WAIT_PARTS):
        if pending:
            _, pending = await asyncio.wait(pending, timeout=seconds / WAIT_PARTS)


async def cancellable(work: Awaitable[T]) -> T:
    """``await work``, sure to end when it is cancelled. Before Python 3.12 ``asyncio.wait_for``,
    with which redis-py connects and sends, forgets a cancellation that comes just when it is
    done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # Looked at, so that asyncio does not report it.
        raise
    return task.result()


#: Tasks that nothing else refers to.
_background: set[object] = set()


def in_background(work: Awaitable[T]) -> asyncio.Future[T]:
    """Run ``work`` as a task that is kept until it is done."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task
