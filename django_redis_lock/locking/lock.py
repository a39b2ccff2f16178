"""The lock for threads. See ``BaseLock`` for its arguments and ``aio`` for asyncio."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from redis.exceptions import RedisError

from ..protocol import AcquireRequest, Acquisition, Call, Refused, Reply
from ..protocol.validation import check_time
from ..steps import drive
from ..threads import in_context
from ..transport import Answer, run
from . import questions
from . import replicas as replication
from .base import BaseLock
from .hold import Hold, log_failed
from .waiting import ThreadWaiter

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..protocol import Owner
    from ..protocol.holders import HolderInfo
    from .questions import Query


def refusing(instead: str) -> Callable[..., NoReturn]:
    """A special method that Python calls where a lock for threads is used as one for tasks, or the
    other way round."""

    def refuse(self: object, *args: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__} {instead}")

    return refuse


class Lock(BaseLock):
    """A lock on Redis with redis-py's interface: ``redis_client.lock(name, lock_class=Lock)``.

    A waiter is woken by the release, in the order of arrival; it does not poll. What may go wrong,
    as a timeline, with ``timeout=30``:

    ====  =======================================================================================
    0 s   A acquires; B and C wait.
    5 s   A releases, and the lock passes to B, who came first. If B has died, C gets it at once;
          if B is stopped (SIGSTOP, a frozen host), C gets it at 7 s.
    9 s   B is killed, and does not release.
    35 s  The lifetime B was given ends, and C has the lock.
    ====  =======================================================================================
    """

    if not TYPE_CHECKING:  # Type checkers refuse these.
        __aenter__ = __aexit__ = refusing(
            "is for threads. In a coroutine: async with cache.alock(…), or AsyncLock"
        )
        __await__ = refusing("is for threads. In a coroutine: async with cache.alock(…)")

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Acquire the lock.

        Args:
            sleep, blocking, blocking_timeout: override those of the lock object, see ``BaseLock``.
            token: what proves ownership, instead of a random value.

        Returns:
            Whether the lock is held now. False: the wait ended first.

        Raises:
            TypeError, ValueError: an argument is invalid.
            LockError: the caller itself holds the lock and would wait for itself forever.
            redis.exceptions.RedisError: Redis cannot be reached; the lock is not held.
        """
        request, wait = self._request(sleep, blocking, blocking_timeout, token)
        before = self.local.known()
        try:
            if self.reentrant and self._enter_again():
                return True
            acquired = drive(self._acquire_steps(request, wait))
            if self.reentrant and acquired:
                self._note_entry()
            return acquired
        except BaseException as error:  # A signal handler's may come at any point.
            self._abandon(request, error, before)
            raise

    def _send_acquire(self, request: AcquireRequest) -> Reply:
        call, until = request.acquire_call(request.waiter), request.reply_until()
        return run(self.redis, call, until=until).value

    def _wait(self, request: AcquireRequest, refused: Refused | None) -> Acquisition | None:
        return ThreadWaiter(self.redis, request).wait(refused)

    def _ask_replicas(self, acquired: Acquisition, until: float) -> replication.Confirmed:
        where = self.redis, self.keys.at_place(acquired.place)
        return replication.ask_replicas(*where, acquired.token, self.replicas, until)

    def _await_confirmation(self, hold: Hold) -> None:
        hold.confirm(wait=True)

    def _for_keeper(self, on_lost: Callable[[], object]) -> Callable[[], object]:
        return in_a_thread(on_lost, self.keys.name)

    def release(self) -> None:
        """Release the lock; the first waiter gets it at once.

        Raises:
            LockError: this lock object (in this thread) holds nothing.
            LockNotOwnedError: the lock had ended before, or another caller holds it.
            redis.exceptions.RedisError: Redis cannot be reached. The lock object still knows its
                token, so ``release`` can be called again.
        """
        before = self.local.known()
        try:
            if not (self.reentrant and self._leave_inner()):
                drive(self._release_steps())
        except RedisError:
            raise
        except BaseException:  # A signal handler's.
            self._leave_to_keeper(before)
            raise

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Add ``additional_time`` seconds to the lock's lifetime, or replace it by them.

        Raises:
            LockError: this lock object holds nothing, or a lock without a timeout.
            LockNotOwnedError: the lock has ended, or another caller holds it.
        """
        seconds = check_time("additional_time", additional_time) or 0.0
        return drive(self._change_steps("extend", seconds, replace_ttl))

    def reacquire(self) -> Literal[True]:
        """Reset the lock's lifetime to ``timeout``. Raises as ``extend`` does."""
        return drive(self._change_steps("reacquire", self._lifetime or 1.0, True))

    def locked(self) -> bool:
        """Whether any caller holds the lock; with a ``limit``, whether all places are taken."""
        return self._answer(self._locked_query())

    def owned(self) -> bool:
        """Whether this lock object (in this thread) holds the lock."""
        return self._answer(self._owned_query())

    def holder(self) -> Owner | None:
        """The holder of the lock; None if it is free. Of several holders, the one whose lifetime
        ends first, as for ``held``, ``ttl`` and ``get_owner_id``. Its label and the like are known
        after half a second; ``seen`` is the age of its process's last heartbeat, in seconds."""
        held = self._answer(self._held_query())
        return self._answer(questions.heartbeat(held))

    def get_owner_id(self) -> str | None:
        """The token of the lock's holder, by python-redis-lock's name; None if it is free. A
        lock made with this token as its ``id`` can release it."""
        return self._answer(self._owner_id_query())

    def ttl(self) -> float | None:
        """Seconds until the lock expires unless it is renewed: ``inf`` for one that never expires,
        None if the lock is free."""
        return self._answer(self._ttl_query())

    def held(self) -> HolderInfo | None:
        """The holder, how long it has held the lock, and the time left, in one round trip; None if
        the lock is free."""
        return self._answer(self._held_query())

    def holders(self) -> list[HolderInfo]:
        """The holders of all places, the one whose lifetime ends first before the others."""
        return self._answer(self._holders_query())

    def reset(self) -> bool:
        """End the lock of any holder, of all holders of a lock with a ``limit``; the first waiter
        gets it. Returns whether it was held.

        The holder's process learns of it at once, but until it reacts, two holders may work at the
        same time. Two round trips: the second names the holder that the first has read, so that it
        can be sent again without ending the next holder's lock.
        """
        return drive(self._reset_steps())

    def _answer(self, query: Query[T]) -> T:
        try:
            reply = self._reply_to(query)
        except Exception as error:
            return query.after(error)
        return query.parse(reply)

    def _reply_to(self, query: Query[Any]) -> Reply:
        return None if query.call is None else self._run(query.call).value

    def _run(self, call: Call, until: float | None = None) -> Answer:
        return run(self.redis, call, until=until)

    def __enter__(self) -> Self:
        before = self.local.known()
        try:
            if self.acquire():
                self._entered()
                return self
        except BaseException:
            if self.local.known() != before and not self._is_anothers:
                self._leave_to_keeper()  # Interrupted between two lines, and it will not be left.
            raise
        raise self._answer(self._not_acquired_query())

    def __exit__(self, exc_type: object, exc_value: object, traceback: object) -> None:
        try:
            before = self.local.known()
        except BaseException:
            self._leave_to_keeper()
            raise
        try:
            if before.hold is not None and before.hold.from_parent_process:
                return  # A forked child leaves its parent's block; the lock is the parent's.
            self.release()
        except BaseException as error:
            if not self._release_failed(before, error, exc_value is not None):
                raise


def in_a_thread(on_lost: Callable[[], object], name: bytes) -> Callable[[], None]:
    context = copy_context()

    def run() -> None:
        try:
            in_context(context, on_lost)
        except BaseException:  # Also sys.exit(), which Python would ignore.
            log_failed(on_lost, name)

    return threading.Thread(target=run, name="django_redis_lock on_lost", daemon=True).start
