"""What the methods of a lock do, written once for threads and for tasks, as generators of steps;
see ``steps``.

``base`` has a lock's options and its state (``_owned_token``, ``_start_renewal``, ``_forget``);
``lock`` and ``aio`` do the steps for threads and for tasks, and start the generators.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NoReturn

from redis.exceptions import RedisError

from .. import events
from ..clock import time
from ..events import Acquired, Contended, Lost, Rejected, Released, TimedOut
from ..exceptions import LockError, LockLost, LockNotOwnedError
from ..extension import OnUse, part
from ..protocol import (
    EXTEND,
    AcquireRequest,
    Acquisition,
    Call,
    Extended,
    Refused,
    Reply,
    Taken,
    as_bytes,
    milliseconds,
    parse_acquire,
    printable,
)
from ..protocol.validation import check_seconds
from ..steps import Step, Steps
from ..threads import get_logger
from ..transport import Answer, NotReady, is_refusal, server_of
from .base import BaseLock, Before
from .hold import Hold
from .local_state import Entry, acting_task, is_held_by_caller
from .waiting import QueueKey, queues

if TYPE_CHECKING:
    import asyncio

    from ..protocol.holders import HolderInfo
    from . import causes, questions, records, replicas
    from .questions import Query
else:
    causes, questions = OnUse("locking.causes"), OnUse("locking.questions")
    records, replicas = OnUse("locking.records"), OnUse("locking.replicas")

logger = get_logger("django_redis_lock.lock")


class LockOperations(BaseLock):
    """The steps of the methods, and their questions to Redis."""

    _run: Callable[[Call], Step[Answer]]
    #: What ACQUIRE replies.
    _send_acquire: Callable[[AcquireRequest], Step[Reply]]
    #: Behind others, until the end of the wait.
    _wait: Callable[[AcquireRequest, Refused | None], Step[Acquisition | None]]
    #: By the replicas, within so many seconds.
    _confirm: Callable[[Acquisition, float], Step[replicas.Confirmed]]
    #: Until the full lifetime of a lock got by a grant is confirmed.
    _confirm_lifetime: Callable[[Hold], Step[None]]

    def _loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop whose tasks this lock is for, None for threads."""
        return None

    # -- acquire -----------------------------------------------------------------------------

    def _acquire_steps(self, request: AcquireRequest, wait: float | None) -> Steps[bool]:
        if self.on_redis_down == "raise":
            return self._acquire_in_redis(request, wait)
        steps: Steps[bool] = part("fallback").Attempt(self, request, wait).steps()
        return steps

    def _acquire_in_redis(self, request: AcquireRequest, wait: float | None) -> Steps[bool]:
        asked_at, renewals = time.monotonic(), self._new_renewals()
        acquired = yield from self._obtain(request, wait)
        if acquired is None:
            self._emit_timed_out(asked_at, wait != 0)
            return False
        if self.replicas:
            until = math.inf if wait is None else asked_at + wait
            yield from replicas.confirmed(self, request, acquired, until)
        hold = self._start_renewal(acquired, renewals)
        self._emit_acquired(hold, asked_at, acquired.contended)
        return True

    def _obtain(self, request: AcquireRequest, wait: float | None) -> Steps[Acquisition | None]:
        """Take the lock; an ``Acquisition``, or None at the end of the wait.

        The first request registers a waiter if the lock is taken, so the queue is made only then.
        If others of this process wait already, the caller waits behind them.
        """
        if queues and wait != 0 and self._queue_key() in queues:
            self._on_contended(True)
            waited: Acquisition | None = yield self._wait(request._replace(waiter=b""), None)
            return waited
        sent_at, refused = time.monotonic(), None
        try:
            reply = parse_acquire((yield self._send_acquire(request)), sent_at)
            if isinstance(reply, Taken):
                if reply.vanished is not None:
                    self._note_vanished(reply)
                return request.acquired(reply)
            refused = reply
            self._on_contended(wait != 0)
        except Exception as error:
            # A waiter waits until the server refuses no more; one with a fallback uses it. A wait
            # without a deadline would hide that a disk is full.
            lasting = wait is None and not isinstance(error, NotReady)
            if wait == 0 or lasting or not is_refusal(error) or request.falls_back:
                raise
        if wait == 0:
            return None
        waited = yield self._wait(request.with_margin(sent_at), refused)
        return waited

    def _note_vanished(self, taken: Taken) -> None:
        if taken.vanished is not None:
            server = server_of(self.redis)
            records.note_vanished(server, self.keys, taken.vanished, self.subject)

    def _queue_key(self) -> QueueKey:
        return server_of(self.redis), self.keys.lock, self._loop(), self.limit

    # -- release -----------------------------------------------------------------------------

    def _release_steps(self) -> Steps[None]:
        token, hold, renewal = self._owned_token("release"), self.local.hold, self.local.renewal
        if hold is not None and hold.degraded:
            self._hand_to_keeper()  # Which has nothing to release.
            return
        call = self._release_call(token, hold)
        # A release of this acquisition may have failed before, and perhaps only in the reply. Then
        # Redis has carried it out, and "not yours" is the reply to the second.
        again = hold is not None and hold.released
        self._stop_renewal(hold, renewal)
        answer = yield self._run(call)
        released = bool(answer.value or answer.sent_twice or again)
        self._forget(hold)
        if not released:
            early = None if hold is None else time.monotonic() < hold.deadline
            reason = yield from self._why_steps(call, early, hold)
            self._emit_lost(hold, reason)
            if renewal is not None and hold is not None and hold.released:
                renewal.emit("lost", reason)
            self._not_owned("release", reason)
        if renewal is not None:
            renewal.emit("released")
        self._emit_released(hold)

    def _leave_inner(self) -> bool:
        """Whether the caller has gone in more than once, and is out once now."""
        entry: Entry | None = self.local.entry
        if entry is None or not entry.leave(self.local):
            return False
        if entry.hold.lost:
            self._not_owned("release", self.lost_reason)
        return True

    def _leave_to_keeper(self, before: Before | None = None) -> None:
        """The caller was interrupted while it released the lock, or could not reach Redis, and will
        not try again. ``before``: the state when the release began."""
        entry: Entry | None = self.local.entry
        inside = 0 if entry is None else entry.times(self.local)
        if before is not None and inside < before[4]:
            if entry is not None and not inside:
                entry.leave(self.local)  # Once more: the interrupt has cut it short.
            return
        if before is not None and self.local.hold is not before[1]:
            return  # Another user of this handle has the lock by now.
        if entry is None or not entry.leave(self.local):
            self._hand_to_keeper()

    def _hand_to_keeper(self) -> None:
        """Perhaps nothing was sent yet, so the keeper releases the lock."""
        hold: Hold | None = self.local.hold
        if self.local.token is None or (hold is not None and hold.from_parent_process):
            return
        if self._is_anothers:
            return  # It has the lock after us.
        if hold is not None and hold.degraded:
            hold.end()
            self._forget(hold)
            return
        release = self._release_call(self._owned_token("release"), hold)
        self._stop_renewal(hold, self.local.renewal)
        self._hand_over(release)
        self.local.token = self.local.renewal = self.local.entry = None
        self._emit_released(hold)

    # -- extend and reacquire ----------------------------------------------------------------

    def _change_steps(self, verb: str, seconds: float, replace: bool) -> Steps[Literal[True]]:
        hold: Hold | None = self.local.hold
        if self._owned_token(verb) and self.degraded:
            return True
        call = self._extend_call(verb, seconds, replace)
        if hold is not None and hold.pending is not None:
            # The change must not overtake TAKE_GRANT, which is sent on another connection.
            yield self._confirm_lifetime(hold)
        sent_at = time.monotonic()
        answer = yield self._run(call)
        match Extended(answer.value):
            case Extended.NOT_OWNED:
                early = None if hold is None else sent_at < hold.deadline
                self._not_owned(verb, (yield from self._why_steps(call, early, hold)))
            case Extended.NO_LIFETIME:
                raise LockError(f"Cannot {verb} a lock with no timeout", self._shown)
        if hold is not None:
            if replace:
                # Also if it was lost: the full lifetime is not wanted any more.
                hold.pending = None
            until = sent_at + seconds if replace else max(hold.deadline, sent_at) + seconds
            self._prolonged(hold, until, sent_at)
        return True

    def _extend_call(self, verb: str, seconds: float, replace: bool) -> Call:
        token = self._owned_token(verb)
        hold: Hold | None = self.local.hold
        # Of the lock of a token from elsewhere, only Redis knows whether it has a lifetime.
        unknown = verb == "extend" and self.id is not None and hold is None
        if self._lifetime is None and not unknown:
            raise LockError(f"Cannot {verb} a lock with no timeout", self._shown)
        amount = milliseconds(check_seconds("the time to extend by", seconds))
        attempt = b"" if hold is None else hold.attempt
        how = ("1", attempt, b"") if replace else ("0", attempt, secrets.token_hex(8).encode())
        keys, limit = (self.keys, self.limit) if hold is None else (hold.keys, hold.limit)
        if limit == 1:
            return Call(EXTEND, keys, (token, amount, *how))
        return Call(part("limit").PLACE_EXTEND, keys, (token, amount, *how, limit))

    @property
    def lost_reason(self) -> str:
        """Why the lock was lost: released by force and by whom, expired, deleted by another
        program, or Redis lost its data. Known when ``on_lost`` is called; empty if not lost."""
        hold: Hold | None = self.local.hold
        if hold is None or not hold.lost:
            return ""
        return hold.reason or "its lifetime is over, and Redis confirmed no renewal"

    def ensure_held(self) -> None:
        """Raise an error unless the lock is held; no round trip.

        Raises:
            LockLost: this lock object has acquired it, and does not hold it any more.
            LockError: this lock object (in this thread or task) has not acquired it.
        """
        hold: Hold | None = self.local.hold
        if hold is None:
            raise LockError("The lock has not been acquired", self._shown)
        if not hold.is_valid:
            reason = self.lost_reason
            text = f"The lock is not held any more{reason and f': {reason}'}"
            raise LockLost(f"{text}; stop before doing harm", self._shown, reason=reason)

    def _not_owned(self, verb: str, reason: str) -> NoReturn:
        text = f"Cannot {verb} a lock that's no longer owned{reason and f': {reason}'}"
        raise LockNotOwnedError(text, self._shown, reason=reason)

    def _why_steps(self, call: Call, early: bool | None, hold: Hold | None) -> Steps[str]:
        """Why ``call`` did not find the lock; see ``causes``."""
        if hold is not None and hold.reason:
            return hold.reason
        question, cause = causes.question(self, as_bytes(call.args[0]), early, hold)
        reply = None
        with suppress(RedisError, OSError):
            reply = (yield self._run(question)).value
        return cause(reply)

    # -- who holds it ------------------------------------------------------------------------

    def _holders_query(self) -> Query[list[HolderInfo]]:
        return questions.holders(self)

    def _owned_query(self) -> Query[bool]:
        return questions.owned(self)

    def _reset_steps(self) -> Steps[bool]:
        reply = (yield self._run(questions.holders_call(self))).value
        holders = questions.parse_holders(self.limit, reply)
        for held in holders:
            yield self._run(questions.reset_call_of(self, held))
        return bool(holders)

    # -- what listeners and the log hear -----------------------------------------------------

    @property
    def _printed(self) -> str:
        return printable(self.keys.lock)

    def _on_contended(self, waits: bool) -> None:
        if events.listeners:
            events.emit(Contended(self.subject, self.keys))
        if waits and self.limit == 1:
            self._warn_of_deadlock()

    def _warn_of_deadlock(self) -> None:
        if not self.asynchronous and acting_task() is not None:
            message = "The wait for the lock %(lock)s stops this event loop: use cache.alock() or "
            message += "AsyncLock"
        elif self.thread_local and is_held_by_caller(self):  # Else another may release it.
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
            events.emit(Acquired(self.subject, waited, contended, hold.fence))

    def _emit_timed_out(self, asked_at: float, blocking: bool) -> None:
        waited = time.monotonic() - asked_at
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "Did not get %(lock)s within %(waited).3f s",
                {"lock": self._printed, "waited": waited},
            )
        if events.listeners:
            events.emit(TimedOut(self.subject, waited) if blocking else Rejected(self.subject))

    def _emit_released(self, hold: Hold | None) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("Released %(lock)s", {"lock": self._printed})
        if events.listeners and hold is not None:
            events.emit(Released(self.subject, time.monotonic() - hold.began, hold.fence))

    def _emit_lost(self, hold: Hold | None, reason: str) -> None:
        """A release found that the lock had ended before, which was not emitted yet."""
        if events.listeners and hold is not None and hold.released:
            held = time.monotonic() - hold.began
            events.emit(Lost(self.subject, held, reason, hold.fence))

    def _release_failed(self, before: Before, error: BaseException, body_failed: bool) -> bool:
        """The release at the end of a block failed. Returns whether the block swallows ``error``;
        the body's own comes first."""
        self._leave_to_keeper(before)
        if not isinstance(error, Exception):
            return False
        if body_failed or (isinstance(error, LockError) and not self.raise_on_release_error):
            if not self.lost:  # That was logged.
                logger.warning(
                    "Releasing %(lock)s failed, which its block does not raise: %(error)s",
                    {"lock": self._printed, "error": error},
                )
            return True
        return False
