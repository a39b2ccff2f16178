"""Locks of several names, as far as they need no server."""

from __future__ import annotations

from typing import Any

import pytest

from django_redis_lock import locked
from django_redis_lock.cache import cache
from django_redis_lock.contrib.several_names import MultiLock
from django_redis_lock.contrib.testing import MemoryServer
from django_redis_lock.transport import NotReady
from tests.support.background import Background

#: All names in one request; or one after the other, as where each may fall back.
WAYS: dict[str, dict[str, Any]] = {"at once": {}, "in order": {"on_redis_down": "run"}}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, redis_locks: MemoryServer) -> dict[str, Any]:
    return WAYS[request.param]


def held(server: MemoryServer) -> str:
    return "".join(sorted(key[-1] for key in server.held()))


def keys() -> set[bytes]:
    return set(cache._lock_client().keys("*"))


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
            before = keys()
            assert not lock.acquire()
            assert held(redis_locks) == "b"
            if options == {"blocking": False}:  # Who does not wait is in no queue.
                assert keys() == before


@pytest.mark.parametrize("executed", [True, False])
def test_an_attempt_whose_outcome_is_unknown_holds_nothing(
    redis_locks: MemoryServer, executed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller waits through the refusal, and not for what it may hold itself."""
    lock = cache.lock(["a", "b"], timeout=60)
    send, refused = MultiLock._send, []

    def refusing(self: Any, call: Any, patience: Any) -> Any:
        if refused:
            return send(self, call, patience)
        if executed:
            send(self, call, patience)
        refused.append(call)
        raise NotReady("LOADING Redis is loading the dataset in memory")

    monkeypatch.setattr(MultiLock, "_send", refusing)
    assert Background(lock.acquire).result()
    assert held(redis_locks) == "ab"
    assert len(refused) == 1
