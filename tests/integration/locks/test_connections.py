"""What becomes of the connections of our own after a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from django_redis_lock import Lock
from django_redis_lock.transport import server_of
from tests.redis_server import RedisServer
from tests.redis_topologies import SentinelServers


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


def test_a_question_to_a_sentinel_leaves_its_connection_for_the_next(
    sentinel_servers: SentinelServers,
) -> None:
    with sentinel_servers.client() as client:
        service: Any = server_of(client)
        service.locate(())
        assert any(not sentinel.must_connect() for sentinel in service._sentinels)
