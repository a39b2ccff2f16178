"""What a process and its threads are called and do, and the tokens of what they acquire."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import socket
import sys
import threading
from binascii import hexlify
from contextvars import ContextVar
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from ..clock import time
from ..threads import after_fork

#: What a thread or task is doing: it handles a request, runs a task, or is a management command.
#: Acquiring a lock only reads this; the keeper makes the text of it, half a second later.
activity: ContextVar[object] = ContextVar("django_redis_lock_activity", default=None)
MAX_ACTIVITY_LENGTH = 200
#: The programs that run management commands; ``django`` is ``python -m django``.
PROGRAMS = ("manage.py", "django-admin", "django")


def encodable(text: str) -> str:
    """``text`` with escapes for lone surrogates, as ``os.fsdecode`` returns them."""
    return text.encode(errors="backslashreplace").decode()


@lru_cache(maxsize=1)
def hostname() -> str:
    return encodable(socket.gethostname())


def process_id() -> str:
    """A unique id of this process, unlike its pid."""
    return _process_id


def new_token() -> bytes:
    return hexlify(os.urandom(16))


def named_token() -> bytes:
    """Such a value followed by the process and thread, for ``Owner.from_token``. The token of a
    grant has no name: a release does not know yet which waiter takes it."""
    return new_token() + b" " + _here.process_and_thread


def waiter_id() -> bytes:
    """A unique id, from which the admin reads the waiter's process, thread and begin."""
    return b"%d %.3f %b" % (next(_waiters), time.time(), _here.process_and_thread)


_waiters = itertools.count(secrets.randbits(40))


class _Here(threading.local):
    def __init__(self) -> None:
        name = f"{os.getpid()} {hostname()} {threading.current_thread().name}"
        self.process_and_thread = name.encode(errors="backslashreplace")


_here, _process_id = _Here(), secrets.token_urlsafe(6)


@after_fork
def _forget_names() -> None:
    global _here, _process_id
    _here, _process_id = _Here(), secrets.token_urlsafe(6)


def fingerprint(token: bytes) -> str:
    """A short public name for ``token``."""
    return hashlib.blake2b(token, digest_size=4).hexdigest()


def as_bytes(value: object) -> bytes:
    """A reply's string, also from a client that decodes its replies."""
    return value if isinstance(value, bytes) else str(value).encode()


def described(what: object) -> str:
    try:
        text = "" if what is None else str(what)
    except Exception:  # From attributes that users have given to a request.
        text = ""
    return (text or command_line())[:MAX_ACTIVITY_LENGTH]


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
