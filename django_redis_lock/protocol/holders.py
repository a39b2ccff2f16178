"""Who holds a lock, as Redis replies, and when it makes sense to try again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from .identity import as_bytes, fingerprint
from .owner import MAX_FENCE, MAX_UNIX_TIME, Owner, bounded, fields_of
from .script import Reply


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
