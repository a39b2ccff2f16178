"""``manage.py locks``: shows and releases held locks, and checks the Redis behind them."""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from redis.exceptions import RedisError

from ...cache import BACKEND, lock_cache, lock_caches
from ...decorators import outages_not_logged
from ...metrics import PERIODS
from ..arguments import count, seconds, seconds_or_none
from ..doctor import diagnose
from ..exit_codes import CLOSED, UNAVAILABLE, USAGE
from ..listing import KINDS, list_locks
from ..release import release_lock, reset_locks
from ..show import show_lock
from ..stats import show_figures

ACTIONS: dict[str, Callable[[BaseCommand, dict[str, Any]], int]] = {
    "list": list_locks,
    "show": show_lock,
    "release": release_lock,
    "reset": reset_locks,
    "stats": show_figures,
    "doctor": diagnose,
}
#: What each does, for its help.
ABOUT = {
    "list": "Shows which locks are held.",
    "show": "Shows one lock, who waits for it and its last events.",
    "release": "Releases a lock by force, after asking.",
    "reset": "Releases all locks whose names match a pattern by force.",
    "stats": "Shows how locks and computations behaved.",
    "doctor": "Checks whether Redis is set up as locks need it.",
}
A_NAME = "the lock's name, as in cache.lock(NAME), or its whole key"
A_PATTERN = "a pattern of names: 'report-*'"
#: What needs a NAME (or a PATTERN); the others take none.
NAMED = ("show", "release", "reset")
#: The options that only some actions take.
TAKEN_BY = {
    "json": ("list", "show", "stats", "doctor"),
    "watch": ("list",),
    "period": ("stats",),
    "search": ("list",),
    "limit": ("list",),
    "older_than": ("list", "reset"),
    "exit_code": ("list", "show"),
    "kind": ("list", "show", "release", "reset"),
    "yes": ("release", "reset"),
    "foreign": ("reset",),
}


class Command(BaseCommand):
    help = "Shows which locks are held and who waits for them, and releases them."
    # It must work when the settings are wrong.
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.usage = (
            "%(prog)s [list | show NAME | release NAME | reset PATTERN | stats | doctor] [options]"
        )
        parser.add_argument(
            "action",
            nargs="?",
            choices=ACTIONS,
            default="list",
            metavar="ACTION",
            help="list (the default): the held locks; show: one lock, who waits for it and its "
            "last events; release: release a lock by force, after asking; reset: release all "
            "that match; stats: how locks behaved; doctor: is Redis set up as locks need it?",
        )
        parser.add_argument(
            "name",
            nargs="?",
            metavar="NAME",
            help=f"{A_NAME}; for reset {A_PATTERN}",
        )
        add = parser.add_argument
        add("--using", metavar="ALIAS", help="only this cache; default: all that support locks")
        add("--json", action="store_true", help="for programs")
        add(
            "--exit-code",
            action="store_true",
            help="exit with 1 if a lock is held, 3 if its holder is silent or it never expires",
        )
        add(
            "--watch",
            nargs="?",
            type=seconds,
            const=2.0,
            metavar="S",
            help="repeat every S seconds, until Ctrl-C; default: 2",
        )
        add("--search", default="", metavar="TEXT", help="only names with this in them")
        add(
            "--older-than",
            type=seconds_or_none,
            metavar="S",
            help="only locks held for longer than S: 90, 90s, 5m or 1h",
        )
        add("--limit", type=count, default=500, metavar="N", help="list at most N; default: 500")
        add(
            "--kind",
            choices=KINDS,
            default="lock",
            help="locks, computations of get_or_set, or both; default: lock",
        )
        add("--period", choices=PERIODS, default="hour", help="the last hour or day")
        add("--yes", action="store_true", help="do it without asking")
        add(
            "--foreign",
            action="store_true",
            help="also locks outside the caches' key spaces, by their whole keys",
        )
        for option in parser._actions:
            if option.dest in TAKEN_BY:
                option.help = f"{option.help} ({', '.join(TAKEN_BY[option.dest])})"

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        # "locks show --json NAME" is as good as "locks show NAME --json".
        parse = parser.parse_intermixed_args

        def parse_args(args: Any = None, namespace: Any = None) -> Any:
            words = list(sys.argv[2:] if args is None else args)
            actions = [word for word in words if word in ACTIONS]
            if actions and {"-h", "--help"} & {*words}:
                _tell_only(parser, actions[0])
            return parse(words, namespace)

        parser.parse_args = parse_args  # type: ignore[method-assign]
        return parser

    def handle(self, *args: Any, **options: Any) -> None:
        action = options["action"]
        self._refuse_what_makes_no_sense(action, options)
        try:
            if options["using"] is not None:
                lock_cache(options["using"])
            elif action != "doctor" and not any(lock_caches()):
                raise ImproperlyConfigured(
                    f"none of the CACHES supports locks: set {BACKEND=} for one of them"
                )
            with outages_not_logged():
                code = ACTIONS[action](self, options)
            self.stdout.flush()
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=USAGE) from error
        except BrokenPipeError:
            # The reader of the output, such as head, has closed it. What is left is discarded.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = CLOSED
        except (RedisError, OSError) as error:
            raise CommandError(
                f"the request to Redis failed: {error}", returncode=UNAVAILABLE
            ) from error
        if code:
            self._exit(code)

    def _refuse_what_makes_no_sense(self, action: str, options: dict[str, Any]) -> None:
        if action in NAMED and not options["name"]:
            what = "a PATTERN" if action == "reset" else "a NAME"
            raise CommandError(f"locks {action} needs {what}", returncode=USAGE)
        if action not in NAMED and options["name"]:
            raise CommandError(
                f"locks {action} takes no name; did you mean: locks show {options['name']}",
                returncode=USAGE,
            )
        parser = self.create_parser("", "locks")
        for name, actions in TAKEN_BY.items():
            if action not in actions and options[name] != parser.get_default(name):
                option = name.replace("_", "-")
                raise CommandError(
                    f"--{option} goes with {', '.join(actions)}, not with {action}",
                    returncode=USAGE,
                )

    def _exit(self, code: int) -> None:
        if getattr(self, "_called_from_command_line", False):
            sys.exit(code)
        raise CommandError(f"exit code {code}", returncode=code)


def _tell_only(parser: CommandParser, name: str) -> None:
    """Let the help of ``parser`` be that of one action."""
    what = "PATTERN" if name == "reset" else "NAME" if name in NAMED else ""
    parser.usage = f"%(prog)s {' '.join((name, what)).strip()} [options]"
    parser.description = ABOUT[name]
    for option in parser._actions:
        of_others = name not in TAKEN_BY.get(option.dest, ACTIONS)
        if of_others or option.dest == "action" or (option.dest == "name" and not what):
            option.help = SUPPRESS
        elif option.dest == "name":
            option.metavar, option.help = what, A_PATTERN if what == "PATTERN" else A_NAME
        elif option.dest in TAKEN_BY:
            option.help = str(option.help).rpartition(" (")[0]
