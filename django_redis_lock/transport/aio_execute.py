"""How a script is run by an event loop: ``execute`` with ``await``."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..protocol import Call
from .address import may_have_run, note_sent, own_settings
from .aio_client import pool_of
from .execute import ASKING, FOR_COMMAND, admitted, adrive, pack, pack_all
from .retry import REPORTED, Answer, is_pool_exhausted, run_again, run_all_steps
from .server import Server, server_of

T = TypeVar("T")

#: Into how many parts the time to wait is divided. A standstill of the loop counts as one part.
WAIT_PARTS = 10


class AsyncRawConnection(Protocol):
    """The part of redis-py's asyncio connections that is used here."""

    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = False) -> None: ...
    async def send_command(self, *args: Any) -> None: ...
    async def send_packed_command(self, command: list[bytes]) -> None: ...
    async def read_response(self, *, disconnect_on_error: bool = True) -> Any: ...


async def connect_to(pool: Any, timeout: float) -> AsyncRawConnection:
    """A new connection to where those of ``pool`` lead, on which a read may take for ever.

    Args:
        timeout: seconds that connecting may take.
    """
    settings = own_settings(pool.connection_class, pool.connection_kwargs, timeout)
    settings.update(retry=Retry(NoBackoff(), 0), socket_timeout=None)
    connection: AsyncRawConnection = pool.connection_class(**settings)
    await connection.connect()
    return connection


async def taken_from(pool: Any) -> Any:
    """A connection of ``pool``; an error says that nothing was sent."""
    try:
        return await pool.get_connection(*FOR_COMMAND)
    except Exception as error:
        note_sent(error, False)
        raise


def cut(connection: AsyncRawConnection) -> None:
    """Close ``connection``, whose loop no longer runs. Python would close it when it collects the
    loop, but until then a grant could be sent to it."""
    if (in_memory := getattr(connection, "cut", None)) is not None:
        in_memory()
        return
    writer: Any = getattr(connection, "_writer", None)
    try:
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)
    except (AttributeError, OSError):
        pass  # It had been closed.


async def _give_up(connection: AsyncRawConnection, error: BaseException) -> None:
    """Close ``connection`` after ``error``: with an unread reply it cannot be used again."""
    if isinstance(error, GeneratorExit):  # Our coroutine was closed. Nothing can be awaited.
        cut(connection)
    else:
        await connection.disconnect(nowait=True)


async def cancellable(work: Coroutine[Any, Any, T]) -> T:
    """``await work``, sure to end when it is cancelled. Before Python 3.12 ``asyncio.wait_for``,
    with which redis-py sends, forgets a cancellation that comes just when it is done."""
    if sys.version_info < (3, 11):
        return await _in_a_task(work)
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    failure = None
    try:
        result = await work
    except Exception as error:
        failure = error
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError from failure
    if failure is not None:
        raise failure
    return result


async def _in_a_task(work: Coroutine[Any, Any, T]) -> T:
    """As ``cancellable``, where a task does not know whether it was cancelled."""
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


async def wait_awake(tasks: Collection[asyncio.Task[Any]], seconds: float) -> None:
    """Wait for ``tasks``, at most for ``seconds`` in which the loop ran. While the loop stands
    still, replies may come; the servers must not be taken to be down because of that."""
    pending = set(tasks)
    for _ in range(WAIT_PARTS):
        if pending:
            _, pending = await asyncio.wait(pending, timeout=seconds / WAIT_PARTS)


async def asend(connection: AsyncRawConnection, call: Call) -> None:
    """Send ``call`` without waiting for the reply."""
    await connection.send_packed_command([pack(call)])


async def areceive(connection: AsyncRawConnection, call: Call) -> Any:
    """The reply to ``call``; the script is sent to a server that does not know it."""
    try:
        return await connection.read_response(disconnect_on_error=False)
    except NoScriptError:
        await connection.send_packed_command([pack(call, known=False)])
        return await connection.read_response(disconnect_on_error=False)


async def arun(client: Any, call: Call, *, patience: float | None = None) -> Answer:
    """As ``execute.run``."""
    server = server_of(client)
    node = None
    try:
        node = await located(server, call.keys)
        answer = await _run(client, server, node, call, patience)
        return Answer(answer, sent_twice=False)
    except REPORTED as error:
        exchange = _Awaiting(client, server)
        return await adrive(run_again(exchange, node, error, call, patience))


async def arun_all(client: Any, calls: Sequence[Call]) -> list[Any]:
    """As ``execute.run_all``."""
    if len(calls) == 1:
        return [(await arun(client, calls[0])).value]
    return await adrive(run_all_steps(_Awaiting(client, server_of(client)), calls))


