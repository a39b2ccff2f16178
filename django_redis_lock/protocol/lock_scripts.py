"""The Lua scripts of a lock, each under its contract: KEYS, ARGV, what it returns, why atomic.

Keys of a lock are always passed in the order of ``LockKeys``; RENEW gets KEYS[1] for [2] and [3]:

* KEYS[1], the lock: the token of its holder, with the lock's lifetime.
* KEYS[2], the list of grants: a waiter's blocking pop is on it.
* KEYS[3], the waiters: a sorted set of waiter ids, each until when it counts as alive.
* KEYS[4], the holder's description, a hash.
* KEYS[5], the index of the database: a sorted set of the held locks, each with its end, and of the
  last fence.

Times are milliseconds unless a name says otherwise; a lifetime of 0 means none. It ends by the
clock of Redis and, never later, by that of the holder (``locking/hold.py``).

A released lock that is awaited becomes a grant: the key gets a fresh token with a short lifetime,
and the token goes to the list. The waiter whose pop returns it confirms it by TAKE_GRANT. One that
is frozen does not: the grant expires, WATCH, sent by the keeper of another waiter, makes the next,
and what the frozen one sends later finds another token at the key.

Companion keys may vanish (evicted, deleted by hand) or hold something else than they should. So no
script trusts their form: what is unreadable counts as missing and is replaced. Each has a lifetime,
except the index, and the description of a lock that has none.

Redis out of memory (``noeviction``) refuses a script's commands that may allocate, until the script
has written. So the first write of every script that keeps a lock, frees it or passes it on is one
that Redis never refuses, such as DEL. Only ACQUIRE of a free lock may be refused, as a whole.

``script`` adds the shared functions that a text calls. ``first`` comes before the text, in the same
chunk, and answers most calls; the text sees its locals. Functions that only what
follows a blank line calls are added there. ``urgent`` ones pass the circuit breaker.
"""

from __future__ import annotations

from .script import Library, script, shared, shared_functions

# now(): the server's time in microseconds; exact in Lua's numbers until the year 2255.
_NOW = shared("""
local clock
local function now()
  if not clock then
    local time = redis.call('TIME')
    clock = time[1] * 1000000 + time[2]
  end
  return clock
end
""")

# fence_after(last): greater than that, and at least the time, so that a lost one cannot let fences
# start again from 1. next_fence(): greater than all of the locks on this index.
_FENCE = shared("""
local function fence_after(last)
  last = tonumber(last) or 0
  if not (last < 2^53) then last = 0 end  -- Not one of ours: Lua cannot add 1 to it.
  return math.max(last + 1, now())
end

local function next_fence()
  local last = redis.pcall('ZSCORE', KEYS[5], 'django_redis_lock:fence')
  local broken = type(last) == 'table' and string.find(last.err, 'WRONGTYPE')
  if broken then redis.call('DEL', KEYS[5]) end
  local fence = fence_after(last)
  redis.call('ZADD', KEYS[5], string.format('%d', fence), 'django_redis_lock:fence')
  return fence
end
""")

# ``contrib.limit`` has others of these, for a lock with places: ``limit=N``, N holders at once.
#
# untaken(holder, grants): whether `holder` is the token of a grant that is still on the list, so
# that the lock has no owner. `grants`: another lock's list. void_grants(): those on the list do not
# count any more. grant_suffix(): what a grant ends with; nil for a place that is not passed on.
_OF_PLACE = shared("""
local function untaken(holder, grants)
  local first = redis.pcall('LINDEX', grants or KEYS[2], 0)
  return type(first) == 'string' and string.sub(first, 1, #holder + 1) == holder .. ':'
end

local function void_grants() redis.call('DEL', KEYS[2]) end

local function grant_suffix() return '' end
""")

# put(command, key, ...): write to a key that is for people only; another form is replaced.
#
# describe_until(left): the owner's description outlasts the lock by a day, so that a waiter that
# finds the lock gone without a release can say whose it was. describe(left, ...): note fields and
# values of the description, which is never worth an error.
_DESCRIBE = shared("""
local function put(command, key, ...)
  if type(redis.pcall(command, key, ...)) == 'table' then
    redis.call('DEL', key)
    redis.pcall(command, key, ...)
  end
end

local function describe_until(left)
  if left < 0 then
    redis.call('PERSIST', KEYS[4])
  else
    redis.call('PEXPIRE', KEYS[4], string.format('%d', left + 86400000))
  end
end

local function describe(left, ...)
  describe_until(left)  -- Never refused, so the next is not either.
  put('HSET', KEYS[4], ...)
  describe_until(left)
end
""")

