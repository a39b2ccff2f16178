"""The lock of this host that stands in for the one in Redis, for ``ON_REDIS_DOWN = "local"``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...clock import time
from ...exceptions import LocalLockUnavailable
from ...locking import BaseLock
from ...protocol import Owner, printable
from ...steps import Steps
from ...threads import get_logger, may_log
from ...transport import Server
from .file_lock import LocalLock, pauses

logger = get_logger("django_redis_lock.lock")

_logged_at: dict[object, float] = {}


@dataclass(frozen=True, slots=True)
class HostLock:
    """What a lock in Redis is on this host.

    Attributes:
        key, name: the lock's, and how people read it.
        servers: where the lock is in Redis.
        folder: of the local locks; None: this user's among the temporary files.
        asynchronous: whether a task waits for it.
    """

    key: bytes
    name: str
    servers: tuple[Server, ...]
    folder: str | os.PathLike[str] | None
    asynchronous: bool

    @classmethod
    def of(cls, lock: BaseLock) -> HostLock:
        key = lock.keys.lock
        name = lock.cache_key or key.decode(errors="backslashreplace")
        return cls(key, name, lock._servers, lock.local_folder, lock.asynchronous)

    def identity(self, key: bytes | None = None) -> bytes:
        """Which lock it is; of one with places, by the ``key`` of the place."""
        servers = ",".join(sorted(server.breaker.server for server in self.servers))
        return b"%b\0%b" % (servers.encode(), key or self.key)

    def attempt(self) -> LocalLock:
        """One attempt to hold it."""
        return LocalLock(self.identity(), self.name, self.folder)

    def take(
        self,
        attempt: LocalLock,
        owner: Owner,
        until: float,
        in_addition: bool,
        on_taken: Callable[[LocalLock], object] = lambda attempt: None,
    ) -> Steps[bool]:
        """Wait for it, until a monotonic time. Its release signals nothing, so this polls.
        ``on_taken`` is called before a wait."""
        tries = pauses(until)
        while True:
            try:
                if attempt.try_acquire(owner, in_addition):
                    return True
                if in_addition and attempt.is_in_addition():
                    return True  # Its holder has lost the lock in Redis, which this caller holds.
            except LocalLockUnavailable as error:
                if not in_addition:
                    raise
                self._log_unavailable(error)
                return True
            on_taken(attempt)
            pause = next(tries, None)
            if pause is None:
                return False
            yield time.asleep(pause) if self.asynchronous else time.sleep(pause)

    def holder(self, *, away: bool) -> Owner | None:
        """Its holder who has no lock in Redis; while Redis is ``away``, any."""
        attempt = self.attempt()
        try:
            return attempt.holder() if away or not attempt.is_in_addition() else None
        except LocalLockUnavailable as error:
            if away:
                raise
            self._log_unavailable(error)
            return None

    def _log_unavailable(self, error: LocalLockUnavailable) -> None:
        cause: Any = error.__cause__
        if may_log((cause.errno, cause.strerror, self.folder), _logged_at):
            logger.warning(
                "The lock %(lock)s is in Redis only, and fails in an outage: %(error)s",
                {"lock": printable(self.key), "error": error},
            )
