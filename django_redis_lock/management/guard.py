"""Ends its process group when the process that started it is gone.

A script, ``python guard.py GRACE``, that leads the group and blocks the signals sent to it. Its
standard input is a pipe from the process that started it. If the pipe ends without a byte, that
process was killed: the guard sends SIGTERM to the group and, after GRACE seconds, SIGKILL.
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
