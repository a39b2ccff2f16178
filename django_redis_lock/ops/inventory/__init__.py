"""Which locks are held in a database; forced release; and operations on all keys of a database, on
a cluster of all its primaries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...protocol import Call, as_bytes, script
from ...protocol.keys import (
    FIGURES,
    INDEX,
    flight_key,
    flights_pattern,
    is_lock,
    is_of_a_database,
    key_of_companion,
    keys_at,
    quorum_fence_key,
    slot_tag,
)
from ...singleflight import LET_GO, own_flights
from ...transport import run, run_all, server_of
from ...transport.server import run_at
from .listing import FLIGHT as FLIGHT
from .listing import LOCK as LOCK
from .listing import MAX_DESCRIBED as MAX_DESCRIBED
from .listing import MAX_ENTRIES as MAX_ENTRIES
from .listing import Inspection as Inspection
from .listing import Inventory as Inventory
from .listing import LockInfo as LockInfo
from .listing import Prefixes as Prefixes
from .listing import WaiterInfo as WaiterInfo
from .listing import indexes
from .listing import inspect as inspect
from .listing import latest_news as latest_news
from .listing import list_held as list_held
from .releasing import Outcome as Outcome
from .releasing import OwnLocks as OwnLocks
from .releasing import is_name_of as is_name_of
from .releasing import release as release
from .releasing import release_each as release_each
from .releasing import reset_all as reset_all

if TYPE_CHECKING:
    from ...transport import Client

# -- all keys --------------------------------------------------------------------------------------

#: One step through the keys of a server.
#:
#: KEYS  none        ARGV  cursor, pattern, how many keys to look at
#: returns as SCAN
SCAN = script("return redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])")

#: Delete keys, except those of held locks.
#:
#: KEYS  the keys, then the index of held locks
#: ARGV  for each key the key of its lock: the key itself, or the one whose companion it is
#: returns the number of keys deleted
#: atomic because a lock may be taken at any time before (invariant S6).
DELETE_UNHELD = script("""
local deleted, index = 0, KEYS[#KEYS]
for i, lock in ipairs(ARGV) do
  if not redis.call('ZSCORE', index, lock) then
    deleted = deleted + redis.call('UNLINK', KEYS[i])
  end
end
return deleted
""")

#: Empty the database but keep the locks (invariant S6), if they are few. The script reads the locks
#: from the index, so that it misses none; the caller passes the companions of the locks that it saw
#: there before. A lock without its companions still works, but its waiters get it only by WATCH.
#:
#: KEYS  index; on a cluster none: there is one for each slot, and a node has many
#: ARGV  the most locks on each index; the most bytes to keep; 0; on a cluster the
#:       number of this node's slots, what the indexes are called, and the tags of the slots; then
#:       companion keys to keep where they exist
#: returns 1, or 0 if there is more to keep and nothing was done
#: atomic because no client may see a lock missing.
CLEAR = script("""
local most, room, slots, rest = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), 4
local indexes = {KEYS[1]}
if slots > 0 then
  for i = 5, slots + 4 do indexes[#indexes + 1] = ARGV[4] .. ':{' .. ARGV[i] .. '}' end
  rest = slots + 5
end
local kept = {}
local function keep(key)
  local dump = redis.pcall('DUMP', key)
  if not dump then return false end
  if type(dump) == 'table' then
    if not string.find(dump.err, 'non local') then error(dump.err) end
    return false  -- Its slot has moved to another node.
  end
  local left = redis.call('PTTL', key)
  if left == 0 then left = 1 elseif left < 0 then left = 0 end  -- RESTORE's 0 is forever.
  kept[#kept + 1] = {key, left, dump}
  room = room - #dump
  return true
end
for _, index in ipairs(indexes) do
  local before = room
  if keep(index) then
    local locks = redis.call('ZRANGE', index, 0, most + 1)
    local fence = redis.call('ZSCORE', index, 'django_redis_lock:fence')
    if #locks == 1 and fence and tonumber(fence) < now() then  -- The time is greater.
      kept[#kept], room = nil, before
    elseif #locks > most + 1 or room < 0 then
      return 0
    end
    for _, key in ipairs(locks) do keep(key) end
  end
end
for i = rest, #ARGV do keep(ARGV[i]) end
if room < 0 then return 0 end
redis.call('FLUSHDB', 'ASYNC')
for _, entry in ipairs(kept) do redis.call('RESTORE', entry[1], entry[2], entry[3], 'REPLACE') end
return 1
""")

#: The most keys that one script scans or deletes: about a millisecond.
KEYS_PER_SCRIPT = 500
#: The most locks, and bytes of locks with their companions, that CLEAR restores: about three
#: milliseconds. If there are more, the keys are deleted step by step.
MAX_KEPT_LOCKS, MAX_KEPT_BYTES = 25, 50_000


def indexed_locks(client: Any, most: int) -> list[bytes]:
    """The keys of at most ``most`` locks on the index; some may no longer be held."""
    found: list[bytes] = []
    for index in indexes(client, INDEX):
        if len(found) < most:
            asked = client.pipeline(transaction=False)  # It passes by a client-side cache.
            [keys] = asked.zrange(index, 0, most - len(found)).execute()  # And LAST_FENCE.
            found += filter(is_lock, map(as_bytes, keys))
    return found


def delete_matching(client: Any, pattern: bytes, step: int | None = None) -> int:
    """Delete the keys that match ``pattern``, as of SCAN, except those of held locks, and end the
    computations of matching keys. Keys that are set during the call may remain.

    Args:
        step: how many keys one script scans; at most KEYS_PER_SCRIPT, the default.

    Returns:
        the number of keys deleted.

    Raises:
        redis.exceptions.RedisError: a request failed. Some keys may be deleted.
    """
    step = min(step or KEYS_PER_SCRIPT, KEYS_PER_SCRIPT)
    # The flights first: a value from older data is then either there to be deleted, or will not be
    # stored (invariant C2).
    beginning = re.split(rb"[*?\[\\]", pattern, maxsplit=1)[0]
    own = {flight_key(key): token for key, token in own_flights().items()}
    for page in _scan(client, flights_pattern(pattern), step):
        if flights := [key for key in page if _is_flight(key, beginning)]:
            run_all(client, [Call(LET_GO, (key,), tuple(own.values())) for key in flights])
    index_of = server_of(client).index_of
    deleted = 0
    for page in _scan(client, pattern, step):
        by_index: dict[bytes, list[bytes]] = {}
        for key in filter(lambda key: key not in own, page):
            by_index.setdefault(index_of(INDEX, key), []).append(key)
        calls = [
            Call(DELETE_UNHELD, (*keys, index), tuple(map(_lock_of, keys)))
            for index, keys in by_index.items()
        ]
        deleted += sum(map(int, run_all(client, calls)))
    return deleted


def _scan(client: Client, pattern: bytes, step: int) -> Iterator[list[bytes]]:
    """In pages, without the keys of the whole database; on a cluster those of all primaries."""
    for node in server_of(client).primaries():
        cursor = b""
        while cursor != b"0":
            call = Call(SCAN, (), (cursor or b"0", pattern, step))
            reply = run_at(client, node, call)
            cursor = as_bytes(reply[0])
            if page := [key for key in map(as_bytes, reply[1]) if not is_of_a_database(key)]:
                yield page


def _is_flight(key: bytes, beginning: bytes) -> bool:
    """Whether ``key`` is the flight of a cache key that begins with ``beginning``."""
    value = key_of_companion(key)
    return value is not None and value.startswith(beginning) and flight_key(value) == key


def _lock_of(key: bytes) -> bytes:
    """The key of the lock that ``key`` is a part of, or ``key`` itself."""
    if is_lock(key):
        return key
    place = key.removesuffix(b":owner")
    if key_of_companion(place) and is_lock(place):
        return place
    return key_of_companion(key) or key


def empty(client: Client) -> None:
    """Delete everything except held locks and metrics.

    Raises:
        redis.exceptions.RedisError: a request failed. Some keys may be deleted.
    """
    if not _emptied_at_once(client):
        delete_matching(client, b"*")


def _emptied_at_once(client: Client) -> bool:
    server, locks = server_of(client), indexed_locks(client, MAX_KEPT_LOCKS + 1)
    # Of a slot that is being moved, CLEAR could not keep the locks.
    if len(locks) > MAX_KEPT_LOCKS or server.is_moving_slots():
        return False
    kept = [*(part for key in locks for part in keys_at(key).own[1:]), *FIGURES.values()]
    kept += (quorum_fence_key(key) for key in locks if key_of_companion(key) is None)
    kept += map(flight_key, own_flights())
    bounds = (MAX_KEPT_LOCKS, MAX_KEPT_BYTES)
    if not server.is_cluster:
        return bool(run(client, Call(CLEAR, (INDEX,), (*bounds, 0, *kept))).value)
    done = True
    for node, slots in server.primaries().items():
        tags = [slot_tag(slot) for slot in slots]
        here = [key for key in kept if server.seen_at((key,)) is node]
        clearing = Call(CLEAR, (), (*bounds, len(tags), INDEX, *tags, *here))
        done = bool(run_at(client, node, clearing)) and done
    return done
