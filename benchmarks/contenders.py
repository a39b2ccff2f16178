"""The locks that are compared, each with ``acquire()`` and ``release()``."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.lock import Lock as RedisPyAsyncLock
from redis.lock import Lock as RedisPyLock

from django_redis_lock import AsyncLock, Lock

from .results import OURS

__all__ = [
    "ABSENT",
    "ASYNC_LOCKS",
    "BARE",
    "LOCKS",
    "load_bare_script",
    "make_async_lock",
    "make_lock",
]

#: The least a lock can cost: no lock at all, for no caller can wait for it.
BARE = "two bare trips"

DELETE_OWN = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end"
DELETE_OWN_SHA = hashlib.sha1(DELETE_OWN.encode(), usedforsecurity=False).hexdigest()


class BareTrips:
    """SET NX PX, then EVALSHA to delete it; see ``load_bare_script``."""

    def __init__(self, client: redis.Redis, name: str, timeout: int) -> None:
        self._client, self._name, self._ms = client, name, timeout * 1000

    def acquire(self) -> None:
        self._token = secrets.token_hex(16)
        self._client.set(self._name, self._token, nx=True, px=self._ms)

    def release(self) -> None:
        self._client.evalsha(DELETE_OWN_SHA, 1, self._name, self._token)


class AsyncBareTrips:
    """The same for asyncio."""

    def __init__(self, client: redis.asyncio.Redis, name: str, timeout: int) -> None:
        self._client, self._name, self._ms = client, name, timeout * 1000

    async def acquire(self) -> None:
        self._token = secrets.token_hex(16)
        await self._client.set(self._name, self._token, nx=True, px=self._ms)

    async def release(self) -> None:
        await self._client.evalsha(DELETE_OWN_SHA, 1, self._name, self._token)


def _python_redis_lock(client: redis.Redis, name: str, timeout: int) -> Any:
    import redis_lock

    return redis_lock.Lock(client, name, expire=timeout)


def _pottery(client: redis.Redis, name: str, timeout: int) -> Any:
    from pottery import Redlock

    return Redlock(key=name, masters={client}, auto_release_time=timeout)


def _redis_py_polling(client: redis.Redis, name: str, timeout: int) -> Any:
    return RedisPyLock(client, name, timeout, sleep=0.001)


_ALL: dict[str, tuple[str, Callable[[redis.Redis, str, int], Any]]] = {
    BARE: ("redis", BareTrips),
    "redis-py": ("redis", RedisPyLock),
    "redis-py, sleep=0.001": ("redis", _redis_py_polling),
    "python-redis-lock": ("redis_lock", _python_redis_lock),
    "pottery": ("pottery", _pottery),
    OURS: ("redis", Lock),
}
_PRESENT = {name: make for name, (module, make) in _ALL.items() if find_spec(module)}

_ALL_ASYNC: dict[str, Callable[[redis.asyncio.Redis, str, int], Any]] = {
    BARE: AsyncBareTrips,
    "redis-py": RedisPyAsyncLock,
    OURS: AsyncLock,
}

#: Names of those that are not installed.
ABSENT = tuple(name for name in _ALL if name not in _PRESENT)
#: Names of those that exclude and wait.
LOCKS = tuple(name for name in _PRESENT if name != BARE)
ASYNC_LOCKS = tuple(name for name in _ALL_ASYNC if name != BARE)


def load_bare_script(client: redis.Redis) -> None:
    """Teach the server what the bare trips delete with."""
    client.script_load(DELETE_OWN)


def make_lock(contender: str, client: redis.Redis, name: str, timeout: int = 10) -> Any:
    """A handle for the lock ``name``, which lives ``timeout`` seconds."""
    return _PRESENT[contender](client, name, timeout)


def make_async_lock(
    contender: str, client: redis.asyncio.Redis, name: str, timeout: int = 10
) -> Any:
    return _ALL_ASYNC[contender](client, name, timeout)
