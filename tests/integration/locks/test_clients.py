"""Clients that differ from redis-py's usual ones, handles for a token from elsewhere, and
what becomes of our own connections after a call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from django_redis_lock import AsyncLock, AsyncMultiLock, AsyncRedlock, Lock, LockError
from django_redis_lock.transport import asyncio_client, server_of
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.background import Background


class NoSocket:
    """What a fake of Redis has in place of a socket."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class SocketlessConnection(redis.Connection):
    def _connect(self) -> Any:
        return NoSocket(super()._connect())


@pytest.fixture
def socketless(client: redis.Redis) -> redis.Redis:
    settings = client.connection_pool.connection_kwargs
    where = {name: settings[name] for name in ("host", "port", "db") if name in settings}
    pool = redis.ConnectionPool(connection_class=SocketlessConnection, **where)
    return redis.Redis(connection_pool=pool)


@pytest.mark.parametrize("options", [{}, {"limit": 1}])
def test_without_a_socket_a_wait_polls(
    client: redis.Redis, socketless: redis.Redis, options: dict[str, Any]
) -> None:
    holder = Lock(client, "name", timeout=60, **options)
    holder.acquire()
    assert not Lock(socketless, "name", timeout=60, **options).acquire(blocking_timeout=0.3)
    waiter = Lock(socketless, "name", timeout=60, sleep=0.01, **options)
    waiting = Background(lambda: waiter.acquire(blocking_timeout=PATIENCE))
    until(lambda: client.zcard(holder.keys.waiters))
    assert not client.info("clients")["blocked_clients"]
    holder.release()
    assert waiting.result()


@pytest.mark.parametrize("kind", [AsyncLock, AsyncMultiLock, AsyncRedlock])
def test_a_client_for_threads_is_refused_for_tasks(client: redis.Redis, kind: Any) -> None:
    others = [redis.Redis(port=port) for port in (1, 2)]
    given: Any = [client, *others] if kind is AsyncRedlock else client
    names = ["one", "two"] if kind is AsyncMultiLock else "name"
    with pytest.raises(TypeError, match=r"redis\.asyncio, not Redis for threads: use cache\.alock"):
        kind(given, names, timeout=30)


@pytest.mark.parametrize("options", [{}, {"limit": 2}])
def test_a_token_from_elsewhere_extends_without_a_timeout(
    client: redis.Redis, options: dict[str, Any]
) -> None:
    holder = Lock(client, "name", timeout=30, **options)
    holder.acquire()
    other = Lock(client, "name", id=holder.local.token, **options)
    assert other.extend(30)
    assert client.pttl("name") > 55_000
    assert other.extend(10, replace_ttl=True)
    assert 5_000 < client.pttl("name") <= 10_000
    with pytest.raises(LockError, match="no timeout"):
        other.reacquire()

    async def main() -> None:
        tasks = asyncio_client(client)
        assert await AsyncLock(tasks, "name", id=holder.local.token, **options).extend(30)

    asyncio.run(main())
    assert client.pttl("name") > 30_000
    holder.release()


@pytest.mark.parametrize("options", [{}, {"limit": 2}])
def test_a_lock_without_a_lifetime_gets_none(client: redis.Redis, options: dict[str, Any]) -> None:
    holder = Lock(client, "name", timeout=None, **options)
    holder.acquire()
    with pytest.raises(LockError, match="no timeout"):
        Lock(client, "name", id=holder.local.token, **options).extend(30)
    assert client.pttl("name") == -1
    holder.release()


class Own(redis.Connection):
    """Read and written by redis-py, as are those with TLS."""


@pytest.fixture(params=[redis.Connection, Own])
def fresh(request: Any, redis_server: RedisServer, client: redis.Redis) -> Iterator[redis.Redis]:
    """A client to whose server this process has no idle connections."""
    settings = {**client.connection_pool.connection_kwargs, "socket_timeout": 7.5}
    with redis.Redis(connection_pool=redis.ConnectionPool(request.param, **settings)) as found:
        server_of(found).close()
        yield found


def test_a_connection_made_by_a_hasty_caller_is_kept(
    fresh: redis.Redis, client: redis.Redis
) -> None:
    lock = Lock(fresh, "name", renew=False)
    assert lock.acquire(blocking_timeout=1)
    [made] = server_of(fresh)._idle
    lock.release()
    [kept] = server_of(fresh)._idle
    assert made[0] is kept[0]


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="another name on this system")
@pytest.mark.parametrize("given", [None, 7])
def test_the_system_asks_whether_an_idle_connections_peer_is_there(
    redis_server: RedisServer, given: int | None
) -> None:
    wanted = {} if given is None else {"socket_keepalive_options": {socket.TCP_KEEPIDLE: given}}
    # Clients with the same time-outs share their connections.
    timeout = 4.25 if given is None else 4.5
    with redis.Redis.from_url(redis_server.url, socket_timeout=timeout, **wanted) as client:
        assert not Lock(client, "name").locked()
        (connection, *_), *_ = server_of(client)._idle
        idle = connection._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    assert idle <= 60 if given is None else idle == given
