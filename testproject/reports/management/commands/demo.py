from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from testproject.demo.interrupts import Interrupted, interrupts


class Command(BaseCommand):
    help = "Shows the locks at work: a stampede, a line, and then the site with live locks."
    # The checks look at the caches, which do not know yet which Redis they are to use.
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        # Argparse reads a default that is a text as if it had been given.
        parser.add_argument(
            "--port",
            type=int,
            default=os.environ.get("PORT") or "8000",
            help="of the site; 0: any free one; default: the variable PORT, or 8000",
        )
        part = parser.add_mutually_exclusive_group()
        part.add_argument("--no-serve", action="store_true", help="end after the tables")
        part.add_argument("--only-serve", action="store_true", help="leave the tables out")
        part.add_argument(
            "--no-redis",
            action="store_true",
            help="the same, with locks in memory: the tables need several processes, and so Redis",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if not settings.DEBUG:
            raise CommandError(
                "The demo makes an administrator and prints the password, so it runs only with "
                "DEBUG on."
            )
        try:
            # Not above: rich comes with the extra only, and its absence needs a word.
            from testproject.demo.play import play, play_without_redis  # noqa: PLC0415  # see above
            from testproject.demo.screen import Screen  # noqa: PLC0415  # see above
        except ModuleNotFoundError as error:
            raise CommandError(
                f'{error}. The demo needs its extra: pip install "django-redis-lock[demo]"'
            ) from error
        serve = not options["no_serve"]
        screen = Screen(no_color=options["no_color"])
        try:
            with interrupts():
                if options["no_redis"]:
                    play_without_redis(self, screen, options["port"])
                else:
                    scenes = not options["only_serve"]
                    play(self, screen, scenes=scenes, port=options["port"] if serve else None)
        except Interrupted as interrupted:
            screen.gap()
            screen.say("Stopped.")
            if not serve:  # Whoever relies on the outcome must see that there is none.
                sys.exit(128 + interrupted.signum)
