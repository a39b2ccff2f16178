"""The scripts of a lock with ``limit=N``: N places, of which each has one holder.

A place has a key for its token and one for its owner's description; ``LockKeys.at_place`` names
them. Place 1 has the keys of a plain lock. Grants and waiters are the name's, so that waiters get
places in the order of their arrival, whichever is released. A grant for another place than the
first ends with ``/`` and the place's number.

A place is passed on only within the limit of the process that releases it. So of different limits
the larger one holds, until its processes have ended and released their places.

The scripts are those of ``lock_scripts`` with other functions for what concerns places. The limit
is the last argument. The functions act on the place whose keys are in KEYS[1] and KEYS[4].
"""

from __future__ import annotations

from ..protocol.holder_scripts import IS_KNOWN, RECORD, RESET_BODY
from ..protocol.lock_scripts import (
    ACQUIRE_BODY,
    EXTEND_BODY,
    LEAVE_BODY,
    RELEASE_BODY,
    RELEASE_FIRST,
    TAKE_GRANT_BODY,
    common,
)
from ..protocol.script import Library, script, shared

_library: Library = []

# use_place(number): the other functions act on this place from now on; 0 for the one that the
# script was called with, whose keys are `name` and `owner`: place 1, or, in what is sent for a
# holder (RELEASE, RESET, EXTEND), perhaps its place.
#
# token_at(number): the same, and the token at the place, false if there is none. What is no token
# is somebody's data at the key of place 1, and an error; at another place it will be replaced.
#
# use_place_with(token): use the place that the token holds, if it is not the present one; returns
# what is there: a caller whose reply was lost does not know its place, and neither does one that
# acts for a token.
_USE_PLACE = shared(
    """
local name, owner, places = KEYS[1], KEYS[4], string.sub(KEYS[2], 1, -7) .. 'place:'
local function use_place(number)
  if number < 2 then
    KEYS[1], KEYS[4] = name, owner
  else
    KEYS[1], KEYS[4] = places .. number, places .. number .. ':owner'
  end
end
local function place_number()
  if string.sub(KEYS[1], 1, #places) ~= places then return 1 end
  return tonumber(string.sub(KEYS[1], #places + 1))
end

local function max_places() return tonumber(ARGV[#ARGV]) end

local function token_at(number)
  use_place(number)
  if number == 1 then return redis.call('GET', KEYS[1]) end
  local token = redis.pcall('GET', KEYS[1])
  return type(token) == 'string' and token
end

local function use_place_with(token)
  local here = redis.call('GET', KEYS[1])
  if here == token then return here end
  for number = 2, max_places() do
    if token_at(number) == token then return token end
  end
  use_place(0)
  return here
end
""",
    _library,
)

# untaken_grants(): those on the list, none if it is unreadable. void_grants(): those of the present
# place do not count any more. grant_suffix(): as in lock_scripts.
_GRANTS = shared(
    """
local function untaken_grants()
  local size, found = redis.pcall('LLEN', KEYS[2]), {}
  if type(size) ~= 'number' then return found end
  for at = 1, size do found[at] = redis.call('LINDEX', KEYS[2], at - 1) end
  return found
end

local function place_of(grant) return tonumber(string.match(grant, ':%d+/(%d+)$') or 1) end

local function untaken(holder, grants)
  for _, grant in ipairs(grants or untaken_grants()) do
    if string.sub(grant, 1, #holder + 1) == holder .. ':' then return true end
  end
  return false
end

local function void_grants()
  local grants, number, kept = untaken_grants(), place_number(), {}
  for _, grant in ipairs(grants) do
    if place_of(grant) ~= number then kept[#kept + 1] = grant end
  end
  if #kept > 0 and #kept == #grants then return end
  local left = #kept > 0 and redis.call('PTTL', KEYS[2]) or 0
  redis.call('DEL', KEYS[2])
  if left > 0 then
    redis.call('RPUSH', KEYS[2], unpack(kept))
    redis.call('PEXPIRE', KEYS[2], left)
  end
end

local function grant_suffix()
  local number = place_number()
  if number > max_places() then return nil end
  return number > 1 and '/' .. number or ''
end
""",
    _library,
)

_library += common
shared(IS_KNOWN, _library)
shared(RECORD, _library)

# waits_no_more(waiter): leaves the queue. Two releases may have made grants for it; those that have
# no waiter are taken back.
_UNREGISTER = shared(
    """
local function waits_no_more(waiter)
  if waiter == '' then return end
  redis.pcall('ZREM', KEYS[3], waiter)
  local grants = untaken_grants()
  if #grants == 0 or is_awaited() then return end  -- Nearly always.
  redis.call('DEL', KEYS[2])
  for _, grant in ipairs(grants) do
    local token = token_at(place_of(grant))
    if token and untaken(token, grants) then
      redis.call('DEL', KEYS[1])
      redis.pcall('ZREM', KEYS[5], KEYS[1])
    end
  end
  use_place(0)
end
""",
    _library,
)

