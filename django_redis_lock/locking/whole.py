"""What concerns all keys and not those of one lock: on a cluster, all its primaries."""

from __future__ import annotations

from typing import Any

from .calls import run, run_at
from .cluster import Cluster
from .keys import FIGURES, INDEX, index_key, lock_keys, slot_tag
from .owner import as_bytes
from .scripts import Call, script
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


#: Empty the database but keep the locks (invariant S6). The script finds the locks themselves in
#: the index, so that none slips through; their companions are named by the caller for the locks it
#: saw there a moment before. A lock without its companions is still right, only its waiters are
#: found later, by their own watch.
#:
#: KEYS  index; on a cluster none: there is one for each slot, and a node has many
#: ARGV  0; on a cluster the number of this node's slots, what the indexes are called, and the
#:       tags of the slots; then companion keys to keep where they exist
#: returns the number of locks kept
#: atomic because no lock may be seen missing in between.
CLEAR = script("""
local indexes, slots, rest = {KEYS[1]}, tonumber(ARGV[1]), 2
if slots > 0 then
  for i = 3, slots + 2 do indexes[#indexes + 1] = ARGV[2] .. ':{' .. ARGV[i] .. '}' end
  rest = slots + 3
end
local kept = {}
local function keep(key)
  local dump = redis.pcall('DUMP', key)
  if type(dump) == 'table' then
    if not string.find(dump.err, 'non local') then error(dump.err) end
    return false  -- Its slot has gone to another node.
  end
  local left = redis.call('PTTL', key)
  if left == 0 then left = 1 elseif left < 0 then left = 0 end  -- RESTORE's 0 is for ever.
  if dump then kept[#kept + 1] = {key, left, dump} end
  return dump
end
local locks = 0
for _, index in ipairs(indexes) do
  if keep(index) then
    for _, key in ipairs(redis.call('ZRANGE', index, 0, -1)) do
      if keep(key) then locks = locks + 1 end
    end
  end
end
for i = rest, #ARGV do keep(ARGV[i]) end
redis.call('FLUSHDB', 'ASYNC')
for _, entry in ipairs(kept) do redis.call('RESTORE', entry[1], entry[2], entry[3], 'REPLACE') end
return locks
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
