"""What the scripts of flights reply to a caller that wants to lead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from ..clock import time
from ..protocol import as_bytes


class Before(NamedTuple):
    """What was at a value's key when its flight began; see ``seen`` in the scripts.

    Attributes:
        digest: of the value; empty if there was none.
        expires_at: server time in ms; 0 never.
        leader: the token of a leader that goes on leading the same flight; empty if none does.
    """

    digest: bytes | str = ""
    expires_at: bytes | str = "0"
    leader: bytes | str = b""


NOTHING = Before()


class Leads(NamedTuple):
    """The caller leads: it computes the value."""

    before: Before = NOTHING


class Found(NamedTuple):
    """There is a value, as Redis stores it."""

    value: Any


class Failed(NamedTuple):
    """The last computation has just failed with this message."""

    message: bytes | str


class Follows(NamedTuple):
    """Another caller computes the value.

    Attributes:
        leader: the token of its flight.
        ends_at: the monotonic time at which the flight ends unless it is renewed.
    """

    leader: bytes
    ends_at: float


Reply: TypeAlias = Leads | Found | Failed | Follows


def parse(reply: Sequence[Any]) -> Reply:
    """A ``reply`` of TAKE_FLIGHT."""
    match [int(reply[0]), *reply[1:]]:
        case [1, *before]:
            return Leads(Before(*before)) if before else Leads()
        case [2, value]:
            return Found(value)
        case [3, message]:
            return Failed(message)
        case [_, token, pttl]:
            # Redis rounds down, and a key with 0 ms left is still there.
            return Follows(as_bytes(token), time.monotonic() + (max(int(pttl), 0) + 1) / 1000)
    raise ValueError(f"TAKE_FLIGHT replied {reply!r}")
