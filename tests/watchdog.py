"""Ends the servers of a run of the tests, and removes their folders, also when the run is killed.

A process that holds the read end of a pipe: when the run ends in whatever way, the pipe does.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

WATCHDOG = """
import os, shutil, signal, sys
watched = {}
for line in sys.stdin:
    pid, _, folder = line.rstrip().partition(" ")
    if folder:
        watched[int(pid)] = folder
    else:
        watched.pop(int(pid), None)
for pid, folder in watched.items():
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
    shutil.rmtree(folder, ignore_errors=True)
"""


@lru_cache(maxsize=1)
def _watchdog() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", WATCHDOG],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        bufsize=1,
        start_new_session=True,  # Ctrl-C is for the tests.
    )


def watch(pid: int, folder: Path) -> None:
    """End ``pid`` with this process, and remove ``folder``."""
    _say(f"{pid} {folder}\n")


def forget(pid: int) -> None:
    """It has ended."""
    _say(f"{pid}\n")


def _say(line: str) -> None:
    stdin = _watchdog().stdin
    assert stdin is not None
    with suppress(OSError):
        stdin.write(line)
