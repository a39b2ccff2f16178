"""A lock's arguments and state, and what the log and listeners hear. No input or output here."""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any, NoReturn

from .. import events
from ..clock import time
from ..events import Subject, check_group
from ..exceptions import LockError, LockLost
from ..extension import part
from ..protocol import AcquireRequest, lock_keys, named_token, printable, waiter_id
from ..protocol.mistakes import unknown_option
from ..protocol.validation import (
    check_bool,
    check_name,
    check_time,
    check_token,
    check_wait,
    checked_options,
)
from ..threads import check_plain, get_logger
from ..transport import Server, encoded, is_cluster, server_of
from .hold import Hold
from .local_state import (
    State,
    ThreadState,
    ThreadStateWithToken,
    is_in_event_loop,
    own_renewals,
)

if TYPE_CHECKING:
    from typing_extensions import Never

logger = get_logger("django_redis_lock.lock")


class BaseLock:
    """A lock's arguments and state.

    Args:
        redis: the redis-py client.
        name: str, bytes or memoryview; the token is kept at exactly this key, as by redis-py.
        timeout: seconds the lock lives unless renewed; None: no expiry, not even after a crash.
        sleep: seconds between two attempts where a waiter must poll.
        blocking: whether ``acquire`` waits.
        blocking_timeout: seconds it waits at most; None: without end.
        thread_local: whether each thread (each task, for ``AsyncLock``) has its own token.
        raise_on_release_error: whether leaving the ``with`` block raises when the lock was lost.
        renew: keep extending the lock until it is released.
        max_hold: seconds after which renewal stops.
        min_hold: seconds for which it stays taken after the acquisition, also if it is released.
        on_lost: called without arguments, in a new thread, when the lock is lost. ``AsyncLock``
            calls it in its event loop; there it may be a coroutine function.
        cancel_on_lost: only for ``AsyncLock``: when the lock of an ``async with`` block is lost,
            cancel the task; the block then raises ``LockLost``.
        label: what the lock is for, shown in the admin.
        group: the group in which metrics count the lock, such as ``"invoice-{pk}"`` for one named
            ``invoice-17``. None: its name with ``*`` for each number, UUID and hash in it.
        warn_after: seconds after which a warning is logged that the lock is still held; None:
            80 % of ``max_hold``, or of the lifetime of a lock that is not renewed.
        id: the token of an existing acquisition, for ``release``, ``extend`` and the rest.
        replicas: how many replicas must confirm an acquisition, so that it survives a failover.
        grant_timeout: seconds in which a waiter must take a lock that is passed to it; the same on
            all hosts.
        reentrant: whether a thread (a task, for ``AsyncLock``) that holds the lock acquires it
            again without a round trip, also by another lock object of the same name that is
            reentrant, too. The last ``release`` releases the lock.
        limit: how many may hold the lock at a time, each in a place with its own token, lifetime
            and fence. If processes have different limits, the larger one counts.
        on_redis_down: ``"raise"``; ``"local"``: take a lock of this host, in ``local_folder``; it
            is held also while Redis answers; ``"run"``: go ahead without a lock.

    Attributes:
        cache: the cache backend it came from, None if from none; there it is ``cache_key``.
        stored_name: its name in the description, for people, if its key may not show it.

    Raises:
        TypeError, ValueError: an argument is invalid; the message says what is allowed.
    """

    cache: Any = None
    cache_key: str | None = None
    stored_name = ""
    _subject: Subject | None = None
    _hold_class = Hold
    #: Whether the caller is a task.
    asynchronous = False

    # The checked options.
    timeout: float | None
    sleep: float
    blocking: bool
    blocking_timeout: float | None
    thread_local: bool
    raise_on_release_error: bool
    renew: bool
    max_hold: float | None
    min_hold: float
    cancel_on_lost: bool
    warn_after: float | None
    warns_after: float  #: The same with its default.
    replicas: int
    grant_timeout: float
    reentrant: bool
    limit: int

    def __init__(
        self,
        redis: Any,
        name: str | bytes,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        renew: bool = False,
        max_hold: float | None = None,
        min_hold: float = 0,
        on_lost: Callable[[], object] | None = None,
        cancel_on_lost: bool = False,
        label: str | None = None,
        group: str | None = None,
        warn_after: float | None = None,
        id: str | bytes | None = None,
        replicas: int = 0,
        grant_timeout: float = 2.0,
        reentrant: bool = False,
        limit: int = 1,
        on_redis_down: str | None = None,
        local_folder: str | os.PathLike[str] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            known = [*signature(BaseLock).parameters][2:-1]
            raise unknown_option(f"{type(self).__name__}()", min(unknown), known)
        self._check_kind(redis, on_lost, cancel_on_lost)
        self.redis = redis
        self.name = check_name(name)
        options: tuple[object, ...]  # In the order of ``OPTIONS``.
        options = timeout, sleep, blocking, blocking_timeout, thread_local, raise_on_release_error
        options += renew, max_hold, min_hold, cancel_on_lost, warn_after
        options += replicas, grant_timeout, reentrant, limit
        vars(self).update(checked_options(options))
        self.on_lost = on_lost
        if label is not None and not isinstance(label, str):
            raise TypeError(f"label must be a str or None, not {label!r}")
        self.label = label or ""
        self.group = check_group(group)
        self.keys = lock_keys(self._encode(self.name), is_cluster(redis))
        self.id = None if id is None else self._encode(check_token(id))
        if self.reentrant and id is not None:
            raise ValueError("reentrant and id exclude each other: a token does not name a caller")
        if on_redis_down not in (None, "raise"):
            part("fallback").check_policy(on_redis_down)
        self.on_redis_down, self.local_folder = on_redis_down or "raise", local_folder
        self.local: State = self._new_state() if self.thread_local else State()
        if self.id is not None:
            self.local.token = self.id

    def _check_kind(self, redis: object, on_lost: object, cancel_on_lost: object) -> None:
        """Raises TypeError if one of these is not for a lock of this kind."""
        if on_lost is not None:
            if not callable(on_lost):
                raise TypeError(f"on_lost must be callable, not {on_lost!r}")
            check_plain("on_lost", on_lost)
        if cancel_on_lost:
            raise TypeError(
                "cancel_on_lost must be False: only a task can be cancelled. It is for AsyncLock, "
                "cache.alock(), and locked() on coroutine functions and in async with"
            )

    def _new_state(self) -> State:
        return ThreadState() if self.id is None else ThreadStateWithToken(self.id)

    def _encode(self, value: str | bytes) -> bytes:
        return value if type(value) is bytes else encoded(self.redis, value)

    def _server(self) -> Server | None:
        return server_of(self.redis)

    @property
    def subject(self) -> Subject:
        """This lock, for events."""
        if self._subject is None:
            name = self.cache_key or self.keys.lock.decode(errors="backslashreplace")
            of_it = self.group, self.label, self._server(), self.cache
            self._subject = Subject.of(name, *of_it)
        return self._subject

    # -- without a round trip ----------------------------------------------------------------

    @property
    def fence(self) -> int | None:
        """The fencing token of this acquisition: a strictly increasing integer that Redis made."""
        hold = self.local.hold
        return None if hold is None else hold.fence or None

    @property
    def place(self) -> int | None:
        """The number of the acquired place, from 1 to ``limit``."""
        hold = self.local.hold
        return None if hold is None else hold.keys.place

    @property
    def fences(self) -> dict[str, int | None]:
        """The fencing token of each name; see ``MultiLock``."""
        return {str(self._shown): self.fence}

    @property
    def degraded(self) -> str | None:
        """How the lock is held without Redis, as ``on_redis_down`` says; else None."""
        hold = self.local.hold
        return None if hold is None or hold.ended else hold.degraded

    @property
    def lost(self) -> bool:
        """Whether the acquired lock ended before its release."""
        hold = self.local.hold
        return hold is not None and hold.lost

    @property
    def lost_reason(self) -> str:
        """Why the lock was lost: released by force and by whom, expired, deleted by another
        program, or Redis lost its data. Known when ``on_lost`` is called; empty if not lost."""
        hold = self.local.hold
        if hold is None or not hold.lost:
            return ""
        return hold.reason or "its lifetime is over, and Redis confirmed no renewal"

    def ensure_held(self) -> None:
        """Raise an error unless the lock is held; no round trip.

        Raises:
            LockLost: this lock object has acquired it, and does not hold it any more.
            LockError: this lock object (in this thread or task) has not acquired it.
        """
        hold = self.local.hold
        if hold is None:
            raise LockError("The lock has not been acquired", self._shown)
        if not hold.is_valid:
            reason = self.lost_reason
            text = f"The lock is not held any more{reason and f': {reason}'}"
            raise LockLost(f"{text}; stop before doing harm", self._shown, reason=reason)

    def __repr__(self) -> str:
        hold = self.local.hold
        state = "lost" if self.lost else "not held here"
        if hold is not None and hold.is_valid:
            left = hold.deadline - time.monotonic()
            state = f"held, ttl={left:.1f}, fence={self.fence}"
        return f"<{type(self).__name__} {self._shown!r}: {state}>"

    @property
    def _shown(self) -> str | bytes:
        """The name, as the caller wrote it."""
        return self.cache_key or self.name

    # -- acquiring ---------------------------------------------------------------------------

    def _request(
        self,
        sleep: float | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        token: str | bytes | None,
    ) -> tuple[AcquireRequest, float | None]:
        """What one call of ``acquire`` asks for, and the seconds it may wait (0: one try)."""
        pause = self.sleep if sleep is None else check_time("sleep", sleep, zero=True)
        wait = self.blocking_timeout if blocking_timeout is None else check_wait(blocking_timeout)
        if token is not None and self.reentrant:
            raise ValueError("token must be left out: a reentrant lock chooses its own")
        if not (self.blocking if blocking is None else check_bool("blocking", blocking)):
            wait = 0.0
        if wait is None and self.thread_local and not self.reentrant:
            hold, endless = self.local.hold, self.renew or self.timeout is None or self.degraded
            if endless and hold is not None and hold.is_valid:  # Also if it has a free place.
                self._refuse_endless_wait()
        chosen = token if token is not None else self.id
        mine = named_token() if chosen is None else self._encode(check_token(chosen))
        attempt = b"" if chosen is None else secrets.token_hex(8).encode()
        asked_at = time.monotonic()
        request = AcquireRequest(
            self.keys,
            mine,
            attempt,
            self.timeout,
            self.grant_timeout,
            [(mine, attempt, 1)],
            pause or 0.0,
            asked_at + wait if wait else None,
            self.replicas,
            self.subject,
            b"" if wait == 0 else self._new_waiter(),
            self.limit,
            asked_at,
            unanswered=[],
        )
        return request, wait

    def _new_waiter(self) -> bytes:
        """The id under which the first request of ``acquire`` registers."""
        return waiter_id()

    def _for_keeper(self, on_lost: Callable[[], object]) -> Callable[[], object]:
        """``on_lost`` as the keeper's thread may call it: it starts the user's code elsewhere."""
        raise NotImplementedError

    def _take_over(self, other: BaseLock) -> None:
        self.local = other.local

    def _new_hold(self) -> Hold:
        return self._hold_class(
            self.timeout,
            (self.max_hold or math.inf) if self.renew else -math.inf,
            self.warns_after,
            self.label,
            self.stored_name,
            None if self.on_lost is None else self._for_keeper(self.on_lost),
            self.subject if events.listeners else None,
        )

    @property
    def _servers(self) -> tuple[Server, ...]:
        return (server_of(self.redis),)

    @property
    def _lifetime(self) -> float | None:
        """Of the lock that the caller holds: that of the first acquisition."""
        entry = self.local.entry
        return self.timeout if entry is None else entry.timeout

    def _entered(self) -> None:
        """The lock was taken by ``with``."""
        entry = self.local.entry
        if entry is not None and entry.depth > 1:
            return  # The block around this one is left after it.
        if self.local.hold is not None:
            self.local.hold.shared = False  # The end of the block releases it.
        if self.local.renewal is not None:  # There is none for a lock taken without Redis.
            self.local.renewal.entered(self.grant_timeout, self.min_hold)

    # -- what listeners and the log hear -----------------------------------------------------

    @property
    def _printed(self) -> str:
        return printable(self.keys.lock)

    def _on_contended(self, wait: float | None) -> None:
        """It is taken, and the caller waits ``wait`` seconds: 0 for none, None without end."""
        if events.listeners:
            events.emit(events.Contended(self.subject, self.keys))
        if wait != 0:
            mine = own_renewals(self)
            if wait is None and mine and all(job.is_endless for job in mine):
                self._refuse_endless_wait()
            self._warn_of_deadlock(bool(mine))

    def _refuse_endless_wait(self) -> NoReturn:
        """The caller itself holds the lock and nothing else ends that."""
        who = "task" if self.asynchronous else "thread"
        text = f"This {who} already holds the lock, and would wait for itself forever: "
        if not self.asynchronous and is_in_event_loop():
            text += "a wait stops its event loop, so use cache.alock() or AsyncLock, or "
        text += "release it first, or give a blocking_timeout or reentrant=True"
        raise LockError(text, self._shown)

    def _warn_of_deadlock(self, mine: bool) -> None:
        if not self.asynchronous and is_in_event_loop():
            message = "The wait for the lock %(lock)s stops this event loop: use cache.alock() or "
            message += "AsyncLock"
        elif self.thread_local and mine:  # Else another may release it.
            who = "task" if self.asynchronous else "thread"
            message = f"The lock %(lock)s is held by the same {who} that waits for it now: release "
            message += "it first, or give reentrant=True both times"
        else:
            return
        logger.warning(message, {"lock": self._printed})

    def _emit_acquired(self, hold: Hold, asked_at: float, contended: bool) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            waited = time.monotonic() - asked_at
            logger.debug(
                "Acquired %(lock)s after %(waited).3f s, fence %(fence)d",
                {"lock": self._printed, "waited": waited, "fence": hold.fence},
            )
        if events.listeners:
            waited = time.monotonic() - asked_at
            events.emit(events.Acquired(self.subject, waited, contended, hold.fence))

    def _emit_timed_out(self, asked_at: float, blocking: bool) -> None:
        waited = time.monotonic() - asked_at
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "Did not get %(lock)s within %(waited).3f s",
                {"lock": self._printed, "waited": waited},
            )
        if events.listeners:
            events.emit(
                events.TimedOut(self.subject, waited) if blocking else events.Rejected(self.subject)
            )

    def _emit_released(self, hold: Hold | None) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("Released %(lock)s", {"lock": self._printed})
        if events.listeners and hold is not None:
            events.emit(events.Released(self.subject, time.monotonic() - hold.began, hold.fence))

    def _emit_lost(self, hold: Hold | None, reason: str) -> None:
        """A release found that the lock had ended before, which was not emitted yet."""
        if events.listeners and hold is not None and hold.released:
            held = time.monotonic() - hold.began
            events.emit(events.Lost(self.subject, held, reason, hold.fence))
