"""``manage.py locks stats``: how locks and computations behaved in the last hour or day."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand
from redis.exceptions import RedisError

from ..cache import lock_caches
from ..metrics import BOUNDS, Distribution, Summary, site_of, summaries
from .command_line import UNAVAILABLE
from .output import COMPACT, Column, one_line, table, width_of

#: From few to many.
BARS = "▁▂▃▄▅▆▇█"


def show_figures(command: BaseCommand, options: dict[str, Any]) -> int:
    """Print the figures; returns the exit code."""
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
    """The figures of each site, under its first cache, and the errors of caches that failed."""
    found: dict[str, list[Summary]] = {}
    failures: dict[str, str] = {}
    sites = set()
    for alias in list(lock_caches()) if using is None else [using]:
        try:
            site = site_of(alias)
            if site not in sites:
                sites.add(site)
                found[alias] = summaries(alias, period)
        except (RedisError, OSError, ImproperlyConfigured) as error:
            failures[alias] = one_line(str(error))
    return found, failures


def _lines(command: BaseCommand, figures: Sequence[Summary], period: str) -> list[str]:
    style, width = command.style, width_of(command.stdout)
    locks = [s for s in figures if s.attempts or s.lost or s.crashed or s.fallbacks]
    computed = [s for s in figures if s.computations.count or s.saved or s.reads]
    out = []
    if locks:
        out += table(
            _lock_columns(locks, width),
            locks,
            width,
            head=style.MIGRATE_HEADING,
            style_of=lambda s: style.ERROR if s.lost or s.crashed or s.fallbacks else str,
        )
    if computed:
        out += [""] * bool(out)
        out += table(
            _computation_columns(computed),
            computed,
            width,
            head=style.MIGRATE_HEADING,
            style_of=lambda s: style.WARNING if s.failed or s.without_redis else str,
        )
    if not out:
        return [f"Nothing happened in the last {period}."]
    return [*out, "", f"In the last {period}, in all processes."]


def _lock_columns(shown: Sequence[Summary], width: int | None) -> list[Column]:
    columns = [
        Column("LOCKS", _name, shrinks=True),
        Column("ACQUIRED", lambda s: str(s.acquisitions), right=True),
        Column("WAITED", lambda s: _share(s.contended, s.acquisitions), right=True),
        Column("AVG", lambda s: _time(s.average_wait), right=True),
        Column("P95", lambda s: _time(s.p95_wait), right=True),
        Column("HOLD", lambda s: _time(s.holds.average), right=True),
        _numbers("REJECTED", lambda s: s.rejected),
        _numbers("TIMEOUT", lambda s: s.timeouts),
        _numbers("LOST", lambda s: s.lost),
    ]
    if any(s.crashed for s in shown):
        columns.append(_numbers("CRASHED", lambda s: s.crashed))
    if any(s.fallbacks for s in shown):
        columns.append(_numbers("NO REDIS", lambda s: s.fallbacks))
    if width is None or width >= 100:  # Else the other columns need the room.
        columns.append(Column("OVER TIME", lambda s: _bars(s.acquisitions_over_time)))
    return columns


def _computation_columns(shown: Sequence[Summary]) -> list[Column]:
    columns = [
        Column("COMPUTATIONS", _name, shrinks=True),
        _numbers("READS", lambda s: s.reads),
        Column("HITS", lambda s: _share(s.hits + s.stale_hits, s.reads), right=True),
        Column("COMPUTED", lambda s: str(s.computed), right=True),
        Column("AVG", lambda s: _time(s.computations.average), right=True),
        Column("P95", lambda s: _time(s.computations.p95), right=True),
        _numbers("SAVED", lambda s: s.saved),
        _numbers("STALE", lambda s: s.stale),
        _numbers("FAILED", lambda s: s.failed + s.refreshes_failed),
    ]
    if any(s.without_redis for s in shown):
        columns.append(_numbers("NO REDIS", lambda s: s.without_redis))
    return columns


def _numbers(title: str, number: Callable[[Summary], int]) -> Column:
    return Column(title, lambda s: str(number(s) or "-"), right=True)


def _name(of: Summary) -> str:
    return one_line(of.group or "")


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
    return {**figures, **{name: getattr(of, name) for name in _DERIVED}}


#: The properties of a summary that are shown with its fields.
_DERIVED = ("acquisitions", "attempts", "reads", "hit_ratio")


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
