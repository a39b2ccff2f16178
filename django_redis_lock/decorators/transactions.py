"""Locks that are released when the database transaction in which they were used has ended.

Otherwise the next holder would read the old data and overwrite the new: a lost update.

Django has a hook for commits, but none for rollbacks. So while a lock waits for a transaction, a
watch wraps the methods that may end it *on that one connection object*.
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

logger = logging.getLogger("django_redis_lock.locked")

#: A cache alias, and the name of a lock, or its names.
Key = tuple[str, str | tuple[str, ...]]

#: Every method that can end a transaction, or the transaction of a test.
_ENDS = ("commit", "rollback", "close", "set_autocommit", "savepoint_commit", "savepoint_rollback")
_WATCH = "_django_redis_lock_watch"


def open_transactions() -> list[BaseDatabaseWrapper]:
    return [c for c in connections.all(initialized_only=True) if _is_open(c)]


def after_commit(function: Callable[[], None]) -> None:
    """Call ``function`` when the open transactions of this thread have been committed; at once if
    none is open."""
    left = [each for each in open_transactions() if each.in_atomic_block]

    # No ``partial``: Django writes the name of a function that fails in its log.
    def end_of(connection: BaseDatabaseWrapper) -> Callable[[], None]:
        def committed() -> None:
            left.remove(connection)
            if not left:
                function()

        return committed

    if not left:
        function()
    for each in tuple(left):
        each.on_commit(end_of(each), robust=True)


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    if connection.connection is None or connection.closed_in_transaction:
        return False
    if not connection.in_atomic_block:
        return not connection.autocommit
    if not connection.commit_on_exit:
        return True  # An atomic block with autocommit off: the commit comes later.
    return any(not _of_a_test(block) for block in connection.atomic_blocks)


def _of_a_test(block: Any) -> bool:
    """Whether Django's ``TestCase`` opened the block, around the test."""
    return bool(block._from_testcase)


def _has_visible_end(connection: BaseDatabaseWrapper) -> bool:
    """In a ``TestCase`` the outermost block is a savepoint; with ``savepoint=False`` no method is
    called at its end."""
    tests = sum(_of_a_test(block) for block in connection.atomic_blocks)
    return tests == 0 or connection.savepoint_ids[tests - 1] is not None


class DeferredUnlock:
    """A lock that is released when the transactions of all ``watches`` have ended."""

    def __init__(
        self, lock: BaseLock, key: Key, release: Callable[[], None], watches: list[TransactionWatch]
    ) -> None:
        self.lock = lock
        self.key = key
        self.watches = watches
        self._release = release
        self._here: dict[Key, DeferredUnlock] = _here.pending
        self._here[key] = self
        for watch in watches:
            watch.pending.append(self)

    def ended(self, watch: TransactionWatch) -> None:
        self.watches.remove(watch)
        if self.watches:
            return
        self._here.pop(self.key, None)
        try:
            self._release()
        except Exception:
            about = {"lock": printable(str(self.key[1]))}
            logger.exception("The lock %(lock)s was not released", about)


class _Here(threading.local):
    def __init__(self) -> None:
        self.pending: dict[Key, DeferredUnlock] = {}


_here = _Here()


def wait_for(lock: BaseLock, key: Key, release: Callable[[], None]) -> bool:
    """``release`` when this thread's transactions have ended; False if none is open."""
    watches = [_watch(each) for each in open_transactions() if _has_visible_end(each)]
    if watches:
        DeferredUnlock(lock, key, release, watches)
    return bool(watches)


def take_up(key: Key) -> BaseLock | None:
    """The lock at ``key`` that waits in this thread for a transaction, to be used again."""
    unlock = _here.pending.pop(key, None)
    if unlock is None:
        return None
    for watch in unlock.watches:
        watch.pending.remove(unlock)
    return unlock.lock


def overlap(one: Key, other: Key) -> bool:
    names = [{key[1]} if isinstance(key[1], str) else set(key[1]) for key in (one, other)]
    return one[0] == other[0] and not names[0].isdisjoint(names[1])


def holds_part_of(key: Key) -> bool:
    """Whether a lock with one of these names waits in this thread for a transaction."""
    pending = _here.pending.values()
    return any(overlap(each.key, key) and not each.lock.lost for each in pending)


class TransactionWatch:
    """Sees the end of one connection's transaction. It must not reference the connection: when a
    thread ends during a transaction, that is garbage-collected, and the locks are released, too."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.pending: list[DeferredUnlock] = []
        #: With autocommit off, commit() ends the transaction. Otherwise set_autocommit() follows,
        #: which calls the functions given to on_commit(), still under the lock.
        self._manual = not (connection.in_atomic_block and connection.commit_on_exit)
        #: Whether one of the methods runs: a function given to on_commit() may use transactions.
        self._within = False
        self._last_resort = weakref.finalize(connection, self._end)
        overlays = {name: self._overlay(connection, name) for name in _ENDS}
        vars(connection).update(overlays)
        vars(connection)[_WATCH] = (self, overlays)

    def _overlay(self, connection: BaseDatabaseWrapper, name: str) -> Callable[..., object]:
        method = getattr(connection, name)

        @functools.wraps(method)
        def overlay(*args: object, **kwargs: object) -> object:
            within = self._within
            try:
                self._within = True
                return method(*args, **kwargs)
            finally:
                self._within = within
                if not within and self._has_ended(connection, name):
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
            if vars(connection).get(name) is overlay:  # Another library may have wrapped ours.
                delattr(connection, name)

    def _end(self) -> None:
        pending, self.pending = self.pending, []
        for each in pending:
            each.ended(self)


def _watch(connection: BaseDatabaseWrapper) -> TransactionWatch:
    watch: TransactionWatch | None
    watch, _ = vars(connection).get(_WATCH, (None, None))
    return watch or TransactionWatch(connection)
