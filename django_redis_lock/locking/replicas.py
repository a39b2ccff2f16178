"""The option ``replicas``: an acquisition that so many replicas must confirm, by WAIT."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..clock import time
from ..protocol import Call, LockKeys, milliseconds, script
from ..transport import Client, exchange_with, pack, pack_words, server_of

#: Seconds that replicas have at least, and at most.
MIN_PATIENCE_SECONDS, MAX_PATIENCE_SECONDS = 1.0, 3.0
#: The answer to a WAIT may be late.
REPLY_MARGIN_SECONDS = 1.0

#: A write that only passes over a fence, sent before WAIT on the same connection: a confirmation
#: is of use only for what came before it in the primary's stream.
#:
#: KEYS  lock keys        ARGV  token        returns 1, or 0 if this token does not hold the lock
#: atomic because it must be of the same primary as the look at the lock.
MARK = script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
describe_until(redis.call('PTTL', KEYS[1]))  -- Never refused, so the next is not either.
next_fence()
return 1
""")


class Confirmed(NamedTuple):
    """Whether the lock is still held, and how many replicas know."""

    held: bool
    replicas: int


def confirmed_by(until: float, lifetime: float | None) -> float:
    """The time until which replicas may confirm, if the caller waits ``until`` then."""
    now = time.monotonic()
    most = min(MAX_PATIENCE_SECONDS, math.inf if lifetime is None else lifetime / 3)
    return min(max(until, now + MIN_PATIENCE_SECONDS), now + most)


def ask_replicas(
    client: Client, keys: LockKeys, token: bytes, replicas: int, until: float
) -> Confirmed:
    """Wait, until a monotonic time, for so many replicas to know that ``token`` holds the lock."""
    server = server_of(client).locate(keys)
    question = question_to_replicas(keys, token, replicas, until)
    replies = exchange_with(server, question, 2, until=until + REPLY_MARGIN_SECONDS)
    return Confirmed(bool(replies[0]), int(replies[1]))


def question_to_replicas(keys: LockKeys, token: bytes, replicas: int, until: float) -> bytes:
    mark = pack(Call(MARK, keys, (token,)), known=False)
    left = milliseconds(until - time.monotonic())
    return mark + pack_words(b"WAIT", b"%d" % replicas, b"%d" % left)
