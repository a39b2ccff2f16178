"""One call of code under its lock."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from asgiref.sync import AsyncToSync, sync_to_async
from redis.exceptions import AuthenticationError, RedisError

from .. import events, transport
from ..cache import lock_cache
from ..clock import time
from ..conf import Conf
from ..contention import Conflict
from ..exceptions import LockError
from ..locking import BaseLock
from ..protocol import printable
from ..steps import Steps, adrive, drive
from ..threads import get_logger, in_context, is_async
from ..transport import is_outage
from . import transactions
from .options import OnLost, Options
from .refusals import note_outage

if TYPE_CHECKING:
    from ..cache import CurrentLock

logger = get_logger("django_redis_lock.locked")

_CONF = Conf()
#: Between two attempts to reach Redis: the first time, and at most.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 1.0
PLAIN_FUNCTION = "{} must be a plain function, because {} is one"
_WAITS_FOR_ITSELF = (
    "This call already holds the lock and would wait for itself; give reentrant=True to both uses "
    "of locked()",
    "This call would wait for itself: the task or thread that it works for already holds the lock, "
    "and re-entry does not go from a task to a thread or back",
)


# -- the locks of the running call ---------------------------------------------------------------


class Entered(NamedTuple):
    """A lock that one call holds."""

    lock: BaseLock
    key: transactions.Key
    caller: tuple[int, int]


_entered: ContextVar[tuple[Entered, ...]] = ContextVar("django_redis_lock_entered", default=())


def current_lock() -> CurrentLock:
    """The innermost lock that ``locked()`` holds for the running call, for its ``fence``, ``lost``
    and ``ensure_held()``, or to ``extend`` it. Threads and tasks that the call starts find it too
    if they run in a copy of its context, as with ``sync_to_async`` and ``asyncio.create_task``::

        @locked("invoice-{pk}")
        def send_invoice(pk):
            for page in pages(pk):
                current_lock().ensure_held()  # raises LockLost; no round trip
                post(page, fence=current_lock().fence)

    Raises:
        LockError: no lock is held here.
    """
    entered = _entered.get()
    if not entered:
        raise LockError("current_lock() works inside what locked() decorates: no lock is held here")
    lock: object = entered[-1].lock
    return cast("CurrentLock", lock)


def caller() -> tuple[int, int]:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # No event loop runs in this thread.
        task = None
    return threading.get_ident(), 0 if task is None else id(task)


# -- outages -------------------------------------------------------------------------------------


class RetryUntil:
    """Whether and when a request that failed is repeated, until ``deadline`` (monotonic)."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.attempts = 0

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def pause_after(self, error: Exception) -> float:
        """Seconds to wait until the next attempt; or raise ``error``."""
        left = self.left()
        if not left or not is_outage(error) or isinstance(error, AuthenticationError):
            raise error
        self.attempts += 1
        pause = FIRST_PAUSE_SECONDS * 2.0 ** min(self.attempts - 1, 10)
        return min(pause, MAX_PAUSE_SECONDS, left)


