"""A server is reached by its name. Kinds: the system's resolver takes longer than a caller has; the
first of several addresses does not answer, and a signal handler raises meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from django_redis.exceptions import ConnectionInterrupted

from django_redis_lock import AsyncLock, Lock, Redlock
from django_redis_lock.cache import RedisCache
from django_redis_lock.exceptions import TooFewServers
from django_redis_lock.transport import interrupts, server_of
from tests.integration.locks.test_lock_redis_py import TLS
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.background import Background

from .test_signal_errors import KINDS, Alarm

TIMEOUT = 0.3


class Resolver:
    """The system's, but for one ``name``, new for each test. ``addresses``: of that name;
    ``answers``: whether it does."""

    def __init__(self) -> None:
        self.name = f"redis-{secrets.token_hex(4)}.test"
        self.addresses = ["127.0.0.1"]
        self.answers, self.asked = threading.Event(), threading.Event()
        self.answers.set()
        self.gave_up = False
        self._original = socket.getaddrinfo

    def __call__(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != self.name:
            return self._original(host, port, *args, **options)
        self.asked.set()
        if not self.answers.wait(PATIENCE):
            self.gave_up = True
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


FAILED = (redis.RedisError, ConnectionInterrupted, TooFewServers)


def taken(lock: Any, **options: Any) -> None:
    assert lock.acquire(**options)
    lock.release()


def quorum(client: Any, server: RedisServer) -> None:
    """A minority has no address."""
    others = [redis.Redis(port=server.port, db=db) for db in (1, 2)]
    taken(Redlock([client, *others], "name", 30, server_timeout=TIMEOUT), blocking=False)


def in_a_task(work: Callable[[], Any], ended: threading.Event) -> None:
    """While ``work`` is awaited, the loop runs. It ends when the system's call does."""

    async def main() -> Any:
        turns, task = 0, asyncio.ensure_future(work())
        while not task.done():
            turns += 1
            await asyncio.sleep(0.001)
        first = not ended.is_set()
        ended.set()
        try:
            await task
        finally:
            assert turns > 5 or not first, "the loop stood still"

    asyncio.run(main())


async def task_lock(client: Any) -> None:
    where = client.connection_pool.connection_kwargs
    there = redis.asyncio.Redis(host=where["host"], port=where["port"], socket_timeout=TIMEOUT)
    lock = AsyncLock(there, "name", 30)
    try:
        assert await lock.acquire(blocking_timeout=TIMEOUT)
        await lock.release()
    finally:
        await there.connection_pool.disconnect()


Work = Callable[[Any, Any, RedisServer, threading.Event], Any]
#: What each caller does, and whether it ends well without the server.
CALLERS: dict[str, tuple[Work, bool]] = {
    "lock": (lambda c, cache, s, ended: taken(Lock(c, "name", 30), blocking=False), False),
    "wait": (lambda c, cache, s, ended: taken(Lock(c, "name", 30), blocking_timeout=0.5), False),
    "Redlock's member": (lambda c, cache, server, ended: quorum(c, server), True),
    "get_or_set": (lambda c, cache, s, ended: cache.get_or_set("a", lambda: 1, 60), True),
    "get": (lambda c, cache, s, ended: cache.get("a"), False),
    "redis-py": (lambda c, cache, s, ended: cache.client.get_client().ping(), False),
    "task": (lambda c, cache, s, ended: in_a_task(lambda: task_lock(c), ended), False),
    "task's get_or_set": (
        lambda c, cache, s, ended: in_a_task(lambda: cache.aget_or_set("b", lambda: 1, 60), ended),
        True,
    ),
}


@pytest.mark.invariant("L5")
@pytest.mark.parametrize("caller", CALLERS)
def test_a_slow_resolver(
    redis_server: RedisServer, client: redis.Redis, resolver: Resolver, caller: str
) -> None:
    call, ends_well = CALLERS[caller]
    there = redis.Redis(resolver.name, redis_server.port, socket_timeout=TIMEOUT)
    options = {"SOCKET_TIMEOUT": TIMEOUT, "SOCKET_CONNECT_TIMEOUT": TIMEOUT}
    cache = RedisCache(f"redis://{resolver.name}:{redis_server.port}/0", {"OPTIONS": options})
    resolver.answers.clear()
    ended = threading.Event()

    def work() -> None:
        try:
            call(there, cache, redis_server, ended)
        finally:
            ended.set()

    working = Background(work)
    assert ended.wait(PATIENCE)
    assert not resolver.gave_up
    resolver.answers.set()
    if ends_well:
        working.result()
    else:
        with pytest.raises(FAILED):
            working.result()

    def works() -> bool:
        with suppress(FAILED):
            call(there, cache, redis_server, ended)
            return True
        return False

    until(works)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caller", ["lock", "get", "redis-py"])
def test_a_signal_handler_raises_at_the_first_of_several_addresses(
    redis_server: RedisServer,
    client: redis.Redis,
    resolver: Resolver,
    unreachable: str,
    caller: str,
    kind: Any,
) -> None:
    resolver.addresses = [unreachable, "127.0.0.1"]
    main, alarm = threading.main_thread().ident, Alarm(kind)
    before = signal.signal(signal.SIGUSR1, alarm)

    def send() -> None:
        resolver.asked.wait(PATIENCE)
        time.sleep(0.1)  # It connects by then.
        signal.pthread_kill(main, signal.SIGUSR1)

    there = redis.Redis(resolver.name, redis_server.port, socket_timeout=PATIENCE)
    options = {"SOCKET_TIMEOUT": PATIENCE, "SOCKET_CONNECT_TIMEOUT": PATIENCE}
    cache = RedisCache(f"redis://{resolver.name}:{redis_server.port}/0", {"OPTIONS": options})
    sending = Background(send)
    try:
        with pytest.raises(OSError, match="too slow") as raised:
            CALLERS[caller][0](there, cache, redis_server, threading.Event())
    finally:
        sending.result()
        signal.signal(signal.SIGUSR1, before)
    assert raised.value is alarm.raised
    assert not server_of(there).breaker.failing


def test_each_address_of_a_name_is_tried(
    redis_server: RedisServer, client: redis.Redis, resolver: Resolver, unreachable: str
) -> None:
    resolver.addresses = [unreachable, "127.0.0.3", "127.0.0.1"]
    taken(Lock(redis.Redis(resolver.name, redis_server.port, socket_timeout=TIMEOUT), "name", 30))
    resolver.addresses = ["127.0.0.3"]
    interrupts._lookups.clear()
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