# by_attempt(attempt, unknown): whether the holder acquired the lock by this attempt, which names
# one of the calls with the same chosen token (a caller's own); `unknown` if none is on record.
#
# describe_taken(lifetime, ...): describe it when it is taken; its lifetime is the argument's text.
_BY_ATTEMPT = shared("""
local function by_attempt(attempt, unknown)
  local kept = redis.pcall('HGET', KEYS[4], 'attempt')
  if type(kept) ~= 'string' then return unknown end
  return kept == attempt
end

local function describe_taken(lifetime, ...)
  describe(lifetime == '0' and -1 or tonumber(lifetime), ...)
end
""")

# vanished(): of a holder that did not release: {end of its lifetime, now if unknown; description}.
_VANISHED = shared("""
local function vanished()
  local owner = redis.pcall('HGETALL', KEYS[4])
  if #owner == 0 then return nil end  -- Also of an error.
  local left = redis.call('PTTL', KEYS[4])
  return {now() - (left < 0 and 0 or math.max(0, 86400000 - left)) * 1000, owner}
end
""")

# note(lifetime): the index knows when the lock ends. One use in 64 removes locks that ended by
# themselves: at most 128, since 64 uses add 64. A lock that another program has extended (redis-py
# does not know the index) stays, with its true end.
_NOTE = shared("""
local function note(lifetime)
  local expiry = '+inf'
  if lifetime ~= '0' then expiry = string.format('%d', now() / 1000 + lifetime) end
  put('ZADD', KEYS[5], expiry, KEYS[1])
  if now() % 64 ~= 0 then return end
  local at = math.floor(now() / 1000)
  for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', '(' .. at, 'LIMIT', 0, 128)) do
    local left = redis.pcall('PTTL', key)
    if type(left) ~= 'number' or left == -2 then
      redis.call('ZREM', KEYS[5], key)
    else
      redis.call('ZADD', KEYS[5], left < 0 and '+inf' or at + left, key)
    end
  end
end
""")

# set_lock(token, lifetime, before): what every fresh holder starts from. Untaken grants become
# void, the former owner is deleted, the index gets the end of the lock. Returns ``vanished()``
# unless the lock was held `before`. Lifetimes stay the strings they came as: turning numbers into
# Redis's arguments costs more than the commands themselves.
#
# take(token, lifetime, attempt, holder, place): next_fence, set_lock, and what concerns the attempt
# of a chosen token. Returns the fence, what set_lock returns, and the place.
_SET_LOCK = shared("""
local function set_lock(token, lifetime, before)
  if lifetime == '0' then
    redis.call('SET', KEYS[1], token)
  else
    redis.call('SET', KEYS[1], token, 'PX', lifetime)
  end
  note(lifetime)
  if redis.call('EXISTS', KEYS[2], KEYS[4]) == 0 then return nil end  -- Nearly always.
  local gone = not before and vanished() or nil
  redis.call('DEL', KEYS[4])
  void_grants()
  return gone
end

local function take(token, lifetime, attempt, holder, place)
  local fence = next_fence()
  local gone = set_lock(token, lifetime, holder)
  if attempt ~= '' then
    describe_taken(lifetime, 'attempt', attempt, 'fence', string.format('%d', fence))
  end
  return fence, gone, place
end
""")