# try(token, lifetime, attempt): what take returns if a place could be taken, else nil. A token
# holds one place at most.
_TRY_PLACE = shared(
    """
local function choose(token, attempt)
  local keys, free = {name}, nil
  for number = 2, max_places() do keys[number] = places .. number end
  local held = redis.call('MGET', unpack(keys))
  held[1] = held[1] or redis.call('GET', name)  -- An error if it is no token.
  for number, holder in ipairs(held) do
    if holder == token then
      use_place(number)
      if attempt ~= '' and not by_attempt(attempt, false) then return nil end
      return number, holder
    end
    if not holder then free = free or number end
  end
  if free then return free, false end
  local grants = untaken_grants()
  for number, holder in ipairs(held) do
    if untaken(holder, grants) then return number, holder end
  end
end

local function try(token, lifetime, attempt)
  local number, holder = choose(token, attempt)
  if not number then return nil end
  use_place(number)
  if holder then redis.call('DEL', KEYS[4]) end  -- Never refused, so the rest is not either.
  return take(token, lifetime, attempt, holder, number)
end
""",
    _library,
)

# shortest_left(): the lifetime left to the place that ends first, as PTTL gives it.
_LIFETIME_LEFT = shared(
    """
local function shortest_left()
  local least = -1
  for number = 1, max_places() do
    local left = redis.call('PTTL', number == 1 and name or places .. number)
    if left >= 0 and (least < 0 or left < least) then least = left end
  end
  return least
end
""",
    _library,
)

#: The first parts, for nearly all calls: all places are held; nothing is left of a former holder.
PLACE_ACQUIRE_FIRST = """
local number, holder = choose(ARGV[1], ARGV[3])
if not number then
  if ARGV[4] ~= '' then register(ARGV[4], tonumber(ARGV[5])) end
  return string.format('%d %d', shortest_left(), now())
end
use_place(number)

local fresh = not holder and ARGV[2] ~= '0' and ARGV[3] == ''
if fresh and redis.call('EXISTS', KEYS[2], KEYS[4]) == 0 then
  local fence = set_new(ARGV[1], ARGV[2])
  if fence then return number == 1 and fence or {number, fence, fence} end
end
"""

#: As ACQUIRE: take a free place, or one whose grant was not taken yet.
#:
#: KEYS  lock keys
#: ARGV  as ACQUIRE's, then the limit
#: returns as ACQUIRE, with the number of the place instead of 1, and the lifetime left to the place
#:         that ends first
#: atomic for the same reason as ACQUIRE.
PLACE_ACQUIRE = script(ACQUIRE_BODY, _library, first=PLACE_ACQUIRE_FIRST)

#: As LEAVE.
#:
#: KEYS  lock keys, then the waiter's wake list
#: ARGV  as LEAVE's, then the limit
#: returns as LEAVE, with the number of the place instead of 1, and the lifetime left to the place
#:         that ends first
#: atomic for the same reason as LEAVE.
PLACE_LEAVE = script(LEAVE_BODY, _library, urgent=True)

#: As TAKE_GRANT.
#:
#: KEYS  lock keys
#: ARGV  as TAKE_GRANT's, then the number of the grant's place
#: returns 1, or 0 if the grant is over
#: atomic for the same reason as TAKE_GRANT.
PLACE_TAKE_GRANT = script(
    f"waits_no_more(ARGV[3]) use_place(tonumber(ARGV[7])){TAKE_GRANT_BODY}", _library
)

#: As WATCH: grant the places of holders that have vanished, one for each member of the caller's
#: queue.
#:
#: KEYS  lock keys
#: ARGV  as WATCH's, then the number of members, and the limit
#: returns {the lifetime left to the place that ends first, server time in microseconds, as WATCH,
#:          then vanished() for each granted place, where there is one}
#: atomic for the same reason as WATCH.
PLACE_WATCH = script(
    """
register(ARGV[1], tonumber(ARGV[2]))
local made, vanishings = #untaken_grants(), {}
for number = 1, max_places() do
  if made < tonumber(ARGV[5]) and not token_at(number) then
    vanishings[#vanishings + 1] = vanished()
    grant(ARGV[3] .. '.' .. number, ARGV[4])
    made = made + 1
  end
end
return {shortest_left(), now(), made > 0 and 1 or 0, unpack(vanishings)}
""",
    _library,
)

#: As RELEASE. A place above the limit is not passed on.
#:
#: KEYS  lock keys of the place, or of the name if the place is unknown
#: ARGV  as RELEASE's, then the limit
#: returns as RELEASE
#: atomic for the same reason as RELEASE.
PLACE_RELEASE = script(
    f"holder = use_place_with(ARGV[1]){RELEASE_BODY}",
    _library,
    first=RELEASE_FIRST % "KEYS[4]",
    urgent=True,
)

#: As RESET, of one place.
#:
#: KEYS  lock keys of the place
#: ARGV  as RESET's, then the limit
#: returns as RESET
#: atomic for the same reason as RESET.
PLACE_RESET = script(RESET_BODY, _library)

#: As EXTEND.
#:
#: KEYS  lock keys of the place, or of the name if the place is unknown
#: ARGV  as EXTEND's, then the limit
#: returns as EXTEND
#: atomic for the same reason as EXTEND.
PLACE_EXTEND = script(f"use_place_with(ARGV[1]){EXTEND_BODY}", _library, urgent=True)

#: The holders of all places.
#:
#: KEYS  lock keys        ARGV  the limit
#: returns what HELD returns, of each holder, then the number of its place
#: atomic because a holder may release one place and take another in between.
HOLDERS = script(
    """
local grants, found = untaken_grants(), {}
for number = 1, max_places() do
  local holder = token_at(number)
  if holder and not untaken(holder, grants) then
    local owner = redis.pcall('HGETALL', KEYS[4])
    local left = redis.call('PTTL', KEYS[1])
    found[#found + 1] = {holder, left, owner.err and {} or owner, now(), number}
  end
end
return found
""",
    _library,
)
