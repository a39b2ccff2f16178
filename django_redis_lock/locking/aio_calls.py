"""One Redis server as an event loop talks to it about locks: ``server`` with ``await``."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .calls import (
    FOR_COMMAND,
    Answer,
    admitted,
    is_pool_exhausted,
    may_have_run,
    note_sent,
    pack,
    worth_a_second_try,
)
from .scripts import Call
from .server import own_settings, server_of

__all__ = [
    "AsyncRawConnection",
    "cancellable",
    "connect",
    "cut",
    "receive",
    "run",
    "run_all",
    "send",
]

T = TypeVar("T")


class AsyncRawConnection(Protocol):
    """The part of redis-py's asyncio connections that is used here."""

    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = False) -> None: ...
    async def send_command(self, *args: Any) -> None: ...
    async def send_packed_command(self, command: list[bytes]) -> None: ...
    async def read_response(self) -> Any: ...


async def send(connection: AsyncRawConnection, call: Call) -> None:
    """Send ``call`` without waiting for the reply."""
    await connection.send_packed_command([pack(call)])


async def receive(connection: AsyncRawConnection, call: Call) -> Any:
    """The reply to ``call``; a server that does not know the script yet is taught it."""
    try:
        return await connection.read_response()
    except NoScriptError:
        await connection.send_packed_command([pack(call, known=False)])
        return await connection.read_response()


def cut(connection: AsyncRawConnection) -> None:
    """End ``connection``, whose loop cannot do that any more. Python would close it when it
    collects the loop's remains, but a grant made meanwhile would go to it."""
    writer: Any = getattr(connection, "_writer", None)
    try:
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)
    except (AttributeError, OSError):
        pass  # It had been closed.


async def cancellable(work: Coroutine[Any, Any, T]) -> T:
    """``await work``, sure to end when it is cancelled. Before Python 3.12 ``asyncio.wait_for``,
    with which redis-py sends, forgets a cancellation that comes just when it is done."""
    if sys.version_info >= (3, 12):
        return await work
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


async def run(client: Any, call: Call, *, patience: float | None = None) -> Answer:
    """As ``server.run``."""
    try:
        return Answer(await _heeding(client, _run_pooled, call, patience), sent_twice=False)
    except (RedisConnectionError, RedisTimeoutError) as error:
        if is_pool_exhausted(error):
            connection = await connect(client, timeout=5.0)
            try:
                answer = await _within(patience, _exchange(connection, call))
                return Answer(answer, sent_twice=False)
            finally:
                await connection.disconnect()
        if not worth_a_second_try(error, patience):
            raise
        try:
            return Answer(await _heeding(client, _run_pooled, call, patience), sent_twice=True)
        except Exception as second:
            note_sent(second, True)
            raise


async def run_all(client: Any, calls: Sequence[Call]) -> list[Any]:
    """What ``calls`` return, all in one round trip. They must be safe to repeat: they are sent
    once more if the connection broke before the last reply."""
    if len(calls) == 1:
        return [(await run(client, calls[0])).value]
    try:
        return await _heeding(client, _run_all, calls)
    except (RedisConnectionError, RedisTimeoutError) as error:
        if is_pool_exhausted(error) or not may_have_run(error):
            raise
        return await _heeding(client, _run_all, calls)


async def _heeding(
    client: Any,
    way: Callable[[Any, Any], Coroutine[Any, Any, T]],
    what: Any,
    patience: float | None = None,
) -> T:
    """Ask and tell the server's breaker."""
    breaker = server_of(client).breaker
    if breaker.failing:
        patience = admitted(breaker, patience)
    began = time.monotonic()
    try:
        answer = await _within(patience, way(client.connection_pool, what))
    except ResponseError:
        breaker.answered()
        raise
    except (RedisError, OSError) as error:
        in_vain = isinstance(error, RedisTimeoutError) or not may_have_run(error)
        if in_vain and not is_pool_exhausted(error):
            timeout = client.connection_pool.connection_kwargs.get("socket_timeout")
            breaker.failed(error, time.monotonic() - began, timeout)
        raise
    if breaker.failing:
        breaker.answered()
    return answer


async def _run_all(pool: Any, calls: Sequence[Call]) -> list[Any]:
    connection = await _connected(pool)
    try:
        # The first of each script by its source, so that none can be unknown.
        known: set[str] = set()
        for call in calls:
            packed = pack(call, known=call.script.sha in known)
            known.add(call.script.sha)
            await connection.send_packed_command([packed])
        return [await connection.read_response() for _ in calls]
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    finally:
        await pool.release(connection)


async def _within(seconds: float | None, work: Coroutine[Any, Any, T]) -> T:
    if seconds is None:
        return await work
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        raise RedisTimeoutError(f"Redis did not answer within {seconds:.3f} s") from None


async def _run_pooled(pool: Any, call: Call) -> Any:
    connection = await _connected(pool)
    try:
        return await _exchange(connection, call)
    finally:
        await pool.release(connection)


async def _connected(pool: Any) -> Any:
    """A connection of ``pool``; an error says that nothing was sent."""
    try:
        return await pool.get_connection(*FOR_COMMAND)
    except Exception as error:
        note_sent(error, False)
        raise


async def _exchange(connection: AsyncRawConnection, call: Call) -> Any:
    try:
        await send(connection, call)
        return await receive(connection, call)
    except ResponseError:
        raise
    except BaseException:
        # Also for cancellation: a connection with a reply still to come is of no use.
        await connection.disconnect(nowait=True)
        raise


async def connect(client: Any, timeout: float) -> AsyncRawConnection:
    """A new connection outside the pool, on which a read may take for ever.

    Args:
        timeout: seconds that connecting may take.
    """
    pool = client.connection_pool
    settings = own_settings(pool.connection_class, pool.connection_kwargs, timeout)
    settings.update(retry=Retry(NoBackoff(), 0), socket_timeout=None)
    connection: AsyncRawConnection = pool.connection_class(**settings)
    await connection.connect()
    return connection
