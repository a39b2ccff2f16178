"""Ends a process group when the process that started this one is gone.

Run by itself: ``python guard.py GRACE``, with a pipe as standard input that nobody else writes to.
On its first line is the group, on its second any word that all is over; if the pipe ends without
the second, the other process was killed, and its group is ended: asked first, and killed if it
still runs after GRACE seconds.
"""

import os
import signal
import sys
import time


def main() -> None:
    grace = float(sys.argv[1])
    group, over = sys.stdin.readline(), sys.stdin.readline()
    if not group or over:
        return
    try:
        os.killpg(int(group), signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            time.sleep(0.02)
            os.killpg(int(group), 0)
        os.killpg(int(group), signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS says the latter of those just ended.
        pass


if __name__ == "__main__":
    main()
