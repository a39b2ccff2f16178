"""What all locks have in common: their options and their state, what their methods do, and what the
log and listeners hear of it.

What methods do is written once for threads and for tasks, as generators of steps (see ``steps``);
``lock`` and ``aio`` do the steps, and start the generators. The state is ``local``, see ``State``.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import ref

from redis.exceptions import RedisError

from .. import events, history
from ..clock import time
from ..events import Subject
from ..exceptions import (
    LockError,
    LockLost,
    LockNotAcquired,
    LockNotOwnedError,
    TooFewReplicas,
)
from ..extension import part
from ..keeper import release_later
from ..protocol import (
    EXTEND,
    AcquireRequest,
    Acquisition,
    Call,
    Extended,
    LockKeys,
    Refused,
    Reply,
    Taken,
    as_bytes,
    lock_keys,
    milliseconds,
    named_token,
    new_token,
    parse_acquire,
    printable,
    release_call,
    waiter_id,
)
from ..protocol.holder_scripts import holders_call, parse_holders, reset_call
from ..protocol.holders import HolderInfo, seconds_to_retry
from ..protocol.lock_scripts import MARK
from ..protocol.validation import (
    check_bool,
    check_name,
    check_seconds,
    check_time,
    check_token,
    check_wait,
    checked_options,
    unknown_option,
)
from ..steps import Step, Steps, Undo
from ..threads import check_plain, get_logger
from ..transport import (
    Answer,
    NotReady,
    Server,
    encoded,
    is_cluster,
    is_refusal,
    may_have_run,
    note_sent,
    pack,
    pack_words,
    server_of,
)
from . import waiting
from .hold import (
    Entry,
    Hold,
    Known,
    Lifeline,
    Renewal,
    State,
    ThreadState,
    acting_task,
    entries,
    is_in_event_loop,
    release_late,
    renewals,
)
from .waiting import queues

if TYPE_CHECKING:
    import asyncio

    from typing_extensions import Never

    from ..protocol import Owner

logger = get_logger("django_redis_lock.lock")

#: Seconds that replicas have at least, and at most.
MIN_PATIENCE_SECONDS, MAX_PATIENCE_SECONDS = 1.0, 3.0
#: The answer to a WAIT may be late.
REPLY_MARGIN_SECONDS = 1.0


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
    label: str
    group: str

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
        given = locals()
        if unknown:
            known = [*signature(BaseLock).parameters][2:-1]
            raise unknown_option(f"{type(self).__name__}()", min(unknown), known)
        self._check_kind(redis, on_lost, cancel_on_lost)
        self.redis, self.name, self.on_lost = redis, check_name(name), on_lost
        vars(self).update(checked_options(given))
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
        return ThreadState(self.id)

    def _encode(self, value: str | bytes) -> bytes:
        return value if type(value) is bytes else encoded(self.redis, value)

    @property
    def subject(self) -> Subject:
        """This lock, for events."""
        if self._subject is None:
            name = self.cache_key or self.keys.lock.decode(errors="backslashreplace")
            of_it = self.group, self.label, self._servers[0], self.cache
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

    # -- what ``lock`` and ``aio`` do -----------------------------------------------------------

    #: Run a script; wait for the reply until a monotonic time, or as long as the client does.
    _run: Callable[..., Step[Answer]]
    #: Wait for the lock in this process's queue; None at the deadline.
    _wait: Callable[[AcquireRequest, Refused | None], Step[Acquisition | None]]
    #: Wait for the replicas until a monotonic time; see ``_question_to_replicas``.
    _ask_replicas: Callable[[Acquisition, float], Step[Sequence[Reply]]]
    #: Wait for the reply to TAKE_GRANT.
    _await_confirmation: Callable[[Hold], Step[None]]

    def _loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop whose tasks this lock is for, None for threads."""
        return None

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
        entry = self.local.entry
        if entry is not None and entry.depth > 1:
            return  # The block around this one is left after it.
        if self.local.hold is not None:
            self.local.hold.shared = False  # The end of the block releases it.
        if self.local.renewal is not None:  # There is none for a lock taken without Redis.
            self.local.renewal.entered(self.grant_timeout, self.min_hold)

    # -- acquire -----------------------------------------------------------------------------

    def _acquire(self, *args: Any) -> tuple[Steps[bool], Undo]:
        """What ``acquire`` does, and what undoes it if it fails. ``args``: of ``_request``."""
        request, wait = self._request(*args)
        # A task is not interrupted between two lines.
        before = None if self.asynchronous else self.local.known()
        steps = self._enter_or_acquire if self.reentrant else self._acquire_steps
        return steps(request, wait), partial(self._abandon, request, before=before)

    def _acquire_steps(self, request: AcquireRequest, wait: float | None) -> Steps[bool]:
        if self.on_redis_down == "raise":
            return self._acquire_in_redis(request, wait)
        steps: Steps[bool] = part("fallback").Attempt(self, request, wait).steps()
        return steps

    def _acquire_in_redis(self, request: AcquireRequest, wait: float | None) -> Steps[bool]:
        lifeline = self._new_lifeline()
        acquired = yield from self._obtain(request, wait)
        if acquired is None:
            release_late(request)
            self._emit_timed_out(request.asked_at, wait != 0)
            return False
        if self.replicas:
            yield from self._await_replicas(request, acquired, wait)
        hold = self._start_renewal(request, acquired, lifeline)
        self._emit_acquired(hold, request.asked_at, acquired.contended)
        return True

    def _obtain(self, request: AcquireRequest, wait: float | None) -> Steps[Acquisition | None]:
        """Take the lock; an ``Acquisition``, or None at the end of the wait.

        The first request registers a waiter if the lock is taken, so the queue is made only then.
        If others of this process wait already, the caller waits behind them.
        """
        key = server_of(self.redis), self.keys.lock, self._loop(), self.limit
        if queues and wait != 0 and key in queues:
            self._on_contended(wait)
            waited: Acquisition | None = yield self._wait(request._replace(waiter=b""), None)
            return waited
        sent_at, refused = time.monotonic(), None
        try:
            call, until = request.acquire_call(request.waiter), request.reply_until()
            reply = parse_acquire((yield self._run(call, until)).value, sent_at)
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

    def _await_replicas(
        self, request: AcquireRequest, acquired: Acquisition, wait: float | None
    ) -> Steps[None]:
        """Raises TooFewReplicas unless they know of ``acquired`` while it may be waited for, within
        reason."""
        request.may_hold[:] = [(acquired.token, acquired.attempt, acquired.place)]
        now = time.monotonic()
        until = math.inf if wait is None else request.asked_at + wait
        most = min(MAX_PATIENCE_SECONDS, (request.lifetime or math.inf) / 3)
        by = min(max(until, now + MIN_PATIENCE_SECONDS), now + most)
        try:
            held, known = yield self._ask_replicas(acquired, by)
        except Exception as error:
            note_sent(error, True)  # The lock is held, also if this question could not be sent.
            raise
        if not held or known < self.replicas:
            raise TooFewReplicas(known if held else 0, self.replicas, self._shown)

    def _question_to_replicas(self, keys: LockKeys, token: bytes, until: float) -> bytes:
        """Its two replies: whether ``token`` still holds the lock, and how many replicas know."""
        mark = pack(Call(MARK, keys, (token,)), known=False)
        left = milliseconds(until - time.monotonic())
        return mark + pack_words(b"WAIT", b"%d" % self.replicas, b"%d" % left)

    def _new_lifeline(self) -> Lifeline:
        hold = self._new_hold()
        return Lifeline(hold, Renewal(server_of(self.redis), hold))

    def _start_renewal(
        self, request: AcquireRequest, granted: Acquisition, lifeline: Lifeline
    ) -> Hold:
        hold, place = lifeline.hold, granted.place
        keys = self.keys if place == 1 else self.keys.at_place(place)
        hold.begin(granted, keys, request.limit_of(place))
        hold.request = request
        self._note_hold(hold, lifeline)
        lifeline.begin()
        return hold

    def _note_hold(self, hold: Hold, lifeline: Lifeline | None) -> None:
        local = self.local
        hold.task, hold.shared = local.task, bool(hold.attempt) or not self.thread_local
        local.hold, local.token, local.renewal = hold, hold.token, lifeline

    # -- release -----------------------------------------------------------------------------

    def _release(self) -> tuple[Steps[None], Undo]:
        """What ``release`` does, and what completes it if it is interrupted."""
        steps = self._leave_or_release() if self.reentrant else self._release_steps()
        return steps, partial(self._release_interrupted, self.local.known())

    def _release_steps(self) -> Steps[None]:
        token, hold, renewal = self._owned_token("release"), self.local.hold, self.local.renewal
        if hold is not None and hold.degraded:
            hold.end()
            self._forget(hold)
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

    def _end_hold(self, hold: Hold | None, renewal: Lifeline | None) -> None:
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

    # -- interrupts --------------------------------------------------------------------------
    #
    # A signal handler may raise at any point, also between two steps: ``acquire`` and ``release``
    # of ``Lock`` catch that. The keeper releases what is left.

    def _abandon(
        self, request: AcquireRequest, error: BaseException, before: Known | None = None
    ) -> None:
        """``acquire`` ends with ``error``: release all that ``may_hold`` the lock, and restore the
        state ``before``."""
        sent = may_have_run(error)
        if sent and request.waiter:
            waiting.unregister(server_of(self.redis), request)
        unsent = None if sent else (request.token, request.attempt, 1)
        for claim in request.may_hold:
            if claim != unsent:
                self._release_later(request.release_call(*claim), late=True)
        if before is not None:
            self._restore(before)

    def _restore(self, before: Known) -> None:
        local, now = self.local, self.local.known()
        if self._held_by_another_thread:
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

    def _release_interrupted(self, before: Known, error: BaseException) -> None:
        if not isinstance(error, RedisError):
            self._leave_to_keeper(before)

    def _leave_to_keeper(self, before: Known | None = None) -> None:
        """The caller was interrupted while it released the lock, or could not reach Redis, and will
        not try again. ``before``: the state when the release began."""
        local, now = self.local, self.local.known()
        if before is not None:
            if now.times < before.times:  # This exit was counted.
                if now.entry is not None and not now.times:
                    now.entry.leave(local)  # The interrupt came there: this completes it.
                return
            if now.hold is not before.hold:
                return  # Another user of this handle has the lock by now.
        hold = now.hold
        if now.entry is not None and now.entry.leave(local):
            return
        if local.token is None or (hold is not None and hold.from_parent_process):
            return
        if self._held_by_another_thread:
            return  # It has the lock after us.
        if hold is not None and hold.degraded:
            hold.end()
            self._forget(hold)
            return
        release = self._release_call(self._owned_token("release"), hold)
        self._end_hold(hold, local.renewal)
        self._release_later(release)  # Perhaps nothing was sent yet.
        if hold is not None:
            hold.release_late()
        local.token = local.renewal = local.entry = None
        self._emit_released(hold)

    def _release_later(self, release: Call, late: bool = False) -> None:
        for server in self._servers:
            release_later(server, release, self.timeout, late)

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
    def _held_by_another_thread(self) -> bool:
        """Whether another thread, which shares this handle, holds the lock by it."""
        hold = self.local.hold
        return hold is not None and hold.is_valid and not hold.by_this_thread

    # -- extend and reacquire ----------------------------------------------------------------

    def _change_steps(self, verb: str, seconds: float, replace: bool) -> Steps[Literal[True]]:
        hold = self.local.hold
        token = self._owned_token(verb)
        if self.degraded:
            return True
        # Of the lock of a token from elsewhere, only Redis knows whether it has a lifetime.
        unknown = verb == "extend" and self.id is not None and hold is None
        if self._lifetime is None and not unknown:
            raise LockError(f"Cannot {verb} a lock with no timeout", self._shown)
        amount = milliseconds(check_seconds("the time to extend by", seconds))
        attempt = b"" if hold is None else hold.attempt
        how = ("1", attempt, b"") if replace else ("0", attempt, secrets.token_hex(8).encode())
        keys, limit = (self.keys, self.limit) if hold is None else (hold.keys, hold.limit)
        call = Call(EXTEND, keys, (token, amount, *how))
        if limit != 1:
            call = Call(part("limit").PLACE_EXTEND, keys, (*call.args, limit))
        if hold is not None and hold.pending is not None:
            # The change must not overtake TAKE_GRANT, which is sent on another connection.
            yield self._await_confirmation(hold)
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
                self._release_later(self._release_call(token, hold))
                self._not_owned(verb, self.lost_reason)
        return True

    def _prolonged(self, hold: Hold, deadline: float, asked_at: float) -> None:
        hold.note_deadline(deadline, asked_at)
        if self.local.renewal is not None:
            self.local.renewal.reschedule(asked_at)

    def _not_owned(self, verb: str, reason: str) -> NoReturn:
        text = f"Cannot {verb} a lock that's no longer owned{reason and f': {reason}'}"
        raise LockNotOwnedError(text, self._shown, reason=reason)

    def _why_steps(self, call: Call, early: bool | None, hold: Hold | None) -> Steps[str]:
        """Why ``call`` did not find the lock."""
        if hold is not None and hold.reason:
            return hold.reason
        keys = self.keys if hold is None else hold.keys
        of_it = self._servers[0], keys, as_bytes(call.args[0]), early, hold
        return (yield from history.why_steps(self._run, *of_it))

    # -- re-entry ----------------------------------------------------------------------------

    def _entry_key(self) -> tuple[object, ...]:
        caller = ref(acting_task() or threading.current_thread())
        return caller, self.asynchronous, self._servers, self.keys.lock

    def _entry_of_caller(self) -> Entry | None:
        entry = entries.get(self._entry_key())
        return entry if entry is not None and entry.hold.is_valid else None

    def _is_inside(self) -> bool:
        """Whether the caller holds the lock, and goes in again without a wait."""
        return self.reentrant and self._entry_of_caller() is not None

    def _enter_or_acquire(self, request: AcquireRequest, wait: float | None) -> Steps[bool]:
        entry = self._entry_of_caller()
        if entry is not None:
            on_lost = None if self.on_lost is None else self._for_keeper(self.on_lost)
            if entry.enter(self.local, on_lost):
                return True
        acquired = yield from self._acquire_steps(request, wait)
        if acquired:
            entry = Entry(self.local, self.timeout, self.min_hold)
            self.local.entry = entries[self._entry_key()] = entry
        return acquired

    def _leave_or_release(self) -> Steps[None]:
        entry = self.local.entry
        if entry is None or not entry.leave(self.local):
            yield from self._release_steps()
        elif entry.hold.lost:
            self._not_owned("release", self.lost_reason)

    def _is_by_caller(self, hold: Hold) -> bool:
        if not self.asynchronous:  # A thread that waits stops all of its tasks.
            return hold.by_this_thread
        return hold.task is not None and hold.task() is acting_task()

    def _own_renewals(self) -> list[Renewal]:
        """Those of the caller that keep the lock taken, by any lock objects, as far as is known;
        none if others have one of its places."""
        for server in self._servers:
            mine: list[Renewal] = []
            for number in range(1, self.limit + 1):
                job = renewals.get((server, self.keys.at_place(number).lock))
                if job is None or not job.hold.is_valid or not self._is_by_caller(job.hold):
                    break
                mine.append(job)
            else:
                return mine
        return []

    # -- who holds it ------------------------------------------------------------------------

    def _holders_steps(self) -> Steps[list[HolderInfo]]:
        if self.on_redis_down == "raise":
            return self._holders_in_redis()
        in_either: Steps[list[HolderInfo]] = part("fallback").holders(self)
        return in_either

    def _holders_in_redis(self) -> Steps[list[HolderInfo]]:
        reply = (yield self._run(holders_call(self.keys, self.limit))).value
        return parse_holders(self.limit, reply)

    def _held_steps(self) -> Steps[HolderInfo | None]:
        return next(iter((yield from self._holders_steps())), None)

    def _holder_steps(self) -> Steps[Owner | None]:
        held = yield from self._held_steps()
        owner = None if held is None else held.in_the_way
        call = None if owner is None else history.heartbeat_call(owner)
        if call is None:
            return owner
        return history.with_heartbeat(owner, (yield self._run(call)).value)

    def _owner_id_steps(self) -> Steps[str | None]:
        held = yield from self._held_steps()
        return held.token.decode(errors="replace") if held else None

    def _ttl_steps(self) -> Steps[float | None]:
        held = yield from self._held_steps()
        return held.ttl if held else None

    def _locked_steps(self) -> Steps[bool]:
        holders = yield from self._holders_steps()
        # A holder without Redis has no token, and the lock for itself.
        return len(holders) >= self.limit or not all(held.token for held in holders)

    def _owned_steps(self) -> Steps[bool]:
        hold, token = self.local.hold, self.local.token
        if token is None or self.degraded:
            return self.degraded is not None
        if hold is None and self.limit > 1:
            holders = yield from self._holders_steps()
        else:
            call = holders_call(self.keys if hold is None else hold.keys)
            holders = parse_holders(1, (yield self._run(call)).value)
        hold, token = self.local.hold, self.local.token
        if token is None or (hold is not None and not hold.is_valid):
            return False
        mine = token if isinstance(token, bytes) else self._encode(token)
        return any(held.token == mine for held in holders)

    def _not_acquired_steps(self) -> Steps[LockNotAcquired]:
        held = None
        with suppress(RedisError):
            held = yield from self._held_steps()
        seconds = seconds_to_retry(held, events.usual_hold(self.subject))
        return LockNotAcquired.from_held(self._shown, held, float(seconds))

    def _reset_steps(self) -> Steps[bool]:
        reply = (yield self._run(holders_call(self.keys, self.limit))).value
        holders = parse_holders(self.limit, reply)
        for held in holders:
            yield self._run(self._reset_call(held))
        return bool(holders)

    def _reset_call(self, held: HolderInfo) -> Call:
        of_it = held.in_the_way, history.code_here(), held.held_for, self.stored_name
        event = history.event_args(self.keys.name, "reset", *of_it)
        return reset_call(self.keys, held, self.grant_timeout, self.limit, event=event)

    # -- what listeners and the log hear -----------------------------------------------------

    @property
    def _printed(self) -> str:
        return printable(self.keys.lock)

    def _on_contended(self, wait: float | None) -> None:
        """It is taken, and the caller waits ``wait`` seconds: 0 for none, None without end."""
        if events.listeners:
            events.emit(events.Contended(self.subject, self.keys))
        if wait != 0:
            mine = self._own_renewals()
            if wait is None and mine and all(job.is_endless for job in mine):
                self._refuse_endless_wait()
            self._warn_of_deadlock(bool(mine))

    def _refuse_endless_wait(self) -> NoReturn:
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

    def _debug(self, message: str, **fields: object) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(message, {"lock": self._printed, **fields})

    def _emit_acquired(self, hold: Hold, asked_at: float, contended: bool) -> None:
        waited, fence = time.monotonic() - asked_at, hold.fence
        message = "Acquired %(lock)s after %(waited).3f s, fence %(fence)d"
        self._debug(message, waited=waited, fence=fence)
        if events.listeners:
            events.emit(events.Acquired(self.subject, waited, contended, fence))

    def _emit_timed_out(self, asked_at: float, blocking: bool) -> None:
        waited, subject = time.monotonic() - asked_at, self.subject
        self._debug("Did not get %(lock)s within %(waited).3f s", waited=waited)
        if events.listeners:
            events.emit(events.TimedOut(subject, waited) if blocking else events.Rejected(subject))

    def _emit_released(self, hold: Hold | None) -> None:
        self._debug("Released %(lock)s")
        if events.listeners and hold is not None:
            events.emit(events.Released(self.subject, time.monotonic() - hold.began, hold.fence))

    def _emit_lost(self, hold: Hold | None, reason: str) -> None:
        """A release found that the lock had ended before, which was not emitted yet."""
        if events.listeners and hold is not None and hold.released:
            held = time.monotonic() - hold.began
            events.emit(events.Lost(self.subject, held, reason, hold.fence))
