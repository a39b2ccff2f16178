"""What the methods of a lock do, written once for threads and for tasks, as generators of steps;
see ``steps``.

``base`` has a lock's options and its state (``local``, see ``State``); ``lock`` and ``aio`` do the
steps for threads and for tasks, and start the generators.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NoReturn

from redis.exceptions import RedisError

from .. import history
from ..clock import time
from ..exceptions import LockError, LockNotOwnedError
from ..extension import part
from ..keeper import DeferredRelease, keeper
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
    new_token,
    parse_acquire,
    release_call,
)
from ..protocol.validation import check_seconds
from ..steps import Step, Steps
from ..transport import Answer, NotReady, is_refusal, may_have_run, server_of
from . import questions, waiting
from . import replicas as replication
from .base import BaseLock, logger
from .hold import Hold, Renewal, release_late
from .local_state import Known
from .renewals import Renewals
from .waiting import QueueKey, queues

if TYPE_CHECKING:
    import asyncio

    from ..protocol.holders import HolderInfo
    from .questions import Query


class LockOperations(BaseLock):
    """The steps of the methods, and their questions to Redis."""

    #: Run a script.
    _run: Callable[[Call], Step[Answer]]
    #: Send ACQUIRE; its reply.
    _send_acquire: Callable[[AcquireRequest], Step[Reply]]
    #: Wait for the lock in this process's queue; None at the deadline.
    _wait: Callable[[AcquireRequest, Refused | None], Step[Acquisition | None]]
    #: Wait so many seconds, at most, for the replicas.
    _confirm: Callable[[Acquisition, float], Step[replication.Confirmed]]
    #: Wait for the reply to TAKE_GRANT.
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
        renewals = self._new_renewals()
        acquired = yield from self._obtain(request, wait)
        if acquired is None:
            release_late(request)
            self._emit_timed_out(request.asked_at, wait != 0)
            return False
        if self.replicas:
            until = math.inf if wait is None else request.asked_at + wait
            yield from replication.confirmed(self, request, acquired, until)
        hold = self._start_renewal(request, acquired, renewals)
        self._emit_acquired(hold, request.asked_at, acquired.contended)
        return True

    def _obtain(self, request: AcquireRequest, wait: float | None) -> Steps[Acquisition | None]:
        """Take the lock; an ``Acquisition``, or None at the end of the wait.

        The first request registers a waiter if the lock is taken, so the queue is made only then.
        If others of this process wait already, the caller waits behind them.
        """
        if queues and wait != 0 and self._queue_key() in queues:
            self._on_contended(wait)
            waited: Acquisition | None = yield self._wait(request._replace(waiter=b""), None)
            return waited
        sent_at, refused = time.monotonic(), None
        try:
            reply = parse_acquire((yield self._send_acquire(request)), sent_at)
            if isinstance(reply, Taken):
                if reply.vanished is not None:
                    server = server_of(self.redis)
                    history.note_vanished(server, self.keys, reply.vanished, self.subject)
                return request.acquired_by_reply(reply)
            refused = reply
            self._on_contended(wait)
        except Exception as error:
            # A refusal may pass: wait for that, unless there is a fallback. Without a deadline only
            # for a server that will be ready: a full disk must not be hidden.
            worth_waiting = is_refusal(error) and wait != 0 and not request.falls_back
            if not worth_waiting or (wait is None and not isinstance(error, NotReady)):
                raise
        if wait == 0:
            return None
        waited = yield self._wait(request.with_margin(sent_at), refused)
        return waited

    def _queue_key(self) -> QueueKey:
        return server_of(self.redis), self.keys.lock, self._loop(), self.limit

    def _new_renewals(self) -> Renewals:
        hold = self._new_hold()
        return Renewals(hold, Renewal(server_of(self.redis), hold))

    def _start_renewal(
        self, request: AcquireRequest, granted: Acquisition, renewals: Renewals
    ) -> Hold:
        hold, place = renewals.hold, granted.place
        keys = self.keys if place == 1 else self.keys.at_place(place)
        # A place above the limit, which a process with a larger one has passed on, ends here.
        hold.begin(granted, keys, self.limit if place <= self.limit else 0)
        hold.request = request
        self._note_hold(hold, renewals)
        renewals.begin()
        return hold

    def _note_hold(self, hold: Hold, renewals: Renewals | None) -> None:
        """The caller has this ``hold`` from now on."""
        local = self.local
        hold.task, hold.shared = local.task, bool(hold.attempt) or not self.thread_local
        local.hold, local.token, local.renewal = hold, hold.token, renewals

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
        self._end_hold(hold, renewal)  # From here on ``hold.released``.
        answer = yield self._run(call)
        released = answer.value or answer.sent_twice or again
        if not answer.value and hold is not None and not hold.released:
            released = False  # It was known to be lost before.
        self._forget(hold)
        if not released:
            early = None if hold is None else time.monotonic() < hold.deadline
            reason = yield from self._why_steps(call, early, hold)
            self._emit_lost(hold, reason)
            if renewal is not None and hold is not None and hold.released:
                renewal.tell("lost", reason)
            self._not_owned("release", reason)
        if renewal is not None:
            renewal.tell("released")
        self._emit_released(hold)

    def _owned_token(self, verb: str) -> bytes:
        """Raises LockError if there is none, LockNotOwnedError in a forked child."""
        token = self.local.token
        if token is None:
            text = f"Cannot {verb} a lock that's not owned: this lock object has not acquired it"
            if self.thread_local:
                here = "task" if self.asynchronous else "thread"
                text += f" in this {here} (thread_local=False: for all of them)"
            raise LockError(f"{text}, or has released it", self._shown)
        hold = self.local.hold
        if hold is not None and hold.from_parent_process:
            raise LockNotOwnedError(f"Cannot {verb} a parent process's lock", self._shown)
        return token if isinstance(token, bytes) else self._encode(token)

    def _release_call(self, token: bytes, hold: Hold | None) -> Call:
        if hold is None:
            grant = new_token(), self.grant_timeout
            return release_call(self.keys, token, *grant, limit=self.limit)
        entry = self.local.entry
        min_hold = self.min_hold if entry is None else entry.min_hold
        of_it = (min_hold, hold.fence, hold.attempt, hold.limit)
        return release_call(hold.keys, token, new_token(), self.grant_timeout, *of_it)

    def _end_hold(self, hold: Hold | None, renewal: Renewals | None) -> None:
        if hold is not None:
            hold.end()
        if renewal is not None:
            renewal.discard()

    def _forget(self, hold: Hold | None) -> None:
        """The server has answered: the token of ``hold`` is used up."""
        local = self.local
        if local.hold is hold:  # Or somebody who shares this handle has the lock by now.
            local.token = local.renewal = local.entry = None
        if hold is not None:
            hold.release_late()

    def _leave_inner(self) -> bool:
        """Whether the caller has gone in more than once, and is out once now."""
        entry = self.local.entry
        if entry is None or not entry.leave(self.local):
            return False
        if entry.hold.lost:
            self._not_owned("release", self.lost_reason)
        return True

    # -- interrupts --------------------------------------------------------------------------
    #
    # A signal handler may raise at any point, also between two steps: ``acquire`` and ``release``
    # of ``Lock`` catch that. The keeper releases what is left.

    def _state(self) -> Known:
        """What this thread or task knows through this handle."""
        return self.local.known()

    def _abandon(self, request: AcquireRequest, error: BaseException) -> None:
        """``acquire`` ends with ``error``: release all that ``may_hold`` the lock."""
        sent = may_have_run(error)
        if sent and request.waiter:
            waiting.unregister(server_of(self.redis), request)
        unsent = None if sent else (request.token, request.attempt, 1)
        for claim in request.may_hold:
            if claim != unsent:
                self._hand_over(request.release_call(*claim), late=True)

    def _undo(self, before: Known) -> None:
        """``acquire`` was interrupted: restore the state ``before``."""
        local, now = self.local, self._state()
        if self._is_anothers:
            return
        if now.entry is not None and now.times > before.times and now.entry.leave(local):
            return
        hold = now.hold
        if hold is None or hold is before.hold or not hold.by_this_thread:
            local.entry = before.entry
            return  # It was not noted, or the lock is another thread's, which shares this handle.
        hold.end()
        if now.renewal is not None and now.renewal is not before.renewal:
            now.renewal.discard()
        local.restore(before)

    def _leave_to_keeper(self, before: Known | None = None) -> None:
        """The caller was interrupted while it released the lock, or could not reach Redis, and will
        not try again. ``before``: the state when the release began."""
        now = self._state()
        if before is not None:
            if now.times < before.times:  # This exit was counted.
                if now.entry is not None and not now.times:
                    now.entry.leave(self.local)  # The interrupt came there: this completes it.
                return
            if now.hold is not before.hold:
                return  # Another user of this handle has the lock by now.
        if now.entry is None or not now.entry.leave(self.local):
            self._hand_to_keeper()

    def _hand_to_keeper(self) -> None:
        """Perhaps nothing was sent yet, so the keeper releases the lock."""
        hold = self.local.hold
        if self.local.token is None or (hold is not None and hold.from_parent_process):
            return
        if self._is_anothers:
            return  # It has the lock after us.
        if hold is not None and hold.degraded:
            hold.end()
            self._forget(hold)
            return
        release = self._release_call(self._owned_token("release"), hold)
        self._end_hold(hold, self.local.renewal)
        self._hand_over(release)
        if hold is not None:
            hold.release_late()
        self.local.token = self.local.renewal = self.local.entry = None
        self._emit_released(hold)

    def _hand_over(self, release: Call, late: bool = False) -> None:
        keeper().add(DeferredRelease(server_of(self.redis), release, self.timeout, late))

    def _release_failed(self, before: Known, error: BaseException, body_failed: bool) -> bool:
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

    @property
    def _is_anothers(self) -> bool:
        """Whether another thread, which shares this handle, holds the lock by it."""
        hold = self.local.hold
        return hold is not None and hold.is_valid and not hold.by_this_thread

    # -- extend and reacquire ----------------------------------------------------------------

    def _change_steps(self, verb: str, seconds: float, replace: bool) -> Steps[Literal[True]]:
        hold = self.local.hold
        token = self._owned_token(verb)
        if self.degraded:
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
            if hold.ended and hold.lost:  # Noted since, perhaps told: it is final.
                self._hand_over(self._release_call(token, hold))
                self._not_owned(verb, self.lost_reason)
        return True

    def _prolonged(self, hold: Hold, deadline: float, asked_at: float) -> None:
        hold.held_until(deadline, asked_at)
        if self.local.renewal is not None:
            self.local.renewal.reschedule(asked_at)

    def _extend_call(self, verb: str, seconds: float, replace: bool) -> Call:
        token = self._owned_token(verb)
        hold = self.local.hold
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

    def _not_owned(self, verb: str, reason: str) -> NoReturn:
        text = f"Cannot {verb} a lock that's no longer owned{reason and f': {reason}'}"
        raise LockNotOwnedError(text, self._shown, reason=reason)

    def _why_steps(self, call: Call, early: bool | None, hold: Hold | None) -> Steps[str]:
        """Why ``call`` did not find the lock."""
        if hold is not None and hold.reason:
            return hold.reason
        keys = self.keys if hold is None else hold.keys
        of_it = self._servers[0], keys, as_bytes(call.args[0]), early, hold
        question, cause = history.question(*of_it)
        reply = None
        with suppress(RedisError):
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
