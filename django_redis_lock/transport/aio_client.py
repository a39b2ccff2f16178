"""The asyncio client that leads to the same server as a thread's client, one for each event loop;
and how calls are run on the connection that its tasks share: ``execute`` with ``await``.

django-redis has clients for threads only. Connections belong to the loop that made them, and loops
may be short-lived (``async_to_sync`` makes one for each call), so a loop's client is closed when
its loop ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, NoScriptError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import real_time as time
from ..protocol import Call, Reply
from ..steps import Step, adrive
from .address import TWINS, common_settings, may_have_run, note_sent, probe_seconds, timeout_of
from .aio_connection import (
    READ_FIRST_SECONDS,
    AsyncRawConnection,
    connect_to,
)
from .aio_tasks import cancellable, in_background, wait_awake
from .circuit_breaker import CHECK_SECONDS
from .execute import (
    ASKING,
    admitted,
    is_observed,
    pack,
    pack_all,
    pack_words,
    value_with_lifetime,
)
from .guarded_connection import guarded
from .refusals import LostLogin, is_misdirected, redis_errors
from .registry import Client, Pool, server_of
from .retry import REPORTED, Answer, run_again, run_all_steps
from .server import Server

T = TypeVar("T")


class _OfLoop:
    """What an event loop has to each server."""

    def __init__(self) -> None:
        self.clients: dict[Server, Any] = {}
        #: Those that its tasks share.
        self.connections: dict[Server, AsyncRawConnection] = {}
        #: Others, on which something large was on its way.
        self.others: dict[Server, AsyncRawConnection] = {}
        self.connecting: dict[Server, asyncio.Future[AsyncRawConnection]] = {}
        self.closing = self._close_with_the_loop()
        with suppress(StopIteration):  # It begins without waiting for anything.
            self.closing.__anext__().send(None)

    async def _close_with_the_loop(self) -> AsyncGenerator[None, None]:
        """Closes all when the running loop ends: the runners of asyncio and asgiref close the
        asynchronous generators that were started in their loop."""
        try:
            yield
        finally:
            loops.pop(asyncio.get_running_loop(), None)
            for connection in (*self.connections.values(), *self.others.values()):
                connection.disconnect()
            for client in self.clients.values():
                await client.connection_pool.disconnect()

    def forget_retired(self) -> None:
        """Close what leads to servers that have left their cluster or service."""
        for connections in (self.connections, self.others):
            for old in [each for each in connections if each.retired]:
                connections.pop(old).retire()
        for old in [each for each in self.clients if each.retired]:
            closing = self.clients.pop(old).connection_pool.disconnect(inuse_connections=False)
            in_background(closing)


#: A plain dictionary, each step of which is atomic: threads come and go with their loops. (Weak
#: keys would not help: what is kept for a loop leads back to it.)
loops: dict[asyncio.AbstractEventLoop, _OfLoop] = {}


def _of_the_running_loop() -> _OfLoop:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "no event loop is running here: in a thread use lock(), or Lock"
        ) from None
    of_loop = loops.get(loop)
    if of_loop is None:
        for closed in [each for each in list(loops) if each.is_closed()]:
            loops.pop(closed, None)  # Without a runner.
        of_loop = loops[loop] = _OfLoop()
    return of_loop


def asyncio_client(client: Client) -> Any:
    """What an ``AsyncLock`` in the running loop takes to reach the server of ``client``: the loop's
    own ``redis.asyncio.Redis``. For a cluster and behind sentinels it is ``client`` itself: the
    loop has its own connections to each of their servers, see ``pool_of``.

    Args:
        client: a redis-py client for threads.

    Raises:
        RuntimeError: no event loop is running.
        TypeError: its connections are of a class without an asyncio twin.
    """
    server = server_of(client)
    if server.is_topology:
        asyncio.get_running_loop()
        return client
    return _client_of(server, server.address if server.stands_in else client.connection_pool)


def pool_of(client: Client, node: Server) -> Pool:
    """A pool of connections of the running loop to ``node``, one of ``client``'s servers."""
    if node is server_of(client) and not node.stands_in:
        return client.connection_pool
    pool: Pool = _client_of(node, node.address).connection_pool
    return pool


def _client_of(server: Server, address: Pool) -> Any:
    """The running loop's ``redis.asyncio.Redis`` for ``server``."""
    of_loop = _of_the_running_loop()
    known = of_loop.clients.get(server)
    if known is None:
        of_loop.forget_retired()
        pool = _pool_like(address)
        server.for_tasks(pool.connection_kwargs)
        known = of_loop.clients[server] = cast(Any, Redis(connection_pool=pool))
        known.execute_command = partial(_execute, known)
    return known


def connection_to(node: Server) -> AsyncRawConnection | None:
    """The connection to ``node`` that the tasks of the running loop share, if there is one."""
    of_loop = loops.get(asyncio.get_running_loop())
    known = None if of_loop is None else of_loop.connections.get(node)
    if of_loop is None or known is None or known.generation != node.generation:
        return None
    other = of_loop.others.get(node)
    if known.in_transfer and other is not None and other.generation == node.generation:
        of_loop.connections[node], of_loop.others[node] = other, known
        known = other
    return known if known.takes_calls() else None


