"""The last losses, crashes and forced releases of all locks of a database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...clock import time
from ...history import Event, read_events
from ...protocol import Call, as_bytes, script
from ...protocol.keys import NEWS
from ...transport import run
from .listing import REPLY_TIMEOUT_SECONDS, indexes

if TYPE_CHECKING:
    from ...transport import Client

#: The most that are read.
MAX_NEWS = 1000

#: The last day's, the latest last.
#:
#: KEYS  news        ARGV  how many, at most
#: returns each event, and when it was, in turn
#: atomic because one script is what the user may run.
LATEST = script("""
local since = string.format('%.0f', now() - 86400000000)
local found = redis.pcall(
  'ZRANGEBYSCORE', KEYS[1], since, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[1]
)
return found.err and {} or found
""")


def latest_news(client: Client) -> tuple[Event, ...]:
    """The latest first. Raises redis.exceptions.RedisError if the request failed."""
    lines: list[bytes] = []
    for key in indexes(client, NEWS):
        reply = run(
            client,
            Call(LATEST, (key,), (MAX_NEWS,)),
            until=time.monotonic() + REPLY_TIMEOUT_SECONDS,
        )
        texts = [as_bytes(text) for text in reply.value]
        lines += (
            b"%s %s" % (score, event) for event, score in zip(texts[::2], texts[1::2], strict=True)
        )
    return read_events(b"\n".join(lines))