# set_new(token, lifetime): next_fence and set_lock for nearly all calls, with nothing left of a
# former holder, and a later time and end than on the index. Returns the fence; nil for others, and
# for the one use in 64 in which note() removes locks.
#
# is_awaited(): whether there is a live waiter. hand_over(successor, lifetime): pass_on for nearly
# all calls while one waits; whether it was done.
#
# grant(token, lifetime): pass the lock to the first waiter. Redis hands an element pushed to a list
# to the client that has been blocked on it longest. pass_on(successor, lifetime): do so if there
# is a live waiter; else delete the lock.
_PASS_ON = shared("""
local function set_new(token, lifetime)
  local fence = now()
  if fence % 64 == 0 then return nil end
  local text, expiry = string.format('%d', fence), string.format('%d', fence / 1000 + lifetime)
  local last = 'django_redis_lock:fence'
  local risen = redis.pcall('ZADD', KEYS[5], 'GT', 'CH', text, last, expiry, KEYS[1])
  if risen ~= 2 then return nil end
  redis.call('SET', KEYS[1], token, 'PX', lifetime)
  return fence
end

local function is_awaited()
  local waiting = redis.pcall('ZCOUNT', KEYS[3], math.floor(now() / 1000), '+inf')
  return type(waiting) == 'number' and waiting > 0
end

local function hand_over(successor, lifetime)
  local suffix = grant_suffix()
  if not suffix or not is_awaited() or redis.call('EXISTS', KEYS[2]) == 1 then return false end
  redis.call('DEL', KEYS[4])  -- Never refused, so the rest is not either.
  local fence = string.format('%d', now())
  local risen = redis.pcall('ZADD', KEYS[5], 'GT', 'CH', fence, 'django_redis_lock:fence')
  if risen ~= 1 then return false end
  redis.call('ZADD', KEYS[5], string.format('%d', now() / 1000 + lifetime), KEYS[1])
  redis.call('SET', KEYS[1], successor, 'PX', lifetime)
  redis.call('RPUSH', KEYS[2], successor .. ':' .. fence .. suffix)
  redis.call('PEXPIRE', KEYS[2], lifetime)
  return true
end

local function grant(token, lifetime)
  redis.call('DEL', KEYS[4])  -- Never refused, so the rest is not either.
  void_grants()
  local fence = string.format('%d', next_fence())
  redis.call('SET', KEYS[1], token, 'PX', lifetime)
  note(lifetime)
  redis.call('RPUSH', KEYS[2], token .. ':' .. fence .. grant_suffix())
  redis.call('PEXPIRE', KEYS[2], lifetime)
end

local function pass_on(successor, lifetime)
  if grant_suffix() and is_awaited() then
    grant(successor, lifetime)
  else
    redis.call('DEL', KEYS[1], KEYS[4])
    void_grants()
    redis.pcall('ZREM', KEYS[5], KEYS[1])
  end
end
""")

# register(waiter, alive): it lives `alive` ms more; drop the dead, and a broken list.
_REGISTER = shared("""
local function register(waiter, alive)
  local at = math.floor(now() / 1000)
  -- Never refused, so the rest is not either.
  local dead = redis.pcall('ZREMRANGEBYSCORE', KEYS[3], '-inf', '(' .. at)
  if type(dead) == 'table' then redis.call('DEL', KEYS[3]) end
  if type(redis.pcall('LLEN', KEYS[2])) == 'table' then redis.call('DEL', KEYS[2]) end
  redis.call('ZADD', KEYS[3], at + alive, waiter)
  redis.call('PEXPIRE', KEYS[3], alive)
end
""")

#: The functions that ``contrib.limit`` shares: all that stand above, but those of _OF_PLACE.
common: Library = [(calls, text) for calls, text in shared_functions if text not in _OF_PLACE]

# is_takeable(holder, token, attempt): whether the lock can be taken. try(token, lifetime, attempt):
# what take returns if it could be, else nil. Out of memory, only a free lock is refused, before
# anything is written. waits_no_more(waiter): leaves the queue. shortest_left(): the lifetime left.
_TRY = shared("""
local function is_takeable(holder, token, attempt)
  if not holder then return true end
  local mine = holder == token
  if mine and attempt ~= '' then mine = by_attempt(attempt, false) end
  return mine or untaken(holder)
end

local function try(token, lifetime, attempt)
  local holder = redis.call('GET', KEYS[1])
  if not is_takeable(holder, token, attempt) then return nil end
  if holder then redis.call('DEL', KEYS[2]) end
  return take(token, lifetime, attempt, holder, 1)
end

local function waits_no_more(waiter)
  if waiter ~= '' then redis.pcall('ZREM', KEYS[3], waiter) end
end

local function shortest_left() return redis.call('PTTL', KEYS[1]) end
""")

#: Answers nearly all calls: it is free, and nothing is left of a former holder; it is held.
ACQUIRE_FIRST = """
if ARGV[2] ~= '0' and ARGV[3] == '' and redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[4]) == 0 then
  local fence = set_new(ARGV[1], ARGV[2])
  if fence then return fence end
end

if not is_takeable(redis.call('GET', KEYS[1]), ARGV[1], ARGV[3]) then
  if ARGV[4] ~= '' then register(ARGV[4], tonumber(ARGV[5])) end
  return string.format('%d %d', redis.call('PTTL', KEYS[1]), now())
end
"""

