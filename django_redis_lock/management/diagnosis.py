"""``manage.py locks doctor``."""

from __future__ import annotations

import itertools
import json
import textwrap
from typing import Any

from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand
from redis.exceptions import RedisError

from ..apps import CHECKS_TAG
from ..cache import lock_cache
from ..ops.doctor import Finding, Level, Target, examine, rules
from ..transport.hints import explained
from . import Exit, Options, one_line, usage_error, width_of

#: The widths of the columns before a finding's text.
LABEL, TOPIC = 9, 13


def diagnose(command: BaseCommand, options: Options) -> int:
    """Examine the caches and print the findings; returns the exit code."""
    if options["acl"] is not None:
        return _print_rules(command, options)
    caches, away = {}, False
    for alias in options["aliases"]:
        findings, answered = _examined(alias)
        caches[alias] = findings
        away = away or not answered
    settings = [_from_check(message) for message in run_checks(tags=[CHECKS_TAG])]
    everything = itertools.chain(settings, *caches.values())
    worst = max((finding.level for finding in everything), default=Level.OK)
    if options["json"]:
        command.stdout.write(json.dumps(_document(settings, caches, worst), indent=2))
    else:
        _print(command, settings, caches, worst)
    if away:
        return Exit.UNAVAILABLE
    return {Level.ERROR: Exit.TROUBLE, Level.WARNING: Exit.WARNED}.get(worst, 0)


def _print_rules(command: BaseCommand, options: Options) -> int:
    """The rights of the caches of each server: one user may have several there."""
    user, write = options["acl"], command.stdout.write
    if not user.isprintable() or len(user.split()) != 1:
        raise usage_error(f"the name of a Redis user has no spaces, not {user!r}")
    servers: dict[str, dict[str, Target]] = {}
    for alias in options["aliases"]:
        if not lock_cache(alias).in_memory:
            target = Target(alias)
            servers.setdefault(target.address.rpartition("/")[0], {})[alias] = target
    for server, targets in servers.items():
        for about, rule in rules(list(targets.values()), user):
            title = f"{', '.join(targets)}  {one_line(server)}  {about}"
            write(f"{command.style.MIGRATE_HEADING(title)}\n{rule}\n")
    write(
        "Paste a line into redis-cli. It replaces the rights of the user, whose passwords stay; a "
        f"new user also\nneeds one: ACL SETUSER {user} >PASSWORD. Then ACL SAVE, or CONFIG REWRITE."
    )
    return 0


def _examined(alias: str) -> tuple[list[Finding], bool]:
    """Also returns whether the server answered."""
    found: list[Finding] = []
    try:
        found.extend(examine(alias))
    except ImproperlyConfigured as error:
        found.append(Finding("settings", Level.ERROR, str(error)))
    except RedisError as error:
        text = explained(error)
        generic = "Check whether it runs, and whether address, user and password are right."
        hint = generic if text == str(error) else ""
        text = f"the request failed: {text}"
        found.append(Finding("server", Level.ERROR, text, hint))
        return found, False
    return found, True


def _from_check(message: Any) -> Finding:
    number = (message.id or "").rpartition(".")[2]  # A missing part has none.
    is_error = message.is_serious() or number == "W003"  # No cache supports locks.
    level = Level.ERROR if is_error else Level.WARNING
    text = f"{number}: {message.msg}".removeprefix(": ")
    return Finding("settings", level, text, message.hint or "", number)


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
    except (ImproperlyConfigured, RedisError):
        return ""


def _document(
    settings: list[Finding], caches: dict[str, list[Finding]], worst: Level
) -> dict[str, object]:
    return {
        "worst": worst.name.lower(),
        "settings": [_as_json(finding) for finding in settings],
        "caches": {
            alias: {"address": _address(alias), "findings": [_as_json(f) for f in findings]}
            for alias, findings in caches.items()
        },
    }


def _as_json(finding: Finding) -> dict[str, object]:
    return {
        "topic": finding.topic,
        "level": finding.level.name.lower(),
        "text": finding.text,
        "hint": finding.hint or None,
        "check": f"django_redis_lock.{finding.number}" if finding.number else None,
        "server": finding.node or None,
    }
