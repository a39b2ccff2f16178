"""Who holds a lock, as an operator wants to read it."""

from __future__ import annotations

import hashlib
import math
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..forks import after_fork

#: Unix times beyond this are none: about the year 5000.
MAX_UNIX_TIME = 1e11
#: No process id is greater.
MAX_PID = 2**32
#: Seconds between two heartbeats of a process that holds locks (``heartbeat``), and seconds after
#: the last one from which on it counts as silent.
HEARTBEAT_EVERY, SILENT_AFTER = 10.0, 15.0


@lru_cache(maxsize=1)
def hostname() -> str:
    return encodable(socket.gethostname())


@lru_cache(maxsize=1)
def process_id() -> str:
    """What tells this process from all others, also from an earlier one with the same pid on the
    same host."""
    return secrets.token_urlsafe(6)


after_fork(process_id.cache_clear)


def encodable(text: str) -> str:
    """``text`` as it can be kept: what is no character (``os.fsdecode`` gives such, for a file name
    that is no UTF-8) is written as an escape."""
    return text.encode(errors="backslashreplace").decode()


def fingerprint(token: bytes) -> str:
    """A short public name for ``token``; the token itself is never shown."""
    return hashlib.blake2b(token, digest_size=4).hexdigest()


def as_bytes(value: Any) -> bytes:
    """A reply's string, also from a client that decodes its replies."""
    return value if isinstance(value, bytes) else str(value).encode()


def fields_of(reply: Any) -> dict[str, str]:
    """What HGETALL answers in a script: names and values in turn."""
    texts = [as_bytes(text).decode(errors="replace") for text in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def bounded(value: Any, most: float) -> float | None:
    """``value``, of which nobody knows who wrote it, as a number from 0 to ``most``; None if it is
    none."""
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
        host, pid, thread: where it runs; empty and 0 when it has not said so (yet).
        label: what the lock was taken for, in the words of the code that took it.
        since: Unix time in seconds, by the server's clock, at which it took the lock.
        process: what its process's heartbeats are known by; empty where it sends none.
        seen: seconds since its process was last heard of; None where that is not known. More than
            SILENT_AFTER: it is stopped, cut off from Redis, or dead.
    """

    id: str
    host: str = ""
    pid: int = 0
    thread: str = ""
    label: str = ""
    since: float | None = None
    process: str = ""
    seen: float | None = None

    def fields(self) -> list[str]:
        """Names and values in turn, as HSET takes them."""
        return [
            *("id", self.id, "host", self.host, "pid", str(self.pid)),
            *(("process", self.process) if self.process else ()),
            *("thread", self.thread, "label", self.label, "since", f"{self.since or 0:.6f}"),
        ]

    @classmethod
    def from_fields(cls, fields: Mapping[str, str], id: str) -> Owner:
        """The owner that ``fields`` describe, or only ``id`` where they describe another's lock."""
        if fields.get("id") != id:
            return cls(id)
        return cls(
            id,
            fields.get("host", ""),
            int(bounded(fields.get("pid"), MAX_PID) or 0),
            fields.get("thread", ""),
            fields.get("label", ""),
            bounded(fields.get("since"), MAX_UNIX_TIME) or None,
            fields.get("process", ""),
        )

    def __str__(self) -> str:
        if not self.host:
            return f"an unnamed holder ({self.id})"
        named = f"{self.host}, process {self.pid}, thread {self.thread}"
        named = f"{named} ({self.label})" if self.label else named
        if self.seen is None or self.seen <= SILENT_AFTER:
            return named
        return f"{named}, no heartbeat for {self.seen:.0f} s"


class HolderInfo:
    """A lock somebody owns, as HELD reports it.

    Attributes:
        owner: who.
        ttl: seconds its lifetime still lasts unless renewed; ``inf`` without end.
        held_for: seconds it has been held, by the server's clock; None until the owner is known.
        renews: whether its keeper renews it, as far as the owner has said so.
        overdue: whether a renewal should have come before now: its holder is stopped, cut off or
            dead. A renewed lock never has less than two thirds of its lifetime left for long.
        resting: nobody holds it any more; it stays taken until its ``min_hold`` is over.
        fence: its fence, 0 if that is not on record.
    """

    def __init__(self, reply: Any) -> None:
        token, pttl, fields, server_us, fence = reply
        self.token = as_bytes(token)
        self.fence = int(fence)
        self.ttl = math.inf if int(pttl) < 0 else int(pttl) / 1000
        described = fields_of(fields)
        owner = Owner.from_fields(described, fingerprint(self.token))
        of_this = described.get("id") == owner.id
        seen = bounded(described.get("seen"), MAX_UNIX_TIME * 1e6) if of_this else None
        if seen is not None:
            owner = replace(owner, seen=max(0.0, (int(server_us) - seen) / 1e6))
        self.owner = owner
        self.renews = of_this and "renews" in described
        lifetime = bounded(described.get("lifetime"), MAX_UNIX_TIME * 1e3)  # In milliseconds.
        self.overdue = self.renews and lifetime is not None and int(pttl) < lifetime / 2
        self.resting = described.get("rests", "").encode() == self.token
        since = owner.since
        self.held_for = None if since is None else max(0.0, int(server_us) / 1e6 - since)
