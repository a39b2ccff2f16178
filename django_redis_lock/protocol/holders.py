"""The description of a lock's holder, for people; who holds a lock, as Redis replies; and when it
makes sense to try again."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

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


def fence_of(described: Mapping[str, str], id: str) -> int | None:
    """The fence in the description of the holder with this id; None if it is not there (yet)."""
    # That of a chosen token has a fence before its holder describes itself.
    if described.get("id", id) != id:
        return None
    return int(bounded(described.get("fence"), MAX_FENCE) or 0) or None


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

    def __init__(self, reply: Reply, limit: int = 1) -> None:
        token, pttl, fields, server_us, self.place = HeldReply(*reply)
        self.token = as_bytes(token)
        self.ttl = math.inf if pttl < 0 else pttl / 1000
        texts = fields_of(fields)
        owner = Owner.from_fields(texts, fingerprint(self.token), server_us)
        self.fence = fence_of(texts, owner.id) or 0
        self.resting = texts.get("rests", "").encode() == self.token
        self.described = described = texts if texts.get("id") == owner.id else {}
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
    held: HolderInfo | None, usual_hold: float | None = None, fixed: float | None = None
) -> int:
    """Whole seconds after which trying again makes sense: those ``fixed``, or until the lock is
    probably free. ``usual_hold``: seconds for which such locks are held on average, if known."""
    seconds = _seconds_until_free(held, usual_hold) if fixed is None else fixed
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
