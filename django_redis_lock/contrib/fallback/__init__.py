"""What a lock does while Redis is down: ``ON_REDIS_DOWN``.

``"raise"``: fail. ``"local"``: take a lock of this host instead. ``"run"``: go ahead unlocked.

With ``"local"`` a caller holds the lock of this host *also while Redis answers*. Otherwise two
callers of this host could hold the lock after Redis went down or came back: one in Redis, and one
on the host. While Redis answers, that lock is an extra: where the host can have none, this is
logged, and the lock in Redis is enough; in an outage the call fails with ``LocalLockUnavailable``.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from redis.exceptions import RedisError

from ... import events
from ...clock import time
from ...events import FellBack
from ...exceptions import LockError, TooFewReplicas
from ...extension import on_first_use
from ...locking import AsyncLock, Before, Hold, Lock, LockOperations
from ...locking.questions import Query
from ...protocol import AcquireRequest, Acquisition, Owner, named_token, new_token, printable
from ...protocol.holders import HeldReply, HolderInfo
from ...protocol.validation import check_policy
from ...steps import Steps
from ...threads import get_logger
from ...transport import is_outage
from .file_lock import LocalLock, held_locally, problem_of
from .host import HostLock

if TYPE_CHECKING:
    from .redlock import AsyncFallbackRedlock, FallbackRedlock

__all__ = [
    "AsyncFallbackLock",
    "AsyncFallbackRedlock",
    "FallbackLock",
    "FallbackRedlock",
    "held_locally",
    "problem_of",
]

logger = get_logger("django_redis_lock.outage")

#: For which a waiter tries to reach a Redis that went down, before it falls back.
OUTAGE_PATIENCE_SECONDS = 3.0
#: An acquisition of this host's lock that took longer had to wait.
NO_WAIT_SECONDS = 0.05


class FallbackHold(Hold):
    """A lock that was taken without Redis. It has no lifetime and no fence."""

    how: str

    def owner(self) -> Owner:
        since = time.time() - (time.monotonic() - self.began)
        return replace(super().owner(), since=since)


class Fallback(LockOperations):
    """What a lock that can fall back does differently, for threads, tasks and several servers."""

    def __init__(
        self,
        redis: object,
        name: str | bytes,
        *args: Any,
        on_redis_down: str,
        local_folder: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(redis, name, *args, **options)
        check_policy(on_redis_down)
        self.on_redis_down = on_redis_down
        self._local_folder = local_folder

    @property
    def _host(self) -> HostLock:
        key = self.keys.lock
        name = self.cache_key or key.decode(errors="backslashreplace")
        return HostLock(key, name, self._servers, self._local_folder, self.asynchronous)

    @property
    def degraded(self) -> str | None:
        hold = self.local.hold
        return hold.how if isinstance(hold, FallbackHold) and not hold.ended else None

    @property
    def fence(self) -> int | None:
        """None for a lock taken without Redis, because only Redis makes fences."""
        return None if isinstance(self.local.hold, FallbackHold) else super().fence

    # -- acquiring ---------------------------------------------------------------------------

    def _acquire_steps(self, request: AcquireRequest, wait: float | None) -> Steps[bool]:
        hold = self.local.hold
        if hold is not None and not hold.is_valid:  # Its file lock is still held.
            self._release_file(self.local.file_lock)
        file_lock = self._host.attempt() if self.on_redis_down == "local" else None
        try:
            return (yield from self._acquire_or_fall_back(request, wait, file_lock))
        except BaseException:
            self._release_file(file_lock)
            raise

    def _acquire_or_fall_back(
        self, request: AcquireRequest, wait: float | None, file_lock: LocalLock | None
    ) -> Steps[bool]:
        until = math.inf if request.deadline is None else request.deadline
        if wait == 0:
            until = -math.inf
        while True:
            try:
                acquired = yield from super()._acquire_steps(request, wait)
            except BaseException as error:
                self._abandon(request, error)  # Its caller knows the first round only.
                request.may_hold.clear()
                if not self._falls_back_on(error):
                    raise
                return (yield from self._hold_without_redis(error, file_lock, until))
            if not acquired or file_lock is None:
                return acquired
            on_host = yield from self._take_in_addition(file_lock, until)
            if on_host is not None:
                return on_host
            wait = wait and max(0.0, until - time.monotonic())
            # Not the waiter id of before, which the keeper may still have to unregister.
            waiter = b"" if wait == 0 else self._new_waiter()
            request = _with_new_token(request)._replace(waiter=waiter)

    def _hold_without_redis(
        self, error: BaseException, file_lock: LocalLock | None, until: float
    ) -> Steps[bool]:
        hold = self._fallback_hold()
        if file_lock is not None:
            file_lock.identity = self._host.identity()  # Another round may have tried another.
            if not (yield from self._take_file(file_lock, hold, until)):
                return False
        self._fall_back(hold, file_lock, error)
        return True

    def _take_in_addition(self, file_lock: LocalLock, until: float) -> Steps[bool | None]:
        """Take the lock of this host, too. None: the lock in Redis expired during the wait."""
        hold, began = self.local.hold, time.monotonic()
        assert hold is not None
        file_lock.identity = self._host.identity(hold.keys.lock)
        try:
            if not (yield from self._take_file(file_lock, hold, until, in_addition=True)):
                try:
                    yield from super()._release_steps()
                except (RedisError, OSError):
                    self._leave_to_keeper()
                return False
        except BaseException:
            if self.local.hold is hold:  # Or another user of this handle has the lock by now.
                self._leave_to_keeper()
            raise
        if hold.is_valid or time.monotonic() < began + NO_WAIT_SECONDS:
            self.local.file_lock = file_lock
            return True
        file_lock.release()
        return None

    def _take_file(
        self, file_lock: LocalLock, hold: Hold, until: float, *, in_addition: bool = False
    ) -> Steps[bool]:
        return self._host.take(file_lock, hold.owner(), until, in_addition)

    def _request(self, *args: Any) -> tuple[AcquireRequest, float | None]:
        request, wait = super()._request(*args)
        return request._replace(outage_patience=OUTAGE_PATIENCE_SECONDS), wait

    def _refuse_to_wait_for_itself(self) -> None:
        if self.degraded and self.thread_local:
            raise LockError("This lock object already holds the lock, without Redis", self._shown)
        super()._refuse_to_wait_for_itself()

    def _falls_back_on(self, error: BaseException) -> bool:
        """Missing replicas are no outage: the caller asked for more safety, not less."""
        if self.on_redis_down == "raise" or isinstance(error, TooFewReplicas):
            return False
        return is_outage(error)

    def _fallback_hold(self) -> FallbackHold:
        hold = FallbackHold(None, label=self.label)
        hold.begin(Acquisition(new_token(), 0, time.monotonic(), math.inf), self.keys)
        hold.how = self.on_redis_down
        return hold

    def _fall_back(self, hold: FallbackHold, file_lock: LocalLock | None, error: Any) -> None:
        self.local.hold, self.local.token = hold, hold.token
        self.local.renewal, self.local.file_lock = None, file_lock
        breakers = [node.breaker for server in self._servers for node in server.nodes()]
        breaker = next((b for b in breakers if b.failing), breakers[0])
        first = not breaker.fallbacks  # Of this outage.
        breaker.fallbacks += 1
        if events.listeners:
            events.emit(FellBack(self.subject, hold.how, error))
        if first:
            local = hold.how == "local"
            how = "is held on this host only" if local else "is skipped, its code runs unlocked"
            logger.error(
                f"Redis is down; the lock %(lock)s {how} (%(error)s)",
                {"lock": printable(self.keys.lock), "error": error},
            )

    # -- releasing ---------------------------------------------------------------------------

    def _release_steps(self) -> Steps[None]:
        if self._is_held_without_redis("release"):
            self._end_fallback()
            return
        file_lock = self.local.file_lock
        try:
            yield from super()._release_steps()
        finally:
            self._release_file(file_lock)

    def _end_fallback(self) -> None:
        if self.local.hold is not None:
            self.local.hold.end()
        self.local.token = self.local.entry = None
        self._release_file(self.local.file_lock)

    def _hand_to_keeper(self) -> None:
        hold: Hold | None = self.local.hold
        if hold is None or hold.from_parent_process or self._is_anothers:
            return
        if isinstance(hold, FallbackHold):
            self._end_fallback()
        else:
            super()._hand_to_keeper()
            self._release_file(self.local.file_lock)

    def _undo(self, before: Before) -> None:
        hold: Hold | None = self.local.hold
        if hold is not None and hold is not before[1] and hold.by_this_thread:
            self._release_file(self.local.file_lock)
        super()._undo(before)

    def _release_file(self, file_lock: LocalLock | None) -> None:
        if file_lock is not None:
            file_lock.release()
        if self.local.file_lock is file_lock:  # Another user of this lock object may have one.
            self.local.file_lock = None

    # -- other methods ---------------------------------------------------------------------

    def _is_held_without_redis(self, verb: str) -> bool:
        if not isinstance(self.local.hold, FallbackHold):
            return False
        self._owned_token(verb)
        return True

    def _change_steps(self, verb: str, seconds: float, replace: bool) -> Steps[Literal[True]]:
        if self._is_held_without_redis(verb):
            return True
        return (yield from super()._change_steps(verb, seconds, replace))

    def _owned_query(self) -> Query[bool]:
        return super()._owned_query() if self.degraded is None else Query(None, lambda _: True)

    def _holders_query(self) -> Query[list[HolderInfo]]:
        def without_redis(error: Exception) -> list[HolderInfo]:
            if self.on_redis_down != "local" or not is_outage(error):
                raise error
            return self._held_on_host(away=True)

        if self.degraded:
            return Query(None, lambda _: self._held_on_host())
        in_redis = super()._holders_query()
        in_either = in_redis.then(lambda holders: holders or self._held_on_host())
        return in_either.or_else(without_redis)

    def _held_on_host(self, *, away: bool = False) -> list[HolderInfo]:
        """The holder of this host's lock who has none in Redis; while Redis is ``away``, any."""
        hold = self.local.hold
        owner = hold.owner() if self.degraded and hold is not None else None
        if owner is None and self.on_redis_down == "local":
            owner = self._host.holder(away=away)
        if owner is None:
            return []
        held = HolderInfo(HeldReply(b"", -1, (), 0, 0))
        held.owner, held.resting = owner, False
        held.held_for = None if owner.since is None else max(0.0, time.time() - owner.since)
        return [held]


class FallbackLock(Fallback, Lock):
    """``Lock`` with a fallback for outages."""


class AsyncFallbackLock(Fallback, AsyncLock):
    """``AsyncLock`` with a fallback for outages."""


def _with_new_token(request: AcquireRequest) -> AcquireRequest:
    """For a second acquisition by the same call."""
    fresh = (named_token(), b"")
    if request.chosen:
        fresh = request.token, new_token()
    request.may_hold.append(fresh)
    return request._replace(token=fresh[0], attempt=fresh[1])


__getattr__ = on_first_use(
    __name__, {"contrib.fallback.redlock": "AsyncFallbackRedlock FallbackRedlock"}
)
