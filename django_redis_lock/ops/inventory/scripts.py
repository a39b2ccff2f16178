"""The Lua scripts that look at locks and flights for people, in the manner of ``lock_scripts``."""

from ...protocol import script, shared

# read(part, ...): what a command answers; nil where the key of that part of a lock is of another
# kind or too large, and then `broken` names the part.
_READ = shared("""
local broken
local function read(part, ...)
  local found = redis.pcall(...)
  if type(found) ~= 'table' or not found.err then return found end
  broken[#broken + 1] = part
  return nil
end
local function fields(part, key)
  local size = read(part, 'HLEN', key)
  if size and size > 64 then broken[#broken + 1] = part end
  return size and size <= 64 and redis.call('HGETALL', key) or {}
end
""")

# lock_of(key): the key of the lock with a place at `key`, or else `key`.
_LOCK_OF = shared("""
local function lock_of(key)
  if string.sub(key, 1, 1) ~= '{' then return key end
  return string.match(key, '^%{([^}]*)%}:place:%d+$')
    or string.match(key, '^%{[^}]*%}%|(.*)%|place:%d+$') or key
end
""")

# matches(key): whether it begins as ARGV[1] says, and has ARGV[2] in it.
_MATCHES = shared("""
local function matches(key)
  return string.sub(key, 1, #ARGV[1]) == ARGV[1]
    and string.find(string.lower(key), ARGV[2], 1, true)
end
""")

#: Find which of its slots' indexes a node of a cluster has.
#:
#: KEYS  none: they are in many slots, all of them this node's
#: ARGV  what each index is called, then the tags of the slots
#: returns the places of the tags, from 1, whose index has entries, besides the last fence
#: atomic because one script is cheaper than many requests: about three milliseconds.
EXISTING = script("""
local found = {}
for i = 2, #ARGV do
  -- A slot may have moved to another node.
  local index = ARGV[1] .. ':{' .. ARGV[i] .. '}'
  local entries = redis.pcall('ZCARD', index)
  if type(entries) == 'number' and entries > 0
    and (entries > 1 or not redis.call('ZSCORE', index, 'django_redis_lock:fence')) then
    found[#found + 1] = i - 1
  end
end
return found
""")

#: Which locks are held, by the index, latest end first. Entries whose lock is gone are dropped;
#: what this Redis user may not read is left out. Not for a cluster, where each lock is elsewhere.
#:
#: KEYS  index
#: ARGV  what the keys wanted begin with; what is to be found in them, in lower case ('' for
#:       anything); how many entries to pass over, how many to look at
#: returns {how many entries to pass over the next time, how many there are after them, the keys
#:         wanted}
#: atomic because an entry must not be dropped for a lock that is taken a moment later.
LIST = script("""
local start = tonumber(ARGV[3])
local keys, dropped = {}, 0
local entries = redis.call('ZRANGE', KEYS[1], start, start + ARGV[4] - 1, 'REV')
for _, key in ipairs(entries) do
  if key ~= 'django_redis_lock:fence' and matches(lock_of(key)) then
    local there = redis.pcall('EXISTS', key)
    if there == 0 then
      redis.call('ZREM', KEYS[1], key)
      dropped = dropped + 1
    elseif there == 1 then
      keys[#keys + 1] = key
    end
  end
end
local passed = start + #entries - dropped
return {passed, redis.call('ZCARD', KEYS[1]) - passed, keys}
""")

