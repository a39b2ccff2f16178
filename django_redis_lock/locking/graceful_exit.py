"""Leaving ``with`` blocks in order when the process is told to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn


@contextmanager
def unwinding(*signals: signal.Signals) -> Iterator[None]:
    """Turn ``signals`` (left out: SIGTERM) into ``SystemExit``, so that locks held in ``with``
    blocks are released instead of left to expire::

        with unwinding(), cache.lock("import"):
            import_prices()

    Only for the main thread, the only one Python gives signals to. The exit code is 128 plus the
    signal's number, as from a shell. SIGINT does this of itself, by ``KeyboardInterrupt``.

    Raises:
        ValueError: called in another thread.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before: dict[signal.Signals, Any] = {}
    try:
        for wanted in signals or (signal.SIGTERM,):
            before[wanted] = signal.signal(wanted, leave)
        yield
    finally:
        for wanted, handler in before.items():
            signal.signal(wanted, handler)
