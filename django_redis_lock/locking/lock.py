"""The lock for threads, and how they wait. See ``BaseLock`` for its arguments and ``aio`` for
asyncio."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn

from redis.exceptions import NoScriptError, RedisError

from ..clock import time
from ..keeper import SentOnce, keeper
from ..protocol import LAST_TRY_SECONDS, AcquireRequest, Acquisition, Call, Refused, Reply
from ..protocol.validation import check_time
from ..steps import drive
from ..threads import ThreadEvent, in_context
from ..transport import Answer, Client, RawConnection, Server, exchange_with, pack, run, server_of
from ..transport.server import is_pollable, read, readable, shut
from .base import REPLY_MARGIN_SECONDS, BaseLock
from .hold import Hold, log_failed
from .waiting import POPPING, MayNotBlock, PopReply, Waiter, WaitQueue

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..protocol import Owner
    from ..protocol.holders import HolderInfo


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
        return drive(*self._acquire(sleep, blocking, blocking_timeout, token))

    def _wait(self, request: AcquireRequest, refused: Refused | None) -> Acquisition | None:
        return ThreadWaiter(self.redis, request).wait(refused)

    def _ask_replicas(self, acquired: Acquisition, until: float) -> Sequence[Reply]:
        keys = self.keys.at_place(acquired.place)
        question = self._question_to_replicas(keys, acquired.token, until)
        server = server_of(self.redis).locate(keys)
        until += REPLY_MARGIN_SECONDS
        replies: Sequence[Reply] = exchange_with(server, question, 2, until=until)
        return replies

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
        drive(*self._release())

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
        return drive(self._locked_steps())

    def owned(self) -> bool:
        """Whether this lock object (in this thread) holds the lock."""
        return drive(self._owned_steps())

    def holder(self) -> Owner | None:
        """The holder of the lock; None if it is free. Of several holders, the one whose lifetime
        ends first, as for ``held``, ``ttl`` and ``get_owner_id``. Its label and the like are known
        after half a second; ``seen`` is the age of its process's last heartbeat, in seconds."""
        return drive(self._holder_steps())

    def get_owner_id(self) -> str | None:
        """The token of the lock's holder, by python-redis-lock's name; None if it is free. A
        lock made with this token as its ``id`` can release it."""
        return drive(self._owner_id_steps())

    def ttl(self) -> float | None:
        """Seconds until the lock expires unless it is renewed: ``inf`` for one that never expires,
        None if the lock is free."""
        return drive(self._ttl_steps())

    def held(self) -> HolderInfo | None:
        """The holder, how long it has held the lock, and the time left, in one round trip; None if
        the lock is free."""
        return drive(self._held_steps())

    def holders(self) -> list[HolderInfo]:
        """The holders of all places, the one whose lifetime ends first before the others."""
        return drive(self._holders_steps())

    def reset(self) -> bool:
        """End the lock of any holder, of all holders of a lock with a ``limit``; the first waiter
        gets it. Returns whether it was held.

        The holder's process learns of it at once, but until it reacts, two holders may work at the
        same time. Two round trips: the second names the holder that the first has read, so that it
        can be sent again without ending the next holder's lock.
        """
        return drive(self._reset_steps())

    def _run(self, call: Call, until: float | None = None) -> Answer:
        return run(self.redis, call, until=until)

    def __enter__(self) -> Self:
        before = self.local.known()
        try:
            if self.acquire():
                self._entered()
                return self
        except BaseException:
            if self.local.known() != before and not self._held_by_another_thread:
                self._leave_to_keeper()  # Interrupted between two lines, and it will not be left.
            raise
        raise drive(self._not_acquired_steps())

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


# -- how a thread waits; see ``waiting`` for the rules ---------------------------------------------


