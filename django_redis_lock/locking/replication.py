"""Whether replicas have a lock too (WAIT), so that it outlives the loss of its primary.

A confirmation is of use only for what came before it in the primary's stream, so a write is sent
with it, on the same connection, that does nothing unless the lock is still held with this token.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, NamedTuple

from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import time
from ..protocol import AcquireRequest, Call, LockKeys, milliseconds, script
from ..transport import aconnect, pack, server_of

#: Seconds that replicas have at least, and at most.
MIN_PATIENCE_SECONDS, MAX_PATIENCE_SECONDS = 1.0, 3.0
#: The answer to a WAIT may be late.
REPLY_MARGIN_SECONDS = 1.0

#: A write that leaves everything as it is, for what has been written before to be confirmed.
#:
#: KEYS  lock, fence        ARGV  token        returns 1, or 0 if this token does not hold the lock
#: atomic because it must be of the same primary as the look at the lock.
MARK = script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[2], '86400000')
""")


class Confirmed(NamedTuple):
    """Whether the lock is still held, and how many replicas know."""

    held: bool
    replicas: float


def patience_of(request: AcquireRequest, until: float | None) -> float:
    """Seconds to wait for a confirmation: within reason, as long as the acquisition may wait,
    ``until`` (monotonic; None without end)."""
    left = math.inf if until is None else until - time.monotonic()
    most = min(MAX_PATIENCE_SECONDS, math.inf if request.lifetime is None else request.lifetime / 3)
    return min(max(left, MIN_PATIENCE_SECONDS), most)


def confirm(client: Any, keys: LockKeys, token: bytes, replicas: int, patience: float) -> Confirmed:
    """Wait ``patience`` seconds until so many replicas know that ``token`` holds the lock."""
    server = server_of(client).at(keys)
    connection = server.checkout()
    try:
        connection.send_packed_command([_question(keys, token, replicas, patience)])
        replies = []
        for _ in range(2):
            if not connection.can_read(patience + REPLY_MARGIN_SECONDS):
                raise RedisTimeoutError("Redis did not say whether replicas have the lock")
            replies.append(connection.read_response())
    except BaseException:
        connection.disconnect()
        raise
    server.answered()
    server.checkin(connection)
    return Confirmed(bool(replies[0]), int(replies[1]))


async def aconfirm(
    client: Any, keys: LockKeys, token: bytes, replicas: int, patience: float
) -> Confirmed:
    """As ``confirm``, for tasks."""
    connection = await aconnect(client, keys, REPLY_MARGIN_SECONDS)
    try:
        question = connection.ask(_question(keys, token, replicas, patience), replies=2)
        held, confirmed = await asyncio.wait_for(question, patience + REPLY_MARGIN_SECONDS)
        return Confirmed(bool(held), int(confirmed))
    except asyncio.TimeoutError:
        raise RedisTimeoutError("Redis did not say whether replicas have the lock") from None
    finally:
        connection.disconnect()


def _question(keys: LockKeys, token: bytes, replicas: int, patience: float) -> bytes:
    mark = pack(Call(MARK, (keys.lock, keys.fence), (token,)), known=False)
    words = (b"WAIT", b"%d" % replicas, b"%d" % milliseconds(patience))
    return mark + b"*3\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
