"""Why Redis does not have a holder's lock any more. Asked once, when that is noticed, so that the
log, the event and the exception name the cause."""

from __future__ import annotations

import math
import os
import threading

from ..clock import time
from ..protocol import (
    Call,
    LockKeys,
    Reply,
    as_bytes,
    encodable,
    fingerprint,
    hostname,
    process_id,
    script,
)
from ..protocol.keys import events_key, process_key
from ..protocol.owner import MAX_FENCE, bounded
from ..transport import Server
from .hold import Hold
from .records import read_events

#: What Redis knows of the end of a lock.
#:
#: KEYS  lock keys, events, then the heartbeat of the holder's process, where it is on this server
#: ARGV  none
#: returns {what RECORD_EVENT keeps, the last fence of the index, the id in the description,
#:         the heartbeat, the lock's entry on the index if it is free}, each '' if there is none
#: atomic because the descriptions must be of one moment.
WHY = script("""
local function text(...)
  local found = redis.pcall(...)
  return type(found) == 'string' and found or ''
end
return {
  text('GET', KEYS[6]),
  text('ZSCORE', KEYS[5], 'django_redis_lock:fence'),
  text('HGET', KEYS[4], 'id'),
  KEYS[7] and text('GET', KEYS[7]) or '',
  redis.call('EXISTS', KEYS[1]) == 0 and text('ZSCORE', KEYS[5], KEYS[1]) or '',
}
""")

EXPIRED = "it expired before it was released"
NO_DATA = "Redis has lost its data: a restart, a failover, FLUSHDB or an eviction"
DELETED = "its key was deleted or replaced by another program, or evicted"
DELETED_OR_NO_DATA = "its key was deleted by another program, or Redis has lost its data"
UNKNOWN = "it expired, was released by force, or its key was deleted"


class Question:
    """Why the lock of ``token`` ended.

    Args:
        early: whether its lifetime was not over by the holder's clock; None: not known.
        hold: None for a token from elsewhere.
    """

    def __init__(
        self, server: Server, keys: LockKeys, token: bytes, early: bool | None, hold: Hold | None
    ) -> None:
        self._id, self._early, self._hold = fingerprint(token), early, hold
        self._began = time.monotonic() if hold is None else hold.began
        self._beat = None if server.is_cluster else server.heartbeat
        heartbeat = () if server.is_cluster else (process_key(process_id()),)
        self.call = Call(WHY, (*keys, events_key(keys.name), *heartbeat), ())

    def answer(self, reply: Reply) -> str:
        """The cause; ``reply``: None if there was none."""
        if reply is None:
            return UNKNOWN
        stored, last_fence, described, heartbeat, entry = map(as_bytes, reply)
        fence = 0 if self._hold is None else self._hold.least_fence
        # Of a chosen token there may be events of former holders.
        since = fence / 1e6 if self._hold and self._hold.attempt else -math.inf
        for event in read_events(stored):
            if event.what == "reset" and event.owner.id == self._id and event.at >= since:
                return f"released by force{event.note and f' by {event.note}'}"
        # A heartbeat that was sent since the acquisition is kept for a day.
        lost_at = -math.inf
        if (beat := self._beat) is not None:
            lost_at = beat.forgotten_at if heartbeat else beat.sent_at
        if (bounded(last_fence, MAX_FENCE) or 0) < fence or lost_at >= self._began:
            return NO_DATA
        if self._early is not True:
            return EXPIRED if self._early is False else UNKNOWN
        only_this = heartbeat or entry or described.decode(errors="replace") == self._id
        return DELETED if only_this else DELETED_OR_NO_DATA


def code_here() -> str:
    """Who releases by force, if it is code and not a person."""
    thread = threading.current_thread().name
    return f"reset() in {hostname()}, process {os.getpid()}, thread {encodable(thread)}"
