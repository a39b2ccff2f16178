"""Two databases in files, each with an account."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.db import connections

DATABASES = ("shop", "till")


def use(folder: Path, **options: Any) -> None:
    """Have two databases, in files."""
    for alias in DATABASES:
        as_default = connections.settings["default"]
        name = str(folder / f"{alias}.sqlite3")
        connections.settings[alias] = {**as_default, "NAME": name, **options}


def forget() -> None:
    for alias in DATABASES:
        connections[alias].close()
        del connections[alias], connections.settings[alias]


def execute(sql: str, using: str = "shop") -> Any:
    with connections[using].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()


def balance() -> int:
    return int(execute("SELECT balance FROM account")[0])
