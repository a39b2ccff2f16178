"""What the commands share: exit codes, most from sysexits.h; options, refused with a sentence
that says what is allowed; what they print of a lock; and tables for a terminal of any width."""

from __future__ import annotations

import math
import shutil
import unicodedata
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from django.core.management.base import CommandError

from ..formatting import DurationFormat
from ..protocol import printable
from ..protocol.validation import check_seconds

if TYPE_CHECKING:
    from ..ops.held_locks import HeldLock
    from ..ops.inventory import LockInfo

#: What the command line says, by the name of the option.
Options: TypeAlias = dict[str, Any]


class Exit:
    #: ``locks doctor``: there are warnings (with errors it is TROUBLE).
    WARNED = 1
    #: ``locks --exit-code``: a lock is held; a holder is silent, or a lock never expires.
    HELD, TROUBLE = 1, 3
    #: ``locks release``: the lock had passed to another holder, who keeps it.
    NOT_OWNER = 1
    #: ``locks reset``: there are more locks than it lists.
    INCOMPLETE = 1
    #: The command line is wrong (argparse's code).
    USAGE = 2
    #: Redis is down, or too few replicas confirmed the lock; nothing has run (EX_UNAVAILABLE).
    UNAVAILABLE = 69
    #: The output cannot be written (EX_IOERR).
    OUTPUT = 74
    #: Another process holds the lock; nothing has run (EX_TEMPFAIL: try again later).
    TAKEN = 75
    #: The lock was lost while the command ran (EX_PROTOCOL).
    LOST = 76
    #: There is no such command (a shell's code).
    NOT_FOUND = 127
    #: The reader closed the output (a shell's code for SIGPIPE).
    CLOSED = 141


def usage_error(text: str) -> CommandError:
    return CommandError(text, returncode=Exit.USAGE)


#: Short, for tables on a terminal.
COMPACT = DurationFormat(
    (
        "0s",
        "%(seconds)ds",
        "%(minutes)dm %(seconds)ds",
        "%(hours)dh %(minutes)dm",
        "%(days)dd %(hours)dh",
    ),
    tuple(f"%(n)s{unit}" for unit in ("µs", "ms", "s", "m", "h", "d")),
)


# -- options ---------------------------------------------------------------------------------------

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


# -- what is printed of a lock ---------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return "forever" if math.isinf(seconds) else COMPACT.duration(seconds)


def clock_time(timestamp: float) -> str:
    """A Unix time as date and time in the local time zone."""
    local = datetime.fromtimestamp(timestamp, timezone.utc).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S %z")


def counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


#: A name that a user has chosen, on one line and without control characters.
one_line = partial(printable, limit=200)


def note(lock: LockInfo) -> str:
    """What is unusual about a lock; empty if nothing is."""
    if lock.broken:
        return f"cannot be read: {', '.join(lock.broken)}"
    if lock.silent:
        return f"silent for {duration(lock.seen)}"
    if math.isinf(lock.ttl):
        return "never expires"
    if lock.unannounced:
        return "no heartbeat yet"
    if lock.kind == "computation":
        return "computation"
    if lock.queued:
        return "queued"
    if (lock.limit or 1) > 1:
        return f"place {lock.place}, {lock.taken} of {lock.limit}"
    return "not renewed" if lock.renews is False and not lock.resting else ""


def as_json(holding: HeldLock) -> dict[str, object]:
    """A lock as JSON; times in seconds, null for infinite or unknown."""
    lock, owner = holding.lock, holding.lock.owner
    described = fields(owner, "id host pid thread label doing")
    return {
        "name": holding.name,
        "cache": holding.alias,
        "key": lock.key.decode(errors="backslashreplace"),
        "in_cache": not holding.foreign,
        "kind": lock.kind,
        "holder": {name: value or None for name, value in described.items()},
        "since": owner.since,
        "held_for": lock.held_for,
        "ttl": _finite(lock.ttl),
        "expires": not math.isinf(lock.ttl),
        "lifetime": _finite(lock.lifetime),
        "last_heartbeat": lock.seen,
        **fields(lock, "renews silent resting queued fence waiters place limit broken"),
    }


def fields(of: object, names: str) -> dict[str, object]:
    return {name: getattr(of, name) for name in names.split()}


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else seconds


# -- tables -------------------------------------------------------------------------------------

#: A function that colours a text, or leaves it.
Style = Callable[[str], str]

#: What stands between two columns.
GAP = "  "


@dataclass(frozen=True)
class Column:
    """``right``: aligned to the right, as numbers are; ``shrinks``: may be shortened."""

    title: str
    text: Callable[[Any], str]
    right: bool = False
    shrinks: bool = False

    def width(self, rows: Sequence[object]) -> int:
        return max(map(_cells, (self.title, *map(self.text, rows))))

    def cell(self, text: str, width: int) -> str:
        clipped = clip(text, width)
        padding = " " * (width - _cells(clipped))
        return padding + clipped if self.right else clipped + padding


def width_of(stream: Any) -> int | None:
    """The columns of the terminal ``stream``; None if it is not a terminal."""
    try:
        return shutil.get_terminal_size().columns if stream.isatty() else None
    except (AttributeError, ValueError):  # It is closed, or not a file.
        return None


def table(columns: Sequence[Column], rows: Sequence[object], width: int | None) -> list[str]:
    """The lines of a table, that of the titles first. Without ``width`` it may have any."""
    widths = [column.width(rows) for column in columns]
    if width is not None:
        _shrink(columns, widths, width)

    def line(texts: Sequence[str]) -> str:
        cells = (c.cell(text, w) for c, text, w in zip(columns, texts, widths, strict=True))
        return GAP.join(cells).rstrip()

    titles = line([column.title for column in columns])
    return [titles, *(line([c.text(row) for c in columns]) for row in rows)]


def fits(columns: Sequence[Column], rows: Sequence[object], width: int | None) -> bool:
    return (
        width is None
        or sum(c.width(rows) for c in columns) + len(GAP) * (len(columns) - 1) <= width
    )


def _shrink(columns: Sequence[Column], widths: list[int], width: int) -> None:
    """Make the widest of the columns that may shrink narrower until the table fits,
    though none narrower than 8."""
    room = width - len(GAP) * (len(columns) - 1)
    while sum(widths) > room:
        able = [n for n, c in enumerate(columns) if c.shrinks and widths[n] > 8]
        if not able:
            return
        widths[max(able, key=lambda n: widths[n])] -= 1


def clip(text: str, width: int) -> str:
    """``text`` in ``width`` cells, shortened in its middle: similar names often differ at the
    end."""
    if _cells(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{_taken(text, width - 1 - tail)}…{_taken(text[::-1], tail)[::-1]}"


def _taken(text: str, width: int) -> str:
    taken = ""
    for character in text:
        width -= _cells(character)
        if width < 0:
            break
        taken += character
    return taken


def _cells(text: str) -> int:
    """The number of terminal cells of ``text``; a Chinese character takes two."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)
