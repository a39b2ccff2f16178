"""Scripts for several locks at once, made of what those for one lock are made of. All keys must be
on one server, on a cluster in one slot.

KEYS is a variable in them: the shared functions work on the lock whose keys it has.
"""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import chain

from .lock_scripts import Call, Script, script

_VARIABLES = "local ALL_KEYS, ALL_ARGS, KEYS, ARGV = KEYS, ARGV, KEYS, ARGV\n"


def _script(body: str, of_one: str = "") -> Script:
    source = _VARIABLES + script(body).source
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(source, sha, of_one)


@cache
def _for_each(one: Script) -> Script:
    body = f"""
local function run()
{one.body}
end
local locks, replies = tonumber(ALL_ARGS[1]), {{}}
local keys, args = #ALL_KEYS / locks, (#ALL_ARGS - 1) / locks
for i = 0, locks - 1 do
  KEYS = {{unpack(ALL_KEYS, i * keys + 1, i * keys + keys)}}
  ARGV = {{unpack(ALL_ARGS, i * args + 2, i * args + args + 1)}}
  replies[i + 1] = run() or false
end
return replies
"""
    return _script(body, one.body)


def for_each(*calls: Call) -> Call:
    """These calls as one; returns what each returns, in this order.

    Args:
        calls: of the same script, with as many keys and arguments each.
    """
    keys, args = (tuple(chain(*parts)) for parts in zip(*(call[1:] for call in calls), strict=True))
    return Call(_for_each(calls[0].script), keys, (len(calls), *args))


#: Take all of these locks if each of them is free. Else register as a waiter for the first that is
#: taken, and take none; or, if requested, those before it.
#:
#: KEYS  keys of the first lock, of the second, ...
#: ARGV  what ACQUIRE has, the same for each; how many locks; '1' to take those before the first
#:       that is taken, else ''
#: returns {which is the first that is taken (0 if none is), the reply of ACQUIRE for each lock that
#:         was taken, and for that one}
#: atomic because none may be taken while another is not to be had.
ACQUIRE_ALL = _script("""
local locks, taken = tonumber(ARGV[6]), 0
local keys = #ALL_KEYS / locks
local function turn_to(i) KEYS = {unpack(ALL_KEYS, (i - 1) * keys + 1, i * keys)} end
for i = 1, locks do
  if taken == 0 then
    turn_to(i)
    local holder = redis.call('GET', KEYS[1])
    if holder and holder ~= ARGV[1] and not untaken(holder) then taken = i end
  end
end
local replies, before = {taken}, locks
if taken > 0 then before = taken - 1 end
if taken > 0 and ARGV[7] == '' then before = 0 end
for i = 1, before do
  turn_to(i)
  local fence, gone = try(ARGV[1], ARGV[2], ARGV[3])
  replies[i + 1] = {1, fence, now(), gone}
end
if taken > 0 then
  turn_to(taken)
  if ARGV[4] ~= '' then register(ARGV[4], tonumber(ARGV[5])) end
  replies[before + 2] = {0, redis.call('PTTL', KEYS[1]), now()}
end
return replies
""")
