"""Everything about a lock's handle that does no input or output, for ``Lock`` and ``AsyncLock``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any, NoReturn

from .. import events
from ..clock import time
from ..events import check_group
from ..exceptions import LockError, LockLost, LockNotOwnedError
from ..protocol import (
    EXTEND,
    HELD,
    RESET,
    AcquireRequest,
    Acquisition,
    Call,
    Hold,
    HolderInfo,
    check_count,
    check_name,
    check_seconds,
    check_token,
    check_wait,
    lock_keys,
    longest_hold,
    milliseconds,
    new_token,
    release_call,
    waiter_id,
)
from ..transport import ServerBusy, is_cluster, server_of
from .history import note_vanished
from .kept import LockRenewal
from .local_state import ThreadState
from .telling import LockEvents
from .waiting import Refusal, queues

__all__ = ["BaseLock"]

Steps = Generator[Any, Any, Any]


class BaseLock(LockRenewal, LockEvents):
    """A lock's arguments and state. ``Lock`` and ``AsyncLock`` add the talking.

    Args:
        redis: the redis-py client.
        name: str, bytes or memoryview; the token is kept at exactly this key, as by redis-py.
        timeout: seconds the lock lives on the server unless renewed; None: until released, which
            a crash makes for ever.
        sleep: seconds between two tries where waiting cannot be signalled.
        blocking: whether ``acquire`` waits.
        blocking_timeout: seconds it waits at most; None: without end.
        thread_local: whether each thread (each task, for ``AsyncLock``) has its own token.
        raise_on_release_error: whether leaving the ``with`` block raises when the lock was lost.
        renew: keep extending the lock until it is released.
        max_hold: seconds after which it is renewed no more.
        min_hold: seconds it stays taken after the acquisition even if released before.
        on_lost: called without arguments, in a thread of its own, when the lock is lost.
        label: what the lock is taken for, for people who see it in the admin.
        group: under which it is counted in metrics, together with its like: for a lock named
            ``invoice-17``, say ``"invoice-{pk}"``. None: its name with ``*`` for each number, UUID
            and hash in it.
        warn_after: seconds of holding after which the log is told of it, once; None: 80 % of
            ``max_hold``, or of the lifetime of a lock that is not renewed.
        id: a token got elsewhere, to act for: ``release``, ``extend`` and the rest use it.
        replicas: how many replicas of the server must have confirmed an acquisition before it
            counts, so that it outlives a failover to any of them.
        grant_timeout: seconds a waiter has to take up a lock that is passed to it; the same on
            all hosts.

    Raises:
        TypeError, ValueError: an argument makes no sense; the message says what is allowed.
    """

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
        on_lost: Callable[[], Any] | None = None,
        label: str | None = None,
        group: str | None = None,
        warn_after: float | None = None,
        id: str | bytes | None = None,
        replicas: int = 0,
        grant_timeout: float = 2.0,
    ) -> None:
        self.redis = redis
        self.name = check_name(name)
        self.timeout = check_seconds("timeout", timeout, none="a lock that never expires")
        self.sleep = check_seconds("sleep", sleep, zero=True)
        self.blocking = bool(blocking)
        self.blocking_timeout = check_wait(blocking_timeout)
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        self.renew = bool(renew)
        self.max_hold = check_seconds("max_hold", max_hold, none="no end to its renewal")
        self.min_hold = check_seconds("min_hold", min_hold, zero=True) or 0.0
        if on_lost is not None and not callable(on_lost):
            raise TypeError(f"on_lost must be callable, not {on_lost!r}")
        self.on_lost = on_lost
        if label is not None and not isinstance(label, str):
            raise TypeError(f"label must be a str or None, not {label!r}")
        self.label = label or ""
        self.group = check_group(group)
        self.replicas = check_count("replicas", replicas)
        self.grant_timeout = check_seconds("grant_timeout", grant_timeout) or 2.0
        if self.timeout is None and (renew or max_hold is not None):
            raise ValueError("renew and max_hold need a timeout: a lock without one never expires")
        if self.max_hold is not None and self.min_hold > self.max_hold:
            raise ValueError("min_hold must not be longer than max_hold")
        self.warn_after = check_seconds("warn_after", warn_after, none="80 % of its lifetime")
        self.warns_after = warn_after or longest_hold(renew, self.timeout, self.max_hold) * 0.8
        self.keys = lock_keys(self._encode(self.name), is_cluster(redis))
        self.id = None if id is None else self._encode(check_token(id))
        self.local: Any = self._new_state()

    def _new_state(self) -> Any:
        state = ThreadState(self.id)
        return state if self.thread_local else SimpleNamespace(**vars(state))

    def _encode(self, value: str | bytes) -> bytes:
        encoded: bytes = self.redis.get_encoder().encode(value)
        return encoded

    # -- what the holder may ask without a round trip ----------------------------------------

    @property
    def fence(self) -> int | None:
        """The fencing token of this handle's acquisition: a strictly increasing integer."""
        hold: Hold | None = self.local.hold
        return None if hold is None else hold.fence

    @property
    def degraded(self) -> str | None:
        """How this handle holds the lock without Redis, as ``on_redis_down`` says; else None."""
        return None

    @property
    def lost(self) -> bool:
        """Whether the lock this handle acquired ended before it was released."""
        hold: Hold | None = self.local.hold
        return hold is not None and hold.lost

    def ensure_held(self) -> None:
        """Go on only while the lock is held; no round trip.

        Raises:
            LockLost: it was acquired by this handle and is not held any more.
            LockError: this handle (in this thread or task) has not acquired it.
        """
        hold: Hold | None = self.local.hold
        if hold is None:
            raise LockError("The lock has not been acquired", self._shown)
        if not hold.is_valid:
            raise LockLost("The lock is not held any more; stop before doing harm", self._shown)

    @property
    def _shown(self) -> str | bytes:
        return self.name

    # -- acquiring ---------------------------------------------------------------------------

    def _request(
        self,
        sleep: float | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        token: str | bytes | None,
    ) -> tuple[AcquireRequest, float | None]:
        """What one call of ``acquire`` asks for, and the seconds it may wait (0: one try)."""
        pause = self.sleep if sleep is None else check_seconds("sleep", sleep, zero=True)
        wait = check_wait(blocking_timeout)
        if wait is None:
            wait = self.blocking_timeout
        if not (self.blocking if blocking is None else blocking):
            wait = 0.0
        if wait is None:
            self._refuse_to_wait_for_itself()
        chosen = token if token is not None else self.id
        mine = new_token() if chosen is None else self._encode(check_token(chosen))
        attempt = b"" if chosen is None else secrets.token_hex(8).encode()
        pause = max(pause or 0.0, 0.001)
        whose = (self.keys, mine, attempt)
        how = (self.timeout, self.grant_timeout, pause)
        extras: Any = {"replicas": self.replicas, "subject": self.subject}
        if wait != 0:
            extras["waiter"] = self._new_waiter()
            extras["deadline"] = None if wait is None else time.monotonic() + wait
        return AcquireRequest(*whose, *how, may_hold=[(mine, attempt)], **extras), wait

    def _new_waiter(self) -> bytes:
        """The id under which the first request of ``acquire`` registers."""
        return waiter_id()

    def _refuse_to_wait_for_itself(self) -> None:
        hold: Hold | None = self.local.hold
        endless = self.renew or self.timeout is None
        if endless and self.thread_local and hold is not None and hold.is_valid:
            raise LockError(
                "This handle holds the lock already, in this very thread or task, and would wait "
                "for itself for ever; release it first, or give a blocking_timeout",
                self._shown,
            )

    def _obtain(self, request: AcquireRequest, wait: float | None) -> Steps:
        """The steps that take the lock on one server; None at the end of the wait.

        The first request registers a waiter if the lock is taken, so the queue is made only then.
        If others of this process wait already, the caller waits behind them.
        """
        server = server_of(self.redis)
        if wait != 0 and (server, self.keys.lock, self._loop()) in queues:
            return (yield self._wait(request._replace(waiter=b""), None))
        sent_at, refusal = time.monotonic(), None
        try:
            reply = yield self._ask(request)
            if reply[0]:
                if len(reply) > 3:
                    note_vanished(server, self.keys, reply[3], self.subject)
                return request.acquired(reply[1], sent_at)
            refusal = reply, sent_at
        except ServerBusy:
            if wait == 0:
                raise  # A waiter waits until the script that keeps the server busy has ended.
        if wait == 0:
            return None
        return (yield self._wait(request.with_margin(sent_at), refusal))

    def _loop(self) -> Any:
        """The event loop whose tasks this lock is for, None for threads."""
        return None

    def _ask(self, request: AcquireRequest) -> Any:
        """Send ACQUIRE; what it returns."""
        raise NotImplementedError

    def _wait(self, request: AcquireRequest, refusal: Refusal | None) -> Any:
        """Wait for the lock behind others; the lock, or None at the end of the wait."""
        raise NotImplementedError

    def _for_keeper(self, on_lost: Callable[[], Any]) -> Callable[[], Any]:
        """``on_lost`` as the keeper's thread may call it: it starts the user's code elsewhere."""
        raise NotImplementedError

    def _won(self, granted: Acquisition) -> Hold:
        """Note an acquisition in this thread's state."""
        hold = self._hold_class(
            self.keys,
            granted.token,
            granted.fence,
            began=granted.began,
            deadline=granted.deadline,
            lifetime=self.timeout,
            attempt=granted.attempt,
            renew=self.renew,
            max_hold=self.max_hold,
            label=self.label,
            on_lost=None if self.on_lost is None else self._for_keeper(self.on_lost),
            subject=self.subject if events.listeners else None,
            warns_at=granted.began + self.warns_after,
            now=self._now,
        )
        if granted.pending is not None:
            hold.pending = granted.pending
            hold.confirm_with(granted.pending.confirm)
        self.local.hold, self.local.token = hold, granted.token
        return hold

    # -- releasing and changing --------------------------------------------------------------

    def _owned_token(self, verb: str) -> bytes:
        token = self.local.token
        if token is None:
            raise LockError(f"Cannot {verb} a lock that's not owned", self._shown)
        hold: Hold | None = self.local.hold
        if hold is not None and hold.from_parent_process:
            raise LockNotOwnedError(f"Cannot {verb} a parent process's lock", self._shown)
        return token if isinstance(token, bytes) else self._encode(token)

    def _released_before(self) -> bool:
        """Whether a release of this acquisition failed before, and perhaps only in the reply."""
        hold: Hold | None = self.local.hold
        return hold is not None and hold.released

    def _release(self, token: bytes) -> Call:
        hold: Hold | None = self.local.hold
        if hold is None:
            return release_call(self.keys, token, new_token(), self.grant_timeout)
        of_this = (self.min_hold, hold.fence, hold.attempt)
        return release_call(self.keys, token, new_token(), self.grant_timeout, *of_this)

    def _extend(self, verb: str, seconds: Any, replace: bool) -> Call:
        token = self._owned_token(verb)
        if self.timeout is None:
            raise LockError(f"Cannot {verb} a lock with no timeout", self._shown)
        amount = milliseconds(check_seconds("the time to extend by", seconds))
        hold: Hold | None = self.local.hold
        attempt = b"" if hold is None else hold.attempt
        how = ("1", attempt, b"") if replace else ("0", attempt, secrets.token_hex(8).encode())
        return Call(EXTEND, self.keys, (token, amount, *how))

    def _extended(self, answer: Any, verb: str, seconds: float, replace: bool, at: float) -> None:
        if int(answer) == 0:
            self._not_owned(verb)
        if int(answer) < 0:
            raise LockError(f"Cannot {verb} a lock with no timeout", self._shown)
        hold: Hold | None = self.local.hold
        if hold is not None:
            if replace:
                # Also if it was lost: the full lifetime is not wanted any more.
                hold.confirm_pending = None
            until = at + seconds if replace else max(hold.deadline, at) + seconds
            self._prolonged(hold, until, at)

    def _not_owned(self, verb: str) -> NoReturn:
        raise LockNotOwnedError(f"Cannot {verb} a lock that's no longer owned", self._shown)

    def _held_call(self) -> Call:
        return Call(HELD, self.keys, ())

    def _reset_call(self, reply: Any) -> Call:
        """Ends the lock of the holder that ``reply``, to HELD, has named."""
        held, grant = HolderInfo(reply), (new_token(), milliseconds(self.grant_timeout))
        return Call(RESET, self.keys, (*grant, held.token, held.fence))

    def _is_mine(self, reply: Any) -> bool:
        hold: Hold | None = self.local.hold
        token = self.local.token
        if reply is None or token is None or (hold is not None and not hold.is_valid):
            return False
        return HolderInfo(reply).token == (
            token if isinstance(token, bytes) else self._encode(token)
        )
