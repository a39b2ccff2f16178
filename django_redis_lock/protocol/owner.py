"""The description of a lock's holder, for people. Loaded with the first one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from .identity import as_bytes, fingerprint
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

    def in_short(self) -> str:
        """Where it runs, and whether it is silent, before what else is known."""
        if not self.host:
            return str(self)
        silent = self.seen is not None and self.seen > SILENT_AFTER
        where = f"{self.host}:{self.pid}" + (f", silent for {self.seen:.0f} s" if silent else "")
        return f"{where} ({'; '.join(filter(None, (self.thread, self.label, self.doing)))})"

    def __str__(self) -> str:
        if not self.host:
            return f"an unnamed holder ({self.id})"
        named = f"{self.host}, process {self.pid}, thread {self.thread}"
        purpose = "; ".join(filter(None, (self.label, self.doing)))
        named = f"{named} ({purpose})" if purpose else named
        if self.seen is None or self.seen <= SILENT_AFTER:
            return named
        return f"{named}, no heartbeat for {self.seen:.0f} s"
