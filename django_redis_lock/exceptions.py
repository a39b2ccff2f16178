"""The errors of locks.

Each error has the lock's name, and the holder if it is known, as attributes. The base classes are
redis-py's own, so ``except redis.exceptions.LockError`` keeps catching what it caught before.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from typing import TYPE_CHECKING

from redis import exceptions as redis_exceptions

if TYPE_CHECKING:
    from typing_extensions import Self

    from .protocol import Owner
    from .protocol.holders import HolderInfo

__all__ = [
    "ComputationFailed",
    "LocalLockUnavailable",
    "LockError",
    "LockLost",
    "LockNotAcquired",
    "LockNotOwnedError",
    "TooFewReplicas",
    "TooFewServers",
]


def _text(name: str | bytes | None) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


class LockError(redis_exceptions.LockError):
    """Base of every error this package raises about a lock.

    Attributes:
        lock_name (str | None): the lock's name as the caller wrote it; its key may be longer.
        holder (Owner | None): the holder at the time of the error, if known.
    """

    def __init__(
        self,
        message: str | None = None,
        lock_name: str | bytes | None = None,
        holder: Owner | None = None,
    ) -> None:
        text = message or ""
        if lock_name is not None:
            text = f"{text} (lock {_text(lock_name)!r})"
        super().__init__(message)
        self.args = (text,)
        self.message = text  # Sentry shows it.
        self.lock_name: str | None = None if lock_name is None else _text(lock_name)
        self.holder = holder

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """For copies and pickles: ``__init__`` takes other arguments than ``args``."""
        # What object.__reduce_ex__ returns too; the type stubs do not have it.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class LockNotOwnedError(LockError, redis_exceptions.LockNotOwnedError):
    """This lock object does not hold the lock (any more): it expired, or was reset.

    Attributes:
        reason (str): why it does not, as far as that is known; the message has it, too.
    """

    def __init__(
        self,
        message: str | None = None,
        lock_name: str | bytes | None = None,
        holder: Owner | None = None,
        *,
        reason: str = "",
    ) -> None:
        super().__init__(message, lock_name, holder)
        self.reason = reason


class LockLost(LockNotOwnedError):
    """The lock ended before its holder released it; raised by ``ensure_held()``."""


class LockNotAcquired(LockError):
    """Another caller holds the lock, and the time to wait is over.

    Attributes:
        retry_after (float | None): whole seconds after which trying again makes sense, as
            ``Conflict.retry_after``; None from ``get_or_set``.
        held_for (float | None): seconds since the holder acquired it, if known.
    """

    def __init__(
        self,
        message: str | None = None,
        lock_name: str | bytes | None = None,
        holder: Owner | None = None,
        retry_after: float | None = None,
        held_for: float | None = None,
    ) -> None:
        super().__init__(message, lock_name, holder)
        self.retry_after = retry_after
        self.held_for = held_for

    @classmethod
    def from_held(cls, lock_name: str | bytes, held: HolderInfo | None, retry_after: float) -> Self:
        """The error about a lock with this holder; None if the holder is unknown."""
        text = "Unable to acquire lock within the time specified"
        if held is None:
            return cls(text, lock_name, retry_after=retry_after)
        lock_name = held.name or lock_name
        if held.limit > 1:
            taken = f"all {held.limit} places are taken, and the first to end"
            text = f"{text}: {taken} is held by {held.in_the_way}"
        elif held.resting:
            text = f"{text}: it was released, and its min_hold is not over"
        else:
            text = f"{text}: it is held by {held.in_the_way}"
        return cls(text, lock_name, held.in_the_way, retry_after, held.held_for)


class TooFewServers(LockError, redis_exceptions.ConnectionError):
    """Less than a majority of a lock's servers can be reached. The lock may be free or taken.

    Attributes:
        reached, servers (int): how many servers replied, out of how many.
        errors (tuple[Exception, ...]): the errors of the others.
    """

    def __init__(
        self,
        reached: int,
        servers: int,
        errors: Iterable[Exception] = (),
        lock_name: str | bytes | None = None,
    ) -> None:
        self.errors = tuple(errors)
        causes = "; ".join(dict.fromkeys(map(str, self.errors)))
        text = f"Only {reached} of {servers} servers could be reached, which is no majority"
        super().__init__(f"{text}: {causes}" if causes else text, lock_name)
        self.reached = reached
        self.servers = servers


class TooFewReplicas(LockError, redis_exceptions.ConnectionError):
    """Too few replicas confirmed the acquisition, so the lock was released.

    Attributes:
        confirmed, wanted (int): how many replicas confirmed, and how many should.
    """

    def __init__(self, confirmed: int, wanted: int, lock_name: str | bytes | None = None) -> None:
        text = f"{confirmed} of {wanted} replicas have confirmed in time that the lock is taken"
        super().__init__(text, lock_name)
        self.confirmed = confirmed
        self.wanted = wanted


class LocalLockUnavailable(LockError, redis_exceptions.ConnectionError):
    """Redis is down, and ``on_redis_down="local"`` cannot replace it: this host's file lock fails
    for another reason than that a caller holds it. The lock may be free or taken."""


class ComputationFailed(Exception):
    """Another caller's computation of this value has failed, and ``error_ttl`` is not over. Has the
    message of that failure."""
