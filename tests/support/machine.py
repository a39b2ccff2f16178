"""How busy the machine was: each failed test says so, because a busy machine may have caused it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class Watch:
    """From its creation on. Linux says more than other systems do."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._waited, self._stolen = _waited(), _stolen()

    def report(self) -> str:
        """Of this thread, of the machine, and of the one that it is a guest of."""
        lines = [
            f"{time.monotonic() - self._began:.1f} s have passed",
            f"{_waited() - self._waited:.1f} s of them the test's thread waited for a core",
            f"all threads of its process that there are have waited {_all_waited():.1f} s for one",
            f"{_stolen() - self._stolen:.1f} s of a core were stolen by other machines",
            "load average {:.1f} {:.1f} {:.1f}, {} cores".format(*os.getloadavg(), os.cpu_count()),
        ]
        return "; ".join(lines)


def _waited() -> float:
    return _number("/proc/thread-self/schedstat", 1) / 1e9


def _all_waited() -> float:
    """Of the threads that there are now: one may hang only because it is not let run."""
    return sum(_number(str(file), 1) for file in Path("/proc/self/task").glob("*/schedstat")) / 1e9


def _stolen() -> float:
    return _number("/proc/stat", 8) / os.sysconf("SC_CLK_TCK")


def _number(file: str, place: int) -> int:
    with suppress(OSError, IndexError, ValueError), Path(file).open() as lines:
        return int(lines.readline().split()[place])
    return 0
