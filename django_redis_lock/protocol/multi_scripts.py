"""Scripts for several locks at once, made of those for one lock. All keys must be on one server, on
a cluster in one slot."""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import chain

from .lock_scripts import ACQUIRE, HELD, Call, Script


def _script(source: str) -> Script:
    # Not by ``script()``: the functions that are shared stand within those that need them.
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


@cache
def _for_each(script: Script) -> Script:
    return _script(f"""
local function run(KEYS, ARGV)
{script.source}
end
local locks, replies = tonumber(ARGV[1]), {{}}
local keys, args = #KEYS / locks, (#ARGV - 1) / locks
for i = 0, locks - 1 do
  local of_one = {{unpack(KEYS, i * keys + 1, i * keys + keys)}}
  replies[i + 1] = run(of_one, {{unpack(ARGV, i * args + 2, i * args + args + 1)}}) or false
end
return replies
""")


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
#: ARGV  how many locks, '1' to take those before the first that is taken, else '', then what
#:       ACQUIRE has, the same for each
#: returns {which is the first that is taken (0 if none is), the reply of ACQUIRE for each lock that
#:         was taken, and for that one}
#: atomic because none may be taken while another is not to be had.
ACQUIRE_ALL = _script(f"""
local function held(KEYS)
{HELD.source}
end
local function acquire(KEYS, ARGV)
{ACQUIRE.source}
end
local locks, keys, taken = tonumber(ARGV[1]), {{}}, 0
local each = #KEYS / locks
for i = 1, locks do
  keys[i] = {{unpack(KEYS, (i - 1) * each + 1, i * each)}}
  local holder = taken == 0 and held(keys[i])
  if holder and holder[1] ~= ARGV[3] then taken = i end
end
local first, last, replies = 1, locks, {{taken}}
if taken > 0 then last = taken end
if taken > 0 and ARGV[2] == '' then first = taken end
for i = first, last do replies[i - first + 2] = acquire(keys[i], {{unpack(ARGV, 3)}}) end
return replies
""")
