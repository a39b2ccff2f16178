"""The Lua script of a lock on several servers, in the manner of ``scripts``."""

from __future__ import annotations

from .scripts import _BY_ATTEMPT, _FENCE, _NOW, _SET_LOCK, _TRY, _UNTAKEN, _VANISHED, script

__all__ = ["VOTE"]

#: Take one server's part of the lock, as ACQUIRE does, with a fence of at least ``floor``. Said
#: again by who has it already, it gives its whole lifetime anew.
#:
#: KEYS  lock keys
#: ARGV  token, lifetime, attempt, floor
#: returns {1, fence, server time in microseconds, vanished()}
#:         or {0, the holder's remaining lifetime as PTTL gives it, server time in microseconds}
#: atomic for the same reason as ACQUIRE.
VOTE = script(
    """
local fence, gone = try(ARGV[1], ARGV[2], ARGV[3])
if not fence then return {0, redis.call('PTTL', KEYS[1]), now()} end
local floor = tonumber(ARGV[4])
if fence < floor then
  fence = floor
  redis.call('SET', KEYS[4], string.format('%.0f', fence) .. ' ' .. ARGV[3], 'PX', '86400000')
end
return {1, fence, now(), gone}
""",
    _NOW,
    _FENCE,
    _VANISHED,
    _SET_LOCK,
    _UNTAKEN,
    _BY_ATTEMPT,
    _TRY,
)
