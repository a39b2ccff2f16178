"""``manage.py locks stats``: how locks and computations behaved in the last hour or day."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand
from redis.exceptions import RedisError

from ..cache import lock_cache, lock_caches
from ..metrics import BOUNDS, Distribution, Summary, summaries
from ..transport import server_of
from .exit_codes import UNAVAILABLE
from .formatting import COMPACT, one_line
from .output import Column, table, width_of

WITHOUT_REDIS = Column("NO REDIS", right=True)
CRASHED = Column("CRASHED", right=True)
OVER_TIME = Column("OVER TIME")
LOCKS = (
    Column("LOCKS", shrinks=True),
    *(Column(title, right=True) for title in ("ACQUIRED", "WAITED", "AVG", "P95")),
    *(Column(title, right=True) for title in ("HOLD", "REJECTED", "TIMEOUT", "LOST")),
    CRASHED,
    WITHOUT_REDIS,
    OVER_TIME,
)
COMPUTATIONS = (
    Column("COMPUTATIONS", shrinks=True),
    *(Column(title, right=True) for title in ("COMPUTED", "AVG", "P95")),
    *(Column(title, right=True) for title in ("SAVED", "STALE", "FAILED")),
    WITHOUT_REDIS,
)
#: From few to many.
BARS = "▁▂▃▄▅▆▇█"


def show_figures(command: BaseCommand, options: dict[str, Any]) -> int:
    """Print them; returns the exit code."""
    period = options["period"]
    found, failures = _read(options["using"], period)
    if options["json"]:
        caches = {alias: [_as_json(s) for s in figures] for alias, figures in found.items()}
        document = {"at": time.time(), "period": period, "caches": caches, "failures": failures}
        command.stdout.write(json.dumps(document, indent=2))
    else:
        for number, (alias, figures) in enumerate(found.items()):
            if len(found) > 1:
                command.stdout.write(("\n" if number else "") + command.style.MIGRATE_LABEL(alias))
            for line in _lines(command, figures, period):
                command.stdout.write(line)
        for alias, error in failures.items():
            command.stderr.write(f"The cache {alias} could not be read: {error}")
    return UNAVAILABLE if failures else 0


def _read(using: str | None, period: str) -> tuple[dict[str, list[Summary]], dict[str, str]]:
    """Caches that share a server and a prefix share their figures; the first stands for all."""
    found: dict[str, list[Summary]] = {}
    failures: dict[str, str] = {}
    seen = set()
    for alias in list(lock_caches()) if using is None else [using]:
        try:
            cache: Any = lock_cache(alias)
            place = (server_of(cache._lock_client()).database, str(cache.key_prefix))
            if place not in seen:
                seen.add(place)
                found[alias] = summaries(alias, period)
        except (RedisError, OSError, ImproperlyConfigured) as error:
            failures[alias] = one_line(str(error))
    return found, failures


def _lines(command: BaseCommand, figures: Sequence[Summary], period: str) -> list[str]:
    style, width = command.style, width_of(command.stdout)
    locks = [s for s in figures if s.attempts or s.lost or s.crashed or s.fallbacks]
    computed = [s for s in figures if s.computations.count or s.saved]
    out = []
    if locks:
        rows = [_lock_row(s) for s in locks]
        bad = [s.lost or s.crashed or s.fallbacks for s in locks]
        colours = [style.ERROR if some else str for some in bad]
        columns: Sequence[Column] = LOCKS
        if not any(s.crashed for s in locks):
            columns, rows = _without(CRASHED, columns, rows)
        if not any(s.fallbacks for s in locks):
            columns, rows = _without(WITHOUT_REDIS, columns, rows)
        if width is not None and width < 100:  # The figures are worth more than their curve.
            columns, rows = _without(OVER_TIME, columns, rows)
        out += table(columns, rows, width, head=style.MIGRATE_HEADING, styles=colours)
    if computed:
        rows = [_computation_row(s) for s in computed]
        colours = [style.WARNING if s.failed or s.without_redis else str for s in computed]
        columns = COMPUTATIONS
        if not any(s.without_redis for s in computed):
            columns, rows = _without(WITHOUT_REDIS, columns, rows)
        out += [""] * bool(out)
        out += table(columns, rows, width, head=style.MIGRATE_HEADING, styles=colours)
    if not out:
        return [f"Nothing happened in the last {period}."]
    return [*out, "", f"In the last {period}, in all processes."]


def _without(
    column: Column, columns: Sequence[Column], rows: Sequence[list[str]]
) -> tuple[list[Column], list[list[str]]]:
    place = columns.index(column)
    kept = [c for c in columns if c is not column]
    return kept, [row[:place] + row[place + 1 :] for row in rows]


def _lock_row(of: Summary) -> list[str]:
    numbers = (of.rejected, of.timeouts, of.lost, of.crashed, of.fallbacks)
    return [
        one_line(of.group or ""),
        str(of.acquisitions),
        _share(of.contended, of.acquisitions),
        _time(of.average_wait),
        _time(of.p95_wait),
        _time(of.holds.average),
        *(str(number or "-") for number in numbers),
        _bars(of.acquisitions_over_time),
    ]


def _computation_row(of: Summary) -> list[str]:
    numbers = (of.saved, of.stale, of.failed + of.refreshes_failed, of.without_redis)
    return [
        one_line(of.group or ""),
        str(of.computed),
        _time(of.computations.average),
        _time(of.computations.p95),
        *(str(number or "-") for number in numbers),
    ]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if part and whole else "-"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else COMPACT.measured(seconds)


def _bars(numbers: Sequence[int]) -> str:
    most = max(numbers, default=0)
    if not most:
        return ""
    return "".join(
        BARS[-(-number * (len(BARS) - 1) // most)] if number else " " for number in numbers
    )


def _as_json(of: Summary) -> dict[str, Any]:
    """Every figure, times in seconds."""
    figures = asdict(of)
    for name in ("waits", "holds", "computations"):
        figures[name] = _distribution(getattr(of, name))
    return {**figures, "acquisitions": of.acquisitions, "attempts": of.attempts}


def _distribution(of: Distribution) -> dict[str, Any]:
    return {
        "count": of.count,
        "seconds": of.seconds,
        "average": of.average,
        "p50": of.quantile(0.5),
        "p95": of.quantile(0.95),
        "p99": of.quantile(0.99),
        "bounds": BOUNDS,
        "counts": of.counts,
    }
