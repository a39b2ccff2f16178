from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    help = "Says that it runs, and does what it reads."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("words", nargs="*")
        parser.add_argument("--deaf", action="store_true", help="to SIGTERM")
        parser.add_argument("--start", metavar="SECONDS", help="a process that sleeps so long")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["deaf"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if options["start"]:
            subprocess.Popen(["setsid", "sleep", options["start"]])
        self.stdout.write(f"running {os.environ['REDIS_LOCK_NAME']} {' '.join(options['words'])}")
        # Without a buffer, and waited for in parts: Python hears of a signal that comes just before
        # the system call at its end.
        orders = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115  # to the end
        while True:
            while not select.select([orders], [], [], 0.3)[0]:
                pass
            if not (line := orders.readline()):
                return
            match line.decode().split():
                case ["fail"]:
                    raise CommandError("failed as told", returncode=3)
                case ["crash"]:
                    raise ValueError("crashed as told")
                case ["leave"]:
                    sys.exit("left as told")
                case ["end"]:
                    return
                case words:
                    self.stdout.write(f"heard {words}")
