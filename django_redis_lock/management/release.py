"""``manage.py locks release NAME`` and ``reset PATTERN``: forced release."""

from __future__ import annotations

import getpass
import socket
import sys
from fnmatch import fnmatchcase
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ..held_locks import HeldLock, look_closely, release
from ..inventory import MAX_ENTRIES, Outcome
from .exit_codes import NOT_OWNER, UNAVAILABLE, USAGE
from .listing import failures, found, lines
from .output import duration, holder, one_line
from .show import Found, find


def release_lock(command: BaseCommand, options: dict[str, Any]) -> int:
    """Release one lock after a confirmation; returns the exit code."""
    name = options["name"]
    held = _chosen(find(options), options["place"])
    if held is None:
        command.stdout.write(f"{name} is free.")
        return 0
    command.stdout.write(f"{one_line(name)} is held by {_who(held)}.")
    if not options["yes"] and not _agreed(command):
        command.stdout.write("Nothing was released.")
        return 1
    outcome = _release(held)
    command.stdout.write(_said(held, outcome))
    return NOT_OWNER if outcome is Outcome.NOT_OWNER else 0


def _chosen(found: Found, place: int | None) -> HeldLock | None:
    """The holder to release; None if there is none."""
    holders = found.inspection.holders
    if place is None and len(holders) > 1:
        places = ", ".join(str(number) for number in sorted(lock.place for lock in holders))
        raise CommandError(
            f"it has {len(holders)} holders, in the places {places}; say which with --place",
            returncode=USAGE,
        )
    if place is None:
        return found.holding
    chosen = [lock.key for lock in holders if lock.place == place]
    return look_closely(found.alias, chosen[0])[0] if chosen else None


def _said(held: HeldLock, outcome: Outcome) -> str:
    name = one_line(held.name)
    if outcome is Outcome.FREE:
        return f"{name} was free already."
    if outcome is Outcome.NOT_OWNER:
        return f"{name} has passed to another holder and was not released."
    waits = " The first waiter has it now." if held.lock.waiters else ""
    return f"{name} is released.{waits}"


def _agreed(command: BaseCommand) -> bool:
    if not sys.stdin.isatty():
        raise CommandError(
            "no terminal to ask for confirmation: add --yes to release it", returncode=USAGE
        )
    command.stdout.write(
        "The holder is not stopped: until it learns that its lock is lost, it works at the same\n"
        "time as the next holder.\n"
        "Release it? [y/N] ",
        ending="",
    )
    command.stdout.flush()
    try:
        return input().strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        command.stdout.write()
        return False


def reset_locks(command: BaseCommand, options: dict[str, Any]) -> int:
    """Release the locks whose names match a pattern; without ``--yes``, only list them. Returns the
    exit code."""
    pattern = options["name"]
    options.update(search="", limit=MAX_ENTRIES)
    result = found(options)
    result.found = [
        h
        for h in result.found
        if fnmatchcase(h.name, pattern) and (options["foreign"] or not h.foreign)
    ]
    for sentence in failures(result):
        command.stderr.write(sentence)
    code = UNAVAILABLE if result.failures else 0
    if not options["yes"] or not result.found:
        for line in lines(result, command, options):
            command.stdout.write(line)
        if result.found:
            these = "it" if len(result.found) == 1 else f"these {len(result.found)}"
            command.stdout.write(f"Nothing was released. To release {these}, add --yes.")
        return code
    for held in result.found:
        outcome = _release(held)
        command.stdout.write(f"{_said(held, outcome)} It was held by {_who(held)}.")
        if outcome is Outcome.NOT_OWNER:
            code = code or NOT_OWNER
    return code


def _who(held: HeldLock) -> str:
    return f"{holder(held.lock)}, for {duration(held.lock.held_for)}"


def _release(held: HeldLock) -> Outcome:
    lock = held.lock
    return release(
        held.alias, lock.key, lock.owner.id, fence=lock.fence, kind=lock.kind, by=_operator()
    )


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = "?"  # A user of a container may have no name.
    return f"{user}@{socket.gethostname()} (manage.py locks)"
