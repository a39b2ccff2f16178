"""What runs of the tests have left that were killed together with their watchdog.

    python3 -m tests.leftovers

ends such servers and removes their folders; ``make clean`` calls it. It needs nothing but Python.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

#: In the folder of each server: the run of the tests it belongs to, and the server.
RECORD = "watched"
#: Of Playwright, which records nothing; the browser that uses one names it among its arguments.
OF_BROWSERS = ("playwright_*", "playwright-artifacts-*")


def record(folder: Path, server: int) -> None:
    """Note in ``folder`` that it belongs to ``server``, and both to this process."""
    folder.joinpath(RECORD).write_text(f"{os.getpid()} {server}")


def remove() -> list[str]:
    """End and remove them all; what was done."""
    done = []
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for found in parent.glob(f"*/{RECORD}"):
            with suppress(OSError, ValueError):
                run, server = map(int, found.read_text().split())
                if not _command(run):
                    done += _remove(found.parent, server)
        for pattern in OF_BROWSERS:
            for folder in parent.glob(pattern):
                if not _is_used(folder):
                    done += _remove(folder, 0)
    return done


def _remove(folder: Path, server: int) -> list[str]:
    done = [f"removed {folder}"]
    # The number may be another process's by now.
    if server and "redis-server" in _command(server):
        os.kill(server, signal.SIGKILL)
        done.insert(0, f"ended redis-server, process {server}")
        deadline = time.monotonic() + 5
        while _command(server) and time.monotonic() < deadline:
            time.sleep(0.01)
    shutil.rmtree(folder)
    return done


def _command(pid: int) -> str:
    """The command of a process that runs; empty if there is none."""
    asked = ["ps", "-ww", "-o", "stat=", "-o", "args=", "-p", str(pid)]
    state, _, command = _output(asked).strip().partition(" ")
    return "" if state.startswith("Z") else command.strip()


def _is_used(folder: Path) -> bool:
    """By a browser; an artifact folder has no process's arguments, so a new one counts as used."""
    is_new = time.time() - folder.stat().st_mtime < 3600
    return is_new or str(folder) in _output(["ps", "-ww", "-eo", "args="])


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


if __name__ == "__main__":
    for line in remove():
        print(line)