class _Awaiting(NamedTuple):
    """``Exchange`` for tasks."""

    client: Any
    server: Server

    def run(self, node: Server, call: Call, patience: float | None, asking: bool) -> Any:
        return _run(self.client, self.server, node, call, patience, asking)

    def run_all(self, node: Server, calls: Sequence[Call]) -> Any:
        pool = pool_of(self.client, self.server, node)
        return _heeding(node, pool, lambda: _exchange_all(pool, calls), None, calls)

    def answer(self, call: Call) -> Any:
        return arun(self.client, call)

    def locate(self, keys: Sequence[bytes]) -> Any:
        return located(self.server, keys)

    def sleep(self, seconds: float) -> Any:
        return asyncio.sleep(seconds)

    def close_idle(self, node: Server) -> None:
        pass  # The connections are the pools', which close broken ones themselves.


async def located(server: Server, keys: Sequence[bytes]) -> Server:
    """``server.at(keys)``, which may have to ask other servers, without blocking the loop."""
    if not server.must_discover():
        return server.at(keys)
    return await asyncio.to_thread(server.at, keys)


async def _heeding(
    node: Server,
    pool: Any,
    work: Callable[[], Coroutine[Any, Any, T]],
    patience: float | None,
    calls: Sequence[Call],
) -> T:
    """Ask the breaker of ``node``, and report the outcome to it."""
    breaker = node.breaker
    if breaker.failing:
        patience = admitted(breaker, patience, *calls)
    began = time.monotonic()
    try:
        answer = await _within(patience, work())
    except ResponseError:
        breaker.answered()
        raise
    except (RedisError, OSError) as error:
        in_vain = isinstance(error, RedisTimeoutError) or not may_have_run(error)
        if in_vain and not is_pool_exhausted(error):
            timeout = pool.connection_kwargs.get("socket_timeout")
            breaker.failed(error, time.monotonic() - began, timeout)
        raise
    node.answered()
    return answer


async def _exchange_all(pool: Any, calls: Sequence[Call]) -> list[Any]:
    connection = await taken_from(pool)
    try:
        await connection.send_packed_command([pack_all(calls)])
        return [await connection.read_response(disconnect_on_error=False) for _ in calls]
    except BaseException as error:
        await _give_up(connection, error)
        raise
    finally:
        await pool.release(connection)


async def _within(seconds: float | None, work: Coroutine[Any, Any, T]) -> T:
    if seconds is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        await wait_awake({task}, seconds)
    except GeneratorExit:  # Our coroutine was closed: nothing can be awaited, nor that task ended.
        work.close()
        raise
    except BaseException:
        await _cancelled(task)
        raise
    await _cancelled(task)
    if task.cancelled():
        raise RedisTimeoutError(f"Redis did not answer within {seconds:.3f} s")
    return task.result()


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _run(
    client: Any,
    server: Server,
    node: Server,
    call: Call,
    patience: float | None,
    asking: bool = False,
) -> Any:
    pool = pool_of(client, server, node)
    return await _heeding(node, pool, lambda: _run_pooled(pool, call, asking), patience, (call,))


async def _run_pooled(pool: Any, call: Call, asking: bool) -> Any:
    try:
        if isinstance(pool, BlockingConnectionPool) and not pool.can_get_connection():
            return await _run_apart(pool, call, asking)
        connection = await taken_from(pool)
    except RedisConnectionError as error:
        if not is_pool_exhausted(error):
            raise
        return await _run_apart(pool, call, asking)
    try:
        return await _exchange(connection, call, asking)
    finally:
        await pool.release(connection)


async def _run_apart(pool: Any, call: Call, asking: bool) -> Any:
    """On a connection outside the pool: all connections of the pool are in use."""
    connection = await connect_to(pool, timeout=5.0)
    try:
        answer = await _exchange(connection, call, asking)
    except BaseException as error:
        await _give_up(connection, error)
        raise
    await connection.disconnect()
    return answer


async def _exchange(connection: AsyncRawConnection, call: Call, asking: bool) -> Any:
    try:
        if asking:
            await connection.send_packed_command([ASKING, pack(call, known=False)])
            await connection.read_response(disconnect_on_error=False)
        else:
            await asend(connection, call)
        return await areceive(connection, call)
    except ResponseError:
        if asking:  # ASKING may have been refused, and the reply to the call is still to come.
            await connection.disconnect(nowait=True)
        raise
    except BaseException as error:
        await _give_up(connection, error)
        raise


async def aconnect(client: Any, keys: Sequence[bytes], timeout: float) -> AsyncRawConnection:
    """A new connection outside the pool to where ``keys`` are, on which a read may take for ever.

    Args:
        timeout: seconds that connecting may take.
    """
    server = server_of(client)
    return await connect_to(pool_of(client, server, await located(server, keys)), timeout)
