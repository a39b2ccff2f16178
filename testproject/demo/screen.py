"""What the demo shows: bars that move on a terminal, and plain lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from textwrap import wrap

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

__all__ = ["Bars", "Screen"]


class Bars:
    """One progress bar for each process of a team."""

    def __init__(self, progress: Progress, numbers: Iterable[int]) -> None:
        self._progress = progress
        self._tasks = {
            number: progress.add_task(f"process {number}", total=None, start=False, doing="")
            for number in numbers
        }

    def pulse(self, number: int, doing: str) -> None:
        """It waits, nobody knows how long."""
        self._progress.update(self._tasks[number], total=None, doing=doing)

    def fill(self, number: int, doing: str, share: float) -> None:
        """It has done ``share`` of its work."""
        self._progress.update(self._tasks[number], total=1.0, completed=share, doing=doing)

    def finish(self, number: int, doing: str) -> None:
        self.fill(number, doing, 1.0)


class Screen:
    def __init__(self, *, no_color: bool = False) -> None:
        self._console = Console(no_color=no_color or None, highlight=False, markup=False)
        # Asked of the output itself: FORCE_COLOR, which rich obeys, does not make a log a terminal.
        self._moving = sys.stdout.isatty() and not self._console.is_dumb_terminal
        self._at_gap = True

    def gap(self) -> None:
        """A blank line, unless there is one."""
        if not self._at_gap:
            self._console.print()
        self._at_gap = True

    def heading(self, text: str) -> None:
        self.gap()
        self.say(text, style="bold")

    def say(self, text: str, *, style: str = "", indent: int = 0) -> None:
        """A sentence or two; from the second line on, ``indent`` columns further to the right."""
        for line in wrap(text, self._console.width - 1, subsequent_indent=" " * indent):
            self._console.print(line, style=style)
        self._at_gap = False

    def copyable(self, text: str) -> None:
        """A line on its own, whatever its length: an address broken in two is no address."""
        self._console.print(f"  {text}", soft_wrap=True)
        self._at_gap = False

    @contextmanager
    def bars(self, numbers: Iterable[int]) -> Iterator[Bars]:
        """Bars while the block lasts; they stay as they are at its end. Nothing in a log."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[doing]}", markup=False),
        )
        with Progress(*columns, console=self._console, disable=not self._moving) as progress:
            yield Bars(progress, numbers)
        if self._moving:
            self._at_gap = False
            self.gap()

    def table(self, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        """A table; columns after the first are flush right."""
        table = Table(box=SIMPLE_HEAD, show_edge=False)
        for position, title in enumerate(columns):
            table.add_column(title, justify="right" if position else "left")
        for row in rows:
            table.add_row(*row)
        self.gap()
        self._console.print(table)
        self._console.print()
        self._at_gap = True
