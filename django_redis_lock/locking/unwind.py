"""Signals that end a process leave its ``with`` blocks, so that their locks are released."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def unwinding(*signals: signal.Signals) -> Iterator[None]:
    """Turn ``signals`` (left out: SIGTERM) into ``SystemExit``, so that locks held in ``with``
    blocks are released instead of left to expire::

        with unwinding(), cache.lock("import"):
            import_prices()

    Only for the main thread, the only one Python gives signals to; ValueError in another. The exit
    code is 128 plus the signal's number, as from a shell.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
    try:
        for wanted in signals or (signal.SIGTERM,):
            before[wanted] = signal.signal(wanted, leave)
        yield
    finally:
        for wanted, handler in before.items():
            signal.signal(wanted, handler)
