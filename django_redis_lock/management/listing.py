"""``manage.py locks list`` and ``stats``: which locks are held, and how locks and computations
behaved in the last hour or day."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import TYPE_CHECKING

from django.core.management.base import BaseCommand

from ..extension import part
from ..ops.facts import facts, is_in_trouble
from ..ops.held_locks import UNAVAILABLE, HeldLock, HeldLocks, held_locks, number_of_waiters
from ..ops.inventory import FLIGHT, LOCK
from . import (
    COMPACT,
    Column,
    Exit,
    Options,
    Style,
    as_json,
    clip,
    counted,
    duration,
    fields,
    fits,
    note,
    one_line,
    table,
    width_of,
)

if TYPE_CHECKING:
    from ..contrib.metrics import Distribution, Summary


#: The terminal's upper left corner.
HOME = "\x1b[H"
#: One long name must not make each line of a file, or a mail, as long.
WIDTH_IN_PIPE = 120
#: Of a name, with ``--wide``.
MAX_NAME = 2000
#: From few to many.
BARS = "▁▂▃▄▅▆▇█"
KINDS = {"lock": (LOCK,), "computation": (FLIGHT,), "all": (LOCK, FLIGHT)}


def list_locks(command: BaseCommand, options: Options) -> int:
    """Once, or with ``--watch`` again and again."""
    if options["watch"] is None:
        return _list(command, options, screen=False)
    terminal = width_of(command.stdout) is not None and not options["json"]
    if terminal:
        command.stdout.write("\x1b[2J", ending="")
    try:
        while True:
            _list(command, options, screen=terminal)
            time.sleep(options["watch"])
    except KeyboardInterrupt:
        if terminal:
            command.stdout.write("")  # So that the shell's prompt is not behind "^C".
        return 0


def _list(command: BaseCommand, options: Options, screen: bool) -> int:
    result = find_all(options)
    if options["json"]:
        # With --watch each takes one line.
        indent = 2 if options["watch"] is None else None
        text = json.dumps(_document(result), indent=indent)
    elif screen:
        text = _redrawn([*lines(result, command, options), *failures(result)], options)
    else:
        text = "\n".join(lines(result, command, options))
    if text:
        command.stdout.write(text)
        command.stdout.flush()
    if not screen:
        for sentence in failures(result):
            command.stderr.write(sentence)
    if result.failures:
        return Exit.UNAVAILABLE
    return verdict(result.found, here=bool(result.local)) if options["exit_code"] else 0


def verdict(locks: list[HeldLock], *, here: bool) -> int:
    """``here``: a lock is held on this host, without Redis."""
    if any(is_in_trouble(held.lock) for held in locks):
        return Exit.TROUBLE
    return Exit.HELD if locks or here else 0


def failures(result: HeldLocks) -> list[str]:
    """Each error once; also the locks held on this host without Redis."""
    found: dict[str, list[str]] = {}
    for failure in result.failures:
        found.setdefault(failure.error, []).append(failure.alias)
    failed = [
        f"The {'caches' if len(aliases) > 1 else 'cache'} {', '.join(aliases)} could not be read: "
        f"{error}"
        for error, aliases in found.items()
    ]
    return failed + [f"{one_line(name)} is held on this host: {who}" for name, who in result.local]


def find_all(options: Options) -> HeldLocks:
    asked = {"kinds": KINDS[options["kind"]], "search": options["search"]}
    result = held_locks(options["aliases"], limit=options["limit"], **asked)
    oldest = options["older_than"]
    result.found = [h for h in result.found if oldest is None or (h.lock.held_for or 0.0) > oldest]
    return result


def lines(result: HeldLocks, command: BaseCommand, options: Options) -> list[str]:
    """The table and the sentence below it; empty if no cache answered."""
    if {failure.alias for failure in result.failures}.issuperset(options["aliases"]):
        return []
    if not result.found:
        return [_summary(result, options)]
    rows, width = list(map(told, result.found)), _width(command, options)
    columns = _columns(rows)
    if not fits(columns, rows, width):
        # Host and process are more important than the label.
        columns = _columns(rows, labelled=False)
    error = command.style.ERROR
    styles = [error if is_in_trouble(held.lock) else str for held in result.found]
    return [*_table(command, columns, rows, styles, width), "", _summary(result, options)]


def _width(command: BaseCommand, options: Options) -> int | None:
    """The most columns of a table."""
    return None if options["wide"] else width_of(command.stdout) or WIDTH_IN_PIPE


def _table(
    command: BaseCommand,
    columns: Sequence[Column],
    rows: Sequence[object],
    styles: Sequence[Style],
    width: int | None,
) -> list[str]:
    first, *lines = table(columns, rows, width)
    return [
        command.style.MIGRATE_HEADING(first),
        *(style(line) for style, line in zip(styles, lines, strict=True)),
    ]


def told(holding: HeldLock) -> dict[str, str]:
    """The facts of a lock as a table has them; ``note`` is what is most unusual."""
    lock, owner = holding.lock, holding.lock.owner
    holder = f"{owner.host}:{owner.pid}" if owner.host else f"? ({owner.id})"
    return {
        **facts(lock, COMPACT),
        "name": one_line(holding.name, limit=MAX_NAME),
        "cache": holding.alias,
        "holder": "released, min_hold not over" if lock.resting else one_line(holder),
        "held": "-" if lock.resting else duration(lock.held_for),
        "left": "-" if math.isinf(lock.ttl) else duration(lock.ttl),
        "waiters": "" if lock.waiters is None else str(lock.waiters or "-"),
        "note": note(lock),
    }


def _columns(rows: list[dict[str, str]], *, labelled: bool = True) -> list[Column]:
    def holder(of: dict[str, str]) -> str:
        label = f" ({of['label']})" if labelled and of["label"] and of["spot"] != "-" else ""
        return one_line(f"{of['holder']}{label}")

    columns = [
        Column("NAME", itemgetter("name"), shrinks=True),
        Column("HOLDER", holder, shrinks=True),
        Column("HELD", itemgetter("held"), right=True),
        Column("LEFT", itemgetter("left"), right=True),
        Column("WAITING", itemgetter("waiters"), right=True),
    ]
    if len({of["cache"] for of in rows}) > 1:
        columns.append(Column("CACHE", itemgetter("cache"), shrinks=True))
    if any(of["doing"] for of in rows):
        columns.append(Column("DOING", itemgetter("doing"), shrinks=True))
    if any(of["note"] for of in rows):
        columns.append(Column("NOTE", itemgetter("note")))
    return columns


def _summary(result: HeldLocks, options: Options) -> str:
    locks = [h for h in result.found if h.lock.kind == LOCK]
    waiting = number_of_waiters(locks)
    held, unlisted = len(locks), [cut for cut in result.truncations if cut.kind == LOCK]
    if options["older_than"] is None:
        held += sum(cut.total - cut.shown for cut in unlisted)
    least = "At least " if unlisted else ""
    parts = []
    if options["kind"] != "computation":
        none = _none(options, LOCK, "lock", "held") or "no lock is held"
        none += " except on this host" if result.local else ""
        parts.append(least + counted(held, "lock is held", "locks are held") if held else none)
        if waiting:
            parts.append(counted(waiting, "process waits", "processes wait"))
    if options["kind"] != "lock":
        computations = len(result.found) - len(locks)
        none = "" if computations else _none(options, FLIGHT, "computation", "in progress")
        several = "computations are in progress"
        parts.append(none or counted(computations, "computation is in progress", several))
    text = ", ".join(parts) + "."
    text = text[0].upper() + text[1:]
    if result.failures:
        text = f"In the caches that answered: {text[0].lower()}{text[1:]}"
    if result.in_memory:
        aliases = ", ".join(result.in_memory)
        text += (
            f" The locks of the cache {aliases} are in the memory of each process: they exclude "
            "only its own threads, and no other process can list them."
        )
    return " ".join([text, *cuts(result)])


def cuts(result: HeldLocks) -> list[str]:
    return [
        f"Only {cut.shown} of at least {cut.total} {cut.kind}s of the cache {cut.alias} are listed."
        for cut in result.truncations
    ]


def _none(options: Options, kind: str, name: str, state: str) -> str:
    """That none of those that there are matches; empty if all are wanted, or there is none."""
    if not options["search"] and options["older_than"] is None and not options.get("name"):
        return ""
    every = held_locks(options["aliases"], limit=options["limit"], kinds=(kind,))
    number = len(every.found) + sum(cut.total - cut.shown for cut in every.truncations)
    verb = "is" if number == 1 else "are"
    return f"no {name} matches ({number} {verb} {state})" if number else ""


def _document(result: HeldLocks) -> dict[str, object]:
    return {
        "at": time.time(),
        "locks": [as_json(h) for h in result.found],
        "cut": [cut._asdict() for cut in result.truncations],
        "failures": [{"alias": f.alias, "error": f.error} for f in result.failures],
        "local": [{"name": name, "holder": str(owner)} for name, owner in result.local],
        "in_memory": result.in_memory,
    }


def _redrawn(shown: list[str], options: Options) -> str:
    """Over the previous output, without flicker, cut off at the screen's end."""
    width, height = shutil.get_terminal_size()
    below = f"Every {options['watch']:g} s, at {time.strftime('%H:%M:%S')}. Ctrl-C ends it."
    room = max(1, height - 3)
    if len(shown) > room:
        shown = [*shown[: room - 1], f"… and {len(shown) - room + 1} more lines"]
    return HOME + "".join(f"{line}\x1b[K\n" for line in [*shown, "", clip(below, width)]) + "\x1b[J"


