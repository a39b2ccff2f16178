"""``manage.py locks``: shows and releases held locks, and checks the Redis behind them."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from io import TextIOWrapper
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser, no_translations
from redis.exceptions import RedisError

from ...cache import BACKEND, lock_cache, lock_caches
from ...decorators.section import outages_not_logged
from ...extension import PartMissing, part
from ...transport.hints import explained
from ...transport.refusals import raise_interrupt
from .. import Exit, count, seconds, seconds_or_none, usage_error

#: The part that runs each and its function, the help, and how its usage begins.
ACTIONS = {
    "list": ("actions", "list_locks", "Shows which locks are held.", ""),
    "show": ("actions", "show_lock", "Shows one lock, its waiters and its last events.", "NAME "),
    "release": ("actions", "release_lock", "Releases a lock by force, after asking.", "NAME "),
    "reset": ("actions", "reset_locks", "Releases all locks with such names by force.", "PATTERN "),
    "stats": ("actions", "show_figures", "Shows how locks and computations behaved.", ""),
    "doctor": ("diagnosis", "diagnose", "Checks whether Redis is set up as locks need it.", ""),
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
            for name, (_, _, about, what) in ACTIONS.items()
        }

        def add(names: str, option: str, about: str, **kwargs: Any) -> None:
            for name in names.split():
                parsers[name].add_argument(option, help=about, **kwargs)

        flag = {"action": "store_true"}
        by_name = "the lock's name, as in cache.lock(NAME), or its key"
        add("show release", "name", by_name, metavar="NAME", nargs="+")
        add("reset", "name", "a pattern of names: 'report-*'", metavar="PATTERN")
        one = "only this cache; default: all that support locks"
        add("list show release reset stats doctor", "--using", one, metavar="ALIAS")
        add("list show stats doctor", "--json", "for programs", **flag)
        codes = "exit with 1 if a lock is held, 3 if its holder is silent or it never expires"
        add("list show", "--exit-code", codes, **flag)
        kinds: Any = {"choices": ("lock", "computation", "all"), "default": "lock"}
        both = "locks, computations of get_or_set, or both; default: lock"
        add("list show release reset", "--kind", both, **kinds)
        again: Any = {"metavar": "S", "type": seconds, "nargs": "?", "const": 2.0}
        add("list", "--watch", "repeat every S seconds, until Ctrl-C; default: 2", **again)
        add("list", "--search", "only names with this in them", metavar="TEXT", default="")
        older = "only locks held for longer than S: 90, 90s, 5m or 1h"
        add("list reset", "--older-than", older, metavar="S", type=seconds_or_none)
        most = "list at most N; default: 500"
        add("list", "--limit", most, metavar="N", type=count, default=500)
        wide = "shorten no name, whatever the width of the output"
        add("list reset stats", "--wide", wide, **flag)
        rules = "print the rules that give this Redis user the rights that locks need"
        add("doctor", "--acl", rules, metavar="USER")
        periods: Any = {"choices": ("hour", "day"), "default": "hour"}
        add("stats", "--period", "the last hour or day", **periods)
        place = "of a lock with a limit: the place to release"
        add("release", "--place", place, metavar="N", type=int)
        add("release reset", "--yes", "do it without asking", **flag)
        foreign = "also locks outside the caches' key spaces, by their whole keys"
        add("reset", "--foreign", foreign, **flag)

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

    @no_translations
    def handle(self, *args: object, **options: Any) -> None:
        action = options["action"]
        if isinstance(names := options.get("name"), list):
            if len(names) > 1:
                raise usage_error(
                    f"one name, not {len(names)}; `locks reset` takes a pattern of names"
                )
            options["name"] = names[0]
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
                module, function, *_ = ACTIONS[action]
                code = getattr(part(module), function)(self, options)
            self.stdout.flush()
        except (ImproperlyConfigured, UnicodeEncodeError) as error:
            raise usage_error(str(error)) from error
        except PartMissing as missing:
            raise CommandError(f"{missing}.") from None
        except RedisError as error:
            failed = f"the request to Redis failed: {explained(error)}"
            raise CommandError(failed, returncode=Exit.UNAVAILABLE) from error
        except OSError as error:
            raise_interrupt(error)
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
