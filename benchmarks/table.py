"""Results as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from .results import OURS, Cell, Result, Target

__all__ = ["describe_targets", "render", "show", "summary"]

WIDTH = 100


def render(result: Result) -> str:
    """The table, its note, and what was aimed at."""
    heads = [textwrap.wrap(column, 15, break_long_words=False) for column in result.columns]
    depth = max(map(len, heads))
    lines = [[""] + [head[n] if n < len(head) else "" for head in heads] for n in range(depth)]
    body = [[name, *map(show, cells)] for name, cells in result.rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, *body, strict=True)]
    text = [result.title, "-" * len(result.title)]
    text += [_line(line, widths) for line in lines]
    text += [_line(row, widths, "*" if row[0].startswith(OURS) else " ") for row in body]
    if result.note:
        text += textwrap.wrap(result.note, WIDTH)
    text += describe_targets(result.targets)
    return "\n".join(line.rstrip() for line in text)


def _line(cells: list[str], widths: list[int], mark: str = " ") -> str:
    first, *others = (
        cell.ljust(width) if n == 0 else cell.rjust(width)
        for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([f"{mark} {first}", *others])


def show(cell: Cell) -> str:
    """A number with three digits that count."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if cell == int(cell) or abs(cell) >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.3f}" if cell < 2 else f"{cell:.2f}"


WORDS = {True: "met", False: "MISSED", None: "open"}


def describe_targets(targets: Iterable[Target]) -> list[str]:
    return [f"  {WORDS[t.met]:>6}: {t.aim} ({t.reached})" for t in targets]


def summary(results: Iterable[Result]) -> str:
    """How many targets are met, and which are not."""
    judged = [(result, target) for result in results for target in result.targets]
    met = sum(target.met is True for _, target in judged)
    lines = [f"Targets: {met} of {len(judged)} met"]
    for result, target in judged:
        if not target.met:
            lines += [f"  {result.title}", *describe_targets([target])]
    return "\n".join(lines)
