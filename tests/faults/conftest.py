"""A server behind a proxy that does what networks do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.faults.proxy import Proxy
from tests.holding import watch_often
from tests.redis_server import RedisServer


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server) as proxy:
        yield proxy


@pytest.fixture
def shaky(proxy: Proxy) -> Iterator[redis.Redis]:
    """A client by way of the proxy."""
    with proxy.client() as client:
        yield client


@pytest.fixture
def watched_often(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_often(monkeypatch)
