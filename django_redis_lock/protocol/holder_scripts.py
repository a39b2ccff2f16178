"""The Lua scripts about holders, in the manner of ``lock_scripts``: who holds a lock, how it is
released by force, and what is recorded of holders and their processes."""

from __future__ import annotations

from ..extension import part
from . import lock_scripts  # noqa: F401  # First: the functions here may call those there.
from .holders import MAX_FENCE, HolderInfo
from .identity import new_token
from .keys import INDEX, NEWS, LockKeys, events_key
from .script import Call, Reply, script, shared
from .validation import milliseconds

#: The holder of a plain lock, or of one place. An untaken grant has none.
#:
#: KEYS  lock keys of the place
#: returns {the token, remaining lifetime as PTTL gives it, owner's fields and values,
#:         server time in microseconds} or nil
HELD = script("""
local holder = redis.call('GET', KEYS[1])
if not holder then return nil end
local grants = redis.pcall('LLEN', KEYS[2])
if type(grants) ~= 'number' then grants = 0 end  -- A key of another kind has none.
for i = 1, grants do
  local grant = redis.call('LINDEX', KEYS[2], i - 1)
  if string.sub(grant, 1, #holder + 1) == holder .. ':' then return nil end
end
local owner = redis.pcall('HGETALL', KEYS[4])
return {holder, redis.call('PTTL', KEYS[1]), owner.err and {} or owner, now()}
""")


def holders_call(keys: LockKeys, limit: int = 1) -> Call:
    """For who has the lock, or the place, at ``keys``; with a ``limit``, all of its places."""
    if limit == 1:
        return Call(HELD, keys, ())
    return Call(part("limit").HOLDERS, keys, (limit,))


def parse_holders(limit: int, reply: Reply) -> list[HolderInfo]:
    """The reply to ``holders_call``; the one whose lifetime ends first comes first."""
    if limit == 1:
        return [] if reply is None else [HolderInfo(reply)]
    return sorted((HolderInfo(one, limit) for one in reply), key=lambda holder: holder.ttl)


# is_token(value): whether it has the form that this package and redis-py give to tokens.
#
# is_known(key, value, index, owner, only): whether `value` at `key` is the token of a lock, as far
# as that is known without its id: the index has a lock there, and the value has the form, or was
# chosen and is not described yet. `only`: '1' where the form alone is enough. A stale entry counts
# for a token: redis-py does not know the index, and may have extended the lock.
IS_KNOWN = shared("""
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
""")

# record(key, event, most, lifetime, at, known): see RECORD_EVENT. record_news(key, event, at): the
# last day's, 1,000 at most.
RECORD = shared("""
local function record(key, event, most, lifetime, at, known)
  at = at and at ~= '' and at or string.format('%.0f', now())
  local lines, releases, last = {at .. ' ' .. event}, 0, 0
  most = tonumber(most)
  local kept = redis.pcall('GET', key)
  if type(kept) ~= 'string' then kept = '' end  -- A key of another kind is replaced.
  if known and known ~= '' and string.find(kept, known, 1, true) then return 0 end
  for line in string.gmatch(kept, '[^\\n]+') do
    lines[#lines + 1] = line
    if string.find(line, '"what": "released"', 1, true) then
      releases, last = releases + 1, #lines
    end
  end
  local gone = releases > most / 2 and last or #lines
  if #lines > most then
    for i = gone, #lines do lines[i] = lines[i + 1] end
  end
  local left = math.max(redis.call('PTTL', key), tonumber(lifetime))
  redis.call('SET', key, table.concat(lines, '\\n'), 'PX', string.format('%.0f', left))
  return 1
end

local function record_news(key, event, at)
  at = at and at ~= '' and at or string.format('%.0f', now())
  put('ZADD', key, at, event)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', string.format('%.0f', now() - 86400000000))
  local size = redis.call('ZCOUNT', key, '-inf', '+inf')
  if size > 1000 then
    local oldest = redis.call('ZRANGEBYSCORE', key, '-inf', '+inf', 'LIMIT', 0, size - 1000)
    redis.call('ZREM', key, unpack(oldest))
  end
  redis.call('PEXPIRE', key, 86400000)
end
""")

