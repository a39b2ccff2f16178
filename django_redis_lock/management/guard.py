"""Ends its process group when the process that started it is gone.

Run by itself: ``python guard.py GRACE``, as the leader of the group, deaf to the signals the group
is sent, with a pipe as standard input that only that process writes to. Any word on it, and all is
over; if it ends without one, the other process was killed, and the group is ended: asked first, and
after GRACE seconds killed, this process too.
"""

import os
import signal
import sys
import time


def main() -> None:
    grace = float(sys.argv[1])
    if sys.stdin.read(1):
        return
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(grace)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
