"""The asyncio client that leads to the same server as a thread's client, one for each event loop;
and how calls are run on the connection that its tasks share: ``server`` with ``await``.

django-redis has clients for threads only. Connections belong to the loop that made them, and loops
may be short-lived (``async_to_sync`` makes one for each call), so a loop's client is closed when
its loop ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool as PoolForThreads
from redis.exceptions import BusyLoadingError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import real_time, time
from ..protocol import Call, Reply
from ..steps import adrive
from .address import (
    PROBE_SECONDS,
    TRUSTED_SECONDS,
    TWINS,
    Client,
    Pool,
    common_settings,
    timeout_of,
)
from .aio_connection import (
    AsyncRawConnection,
    cancellable,
    connect_to,
    in_background,
    wait_awake,
)
from .refusals import (
    LostLogin,
    is_fault_of_connection,
    is_misdirected,
    may_have_run,
    note_fault_of_connection,
    note_sent,
)
from .server import (
    RETRYABLE,
    Answer,
    RetryPolicy,
    Route,
    Server,
    configured_retry,
    pack,
    run_again,
    run_all_steps,
    server_of,
)


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


def check_for_tasks(client: Client) -> None:
    """Raises TypeError if ``client`` is one for threads, whose calls cannot be awaited."""
    pool = getattr(client, "connection_pool", None)
    if isinstance(pool, PoolForThreads) and not server_of(client).is_topology:
        raise TypeError(
            f"AsyncLock needs a client of redis.asyncio, not {type(client).__name__} for threads: "
            "use cache.alock(), or give it a redis.asyncio.Redis"
        )


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
        known = of_loop.clients[server] = Redis(connection_pool=pool)
    return known


def connection_to(node: Server, only_new: bool = False) -> AsyncRawConnection | None:
    """The connection to ``node`` that the tasks of the running loop share, if there is one.
    ``only_new``: one on which no call was answered yet."""
    of_loop = loops.get(asyncio.get_running_loop())
    known = None if of_loop is None else of_loop.connections.get(node)
    if of_loop is None or known is None or known.generation != node.generation:
        return None
    other = of_loop.others.get(node)
    if known.in_transfer and other is not None and other.generation == node.generation:
        of_loop.connections[node], of_loop.others[node] = other, known
        known = other
    return known if known.takes_calls() and (known.is_new or not only_new) else None


async def connected(
    client: Client, node: Server, until: float | None, anew: bool = False
) -> AsyncRawConnection:
    """A new connection to ``node``, one of ``client``'s servers, for the tasks of the running loop;
    one of them makes it. An error says that nothing was sent."""
    of_loop = _of_the_running_loop()
    connecting = of_loop.connecting
    limit = node.time_to_connect(until, anew)
    task = connecting.get(node)
    if task is None:
        known = of_loop.connections.get(node)
        beside = known is not None and known.in_transfer
        task = connecting[node] = asyncio.ensure_future(_connect(client, node, beside))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        if limit is None:
            await asyncio.wait({task})
        else:
            await wait_awake({task}, limit)
        if not task.done():
            raise RedisTimeoutError(f"Connecting to Redis took longer than {limit:.3f} s")
        return task.result()
    except Exception as error:
        note_sent(error, False)
        raise


async def _connect(client: Client, node: Server, beside: bool) -> AsyncRawConnection:
    """``beside``: something large is on its way on the one before, which stays."""
    of_loop, generation = _of_the_running_loop(), node.generation
    try:
        began = real_time.monotonic()
        connection = await connect_to(pool_of(client, node), node.timeout, node.timeout)
        node.breaker.connecting = real_time.monotonic() - began
        # No call on it takes long: it is retired when the next is made, not cut.
        connection.generation = generation
    finally:
        del of_loop.connecting[node]
    if (other := of_loop.others.pop(node, None)) is not None:
        other.retire()
    if (before := of_loop.connections.get(node)) is not None:
        if beside and before.is_sound() and before.generation == generation:
            of_loop.others[node] = before  # For when something large is on its way on the new one.
        else:
            before.retire()
    of_loop.forget_retired()
    of_loop.connections[node] = connection
    return connection


class _Never(Retry):
    """redis-py sends nothing again; ``RetryPolicy`` does as the project has ``configured``."""

    def __init__(self, configured: object) -> None:
        super().__init__(NoBackoff(), 0)
        self.configured = {"retry": configured}


def _pool_like(pool: Pool) -> ConnectionPool:
    in_memory = getattr(pool.connection_class, "asyncio_class", None)
    if in_memory is not None:
        return ConnectionPool(connection_class=in_memory, **common_settings(pool))
    for theirs, ours in TWINS:
        if issubclass(pool.connection_class, theirs):
            settings = common_settings(pool)
            timeout = timeout_of(pool.connection_kwargs)
            settings.update(retry=_Never(configured_retry(pool)), socket_timeout=timeout)
            for name in ("socket_keepalive", "health_check_interval"):
                if name in pool.connection_kwargs:
                    settings[name] = pool.connection_kwargs[name]
            return ConnectionPool(connection_class=_checked(ours), **settings)
    raise TypeError(f"{pool.connection_class.__name__} has no twin for asyncio")


class _Checked:
    """In front of redis-py's connections of a loop's pool, for clients that a tool observes and for
    a project's own commands: one on which a reply was not read is not used, and one that was idle
    must answer."""

    _answered_at, _is_asked = 0.0, False

    async def connect(self: Any) -> None:
        if self.is_connected and not await self._may_be_used():
            await self.disconnect(nowait=True)
        await super().connect()  # type: ignore[misc]  # redis-py's

    async def _may_be_used(self: Any) -> bool:
        if self._is_asked or time.monotonic() - self._answered_at <= TRUSTED_SECONDS:
            return not self._is_asked
        try:
            await self.send_command("PING", check_health=False)
            await asyncio.wait_for(self.read_response(), PROBE_SECONDS)
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            return isinstance(error, ResponseError)
        return True

    async def send_packed_command(self, *args: object, **kwargs: object) -> None:
        self._is_asked = True
        await super().send_packed_command(*args, **kwargs)  # type: ignore[misc]  # redis-py's

    async def read_response(self, *args: object, **kwargs: object) -> object:
        self._is_asked = False  # If it fails, the connection is closed.
        reply: object = await super().read_response(*args, **kwargs)  # type: ignore[misc]  # redis-py's
        self._answered_at = time.monotonic()
        return reply


@cache
def _checked(kind: type) -> type:
    return type(kind.__name__, (_Checked, kind), {"guards": kind})


# -- calls ---------------------------------------------------------------------------------------


async def exchange(
    client: Client,
    node: Server,
    command: bytes,
    replies: int | None = None,
    until: float | None = None,
    may_run_twice: bool = True,
    anew: bool = False,
    urgent: bool = False,
) -> Reply:
    """As ``Server.exchange``."""
    if node.breaker.failing:
        until = node.admitted(until, urgent)
    began, reply = real_time.monotonic(), None
    connection = connection_to(node, only_new=anew)
    if connection is not None and not (may_run_twice or connection.is_new):
        if not await connection.still_answers():
            connection.doubt()
        connection = connection_to(node, only_new=anew)  # Another task may have replaced it.
    used = connection is not None and not connection.is_new
    try:
        connection = connection or await connected(client, node, until, anew)
        old = used and connection.is_old()
        reply = connection.request(command, replies)
        if old or until is not None:
            first, left = node.first_wait(used, old, until)
            if first is not None and not await _comes(reply, first):
                comes, replaced = partial(_comes, reply), partial(_is_replaced, client, node, until)
                doubt = connection.doubt
                await adrive(node.silent_steps(used, first, left, comes, doubt, replaced))
        answer = await reply
    except (ResponseError, BusyLoadingError) as error:
        node.breaker.answered()
        if connection is not None and is_misdirected(error):
            connection.retire()
            note_fault_of_connection(error, node.renew(connection))
        raise
    except RedisError as error:
        if connection is not None and isinstance(error, LostLogin):
            connection.retire()
            note_sent(error, False)
        if is_fault_of_connection(error) is None:
            note_fault_of_connection(error, used)
            if used and connection is not None:
                connection.doubt()
            elif isinstance(error, RedisTimeoutError) or not may_have_run(error):
                node.breaker.failed(error, real_time.monotonic() - began)
        raise
    finally:
        if connection is not None and reply is not None:
            connection.give_up(reply)
    node.answered()
    return answer


async def _comes(reply: asyncio.Future[Reply], seconds: float) -> bool:
    await wait_awake({reply}, max(0.0, seconds))
    # Its own time-out, which may end at the same moment, is no reply.
    return reply.done() and not isinstance(reply.exception(), RedisTimeoutError)


async def _is_replaced(client: Client, node: Server, until: float | None) -> bool:
    began = real_time.monotonic()
    try:
        await connected(client, node, until, anew=True)
    except RedisError as error:
        node.breaker.failed(error, real_time.monotonic() - began)
        return False
    return True


# -- running ---------------------------------------------------------------------------------------


async def arun(client: Client, call: Call, *, until: float | None = None) -> Answer:
    """As ``server.run``, on the connection that the tasks of the loop share."""
    server = server_of(client)
    node = None
    try:
        node = await located(server, call.keys, until)
        urgent = call.script.urgent
        reply = await exchange(client, node, pack(call), until=until, urgent=urgent)
        return Answer(reply, sent_twice=False)
    except RETRYABLE as error:
        return await adrive(run_again(_RouteOfTasks(client, server), call, until, node, error))


async def aexchange(
    client: Client, command: bytes, replies: int | None = None, *, may_run_twice: bool = True
) -> Reply:
    """As ``server.exchange_with``."""
    server = server_of(client)
    policy, anew = None, False
    while True:
        try:
            of_it = (client, server, command, replies, None, may_run_twice, anew)
            return await exchange(*of_it, urgent=anew)
        except RETRYABLE as error:
            policy = policy or RetryPolicy(server, None, may_run_twice)
            policy.allow_retry(error)
            anew = policy.anew


async def arun_all(client: Client, calls: Sequence[Call]) -> list[Reply]:
    """As ``server.run_all``."""
    if len(calls) == 1:
        return [(await arun(client, calls[0])).value]
    return await adrive(run_all_steps(_RouteOfTasks(client, server_of(client)), calls))


class _RouteOfTasks(Route):
    """Its steps are awaitable."""

    def locate(self, keys: Sequence[bytes], until: float | None) -> Awaitable[Server]:
        return located(self.server, keys, until)

    def ask(self, node: Server, command: bytes, **options: Any) -> Awaitable[Reply]:
        return exchange(self.client, node, command, **options)

    def sleep(self, seconds: float) -> Awaitable[None]:
        return asyncio.sleep(seconds)


async def located(server: Server, keys: Sequence[bytes], until: float | None = None) -> Server:
    """As ``server.locate``, which may have to ask other servers, without blocking the loop."""
    if not server.must_discover():
        return server.locate(keys, until)
    return await asyncio.to_thread(server.locate, keys, until)


async def aconnect(client: Client, keys: Sequence[bytes], timeout: float) -> AsyncRawConnection:
    """A connection to where ``keys`` are, made within ``timeout`` seconds, for one task alone, on
    which a reply may take forever."""
    node = await located(server_of(client), keys)
    pool, generation = pool_of(client, node), node.generation
    connection = await cancellable(connect_to(pool, timeout))
    node.track(connection, generation)
    return connection
