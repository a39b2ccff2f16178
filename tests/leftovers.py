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
    done: list[str] = []
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:
        records = {}
        for found in parent.glob(f"*/{RECORD}"):
            with suppress(OSError, ValueError):
                run, server = map(int, found.read_text().split())
                records[found.parent] = run, server
        for found in parent.glob("django_redis_lock-*-*"):  # A process's locks of this host.
            with suppress(ValueError):
                records[found] = int(found.name.rpartition("-")[2]), 0
        browsers = [folder for pattern in OF_BROWSERS for folder in parent.glob(pattern)]
        commands = _commands()  # Afterwards: a run that begins meanwhile must be among them.
        for folder, (run, server) in records.items():
            if run not in commands:
                with suppress(OSError):
                    done += _remove(folder, server)
        for folder in browsers:
            # An artifact folder is named in no arguments, so a new one counts as used.
            with suppress(OSError):
                is_new = time.time() - folder.stat().st_mtime < 3600
                if not is_new and not any(str(folder) in each for each in commands.values()):
                    done += _remove(folder, 0)
    return done


def _remove(folder: Path, server: int) -> list[str]:
    done = [f"removed {folder}"]
    # The number may be another process's by now.
    if server and "redis-server" in _commands().get(server, ""):
        os.kill(server, signal.SIGKILL)
        done.insert(0, f"ended redis-server, process {server}")
        deadline = time.monotonic() + 5
        while server in _commands() and time.monotonic() < deadline:
            time.sleep(0.01)
    shutil.rmtree(folder)
    return done


def _commands() -> dict[int, str]:
    """The command of each process that runs, by its number."""
    columns = ["ps", "-ww", "-e", "-o", "pid=", "-o", "stat=", "-o", "args="]
    lines = subprocess.run(columns, check=False, capture_output=True, text=True).stdout
    rows = (line.split(maxsplit=2) for line in lines.splitlines())
    found = {int(pid): "".join(args) for pid, state, *args in rows if not state.startswith("Z")}
    if os.getpid() not in found:  # All runs would seem to have ended.
        raise RuntimeError("ps does not tell which processes run")
    return found


if __name__ == "__main__":
    for line in remove():
        print(line)