class PendingReply:
    """The answer to TAKE_GRANT, for which its caller does not wait. It is read by whoever has
    claimed it, and by nobody else: the thread that sends the next call on that connection, or one
    that asks for the answer."""

    def __init__(self, connection: RawConnection, call: Call, server: Server, until: float) -> None:
        self._connection = connection
        self._server = server
        self._until = until
        self._pid = os.getpid()
        self._claims = [object()]  # As a list, because to take out the only one is atomic.
        self._read = ThreadEvent()
        self._answer: float | None = None
        # By its source until the server knows it: the next command may follow before the answer.
        self._script = call.script.sha
        connection.send_packed_command([pack(call, known=self._script in server.known_scripts)])
        server.known_scripts.add(self._script)

    def confirmed(self) -> float | None:
        return self.read_reply(True)

    def read_reply(self, wait: bool) -> float | None:
        if self._pid != os.getpid():
            return None  # The answer is the parent's; to read it would leave the parent without.
        if not self.claim():
            if wait:
                self._read.wait(self._server.timeout)
        elif wait or self._has_come():
            self.receive()
        else:
            self._claims.append(object())
        return self._answer

    def claim(self) -> bool:
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    @property
    def is_read(self) -> bool:
        return self._read.wait(0)

    def receive(self) -> None:
        try:
            taken = read(self._connection)
        except NoScriptError:
            self._server.known_scripts.discard(self._script)
            keeper().hurry()  # A renewal makes up for it.
        except RedisError:
            self._connection.disconnect()
            keeper().hurry()  # Unknown; a renewal tells.
        except BaseException:  # A signal handler's: half of the answer may be left there.
            self._connection.disconnect()
            raise
        else:
            self._server.answered()
            self._answer = self._until if taken else -math.inf
        finally:
            self._read.set()

    def _has_come(self) -> bool:
        return readable(self._connection)


class ThreadQueue(WaitQueue):
    connection: RawConnection | None = None
    pending: PendingReply | None = None

    def connect(self, client: Client) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.read_reply(True)
            if not pending.is_read:  # By another thread, which still waits for it.
                self.disconnect()
        if self.connection is None:
            self.node = self.server.locate(self.request.keys)
            self.connection = self.node.checkout()
            if not is_pollable(self.connection):
                self.disconnect()
                raise MayNotBlock

    def begin_pop(self, command: bytes) -> None:
        self._connected.send_packed_command([command])

    def pop_ended(self, seconds: float) -> bool:
        return any(map(partial(readable, self._connected), time.parts(min(seconds, 3600.0))))

    def reply(self) -> PopReply:
        reply: PopReply = read(self._connected)
        return reply

    def send_take_grant(self, call: Call, until: float) -> PendingReply:
        self.pending = PendingReply(self._connected, call, self.node or self.server, until)
        return self.pending

    def disconnect(self) -> None:
        connection, self.connection, self.pending = self.connection, None, None
        if connection is not None:
            connection.disconnect()

    def end(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None and self.node is not None:
            self.node.checkin(connection, self.pending)

    def cut_pop(self) -> None:
        shut(self.connection)

    @property
    def _connected(self) -> RawConnection:
        assert self.connection is not None
        return self.connection


class ThreadWaiter(Waiter):
    queue: ThreadQueue

    def __init__(self, client: Client, request: AcquireRequest) -> None:
        super().__init__(client, request, ThreadQueue(server_of(client), request))

    def wait(self, refused: Refused | None = None) -> Acquisition | None:
        """Wait until the lock is ours, or until the request's deadline.

        Args:
            refused: the reply to the ACQUIRE with the request's waiter id, if one was sent.

        Raises:
            redis.exceptions.RedisError: the deadline came while the server could not be reached.
        """
        try:
            acquired = drive(self._wait(refused))
            self.queue.leave(self)
            return acquired
        except BaseException:
            try:
                self._abandon()
            except BaseException:  # An interrupt has cut it short.
                self._abandon()
                raise
            raise

    def _abandon(self) -> None:
        """Leave no trace, wherever the wait has stopped. Nothing is sent to Redis here: the keeper
        does that, in its own thread, which no signal interrupts."""
        request, queue = self._request, self.queue
        if queue.is_led_by(self):
            if queue.connection is not None and self._reply is POPPING:
                keeper().add(AbandonedPop(self, request.leave_call(b"", try_again=False)))
                queue.connection = None
            queue.disconnect()
        if self._reply is not POPPING:
            self.release_grant_in(self._reply)
        self._reply = None
        queue.abandon(self)

    def _ask(self, call: Call, until: float | None) -> Reply:
        return run(self._client, call, until=until).value

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _new_turn(self) -> ThreadEvent:
        return ThreadEvent()


class AbandonedPop(SentOnce):
    """Ends the blocking pop of a waiter that a signal handler interrupted, and gives back the grant
    that may have come first. One that was just being read is lost, and ends by itself."""

    def __init__(self, waiter: ThreadWaiter, leave: Call) -> None:
        super().__init__(waiter.queue.server, leave)
        self._waiter, self._connection = waiter, waiter.queue._connected

    def replied(self, value: Reply, sent_at: float) -> None:
        with suppress(RedisError):
            if readable(self._connection, LAST_TRY_SECONDS):
                self._waiter.release_grant_in(read(self._connection))
        self._connection.disconnect()
        super().replied(value, sent_at)

    def failed(self, error: Exception, now: float) -> None:
        self._connection.disconnect()
        super().failed(error, now)
