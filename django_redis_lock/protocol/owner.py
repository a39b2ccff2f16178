"""The description of a lock's holder, for people."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import secrets
import socket
import sys
import threading
from binascii import hexlify
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ..clock import time
from ..threads import after_fork

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


def as_bytes(value: Any) -> bytes:
    """A reply's string, also from a client that decodes its replies."""
    return value if isinstance(value, bytes) else str(value).encode()


def fields_of(reply: Any) -> dict[str, str]:
    """The dict of a reply with alternating names and values."""
    texts = [as_bytes(text).decode(errors="replace") for text in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def bounded(value: Any, most: float) -> float | None:
    """``value`` if it is a number from 0 to ``most``; else None."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number <= most else None


def fence_of(described: Mapping[str, str], id: str) -> int | None:
    """The fence in the description of the holder with this id; None if it is not there (yet)."""
    # That of a chosen token has a fence before its holder describes itself.
    if described.get("id", id) != id:
        return None
    return int(bounded(described.get("fence"), MAX_FENCE) or 0) or None


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


class HeldReply(NamedTuple):
    """The reply to HELD about one holder, and one of those to HOLDERS; see ``HolderInfo``."""

    token: bytes
    pttl: int
    fields: Sequence[bytes]
    server_us: int
    place: int = 1


class HolderInfo:
    """The holder of a lock, as HELD reports it.

    Attributes:
        owner: the holder.
        ttl: seconds until the lock expires unless renewed; ``inf`` without end.
        held_for: seconds since the acquisition, by the server's clock; None until the owner is
            known.
        renews: whether its keeper renews it, as far as is known.
        overdue: whether a renewal is overdue: the holder is stopped, cut off or dead. A renewed
            lock has less than two thirds of its lifetime left only for a moment.
        resting: whether it was released and stays taken until its ``min_hold`` is over.
        fence: its fence; 0 until the owner is known, unless it chose its token.
        place, limit: the number of its place, and of all places of the lock.
        described: the fields of its description; empty for that of a former holder.
        name: of several names of one lock, that which this holder has; None for one name.
    """

    name: str | None = None

    @property
    def in_the_way(self) -> Owner:
        """The owner for the error of a caller who did not get the lock: a holder that has not
        described itself yet is named by its token."""
        return self.owner if self.owner.host else Owner.from_token(self.token) or self.owner

    def __init__(self, reply: Sequence[Any], limit: int = 1) -> None:
        token, pttl, fields, server_us, self.place = HeldReply(*reply)
        self.token = as_bytes(token)
        self.ttl = math.inf if pttl < 0 else pttl / 1000
        found = fields_of(fields)
        owner = Owner.from_fields(found, fingerprint(self.token), server_us)
        self.fence = fence_of(found, owner.id) or 0
        self.resting = found.get("rests", "").encode() == self.token
        self.described = described = found if found.get("id") == owner.id else {}
        seen = bounded(described.get("seen"), MAX_UNIX_TIME * 1e6)
        if seen is not None:
            owner = replace(owner, seen=max(0.0, (server_us - seen) / 1e6))
        self.owner = owner
        self.limit = int(bounded(described.get("limit"), MAX_FENCE) or limit)
        self.renews = "renews" in described
        lifetime = bounded(described.get("lifetime"), MAX_UNIX_TIME * 1e3)  # In milliseconds.
        self.overdue = self.renews and lifetime is not None and pttl < lifetime / 2
        since = owner.since
        self.held_for = None if since is None else max(0.0, server_us / 1e6 - since)

    def __repr__(self) -> str:
        held_for = None if self.held_for is None else round(self.held_for, 1)
        return f"<HolderInfo: {self.in_the_way}, ttl={self.ttl:.1f}, held_for={held_for}>"


#: Seconds after which to try again if the holder is unknown.
DEFAULT_RETRY_SECONDS = 2
#: The longest such times: of an estimate from how long the lock has been held, and of any.
MAX_GUESSED_RETRY_SECONDS, MAX_RETRY_SECONDS = 60.0, 3600.0


def seconds_to_retry(
    held: HolderInfo | None, usual_hold: float | None = None, given: float | None = None
) -> int:
    """Whole seconds after which trying again makes sense: those ``given``, or until the lock is
    probably free. ``usual_hold``: seconds for which such locks are held on average, if known."""
    seconds = _seconds_until_free(held, usual_hold) if given is None else given
    return max(1, math.ceil(min(seconds, MAX_RETRY_SECONDS)))


def _seconds_until_free(held: HolderInfo | None, usual_hold: float | None) -> float:
    """The remaining lifetime is meaningful only if the lock is not renewed, or if its renewal is
    overdue."""
    if held is None:
        return DEFAULT_RETRY_SECONDS
    if held.overdue or held.resting:
        return held.ttl
    held_for = held.held_for or 0.0
    if usual_hold is not None and held_for < usual_hold:
        left = usual_hold - held_for
    else:  # A lock held for long is likely to be held for longer.
        left = max(DEFAULT_RETRY_SECONDS, min(held_for, MAX_GUESSED_RETRY_SECONDS))
    is_last = held.held_for is not None and not held.renews
    return min(left, held.ttl) if is_last else left


# What a thread or task is doing: it handles a request, runs a task, or is a management command.
# Acquiring a lock only reads a context variable. The keeper makes the text half a second later, if
# the lock is still held then.

MAX_LENGTH = 200
#: The programs that run management commands; ``django`` is ``python -m django``.
PROGRAMS = ("manage.py", "django-admin", "django")

activity: ContextVar[object] = ContextVar("django_redis_lock_activity", default=None)


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