@contextmanager
def outages_not_logged() -> Iterator[None]:
    """For a command that itself prints that Redis cannot be reached, but not that it goes ahead."""
    logger = logging.getLogger("django_redis_lock.outage")

    def errors_only(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(errors_only)
    try:
        yield
    finally:
        logger.removeFilter(errors_only)


# -- sections ------------------------------------------------------------------------------------


class Section:
    """One call under its lock, as generators of steps; see ``steps``. A task awaits
    ``enter``, ``leave`` and ``conflict``. ``label`` and ``group`` are for options that leave them
    out."""

    lock: Any

    def __init__(
        self,
        options: Options,
        name: str | tuple[str, ...],
        label: str | None = None,
        group: str | None = None,
        *,
        asynchronous: bool = False,
    ) -> None:
        self.options = options
        self.names = name
        self.name = name if isinstance(name, str) else ", ".join(name)
        self.label, self.group = label, group
        self.using = options.using or _CONF.USING  # At each call: decorators run before settings.
        self._key = (self.using, name)
        self.on_lost: OnLost = options.on_lost if callable(options.on_lost) else None
        self._asynchronous = asynchronous
        self._drive: Any = adrive if asynchronous else drive
        self._context = contextvars.copy_context()
        self.caller = caller()
        self._left = False

    def enter(self, on_wait: Callable[[Conflict], None] | None = None) -> Any:
        """Acquire the lock; returns whether that succeeded. ``on_wait`` is called with the conflict
        before the wait begins."""
        return self._drive(self._enter(on_wait))

    def leave(self, error: BaseException | None = None) -> Any:
        """Release the lock, now or when the transaction ends. An error from that is logged: it must
        not cost the result of the work. Raises LockLost if the work's ``error`` is the cancellation
        of its task because the lock was lost."""
        return self._drive(self._leave(error))

    def conflict(self) -> Any:
        return self._drive(self._conflict())

    def lost_reason(self) -> str:
        return str(getattr(self.lock, "lost_reason", ""))

    def abandon(self) -> None:
        """A signal handler's exception interrupted the section: the keeper releases."""
        lock = getattr(self, "lock", None)
        if lock is not None and not self._left:
            _forget_entered(lock)
            lock._leave_to_keeper()

    # -- the lock ----------------------------------------------------------------------------

    def _new_lock(self) -> BaseLock:
        cache, options = lock_cache(self.using), self._lock_options(self._on_lost_callback())
        make: Callable[..., BaseLock] = cache.alock if self._asynchronous else cache.lock
        return make(self.names, **options)

    def _lock_options(self, on_lost: OnLost) -> dict[str, Any]:
        return {
            **self.options.of_lock,
            "on_lost": on_lost,
            "label": self.options.label or self.label,
            "group": self.options.group or self.group,
        }

    def _on_lost_callback(self) -> OnLost:
        """Runs in the context of the call, so that ``current_lock()`` works there."""
        on_lost = self.on_lost
        if on_lost is None:
            return None
        if not self._asynchronous and is_async(on_lost):
            raise TypeError(PLAIN_FUNCTION.format("on_lost", self.label or "a with block"))

        def callback() -> None:
            # An event loop calls it in the thread of the section.
            carried = (
                self._context.run if self._asynchronous else partial(in_context, self._context)
            )
            outcome = carried(on_lost)
            if asyncio.iscoroutine(outcome):
                self._context.run(transport.in_background, outcome)

        return callback

    # -- the steps ---------------------------------------------------------------------------

    def _call(self, method: str, **options: object) -> object:
        return getattr(self.lock, method)(**options)

    def _in_callers_thread(self, function: Callable[[], object]) -> object:
        """Call ``function`` in the thread of the synchronous caller, who may have a transaction
        open; None if there is no such caller."""
        return _for_sync_caller(function) if self._asynchronous else function()

    def _enter(self, on_wait: Callable[[Conflict], None] | None) -> Steps[bool]:
        again = yield self._in_callers_thread(partial(transactions.take_up, self._key))
        self._taken_up = again is not None and _is_held_here(again) and not again.lost
        self.lock = again if self._taken_up and not self._asynchronous else self._new_lock()
        if hasattr(self.lock, "named"):
            yield self.lock.named()
        if self._taken_up:
            if self._asynchronous:
                self.lock._take_over(again)
        else:
            self._refuse_to_wait_for_itself()
            if self.options.blocking and (
                yield self._in_callers_thread(partial(transactions.holds_part_of, self._key))
            ):
                raise LockError(
                    "This call would wait for itself: its transaction holds the lock", self.name
                )
            if not (yield from self._acquire(on_wait)):
                return False
        self.lock._entered()
        _entered.set((*_entered.get(), Entered(self.lock, self._key, self.caller)))
        self._context = contextvars.copy_context()
        return True

    def _refuse_to_wait_for_itself(self) -> None:
        if not self.options.blocking or self.lock._is_inside():
            return
        for lock, key, there in _entered.get():
            here = caller()
            # Of a thread and a task with one context, one waits for the other: sync_to_async.
            across = bool(there[1]) is not bool(here[1])
            if not (across or there == here) or not transactions.overlap(key, self._key):
                continue
            if _is_held_here(lock) and not lock.lost:
                raise LockError(_WAITS_FOR_ITSELF[across], self.name)

    def _acquire(self, on_wait: Callable[[Conflict], None] | None) -> Steps[bool]:
        wait = self.options.blocking_timeout
        retry = RetryUntil(math.inf if wait is None else time.monotonic() + wait)
        if on_wait is not None and self.options.blocking:
            if (yield from self._try(retry, blocking=False)):
                return True
            on_wait((yield from self._conflict()))
        return (yield from self._try(retry))

    def _try(self, retry: RetryUntil, **options: object) -> Steps[bool]:
        while True:
            left = retry.left()
            if "blocking" not in options:
                options["blocking_timeout"] = None if math.isinf(left) else left
            try:
                acquired: bool = yield self._call("acquire", **options)
                return acquired
            except RedisError as error:
                note_outage(error, self.name, self.options.retry_after)
                if not self.options.wait_for_redis:
                    raise
                pause = retry.pause_after(error)
                yield time.asleep(pause) if self._asynchronous else time.sleep(pause)

    def _leave(self, error: BaseException | None) -> Steps[None]:
        _forget_entered(self.lock)
        lock = self.lock
        lost = lock.asynchronous and lock._is_cancelled_by_loss(error)
        try:
            waits = yield self._in_callers_thread(self._wait_for_transactions)
        except BaseException:
            yield from _release(self.lock, self.name, partial(self._call, "release"))
            raise
        if not waits:
            yield from _release(self.lock, self.name, partial(self._call, "release"))
        self._left = True
        if lost:
            raise lock._lost_error() from error

    def _wait_for_transactions(self) -> bool:
        """Whether the lock is released when open transactions of this thread end. There may be no
        event loop by then, so a lock for threads takes the place of one for asyncio."""
        if self.options.release == "now" and not self._taken_up:
            return False
        lock = self.lock
        if lock.asynchronous:
            if not transactions.open_transactions():
                return False
            options = {**self._lock_options(None), "cancel_on_lost": False}
            lock = lock_cache(self.using).lock(self.names, **options)
            lock._take_over(self.lock)
        return transactions.wait_for(
            lock, self._key, lambda: drive(_release(lock, self.name, lock.release))
        )

    def _conflict(self) -> Steps[Conflict]:
        try:
            held = yield self._call("held")
        except RedisError:  # It is taken; the holder is unknown.
            held = None
        given = self.options.retry_after
        usual = events.usual_hold(self.lock.subject) if given is None else None
        name = held.name if held is not None and held.name else self.name
        conflict = Conflict.of(name, held, self.using, given, usual)
        if isinstance(self.names, str) or name != self.name:
            return conflict
        return replace(conflict, first_name=self.names[0])


async def _for_sync_caller(function: Callable[[], object]) -> object:
    """Call it in the thread that waits for this task in ``async_to_sync``, if there is one."""
    waits = getattr(AsyncToSync.executors, "current", None) is not None
    if waits or asyncio.get_running_loop() in getattr(AsyncToSync, "loop_thread_executors", ()):
        return await sync_to_async(function)()
    return None


def _forget_entered(lock: BaseLock) -> None:
    # It need not be the innermost, nor be there: a generator may be left in another context.
    _entered.set(tuple(entered for entered in _entered.get() if entered.lock is not lock))


def _is_held_here(lock: BaseLock) -> bool:
    """False if the code itself has released the lock, and in a forked child, whose parent holds
    it."""
    hold = lock.local.hold
    return lock.local.token is not None and not (hold is not None and hold.from_parent_process)


def _release(lock: Any, name: str, release: Callable[[], object]) -> Steps[None]:
    if not _is_held_here(lock):
        return
    before = lock.local.known()
    try:
        yield release()
    except RedisError as error:
        about = {"lock": printable(name), "error": error}
        if isinstance(error, LockError):
            logger.warning("The lock %(lock)s ended before the locked code did: %(error)s", about)
        else:
            lock._leave_to_keeper(before)
            words = (
                "The locked code has ended, but its lock %(lock)s is not released yet: %(error)s"
            )
            logger.error(words, about)
