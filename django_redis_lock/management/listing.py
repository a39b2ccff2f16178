"""``manage.py locks list``: which locks are held."""

from __future__ import annotations

import json
import math
import shutil
import time
from typing import Any

from django.core.management.base import BaseCommand

from ..cache import lock_caches
from ..held_locks import HeldLock, HeldLocks, held_locks
from ..inventory import FLIGHT, LOCK
from .command_line import HELD, TROUBLE, UNAVAILABLE
from .output import (
    Column,
    as_json,
    clip,
    counted,
    duration,
    fits,
    holder,
    in_trouble,
    note,
    one_line,
    table,
    width_of,
)

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
            command.stdout.write("")  # So that the shell's prompt is not behind "^C".
        return 0


def _list(command: BaseCommand, options: dict[str, Any], screen: bool) -> int:
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
        return UNAVAILABLE
    return verdict(result.found) if options["exit_code"] else 0


def verdict(locks: list[HeldLock]) -> int:
    """The exit code of ``--exit-code``."""
    if any(in_trouble(held.lock) for held in locks):
        return TROUBLE
    return HELD if locks else 0


def failures(result: HeldLocks) -> list[str]:
    """Messages about caches that did not answer, each error once, and about locks held on this host
    without Redis."""
    found: dict[str, list[str]] = {}
    for failure in result.failures:
        found.setdefault(failure.error, []).append(failure.alias)
    failed = [
        f"The {'caches' if len(aliases) > 1 else 'cache'} {', '.join(aliases)} could not be read: "
        f"{error}"
        for error, aliases in found.items()
    ]
    return failed + [f"{one_line(name)} is held on this host: {who}" for name, who in result.local]


def find_all(options: dict[str, Any]) -> HeldLocks:
    aliases = None if options["using"] is None else [options["using"]]
    kinds = KINDS[options["kind"]]
    result = held_locks(aliases, kinds=kinds, search=options["search"], limit=options["limit"])
    oldest = options["older_than"]
    options["held"] = sum(h.lock.kind == LOCK for h in result.found)
    result.found = [h for h in result.found if oldest is None or (h.lock.held_for or 0.0) > oldest]
    return result


def lines(result: HeldLocks, command: BaseCommand, options: dict[str, Any]) -> list[str]:
    """The table and the sentence below it; empty if no cache answered."""
    asked = lock_caches() if options["using"] is None else [options["using"]]
    if {failure.alias for failure in result.failures}.issuperset(asked):
        return []
    if not result.found:
        return [_summary(result, options)]
    style, width = command.style, width_of(command.stdout)
    columns = _columns(result.found)
    if not fits(columns, result.found, width):
        # Host and process are more important than the label.
        columns = _columns(result.found, labelled=False)
    return [
        *table(
            columns,
            result.found,
            width,
            head=style.MIGRATE_HEADING,
            style_of=lambda held: style.ERROR if in_trouble(held.lock) else str,
        ),
        "",
        _summary(result, options),
    ]


def _columns(shown: list[HeldLock], *, labelled: bool = True) -> list[Column]:
    columns = [
        Column("NAME", lambda h: one_line(h.name), shrinks=True),
        Column("HOLDER", lambda h: holder(h.lock, labelled=labelled), shrinks=True),
        Column("HELD", lambda h: "-" if h.lock.resting else duration(h.lock.held_for), right=True),
        Column(
            "LEFT", lambda h: "-" if math.isinf(h.lock.ttl) else duration(h.lock.ttl), right=True
        ),
        Column("WAITING", _waiting, right=True),
    ]
    if len({held.alias for held in shown}) > 1:
        columns.append(Column("CACHE", lambda h: h.alias, shrinks=True))
    if any(held.lock.owner.doing for held in shown):
        columns.append(Column("DOING", lambda h: one_line(h.lock.owner.doing), shrinks=True))
    if any(note(held.lock) for held in shown):
        columns.append(Column("NOTE", lambda h: note(h.lock)))
    return columns


def _waiting(held: HeldLock) -> str:
    return "" if held.lock.waiters is None else str(held.lock.waiters or "-")


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
    if result.failures:
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
    held = options["held"]
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
        "in_memory": result.in_memory,
    }


def _redrawn(shown: list[str], options: dict[str, Any]) -> str:
    """``shown`` written over the previous output, without flicker, cut off at the screen's end."""
    width, height = shutil.get_terminal_size()
    below = f"Every {options['watch']:g} s, at {time.strftime('%H:%M:%S')}. Ctrl-C ends it."
    room = max(1, height - 3)
    if len(shown) > room:
        shown = [*shown[: room - 1], f"… and {len(shown) - room + 1} more lines"]
    return HOME + "".join(f"{line}\x1b[K\n" for line in [*shown, "", clip(below, width)]) + "\x1b[J"
