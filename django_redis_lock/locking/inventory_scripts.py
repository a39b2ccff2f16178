"""The Lua scripts that look at locks and flights for people, in the manner of ``scripts``."""

from __future__ import annotations

from .scripts import _NOW, _UNTAKEN, _VANISHED, script

__all__ = [
    "DESCRIBE",
    "DESCRIBE_FLIGHTS",
    "HEARTBEAT",
    "HEARTBEATS",
    "LIST",
    "LIST_FLIGHTS",
    "NOTE",
    "WAITING",
]

#: Which locks are held, by the index, latest end first. Entries whose lock is gone are dropped. The
#: script finds the locks in the index, as CLEAR does: not for a cluster, where each is elsewhere.
#:
#: KEYS  index
#: ARGV  what the keys wanted begin with, how many to return, how many entries to look at, at most;
#:       what is to be found in the keys, in lower case ('' for anything)
#: returns {number of them seen, 1 if the whole index was looked at else 0, their keys}
#: atomic because an entry must not be dropped for a lock that is taken a moment later.
LIST = script("""
local prefix, limit, most, wanted = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local whole = redis.call('ZCARD', KEYS[1]) <= most and 1 or 0
local seen, keys = 0, {}
for _, key in ipairs(redis.call('ZRANGE', KEYS[1], 0, most - 1, 'REV')) do
  if string.sub(key, 1, #prefix) == prefix
    and (wanted == '' or string.find(string.lower(key), wanted, 1, true)) then
    if redis.call('EXISTS', key) == 0 then
      redis.call('ZREM', KEYS[1], key)
    else
      seen = seen + 1
      if seen <= limit then keys[seen] = key end
    end
  end
end
return {seen, whole, keys}
""")

#: What is to be said of locks that somebody owns. What is no lock any more is passed over.
#:
#: KEYS  of each lock in turn: the lock, grants, waiters, fence, owner
#: returns {server time in microseconds, then of each lock that somebody owns {its place among those
#:         asked for, from 1; the token; remaining lifetime as PTTL gives it; owner's fields and
#:         values; what the fence's key holds; number of live waiters}}
#: atomic because token, owner and lifetime must be of one and the same acquisition.
DESCRIBE = script(
    """
local at = now()
local found = {at}
for i = 1, #KEYS, 5 do
  local holder = redis.pcall('GET', KEYS[i])
  if type(holder) == 'string' and not untaken(holder, KEYS[i + 1]) then
    found[#found + 1] = {
      (i + 4) / 5,
      holder,
      redis.call('PTTL', KEYS[i]),
      redis.call('HGETALL', KEYS[i + 4]),
      redis.call('GET', KEYS[i + 3]) or '',
      redis.call('ZCOUNT', KEYS[i + 2], math.floor(at / 1000), '+inf'),
    }
  end
end
return found
""",
    _NOW,
    _UNTAKEN,
)

#: Which computations are under way, latest end first: those whose end has not come yet. One that
#: was shorter than half a second was never on the index, one that has just ended may still be.
#:
#: KEYS  index of flights
#: ARGV  as LIST's but for the number of entries, which is bounded by their lifetimes
#: returns as LIST
LIST_FLIGHTS = script(
    """
local prefix, limit, most, wanted = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local at = math.floor(now() / 1000)
local whole = redis.call('ZCOUNT', KEYS[1], at, '+inf') <= most and 1 or 0
local seen, keys = 0, {}
for _, key in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', at, 'LIMIT', 0, most)) do
  if string.sub(key, 1, #prefix) == prefix
    and (wanted == '' or string.find(string.lower(key), wanted, 1, true)) then
    seen = seen + 1
    if seen <= limit then keys[seen] = key end
  end
end
return {seen, whole, keys}
""",
    _NOW,
)

#: What is to be said of flights. A failure that is remembered is none, and what has ended is passed
#: over.
#:
#: KEYS  of each flight in turn: the flight, its leader
#: returns {server time in microseconds, then of each flight {its place among those asked for, from
#:         1; the token; remaining lifetime as PTTL gives it; the leader's fields and values}}
#: atomic because token, leader and lifetime must be of one and the same flight.
DESCRIBE_FLIGHTS = script(
    """
local found = {now()}
for i = 1, #KEYS, 2 do
  local token = redis.pcall('GET', KEYS[i])
  if type(token) == 'string' and string.sub(token, 1, 1) ~= '!' then
    found[#found + 1] = {
      (i + 1) / 2, token, redis.call('PTTL', KEYS[i]), redis.call('HGETALL', KEYS[i + 1])
    }
  end
end
return found
""",
    _NOW,
)

#: Who waits for a lock, and what has happened last to it.
#:
#: KEYS  lock keys (index left out), then events
#: ARGV  how many waiters to return, at most
#: returns {server time in microseconds, ids of live waiters, what NOTE keeps, if the lock is free
#:         vanished()}
#: atomic because the owner's description must not be that of a holder who is just releasing.
WAITING = script(
    """
local at = math.floor(now() / 1000)
return {
  now(),
  redis.call('ZRANGEBYSCORE', KEYS[3], at, '+inf', 'LIMIT', 0, ARGV[1]),
  redis.call('GET', KEYS[6]) or '',
  redis.call('EXISTS', KEYS[1]) == 0 and vanished() or nil,
}
""",
    _NOW,
    _VANISHED,
)

#: Note what has happened to a lock. What is worth looking for keeps all of the notes longer than
#: what is not. (A list would want commands that those who may lock need not have the right to.)
#:
#: KEYS  events: a line for each, the latest first
#: ARGV  what has happened, in one line; how many events to keep; for how many milliseconds; when it
#:       was, in microseconds ('' for now)
#: returns 1
#: atomic because two that note at the same time must not write over each other.
NOTE = script(
    """
local at = ARGV[4] ~= '' and ARGV[4] or string.format('%.0f', now())
local lines = {at .. ' ' .. ARGV[1]}
for line in string.gmatch(redis.call('GET', KEYS[1]) or '', '[^\\n]+') do
  if #lines < tonumber(ARGV[2]) then lines[#lines + 1] = line end
end
local left = math.max(redis.call('PTTL', KEYS[1]), tonumber(ARGV[3]))
redis.call('SET', KEYS[1], table.concat(lines, '\\n'), 'PX', string.format('%.0f', left))
return 1
""",
    _NOW,
)

#: Note that a process is alive.
#:
#: KEYS  its heartbeat        ARGV  for how many milliseconds to keep it        returns 1
#: atomic because it is the server's time that is kept.
HEARTBEAT = script(
    """
redis.call('SET', KEYS[1], string.format('%.0f', now()), 'PX', ARGV[1])
return 1
""",
    _NOW,
)

#: When processes gave their last heartbeats.
#:
#: KEYS  heartbeats        ARGV  none
#: returns {server time in microseconds, then what HEARTBEAT keeps of each, '' if nothing}
#: atomic because the ages are reckoned from one reading of the clock.
HEARTBEATS = script(
    """
local found = {now()}
for i, key in ipairs(KEYS) do
  local beat = redis.pcall('GET', key)
  found[i + 1] = type(beat) == 'string' and beat or ''
end
return found
""",
    _NOW,
)
