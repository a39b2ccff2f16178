"""How a call is written down for Redis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..protocol import Call, Script

#: Announces to a cluster's node a call for a slot that is on its way there.
ASKING = b"*1\r\n$6\r\nASKING\r\n"


def pack_words(*words: bytes) -> bytes:
    """A command as Redis reads it. Only bytes: hiredis 3.5, with which redis-py packs, crashes the
    process if a signal handler raises while it converts an int."""
    return b"*%d\r\n%b" % (len(words), _bulks(words))


def _bulks(words: Sequence[bytes]) -> bytes:
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def pack(call: Call, *, known: bool = True) -> bytes:
    """``call`` as Redis reads it (RESP): by the script's name, or, if that may not be ``known`` to
    the server, by its source, which teaches it. Nothing is converted but what a ``Call`` holds, so
    this takes a fraction of the time of redis-py's packing."""
    # What concerns many keys is not said again, and would only fill the memory.
    head = _head if len(call.keys) < 10 else _head.__wrapped__
    parts = [head(call.script, call.keys, len(call.args), known)]
    for arg in call.args:
        if isinstance(arg, bytes):
            parts.append(b"$%d\r\n%b\r\n" % (len(arg), arg))
        elif type(arg) is int or (isinstance(arg, str) and len(arg) <= MAX_CACHED_CHARACTERS):
            parts.append(_short(arg))
        else:
            parts.append(_bulk(arg))
    return b"".join(parts)


#: The longest text that is kept packed, in characters. Larger arguments would pile up in memory.
MAX_CACHED_CHARACTERS = 64


def _bulk(arg: Any) -> bytes:
    """A text, a number (also of a subclass of ``int``, as an enumeration), or any buffer. A label
    or a thread's name that has no encoding must not keep its lock from being renewed."""
    if isinstance(arg, str):
        data = arg.encode(errors="backslashreplace")
    else:
        data = b"%d" % arg if isinstance(arg, int) else bytes(arg)
    return b"$%d\r\n%b\r\n" % (len(data), data)


#: Lifetimes, modes and the like come again and again. Only of exact types: True equals 1.
_short = lru_cache(maxsize=256)(_bulk)


def pack_all(calls: Sequence[Call]) -> bytes:
    """All ``calls`` for one sending; the first of each script by its source, so that none can be
    unknown when the next is on its way."""
    known: set[str] = set()
    parts = []
    for call in calls:
        parts.append(pack(call, known=call.script.sha in known))
        known.add(call.script.sha)
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _head(script: Script, keys: tuple[bytes, ...], args: int, known: bool) -> bytes:
    """What does not change from call to call."""
    verb, body = (b"EVALSHA", script.sha) if known else (b"EVAL", script.source)
    words = (verb, body.encode(), b"%d" % len(keys), *keys)
    return b"*%d\r\n%b" % (len(words) + args, _bulks(words))