#: Take the lock if it is free; else, if requested, register as a waiter. A repeated call (its
#: first reply was lost) finds its own token and succeeds again: S3 in ``docs/how_it_works.md``.
#:
#: KEYS  lock keys
#: ARGV  token, lifetime, attempt ('' if the token is fresh and so names the attempt itself),
#:       waiter ('' not to wait), alive
#: returns the fence, if that is the server time in microseconds as well (a table takes longer)
#:         or {1, fence, server time, vanished()}, or the holder's PTTL and the server time as text
#: atomic because between "it is held" and "I wait" a release would find no waiter.
ACQUIRE_BODY = """
local fence, gone, place = try(ARGV[1], ARGV[2], ARGV[3])
return {place, fence, now(), gone}
"""
ACQUIRE = script(ACQUIRE_BODY, first=ACQUIRE_FIRST)

#: Stop waiting: one last try, then wake the blocking pop so that its connection is free again.
#: A grant that the pop got before this ran is answered by the pop, not here.
#:
#: KEYS  lock keys, then the waiter's wake list
#: ARGV  token ('' not to try again), lifetime, attempt, waiter ('' to leave it registered)
#: returns {1, fence, server time in microseconds, vanished()} or {0, PTTL, server time}
#: atomic because a grant made between the last try and the end of the wait would be lost.
LEAVE_BODY = """
redis.call('DEL', KEYS[6])
local fence, gone, place
if ARGV[1] ~= '' then fence, gone, place = try(ARGV[1], ARGV[2], ARGV[3]) end
waits_no_more(ARGV[4])
redis.call('RPUSH', KEYS[6], 'leave')
redis.call('PEXPIRE', KEYS[6], 2000)
if fence then return {place, fence, now(), gone} end
return {0, shortest_left(), now()}
"""
LEAVE = script(LEAVE_BODY, urgent=True)

#: A granted waiter gives the lock its full lifetime and, if it was its process's last waiter,
#: stops being registered.
#:
#: KEYS  lock keys
#: ARGV  the grant's token, lifetime, waiter ('' to leave it registered), the token the waiter wants
#:       to hold the lock with ('' for the grant's own), the attempt that goes with it, and the
#:       grant's fence
#: returns 1, or 0 if the grant is over
#: atomic because the lifetime must not be given to another holder's lock.
TAKE_GRANT_BODY = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then
  redis.call('PERSIST', KEYS[1])
else
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[1], ARGV[4], 'KEEPTTL')
  describe_taken(ARGV[2], 'attempt', ARGV[5], 'fence', ARGV[6])
end
note(ARGV[2])
return 1
"""
TAKE_GRANT = script(f"waits_no_more(ARGV[3]){TAKE_GRANT_BODY}")

#: Answers nearly all releases: no waiter; hand_over() does it. ``%s``: other keys to delete.
RELEASE_FIRST = """
local holder = redis.call('GET', KEYS[1])
local plain = holder == ARGV[1] and ARGV[4] == '0' and ARGV[6] == ''
if plain and redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('DEL', KEYS[1], %s)
  redis.pcall('ZREM', KEYS[5], KEYS[1])
  return 1
end

if plain and hand_over(ARGV[2], ARGV[3]) then return 1 end
"""

#: Release the lock, and pass it to the first live waiter. Until `rest` ms after the acquisition, it
#: stays taken without a holder, by the token that is stored as the owner's `rests`.
#:
#: KEYS  lock keys
#: ARGV  token, successor (a fresh token for the waiter; it also marks this release as done),
#:       lifetime of the grant, rest, fence of the holder (its acquisition time; 0 if neither rest
#:       nor attempt needs it, or if the caller may not be the holder), the attempt that must have
#:       acquired it ('' for any)
#: returns 1 released, 0 not this token's lock
#: atomic because looking for waiters and passing the lock on must not be parted by a new waiter.
RELEASE_BODY = """
if not holder then return 0 end
if holder ~= ARGV[1] then return holder == ARGV[2] and 1 or 0 end
if ARGV[6] ~= '' and not by_attempt(ARGV[6], ARGV[5] ~= '0') then return 0 end
local left = tonumber(ARGV[4])
if left > 0 then
  left = math.min(left, math.ceil(left - (now() - tonumber(ARGV[5])) / 1000))
end
if left > 0 then
  left = string.format('%d', left)
  redis.call('DEL', KEYS[4])  -- Never refused, so the rest is not either.
  set_lock(ARGV[2], left, holder)
  redis.call('HSET', KEYS[4], 'rests', ARGV[2])
  redis.call('PEXPIRE', KEYS[4], left)
else
  pass_on(ARGV[2], ARGV[3])
