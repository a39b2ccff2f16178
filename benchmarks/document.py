"""Two pages from one run: ``docs/benchmarks.md`` has six tables, ``benchmarks/results.md`` all.

Their texts are ``page.md`` and ``results_page.md``, beside this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .results import OURS, Result
from .table import show

__all__ = ["PUBLISHED", "all_tables", "document"]

PAGE = Path(__file__).with_name("page.md")
ALL_TABLES = Path(__file__).with_name("results_page.md")

#: The measurements on the page, and which table of each: the first whose title has these words.
PUBLISHED = {
    "cycle": "on another core",
    "contention": "on another core",
    "handover": "on another core",
    "calls": "against django-redis",
    "hit": "on another core",
    "stampede": "200 threads",
}


def document(results: Mapping[str, Sequence[Result]], around: Mapping[str, str]) -> str:
    """The page of the documentation, in Markdown."""
    chosen = {
        name: [next((one for one in results[name] if words in one.title), results[name][0])]
        for name, words in PUBLISHED.items()
        if name in results
    }
    return _filled(PAGE, chosen, around)


def all_tables(results: Mapping[str, Sequence[Result]], around: Mapping[str, str]) -> str:
    """All tables of the run, in Markdown."""
    return _filled(ALL_TABLES, results, around)


def _filled(page: Path, results: Mapping[str, Sequence[Result]], around: Mapping[str, str]) -> str:
    rows = "\n".join(f"| {name} | {text} |" for name, text in around.items())
    figures = "\n\n".join(_chapter(name, tables) for name, tables in results.items())
    return page.read_text(encoding="utf-8").format(around=rows, figures=figures)


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
