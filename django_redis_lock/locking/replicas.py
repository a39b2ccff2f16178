"""The option ``replicas``: an acquisition that so many replicas must confirm, by WAIT."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ..clock import time
from ..exceptions import TooFewReplicas
from ..protocol import AcquireRequest, Acquisition, Call, LockKeys, milliseconds, script
from ..steps import Steps
from ..transport import Client, exchange_with, note_sent, pack, pack_words, server_of

if TYPE_CHECKING:
    from .operations import LockOperations

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


def confirmed(
    lock: LockOperations, request: AcquireRequest, acquired: Acquisition, until: float
) -> Steps[None]:
    """Raises TooFewReplicas unless they confirm ``acquired`` while it may be waited for, ``until``
    a monotonic time, within reason."""
    request.may_hold[:] = [(acquired.token, acquired.attempt, acquired.place)]
    most = min(MAX_PATIENCE_SECONDS, math.inf if request.lifetime is None else request.lifetime / 3)
    now = time.monotonic()
    try:
        confirmation = yield lock._confirm(
            acquired, min(max(until, now + MIN_PATIENCE_SECONDS), now + most)
        )
    except Exception as error:
        note_sent(error, True)  # The lock is held, also if this question could not be sent.
        raise
    known = confirmation.replicas if confirmation.held else 0
    if known < lock.replicas:
        raise TooFewReplicas(known, lock.replicas, lock._shown)


def confirm(client: Client, keys: LockKeys, token: bytes, replicas: int, until: float) -> Confirmed:
    """Wait, until a monotonic time, for so many replicas to know that ``token`` holds the lock."""
    server = server_of(client).locate(keys)
    question = question_to_replicas(keys, token, replicas, until)
    replies = exchange_with(server, question, 2, until=until + REPLY_MARGIN_SECONDS)
    return Confirmed(bool(replies[0]), int(replies[1]))


def question_to_replicas(keys: LockKeys, token: bytes, replicas: int, until: float) -> bytes:
    mark = pack(Call(MARK, keys, (token,)), known=False)
    return mark + pack_words(
        b"WAIT", b"%d" % replicas, b"%d" % milliseconds(until - time.monotonic())
    )
