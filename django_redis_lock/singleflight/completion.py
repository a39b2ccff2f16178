"""How a flight ends: with a value, without one, or because its leader is broken off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from redis.exceptions import RedisError

from ..keeper import keeper
from ..locking import DeferredRelease
from ..notices import get_logger
from ..protocol import Call, flight_key, flight_stream, printable
from ..transport import Server, is_outage
from .scripts import END_FLIGHT, STORE
from .steps import Producer, Run, Steps

__all__ = ["NOTHING", "Completion", "Seen", "run_or_end"]

logger = get_logger("django_redis_lock.flights")

#: What was at a value's key when its flight began: digest and expiry, as the scripts give them.
Seen = Sequence[bytes | str]
NOTHING: Seen = ("", "0")

#: Milliseconds the end of a flight can be read after it: a follower may be late to its stream.
STREAM_LIFETIME = 10_000


class Completion(NamedTuple):
    """How the flights of one leader end.

    Attributes:
        keys: of the values.
        timeout: seconds after which the flights end by themselves.
    """

    server: Server
    keys: Sequence[bytes]
    token: bytes
    timeout: float

    def store(
        self, kept: Mapping[bytes, bytes | int], producer: Producer, replaced: Mapping[bytes, Seen]
    ) -> Steps:
        """End the flights, each with its value if there is one, in one trip and if Redis can be
        reached: a computed value is not lost because it cannot.

        Args:
            kept: the values as Redis is to keep them.
            replaced: what was there when the flights began, by key; nothing, if left out.

        Returns: for each whether it was the leader's still; None: not known.
        """
        about = (producer.lifetime, STREAM_LIFETIME)
        calls = tuple(
            Call(STORE, _keys(key, self.token), (self.token, kept[key], *about, *seen))
            if key in kept and (seen := replaced.get(key) or NOTHING)
            else _ending(key, self.token)
            for key in self.keys
        )
        try:
            mine = yield from run_or_end(self.keys, self.token, *calls)
            return [bool(one) for one in mine]
        except (RedisError, OSError) as error:
            logger.warning("Could not store %s: %s", self, error)
            if is_outage(error):
                self._later(calls)
            else:  # Redis will not have it, so nobody is to wait for it.
                yield from self.fail()
            return [None for _ in self.keys]

    def fail(self, message: str = "", pause: int = 0) -> Steps:
        """End the flights without a value, if Redis can be reached; for ``pause`` ms nobody is to
        try again."""
        calls = tuple(_ending(key, self.token, message, pause) for key in self.keys)
        try:
            yield from run_or_end(self.keys, self.token, *calls)
        except (RedisError, OSError) as error:
            logger.warning("Could not end the computation of %s: %s", self, error)
            if is_outage(error):
                self._later(calls)

    def _later(self, calls: Sequence[Call]) -> None:
        """Have the keeper do what could not be done: until then the followers, who may be back
        sooner than we were, wait for it."""
        for call in calls:
            keeper().add(DeferredRelease(self.server, call, self.timeout))

    def __str__(self) -> str:
        first = printable(self.keys[0])
        return first if len(self.keys) == 1 else f"{first} and {len(self.keys) - 1} more"


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