def has_idle_connection(node: Server) -> bool:
    """Whether the running loop has a connection to ``node`` that must be checked first."""
    of_loop = loops.get(asyncio.get_running_loop())
    known = None if of_loop is None else of_loop.connections.get(node)
    return known is not None and not known.takes_calls()


async def connected(client: Client, node: Server, patience: float | None) -> AsyncRawConnection:
    """A connection to ``node`` for the tasks of the running loop: a new one, which one of them
    makes, or the one that was idle, if it still answers. An error says that nothing was sent.

    Args:
        client: leads to ``node``, perhaps among others.
        patience: seconds that connecting may take, if that is less than usual.
    """
    connecting = _of_the_running_loop().connecting
    if patience is not None and has_idle_connection(node):
        patience += probe_seconds(patience)
    task = connecting.get(node)
    if task is None:
        task = connecting[node] = asyncio.ensure_future(_connect(client, node, patience))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        if patience is None:
            await asyncio.wait({task})
        else:
            await wait_awake({task}, patience)
        if not task.done():
            raise RedisTimeoutError(f"Connecting to Redis took longer than {patience:.3f} s")
        return task.result()
    except Exception as error:
        note_sent(error, False)
        raise


async def _connect(client: Client, node: Server, patience: float | None) -> AsyncRawConnection:
    of_loop = _of_the_running_loop()
    limit = probe_seconds(patience)
    try:
        idle, generation = of_loop.connections.get(node), node.generation
        if idle is not None and idle.generation == generation and await idle.still_answers(limit):
            return idle
        pool = pool_of(client, node)
        timeout = timeout_of(pool.connection_kwargs)
        began = time.monotonic()
        connection = await connect_to(pool, timeout, timeout)
        node.breaker.connecting = time.monotonic() - began
        # No call on it takes long: it is retired when the next is made, not cut.
        connection.generation = generation
    finally:
        del of_loop.connecting[node]
    for before in (of_loop.connections.get(node), of_loop.others.pop(node, None)):
        if before is None:
            continue
        if before.in_transfer and before.generation == generation and node not in of_loop.others:
            of_loop.others[node] = before  # It takes calls again later.
        else:
            before.retire()
    of_loop.forget_retired()
    of_loop.connections[node] = connection
    return connection


def _pool_like(pool: Pool) -> ConnectionPool:
    in_memory = getattr(pool.connection_class, "asyncio_class", None)
    if in_memory is not None:
        return ConnectionPool(connection_class=in_memory, **common_settings(pool))
    for theirs, ours in TWINS:
        if issubclass(pool.connection_class, theirs):
            settings = common_settings(pool)
            timeout = timeout_of(pool.connection_kwargs)
            settings.update(retry=Retry(NoBackoff(), 0), socket_timeout=timeout)
            for name in ("socket_keepalive", "health_check_interval"):
                if name in pool.connection_kwargs:
                    settings[name] = pool.connection_kwargs[name]
            return ConnectionPool(connection_class=guarded(ours), **settings)
    raise TypeError(f"{pool.connection_class.__name__} has no twin for asyncio")


# -- calls ---------------------------------------------------------------------------------------


async def exchange(
    client: Client,
    node: Server,
    command: bytes,
    patience: float | None = None,
    calls: Sequence[Call] = (),
    replies: int | None = None,
    retry_elsewhere: bool = True,
) -> Reply:
    """The reply to ``command``, which sends ``calls``, or a list of so many ``replies``.
    ``retry_elsewhere``: as for ``Server.exchange``."""
    breaker = node.breaker
    if breaker.failing:
        patience = admitted(breaker, patience, *calls)
    began = time.monotonic()
    used_before = connection = connection_to(node)
    try:
        connection = connection or await connected(client, node, patience)
        if patience is not None:
            # A bit longer: at its own timeout a silent connection is closed.
            first = breaker.first_patience(patience, node.timeout + 2 * READ_FIRST_SECONDS)
            spent = time.monotonic() - began
            patience = first if used_before else max(patience - spent, patience / 2)
        reply = connection.request(command, replies)
        answer = await (reply if patience is None else _within(patience, reply))
    except (ResponseError, BusyLoadingError) as error:
        breaker.answered()
        if connection is not None and is_misdirected(error):
            connection.retire()
            if retry_elsewhere and node.renew(connection):
                return await exchange(client, node, command, patience, calls, replies, False)
        raise
    except redis_errors() as error:
        if used_before is not None and isinstance(error, LostLogin):
            used_before.retire()
            return await exchange(client, node, command, patience, calls, replies, retry_elsewhere)
        timeout = timeout_of(pool_of(client, node).connection_kwargs)
        passed = time.monotonic() - began
        timed_out = isinstance(error, RedisTimeoutError)
        if timed_out and used_before is not None and not used_before.is_new:
            used_before.doubt()
            await _distrust(
                client, node, timeout, math.inf if patience is None else patience - passed
            )
        elif timed_out or not may_have_run(error):
            breaker.failed(error, passed, timeout)
        raise
    node.answered()
    return answer


