"""Two pages from one run: ``docs/benchmarks.md`` has five tables, ``benchmarks/results.md`` all and
all of their columns.

Their texts are ``page.md`` and ``results_page.md``, beside this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
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
    "stampede": "200 threads",
}
#: Where it ran, as far as the page says it.
SURROUNDINGS = ("date", "machine", "Redis", "Python", "django_redis_lock", "load")
#: Columns that only the other page has.
LEFT_OUT = {
    "cycle": {"µs, new handle", "ratio, new handle"},
    "contention": {"ratio to best that wakes", "client CPU µs/cycle", "server CPU µs/cycle"},
    "handover": {"idle between holders µs"},
    "calls": {"µs", "µs, django-redis"},
    "stampede": {"failed", "first ms", "of them waiting"},
}


def document(results: Mapping[str, Sequence[Result]], around: Mapping[str, str]) -> str:
    """The page of the documentation, in Markdown."""
    chosen = {
        name: [
            _shortened(next((r for r in results[name] if words in r.title), results[name][0]), name)
        ]
        for name, words in PUBLISHED.items()
        if name in results
    }
    return _filled(PAGE, chosen, {name: around[name] for name in SURROUNDINGS if name in around})


def _shortened(result: Result, name: str) -> Result:
    shown = [column not in LEFT_OUT.get(name, ()) for column in result.columns]
    columns = tuple(compress(result.columns, shown))
    rows = {each: tuple(compress(cells, shown)) for each, cells in result.rows.items()}
    return replace(result, columns=columns, rows=rows)


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