# -- figures -------------------------------------------------------------------------------------


def show_figures(command: BaseCommand, options: Options) -> int:
    period = options["period"]
    found, failures = _read(options["aliases"], period)
    if options["json"]:
        caches = {alias: [_as_json(s) for s in figures] for alias, figures in found.items()}
        document = {"at": time.time(), "period": period, "caches": caches, "failures": failures}
        command.stdout.write(json.dumps(document, indent=2))
    else:
        for number, (alias, figures) in enumerate(found.items()):
            if len(found) > 1:
                command.stdout.write(("\n" if number else "") + command.style.MIGRATE_LABEL(alias))
            for line in _figures(command, figures, period, _width(command, options)):
                command.stdout.write(line)
        for alias, error in failures.items():
            command.stderr.write(f"The cache {alias} could not be read: {error}")
    return Exit.UNAVAILABLE if failures else 0


def _read(aliases: Sequence[str], period: str) -> tuple[dict[str, list[Summary]], dict[str, str]]:
    """The figures of each site, under its first cache, and the errors of caches that failed."""
    figures = part("metrics")
    found: dict[str, list[Summary]] = {}
    failures: dict[str, str] = {}
    sites = set()
    for alias in aliases:
        try:
            site = figures.site_of(alias)
            if site not in sites:
                sites.add(site)
                found[alias] = figures.summaries(alias, period)
        except UNAVAILABLE as error:
            failures[alias] = one_line(str(error))
    return found, failures


