"""The Lua script of a lock on several servers; see ``protocol.lock_scripts`` for the others."""

from __future__ import annotations

from ..protocol import _BY_ATTEMPT, _FENCE, _NOW, _SET_LOCK, _TRY, _UNTAKEN, _VANISHED, script

__all__ = ["VOTE"]

#: Take one server's part of the lock, as ACQUIRE does, with a fence of at least ``floor``. For the
#: present holder it restores the whole lifetime. Redis out of memory does not refuse it: only one
#: server hands the lock over, and the next holder takes the other servers with this script.
#:
#: KEYS  lock keys
#: ARGV  token, lifetime, attempt, floor
#: returns {1, fence, server time in microseconds, vanished()}
#:         or {0, the holder's remaining lifetime as PTTL gives it, server time in microseconds}
#: atomic for the same reason as ACQUIRE.
VOTE = script(
    """
redis.call('PEXPIRE', KEYS[4], '86400000')  -- Never refused, so the rest is not either.
local fence, gone = try(ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]))
if fence then return {1, fence, now(), gone} end
return {0, redis.call('PTTL', KEYS[1]), now()}
""",
    _NOW,
    _FENCE,
    _VANISHED,
    _SET_LOCK,
    _UNTAKEN,
    _BY_ATTEMPT,
    _TRY,
)
