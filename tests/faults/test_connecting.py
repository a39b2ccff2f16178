"""The project's own code on the way to a connection: a credential provider, or a function that
meets the server. What it raises is an outage of that server. And names with
several addresses."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.auth.err import RequestTokenErr
from redis.credentials import CredentialProvider

from django_redis_lock import AsyncLock, Lock
from django_redis_lock.contrib.instant_loss import Subscription
from django_redis_lock.transport import is_outage, server_of
from django_redis_lock.transport.hints import explained
from tests.holding import hurry_until, renew
from tests.integration.locks.test_lock_redis_py import TLS
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.background import Background

NAME = "on the way"


class VaultSealed(Exception):
    """Of the project's own."""


ERRORS = [RequestTokenErr("no token"), VaultSealed("sealed"), PermissionError(13, "token file")]


class Way(CredentialProvider):
    """Raises ``error`` while there is one."""

    error: Exception | None = None

    def get_credentials(self) -> tuple[str, str]:
        if self.error is not None:
            raise self.error
        return "default", "any"


@pytest.fixture
def way() -> Way:
    return Way()


@pytest.fixture(params=ERRORS, ids=lambda error: type(error).__name__)
def error(request: pytest.FixtureRequest) -> Exception:
    return request.param


def by_a_provider(way: Way) -> dict[str, Any]:
    return {"credential_provider": way}


def by_a_function(way: Way) -> dict[str, Any]:
    def meet(connection: Any) -> None:
        way.get_credentials()
        connection.on_connect()

    return {"redis_connect_func": meet}


@pytest.fixture(params=[by_a_provider, by_a_function])
def there(
    request: pytest.FixtureRequest, client: redis.Redis, redis_server: RedisServer, way: Way
) -> Iterator[redis.Redis]:
    options: Callable[[Way], dict[str, Any]] = request.param
    with redis.Redis.from_url(redis_server.url, **options(way)) as there:
        yield there


def cut_off(client: redis.Redis) -> None:
    for kind in ("normal", "pubsub"):
        client.client_kill_filter(_type=kind, skipme=True)


def test_a_call_finds_the_server_down(there: redis.Redis, way: Way, error: Exception) -> None:
    way.error = error
    with pytest.raises(redis.ConnectionError, match=type(error).__name__) as raised:
        Lock(there, NAME, timeout=30).acquire(blocking=False)
    assert is_outage(raised.value)
    assert raised.value.__cause__ is error
    way.error = None
    assert Lock(there, NAME, timeout=30).acquire(blocking=False)


def test_a_task_finds_the_server_down(redis_server: RedisServer, way: Way) -> None:
    async def main() -> None:
        there = redis.asyncio.Redis.from_url(redis_server.url, credential_provider=way)
        way.error = VaultSealed("sealed")
        with pytest.raises(redis.ConnectionError, match="VaultSealed"):
            await AsyncLock(there, NAME, timeout=30).acquire(blocking=False)
        way.error = None
        assert await AsyncLock(there, NAME, timeout=30).acquire(blocking=False)
        await there.aclose()

    asyncio.run(main())


def test_a_waiter_goes_on(
    client: redis.Redis, there: redis.Redis, way: Way, error: Exception
) -> None:
    holder = Lock(client, NAME, timeout=30)
    holder.acquire()
    waiter = Background(Lock(there, NAME, timeout=30).acquire)
    until(lambda: client.info("clients")["blocked_clients"])
    way.error = error
    cut_off(client)
    until(lambda: server_of(there).breaker.failing)
    assert not waiter.done
    way.error = None
    holder.release()
    assert waiter.result()


def test_messages_come_back(client: redis.Redis, there: redis.Redis, way: Way) -> None:
    changes: list[object] = []
    messages = Subscription(server_of(there), b"channel", changes.append)
    messages.start()
    try:
        until(lambda: messages.subscribed)
        way.error = VaultSealed("sealed")
        cut_off(client)
        until(lambda: not messages.subscribed)
        until(lambda: server_of(there).breaker.failing)
        way.error = None
        until(lambda: messages.subscribed)
    finally:
        messages.close()


def test_a_slow_provider_delays_no_renewal_on_another_server(
    client: redis.Redis, own_server: RedisServer
) -> None:
    """Each server has a thread of the keeper of its own."""
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Way):
        is_slow = False

        def get_credentials(self) -> tuple[str, str]:
            if self.is_slow:
                asked.set()
                go_on.wait(PATIENCE)
            return super().get_credentials()

    way = Slow()
    with own_server.client(credential_provider=way) as slow, own_server.client() as admin:
        there, here = (Lock(each, NAME, timeout=60, renew=True) for each in (slow, client))
        assert there.acquire(blocking=False)
        assert here.acquire(blocking=False)
        way.is_slow = True
        cut_off(admin)
        try:
            hurry_until(asked.is_set)
            renew(client, NAME)
        finally:
            go_on.set()
        here.release()
        there.release()


# -- names and addresses ------------------------------------------------------------------------


TIMEOUT = 0.3


class Resolver:
    """The system's, but for one ``name``, new for each test, with its ``addresses``."""

    def __init__(self) -> None:
        self.name = f"redis-{secrets.token_hex(4)}.test"
        self.addresses = ["127.0.0.1"]
        self._original = socket.getaddrinfo

    def __call__(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != self.name:
            return self._original(host, port, *args, **options)
        found = (self._original(each, port, *args, **options) for each in self.addresses)
        return list(itertools.chain.from_iterable(found))


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    return made


@pytest.fixture
def unreachable(redis_server: RedisServer) -> Iterator[str]:
    """An address at which connecting takes until the time-out."""
    with socket.create_server(("127.0.0.2", redis_server.port), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.connect(full.getsockname())
        yield "127.0.0.2"
        for each in waiting:
            each.close()


def taken(lock: Any, **options: Any) -> None:
    assert lock.acquire(**options)
    lock.release()


def test_each_address_of_a_name_is_tried(
    redis_server: RedisServer, client: redis.Redis, resolver: Resolver, unreachable: str
) -> None:
    resolver.addresses = [unreachable, "127.0.0.3", "127.0.0.1"]
    taken(Lock(redis.Redis(resolver.name, redis_server.port, socket_timeout=TIMEOUT), "name", 30))
    resolver.addresses = ["127.0.0.3"]
    away = Lock(
        redis.Redis(resolver.name, redis_server.port, socket_timeout=TIMEOUT, db=1), "name", 30
    )
    with pytest.raises(redis.ConnectionError, match=f"connecting to {resolver.name}"):
        away.acquire(blocking=False)


def test_a_certificate_is_that_of_the_name(
    redis_server: RedisServer, client: redis.Redis, resolver: Resolver, tmp_path: Path
) -> None:
    with TLS(redis_server.port, tmp_path) as front:
        options: Any = {"ssl": True, "ssl_ca_certs": front.certificate, "ssl_check_hostname": True}
        wrong = Lock(redis.Redis(resolver.name, front.port, **options), "name", 30)
        with pytest.raises(redis.ConnectionError, match=f"not valid for '{resolver.name}'") as said:
            wrong.acquire(blocking=False)
    assert "connect by a name that it has" in explained(said.value)


def test_a_connection_that_another_thread_has_closed_meanwhile(client: redis.Redis) -> None:
    """redis-py would connect again, or close it with arguments of its own."""
    connection = server_of(client).connect()
    connection.disconnect()
    with pytest.raises(redis.ConnectionError, match="was closed"):
        connection.send_packed_command([b"PING\r\n"])
