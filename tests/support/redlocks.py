"""Five servers for a lock that needs a majority of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
import redis.asyncio

from tests.redis_server import RedisServer

FIVE = 5
#: Seconds within which a server answers, also if the whole machine is at a standstill for a moment.
AMPLE = 5


@pytest.fixture(scope="module")
def five() -> Iterator[list[RedisServer]]:
    servers = [RedisServer() for _ in range(FIVE)]
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.close()


@pytest.fixture
def clients(five: list[RedisServer]) -> Iterator[list[redis.Redis]]:
    found = [server.client() for server in five]
    for client in found:
        client.flushall()
    yield found
    for client in found:
        client.close()