#: Describe the locks that are held; others are left out, and of other strings there is only the
#: index.
#:
#: KEYS  of each lock in turn: lock keys
#: ARGV  of each lock in turn: '1' where only locks are stored, so that a token's form is enough
#: returns {server time in microseconds, then of each lock that is held {its index among those
#:         asked for, from 1; the token; remaining lifetime as PTTL gives it; owner's fields and
#:         values; the parts that cannot be read; number of live waiters; 1, or 0 if it is a lock
#:         only if the description is of this token}}
#: atomic because token, owner and lifetime must be of one and the same acquisition.
DESCRIBE = script("""
local at = now()
local found = {at}
for i = 1, #KEYS, 5 do
  broken = {}
  local number = (i + 4) / 5
  local holder = redis.pcall('GET', KEYS[i])
  local held = type(holder) == 'string'
  local grants = read('grants', 'LLEN', KEYS[i + 1]) or 0
  for n = 1, grants do
    local grant = redis.call('LINDEX', KEYS[i + 1], n - 1)
    held = held and string.sub(grant, 1, #holder + 1) ~= holder .. ':'
  end
  if held then
    local known = is_known(KEYS[i], holder, KEYS[i + 4], KEYS[i + 3], ARGV[number])
    local owner = fields('owner', KEYS[i + 3])
    found[#found + 1] = (known or #owner > 0) and {
      number,
      holder,
      redis.call('PTTL', KEYS[i]),
      owner,
      broken,
      read('waiters', 'ZCOUNT', KEYS[i + 2], math.floor(at / 1000), '+inf') or 0,
      known and 1 or 0,
    } or {number}
  end
end
return found
""")

#: Which computations are under way, latest end first. One that was shorter than half a second was
#: never on the index, one that has just ended may still be.
#:
#: KEYS  index of flights
#: ARGV  as LIST's
#: returns as LIST
LIST_FLIGHTS = script("""
local at = math.floor(now() / 1000)
local keys = {}
local entries = redis.call(
  'ZREVRANGEBYSCORE', KEYS[1], '+inf', at, 'LIMIT', ARGV[3], ARGV[4]
)
for _, key in ipairs(entries) do
  if matches(key) and tonumber(redis.pcall('EXISTS', key)) then
    keys[#keys + 1] = key
  end
end
local passed = ARGV[3] + #entries
return {passed, redis.call('ZCOUNT', KEYS[1], at, '+inf') - passed, keys}
""")

#: Describe flights; what has ended, remembered failures and other data are passed over.
#:
#: KEYS  of each flight in turn: the flight, its leader
#: returns {server time in microseconds, then of each flight {its place among those asked for, from
#:         1; the token; remaining lifetime as PTTL gives it; the leader's fields and values; the
#:         parts that cannot be read}}
#: atomic because token, leader and lifetime must be of one and the same flight.
DESCRIBE_FLIGHTS = script("""
local found = {now()}
for i = 1, #KEYS, 2 do
  broken = {}
  local token = redis.pcall('GET', KEYS[i])
  if type(token) == 'string' and is_token(token) then
    found[#found + 1] = {
      (i + 1) / 2, token, redis.call('PTTL', KEYS[i]), fields('leader', KEYS[i + 1]), broken
    }
  end
end
return found
""")

#: Who waits for a lock, and what has happened last to it.
#:
#: KEYS  lock keys (index left out), then events
#: ARGV  how many waiters to return, at most
#: returns {server time in microseconds, ids of live waiters, what NOTE keeps, the type of other
#:         data at the lock's key ('' if there is none, '?' without the right to ask), if the lock
#:         is free vanished()}
#: atomic because the owner's description must not be that of a holder who is just releasing.
WAITING = script("""
local at = math.floor(now() / 1000)
broken = {}
local readable = #fields('owner', KEYS[4]) > 0
return {
  now(),
  read('waiters', 'ZRANGEBYSCORE', KEYS[3], at, '+inf', 'LIMIT', 0, ARGV[1]) or {},
  read('events', 'GET', KEYS[5]) or '',
  type(redis.pcall('GET', KEYS[1])) == 'table' and (redis.pcall('TYPE', KEYS[1]).ok or '?') or '',
  readable and redis.call('EXISTS', KEYS[1]) == 0 and vanished() or nil,
}
""")

#: The last losses, crashes and forced releases, the latest last.
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
