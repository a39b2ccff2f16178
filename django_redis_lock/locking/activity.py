"""What a thread or task is doing, in the user's words: it handles a request, runs a task, or is a
management command. The description of a lock's holder has it.

Acquiring a lock only reads a context variable. The text is made half a second later, if the lock is
still held then, by the keeper.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

#: Characters of a text.
MAX_LENGTH = 200
#: The programs that run management commands; ``django`` is ``python -m django``.
PROGRAMS = ("manage.py", "django-admin", "django")

activity: ContextVar[object] = ContextVar("django_redis_lock_activity", default=None)


@contextmanager
def doing(what: object) -> Iterator[None]:
    """Locks acquired in this block are held for ``what``; ``str(what)`` is called in another
    thread, so it must not query a database."""
    before = activity.get()
    activity.set(what)
    try:
        yield
    finally:
        activity.set(before)


def described(what: object) -> str:
    """The text for the holder's description; empty if nothing is known."""
    try:
        text = "" if what is None else str(what)
    except Exception:  # From attributes that users have given to a request.
        text = ""
    return (text or command_line())[:MAX_LENGTH]


@lru_cache(maxsize=1)
def command_line() -> str:
    """The management command that this process runs, with the names of its options: their values
    may be secrets. Empty if it runs none."""
    path, *arguments = sys.argv or [""]
    program = Path(path)
    name = program.parent.name if program.name == "__main__.py" else program.name
    if name not in PROGRAMS or not arguments:
        return ""
    command, *others = takewhile(lambda argument: argument != "--", arguments)
    options = [other.partition("=")[0] for other in others if other.startswith("--")]
    return " ".join((name, command, *options))