async def _distrust(client: Client, node: Server, timeout: float, left: float) -> None:
    """As ``Server._distrust``, for a caller with so many seconds ``left``."""
    began, limit = time.monotonic(), min(CHECK_SECONDS, timeout)
    if left < limit:
        return
    try:
        await connected(client, node, limit)
    except redis_errors() as error:
        node.breaker.failed(error, time.monotonic() - began, timeout)


async def _within(seconds: float, reply: asyncio.Future[T]) -> T:
    try:
        await wait_awake({reply}, seconds)
    finally:
        reply.cancel()
    if reply.cancelled():
        raise RedisTimeoutError(f"Redis did not answer within {seconds:.3f} s")
    return reply.result()


async def _execute(client: Any, *args: str | bytes, **options: Any) -> Any:
    """``Redis.execute_command`` on the connection that the tasks of the loop share."""
    if is_observed(client):
        return await type(client).execute_command(client, *args, **options)
    packed = pack_words(*map(client.get_encoder().encode, args))
    reply = await exchange(client, server_of(client), packed)
    options.pop("keys", None)  # For redis-py's cache.
    read = client.response_callbacks.get(args[0])
    return reply if read is None else read(reply, **options)


# -- running ---------------------------------------------------------------------------------------


async def arun(client: Client, call: Call, *, patience: float | None = None) -> Answer:
    """As ``execute.run``, on the connection that the tasks of the loop share."""
    server = server_of(client)
    node = None
    try:
        node = await located(server, call.keys)
        return Answer(await _run(client, node, call, patience), sent_twice=False)
    except REPORTED as error:
        exchange = _Awaiting(client, server)
        return await adrive(run_again(exchange, call, patience, node, error))


async def aread_value(client: Client, key: bytes) -> tuple[Reply, int] | None:
    """As ``execute.read_value``, with the lifetime. It is not sent again."""
    value, left = await exchange(client, server_of(client), value_with_lifetime(key), replies=2)
    return None if value is None else (value, left)


async def aexchange(
    client: Client, command: bytes, replies: int | None = None, *, may_run_twice: bool = True
) -> Reply:
    """As ``execute.exchange``."""
    server = server_of(client)
    used = None if may_run_twice else connection_to(server)
    if used is not None and used.has_ended():
        used.disconnect()
    try:
        return await exchange(client, server, command, replies=replies)
    except (RedisConnectionError, RedisTimeoutError) as error:
        if server.breaker.failing or (not may_run_twice and may_have_run(error)):
            raise
    return await exchange(client, server, command, replies=replies)


async def arun_all(client: Client, calls: Sequence[Call]) -> list[Reply]:
    """As ``execute.run_all``."""
    if len(calls) == 1:
        return [(await arun(client, calls[0])).value]
    return await adrive(run_all_steps(_Awaiting(client, server_of(client)), calls))


class _Awaiting(NamedTuple):
    """``Exchange`` for tasks."""

    client: Client
    server: Server

    def run(self, node: Server, call: Call, patience: float | None, asking: bool) -> Step[Reply]:
        return _run(self.client, node, call, patience, asking)

    def run_all(self, node: Server, calls: Sequence[Call]) -> Awaitable[list[Reply]]:
        return exchange(self.client, node, pack_all(calls), None, calls, len(calls))

    def locate(self, keys: Sequence[bytes]) -> Awaitable[Server]:
        return located(self.server, keys)

    def sleep(self, seconds: float) -> Awaitable[None]:
        return asyncio.sleep(seconds)


async def located(server: Server, keys: Sequence[bytes]) -> Server:
    """``server.locate(keys)``, which may have to ask other servers, without blocking the loop."""
    if not server.must_discover():
        return server.locate(keys)
    return await asyncio.to_thread(server.locate, keys)


async def _run(
    client: Client, node: Server, call: Call, patience: float | None, asking: bool = False
) -> Reply:
    if asking:  # By its source: NOSCRIPT would need a second ASKING.
        command = ASKING + pack(call, known=False)
        return (await exchange(client, node, command, patience, (call,), replies=2))[1]
    try:
        return await exchange(client, node, pack(call), patience, (call,))
    except NoScriptError:
        return await exchange(client, node, pack(call, known=False), patience, (call,))


async def aconnect(client: Client, keys: Sequence[bytes], timeout: float) -> AsyncRawConnection:
    """A connection to where ``keys`` are for one task alone, on which a reply may take forever.

    Args:
        timeout: seconds that connecting may take.
    """
    node = await located(server_of(client), keys)
    pool, generation = pool_of(client, node), node.generation
    return node.track(await cancellable(connect_to(pool, timeout)), generation)
