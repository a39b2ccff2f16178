"""What to do when Redis is down, decided: ``ON_REDIS_DOWN``. No input or output here; ``stand_ins``
has the locks.

``"raise"``: fail. ``"local"``: a lock of this host stands in. ``"run"``: go ahead without any.

With ``"local"`` the lock of this host is held *also while Redis answers*, beside the one in Redis.
Else a holder of the one would not know of a holder of the other: who took the lock locally goes on
when Redis is back, and who took it in Redis goes on when Redis is gone.
"""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import replace
from typing import Any

from .. import events
from ..events import FellBack
from ..exceptions import LockError, TooFewReplicas
from ..forks import free_after_fork
from ..locking import BaseLock
from ..notices import get_logger
from ..protocol import AcquireRequest, Hold, HolderInfo, Owner, check_wait, new_token, printable
from ..transport import Breaker, Server, is_outage, server_of
from .file_lock import LocalLock

__all__ = ["ON_REDIS_DOWN", "Fallback", "check_on_redis_down"]

logger = get_logger("django_redis_lock.outage")

#: What can be done.
ON_REDIS_DOWN = ("raise", "local", "run")
#: Seconds a waiter keeps trying to reach a Redis that went away, before it goes on without.
GRACE = 3.0
#: Seconds between two lines of the log about the same outage.
PAUSE = 60.0


def check_on_redis_down(what: str, value: Any) -> str:
    """``value`` as one of ON_REDIS_DOWN.

    Raises:
        ValueError: it is none.
    """
    if value not in ON_REDIS_DOWN:
        raise ValueError(f"{what} must be 'raise', 'local' or 'run', not {value!r}")
    return str(value)


class FallbackHold(Hold):
    """A lock that was taken without Redis. It has no lifetime and no fence."""

    __slots__ = ("how",)
    how: str

    def owner(self) -> Owner:
        since = time.time() - (self.now() - self.began)
        return replace(super().owner(), since=since)


