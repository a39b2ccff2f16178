"""An exception from a signal handler leaves no ``Mutex`` locked. On Python 3.14 it does leave an
``RLock`` locked, between the ``with`` and its block. Before, no handler can run there; afterwards
only a profiler, which stands for one here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from django_redis_lock.threads import Mutex


class Interrupt(BaseException):
    """From the signal handler."""


def interrupted(mutex: Any, work: Callable[[], None], calls: int) -> None:
    """``work``, interrupted after so many calls of methods of ``mutex``."""
    seen = 0

    def interrupt(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal seen
        if event == "c_return" and getattr(arg, "__self__", None) is mutex:
            seen += 1
            if seen == calls:
                sys.setprofile(None)
                raise Interrupt

    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with suppress(Interrupt):
            work()
    finally:
        sys.setprofile(before)


def is_free(mutex: Any) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(mutex.acquire(blocking=False)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_no_interrupt_leaves_it_locked(calls: int) -> None:
    mutex = Mutex()

    def work() -> None:
        with mutex, mutex:
            pass

    interrupted(mutex, work, calls)
    assert is_free(mutex)


def test_an_interrupt_within_a_section_leaves_it_to_the_section() -> None:
    mutex = Mutex()

    def work() -> None:
        with mutex:
            pass

    with mutex:
        interrupted(mutex, work, 1)
        assert not is_free(mutex)
    assert is_free(mutex)
