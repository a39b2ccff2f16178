from __future__ import annotations

import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand


class Command(BaseCommand):
    help = "Does its work if nobody has done it, as migrate does; notes what it does."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("folder", type=Path)

    def handle(self, *args: Any, **options: Any) -> None:
        folder: Path = options["folder"]
        (folder / "inside").touch(exist_ok=False)  # Another one inside would be an error.
        if (folder / "done").exists():
            self.stdout.write("nothing to do")
        else:
            time.sleep(0.2)  # Whoever looked at "done" by now would do it again.
            (folder / "done").touch()
            self.stdout.write("migrated")
        (folder / "inside").unlink()