class Fallback(BaseLock):
    """What a lock that can do without Redis knows beyond the others.

    Args:
        on_redis_down: see the module's words.
        local_folder: where this host's locks are; left out, a folder of this user's own in the
            system's folder for temporary files.
    """

    def __init__(
        self,
        redis: Any,
        name: str | bytes,
        *args: Any,
        on_redis_down: str,
        local_folder: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(redis, name, *args, **options)
        self.on_redis_down = check_on_redis_down("on_redis_down", on_redis_down)
        self._local_folder = local_folder

    @property
    def degraded(self) -> str | None:
        """How this handle holds the lock without Redis: ``"local"`` or ``"run"``; None if it holds
        it in Redis, or not at all."""
        hold = self.local.hold
        return hold.how if isinstance(hold, FallbackHold) and not hold.ended else None

    @property
    def fence(self) -> int | None:
        """None for a lock that was taken without Redis: nobody can count its holders."""
        return None if isinstance(self.local.hold, FallbackHold) else super().fence

    # -- for the locks -------------------------------------------------------------------------

    def _request(self, *args: Any) -> tuple[AcquireRequest, float | None]:
        request, wait = super()._request(*args)
        return request._replace(endures=GRACE), wait

    def _until(self, blocking: bool | None, blocking_timeout: float | None) -> float:
        """The monotonic time at which an acquire with these arguments gives up."""
        check_wait(blocking_timeout)
        if not (self.blocking if blocking is None else blocking):
            return -math.inf
        wait = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        return math.inf if wait is None else time.monotonic() + wait

    def _refuse_to_wait_for_itself(self) -> None:
        if self.degraded and self.thread_local:
            raise LockError("This handle holds the lock already, without Redis", self._shown)
        super()._refuse_to_wait_for_itself()

    def _goes_on_without(self, error: BaseException) -> bool:
        """Whether ``error`` is an outage, and this lock can do without Redis. Who wants replicas to
        confirm wants more than Redis alone, not less."""
        if self.on_redis_down == "raise" or isinstance(error, TooFewReplicas):
            return False
        return is_outage(error)

    def _new_guard(self) -> LocalLock | None:
        """What locks this host, if that is wanted; not locked yet."""
        return self._guard() if self.on_redis_down == "local" else None

    def _guard(self) -> LocalLock:
        """This host's lock."""
        servers = ",".join(sorted(server.breaker.server for server in self._asked()))
        shown = self.called or self.keys.lock.decode(errors="backslashreplace")
        return LocalLock(b"%b\0%b" % (servers.encode(), self.keys.lock), shown, self._local_folder)

    def _asked(self) -> tuple[Server, ...]:
        found = getattr(self, "servers", None)
        return found if found is not None else (server_of(self.redis),)

    def _new_stand_in(self) -> FallbackHold:
        began = self._now()
        hold = FallbackHold(
            self.keys,
            new_token(),
            0,
            began=began,
            deadline=math.inf,
            lifetime=None,
            label=self.label,
            now=self._now,
        )
        hold.how = self.on_redis_down
        return hold

    def _stand_in(self, hold: FallbackHold, guard: LocalLock | None, error: BaseException) -> None:
        """Redis is down, and the lock is held all the same."""
        self.local.hold, self.local.token = hold, hold.token
        self.local.renewal, self.local.guard = None, guard
        breaker = _failing(self._asked())
        breaker.fallbacks += 1
        if events.listeners:
            events.emit(FellBack(self.subject, hold.how, error))
        if _is_news(breaker, hold.how):
            how = "on this host only" if hold.how == "local" else "by nobody: it runs unlocked"
            name = printable(self.keys.lock)
            logger.error("Redis is down, the lock %s is held %s (%s)", name, how, error)

    def _leave_stand_in(self) -> bool:
        """Release a lock that was taken without Redis; whether it was."""
        if not isinstance(self.local.hold, FallbackHold):
            return False
        self._owned_token("release")
        self._end_stand_in()
        return True

    def _end_stand_in(self) -> None:
        self.local.hold.end()
        self.local.token = None
        self._drop_guard(self.local.guard)

    def _leave_to_keeper(self) -> None:
        """What an interrupt has cut short is completed: nothing of this host stays locked."""
        hold: Hold | None = self.local.hold
        if hold is None or hold.elsewhere or (hold.counts and not hold.by_this_thread):
            return
        if isinstance(hold, FallbackHold):
            self._end_stand_in()
        else:
            super()._leave_to_keeper()
            self._drop_guard(self.local.guard)

    def _break_off(self, before: tuple[Any, Any, Any], guard: LocalLock | None) -> None:
        """``acquire`` was interrupted, or cannot go on: nothing stays locked."""
        if self.local.hold is not before[1]:
            self._leave_to_keeper()
        self._drop_guard(guard)

    def _drop_old_guard(self) -> None:
        """That of an acquisition that ended by itself."""
        hold = self.local.hold
        if hold is not None and not hold.counts:
            self._drop_guard(self.local.guard)

    def _drop_guard(self, guard: LocalLock | None) -> None:
        if guard is not None:
            guard.release()
        if self.local.guard is guard:  # Or somebody who shares this handle has one by now.
            self.local.guard = None

    def _holds_without(self, verb: str) -> bool:
        """Whether there is nothing to ``verb`` in Redis: this lock lives until it is released."""
        if not isinstance(self.local.hold, FallbackHold):
            return False
        self._owned_token(verb)
        return True

    def _held_here(self, *, away: bool = False) -> HolderInfo | None:
        """Who holds the lock of this host, standing in for Redis; and while that is ``away``,
        whoever holds it."""
        hold = self.local.hold
        owner = hold.owner() if self.degraded and hold is not None else None
        if owner is None and self.on_redis_down == "local":
            guard = self._guard()
            owner = guard.holder() if away or not guard.is_beside() else None
        if owner is None:
            return None
        held = HolderInfo([b"", -1, [], 0, 0])
        held.owner = owner
        held.held_for = None if owner.since is None else max(0.0, time.time() - owner.since)
        return held


def _failing(servers: tuple[Server, ...]) -> Breaker:
    return next((s.breaker for s in servers if s.breaker.failing), servers[0].breaker)


_told: dict[tuple[str, str], tuple[int, float]] = {}
_telling = free_after_fork(threading.Lock())


def _is_news(breaker: Breaker, how: str) -> bool:
    """Whether the log has not had this outage yet, or not for a while."""
    with _telling:
        now = time.monotonic()
        outage, at = _told.get((breaker.server, how), (0, -math.inf))
        if breaker.failing and outage == breaker.outage:
            return False
        if not breaker.failing and now - at < PAUSE:
            return False
        _told[breaker.server, how] = breaker.outage, now
        return True
