"""Ctrl-C, SIGTERM and a closed terminal end the demo in one way: through every ``finally``."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "interrupts"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asks for the end of the demo.

    Attributes:
        signum: which one.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # Once is enough: an impatient second Ctrl-C must not interrupt the tidying up.
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(signum)


@contextmanager
def interrupts() -> Iterator[None]:
    """Within the block, the first of the signals raises ``Interrupted``."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    for each in SIGNALS:
        # nohup has the end of the terminal ignored, and shall keep its word.
        if each != signal.SIGHUP or before[each] is not signal.SIG_IGN:
            signal.signal(each, _interrupt)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
