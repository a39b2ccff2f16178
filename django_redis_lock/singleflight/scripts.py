"""The Lua scripts of cache values and their flights, in the manner of ``protocol.lock_scripts``.

A script gets those keys of a value that it needs, in this order: the value's own, its flight, the
flight's stream. (DELETE gets several values first.) Times are milliseconds; EXPIRE_AT also takes
seconds.
"""

from typing import NamedTuple

from ..protocol import script, shared

# let_go(flight, first): a write ends the computation, if one is under way, and its followers look
# again at once. Their stream's name begins as the flight's does. A user who may write but not do
# this is let be. ARGV, from `first` on, has the tokens of the computations that the writer is part
# of: a write by the computation itself is older than its result.
#
# await(flight, token, left): note that somebody waits for the computation with this token, whose
# flight has so many ms left. Its stream begins with an entry that followers do not read, 0-1: most
# computations have no followers, and then a stream would only fill the memory. It lasts longer than
# a follower waits before it looks again.
STREAMS = shared("""
local function stream_of(flight, token)
  return string.sub(flight, 1, #flight - 6) .. 'done:' .. token
end

local function await(flight, token, left)
  local stream = stream_of(flight, token)
  redis.pcall('XADD', stream, '0-1', 'outcome', 'awaited')
  redis.pcall('PEXPIRE', stream, math.max(left, 10000))
end
""")
LETTING_GO = shared("""
local function let_go(flight, first)
  local token = redis.call('GET', flight)
  if not token then return end
  for i = first, #ARGV do
    if ARGV[i] == token then return end
  end
  redis.call('DEL', flight)
  if string.sub(token, 1, 1) == '!' then return end
  local stream = stream_of(flight, token)
  redis.pcall('XADD', stream, '*', 'outcome', 'ended')
  redis.pcall('PEXPIRE', stream, '10000')
end
""")

# seen(key): what tells the value at `key` from one that is written later: a digest ('' if there is
# none), and when it expires (server ms; 0 never). Of a large value the digest covers the length and
# both ends only, so that it costs about 30 microseconds at most.
#
# unchanged(key, digest, at): whether the value was neither written nor deleted since it was seen.
# A large one's expiry counts too, give or take what clocks and scripts take.
_SEEN = shared("""
local function seen(key)
  local left = redis.call('PTTL', key)
  if left == -2 then return '', '0' end
  local length, digest = redis.pcall('STRLEN', key), 'not a string'
  if type(length) == 'number' then
    if length <= 8192 then
      digest = redis.sha1hex(redis.call('GET', key))
    else
      local head = redis.call('GETRANGE', key, 0, 4095)
      local tail = redis.call('GETRANGE', key, -4096, -1)
      digest = length .. ':' .. redis.sha1hex(head .. tail)
    end
  end
  return digest, left < 0 and '0' or string.format('%d', now() / 1000 + left)
end

local function unchanged(key, digest, at)
  if redis.call('EXISTS', key) == 0 then
    return digest == '' or (at ~= '0' and tonumber(at) <= now() / 1000 + 100)
  end
  if digest == '' then return false end
  local digest_now, at_now = seen(key)
  return digest_now == digest and (#digest == 40 or math.abs(at_now - at) <= 100)
end
""")

#: Start the computation of a missing or stale cache value, or learn who computes it.
#:
#: KEYS  the value's key, its flight; the stream of the flight that this caller has waited for
#: ARGV  token, lifetime of the flight, the value's remaining lifetime up to which it is stale (0:
#:       it never is); the SHA-1 of a value that this caller cannot decode, so that it counts as
#:       missing ('' for none)
#: returns {2, value} it is there after all, or the leader has not stored it, {1} this caller leads,
#:         {1, digest, expiry} it leads, and there is a stale value: see seen,
#:         {0, the leader's token, remaining lifetime of its flight}, or
#:         {3, message} the last computation has just failed, and error_ttl is not over
#: atomic because of two callers that both find nothing only one may lead (invariant C1).
TAKE_FLIGHT = script("""
local value = redis.call('GET', KEYS[1])
local function is_readable(found) return ARGV[4] == '' or redis.sha1hex(found) ~= ARGV[4] end
if value and is_readable(value) then
  local left = redis.call('PTTL', KEYS[1])
  if left < 0 or left > tonumber(ARGV[3]) then return {2, value} end
end
local ended = KEYS[3] and redis.pcall('XREAD', 'STREAMS', KEYS[3], '0-1')
if ended and ended[1] then
  local fields = ended[1][2][1][2]
  if fields[3] == 'value' and is_readable(fields[4]) then return {2, fields[4]} end
end
local leader = redis.call('GET', KEYS[2])
if leader and string.sub(leader, 1, 1) == '!' then return {3, string.sub(leader, 2)} end
if leader and leader ~= ARGV[1] then
  local left = redis.call('PTTL', KEYS[2])
  await(KEYS[2], leader, left)
  return {0, leader, left}
end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
if value then return {1, seen(KEYS[1])} end
return {1}
""")

