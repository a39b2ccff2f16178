"""What a lock does while Redis is down: ``ON_REDIS_DOWN``.

``"raise"``: fail. ``"local"``: take a lock of this host instead. ``"run"``: go ahead unlocked.

With ``"local"`` a caller holds the lock of this host *also while Redis answers*. Otherwise two
callers of this host could hold the lock after Redis went down or came back: one in Redis, and one
on the host. While Redis answers, that lock is an extra: where the host can have none, this is
logged, and the lock in Redis is enough; in an outage the call fails with ``LocalLockUnavailable``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from ... import events
from ...clock import time
from ...events import FellBack
from ...exceptions import LocalLockUnavailable, TooFewReplicas
from ...locking import BaseLock, Hold
from ...protocol import AcquireRequest, Acquisition, Owner, named_token, new_token, printable
from ...protocol.holders import HeldReply, HolderInfo
from ...protocol.validation import check_policy
from ...steps import Steps
from ...threads import get_logger, may_log
from ...transport import is_outage
from .file_lock import LocalLock, held_locally, pauses, problem_of

__all__ = ["Attempt", "FallbackHold", "check_policy", "held_locally", "holders", "problem_of"]

logger = get_logger("django_redis_lock.outage")
lock_logger = get_logger("django_redis_lock.lock")

#: For which a waiter tries to reach a Redis that went down, before it falls back.
OUTAGE_PATIENCE_SECONDS = 3.0
#: An acquisition of this host's lock that took longer had to wait.
NO_WAIT_SECONDS = 0.05


class FallbackHold(Hold):
    """A lock that was taken without Redis. It has no lifetime and no fence."""

    def __init__(self, lock: BaseLock) -> None:
        super().__init__(None, label=lock.label)
        self.degraded = lock.on_redis_down
        acquired = Acquisition(new_token(), 0, time.monotonic(), math.inf)
        self.begin(acquired, lock.keys)

    def owner(self) -> Owner:
        since = time.time() - (time.monotonic() - self.began)
        return replace(super().owner(), since=since)


class Attempt:
    """One call of ``acquire``. It has the lock in Redis and, for ``"local"``, that of this host,
    and decides between them."""

    def __init__(self, lock: BaseLock, request: AcquireRequest, wait: float | None) -> None:
        self._lock, self._wait = lock, wait
        self._request = request._replace(outage_patience=OUTAGE_PATIENCE_SECONDS)
        self._until = math.inf if request.deadline is None else request.deadline
        if wait == 0:
            self._until = -math.inf
        self._file = _local_lock(lock) if lock.on_redis_down == "local" else None

    def steps(self) -> Steps[bool]:
        hold = self._lock.local.hold
        if hold is not None and hold.on_end is not None and not hold.is_valid:
            hold.on_end()  # It was lost, and its file lock is still held.
        try:
            return (yield from self._acquire_or_fall_back())
        except BaseException:
            if self._file is not None:
                self._file.release()
            raise

    def _acquire_or_fall_back(self) -> Steps[bool]:
        while True:
            try:
                acquired = yield from self._lock._acquire_in_redis(self._request, self._wait)
            except BaseException as error:
                self._lock._abandon(self._request, error)  # Its caller knows the first only.
                self._request.may_hold.clear()
                # Missing replicas are no outage: the caller asked for more safety, not less.
                if not is_outage(error) or isinstance(error, TooFewReplicas):
                    raise
                return (yield from self._hold_without_redis(error))
            if not acquired or self._file is None:
                return acquired
            on_host = yield from self._take_in_addition(self._file)
            if on_host is not None:
                return on_host
            self._prepare_another()

    def _prepare_another(self) -> None:
        """A second request by the same call."""
        if self._wait:
            self._wait = max(0.0, self._until - time.monotonic())
        # Not the waiter id of before, which the keeper may still have to unregister.
        waiter = b"" if self._wait == 0 else self._lock._new_waiter()
        token, attempt = named_token(), b""
        if self._request.chosen:
            token, attempt = self._request.token, new_token()
        self._request.may_hold.append((token, attempt, 1))
        self._request = self._request._replace(token=token, attempt=attempt, waiter=waiter)

    def _hold_without_redis(self, error: BaseException) -> Steps[bool]:
        hold = FallbackHold(self._lock)
        if self._file is not None:
            self._file.identity = _identity(self._lock)  # Another round may have tried another.
            if not (yield from self._take_file(self._file, hold)):
                return False
            self._file.belongs_to(hold)
        self._lock._note_hold(hold, None)
        self._tell(_without_frames(error))
        return True

    def _take_in_addition(self, file: LocalLock) -> Steps[bool | None]:
        """Take the lock of this host, too. None: the lock in Redis expired during the wait."""
        lock, began = self._lock, time.monotonic()
        hold = lock.local.hold
        assert hold is not None
        file.identity = _identity(lock, hold.keys.lock)
        if not (yield from self._take_file(file, hold, in_addition=True)):
            try:
                yield from lock._release_steps()
            except RedisError:
                lock._leave_to_keeper()
            return False
        if hold.is_valid or time.monotonic() < began + NO_WAIT_SECONDS:
            file.belongs_to(hold)
            return True
        file.release()
        return None

    def _take_file(self, file: LocalLock, hold: Hold, *, in_addition: bool = False) -> Steps[bool]:
        """Wait for it. Its release signals nothing, so this polls."""
        lock, owner, tries = self._lock, hold.owner(), pauses(self._until)
        while True:
            try:
                if file.try_acquire(owner, in_addition):
                    return True
                if in_addition and file.is_in_addition():
                    return True  # Its holder has lost the lock in Redis, which this caller holds.
            except LocalLockUnavailable as error:
                if not in_addition:
                    raise
                _log_unavailable(lock, error)
                return True
            mine = file.holder_here()
            if self._until == math.inf and mine and not mine.shared and lock._is_by_caller(mine):
                lock._refuse_endless_wait()
            pause = next(tries, None)
            if pause is None:
                return False
            yield time.asleep(pause) if lock.asynchronous else time.sleep(pause)

    def _tell(self, error: BaseException) -> None:
        lock = self._lock
        breakers = [node.breaker for server in lock._servers for node in server.nodes()]
        breaker = next((b for b in breakers if b.failing), breakers[0])
        first = breaker.fell_back()
        if events.listeners:
            events.emit(FellBack(lock.subject, lock.on_redis_down, error))
        if first:
            local = lock.on_redis_down == "local"
            how = "is held on this host only" if local else "is skipped, its code runs unlocked"
            logger.error(
                f"Redis is down; the lock %(lock)s {how} (%(error)s)",
                {"lock": printable(lock.keys.lock), "error": error},
            )


def _without_frames(error: BaseException) -> BaseException:
    """``error`` for listeners and log handlers, which may keep it: its frames and those of its
    causes would keep the lock, which then is not released when its thread has ended."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def holders(lock: BaseLock) -> Steps[list[HolderInfo]]:
    """Who holds ``lock``: in Redis, or on this host."""
    if lock.degraded:
        return _held_on_host(lock)
    try:
        in_redis = yield from lock._holders_in_redis()
    except Exception as error:
        if lock.on_redis_down != "local" or not is_outage(error):
            raise
        return _held_on_host(lock, away=True)
    return in_redis or _held_on_host(lock)


