"""How a flight ends: with a value, without one, or because its leader is broken off."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from redis.exceptions import RedisError

from ..locking.calls import is_outage
from ..locking.flight_scripts import END_FLIGHT, STORE
from ..locking.hold import printable
from ..locking.keys import flight_key, flight_stream
from ..locking.scripts import Call
from .steps import Producer, Run, Steps

__all__ = ["fail", "run_or_end", "store"]

logger = logging.getLogger("django_redis_lock.flights")

#: Milliseconds the end of a flight can be read after it: a follower may be late to its stream.
STREAM_LIFETIME = 10_000


def store(
    keys: Sequence[bytes],
    token: bytes,
    kept: Mapping[bytes, bytes | int],
    producer: Producer,
    missing: bool,
) -> Steps:
    """End flights, each with its value if there is one, in one trip and if Redis can be reached: a
    computed value is not lost because it cannot.

    Args:
        kept: the values as Redis is to keep them.
        missing: there was no value when the flights began.

    Returns: for each whether it was the leader's still; None: not known.
    """
    about = (producer.lifetime, STREAM_LIFETIME, int(missing))
    calls = (
        Call(STORE, _keys(key, token), (token, kept[key], *about))
        if key in kept
        else _ending(key, token)
        for key in keys
    )
    try:
        return [bool(mine) for mine in (yield from run_or_end(keys, token, *calls))]
    except (RedisError, OSError) as error:
        logger.warning("Could not store %s: %s", _named(keys), error)
        if not is_outage(error):  # Redis will not have it, so nobody is to wait for it.
            yield from fail(keys, token)
        return [None for _ in keys]


def fail(keys: Sequence[bytes], token: bytes, message: str = "", pause: int = 0) -> Steps:
    """End flights without a value, if Redis can be reached; for ``pause`` ms nobody is to try
    again."""
    try:
        yield from run_or_end(keys, token, *(_ending(key, token, message, pause) for key in keys))
    except (RedisError, OSError) as error:
        logger.warning("Could not end the flight of %s: %s", _named(keys), error)


def run_or_end(keys: Sequence[bytes], token: bytes, *calls: Call) -> Steps:
    """The replies to ``calls``. Who is broken off meanwhile (cancelled, Ctrl-C, a time limit)
    cannot know whether it leads the flights of ``keys``; from then on it does not, and nobody waits
    for it."""
    try:
        return (yield Run(calls))
    except (RedisError, OSError, GeneratorExit):
        raise
    except BaseException:
        try:
            yield Run(tuple(_ending(key, token) for key in keys), done=True)
        except (RedisError, OSError):
            pass  # Then they end by themselves.
        raise


def _ending(key: bytes, token: bytes, message: str = "", pause: int = 0) -> Call:
    args = (token, STREAM_LIFETIME, message if pause else "", pause)
    return Call(END_FLIGHT, _keys(key, token), args)


def _keys(key: bytes, token: bytes) -> tuple[bytes, ...]:
    return key, flight_key(key), flight_stream(key, token)


def _named(keys: Sequence[bytes]) -> str:
    first = printable(keys[0])
    return first if len(keys) == 1 else f"{first} and {len(keys) - 1} more"
