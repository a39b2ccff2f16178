"""``current_lock()``: the lock under which the running code was called."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import NamedTuple

from ..exceptions import LockError
from ..locking import BaseLock

__all__ = ["caller", "current_lock", "pop", "push", "waits_for_itself"]


class Entered(NamedTuple):
    """A lock that is held by one call of what ``locked()`` decorates."""

    lock: BaseLock
    key: tuple[str, str]
    caller: tuple[int, int]


_entered: ContextVar[tuple[Entered, ...]] = ContextVar("django_redis_lock_entered", default=())


def current_lock() -> BaseLock:
    """The innermost lock that ``locked()`` holds for the running call, for its ``fence``, ``lost``
    and ``ensure_held()``; in threads and tasks that the call starts, too, if they were given its
    context, as ``sync_to_async`` and ``asyncio.create_task`` do::

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
    return entered[-1].lock


def push(lock: BaseLock, key: tuple[str, str]) -> None:
    """``lock``, which is named by ``key`` (cache alias and name), is held from now on."""
    _entered.set((*_entered.get(), Entered(lock, key, caller())))


def pop(lock: BaseLock) -> None:
    """``lock`` is not held any more. (It need not be the innermost, nor known here: a generator
    may be left in another context than it was entered in.)"""
    _entered.set(tuple(entered for entered in _entered.get() if entered.lock is not lock))


def waits_for_itself(key: tuple[str, str]) -> bool:
    """Whether this very call holds ``key`` already."""
    entered = _entered.get()
    return bool(entered) and any(e.key == key and e.caller == caller() for e in entered)


def caller() -> tuple[int, int]:
    """This thread, and the task in it."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # There is no event loop here.
        task = None
    return threading.get_ident(), 0 if task is None else id(task)
