"""Tables on a terminal of any width; in a pipe nothing is cut off."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: Something that colours a text, or leaves it.
Style = Callable[[str], str]

#: Columns that may shrink are not made narrower than this.
NARROWEST = 8


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: what stands above it.
        right: whether it is aligned to the right, as numbers are.
        shrinks: whether its texts may be shortened where there is too little room.
    """

    title: str
    right: bool = False
    shrinks: bool = False


def width_of(stream: Any) -> int | None:
    """How many characters a line of ``stream`` has room for; None for as many as one likes."""
    try:
        if not stream.isatty():
            return None
    except (AttributeError, ValueError):
        return None
    if os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return shutil.get_terminal_size().columns


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    head: Style = str,
    styles: Sequence[Style] | None = None,
) -> list[str]:
    """The lines of a table.

    Args:
        rows: a text for each column, on one line each.
        width: characters there is room for; None: no end.
        head: colours the line of titles.
        styles: colours each row.
    """
    titles = [column.title for column in columns]
    widths = _widths(columns, rows)
    if width is not None:
        _shrink(columns, widths, width)
    lines = [head(_line(columns, titles, widths))]
    for number, row in enumerate(rows):
        style = styles[number] if styles else str
        lines.append(style(_line(columns, row, widths)))
    return lines


def width_of_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """How many characters a line of the table takes where nothing is shortened."""
    return sum(_widths(columns, rows)) + _gaps(columns)


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    titles = [column.title for column in columns]
    return [max(_cells(row[number]) for row in (titles, *rows)) for number in range(len(columns))]


def _gaps(columns: Sequence[Column]) -> int:
    return 2 * (len(columns) - 1)


def _shrink(columns: Sequence[Column], widths: list[int], width: int) -> None:
    """Take what is too much from the widest of the columns that may shrink."""
    room = width - _gaps(columns)
    while sum(widths) > room:
        able = [n for n, c in enumerate(columns) if c.shrinks and widths[n] > NARROWEST]
        if not able:
            return
        widest = max(able, key=lambda n: widths[n])
        widths[widest] -= 1


def _line(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> str:
    cells = []
    for column, text, width in zip(columns, row, widths, strict=True):
        clipped = clip(text, width)
        padding = " " * (width - _cells(clipped))
        cells.append(padding + clipped if column.right else clipped + padding)
    return "  ".join(cells).rstrip()


def clip(text: str, width: int) -> str:
    """``text`` in ``width`` cells; what is left out is in its middle, because names that begin
    alike are told apart by their ends."""
    if _cells(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{_taken(text, width - 1 - tail)}…{_taken(text[::-1], tail)[::-1]}"


def _taken(text: str, width: int) -> str:
    """As much of the beginning of ``text`` as ``width`` cells hold."""
    taken = ""
    for character in text:
        width -= _cells(character)
        if width < 0:
            break
        taken += character
    return taken


def _cells(text: str) -> int:
    """How many cells of a terminal ``text`` takes; Chinese and the like take two each."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)
