"""What concerns all keys and not those of one lock: on a cluster, all its primaries."""

from __future__ import annotations

from typing import Any

from .calls import run, run_at
from .cluster import Cluster
from .keys import FIGURES, INDEX, index_key, lock_keys, slot_tag
from .owner import as_bytes
from .scripts import CLEAR, Call, script
from .server import server_of

__all__ = ["empty", "indexed_locks", "indexes"]

#: Which of the indexes of its slots a cluster's node has.
#:
#: KEYS  none: they are in many slots, all of them this node's
#: ARGV  what each index is called, then the tags of the slots
#: returns the places of the tags, from 1, whose index is there
#: atomic because so many questions are cheaper in one piece: some three milliseconds.
EXISTING = script("""
local found = {}
for i = 2, #ARGV do
  -- A slot may have gone to another node by now.
  if redis.pcall('EXISTS', ARGV[1] .. ':{' .. ARGV[i] .. '}') == 1 then
    found[#found + 1] = i - 1
  end
end
return found
""")


def indexes(client: Any, index: bytes) -> list[bytes]:
    """Where INDEX, or FLIGHTS, is kept: on a cluster there is one for each slot that has any.

    Raises:
        redis.exceptions.RedisError: Redis could not be asked.
    """
    server = server_of(client)
    if not isinstance(server, Cluster):
        return [index]
    found = []
    for node, slots in server.primaries().items():
        asking = Call(EXISTING, (), (index, *map(slot_tag, slots)))
        found += [index_key(index, slots[int(place) - 1]) for place in run_at(server, node, asking)]
    return found


def indexed_locks(client: Any) -> list[bytes]:
    """The keys of all locks on the index; some may not be held any more.

    Raises:
        redis.exceptions.RedisError: Redis could not be asked.
    """
    return [
        as_bytes(key) for index in indexes(client, INDEX) for key in client.zrange(index, 0, -1)
    ]


def empty(client: Any) -> None:
    """Delete everything but the locks that are held, and the figures.

    Raises:
        redis.exceptions.RedisError: Redis could not be asked. On a cluster a part may be emptied.
    """
    companions = (part for key in indexed_locks(client) for part in lock_keys(key)[1:5])
    kept = [*companions, *FIGURES.values()]
    server = server_of(client)
    if not isinstance(server, Cluster):
        run(client, Call(CLEAR, (INDEX,), (0, *kept)))
        return
    for node, slots in server.primaries().items():
        tags = [slot_tag(slot) for slot in slots]
        here = [key for key in kept if server.seen_at((key,)) is node]
        run_at(server, node, Call(CLEAR, (), (len(tags), INDEX, *tags, *here)))