end
return 1
"""
RELEASE = script(RELEASE_BODY, first=RELEASE_FIRST % "KEYS[2], KEYS[4]", urgent=True)

#: What the keeper does for a held lock or place: push its end out, never in; describe the holder.
#:
#: KEYS  ``LockKeys.renewed``
#: ARGV  token, lifetime (0 to leave it as it is, -1 for none), the attempt that must have acquired
#:       it ('' for any), the keys of its events and of its process's heartbeat ('' on a cluster),
#:       then the owner's fields and values, if any
#: returns the remaining lifetime as PTTL gives it, or, if this token does not hold it, what
#:         ``history.cause`` reads
#: A lock with more than 99 % of its lifetime left stays as it is: a report of a change leads here.
#: As KEYS, those of ARGV would be remembered (``LockKeys.renewed``), or refused to some users.
#: atomic because all must apply to this token's lock and to no other.
RENEW = script(
    """
if redis.call('GET', KEYS[1]) ~= ARGV[1] or ARGV[3] ~= '' and not by_attempt(ARGV[3], true) then
  local function text(...)
    local found = redis.pcall(...)
    return type(found) == 'string' and found or ''
  end
  local entry = redis.call('EXISTS', KEYS[1]) == 0 and text('ZSCORE', KEYS[5], KEYS[1])
  local fence, id = text('ZSCORE', KEYS[5], 'django_redis_lock:fence'), text('HGET', KEYS[4], 'id')
  local described = text('HGET', KEYS[4], 'seen') .. string.format(' %d ', now()) .. id
  return {text('GET', ARGV[4]), fence, described, text('GET', ARGV[5]), entry or ''}
end
local left, wanted = redis.call('PTTL', KEYS[1]), tonumber(ARGV[2])
if left >= 0 and wanted * 0.99 > left then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  left = wanted
elseif left >= 0 and wanted < 0 then
  redis.call('PERSIST', KEYS[1])
  left = -1
end
redis.call('EXISTS', KEYS[1])  -- A read after the change has Redis report the next: ``Listener``.
describe(left, 'seen', string.format('%d', now()), unpack(ARGV, 6))
note(left < 0 and '0' or left)
return left
""",
    urgent=True,
)

#: Change the lifetime at the holder's wish.
#:
#: KEYS  lock keys
#: ARGV  token, milliseconds, '1' to replace the lifetime left or '0' to add to it, the attempt that
#:       must have acquired it ('' for any), a name for this call if it adds, so that it adds once
#: returns 1 done, 0 not this token's lock, -1 the lock has no lifetime
#: atomic because it must not change another holder's lock.
EXTEND_BODY = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[4] ~= '' and not by_attempt(ARGV[4], true) then return 0 end
local left, wanted = redis.call('PTTL', KEYS[1]), tonumber(ARGV[2])
if ARGV[3] == '0' then
  if left < 0 then return -1 end
  if redis.pcall('HGET', KEYS[4], 'extension') == ARGV[5] then return 1 end
  wanted = wanted + left
end
redis.call('PEXPIRE', KEYS[1], string.format('%d', wanted))
if ARGV[3] == '0' then describe(wanted, 'extension', ARGV[5]) else describe_until(wanted) end
note(wanted)
return 1
"""
EXTEND = script(EXTEND_BODY, urgent=True)

#: What the keeper does for a process that waits: stay registered and look whether the holder has
#: vanished; if so, make the grant on its behalf.
#:
#: KEYS  lock keys
#: ARGV  waiter, alive, successor, lifetime of a grant
#: returns {remaining lifetime as PTTL gives it, server time in microseconds,
#:          1 if a grant lies on the list untaken although this process waits, or has just been
#:          put there, else 0, vanished()}
#: atomic because two watchers must not both find the lock free.
WATCH = script("""
register(ARGV[1], tonumber(ARGV[2]))
local holder = redis.call('GET', KEYS[1])
local lying, gone = not holder or untaken(holder), nil
-- A grant made now lies there, too: Redis serves blocked clients after the script.
if not holder then
  gone = vanished()
  grant(ARGV[3], ARGV[4])
end
return {redis.call('PTTL', KEYS[1]), now(), lying and 1 or 0, gone}
""")

#: A write that only passes over a fence, sent before WAIT on the same connection: a confirmation
#: is of use only for what came before it in the primary's stream.
#:
#: KEYS  lock keys        ARGV  token        returns 1, or 0 if this token does not hold the lock
#: atomic because it must be of the same primary as the look at the lock.
MARK = script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
describe_until(redis.call('PTTL', KEYS[1]))  -- Never refused, so the next is not either.
next_fence()
return 1
""")
