"""A large value by a network that carries little at a time. Kind: what makes progress is no outage,
whoever writes, however long the whole takes; what stands still is one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django_redis.exceptions import ConnectionInterrupted

from django_redis_lock.cache import RedisCache
from django_redis_lock.transport import address, aio_connection, server_of
from tests.faults.proxy import Proxy
from tests.integration.locks.test_lock_redis_py import TLS
from tests.redis_server import RedisServer

pytestmark = pytest.mark.invariant("P2")

#: Seconds: the time-out of the socket, and in which a part of the value is carried.
TIMEOUT, PART_TAKES = 0.3, 0.015
#: Takes several time-outs.
VALUE = os.urandom(4_000_000)

CALLERS: dict[str, Callable[[Any], Any]] = {
    "set": lambda cache: cache.set("a", VALUE),
    "set_many": lambda cache: cache.set_many({"a": VALUE, "b": 1}),
    "leader": lambda cache: cache.get_or_set("a", lambda: VALUE, 60),
    "redis-py": lambda cache: cache.client.get_client().set(":1:a", cache.client.encode(VALUE)),
    "aset": lambda cache: asyncio.run(cache.aset("a", VALUE)),
    "leading task": lambda cache: asyncio.run(cache.aget_or_set("a", lambda: VALUE, 60)),
    "tasks at once": lambda cache: asyncio.run(_at_once(cache)),
}


async def _at_once(cache: Any) -> None:
    """In one turn of the loop, so that their calls are sent together."""
    await cache.aget("warm")
    writes = (cache.aset("b", 1), cache.aset("a", VALUE), cache.aset("c", 1))
    assert all(await asyncio.gather(*writes))


@pytest.fixture
def proxy(redis_server: RedisServer, client: Any) -> Iterator[Proxy]:
    with Proxy(redis_server, slow_uplink=True) as proxy:
        yield proxy


def through(proxy: Proxy, scheme: str, timeout: float, **pool: object) -> Any:
    options = {"SOCKET_TIMEOUT": timeout, "CONNECTION_POOL_KWARGS": pool}
    return RedisCache(f"{scheme}://127.0.0.1:{proxy.port}/0", {"OPTIONS": options})


@pytest.mark.sample(9)
@pytest.mark.parametrize("parser", ["hiredis", "redis-py"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("caller", CALLERS)
def test_what_makes_progress(
    redis_server: RedisServer,
    proxy: Proxy,
    caller: str,
    tls: bool,
    parser: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pace: int,
) -> None:
    if parser != "hiredis":
        for module in (address, aio_connection):
            monkeypatch.setattr(module, "HAS_HIREDIS", False)
    if tls:
        with TLS(redis_server.port, tmp_path) as front:
            proxy.lead_to(front)
            pool = {"ssl_ca_certs": front.certificate, "ssl_check_hostname": False}
            write(caller, proxy, through(proxy, "rediss", TIMEOUT * pace, **pool), pace)
    else:
        write(caller, proxy, through(proxy, "redis", TIMEOUT * pace), pace)
    assert RedisCache(redis_server.url, {}).get("a") == VALUE


def write(caller: str, proxy: Proxy, cache: Any, pace: int) -> None:
    cache.set("warm", 1)
    proxy.part_takes = PART_TAKES * pace
    CALLERS[caller](cache)
    assert not server_of(cache._lock_client()).breaker.failing


@pytest.mark.parametrize("caller", ["set", "aset", "redis-py"])
def test_what_stands_still(proxy: Proxy, caller: str) -> None:
    cache = through(proxy, "redis", TIMEOUT)
    cache.set("warm", 1)
    with proxy.stalled(), pytest.raises((redis.TimeoutError, ConnectionInterrupted)):
        CALLERS[caller](cache)
