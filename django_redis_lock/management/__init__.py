"""The command line of the commands: what their options take, refused with a sentence that says what
is allowed, and their exit codes, mostly those of sysexits.h."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from functools import partial

from ..protocol import check_seconds

#: ``locks doctor``: there are warnings (with errors it is TROUBLE).
WARNED = 1
#: ``locks --exit-code``: a lock is held; a holder is silent, or a lock never expires.
HELD, TROUBLE = 1, 3
#: ``locks release``: the lock had passed to another holder, who keeps it.
NOT_OWNER = 1
#: The command line is wrong (argparse's code).
USAGE = 2
#: Redis is down, or too few replicas confirmed the lock; nothing has run (EX_UNAVAILABLE).
UNAVAILABLE = 69
#: Another process holds the lock; nothing has run (EX_TEMPFAIL: try again later).
TAKEN = 75
#: The lock was lost while the command ran (EX_PROTOCOL).
LOST = 76
#: There is no such command (a shell's code).
NOT_FOUND = 127
#: The reader closed the output (a shell's code for SIGPIPE).
CLOSED = 141


#: What may follow a number, and how many seconds that is.
UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str, *, zero: bool = False) -> float:
    try:
        number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
        return check_seconds("it", float(number) * unit, zero=zero) or 0.0
    except ValueError:
        allowed = "of 0 or more" if zero else "greater than 0"
        raise ArgumentTypeError(
            f"it must be a number of seconds {allowed}, or like 90s, 5m or 1h, not {text!r}"
        ) from None


seconds_or_none = partial(seconds, zero=True)


def seconds_or_forever(text: str) -> float:
    return math.inf if text in ("forever", "inf") else seconds_or_none(text)


def _whole(text: str, allowed: str, least: int = 0, most: float = math.inf) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ArgumentTypeError(f"it must be a whole number {allowed}, not {text!r}")
    return int(text)


count = partial(_whole, allowed="greater than 0", least=1)
count_or_none = partial(_whole, allowed="of 0 or more")
exit_code = partial(_whole, allowed="from 0 to 255", most=255)
