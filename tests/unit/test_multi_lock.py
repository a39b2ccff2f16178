"""Locks of several names, as far as they need no server."""

from __future__ import annotations

from typing import Any

import pytest

from django_redis_lock import locked
from django_redis_lock.cache import cache
from django_redis_lock.contrib.testing import MemoryServer

#: All names in one request; or one after the other, as where each may fall back.
WAYS: dict[str, dict[str, Any]] = {"at once": {}, "in order": {"on_redis_down": "run"}}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, redis_locks: MemoryServer) -> dict[str, Any]:
    return WAYS[request.param]


def held(server: MemoryServer) -> str:
    return "".join(sorted(key[-1] for key in server.held()))


@pytest.mark.parametrize("options", [{}, {"blocking_timeout": 0.01}, {"blocking": False}])
def test_all_names_or_none(
    way: dict[str, Any], redis_locks: MemoryServer, options: dict[str, Any]
) -> None:
    lock = cache.lock(["a", "b", "c"], **way, **options)
    assert lock.acquire()
    assert held(redis_locks) == "abc"
    lock.release()
    assert not held(redis_locks)
    if options:
        with locked("b"):
            assert not lock.acquire()
            assert held(redis_locks) == "b"