#: Most computations: nothing was there, and nothing is; see STORE.
STORE_FIRST = """
if not ARGV[5] and tonumber(ARGV[3]) > 0 and redis.call('GET', KEYS[2]) == ARGV[1]
  and redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3], 'NX') then
  redis.call('DEL', KEYS[2])
  if redis.call('EXISTS', KEYS[3]) == 1 then
    redis.pcall('XADD', KEYS[3], '*', 'outcome', 'stored')
    redis.pcall('PEXPIRE', KEYS[3], ARGV[4])
  end
  return 1
end

"""

#: Store what the leader computed, unless a write or a delete has ended its flight, or a client that
#: does not use flights has changed the value; wake the followers, if there are any.
#:
#: KEYS  the value's key, its flight, the stream of this flight
#: ARGV  token, value, the value's lifetime (0 none, negative: it is not stored, and the followers
#:       get it with the stream), lifetime of the stream; these are left out if they say nothing:
#:       digest and expiry of the value that was there when the flight began (see seen), what the
#:       computation itself did to the value ('deleted', 'written', ''), and its trace for the
#:       followers
#: returns 1 stored, 0 not this leader's flight any more, or another client changed the value
#: atomic because a write between the check and the store would be overwritten (invariant C2).
STORE = script(
    """
local mine = redis.call('GET', KEYS[2]) == ARGV[1]
local done = {'XADD', KEYS[3], '*', 'outcome', 'ended'}
local expected = ARGV[7] == 'written' or unchanged(KEYS[1], ARGV[5] or '', ARGV[6] or '0')
  or (ARGV[7] == 'deleted' and redis.call('EXISTS', KEYS[1]) == 0)
if mine and not expected then
  redis.call('DEL', KEYS[2])
  mine = false
end
if mine then
  local lifetime = tonumber(ARGV[3])
  if lifetime > 0 then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  elseif lifetime == 0 then
    redis.call('SET', KEYS[1], ARGV[2])
  else
    if ARGV[7] ~= 'written' then redis.call('DEL', KEYS[1]) end
    done[6] = 'value'; done[7] = ARGV[2]
  end
  redis.call('DEL', KEYS[2])
  done[5] = 'stored'
end
if redis.call('EXISTS', KEYS[3]) == 0 then return mine and 1 or 0 end
if ARGV[8] then done[#done + 1] = 'trace'; done[#done + 1] = ARGV[8] end
redis.pcall(unpack(done))  -- Out of memory, it is refused to one who does not lead any more.
redis.pcall('PEXPIRE', KEYS[3], ARGV[4])
return mine and 1 or 0
""",
    first=STORE_FIRST,
)

#: The leader has no value to give: its computation failed.
#:
#: KEYS  the value's key, its flight, the stream of this flight
#: ARGV  token, lifetime of the stream, why it failed, milliseconds for which no caller tries again
#:       (0: one may at once). A write to the key ends that too, as it is stored as the flight.
#: returns 1, or 0 if the flight was not this leader's any more
#: atomic because another leader's flight must not be ended.
END_FLIGHT = script("""
local mine = redis.call('GET', KEYS[2]) == ARGV[1]
if mine then
  redis.call('DEL', KEYS[2])  -- Out of memory, this is not refused, and so the rest is not either.
  if ARGV[4] ~= '0' then redis.call('SET', KEYS[2], '!' .. ARGV[3], 'PX', ARGV[4]) end
end
redis.pcall('XADD', KEYS[3], '*', 'outcome', 'failed')
redis.pcall('PEXPIRE', KEYS[3], ARGV[2])
return mine and 1 or 0
""")

#: A value with its remaining lifetime, in one trip.
#:
#: KEYS  the value's key        ARGV  none
#: returns {value, PTTL} or nil
#: atomic because a lifetime of another value would be of no use.
READ = script("""
local value = redis.call('GET', KEYS[1])
return value and {value, redis.call('PTTL', KEYS[1])}
""")

#: Lead from now on, in place of another leader or together with it.
#:
#: KEYS  the value's key, its flight
#: ARGV  token, lifetime, the token of the leader to replace (left out: any, or none; '': none)
#: returns {digest, expiry} of the value it is to replace (see seen), and the token of a leader that
#:         goes on leading; or nil if the leader to replace does not lead any more: another does, or
#:         its flight has ended, perhaps with a value
#: atomic because a write between the two would count as older.
TAKE_OVER = script("""
local leader = redis.call('GET', KEYS[2])
local digest, at = seen(KEYS[1])
if ARGV[3] and leader ~= ARGV[3] and leader ~= ARGV[1] then
  if ARGV[3] ~= '' then return nil end
  if leader and string.sub(leader, 1, 1) ~= '!' then return {digest, at, leader} end
end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {digest, at}
""")

