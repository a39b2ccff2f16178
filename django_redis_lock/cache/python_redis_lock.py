"""What python-redis-lock has under these names, for those who switch from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT

from ..exceptions import LockError
from ..inventory import list_held
from ..locking import Lock
from .anew import ComputingAnew
from .get_or_set_many import ComputingMany

__all__ = ["AlreadyAcquired", "NotAcquired", "PythonRedisLock", "reset_all"]

#: What is raised where python-redis-lock raises these: when a handle is to acquire what it holds
#: for ever already, and when a lock that is not held is released or extended.
AlreadyAcquired = NotAcquired = LockError


def reset_all(redis_client: Any, prefix: bytes = b"") -> int:
    """Release all locks of a database, whoever holds them. Their holders are told that they are
    lost. Locks of other libraries are left alone, and so is everything that is no lock.

    Args:
        redis_client: a redis-py client.
        prefix: only locks whose keys begin so.

    Returns:
        the number of locks released.

    Raises:
        redis.exceptions.RedisError: Redis could not be asked. Some may be released.
    """
    released = 0
    while True:
        inventory = list_held(redis_client, prefix, limit=1000)
        now = sum(Lock(redis_client, held.key).reset() for held in inventory.locks)
        released += now
        if inventory.complete or not now:
            return released


class PythonRedisLock(ComputingMany, ComputingAnew):
    """The part of ``RedisCache`` that goes by python-redis-lock's names."""

    lock: Any
    conf: Any
    _encoded_key: Any
    _lock_client: Any

    def locked_get_or_set(
        self,
        key: str,
        value_creator: Callable[[], Any],
        version: int | None = None,
        expire: float | None = None,
        id: str | bytes | None = None,
        lock_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Any:
        """``get_or_set`` by python-redis-lock's name. None is a value here, and kept.

        Args:
            lock_key: a lock to hold while ``value_creator`` runs, so that values with the same
                ``lock_key`` are computed one after another. Left out, no lock is needed: a value
                is computed once in any case.
            expire: seconds that lock lives; left out, the setting TIMEOUT, renewed meanwhile.
                Without ``lock_key`` it means nothing: FLIGHT_TIMEOUT and its renewal do.
            id: the token of that lock.
        """

        def create() -> Any:
            if lock_key is None:
                return value_creator()
            lifetime = {} if expire is None else {"timeout": expire}
            with self.lock(lock_key, id=id, **lifetime):
                return value_creator()

        return self.get_or_set(key, create, timeout, version)

    def reset_all(self) -> int:
        """Release the locks of this cache and its default version, whoever holds them; the number
        of those released. Their holders are told that they are lost. Values are not touched, nor
        are locks with another key prefix."""
        return reset_all(self._lock_client(), self._encoded_key(self.conf.LOCK_PREFIX, None))
