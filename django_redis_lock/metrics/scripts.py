"""The scripts that keep figures of locks and computations, each under its contract.

A hash holds the figures of one period, in buckets of equal width. A field is the bucket's number
(the server's Unix time divided by the width), a space, and whose figures they are; its value is
whole numbers with spaces between them; of two with an ``m`` before them the larger is kept, of
others the sum. The field that is only a bucket's number counts the names in
it, and the field ``now`` has the number of the last one written to.
"""

from __future__ import annotations

from ..protocol import script

#: Add to the present bucket of each hash; drop the buckets that are too old.
#:
#: KEYS  the hashes
#: ARGV  how many names a bucket may have, at most; the end of the name under which the rest is
#:       kept; of each hash the seconds of a bucket and how many are kept; then names and figures in
#:       turn. A name is a site, a line feed, and a group.
#: returns 1
#: atomic because other processes add to the same figures.
ADD_FIGURES = script("""
local function sum(one, other)
  local numbers = {}
  for number in string.gmatch(one, '%S+') do numbers[#numbers + 1] = number end
  local at = 0
  for number in string.gmatch(other, '%S+') do
    at = at + 1
    local before = numbers[at]
    if not before or before == '0' then
      numbers[at] = number
    elseif string.sub(number, 1, 1) == 'm' then
      if tonumber(string.sub(number, 2)) > tonumber(string.match(before, '%d+')) then
        numbers[at] = number
      end
    elseif number ~= '0' then
      numbers[at] = string.format('%.0f', tonumber(string.match(before, '%d+')) + tonumber(number))
    end
  end
  return table.concat(numbers, ' ')
end

local seconds = tonumber(redis.call('TIME')[1])
local most, rest = tonumber(ARGV[1]), ARGV[2]
for k, key in ipairs(KEYS) do
  local width, kept = tonumber(ARGV[1 + 2 * k]), tonumber(ARGV[2 + 2 * k])
  local number = math.floor(seconds / width)
  local bucket = string.format('%.0f', number)
  if redis.call('HGET', key, 'now') ~= bucket then
    for _, field in ipairs(redis.call('HKEYS', key)) do
      local old = tonumber(string.match(field, '^%d+') or bucket)
      if old <= number - kept then redis.call('HDEL', key, field) end
    end
    redis.call('HSET', key, 'now', bucket)
  end
  for i = 3 + 2 * #KEYS, #ARGV, 2 do
    local name, added = ARGV[i], ARGV[i + 1]
    local field = bucket .. ' ' .. name
    local before = redis.call('HGET', key, field)
    if not before then
      if tonumber(redis.call('HGET', key, bucket) or 0) < most then
        redis.call('HINCRBY', key, bucket, 1)
      else
        field = bucket .. ' ' .. string.match(name, '^[^\\n]*\\n') .. rest
        before = redis.call('HGET', key, field)
      end
    end
    redis.call('HSET', key, field, before and sum(before, added) or added)
  end
  redis.call('EXPIRE', key, string.format('%.0f', width * (kept + 1)))
end
return 1
""")

#: What one hash holds.
#:
#: KEYS  the hash
#: returns {server time in seconds, its fields and values}
#: atomic so that the time tells which of its buckets are too old.
READ_FIGURES = script("""
return {tonumber(redis.call('TIME')[1]), redis.call('HGETALL', KEYS[1])}
""")
