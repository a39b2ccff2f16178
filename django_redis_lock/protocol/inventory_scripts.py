"""The Lua scripts that look at locks and flights for people, in the manner of ``lock_scripts``."""

from .lock_scripts import RESET_BODY
from .place_scripts import _library as place_library
from .script import script, shared, shared_functions

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

# is_token(value): whether it has the form that this package and redis-py give to tokens.
#
# is_known(key, value, index, owner, only): whether `value` at `key` is the token of a lock, as far
# as that is known without its id: the index has a lock there, and the value has the form, or was
# chosen and is not described yet. `only`: '1' where the form alone is enough. A stale entry counts
# for a token: redis-py does not know the index, and may have extended the lock.
_IS_KNOWN = """
local function is_token(value)
  return #string.match(value, '^[0-9a-f]*') == 32
    and string.find(' .', string.sub(value, 33, 33), 1, true) ~= nil
end

local function is_known(key, value, index, owner, only)
  local ends = redis.pcall('ZSCORE', index, key)
  if is_token(value) then return only == '1' or type(ends) == 'string' end
  return type(ends) == 'string' and tonumber(ends) * 1000 >= now()
    and type(redis.pcall('HGET', owner, 'attempt')) == 'string'
    and type(redis.pcall('HGET', owner, 'id')) ~= 'string'
end
"""
for _library in (shared_functions, place_library):
    shared(_IS_KNOWN, _library)

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
    and (ARGV[2] == '' or string.find(string.lower(key), ARGV[2], 1, true))
end
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

#: As RESET, for callers who do not know whether there is a lock: nothing else ends.
#:
#: KEYS  lock keys
#: ARGV  as RESET's, then the id of the token's owner; '1' where only locks are stored
#: returns as RESET
#: atomic because a value may take the place of the lock at any time.
RESET_KNOWN_BODY = f"""
local value = redis.pcall('GET', KEYS[1])
if type(value) ~= 'string' or redis.pcall('HGET', KEYS[4], 'id') ~= ARGV[5]
  and not is_known(KEYS[1], value, KEYS[5], KEYS[4], ARGV[6]) then
  return 0
end
{RESET_BODY}"""
RESET_KNOWN = script(RESET_KNOWN_BODY)

#: As RESET_KNOWN, of one place.
#:
#: KEYS  lock keys of the place
#: ARGV  as RESET_KNOWN's, then the limit
#: returns as RESET
#: atomic for the same reason as RESET_KNOWN.
PLACE_RESET_KNOWN = script(RESET_KNOWN_BODY, place_library)

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

#: Note what has happened to a lock. Releases by its holders push out no other events, unless most
#: are others. (A list would want commands that those who may lock need not have the right to.)
#:
#: KEYS  events: a line for each, the latest first
#: ARGV  what has happened, in one line; how many events to keep; for how many milliseconds; when it
#:       was, in microseconds ('' for now); what must not be noted yet ('' for nothing)
#: returns 1, or 0 if that was noted
#: atomic because two that note at the same time must not write over each other.
RECORD_EVENT = script("""
local at = ARGV[4] ~= '' and ARGV[4] or string.format('%.0f', now())
local lines, most, releases, last = {at .. ' ' .. ARGV[1]}, tonumber(ARGV[2]), 0, 0
local kept = redis.pcall('GET', KEYS[1])
if type(kept) ~= 'string' then kept = '' end  -- A key of another kind is replaced.
if ARGV[5] ~= '' and string.find(kept, ARGV[5], 1, true) then return 0 end
for line in string.gmatch(kept, '[^\\n]+') do
  lines[#lines + 1] = line
  if string.find(line, '"what": "released"', 1, true) then releases, last = releases + 1, #lines end
end
local gone = releases > most / 2 and last or #lines
if #lines > most then
  for i = gone, #lines do lines[i] = lines[i + 1] end
end
local left = math.max(redis.call('PTTL', KEYS[1]), tonumber(ARGV[3]))
redis.call('SET', KEYS[1], table.concat(lines, '\\n'), 'PX', string.format('%.0f', left))
return 1
""")

#: Note that a process is alive.
#:
#: KEYS  its heartbeat        ARGV  for how many milliseconds to keep it        returns 1
#: atomic because it is the server's time that is kept.
HEARTBEAT = script("""
redis.call('SET', KEYS[1], string.format('%.0f', now()), 'PX', ARGV[1])
return 1
""")

#: When processes gave their last heartbeats.
#:
#: KEYS  heartbeats        ARGV  none
#: returns {server time in microseconds, then what HEARTBEAT keeps of each, '' if nothing}
#: atomic because the ages are reckoned from one reading of the clock.
HEARTBEATS = script("""
local found = {now()}
for i, key in ipairs(KEYS) do
  local beat = redis.pcall('GET', key)
  found[i + 1] = type(beat) == 'string' and beat or ''
end
return found
""")
