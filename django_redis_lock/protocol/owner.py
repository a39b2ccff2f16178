"""The description of a lock's holder, for people."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
import socket
import threading
from binascii import hexlify
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from ..clock import time
from ..threads import after_fork
from .script import Reply

#: The latest valid Unix time: about the year 5000.
MAX_UNIX_TIME = 1e11
#: The greatest fence: they are exact in Lua's numbers.
MAX_FENCE = 2**53
MAX_PID = 2**32
#: A token that ``named_token`` has made: a random value, process, host, thread.
NAMED_TOKEN = re.compile(r"[0-9a-f]{32} (\d{1,10}) (\S+) (.*)", re.ASCII | re.DOTALL)
#: Seconds between two heartbeats of a process that holds locks, and without one until it counts as
#: silent.
HEARTBEAT_EVERY, SILENT_AFTER = 10.0, 15.0


def encodable(text: str) -> str:
    """``text`` with escapes for lone surrogates, as ``os.fsdecode`` returns them."""
    return text.encode(errors="backslashreplace").decode()


@lru_cache(maxsize=1)
def hostname() -> str:
    return encodable(socket.gethostname())


@lru_cache(maxsize=1)
def process_id() -> str:
    """A unique id of this process, unlike its pid."""
    return secrets.token_urlsafe(6)


after_fork(process_id.cache_clear)


def new_token() -> bytes:
    """A random value that proves the ownership of a lock."""
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


_here = _Here()


@after_fork
def _forget_names() -> None:
    """The child has another process id."""
    global _here
    _here = _Here()


def fingerprint(token: bytes) -> str:
    """A short public name for ``token``."""
    return hashlib.blake2b(token, digest_size=4).hexdigest()


def as_bytes(value: object) -> bytes:
    """A reply's string, also from a client that decodes its replies."""
    return value if isinstance(value, bytes) else str(value).encode()


def fields_of(reply: Reply) -> dict[str, str]:
    """The dict of a reply with alternating names and values."""
    texts = [as_bytes(text).decode(errors="replace") for text in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def bounded(value: Reply, most: float) -> float | None:
    """``value`` if it is a number from 0 to ``most``; else None."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number <= most else None


@dataclass(frozen=True, slots=True)
class Owner:
    """The holder of a lock.

    Attributes:
        id: a short, public fingerprint of the holder's token; never the token itself.
        host, pid, thread: where it runs; empty and 0 until the holder describes itself.
        label: given by the code that acquired the lock.
        since: Unix time in seconds of the acquisition, by the server's clock.
        process: the id in its process's heartbeats; empty if it sends none.
        seen: seconds since the last sign of life of its process; None if unknown. More than
            SILENT_AFTER: it is stopped, cut off from Redis, or dead.
        doing: the request, task or management command that acquired the lock, if known.
    """

    id: str
    host: str = ""
    pid: int = 0
    thread: str = ""
    label: str = ""
    since: float | None = None
    process: str = ""
    seen: float | None = None
    doing: str = ""

    def fields(self) -> list[str]:
        """Alternating names and values, for HSET; a lock's fence is the time."""
        names = ("id", "host", "thread", "label", "process", "doing")
        known = {name: value for name in names if (value := getattr(self, name))}
        return [*chain(*known.items()), "pid", str(self.pid)]

    @classmethod
    def from_fields(cls, fields: Mapping[str, str], id: str, now: float = MAX_FENCE) -> Owner:
        """Only ``id`` if ``fields`` describe another one. ``now``: the server's time in
        microseconds."""
        if fields.get("id") != id:
            return cls(id)
        # A fence that is ahead is no time: the server's clock was ahead once.
        since = (bounded(fields.get("fence"), now + 1e6) or 0) / 1e6
        return cls(
            id,
            fields.get("host", ""),
            int(bounded(fields.get("pid"), MAX_PID) or 0),
            fields.get("thread", ""),
            fields.get("label", ""),
            bounded(fields.get("since", since), MAX_UNIX_TIME) or None,
            fields.get("process", ""),
            doing=fields.get("doing", ""),
        )

    @classmethod
    def from_token(cls, token: bytes) -> Owner | None:
        """None if ``named_token`` did not make it."""
        found = NAMED_TOKEN.fullmatch(token.decode(errors="replace"))
        if found is None:
            return None
        pid, host, thread = found.groups()
        return cls(fingerprint(token), host, int(pid), thread)

    def __str__(self) -> str:
        if not self.host:
            return f"an unnamed holder ({self.id})"
        named = f"{self.host}, process {self.pid}, thread {self.thread}"
        purpose = "; ".join(filter(None, (self.label, self.doing)))
        named = f"{named} ({purpose})" if purpose else named
        if self.seen is None or self.seen <= SILENT_AFTER:
            return named
        return f"{named}, no heartbeat for {self.seen:.0f} s"


#: What a thread or task is doing, see ``activities``: acquiring a lock only reads this.
activity: ContextVar[object] = ContextVar("django_redis_lock_activity", default=None)
