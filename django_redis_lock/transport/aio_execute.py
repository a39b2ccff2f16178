"""How a script is run by an event loop: ``execute`` with ``await``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import NoScriptError

from ..protocol import Call
from .aio_client import ask, pool_of
from .aio_connection import AsyncRawConnection, connect_to
from .execute import ASKING, adrive, pack, pack_all, value_with_lifetime
from .retry import REPORTED, Answer, run_again, run_all_steps
from .server import Server, server_of

T = TypeVar("T")


async def cancellable(work: Coroutine[Any, Any, T]) -> T:
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


async def arun(client: Any, call: Call, *, patience: float | None = None) -> Answer:
    """As ``execute.run``, on the connection that the tasks of the loop share."""
    server = server_of(client)
    node = None
    try:
        node = await located(server, call.keys)
        return Answer(await _run(client, node, call, patience), sent_twice=False)
    except REPORTED as error:
        exchange = _Awaiting(client, server)
        return await adrive(run_again(exchange, call, patience, node, error))


async def aread_value(client: Any, key: bytes) -> Any:
    """As ``execute.read_value``, with the lifetime. It is not sent again."""
    value, left = await ask(client, server_of(client), value_with_lifetime(key), replies=2)
    return None if value is None else (value, left)


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
        return _run(self.client, node, call, patience, asking)

    def run_all(self, node: Server, calls: Sequence[Call]) -> Any:
        return ask(self.client, node, pack_all(calls), None, calls, len(calls))

    def locate(self, keys: Sequence[bytes]) -> Any:
        return located(self.server, keys)

    def sleep(self, seconds: float) -> Any:
        return asyncio.sleep(seconds)


async def located(server: Server, keys: Sequence[bytes]) -> Server:
    """``server.at(keys)``, which may have to ask other servers, without blocking the loop."""
    if not server.must_discover():
        return server.at(keys)
    return await asyncio.to_thread(server.at, keys)


async def _run(
    client: Any, node: Server, call: Call, patience: float | None, asking: bool = False
) -> Any:
    if asking:  # By its source: NOSCRIPT would need a second ASKING.
        command = ASKING + pack(call, known=False)
        return (await ask(client, node, command, patience, (call,), replies=2))[1]
    try:
        return await ask(client, node, pack(call), patience, (call,))
    except NoScriptError:
        return await ask(client, node, pack(call, known=False), patience, (call,))


async def aconnect(client: Any, keys: Sequence[bytes], timeout: float) -> AsyncRawConnection:
    """A connection to where ``keys`` are for one task alone, on which a reply may take for ever.

    Args:
        timeout: seconds that connecting may take.
    """
    pool = pool_of(client, await located(server_of(client), keys))
    return await cancellable(connect_to(pool, timeout))
