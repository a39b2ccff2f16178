"""Cleanup in forked children. A fork copies only the thread that forks: a mutex that another thread
holds at that moment would stay locked in the child for ever, and the child must not use the records
of its parent's threads and connections.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

F = TypeVar("F", bound=Callable[[], Any])
M = TypeVar("M")

_mutexes: WeakSet[Any] = WeakSet()
_resets: list[Callable[[], Any]] = []


def free_after_fork(mutex: M) -> M:
    """Release ``mutex`` (a ``Lock``, ``RLock`` or ``Condition`` of ``threading``) in each forked
    child; returns it."""
    _mutexes.add(mutex)
    return mutex


def after_fork(reset: F) -> F:
    """Call ``reset`` in each forked child, after all mutexes are released; returns it."""
    _resets.append(reset)
    return reset


def _in_child() -> None:
    for mutex in tuple(_mutexes):
        mutex._at_fork_reinit()  # As in the standard library.
    for reset in _resets:
        reset()


os.register_at_fork(after_in_child=_in_child)
