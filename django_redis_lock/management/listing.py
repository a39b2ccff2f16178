"""``manage.py locks list``: which locks are held."""

from __future__ import annotations

import json
import shutil
import time
from typing import Any

from django.core.management.base import BaseCommand

from ..cache import lock_caches
from ..held_locks import HeldLock, HeldLocks, held_locks
from ..inventory import FLIGHT, LOCK
from .exit_codes import HELD, TROUBLE, UNAVAILABLE
from .formatting import as_json, counted, duration, holder, in_trouble, note, one_line
from .output import Column, Style, clip, table, width_of, width_of_table

#: The terminal's upper left corner.
HOME = "\x1b[H"
KINDS = {"lock": (LOCK,), "computation": (FLIGHT,), "all": (LOCK, FLIGHT)}


def list_locks(command: BaseCommand, options: dict[str, Any]) -> int:
    """Print what is held, once or with ``--watch`` again and again; returns the exit code."""
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
            command.stdout.write("")  # The shell's next line does not begin behind "^C".
        return 0


def _list(command: BaseCommand, options: dict[str, Any], screen: bool) -> int:
    result = found(options)
    if options["json"]:
        # With --watch each takes one line.
        indent = 2 if options["watch"] is None else None
        text = json.dumps(_document(result), indent=indent)
    else:
        shown = lines(result, command, options)
        if screen:
            shown += failures(result)
            text = _redrawn(shown, options)
        else:
            text = "\n".join(shown)
    if text:
        command.stdout.write(text)
        command.stdout.flush()
    if not screen:
        for sentence in failures(result):
            command.stderr.write(sentence)
    return verdict(result, options)


def failures(result: HeldLocks) -> list[str]:
    """The caches that did not answer, each reason once; and the locks held on this host instead."""
    found: dict[str, list[str]] = {}
    for failure in result.failures:
        found.setdefault(failure.error, []).append(failure.alias)
    failed = [
        f"The {'caches' if len(aliases) > 1 else 'cache'} {', '.join(aliases)} could not be read: "
        f"{error}"
        for error, aliases in found.items()
    ]
    return failed + [f"{one_line(name)} is held on this host: {who}" for name, who in result.local]


def found(options: dict[str, Any]) -> HeldLocks:
    aliases = None if options["using"] is None else [options["using"]]
    kinds = KINDS[options["kind"]]
    result = held_locks(aliases, kinds=kinds, search=options["search"], limit=options["limit"])
    oldest = options["older_than"]
    options["held"] = sum(h.lock.kind == LOCK for h in result.found)
    result.found = [h for h in result.found if oldest is None or (h.lock.held_for or 0.0) > oldest]
    return result


def verdict(result: HeldLocks, options: dict[str, Any]) -> int:
    """The exit code: what could not be asked comes first."""
    if result.failures:
        return UNAVAILABLE
    if not options["exit_code"] or not result.found:
        return 0
    return TROUBLE if any(in_trouble(h.lock) for h in result.found) else HELD


def lines(result: HeldLocks, command: BaseCommand, options: dict[str, Any]) -> list[str]:
    """The table, and a sentence below it; nothing at all if no cache could be asked."""
    if not _answered(result, options):
        return []
    style, shown = command.style, result.found
    out = []
    if shown:
        several = len({h.alias for h in shown}) > 1
        noted = any(note(h.lock) for h in shown)
        columns = [Column("NAME", shrinks=True), Column("HOLDER", shrinks=True)]
        columns += [Column("HELD", right=True), Column("LEFT", right=True)]
        columns += [Column("WAITING", right=True)]
        columns += [Column("CACHE", shrinks=True)] * several + [Column("NOTE")] * noted
        width = width_of(command.stdout)
        rows = [_row(h, several, noted) for h in shown]
        if width is not None and width_of_table(columns, rows) > width:
            # Where and in which process is worth more than what for.
            rows = [_row(h, several, noted, labelled=False) for h in shown]
        colours: list[Style] = [style.ERROR if in_trouble(h.lock) else str for h in shown]
        out += [*table(columns, rows, width, head=style.MIGRATE_HEADING, styles=colours), ""]
    return [*out, _summary(result, options)]


def _answered(result: HeldLocks, options: dict[str, Any]) -> bool:
    """Whether any of the caches asked for could be asked."""
    asked = lock_caches() if options["using"] is None else [options["using"]]
    return not {failure.alias for failure in result.failures}.issuperset(asked)


def _row(holding: HeldLock, several: bool, noted: bool, *, labelled: bool = True) -> list[str]:
    lock = holding.lock
    waiting = "" if lock.waiters is None else str(lock.waiters or "-")
    row = [one_line(holding.name), holder(lock, labelled=labelled)]
    row += ["-" if lock.resting else duration(lock.held_for)]
    row += ["-" if lock.ttl == float("inf") else duration(lock.ttl), waiting]
    return row + [holding.alias] * several + [note(lock)] * noted


def _summary(result: HeldLocks, options: dict[str, Any]) -> str:
    locks = [h for h in result.found if h.lock.kind == LOCK]
    waiting = sum(h.lock.waiters or 0 for h in locks)
    held = len(locks)
    if options["older_than"] is None:
        held += sum(cut.total - cut.shown for cut in result.truncations if cut.kind == LOCK)
    parts = []
    if options["kind"] != "computation":
        parts.append(counted(held, "lock is held", "locks are held") if held else _none(options))
        if waiting:
            parts.append(counted(waiting, "process waits", "processes wait"))
    if options["kind"] != "lock":
        computations = len(result.found) - len(locks)
        parts.append(
            counted(computations, "computation is in progress", "computations are in progress")
        )
    text = ", ".join(parts) + "."
    if result.failures:  # The others are unknown.
        text = f"In the caches that answered: {text[0].lower()}{text[1:]}"
    if result.in_memory:
        aliases = ", ".join(result.in_memory)
        text += (
            f" The locks of the cache {aliases} are in the memory of each process: they exclude "
            "only its own threads, and no other process can list them."
        )
    for cut in result.truncations:
        what = "locks" if cut.kind == LOCK else "computations"
        text += f" Only {cut.shown} of {cut.total} {what} of the cache {cut.alias} are listed."
    return text


def _none(options: dict[str, Any]) -> str:
    """No lock is listed: because none is held, or none of those that are asked for."""
    held = options.get("held")
    if held:
        return f"No lock matches ({held} {'is' if held == 1 else 'are'} held)"
    return "No lock matches" if options["search"] else "No lock is held"


def _document(result: HeldLocks) -> dict[str, Any]:
    return {
        "at": time.time(),
        "locks": [as_json(h) for h in result.found],
        "cut": [cut._asdict() for cut in result.truncations],
        "failures": [{"alias": f.alias, "error": f.error} for f in result.failures],
        "local": [{"name": name, "holder": str(owner)} for name, owner in result.local],
    }


def _redrawn(shown: list[str], options: dict[str, Any]) -> str:
    """``shown`` in the place of what was shown before, without a flicker; as much of it as there
    is room for."""
    width, height = shutil.get_terminal_size()
    below = f"Every {options['watch']:g} s, at {time.strftime('%H:%M:%S')}. Ctrl-C ends it."
    room = max(1, height - 3)
    if len(shown) > room:
        shown = [*shown[: room - 1], f"… and {len(shown) - room + 1} more lines"]
    return HOME + "".join(f"{line}\x1b[K\n" for line in [*shown, "", clip(below, width)]) + "\x1b[J"