def _figures(
    command: BaseCommand, figures: Sequence[Summary], period: str, width: int | None
) -> list[str]:
    style = command.style
    locks = [s for s in figures if s.attempts or s.lost or s.crashed or s.fallbacks]
    computed = [s for s in figures if s.computations.count or s.saved or s.reads]
    out = []
    if locks:
        styles = [style.ERROR if s.lost or s.crashed or s.fallbacks else str for s in locks]
        columns = _that_fit(_lock_columns(locks, width), locks, width)
        out += [*_table(command, columns, locks, styles, width), ""]
    if computed:
        styles = [style.WARNING if s.failed or s.without_redis else str for s in computed]
        columns = _that_fit(_computation_columns(computed), computed, width)
        out += [*_table(command, columns, computed, styles, width), ""]
    if not out:
        return [f"Nothing happened in the last {period}."]
    return [*out, f"In the last {period}, in all processes."]


def _that_fit(columns: list[Column], shown: Sequence[Summary], width: int | None) -> list[Column]:
    """Without those that have no figures, if there is no room for all."""
    if fits(columns, shown, width):
        return columns
    return [column for column in columns if any(column.text(of) != "-" for of in shown)]


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


def _as_json(of: Summary) -> dict[str, object]:
    figures = asdict(of)
    for name in ("waits", "holds", "computations"):
        figures[name] = _distribution(getattr(of, name))
    return {**figures, **fields(of, "acquisitions attempts reads hit_ratio")}


def _distribution(of: Distribution) -> dict[str, object]:
    return {
        **fields(of, "count seconds average"),
        **{f"p{percent}": of.quantile(percent / 100) for percent in (50, 95, 99)},
        "bounds": part("metrics").BOUNDS,
        "counts": of.counts,
    }
