"""Signals that end a process leave its ``with`` blocks, so that their locks are released."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

#: Signals whose default action ends a process. (Of SIGINT, Python has made KeyboardInterrupt.)
ENDINGS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGINT")
    if hasattr(signal, name)
)


@contextmanager
def unwinding() -> Iterator[None]:
    """Turn signals that would end this process into ``SystemExit``, so that locks held in ``with``
    blocks are released instead of left to expire::

        with unwinding(), cache.lock("import"):
            import_prices()

    A signal that is ignored, as under ``nohup``, stays so, and one that has a handler calls that.
    In another thread than the main one, the only one Python gives signals to, this does nothing.
    The exit code is 128 plus the signal's number, as from a shell.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in filter(_is_unhandled, ENDINGS):
                signal.signal(number, leave)
        yield
    finally:
        for number in ENDINGS:
            if signal.getsignal(number) is leave:
                signal.signal(number, signal.SIG_DFL)


def _is_unhandled(number: int) -> bool:
    if signal.getsignal(number) != signal.SIG_DFL:
        return False
    with suppress(OSError):  # Linux also knows of handlers in C, such as faulthandler's.
        with open("/proc/self/status") as file:
            caught = next((line for line in file if line.startswith("SigCgt:")), ": 0")
        return not int(caught.split()[1], 16) >> (number - 1) & 1
    return True
