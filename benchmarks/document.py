"""The page ``docs/benchmarks.md``, made from ``page.md`` and the results of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .results import OURS, Result
from .table import show

__all__ = ["document"]

PAGE = Path(__file__).with_name("page.md")


def document(results: Mapping[str, Sequence[Result]], around: Mapping[str, str]) -> str:
    """The page, in Markdown."""
    rows = "\n".join(f"| {name} | {text} |" for name, text in around.items())
    figures = "\n\n".join(_chapter(name, found) for name, found in results.items())
    return PAGE.read_text(encoding="utf-8").format(around=rows, figures=figures)


def _chapter(name: str, results: Sequence[Result]) -> str:
    command = f'`make bench ARGS="--only {name}"`'
    return "\n\n".join([f"### {name}", command, *map(_table, results)])


def _table(result: Result) -> str:
    lines = [f"**{result.title}**", ""]
    lines += [_line(["", *result.columns]), "|---" + "|--:" * len(result.columns) + "|"]
    for name, cells in result.rows.items():
        shown = [name, *map(show, cells)]
        lines.append(_line([f"**{cell}**" for cell in shown] if name.startswith(OURS) else shown))
    return "\n".join([*lines, *(["", result.note] if result.note else [])])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
