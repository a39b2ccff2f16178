"""What a forked child begins anew, and mutexes that no exception of a signal handler leaves
locked."""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import django_redis_lock
from django_redis_lock.threads import Mutex
from django_redis_lock.transport.circuit_breaker import Breaker
from tests.support.sources import nodes, tree

pytestmark = pytest.mark.uncovered

FOLDER = Path(django_redis_lock.__file__).parent
KINDS = ("Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore")
MUTEXES = {"Mutex", *(f"threading.{kind}" for kind in KINDS)}

#: Mutexes that no child uses: of one call or one acquisition, which is its parent's, or of
#: something that begins anew in the child; or held only while that begins.
OF_THE_PARENT = {
    "contrib/locmem/memory/__init__.py": 1,
    "contrib/several_names/__init__.py": 1,
    "contrib/instant_loss.py": 1,
    "keeper.py": 2,
    "threads.py": 5,  # One only for its type.
    "singleflight/flight.py": 1,
    "cache/values.py": 1,
    "contrib/metrics/collecting.py": 1,
    "contrib/debug_toolbar/__init__.py": 1,
    "decorators/on_lost.py": 2,
    "management/commands/run_locked.py": 1,
    "contrib/testing/__init__.py": 1,
}


def calls(path: Path) -> list[tuple[ast.Call, str]]:
    """The calls of functions that have a name, each with it."""
    found = [node for node in nodes(tree(path)) if isinstance(node, ast.Call)]
    return [(call, name) for call in found if (name := name_of(call.func))]


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{parent}.{node.attr}" if (parent := name_of(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def test_every_mutex_is_free_in_a_child() -> None:
    found: dict[str, int] = {}
    for path in sorted(FOLDER.rglob("*.py")):
        freed = {id(call.args[0]) for call, name in calls(path) if name == "free_after_fork"}
        left = [name for call, name in calls(path) if name in MUTEXES and id(call) not in freed]
        if left:
            found[path.relative_to(FOLDER).as_posix()] = len(left)
    assert found == OF_THE_PARENT


def test_a_child_does_not_hang_in_an_outage() -> None:
    """The thread that held the mutex is not in the child."""
    breaker = Breaker("a server")
    breaker.failed(ConnectionError(), 0.0)
    held = breaker._mutex
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with held:
            taken.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    pid = os.fork()
    if not pid:
        free = held.acquire(timeout=5)
        os._exit(0 if free else 1)
    over.set()
    thread.join()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# -- interrupts ---------------------------------------------------------------------------------


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