#: End the lock of the holder that HELD named, so that it is safe to send twice; the first live
#: waiter gets it.
#:
#: KEYS  lock keys; if it is to be noted, events and news
#: ARGV  successor, lifetime of the grant, the token to end, the greatest fence to end (two holders
#:       in turn may have one chosen token), '' or the id of the token's owner, '1' where only locks
#:       are stored: without an id the caller knows that it is a lock; if it is to be noted, what
#:       RECORD_EVENT has first
#: returns 1 ended, 0 it was free, held by another than the named one, or other data
#: atomic for the same reason as RELEASE. The holder's process is told which lock it was, and finds
#: the event.
RESET_BODY = """
local holder = redis.call('GET', KEYS[1])
if not holder then redis.pcall('ZREM', KEYS[5], KEYS[1]) end
if holder ~= ARGV[3] or untaken(holder) then return 0 end
local fence = tonumber(redis.pcall('HGET', KEYS[4], 'fence')) or 0
if fence > tonumber(ARGV[4]) and fence < 2^53 then return 0 end
if ARGV[6] and ARGV[5] ~= '' and redis.pcall('HGET', KEYS[4], 'id') ~= ARGV[5]
  and not is_known(KEYS[1], holder, KEYS[5], KEYS[4], ARGV[6]) then
  return 0
end
local process = redis.pcall('HGET', KEYS[4], 'process')
pass_on(ARGV[1], ARGV[2])
if ARGV[9] then
  record(KEYS[6], ARGV[7], ARGV[8], ARGV[9])
  record_news(KEYS[7], ARGV[7])
end
if type(process) == 'string' then
  redis.pcall('PUBLISH', 'django_redis_lock:process:' .. process, KEYS[1])
end
return 1
"""
RESET = script(RESET_BODY)


def reset_call(
    keys: LockKeys,
    held: HolderInfo,
    grant_timeout: float,
    limit: int = 1,
    fence: int | None = None,
    only_locks: bool | None = None,
    event: tuple[str | int, ...] = (),
) -> Call:
    """End the lock of the holder that HELD named. ``fence``: known from before; ``only_locks``:
    whether only locks are stored under such keys, None if the caller knows that this is one;
    ``event``: what RECORD_EVENT has first."""
    last = (held.fence or MAX_FENCE) if fence is None else fence
    proof = ("", "") if only_locks is None else (held.owner.id, int(only_locks))
    args = (new_token(), milliseconds(grant_timeout), held.token, last, *proof, *event)
    noted = events_key(keys.name), keys.held_index.replace(INDEX, NEWS)
    if limit == 1:
        return Call(RESET, (*keys, *noted), args)
    return Call(part("limit").PLACE_RESET, (*keys.at_place(held.place), *noted), (*args, limit))


#: Note what has happened to a lock. Releases by its holders push out no other events, unless most
#: are others. (A list would want commands that those who may lock need not have the right to.)
#:
#: KEYS  events: a line for each, the latest first; for news, those of all locks, a sorted set
#: ARGV  what has happened, in one line; how many events to keep; for how many milliseconds; when it
#:       was, in microseconds ('' for now); what must not be noted yet ('' for nothing)
#: returns 1, or 0 if that was noted
#: atomic because two that note at the same time must not write over each other.
RECORD_EVENT = script("""
local recorded = record(KEYS[1], unpack(ARGV))
if recorded == 1 and KEYS[2] then record_news(KEYS[2], ARGV[1], ARGV[4]) end
return recorded
""")

#: Note that a process is alive.
#:
#: KEYS  its heartbeat        ARGV  for how many milliseconds to keep it
#: returns 1, or 0 if there was none before
#: atomic because it is the server's time that is kept.
HEARTBEAT = script("""
local before = redis.call('EXISTS', KEYS[1])
redis.call('SET', KEYS[1], string.format('%.0f', now()), 'PX', ARGV[1])
return before
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

#: The server's time in microseconds. A script, so that it is sent as the calls of a lock are: on
#: the same connections, and once more if the reply is lost.
#:
#: KEYS  none        ARGV  none        returns microseconds
CLOCK = script("return now()")
