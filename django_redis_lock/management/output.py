"""Tables on a terminal of any width; in a pipe nothing is cut off."""

from __future__ import annotations

import shutil
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: A function that colours a text, or leaves it.
Style = Callable[[str], str]

#: Columns that may shrink are not made narrower than this.
NARROWEST = 8
#: Characters between two columns.
GAP = 2


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: what stands above it.
        text: returns the text for a row, on one line.
        right: whether it is aligned to the right, as numbers are.
        shrinks: whether its texts may be shortened where there is too little room.
    """

    title: str
    text: Callable[[Any], str]
    right: bool = False
    shrinks: bool = False

    def width(self, rows: Sequence[Any]) -> int:
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


def table(
    columns: Sequence[Column],
    rows: Sequence[Any],
    width: int | None,
    *,
    head: Style = str,
    style_of: Callable[[Any], Style] = lambda row: str,
) -> list[str]:
    """The lines of a table.

    Args:
        rows: what the columns make their texts from.
        width: of the terminal; None for no limit.
        head: colours the line of titles.
        style_of: returns what colours a row.
    """
    widths = [column.width(rows) for column in columns]
    if width is not None:
        _shrink(columns, widths, width)

    def line(texts: Sequence[str]) -> str:
        cells = (c.cell(text, w) for c, text, w in zip(columns, texts, widths, strict=True))
        return (" " * GAP).join(cells).rstrip()

    titles = head(line([column.title for column in columns]))
    return [titles, *(style_of(row)(line([c.text(row) for c in columns])) for row in rows)]


def fits(columns: Sequence[Column], rows: Sequence[Any], width: int | None) -> bool:
    """Whether the table needs no shortening."""
    return width is None or sum(c.width(rows) + GAP for c in columns) - GAP <= width


def _shrink(columns: Sequence[Column], widths: list[int], width: int) -> None:
    """Make the widest of the columns that may shrink narrower until the table fits."""
    room = width - GAP * (len(columns) - 1)
    while sum(widths) > room:
        able = [n for n, c in enumerate(columns) if c.shrinks and widths[n] > NARROWEST]
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
