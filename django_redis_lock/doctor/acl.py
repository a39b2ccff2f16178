"""The rights that locks need in Redis, and whether the user has them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from ..protocol import FIGURES, INDEX, Call, flight_stream, lock_keys, script, wake_key
from ..transport import run
from .target import Finding, Level, Target

HINT = "See docs/commands.md, Rights."

#: The errors of a server that rejects the writes of every user: replicas are missing, the last
#: snapshot failed, memory is full, or it is a replica itself.
WRITES_REJECTED = ("NOREPLICAS", "MISCONF", "OOM", "READONLY")

#: The commands of the scripts, as the doctor tries them; ``@1`` and so on stand for keys.
TRIED = (
    ("SET", "@1", "trial", "PX", "5000"),
    ("GET", "@1"),
    ("EXISTS", "@1"),
    ("STRLEN", "@1"),
    ("GETRANGE", "@1", "0", "0"),
    ("PTTL", "@1"),
    ("PERSIST", "@1"),
    ("PEXPIRE", "@1", "5000"),
    ("RPUSH", "@2", "trial"),
    ("LINDEX", "@2", "0"),
    ("LLEN", "@2"),
    ("ZADD", "@3", "1", "trial"),
    ("ZCOUNT", "@3", "-inf", "+inf"),
    ("ZREM", "@3", "trial"),
    ("HSET", "@5", "trial", "1"),
    ("HGET", "@5", "trial"),
    ("HGETALL", "@5"),
    ("HLEN", "@5"),
    ("XADD", "@6", "*", "trial", "1"),
    ("ZCARD", "@3"),
    ("ZRANGE", "@3", "0", "0"),
    ("ZRANGEBYSCORE", "@3", "-inf", "+inf"),
    ("ZREVRANGEBYSCORE", "@3", "+inf", "-inf"),
    ("TIME",),
    ("DEL", "@1"),
    ("DEL", "@2", "@3", "@4", "@5", "@6"),
)
#: The same for the figures.
TRIED_IN_FIGURES = (
    ("HSET", "@1", "trial", "1"),
    ("HKEYS", "@1"),
    ("HINCRBY", "@1", "trial", "1"),
    ("EXPIRE", "@1", "90000"),
    ("HDEL", "@1", "trial"),
)

#: Try commands, and return those that are rejected.
#:
#: KEYS  whatever the commands name as @1, @2 …
#: ARGV  a JSON list of commands
#: returns name and error of each rejected command, in turn
TRY = script("""
local rejected = {}
for _, command in ipairs(cjson.decode(ARGV[1])) do
  for place, word in ipairs(command) do
    local key = string.match(word, '^@(%d+)$')
    if key then command[place] = KEYS[tonumber(key)] end
  end
  local answer = redis.pcall(unpack(command))
  if type(answer) == 'table' and answer.err then
    rejected[#rejected + 1] = string.lower(command[1])
    rejected[#rejected + 1] = answer.err
  end
end
return rejected
""")


def access(target: Target) -> Iterator[Finding]:
    name = f"{target.conf.LOCK_PREFIX}doctor-{secrets.token_hex(4)}"
    key = bytes(target.cache._encoded_key(name, None))
    keys = (*lock_keys(key)[:5], flight_stream(key, b"trial"))
    try:
        answers = run(target.client, Call(TRY, keys, (json.dumps(TRIED),))).value
    except NoPermissionError as error:
        yield _rejected(target, f"locks are not possible: {error}")
        return
    except ResponseError as error:  # A service may forbid scripts with another error.
        yield Finding("rights", Level.ERROR, f"scripts are rejected: {error}", number="E104")
        return
    missing = [_text(name) for name in answers[::2]]
    reason = _text(answers[1]).strip() if missing else ""
    if any(word in reason for word in WRITES_REJECTED):
        text = f"the server rejects writes, locks among them: {reason}"
        yield Finding("rights", Level.ERROR, text, number="W102")
        return
    waits = [name for name in ("blpop", "xread") if not _may_wait(target, name, key)]
    index, figures = _index_error(target), _figures_error(target)
    if missing:
        yield _rejected(target, f"not allowed: {', '.join(missing)} ({reason})", missing)
    elif index:
        yield _rejected(target, f"the list of held locks cannot be written: {index}")
    elif waits:
        yield Finding(
            "rights",
            Level.WARNING,
            f'the user "{target.user}" may not run {" and ".join(waits)}, so waiters poll',
            f"ACL SETUSER {target.user} {' '.join(f'+{name}' for name in waits)}",
            number="W103",
        )
    elif figures:
        yield Finding("rights", Level.NOTE, f"the figures cannot be written: {figures}", HINT)
    else:
        text = f'the user "{target.user}" has all rights that locks and get_or_set need'
        yield Finding("rights", Level.OK, text)


def _rejected(target: Target, text: str, missing: Sequence[str] = ()) -> Finding:
    allowed = " ".join(f"+{name}" for name in missing)
    hint = f"ACL SETUSER {target.user} {allowed}" if missing else HINT
    return Finding("rights", Level.ERROR, text, hint, number="E104")


def _may_wait(target: Target, command: str, key: bytes) -> bool:
    words: dict[str, tuple[object, ...]] = {
        "blpop": ("BLPOP", wake_key(key, b"trial"), 0.05),
        "xread": ("XREAD", "BLOCK", 1, "STREAMS", flight_stream(key, b"trial"), "0"),
    }
    try:
        target.client.execute_command(*words[command])
    except NoPermissionError:
        return False
    except RedisError:
        pass  # Other probes report it.
    return True


def _index_error(target: Target) -> str:
    """Why the index of held locks cannot be written; empty if it can."""
    if target.is_cluster:
        return ""
    commands = (("ZADD", "@1", "1", "doctor"), ("ZREM", "@1", "doctor"))
    return _error_at(target, INDEX, commands)


def _figures_error(target: Target) -> str:
    """Why the figures cannot be written; empty if they can, or if METRICS is off."""
    if not target.conf.METRICS:
        return ""
    return _error_at(target, FIGURES["day"], TRIED_IN_FIGURES)


def _error_at(target: Target, key: bytes, commands: Sequence[Sequence[str]]) -> str:
    try:
        answers = run(target.client, Call(TRY, (key,), (json.dumps(commands),))).value
    except ResponseError as error:
        return str(error)
    return f"{_text(answers[0])} is not allowed ({_text(answers[1])})" if answers else ""


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
