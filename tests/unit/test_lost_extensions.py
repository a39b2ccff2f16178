"""The end of a lock is noted while its extension is on the way: that it is lost is final, so the
extension fails, and keeps nobody from the lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from django_redis_lock import (
    AsyncLock,
    AsyncMultiLock,
    AsyncRedlock,
    Lock,
    LockNotOwnedError,
    MultiLock,
    Redlock,
)
from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.steps import Steps
from django_redis_lock.transport import asyncio_client
from tests.processes import until

NAME = "extended"


def one(kind: Any, **options: Any) -> Callable[[list[Any]], Any]:
    return lambda clients: kind(clients[0], NAME, timeout=30, **options)


#: Of several names, the end of the last is noted.
LOCKS: dict[str, Callable[[list[Any]], Any]] = {
    "Lock": one(Lock),
    "renewed": one(Lock, renew=True),
    "reentrant": one(Lock, reentrant=True),
    "limit": one(Lock, limit=2),
    "local": one(Lock, on_redis_down="local"),
    "of a task": one(AsyncLock),
    "of a task, limit": one(AsyncLock, limit=2),
    "several names": lambda clients: MultiLock(clients[0], ["a", NAME], timeout=30),
    "several names of a task": lambda clients: AsyncMultiLock(clients[0], ["a", NAME], timeout=30),
    "Redlock": lambda clients: Redlock(clients, NAME, timeout=30),
    "Redlock of a task": lambda clients: AsyncRedlock(clients, NAME, timeout=30),
}

CHANGES: dict[str, Callable[[Any], Any]] = {
    "extend": lambda lock: lock.extend(60),
    "replace": lambda lock: lock.extend(60, replace_ttl=True),
    "reacquire": lambda lock: lock.reacquire(),
}


def losing(lock: Any) -> None:
    """Let its end be noted at the first step of its next extension."""
    change = lock._change_steps

    def steps(*of_it: Any) -> Steps[Any]:
        inner = change(*of_it)
        step = next(inner)
        assert getattr(lock, "members", [lock])[-1].local.hold.lose("it was released by force")
        while True:
            try:
                step = inner.send((yield step))
            except StopIteration as end:
                return end.value

    lock._change_steps = steps


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", LOCKS)
def test_an_extension_of_a_lost_lock_fails(kind: str, change: str, tmp_path: Path) -> None:
    clients = [client_of(Database(str(number))) for number in range(3)]

    def expect_free() -> None:
        until(lambda: not any(client.exists(NAME) for client in clients))

    async def in_a_task() -> None:
        lock = LOCKS[kind]([asyncio_client(client) for client in clients])
        assert await lock.acquire()
        losing(lock)
        with pytest.raises(LockNotOwnedError, match="released by force"):
            await CHANGES[change](lock)
        assert "released by force" in lock.lost_reason
        await asyncio.to_thread(expect_free)

    if "task" in kind:
        asyncio.run(in_a_task())
    else:
        lock = LOCKS[kind](clients)
        lock.local_folder = str(tmp_path)
        assert lock.acquire()
        losing(lock)
        with pytest.raises(LockNotOwnedError, match="released by force"):
            CHANGES[change](lock)
        assert "released by force" in lock.lost_reason
        expect_free()