#: Keep a flight alive while its leader computes, and say who that is. A flight that has ended
#: leaves the index by itself: at its end, with one of the next flights that are renewed.
#:
#: KEYS  the flight, its leader, the index of flights
#: ARGV  token, lifetime, the value's key, the milliseconds for which its leader has been computing,
#:       and the leader's fields and values
#: returns 1, or 0 if the flight is not this leader's any more
#: atomic because another leader's flight must not be lengthened.
RENEW_FLIGHT = script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('DEL', KEYS[2])
local since = string.format('%.6f', now() / 1000000 - ARGV[4] / 1000)
put('HSET', KEYS[2], 'since', since, 'seen', string.format('%d', now()), unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[2], ARGV[2])
local at = math.floor(now() / 1000)
local over = redis.pcall('ZRANGEBYSCORE', KEYS[3], '-inf', '(' .. at, 'LIMIT', 0, 64)
if #over > 0 then redis.call('ZREM', KEYS[3], unpack(over)) end
put('ZADD', KEYS[3], at + ARGV[2], ARGV[3])
return 1
""")

#: SET, and end the flight of what it writes: an older computation must not overwrite it.
#:
#: KEYS  the value's key, its flight
#: ARGV  value, lifetime ('' none), 'NX', 'XX' or '', then tokens for let_go
#: returns 1, or 0 if NX or XX kept it from writing; then the flight goes on
#: atomic because between the two a computation could begin that the write should have ended.
WRITE = script("""
local set = {'SET', KEYS[1], ARGV[1]}
if ARGV[2] ~= '' then set[4] = 'PX'; set[5] = ARGV[2] end
if ARGV[3] ~= '' then set[#set + 1] = ARGV[3] end
if not redis.call(unpack(set)) then return 0 end
let_go(KEYS[2], 4)
return 1
""")

#: DEL, and end the flights of what it deletes.
#:
#: KEYS  the values' keys, then the flight of each
#: ARGV  tokens for let_go
#: returns the number of values deleted
#: atomic for the same reason as WRITE.
DELETE = script("""
local deleted, half = 0, #KEYS / 2
for i = 1, half do
  deleted = deleted + redis.call('DEL', KEYS[i])
  let_go(KEYS[half + i], 1)
end
return deleted
""")

#: Let a value be stale from now on, and end its flight: what that computes may be older.
#:
#: KEYS  the value's key, its flight
#: ARGV  milliseconds for which the value is stale (it is gone after that, or earlier as before),
#:       then tokens for let_go
#: returns 1, or 0 if there is no value
#: atomic for the same reason as WRITE.
MARK_STALE = script("""
local left = redis.call('PTTL', KEYS[1])
if left == -1 or left > tonumber(ARGV[1]) then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
let_go(KEYS[2], 2)
return left == -2 and 0 or 1
""")

#: Let a value expire at a time. If that has passed, the value is deleted and its flight ends, also
#: if there is no value yet.
#:
#: KEYS  the value's key, its flight
#: ARGV  'EXPIREAT' or 'PEXPIREAT', the time, then tokens for let_go
#: returns 1, or 0 if there is no such value
#: atomic for the same reason as WRITE.
EXPIRE_AT = script("""
local found = redis.call(ARGV[1], KEYS[1], ARGV[2])
local unit = ARGV[1] == 'EXPIREAT' and 1000000 or 1000
if ARGV[2] * unit <= now() then let_go(KEYS[2], 3) end
return found
""")

#: End a flight for a write of another kind.
#:
#: KEYS  the flight        ARGV  tokens for let_go        returns 1
#: atomic because another flight may begin.
LET_GO = script("let_go(KEYS[1], 1) return 1")

#: End a flight that a write has seen, after the write: see ``cache.connections``.
#:
#: KEYS  the flight        ARGV  its token
#: returns 1, or 0 if it has ended, perhaps with a value that is older than the write
#: atomic because another flight may begin.
END_SEEN = script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
let_go(KEYS[1], 2)
return 1
""")


class Before(NamedTuple):
    """What was at a value's key when its flight began; see ``seen`` in the scripts.

    Attributes:
        digest: of the value; empty if there was none.
        expires_at: server time in ms; 0 never.
        leader: the token of a leader that goes on leading the same flight; empty if none does.
    """

    digest: bytes | str = ""
    expires_at: bytes | str = "0"
    leader: bytes | str = b""


NOTHING = Before()
