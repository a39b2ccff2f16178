"""Who holds a lock, as an operator wants to read it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Owner", "hostname"]


@lru_cache(maxsize=1)
def hostname() -> str:
    return socket.gethostname()


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
        pid, since = fields.get("pid", ""), fields.get("since", "")
        try:
            at = float(since)
        except ValueError:
            at = 0.0
        return cls(
            id,
            fields.get("host", ""),
            int(pid) if pid.isdigit() else 0,
            fields.get("thread", ""),
            fields.get("label", ""),
            at or None,
        )

    def __str__(self) -> str:
        if not self.host:
            return f"an unnamed holder ({self.id})"
        named = f"{self.host}, process {self.pid}, thread {self.thread}"
        return f"{self.label} on {named}" if self.label else named
