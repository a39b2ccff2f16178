"""Where locks live that pass ``tests.lock_contract``, and who waits there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import redis
import redis.asyncio

from django_redis_lock import Lock
from django_redis_lock.locking.waiting import queues


class Backend(ABC):
    """Where locks live, and what can happen to them there."""

    @abstractmethod
    def make_lock(self, name: str | bytes = "contract", **options: Any) -> Any:
        """A handle with ``Lock``'s methods."""

    @abstractmethod
    def value(self, name: str) -> bytes | None:
        """The token of who has the lock ``name``."""

    @abstractmethod
    def expire_in(self, name: str, seconds: float) -> None:
        """Let the lifetime of ``name`` run out in so many seconds."""

    def expire_now(self, name: str) -> None:
        """Let the lifetime of ``name`` run out."""
        self.expire_in(name, 0)

    @abstractmethod
    def delete_key(self, name: str) -> None:
        """Delete ``name``, as an operator might by hand."""

    @abstractmethod
    def forget_everything(self) -> None:
        """Lose all data."""

    @abstractmethod
    def waiting(self, name: str) -> int:
        """How many wait for ``name``."""


def places(name: str | bytes) -> int:
    """How many of this process wait for the lock at ``name``."""
    key = name if isinstance(name, bytes) else name.encode()
    return sum(len(found.waiters) for found in list(queues.values()) if found.key[1] == key)


class OnRedis(Backend):
    """Locks of one class on one server."""

    lock_class: Any = Lock

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def make_lock(self, name: str | bytes = "contract", **options: Any) -> Any:
        return self.lock_class(self.client, name, **options)

    def value(self, name: str) -> bytes | None:
        value: bytes | None = self.client.get(name)
        return value

    def expire_in(self, name: str, seconds: float) -> None:
        assert self.client.pexpire(name, int(seconds * 1000))

    def delete_key(self, name: str) -> None:
        assert self.client.delete(name)

    def forget_everything(self) -> None:
        self.client.flushdb()

    def waiting(self, name: str) -> int:
        return places(name)


def blocked(client: redis.Redis) -> list[str]:
    """The ids of the connections that wait in Redis."""
    return [c["id"] for c in client.client_list() if "b" in c["flags"]]
