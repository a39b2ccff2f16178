"""A server is reached by its name, which may have several addresses."""

from __future__ import annotations

import itertools
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from django_redis_lock import Lock
from tests.integration.locks.test_lock_redis_py import TLS
from tests.redis_server import RedisServer

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
        with pytest.raises(redis.ConnectionError, match=f"not valid for '{resolver.name}'"):
            wrong.acquire(blocking=False)
