"""``manage.py locks``: shows and releases held locks, and checks the Redis behind them."""

from __future__ import annotations

import itertools
import json
import os
import sys
import textwrap
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Any

from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from redis.exceptions import RedisError

from ...apps import CHECKS_TAG
from ...cache import BACKEND, lock_cache, lock_caches
from ...contrib.metrics import PERIODS
from ...decorators import outages_not_logged
from ...ops.doctor import Finding, Level, Target, examine, rules
from ...transport.hints import explained
from ...transport.refusals import genuine, redis_errors
from .. import Exit, Options, count, one_line, seconds, seconds_or_none, usage_error, width_of
from ..by_name import release_lock, reset_locks, show_lock
from ..listing import KINDS, list_locks, show_figures

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
    except redis_errors() as error:
        text = explained(error)
        generic = "Check whether it runs, and whether address, user and password are right."
        hint = generic if text == str(error) else ""
        text = f"the request failed: {text}"
        found.append(Finding("server", Level.ERROR, text, hint))
        return found, False
    return found, True


def _from_check(message: Any) -> Finding:
    number = message.id.rpartition(".")[2]
    is_error = message.is_serious() or number == "W003"  # No cache supports locks.
    level = Level.ERROR if is_error else Level.WARNING
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
    except genuine(ImproperlyConfigured, RedisError, OSError):
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


class OneName(Action):
    """An argument that is often given more than once."""

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        name, *more = list(values or ())
        if more:
            parser.error(f"one name, not {1 + len(more)}; `locks reset` takes a pattern of names")
        setattr(namespace, self.dest, name)


#: What runs each, its help, and how its usage begins.
ACTIONS: dict[str, tuple[Callable[[BaseCommand, Options], int], str, str]] = {
    "list": (list_locks, "Shows which locks are held.", ""),
    "show": (show_lock, "Shows one lock, who waits for it and its last events.", "NAME "),
    "release": (release_lock, "Releases a lock by force, after asking.", "NAME "),
    "reset": (reset_locks, "Releases all locks whose names match a pattern by force.", "PATTERN "),
    "stats": (show_figures, "Shows how locks and computations behaved.", ""),
    "doctor": (diagnose, "Checks whether Redis is set up as locks need it.", ""),
}


class Command(BaseCommand):
    help = "Shows which locks are held and who waits for them, and releases them."
    # It must work when the settings are wrong.
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        # The options of all commands; without prog, argparse would need sys.argv.
        common = ArgumentParser(parser.prog, add_help=False, parents=[parser])
        actions = parser.add_subparsers(
            dest="action", metavar="ACTION", help="default: list; ACTION --help: its options"
        )
        parsers = {
            name: actions.add_parser(
                name,
                parents=[common],
                formatter_class=parser.formatter_class,
                add_help=False,
                help=about,
                description=about,
                usage=f"%(prog)s {what}[options]",
            )
            for name, (_, about, what) in ACTIONS.items()
        }

        def add(names: str, *option: str, **kwargs: Any) -> None:
            for name in names.split():
                parsers[name].add_argument(*option, **kwargs)

        add(
            "show release",
            "name",
            metavar="NAME",
            nargs="+",
            action=OneName,
            help="the lock's name, as in cache.lock(NAME), or its key",
        )
        add("reset", "name", metavar="PATTERN", help="a pattern of names: 'report-*'")
        add(
            "list show release reset stats doctor",
            "--using",
            metavar="ALIAS",
            help="only this cache; default: all that support locks",
        )
        add("list show stats doctor", "--json", action="store_true", help="for programs")
        add(
            "list show",
            "--exit-code",
            action="store_true",
            help="exit with 1 if a lock is held, 3 if its holder is silent or it never expires",
        )
        add(
            "list show release reset",
            "--kind",
            choices=KINDS,
            default="lock",
            help="locks, computations of get_or_set, or both; default: lock",
        )
        add(
            "list",
            "--watch",
            nargs="?",
            type=seconds,
            const=2.0,
            metavar="S",
            help="repeat every S seconds, until Ctrl-C; default: 2",
        )
        add("list", "--search", default="", metavar="TEXT", help="only names with this in them")
        add(
            "list reset",
            "--older-than",
            type=seconds_or_none,
            metavar="S",
            help="only locks held for longer than S: 90, 90s, 5m or 1h",
        )
        add(
            "list",
            "--limit",
            type=count,
            default=500,
            metavar="N",
            help="list at most N; default: 500",
        )
        add(
            "list reset stats",
            "--wide",
            action="store_true",
            help="shorten no name, whatever the width of the output",
        )
        add(
            "doctor",
            "--acl",
            metavar="USER",
            help="print the rules that give this Redis user the rights that locks need",
        )
        add("stats", "--period", choices=PERIODS, default="hour", help="the last hour or day")
        add(
            "release",
            "--place",
            type=int,
            metavar="N",
            help="of a lock with a limit: the place to release",
        )
        add("release reset", "--yes", action="store_true", help="do it without asking")
        add(
            "reset",
            "--foreign",
            action="store_true",
            help="also locks outside the caches' key spaces, by their whole keys",
        )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: object) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parse = parser.parse_args

        def parse_args(args: Any = None, namespace: object = None) -> Any:
            words = list(sys.argv[2:] if args is None else args)
            if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
                words.insert(0, "list")
            return parse(words, namespace)

        parser.parse_args = parse_args  # type: ignore[method-assign]  # Django's
        return parser

    def handle(self, *args: object, **options: Any) -> None:
        action = options["action"]
        if self.stdout._out is None:
            raise CommandError("the standard output is closed", returncode=Exit.OUTPUT)
        if isinstance(sys.stdout, TextIOWrapper):  # Its encoding may not have all characters.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            aliases = options["aliases"] = list(lock_caches())
            if options["using"] is not None:
                lock_cache(options["using"])
                options["aliases"] = [options["using"]]
            elif action != "doctor" and not aliases:
                raise ImproperlyConfigured(
                    f"none of the CACHES supports locks: set {BACKEND=} for one of them"
                )
            with outages_not_logged():
                code = ACTIONS[action][0](self, options)
            self.stdout.flush()
        except (ImproperlyConfigured, UnicodeEncodeError) as error:
            raise usage_error(str(error)) from error
        except RedisError as error:
            failed = f"the request to Redis failed: {explained(error)}"
            raise CommandError(failed, returncode=Exit.UNAVAILABLE) from error
        except genuine(OSError) as error:
            if getattr(self, "_called_from_command_line", False):
                # The end of the process would try once more to write what is left of the output.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):
                raise CommandError(str(error), returncode=Exit.OUTPUT) from error
            code = Exit.CLOSED  # The reader of the output, such as head, has closed it.
        if code:
            if getattr(self, "_called_from_command_line", False):
                sys.exit(code)
            raise CommandError(f"exit code {code}", returncode=code)
