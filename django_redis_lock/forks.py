"""What a forked child begins anew. A fork copies only the thread that forks: a mutex that another
thread holds just then would stay locked in the child for ever, and what is noted of the parent's
threads and connections is not the child's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

F = TypeVar("F", bound=Callable[[], Any])
M = TypeVar("M")

_mutexes: WeakSet[Any] = WeakSet()
_renewals: list[Callable[[], Any]] = []


def free_after_fork(mutex: M) -> M:
    """``mutex`` (a ``Lock``, ``RLock`` or ``Condition`` of ``threading``), which a forked child
    finds free, whoever holds it in the parent."""
    _mutexes.add(mutex)
    return mutex


def after_fork(renew: F) -> F:
    """Have ``renew`` called in each forked child; every mutex is free by then."""
    _renewals.append(renew)
    return renew


def _in_child() -> None:
    for mutex in tuple(_mutexes):
        mutex._at_fork_reinit()  # As the standard library frees its own.
    for renew in _renewals:
        renew()


os.register_at_fork(after_in_child=_in_child)
