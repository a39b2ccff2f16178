"""Who holds a lock, as an operator wants to read it."""

from __future__ import annotations

import hashlib
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = ["Held", "Owner", "as_bytes", "fields_of", "fingerprint", "hostname"]


@lru_cache(maxsize=1)
def hostname() -> str:
    return socket.gethostname()


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


@dataclass(frozen=True, slots=True)
class Owner:
    """The holder of a lock.

    Attributes:
        id: a short, public fingerprint of the holder's token; never the token itself.
        host, pid, thread: where it runs; empty and 0 when it has not said so (yet).
        label: what the lock was taken for, in the words of the code that took it.
        since: Unix time in seconds, by the server's clock, at which it took the lock.
    """

    id: str
    host: str = ""
    pid: int = 0
    thread: str = ""
    label: str = ""
    since: float | None = None

    def fields(self) -> list[str]:
        """Names and values in turn, as HSET takes them."""
        return [
            *("id", self.id, "host", self.host, "pid", str(self.pid)),
            *("thread", self.thread, "label", self.label, "since", f"{self.since or 0:.6f}"),
        ]

    @classmethod
    def from_fields(cls, fields: Mapping[str, str], id: str) -> Owner:
        """The owner that ``fields`` describe, or only ``id`` where they describe another's lock."""
        if fields.get("id") != id:
            return cls(id)
        pid = fields.get("pid", "")
        try:
            since = float(fields.get("since", ""))
        except ValueError:
            since = 0.0
        return cls(
            id,
            fields.get("host", ""),
            int(pid) if pid.isascii() and pid.isdigit() else 0,
            fields.get("thread", ""),
            fields.get("label", ""),
            since if 0 < since < math.inf else None,
        )

    def __str__(self) -> str:
        if not self.host:
            return f"an unnamed holder ({self.id})"
        named = f"{self.host}, process {self.pid}, thread {self.thread}"
        return f"{named} ({self.label})" if self.label else named


class Held:
    """A lock somebody owns, as HELD reports it.

    Attributes:
        owner: who.
        ttl: seconds its lifetime still lasts unless renewed; ``inf`` without end.
        held_for: seconds it has been held, by the server's clock; None until the owner is known.
        renews: whether its keeper renews it, as far as the owner has said so.
        overdue: whether a renewal should have come before now: its holder is stopped, cut off or
            dead. A renewed lock never has less than two thirds of its lifetime left for long.
        resting: nobody holds it any more; it stays taken until its ``min_hold`` is over.
    """

    def __init__(self, reply: Any) -> None:
        token, pttl, fields, server_us = reply
        self.token = as_bytes(token)
        self.ttl = math.inf if int(pttl) < 0 else int(pttl) / 1000
        described = fields_of(fields)
        self.owner = Owner.from_fields(described, fingerprint(self.token))
        of_this = described.get("id") == self.owner.id
        self.renews = of_this and "renews" in described
        lifetime = described.get("lifetime", "")  # In milliseconds.
        known = self.renews and lifetime.isascii() and lifetime.isdigit()
        self.overdue = known and int(pttl) < int(lifetime) / 2
        self.resting = described.get("rests", "").encode() == self.token
        since = self.owner.since
        self.held_for = None if since is None else max(0.0, int(server_us) / 1e6 - since)
