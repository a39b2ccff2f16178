"""What each process waits for at the moment when none makes progress.

A process writes the stacks of its threads, and of its tasks, into a file of its own when it gets
SIGUSR1. ``Watch`` sends it.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["Watch", "on_demand", "read_stacks"]

#: Seconds without progress after which all processes are told to write their stacks.
STUCK = 8.0


def on_demand(folder: Path, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """From now on this process writes its threads' stacks when it is told to; and those of the
    tasks of its ``loop``."""
    file = (folder / f"{name}.stacks").open("a")

    def write_tasks(*args: object) -> None:
        for task in asyncio.all_tasks(loop):
            task.print_stack(file=file)
        file.flush()

    faulthandler.unregister(signal.SIGUSR1)
    # A loop's own handlers end with the loop.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN if loop is None else write_tasks)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True, chain=loop is not None)
    atexit.register(_ignore)


def _ignore() -> None:
    """An interpreter that ends takes its handlers away, and SIGUSR1 would kill the process."""
    faulthandler.unregister(signal.SIGUSR1)  # What was there before takes its place.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def read_stacks(folder: Path) -> str:
    texts = ((path.stem, path.read_text()) for path in sorted(folder.glob("*.stacks")))
    return "\n".join(f"-- {name}\n{text}" for name, text in texts if text)


class Watch:
    """Reads what the histories in ``folder`` add; a context manager.

    Args:
        kinds: the events that are progress.
        pids: the processes that run now.
    """

    def __init__(
        self,
        folder: Path,
        kinds: Iterable[str],
        pids: Callable[[], list[int]],
        stuck: float = STUCK,
    ) -> None:
        self._folder, self._pids, self._stuck = folder, pids, stuck
        self._signs = [f'"kind": "{kind}"'.encode() for kind in kinds]
        self._read: dict[Path, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        looks = 0
        while not self._over.wait(self._stuck / 8):
            looks = 0 if self._progress() else looks + 1
            if looks == 8:
                for pid in self._pids():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)

    def _progress(self) -> bool:
        made = False
        for path in self._folder.glob("*.history"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                added = file.read()
                self._read[path] = file.tell()
            made = made or any(sign in added for sign in self._signs)
        return made
