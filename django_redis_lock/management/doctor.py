"""``manage.py locks doctor``: checks whether Redis is set up as locks need it."""

from __future__ import annotations

import itertools
import json
import textwrap
from typing import Any

from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand
from redis.exceptions import RedisError

from ..cache import lock_caches
from ..checks import TAG
from ..doctor import Finding, Level, Target, examine
from . import TROUBLE, UNAVAILABLE, WARNED
from .output import one_line, width_of

#: The widths of the columns before a finding's text.
LABEL, TOPIC = 9, 13


def diagnose(command: BaseCommand, options: dict[str, Any]) -> int:
    """Examine the caches and print the findings; returns the exit code."""
    aliases = list(lock_caches()) if options["using"] is None else [options["using"]]
    caches, away = {}, False
    for alias in aliases:
        findings, answered = _examined(alias)
        caches[alias] = findings
        away = away or not answered
    settings = [_from_check(message) for message in run_checks(tags=[TAG])]
    everything = itertools.chain(settings, *caches.values())
    worst = max((finding.level for finding in everything), default=Level.OK)
    if not aliases:
        worst = Level.ERROR  # W003 says that no cache supports locks.
    if options["json"]:
        command.stdout.write(json.dumps(_document(settings, caches, worst), indent=2))
    else:
        _print(command, settings, caches, worst)
    if away:
        return UNAVAILABLE
    return {Level.ERROR: TROUBLE, Level.WARNING: WARNED}.get(worst, 0)


def _examined(alias: str) -> tuple[list[Finding], bool]:
    """The findings, and whether the server answered."""
    found: list[Finding] = []
    try:
        found.extend(examine(alias))
    except ImproperlyConfigured as error:
        found.append(Finding("settings", Level.ERROR, str(error)))
    except (RedisError, OSError) as error:
        hint = "Check whether it runs, and whether address, user and password are right."
        found.append(Finding("server", Level.ERROR, f"the request failed: {error}", hint))
        return found, False
    return found, True


def _from_check(message: Any) -> Finding:
    level = Level.ERROR if message.is_serious() else Level.WARNING
    number = message.id.rpartition(".")[2]
    return Finding("settings", level, f"{number}: {message.msg}", message.hint or "", number)


def _print(
    command: BaseCommand, settings: list[Finding], caches: dict[str, list[Finding]], worst: Level
) -> None:
    style, write = command.style, command.stdout.write
    width = min(width_of(command.stdout) or 100, 100)
    for alias, findings in caches.items():
        write(style.MIGRATE_HEADING(f"{alias}  {_address(alias)}"))
        _write_all(command, findings, width)
        write("")
    if settings:
        write(style.MIGRATE_HEADING("settings"))
        _write_all(command, settings, width)
        write("")
    write(
        {
            Level.OK: "No problems found.",
            Level.NOTE: "No problems found; see the notes.",
            Level.WARNING: style.WARNING("Locks work, but can be lost or late: see the warnings."),
            Level.ERROR: style.ERROR("Locks do not work as they should: see the errors."),
        }[worst]
    )


def _write_all(command: BaseCommand, findings: list[Finding], width: int) -> None:
    style = command.style
    colours = {
        Level.OK: style.SUCCESS,
        Level.NOTE: style.MIGRATE_LABEL,
        Level.WARNING: style.WARNING,
        Level.ERROR: style.ERROR,
    }
    margin = 2 + LABEL + TOPIC
    for finding in findings:
        label = colours[finding.level](f"{finding.level.name.lower():<{LABEL}}")
        where = f"{finding.node}: " if finding.node else ""
        text = one_line(where + finding.text, limit=1000)
        first, *rest = textwrap.wrap(text, max(20, width - margin))
        command.stdout.write(f"  {label}{finding.topic:<{TOPIC}}{first}")
        if finding.hint:
            rest += textwrap.wrap(f"→ {finding.hint}", max(20, width - margin))
        for line in rest:
            command.stdout.write(" " * margin + line)


def _address(alias: str) -> str:
    try:
        return one_line(Target(alias).address)
    except (ImproperlyConfigured, RedisError, OSError):
        return ""


def _document(
    settings: list[Finding], caches: dict[str, list[Finding]], worst: Level
) -> dict[str, Any]:
    return {
        "worst": worst.name.lower(),
        "settings": [_as_json(finding) for finding in settings],
        "caches": {
            alias: {"address": _address(alias), "findings": [_as_json(f) for f in findings]}
            for alias, findings in caches.items()
        },
    }


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "topic": finding.topic,
        "level": finding.level.name.lower(),
        "text": finding.text,
        "hint": finding.hint or None,
        "check": f"django_redis_lock.{finding.number}" if finding.number else None,
        "server": finding.node or None,
    }
