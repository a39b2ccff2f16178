"""Why Redis does not have a holder's lock any more, for the log, the event and the exception."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..clock import time
from ..protocol import Call, LockKeys, Reply, fingerprint, renew_call
from ..protocol.holders import NotHeld, parse_not_held
from ..protocol.owner import MAX_FENCE, bounded
from ..transport import Server
from .heartbeat import Held, heartbeats
from .records import read_events

EXPIRED = "it expired before it was released"
NO_DATA = "Redis has lost its data: a restart, a failover, FLUSHDB or an eviction"
TAKEN_OVER = "a failover has lost it: %s has taken over from %s, without all of its data"
DELETED = "its key was deleted or replaced by another program, or evicted"
DELETED_OR_NO_DATA = "its key was deleted by another program, or Redis has lost its data"
#: By which the clocks of two servers, or of one and of this host, may differ.
CLOCKS_DIFFER_SECONDS = 0.5
UNKNOWN = "it expired, was released by force, or its key was deleted"


def question(
    server: Server, keys: LockKeys, token: bytes, early: bool | None, hold: Held | None
) -> tuple[Call, Callable[[Reply], str]]:
    """For a caller who learns the end of a lock before the keeper: a call, and the cause by its
    reply; None if there is none. The other arguments are those of ``cause``."""
    attempt = b"" if hold is None else hold.attempt
    beats = beats_so_far(server)

    def parse(reply: Reply) -> str:
        if not isinstance(reply, list):
            return UNKNOWN
        return cause(reply, beats, early, hold, token, server)

    return renew_call(keys, token, attempt), parse


def beats_so_far(server: Server) -> tuple[float, float]:
    """When this process sent the last heartbeat, and the last that Redis has lost (monotonic)."""
    beat = None if server.is_cluster else heartbeats.get(server)
    return (-math.inf, -math.inf) if beat is None else (beat.sent_at, beat.forgotten_at)


def cause(
    reply: Reply,
    beats: tuple[float, float],
    early: bool | None,
    hold: Held | None,
    token: bytes = b"",
    server: Server | None = None,
) -> str:
    """Why a lock ended.

    Args:
        reply: that of RENEW, which was refused.
        beats: ``beats_so_far``, of heartbeats that came before RENEW.
        early: whether its lifetime was not over by the holder's clock; None: not known.
        hold: None for a ``token`` from elsewhere.
        server: where the lock was; it may have moved.
    """
    left = parse_not_held(reply)
    id = fingerprint(token if hold is None else hold.token)
    fence = 0 if hold is None else hold.least_fence
    # Of a chosen token there may be events of former holders.
    since = fence / 1e6 if hold and hold.attempt else -math.inf
    for event in read_events(left.events):
        if event.what == "reset" and event.owner.id == id and event.at >= since:
            return f"released by force{event.note and f' by {event.note}'}"
    if hold is not None and server is not None:
        before, now = hold.renewed_by[0], server.seen_at(hold.keys)
        if before is not None and now is not None and before is not now:
            return TAKEN_OVER % (now.breaker.server, before.breaker.server)
        if left.described_id == id and _is_older(left, hold):
            return NO_DATA
    # A heartbeat that was sent since the acquisition is kept for a day.
    lost_at = beats[1] if left.heartbeat else beats[0]
    began = math.inf if hold is None else hold.began
    if (bounded(left.last_fence, MAX_FENCE) or 0) < fence or lost_at >= began:
        return NO_DATA
    if early is not True:
        return EXPIRED if early is False else UNKNOWN
    only_this = left.heartbeat or left.entry or left.described_id == id
    return DELETED if only_this else DELETED_OR_NO_DATA


def _is_older(left: NotHeld, hold: Held) -> bool:
    """Whether the description was written before the last renewal, which has written it."""
    silent_for = left.silent_for
    if silent_for is None or hold.renewed_by[0] is None:
        return False
    return silent_for > time.monotonic() - hold.renewed_by[1] + CLOCKS_DIFFER_SECONDS
