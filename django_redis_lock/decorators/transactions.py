"""Locks that are released only when the database transaction they were used in has ended.

What is written in a transaction is seen by others once it is committed. Who releases a lock before
lets the next holder read what was there before, and overwrite it: the lost update.

Django tells of a commit, not of a rollback. So while a lock waits, the methods by which Django ends
a transaction are overlaid *on that one connection object*, to look afterwards whether it has ended.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..locking import BaseLock
from ..protocol import printable

__all__ = ["open_transactions", "take_up", "wait_for"]

logger = logging.getLogger("django_redis_lock.locked")

Key = tuple[str, str]

#: Every way in which a transaction, or one that a test has put into its own, ends.
_ENDS = ("commit", "rollback", "close", "set_autocommit", "savepoint_commit", "savepoint_rollback")
_WATCH = "_django_redis_lock_watch"


def open_transactions() -> list[BaseDatabaseWrapper]:
    """This thread's database connections that have a transaction open."""
    return [c for c in connections.all(initialized_only=True) if _is_open(c)]


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    if connection.connection is None or connection.closed_in_transaction:
        return False
    if not connection.in_atomic_block:
        return not connection.autocommit
    if not connection.commit_on_exit:
        return True  # An atomic block where autocommit is off: its commit is yet to come.
    return any(not _of_a_test(block) for block in connection.atomic_blocks)


def _of_a_test(block: Any) -> bool:
    """Whether Django's ``TestCase`` has put it around the test."""
    return bool(block._from_testcase)


def _is_noticed(connection: BaseDatabaseWrapper) -> bool:
    """Whether its end can be told. In a ``TestCase`` the outermost block is a savepoint, and one
    made with ``savepoint=False`` ends without a word."""
    tests = sum(_of_a_test(block) for block in connection.atomic_blocks)
    return tests == 0 or connection.savepoint_ids[tests - 1] is not None


class DeferredUnlock:
    """A lock that is released when all transactions it waits for have ended."""

    def __init__(self, lock: BaseLock, key: Key, release: Callable[[], None]) -> None:
        self.lock = lock
        self.key = key
        self._release = release
        self._watches: list[TransactionWatch] = []
        self._here: dict[Key, DeferredUnlock] = _here.pending

    def wait_for(self, open: list[BaseDatabaseWrapper]) -> None:
        self._here[self.key] = self
        self._watches = [_watch(connection) for connection in open]
        for watch in self._watches:
            watch.pending.append(self)

    def ended(self, watch: TransactionWatch) -> None:
        """One of the transactions has ended."""
        self._watches.remove(watch)
        if self._watches:
            return
        self._here.pop(self.key, None)
        try:
            self._release()
        except Exception:
            name = printable(self.key[1].encode(errors="replace"))
            logger.exception("The lock %s was not released", name)

    def take_up(self) -> None:
        """The lock is used again in the same transaction: nothing is released."""
        for watch in self._watches:
            watch.pending.remove(self)
        del self._here[self.key]


class _Here(threading.local):
    """The locks of this thread that wait for a transaction."""

    def __init__(self) -> None:
        self.pending: dict[Key, DeferredUnlock] = {}


_here = _Here()


def wait_for(lock: BaseLock, key: Key, release: Callable[[], None]) -> bool:
    """Call ``release`` when this thread's transactions have ended. Returns False, and does nothing,
    if there are none."""
    open = [connection for connection in open_transactions() if _is_noticed(connection)]
    if open:
        DeferredUnlock(lock, key, release).wait_for(open)
    return bool(open)


def take_up(key: Key) -> BaseLock | None:
    """The lock of that key, if it waits in this thread for a transaction: who uses it twice in one
    transaction goes on with it."""
    pending = _here.pending.get(key)
    if pending is None:
        return None
    pending.take_up()
    return pending.lock


class TransactionWatch:
    """Looks whether the transaction of one connection has ended, each time it may have.

    It must not hold on to the connection: a thread that ends in the midst of a transaction takes
    its connection with it, and then the locks are released, too.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.pending: list[DeferredUnlock] = []
        #: With autocommit off the transaction ends by commit(). Otherwise commit() is followed by
        #: set_autocommit(), in which the functions given to on_commit() run, under the lock still.
        self._manual = not (connection.in_atomic_block and connection.commit_on_exit)
        self._last_resort = weakref.finalize(connection, self._end)
        overlays = {name: self._overlay(connection, name) for name in _ENDS}
        vars(connection).update(overlays)
        vars(connection)[_WATCH] = (self, overlays)

    def _overlay(self, connection: BaseDatabaseWrapper, name: str) -> Callable[..., Any]:
        method = getattr(connection, name)

        @functools.wraps(method)
        def overlay(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            finally:
                if self._has_ended(connection, name):
                    self._remove(connection)
                    self._end()

        return overlay

    def _has_ended(self, connection: BaseDatabaseWrapper, after: str) -> bool:
        if after == "rollback":
            return not connection.in_atomic_block
        if after == "commit":
            return self._manual and not connection.in_atomic_block
        return not _is_open(connection)

    def _remove(self, connection: BaseDatabaseWrapper) -> None:
        self._last_resort.detach()
        _, overlays = vars(connection).pop(_WATCH, (None, {}))
        for name, overlay in overlays.items():
            if vars(connection).get(name) is overlay:  # Or else somebody has overlaid ours.
                delattr(connection, name)

    def _end(self) -> None:
        pending, self.pending = self.pending, []
        for each in pending:
            each.ended(self)


def _watch(connection: BaseDatabaseWrapper) -> TransactionWatch:
    """The watch over the transaction that is open on this connection."""
    watch: TransactionWatch | None
    watch, _ = vars(connection).get(_WATCH, (None, None))
    return watch or TransactionWatch(connection)
