"""What a thread or task is doing: it handles a request, runs a task, or is a management command.
The keeper makes the text of it, half a second after the acquisition, if the lock is held then."""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

MAX_LENGTH = 200
#: The programs that run management commands; ``django`` is ``python -m django``.
PROGRAMS = ("manage.py", "django-admin", "django")


def described(what: object) -> str:
    try:
        text = "" if what is None else str(what)
    except Exception:  # From attributes that users have given to a request.
        text = ""
    return (text or command_line())[:MAX_LENGTH]


@lru_cache(maxsize=1)
def command_line() -> str:
    """The management command that this process runs, with the names of its options: their values
    may be secrets. Empty if it runs none."""
    path, *arguments = getattr(sys, "argv", None) or [""]  # None in some embedded interpreters.
    program = Path(path)
    name = program.parent.name if program.name == "__main__.py" else program.name
    if name not in PROGRAMS or not arguments:
        return ""
    command, *others = takewhile(lambda argument: argument != "--", arguments)
    options = [other.partition("=")[0] for other in others if other.startswith("--")]
    return " ".join((name, command, *options))