def _held_on_host(lock: BaseLock, *, away: bool = False) -> list[HolderInfo]:
    """The holder of this host's lock who has none in Redis; while Redis is ``away``, any."""
    hold = lock.local.hold
    owner = hold.owner() if lock.degraded and hold is not None else None
    if owner is None and lock.on_redis_down == "local":
        try:
            owner = _local_lock(lock).holder(also_in_redis=away)
        except LocalLockUnavailable as error:
            if away:
                raise
            _log_unavailable(lock, error)
    if owner is None:
        return []
    held = HolderInfo(HeldReply(b"", -1, (), 0, 0))
    held.owner, held.resting = owner, False
    held.held_for = None if owner.since is None else max(0.0, time.time() - owner.since)
    return [held]


# -- the lock of this host -------------------------------------------------------------------------

_logged_at: dict[object, float] = {}


def _local_lock(lock: BaseLock) -> LocalLock:
    """What ``lock`` is on this host."""
    name = lock.cache_key or lock.keys.lock.decode(errors="backslashreplace")
    return LocalLock(_identity(lock), name, lock.local_folder)


def _identity(lock: BaseLock, key: bytes | None = None) -> bytes:
    """Which lock it is; of one with places, by the ``key`` of the place."""
    servers = ",".join(sorted(server.breaker.server for server in lock._servers))
    return b"%b\0%b" % (servers.encode(), key or lock.keys.lock)


def _log_unavailable(lock: BaseLock, error: LocalLockUnavailable) -> None:
    cause: Any = error.__cause__
    if may_log((cause.errno, cause.strerror, lock.local_folder), _logged_at):
        lock_logger.warning(
            "The lock %(lock)s is in Redis only, and fails in an outage: %(error)s",
            {"lock": printable(lock.keys.lock), "error": error},
        )
